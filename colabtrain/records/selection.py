"""Which records are trained on, which are held out, and what was dropped and why.

The calibration hold-out is taken by a hash of a record's group (or id), before any other cut, so that adding a data
set or a limit never moves an old calibration record into training.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from colabtrain.config import TrainConfig
from colabtrain.records.schema import Record
from colabtrain.records.snake import is_snake_game

Predicate = Callable[[Record], bool]
PREDICATES: Mapping[str, Predicate] = {"snake_game": is_snake_game}  # what TrainConfig.exclude may name
CALIBRATION_SPLIT = "calibration"
HELD_OUT_SPLITS = ("test", "val", "validation")  # the first one that has records is the held-out set


@dataclass(frozen=True)
class Selection:
    """train, calibration and held-out records; held_out_name says which split the last one is; dropped counts
    (reason, task)."""

    train: list[Record]
    calibration: list[Record]
    held_out: list[Record]
    held_out_name: str
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])


def select(records: Sequence[Record], config: TrainConfig, exclude: Predicate | None = None) -> Selection:
    """Split `records`. exclude: drops the records it is true for, beside those that config.exclude names.

    Records of split `calibration` join those held out of train (calibration_share=0: they are the only ones).
    Raises ValueError when nothing is left to train on, or naming the record that `exclude` raised for.
    """
    dropped: Counter[tuple[str, str]] = Counter()
    predicates = [(name, PREDICATES[name]) for name in config.exclude]
    if exclude is not None:
        predicates.append((getattr(exclude, "__name__", "exclude"), exclude))
    by_split: dict[str, list[Record]] = {}
    for record in records:
        if reason := _unwanted(record, config, predicates):
            dropped[reason, record.task] += 1
        else:
            by_split.setdefault(record.split, []).append(record)
    train, calibration = _hold_out(by_split.pop("train", []), config)
    calibration += by_split.pop(CALIBRATION_SPLIT, [])
    name = next((split for split in HELD_OUT_SPLITS if by_split.get(split)), None)
    held_out = by_split.pop(name) if name else calibration
    for split, unused in by_split.items():
        dropped.update((f"split {split!r} is not used", record.task) for record in unused)
    if config.max_records is not None and len(train) > config.max_records:
        dropped.update((f"beyond max_records={config.max_records}", record.task) for record in train[config.max_records :])
        train = train[: config.max_records]
    if not train:
        splits = dict(Counter(record.split for record in records))
        why = "; ".join(f"{n} of task {task!r}: {reason}" for (reason, task), n in dropped.items()) or "none"
        raise ValueError(
            f"no record is left to train on (splits found: {splits}; dropped: {why}; set aside for calibration: {len(calibration)}); "
            "give more records of split 'train'"
        )
    return Selection(train, calibration, held_out, name or "calibration hold-out", dropped)


def _unwanted(record: Record, config: TrainConfig, predicates: Sequence[tuple[str, Predicate]]) -> str | None:
    """Why `record` is not used on any path; None: it is."""
    if record.task in config.exclude_tasks:
        return "excluded task"
    for name, predicate in predicates:
        try:
            excluded = bool(predicate(record))
        except Exception as error:
            raise ValueError(
                f"record {record.id!r} of task {record.task!r}: the predicate {name} raised {type(error).__name__}: {error}; "
                "it must say of any record whether to leave it out"
            ) from error
        if excluded:
            return f"excluded as {name}"
    if config.modalities is not None and record.modality not in config.modalities:
        return f"modality {record.modality!r} is not among {config.modalities}"
    return None


def _hold_out(records: Iterable[Record], config: TrainConfig) -> tuple[list[Record], list[Record]]:
    parts: tuple[list[Record], list[Record]] = ([], [])
    for record in records:
        name = f"calibration/{record.group or record.id}".encode()
        draw = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big")  # crc32 is uneven on numbered ids
        parts[draw < config.calibration_share * 2**32].append(record)
    return parts
