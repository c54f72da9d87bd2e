"""How good each sub-network is on held-out records, and what guessing would have reached.

accuracy: the most probable option is the answer (ys); of n tied ones each counts 1/n. nll: cross-entropy with the
target in nats. brier: squared error of the probabilities, summed over options. ece: expected calibration error of the
top option, 15 equal-width bins (Naeini et al. 2015). Baselines know only the training targets of the same question
(task, name, options): prior = their mean, majority = its most frequent answer, uniform = nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colabtrain.config import SubnetConfig, TrainConfig
from colabtrain.elastic import objective
from colabtrain.elastic.batches import build, fill, plan_record
from colabtrain.records.caps import cap_record
from colabtrain.records.schema import Record, question_key

ECE_BINS = 15
FLOOR = 1e-9  # a prior that never saw an option gives it this much, so that its nll stays finite


@dataclass(frozen=True)
class Prior:
    """What training knows of one question: the mean target, and its most frequent answer."""

    mean: list[float]
    majority: int


Priors = dict[tuple[str, ...], Prior]


@dataclass(frozen=True)
class Outcome:
    """One answered question."""

    kind: str
    question: str
    accuracy: float
    nll: float
    brier: float
    confidence: float


def outcome(record: Record, index: int, probabilities: Sequence[float]) -> Outcome:
    target, y = record.targets[index], record.ys[index]
    p = torch.tensor(probabilities, dtype=torch.float64)
    t = torch.tensor(target, dtype=torch.float64)
    key = question_key(record, index)
    return Outcome(
        kind=record.qs[index]["type"],
        question=f"{key[0]}/{key[1]}",
        accuracy=float(p[y] == p.max()) / max(1, int((p == p.max()).sum())),  # a tie is a coin toss; NaN is wrong
        nll=float(-(t * p.clamp(min=FLOOR).log()).sum()),
        brier=float((p - t).square().sum()),
        confidence=float(p.max()),
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """n, accuracy, nll, brier and ece over `outcomes` (at least one)."""
    n = len(outcomes)
    means = {name: sum(getattr(o, name) for o in outcomes) / n for name in ("accuracy", "nll", "brier")}
    return {"n": n, **means, "ece": calibration_error([(o.accuracy, o.confidence) for o in outcomes])}


def calibration_error(answers: Sequence[tuple[float, float]]) -> float:
    """ECE of `answers` (at least one): (accuracy, confidence) pairs."""
    bins: dict[int, list[float]] = {}
    for accuracy, confidence in answers:
        bins.setdefault(min(ECE_BINS - 1, int(confidence * ECE_BINS)), []).append(accuracy - confidence)
    return sum(abs(sum(gaps)) for gaps in bins.values()) / len(answers)


def grouped(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """summary() overall, by_type and by_question."""

    def by(key: Callable[[Outcome], str]) -> dict[str, dict[str, float]]:
        groups: dict[str, list[Outcome]] = {}
        for o in outcomes:
            groups.setdefault(key(o), []).append(o)
        return {name: summary(members) for name, members in sorted(groups.items())}

    return {"overall": summary(outcomes), "by_type": by(lambda o: o.kind), "by_question": by(lambda o: o.question)}


def evaluate(model: Any, records: Sequence[Record], subnets: Mapping[str, SubnetConfig], config: TrainConfig) -> dict[str, Any]:
    """grouped() results of each sub-network over `records`, all options shown, no dropout."""
    shown = [cap_record(record, config.max_state_chars) for record in records]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in subnets}
    with model.lent():
        for name, part, logits in logits_of(model, shown, subnets, config):
            outcomes[name].extend(_outcomes(part, logits))
    return {name: grouped(answered) for name, answered in outcomes.items()}


@torch.no_grad()
def logits_of(
    model: Any, records: Sequence[Record], subnets: Mapping[str, SubnetConfig], config: TrainConfig
) -> Iterator[tuple[str, list[Record], Tensor]]:
    """(sub-network, records, logits [Q, K] of their questions) for each batch of `records` as they are, no dropout."""
    lengths = [len(plan_record(model, record, subnets)) for record in records]
    order = sorted(range(len(records)), key=lengths.__getitem__)
    for indices in fill(order, lengths, 4 * config.batch_size, config.token_budget):
        part = [records[i] for i in indices]
        batch = build(model, part, subnets)
        for name, fc in subnets.items():
            with model.width(fc):
                logits = objective.logit_matrix(model.scores(batch.packed[fc.n_latents], fc), batch.option_index)
            yield name, part, logits


def _outcomes(records: Sequence[Record], logits: Tensor) -> list[Outcome]:
    rows = iter(torch.softmax(logits.double(), dim=-1).cpu())
    return [outcome(record, i, next(rows)[: len(target)].tolist()) for record in records for i, target in enumerate(record.targets)]


def priors(records: Sequence[Record]) -> Priors:
    """The mean target and the most frequent answer of every question among `records`."""
    sums: dict[tuple[str, ...], list[float]] = {}
    answers: dict[tuple[str, ...], Counter[int]] = {}
    for record in records:
        for i, target in enumerate(record.targets):
            key = question_key(record, i)
            sums[key] = [a + b for a, b in zip(sums.get(key, [0.0] * len(target)), target, strict=True)]
            answers.setdefault(key, Counter())[record.ys[i]] += 1
    return {key: Prior([value / answers[key].total() for value in total], answers[key].most_common(1)[0][0]) for key, total in sums.items()}


def baselines(records: Sequence[Record], known: Priors) -> dict[str, Any]:
    """grouped() results of guessing; a question that training never saw is guessed uniformly."""
    guesses: dict[str, list[Outcome]] = {"prior": [], "majority": [], "uniform": []}
    for record in records:
        for i, target in enumerate(record.targets):
            uniform = [1.0 / len(target)] * len(target)
            prior = known.get(question_key(record, i), Prior(uniform, 0))
            majority = [float(k == prior.majority) for k in range(len(target))]
            for name, guess in (("prior", prior.mean), ("majority", majority), ("uniform", uniform)):
                guesses[name].append(outcome(record, i, guess))
    return {name: grouped(outcomes) for name, outcomes in guesses.items()}
