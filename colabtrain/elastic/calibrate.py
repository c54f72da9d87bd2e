"""One temperature for each question type and number of options, fitted on held-out records; p = softmax(logits / T).

Temperature scaling (Guo et al. 2017, arXiv:1706.04599) by the negative log-likelihood of soft targets. It is convex in
1 / T, so it has one valley in log T, and a golden-section search over [0.05, 20] finds its bottom. A group of fewer
than 20 questions falls back: a bucket to its type, a type to 1. No order among options and no accuracy changes.

Reports are plain JSON (numbers, strings, lists of strings), to be written to a diary and beside an adapter. ECE is
that of the evaluation; where targets are soft, an answer counts as right by the target's mass on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from colabtrain.config import SubnetConfig, TrainConfig
from colabtrain.elastic.batches import MASKED
from colabtrain.elastic.evaluate import calibration_error, logits_of
from colabtrain.records.caps import cap_record
from colabtrain.records.schema import SUM_TOLERANCE, Record

LOWEST, HIGHEST = 0.05, 20.0
MIN_QUESTIONS = 20  # in a group, to have a temperature of its own
BUCKETS = ((2, "2"), (5, "3-5"), (10, "6-10"), (30, "11-30"))  # the most options of a bucket, and its name
TOLERANCE = 1e-7  # of log T
GOLDEN = (math.sqrt(5) - 1) / 2

Item = tuple[str, int, Sequence[float], Sequence[float]]  # type, number of options, logits and target in option order


class Fit(TypedDict):
    """One group of n questions. source: what its temperature comes from, `bucket`, `type` or `none` (it is 1); edge:
    `low` or `high` where the search ended at that end of its range, else empty."""

    temperature: float
    source: str
    edge: str
    n: int
    nll_before: float
    nll_after: float
    ece_before: float
    ece_after: float


class Temperatures(TypedDict):
    """The fits by `type` and by `type/bucket`, all questions together, and what a person should know of them."""

    types: dict[str, Fit]
    buckets: dict[str, Fit]
    overall: dict[str, float]
    notes: list[str]


def bucket(num_options: int) -> str:
    """The name of the bucket that a question with `num_options` options belongs to."""
    return next((name for most, name in BUCKETS if num_options <= most), "31+")


def temperature(report: Mapping[str, Any], kind: str, num_options: int) -> float:
    """T for a question of type `kind`: its bucket's, else its type's, else 1. report: a Temperatures, read from JSON or not."""
    fit = report["buckets"].get(f"{kind}/{bucket(num_options)}") or report["types"].get(kind)
    return float(fit["temperature"]) if fit else 1.0


def fit_by_type(items: Iterable[Item]) -> dict[str, Fit]:
    """A temperature for each question type. Raises ValueError as fit() does."""
    return {kind: _fitted(group, "type") for kind, group in _by(_checked(items), lambda item: item[0]).items()}


def fit(items: Iterable[Item]) -> Temperatures:
    """A temperature for each type and for each (type, bucket).

    A question with one option says nothing of T and is left out. Raises ValueError when no item is left, and naming
    the first item whose logits or target are not finite, or do not match.
    """
    checked = _checked(items)
    types = fit_by_type(checked)
    groups = _by(checked, lambda item: f"{item[0]}/{bucket(item[1])}")
    buckets = {name: _fitted(group, "bucket", types[name.split("/")[0]]) for name, group in groups.items()}
    temperatures: Temperatures = {"types": types, "buckets": buckets, "overall": {}, "notes": []}
    temperatures["overall"] = _overall(checked, temperatures)
    temperatures["notes"] = [note for name, found in buckets.items() if (note := _note(name, found))]
    return temperatures


def calibrate(model: Any, records: Sequence[Record], subnets: Mapping[str, SubnetConfig], config: TrainConfig) -> dict[str, Temperatures]:
    """fit() of each sub-network on `records`, which must not have been trained on; cut and capped like training's.

    The model's modes, gradients and the random state are left as they are. Raises ValueError when there are no records.
    """
    if not records:
        raise ValueError("there are no calibration records; raise calibration_share, or give records of split 'calibration'")
    shown = [cap_record(record, config.max_state_chars, config.max_options, f"{config.seed}/calibration") for record in records]
    items: dict[str, list[Item]] = {name: [] for name in subnets}
    with model.lent():
        for name, part, logits in logits_of(model, shown, subnets, config):
            items[name].extend(_items(part, logits))
    return {name: fit(answered) for name, answered in items.items()}


def _items(records: Sequence[Record], logits: Tensor) -> Iterable[Item]:
    rows = iter(logits.double().cpu())
    for record in records:
        for question, target in zip(record.qs, record.targets, strict=True):
            yield question["type"], len(target), next(rows)[: len(target)].tolist(), target


def _checked(items: Iterable[Any]) -> list[Item]:
    if not isinstance(items, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  (a person's own script)
        raise ValueError(f"items is {items!r}; give a list of (type, number of options, logits, target)")
    checked = list[Item]()
    for i, item in enumerate(items):
        _check_item(f"item {i}", item)
        if item[1] > 1:
            checked.append(tuple(item))
    if not checked:
        raise ValueError("there are no questions (with two options or more) to calibrate on; give at least one")
    return checked


def _check_item(name: str, item: Any) -> None:
    is_item = isinstance(item, Sequence) and len(item) == 4 and isinstance(item[0], str) and hasattr(item[1], "__index__")
    if not is_item or not all(hasattr(values, "__len__") for values in item[2:]):
        raise ValueError(f"{name} is {repr(item)[:80]}; it must be (type, number of options, logits, target)")
    kind, num_options, logits, target = item
    name = f"{name} ({kind}, {num_options} options)"
    if not num_options == len(logits) == len(target):
        raise ValueError(f"{name} has {len(logits)} logits and {len(target)} target probabilities")
    for what, values in (("logits", logits), ("target", target)):
        if not all(not isinstance(value, str) and math.isfinite(value) for value in values):
            raise ValueError(f"{name} has {what} {list(values)[:8]}, which are not all finite")
    if min(target) < 0 or abs(float(sum(target)) - 1.0) > SUM_TOLERANCE:
        raise ValueError(f"{name} has target {list(target)[:8]}; it must be probabilities that sum to 1")


def _by(items: Iterable[Item], key: Callable[[Item], str]) -> dict[str, list[Item]]:
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return dict(sorted(groups.items()))


@dataclass(frozen=True)
class _Group:
    """logits, targets [Q, K] in float64; absent options have logit MASKED and target 0."""

    logits: Tensor
    targets: Tensor

    @staticmethod
    def of(items: Sequence[Item], temperatures: Sequence[float] | None = None) -> _Group:
        widest = max(item[1] for item in items)
        logits = [[*item[2], *[MASKED] * (widest - item[1])] for item in items]
        targets = [[*item[3], *[0.0] * (widest - item[1])] for item in items]
        matrix = torch.tensor(logits, dtype=torch.float64)
        if temperatures is not None:
            matrix = matrix / torch.tensor(temperatures, dtype=torch.float64)[:, None]
        return _Group(matrix, torch.tensor(targets, dtype=torch.float64))

    def nll(self, t: float) -> float:
        return float(-(self.targets * torch.log_softmax(self.logits / t, dim=-1)).sum(-1).mean())

    def ece(self, t: float) -> float:
        p = torch.softmax(self.logits / t, dim=-1)
        confidence = p.max(dim=-1).values
        top = p == confidence[:, None]  # of tied options each is the answer as often as the others
        right = (self.targets * top).sum(-1) / top.sum(-1)
        return calibration_error(list(zip(right.tolist(), confidence.tolist(), strict=True)))

    def best(self) -> tuple[float, str]:
        """(T, edge). Where nothing is better than T = 1, T is 1; where nothing is better than an edge, the edge."""
        low, high = math.log(LOWEST), math.log(HIGHEST)
        inside = math.exp(golden_section(lambda log_t: self.nll(math.exp(log_t)), low, high))
        t = min((1.0, LOWEST, HIGHEST, inside), key=self.nll)  # the first one of equals
        return t, {LOWEST: "low", HIGHEST: "high"}.get(t, "")


def golden_section(f: Callable[[float], float], low: float, high: float) -> float:
    """The place of the minimum of `f`, which has one valley, between low and high, to TOLERANCE (Kiefer 1953)."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    f_left, f_right = f(left), f(right)
    while high - low > TOLERANCE:
        if f_left <= f_right:
            high, right, f_right = right, left, f_left
            left = high - GOLDEN * (high - low)
            f_left = f(left)
        else:
            low, left, f_left = left, right, f_right
            right = low + GOLDEN * (high - low)
            f_right = f(right)
    return (low + high) / 2


def _fitted(items: Sequence[Item], source: str, fallback: Fit | None = None) -> Fit:
    group = _Group.of(items)
    if len(items) >= MIN_QUESTIONS:
        t, edge = group.best()
    elif fallback is not None:
        t, edge, source = fallback["temperature"], fallback["edge"], fallback["source"]
    else:
        t, edge, source = 1.0, "", "none"
    return {
        "temperature": t,
        "source": source,
        "edge": edge,
        "n": len(items),
        "nll_before": group.nll(1.0),
        "nll_after": group.nll(t),
        "ece_before": group.ece(1.0),
        "ece_after": group.ece(t),
    }


def _overall(items: Sequence[Item], fitted: Temperatures) -> dict[str, float]:
    before, after = _Group.of(items), _Group.of(items, [temperature(fitted, item[0], item[1]) for item in items])
    return {
        "n": len(items),
        "nll_before": before.nll(1.0),
        "nll_after": after.nll(1.0),
        "ece_before": before.ece(1.0),
        "ece_after": after.ece(1.0),
    }


def _note(name: str, found: Fit) -> str:
    notes = list[str]()
    if found["source"] != "bucket":
        instead = "its type's temperature" if found["source"] == "type" else "temperature 1, for its type has too few as well"
        notes.append(f"{found['n']} questions are fewer than {MIN_QUESTIONS}: it takes {instead}")
    if found["edge"]:
        notes.append(f"T = {found['temperature']:g} is an edge of the search; the logits say little about probabilities")
    return f"{name}: {'; '.join(notes)}" if notes else ""
