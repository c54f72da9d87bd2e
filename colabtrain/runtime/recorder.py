"""Recorder: from step reports to the diary, with the averages and totals that survive a resume.

What a step reports may be tensors still being computed on an accelerator; they are read several steps at once, so that
a step needs no host sync. The time of the read belongs to the steps that were waited for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from colabtrain.device import memory_bytes
from colabtrain.runtime.diary import Diary, duration
from colabtrain.task import StepReport

EMA_DECAY = 0.98
READ_EVERY_STEPS, READ_EVERY_SECONDS = 10, 2.0  # where losses are computed on an accelerator
MAX_SKIPPED_IN_A_ROW = 20


class Recorder:
    """Writes step events, in order. totals is JSON and travels with the checkpoint."""

    def __init__(self, diary: Diary, log_every: int, num_steps: int) -> None:
        self.diary, self.log_every, self.num_steps = diary, log_every, num_steps
        self.totals: dict[str, Any] = {"ema": {}, "averaged_steps": {}, "seconds": 0.0, "tokens": 0, "questions": 0}
        self.totals |= {"skipped": 0, "skipped_in_a_row": 0, "out_of_memory": 0, "set_aside": 0}
        self.seconds_per_step: float | None = None
        self._pending: list[tuple[int, StepReport, float]] = []
        self._first = True

    def count(self, name: str) -> int:
        """Count what happened beside the steps: out_of_memory, set_aside. Steps before it are written before it."""
        self.flush()
        self.totals[name] += 1
        return self.totals[name]

    def add(self, step: int, report: StepReport, seconds: float) -> None:
        """Take the report of update `step` (1-based), which took the host `seconds`.

        Raises FloatingPointError after more than 20 skipped steps in a row.
        """
        self._pending.append((step, report, seconds))
        on_accelerator = any(isinstance(value, Tensor) and value.device.type != "cpu" for value in report.loss.values())
        waited = sum(pending[2] for pending in self._pending)
        if not on_accelerator or len(self._pending) >= READ_EVERY_STEPS or waited >= READ_EVERY_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending; always before a checkpoint, so that its diary holds its steps."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        started = time.perf_counter()
        numbers = [_read(report) for _, report, _ in pending]
        waited = (time.perf_counter() - started + sum(seconds for *_, seconds in pending)) / len(pending)
        for (step, report, _), read in zip(pending, numbers, strict=True):
            self._write(step, report, read, waited)
        if (in_a_row := self.totals["skipped_in_a_row"]) > MAX_SKIPPED_IN_A_ROW:
            raise FloatingPointError(
                f"{in_a_row} steps in a row had a loss or gradient that is not finite; the weights are those of step "
                f"{pending[-1][0] - in_a_row:,}: lower the learning rates, or look at the records of these steps"
            )

    def _write(self, step: int, report: StepReport, read: dict[str, Any], seconds: float) -> None:
        skipped = bool(read["skipped"])
        self.totals["skipped_in_a_row"] = self.totals["skipped_in_a_row"] + 1 if skipped else 0
        if not skipped:
            self._average(read["loss"])
        for name, more in (("seconds", seconds), ("tokens", report.tokens), ("questions", report.questions), ("skipped", skipped)):
            self.totals[name] += more
        self.totals["epoch"] = report.epoch
        usual = self.seconds_per_step
        self.seconds_per_step = seconds if usual is None else 0.9 * usual + 0.1 * seconds
        memory = memory_bytes()
        spoken = self._first or step % self.log_every == 0 or step == self.num_steps
        self._first = False
        self.diary.write(
            "step",
            self._skip_line(step) if skipped else self._line(step, memory) if spoken else None,
            step=step,
            epoch=report.epoch,
            **read,
            ema=dict(self.totals["ema"]),
            lr=dict(report.lr),
            tokens=report.tokens,
            questions=report.questions,
            seconds=seconds,
            memory=memory,
        )

    def _average(self, loss: Mapping[str, float]) -> None:
        """EMA(0.98) that starts as the plain mean, so that the first loss does not weigh for a hundred steps."""
        ema: dict[str, float] = self.totals["ema"]
        counts: dict[str, int] = self.totals["averaged_steps"]
        for name, value in loss.items():
            if math.isfinite(value):
                counts[name] = counts.get(name, 0) + 1
                weight = max(1 - EMA_DECAY, 1 / counts[name])
                ema[name] = (1 - weight) * ema.get(name, value) + weight * value

    def _line(self, step: int, memory: Mapping[str, int]) -> str:
        losses = ", ".join(f"{name} {value:.4f}" for name, value in self.totals["ema"].items())
        pace = self.seconds_per_step or 0.0
        peak = memory.get("gpu_peak", memory.get("ram_peak", 0)) / 2**30
        left = duration((self.num_steps - step) * pace)
        counts = {"steps skipped": "skipped", "times out of memory": "out_of_memory", "items set aside": "set_aside"}
        told = "".join(f", {self.totals[name]:,} {what}" for what, name in counts.items() if self.totals[name])
        return f"step {step:,}/{self.num_steps:,}: loss {losses} (EMA), {pace:.3f} s/step, {left} left, peak {peak:.1f} GiB{told}"

    def _skip_line(self, step: int) -> str:
        return f"step {step:,}/{self.num_steps:,} skipped: its loss or gradient is not finite; the weights stay as they were"


def _read(report: StepReport) -> dict[str, Any]:
    return {
        "loss": _floats(report.loss),
        "parts": {name: _floats(parts) for name, parts in report.parts.items()},
        "grad_norm": _floats(report.grad_norm),
        "scale": None if report.scale is None else _float(report.scale),
        "skipped": bool(_float(report.skipped)),
    }


def _floats(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    return {name: _float(value) for name, value in values.items()}


def _float(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
