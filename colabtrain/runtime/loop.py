"""The loop: gate, step, record, checkpoint. It runs on the worker thread and knows any Task.

What a step reports may be tensors still being computed; they are read several steps at once, always before the
checkpoint that contains them, so the diary in a checkpoint is whole.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from colabtrain.config import RunConfig
from colabtrain.device import machine, memory_bytes
from colabtrain.runtime import checkpoint
from colabtrain.runtime.checkpoint import Checkpoint, CheckpointError
from colabtrain.runtime.diary import DIARY_FILE, Diary, duration
from colabtrain.task import Describes, Evaluates, StepReport, Task

EMA_DECAY = 0.98
READ_EVERY = 10  # steps whose losses are read together where they are computed on an accelerator


class Gate(Protocol):
    """What the loop asks at each step boundary."""

    def passed(self, step: int) -> bool:
        """Wait while paused; False when the run is to stop."""
        ...


def train(task: Task, diary: Diary, folder: Path, config: RunConfig, gate: Gate, resume: bool, on_step: Any) -> bool:
    """Train to the end or to a stop. True when all steps are done. on_step(step, num_steps) follows the progress."""
    task.prepare()
    if isinstance(task, Describes):
        for line in task.describe():
            diary.log(line)
    keeper = Keeper(task, diary, folder, config)
    recorder = Recorder(diary, config.log_every, task.num_steps)
    step = keeper.restore(recorder, resume)
    on_step(step, task.num_steps)
    if step >= task.num_steps:
        diary.log(f"nothing to train: step {step:,} is reached and the run has {task.num_steps:,}; ask for more steps or epochs to go on")
    while step < task.num_steps:
        if not gate.passed(step):
            keeper.save(step, recorder)
            return False
        started = time.perf_counter()
        report = task.step(step)
        step += 1
        recorder.add(step, report, time.perf_counter() - started)
        on_step(step, task.num_steps)
        if config.eval_every and step % config.eval_every == 0 and step < task.num_steps:
            evaluate(task, diary, recorder, step)
        if keeper.due(step):
            keeper.save(step, recorder)
        time.sleep(0)  # let the kernel's other threads have the interpreter
    recorder.flush()
    evaluate(task, diary, recorder, step)
    keeper.save(step, recorder)
    return True


def evaluate(task: Task, diary: Diary, recorder: Recorder, step: int) -> None:
    recorder.flush()
    if isinstance(task, Evaluates) and (fields := task.evaluate()):
        overall = ", ".join(f"{name} {result['overall']['nll']:.4f}" for name, result in fields["results"].items())
        prior = fields["baselines"]["prior"]["overall"]["nll"]
        text = f"evaluation at step {step:,} on {fields['split']}: nll {overall} (class prior {prior:.4f})"
        diary.write("evaluation", text, step=step, **fields)


class Recorder:
    """Writes step events; keeps the moving averages and totals that survive a resume."""

    def __init__(self, diary: Diary, log_every: int, num_steps: int) -> None:
        self.diary, self.log_every, self.num_steps = diary, log_every, num_steps
        self.totals: dict[str, Any] = {"ema": {}, "averaged_steps": {}, "seconds": 0.0, "tokens": 0, "questions": 0}
        self.seconds_per_step: float | None = None
        self._pending: list[tuple[int, StepReport, float]] = []
        self._first = True

    def add(self, step: int, report: StepReport, seconds: float) -> None:
        self._pending.append((step, report, seconds))
        on_accelerator = any(isinstance(value, Tensor) and value.device.type != "cpu" for value in report.loss.values())
        if len(self._pending) >= (READ_EVERY if on_accelerator else 1):
            self.flush()

    def flush(self) -> None:
        for step, report, seconds in self._pending:
            self._write(step, report, seconds)
        self._pending.clear()

    def _write(self, step: int, report: StepReport, seconds: float) -> None:
        loss = _read(report.loss)
        self._average(loss)
        self.totals["epoch"] = report.epoch
        self.totals["seconds"] += seconds
        self.totals["tokens"] += report.tokens
        self.totals["questions"] += report.questions
        previous = self.seconds_per_step
        self.seconds_per_step = seconds if previous is None else 0.9 * previous + 0.1 * seconds
        memory = memory_bytes()
        text = self._line(step, memory) if self._first or step % self.log_every == 0 or step == self.num_steps else None
        self._first = False
        self.diary.write(
            "step",
            text,
            step=step,
            epoch=report.epoch,
            loss=loss,
            ema=dict(self.totals["ema"]),
            parts={name: _read(parts) for name, parts in report.parts.items()},
            lr=dict(report.lr),
            grad_norm=_read(report.grad_norm),
            scale=report.scale,
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
        return f"step {step:,}/{self.num_steps:,}: loss {losses} (EMA), {pace:.3f} s/step, {left} left, peak {peak:.1f} GiB"


def _read(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    return {name: float(value.detach() if isinstance(value, Tensor) else value) for name, value in values.items()}


class Keeper:
    """Saves and restores one run's checkpoints. A save that fails is said and tried again at the next interval."""

    def __init__(self, task: Task, diary: Diary, folder: Path, config: RunConfig) -> None:
        self.task, self.diary, self.config = task, diary, config
        self.folder = folder / "checkpoints"
        self._saved_step, self._saved_time, self._wait = 0, time.monotonic(), config.first_checkpoint_seconds

    def due(self, step: int) -> bool:
        waited = time.monotonic() - self._saved_time
        return step % self.config.checkpoint_every == 0 or waited >= self._wait

    def save(self, step: int, recorder: Recorder) -> None:
        """Save step `step` unless it is the newest one already."""
        recorder.flush()
        if step == self._saved_step:
            return
        started = time.perf_counter()
        tensors, meta = self.task.state()
        state = {
            "fingerprint": self.task.fingerprint(),
            "task": meta,
            "totals": recorder.totals,
            "run_config": dataclasses.asdict(self.config),
            "machine": machine(),
        }
        try:
            snapshot = checkpoint.capture(step, tensors, state, self.diary.size())
            path = checkpoint.write(self.folder, snapshot, self.diary.path)
            checkpoint.prune(path, self.config.keep_local)
        except (OSError, CheckpointError) as error:
            self.diary.write("checkpoint_failed", f"checkpoint of step {step:,} failed: {error}; training goes on", step=step)
        else:
            self._saved_step = step
            seconds = time.perf_counter() - started
            self.diary.write("checkpoint_saved", f"saved step {step:,} in {seconds:.2f} s", step=step, path=str(path), seconds=seconds)
        self._saved_time, self._wait = time.monotonic(), self.config.checkpoint_seconds

    def restore(self, recorder: Recorder, resume: bool) -> int:
        """Go on from the newest good checkpoint; returns its step, 0 on a fresh start.

        Raises ValueError with the differences when the checkpoint is of another experiment, or, with resume=False,
        when there is one at all.
        """
        if not resume and checkpoint.listed(self.folder):
            raise ValueError(f"resume=False, but {self.folder} has checkpoints; give an empty run folder, or leave resume out")
        found, rejected = checkpoint.newest_good(self.folder)
        for name, reason in rejected:
            self.diary.write("checkpoint_rejected", f"checkpoint {name} cannot be used: {reason}", name=name, reason=reason)
        if found is None:
            if rejected:
                raise ValueError(f"no checkpoint in {self.folder} can be used (see the log); move the folder away to start anew")
            self.diary.write("resumed", f"fresh start: no checkpoint in {self.folder}", step=0)
            return 0
        self._check(found)
        self.task.load(found.tensors, found.state["task"])
        checkpoint.set_rng_state(found.state["rng"])
        recorder.totals = dict(found.state["totals"])
        if changes := _differences(found.state["machine"], machine()):
            self.diary.log(f"another machine than the checkpoint's ({changes}): numbers may differ in their last bits from here on")
        self._saved_step = found.step
        self.diary.write("resumed", f"resumed from step {found.step:,} of checkpoint {found.path}", step=found.step)
        return found.step

    def _check(self, found: Checkpoint) -> None:
        saved = found.state["fingerprint"]
        mine = json.loads(json.dumps(self.task.fingerprint()))  # what it would be after a round trip: tuples are lists there
        if differences := _differences(saved, mine):
            raise ValueError(
                f"checkpoint {found.path} belongs to another experiment ({differences}); "
                "use the same data and settings, or give another run folder"
            )


def _differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
    return "; ".join(f"{name}: checkpoint {saved.get(name)!r}, now {mine.get(name)!r}" for name in names)


def adopt_diary(folder: Path) -> None:
    """Where the run folder has checkpoints but no diary (it came from elsewhere), take the newest one's."""
    newest = checkpoint.listed(folder / "checkpoints")[:1]
    if newest and not (folder / DIARY_FILE).exists() and (newest[0] / DIARY_FILE).exists():
        (folder / DIARY_FILE).write_bytes((newest[0] / DIARY_FILE).read_bytes())
