"""Which records are trained on, which are held out, and what was dropped and why.

The calibration hold-out is taken by a hash of a record's group (or id), before any other cut, so that adding a data
set or a limit never moves an old calibration record into training.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from colabtrain.config import TrainConfig
from colabtrain.records.schema import Record

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


def select(records: Sequence[Record], config: TrainConfig) -> Selection:
    """Split `records`. Raises ValueError when nothing is left to train on."""
    dropped: Counter[tuple[str, str]] = Counter()
    kept = [record for record in records if _wanted(record, config, dropped)]
    by_split: dict[str, list[Record]] = {}
    for record in kept:
        by_split.setdefault(record.split, []).append(record)
    train, calibration = _hold_out(by_split.pop("train", []), config)
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


def _wanted(record: Record, config: TrainConfig, dropped: Counter[tuple[str, str]]) -> bool:
    if record.task in config.exclude_tasks:
        dropped["excluded task", record.task] += 1
    elif config.modalities is not None and record.modality not in config.modalities:
        dropped[f"modality {record.modality!r} is not among {config.modalities}", record.task] += 1
    else:
        return True
    return False


def _hold_out(records: Iterable[Record], config: TrainConfig) -> tuple[list[Record], list[Record]]:
    parts: tuple[list[Record], list[Record]] = ([], [])
    for record in records:
        name = f"calibration/{record.group or record.id}".encode()
        draw = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big")  # crc32 is uneven on numbered ids
        parts[draw < config.calibration_share * 2**32].append(record)
    return parts
