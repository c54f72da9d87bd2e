"""What a training job tells people: what it is trained on, what was left out, what to take care of, what calibration did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colabtrain.config import TrainConfig
from colabtrain.records.schema import Record
from colabtrain.records.selection import Selection


def of_data(selection: Selection, held_out: Sequence[Record], config: TrainConfig, num_steps: int) -> list[str]:
    """Lines on the data of a run. held_out: those of the selection's that are evaluated on."""
    questions = sum(len(record.qs) for record in selection.train)
    lines = [
        f"data: {len(selection.train):,} records with {questions:,} questions to train on, {len(held_out):,} held out "
        f"({selection.held_out_name}), {len(selection.calibration):,} set aside for calibration"
    ]
    lines += [f"take care: {line}" for line in (*_shared_ids(selection, held_out), *_unknown_names(selection, held_out, config))]
    if (config.warmup_steps or 0) > num_steps:
        lines.append(
            f"take care: warmup_steps={config.warmup_steps} is more than the run's {num_steps:,} steps: it ends before its learning rates "
            "are reached"
        )
    if unused := len(selection.held_out) - len(held_out):
        lines.append(f"left out: {unused:,} held-out records beyond max_eval_records={len(held_out)}")
    return lines + [f"left out: {n:,} of task {task!r}: {why}" for (why, task), n in selection.dropped.items()]


def _shared_ids(selection: Selection, held_out: Sequence[Record]) -> list[str]:
    """A record that is both trained on and asked makes every number too good; a person may not know that there are some."""
    trained = {(record.task, record.id) for record in selection.train}
    places = {"held out": held_out, "set aside for calibration": selection.calibration}
    shared = {where: sum((record.task, record.id) in trained for record in records) for where, records in places.items()}
    return [f"{n:,} records {where} have the id of a record that is trained on" for where, n in shared.items() if n]


def _unknown_names(selection: Selection, held_out: Sequence[Record], config: TrainConfig) -> list[str]:
    tasks = {task for _, task in selection.dropped}
    kinds = {record.modality for record in (*selection.train, *held_out, *selection.calibration)}
    given = {"exclude_tasks": set(config.exclude_tasks) - set(TrainConfig.exclude_tasks) - tasks}
    given |= {"modalities": set(config.modalities or ()) - kinds}
    return [f"{option} names {', '.join(map(repr, sorted(names)))}, which no record has" for option, names in given.items() if names]


def change(name: str, report: Mapping[str, Any]) -> str:
    """How good the probabilities of the sub-network `name` were before and are after its temperatures."""
    r = report["overall"]
    return f"{name} nll {r['nll_before']:.4f} -> {r['nll_after']:.4f}, ece {r['ece_before']:.4f} -> {r['ece_after']:.4f}"
