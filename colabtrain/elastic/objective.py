"""The loss over all questions of a batch at once, as matrices; no loop over questions, no host sync.

Shapes: R flat scores, Q questions, K options of the widest question.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from colabtrain.config import TrainConfig
from colabtrain.elastic.batches import MASKED


def logit_matrix(scores: Tensor, option_index: Tensor) -> Tensor:
    """scores [R], option_index [Q, K] -> logits [Q, K]; index R reads the constant 0, R + 1 the masked logit."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # made on the device: a number that travels to it stops the host
    return (
        torch.cat([scores, scores.new_zeros(1), scores.new_full((1,), MASKED)])
        .index_select(0, option_index.flatten())
        .view_as(option_index)
    )


def decision_parts(logits: Tensor, targets: Tensor, is_score: Tensor, with_rps: bool = False) -> dict[str, Tensor]:
    """Per-question losses [Q]: `log` (soft cross-entropy), `brier` (squared error of the probabilities), and with_rps
    `rps` (ranked probability score, Epstein 1969; 0 but for `score` questions).

    logits, targets [Q, K]; absent options have logit MASKED and target 0, and so contribute nothing.
    """
    log_p = torch.log_softmax(logits, dim=-1)
    error = log_p.exp() - targets
    parts = {"log": -(targets * log_p).sum(-1), "brier": error.square().sum(-1)}
    if with_rps:
        present = logits > MASKED / 2
        parts["rps"] = torch.where(present, error.cumsum(-1), 0.0).square().sum(-1) * is_score
    return parts


def distillation(logits: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(teacher || student) of each question [Q], both softened by T (Hinton et al. 2015, arXiv:1503.02531); teacher
    [Q, K] are logits and get no gradient."""
    teacher_log_p = torch.log_softmax(teacher.detach() / temperature, dim=-1)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return (teacher_log_p.exp() * (teacher_log_p - log_p)).sum(-1) * temperature**2


def total(parts: Mapping[str, Tensor], config: TrainConfig) -> Tensor:
    """The weighted sum of parts."""
    weights = {"log": 1.0, "brier": config.brier_weight, "rps": config.rps_weight, "kl": config.kl_weight}
    terms = [weights[name] * part for name, part in parts.items()]
    return torch.stack(terms).sum(0)
