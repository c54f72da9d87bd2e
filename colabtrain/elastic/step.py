"""Forward and backward of one logical step. The mean is over the questions of the whole batch, so a batch in parts has
the same gradient as the batch at once; each sub-network's graph is freed before the next one's is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from colabtrain.config import SubnetConfig, TrainConfig
from colabtrain.elastic import objective
from colabtrain.elastic.batches import Batch, build
from colabtrain.elastic.optimizer import Optimizer
from colabtrain.records.schema import Record

Losses = dict[str, dict[str, Tensor]]  # sub-network -> part (and "total") -> scalar mean over the questions
Part = tuple[int, Sequence[Record]]  # slot of the first record in the logical batch, consecutive records


def split(records: Sequence[Record], splits: int) -> list[Part]:
    """`records` in at most `splits` parts of similar size."""
    splits = min(splits, len(records))
    bounds = [round(k * len(records) / splits) for k in range(splits + 1)]
    return [(a, records[a:b]) for a, b in pairwise(bounds)]


def accumulate(
    model: Any,
    optimizer: Optimizer,
    parts: Iterable[Part],
    num_questions: int,
    subnets: Mapping[str, SubnetConfig],
    config: TrainConfig,
    i: int,
) -> tuple[Losses, int]:
    """Add the gradient of step i to the parameters, part by part. num_questions: of all parts. Returns (losses, tokens).

    The first sub-network is the teacher of the others.
    """
    dropout = (config.lora_dropout, config.seed, i) if config.lora_dropout else None
    losses, num_tokens = Losses(), 0
    for slot, records in parts:
        batch = build(model, records, subnets, slot)
        num_tokens += batch.num_tokens
        teacher: Tensor | None = None
        for name, fc in subnets.items():
            with model.width(fc):  # forward and backward: a layer that is recomputed must be as wide as it was
                logits = _logits(model, batch, fc, dropout)
                terms = objective.decision_parts(logits, batch.targets, batch.is_score, with_rps=config.rps_weight > 0)
                if teacher is not None:
                    terms["kl"] = objective.distillation(logits, teacher, config.kl_temperature)
                terms["total"] = objective.total(terms, config)
                means = {term: value.sum() / num_questions for term, value in terms.items()}
                optimizer.scaler.scale(means["total"]).backward()
                if teacher is None and config.teacher != "none":
                    teacher = _teacher(model, batch, fc, logits.detach(), config)
            sums = losses.setdefault(name, {})
            for term, mean in means.items():
                sums[term] = sums.get(term, torch.zeros_like(mean)) + mean.detach()
    return losses, num_tokens


def _logits(model: Any, batch: Batch, fc: SubnetConfig, dropout: tuple[float, int, int] | None) -> Tensor:
    return objective.logit_matrix(model.scores(batch.packed[fc.n_latents], fc, dropout), batch.option_index)


def _teacher(model: Any, batch: Batch, fc: SubnetConfig, trained: Tensor, config: TrainConfig) -> Tensor:
    """What the others learn from: the logits of the same pass, or without dropout."""
    if config.teacher == "train" or not config.lora_dropout:
        return trained
    with torch.no_grad():
        return _logits(model, batch, fc, None)
