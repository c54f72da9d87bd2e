"""Forward and backward of one logical step. The mean is over the questions of the whole batch, so a batch in parts has
the same gradient as the batch at once; each sub-network's graph is freed before the next one's is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from colabtrain.config import SubnetConfig, TrainConfig
from colabtrain.elastic import objective
from colabtrain.elastic.batches import build
from colabtrain.elastic.optimizer import Optimizer
from colabtrain.records.schema import Record

Losses = dict[str, dict[str, Tensor]]  # sub-network -> part (and "total") -> scalar mean over the questions


def accumulate(
    model: Any,
    optimizer: Optimizer,
    records: Sequence[Record],
    subnets: Mapping[str, SubnetConfig],
    config: TrainConfig,
    i: int,
    splits: int = 1,
) -> tuple[Losses, int]:
    """Add the gradient of step i over `records` to the parameters. Returns (losses, tokens).

    The first sub-network is the teacher of the others. splits: parts the records are processed in.
    """
    num_questions = sum(len(record.qs) for record in records)
    dropout = (config.lora_dropout, config.seed, i) if config.lora_dropout else None
    losses, num_tokens = Losses(), 0
    for start, part in _parts(records, splits):
        batch = build(model, part, subnets, start)
        num_tokens += batch.num_tokens
        teacher: Tensor | None = None
        for name, fc in subnets.items():
            logits = objective.logit_matrix(model.scores(batch.packed[fc.n_latents], fc, dropout), batch.option_index)
            parts = objective.decision_parts(logits, batch.targets, batch.is_score, with_rps=config.rps_weight > 0)
            if teacher is None:
                teacher = logits.detach()
            else:
                parts["kl"] = objective.distillation(logits, teacher)
            parts["total"] = objective.total(parts, config)
            means = {part_name: part_loss.sum() / num_questions for part_name, part_loss in parts.items()}
            optimizer.scaler.scale(means["total"]).backward()
            sums = losses.setdefault(name, {})
            for part_name, mean in means.items():
                sums[part_name] = sums.get(part_name, torch.zeros_like(mean)) + mean.detach()
    return losses, num_tokens


def _parts(records: Sequence[Record], splits: int) -> list[tuple[int, Sequence[Record]]]:
    bounds = [round(k * len(records) / splits) for k in range(splits + 1)]
    return [(a, records[a:b]) for a, b in pairwise(bounds) if b > a]
