"""Keeper: when to save, what to do when a save fails, and where to go on from.

A save that fails is said and tried again at its next time; training goes on. A resume never starts from scratch in
silence while there is a checkpoint: one that cannot be used is named with the reason, and one of another experiment is
refused with the differences.
"""

from __future__ import annotations

import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from colabtrain.config import RunConfig
from colabtrain.device import is_out_of_memory, machine
from colabtrain.runtime import checkpoint
from colabtrain.runtime.checkpoint import TENSOR_GROUPS, Checkpoint, CheckpointError
from colabtrain.runtime.diary import DIARY_FILE, Diary
from colabtrain.runtime.recorder import Recorder
from colabtrain.task import Task

Hook = Callable[[Path, int], object]
SHOWN = 6  # differences in an error
LAST_SAVE_TRIES, RETRY_SECONDS = 3, 1.0


class Keeper:
    """Saves and restores one run's checkpoints."""

    def __init__(self, task: Task, diary: Diary, folder: Path, config: RunConfig, hook: Hook | None = None) -> None:
        """hook(path, step) is called after each save."""
        self._task: Task | None = task
        self.diary, self.config, self._hook = diary, config, hook
        self.folder = folder / "checkpoints"
        self.saved_step = 0  # of the newest good checkpoint; 0: none
        self._tried_at, self._wait = time.monotonic(), config.first_checkpoint_seconds
        self._why = ""  # the last save failed

    @property
    def task(self) -> Task:
        assert self._task is not None
        return self._task

    def free(self) -> None:
        """Let go of the task and the hook."""
        self._task = self._hook = None

    def due(self, step: int) -> bool:
        return step % self.config.checkpoint_every == 0 or time.monotonic() - self._tried_at >= self._wait

    def save(self, step: int, recorder: Recorder) -> bool:
        """Save step `step` unless it is the newest one already; False if that failed."""
        recorder.flush()
        if step == self.saved_step:
            return True
        started = time.perf_counter()
        try:
            tensors, meta = _checked(self.task, self.task.state())
            snapshot = checkpoint.capture(step, tensors, self._state(meta, recorder), self.diary.size())
            path = checkpoint.write(self.folder, snapshot, self.diary.path)
            checkpoint.prune(path, self.config.keep_local)
        except Exception as error:
            if not (isinstance(error, (OSError, CheckpointError, TypeError, ValueError)) or is_out_of_memory(error)):
                raise
            self._why = str(error) or type(error).__name__
            self.diary.write("checkpoint_failed", f"checkpoint of step {step:,} failed: {self._why}; training goes on", step=step)
            return False
        finally:
            self._tried_at, self._wait = time.monotonic(), self.config.checkpoint_seconds
        self.saved_step = step
        seconds = time.perf_counter() - started
        self.diary.write("checkpoint_saved", f"saved step {step:,} in {seconds:.2f} s", step=step, path=str(path), seconds=seconds)
        self._call_hook(path, step)
        return True

    def _call_hook(self, path: Path, step: int) -> None:
        if self._hook is None:
            return
        try:
            self._hook(path, step)
        except Exception as error:
            text = f"on_checkpoint failed at step {step:,}: {type(error).__name__}: {error}; training goes on"
            self.diary.write("hook_failed", text, step=step, traceback=traceback.format_exc())

    def save_last(self, step: int, recorder: Recorder) -> None:
        """Save before the run ends. Raises RuntimeError if that fails three times: nobody may believe it is safe."""
        for attempt in range(LAST_SAVE_TRIES):
            if attempt:
                time.sleep(RETRY_SECONDS)
            if self.save(step, recorder):
                return
        raise RuntimeError(
            f"step {step:,} could not be saved; the newest checkpoint is of step {self.saved_step:,} ({self._why}). Put that right (if it "
            f"is the disk, make room in {str(self.folder)!r}) and start the run again"
        )

    def save_after_failure(self, step: int, recorder: Recorder) -> None:
        """Save what the steps before the failed one reached. Whatever goes wrong here must not hide the failure."""
        try:
            self.save(step, recorder)
        except Exception as error:
            self.diary.log(f"after the failure step {step:,} could not be saved: {type(error).__name__}: {error}")

    def _state(self, meta: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
        return {
            "fingerprint": self.task.fingerprint(),
            "task": meta,
            "totals": recorder.totals,
            "num_steps": recorder.num_steps,
            "run_config": dataclasses.asdict(self.config),
            "machine": machine(),
        }

    def restore(self, recorder: Recorder, resume: bool) -> int:
        """Go on from the newest good checkpoint; returns its step, 0 on a fresh start.

        Raises ValueError when the newest good one is of another experiment, when none of those there is good, or,
        with resume=False, when there is any.
        """
        paths = checkpoint.listed(self.folder)
        refuse(self.folder, resume)
        for path in paths:
            try:
                found = checkpoint.read(path)
                self._check(found)
                self._take(found, recorder)
                return found.step
            except (CheckpointError, LookupError) as error:
                self.diary.write(
                    "checkpoint_rejected", f"checkpoint {path.name} cannot be used: {error}", name=path.name, reason=str(error)
                )
        if paths:
            raise ValueError(f"no checkpoint in {self.folder} can be used (see the log); move the folder away to start anew")
        # The event has the name of a resume so that readers drop what an earlier, never saved attempt left in the diary.
        self.diary.write("resumed", f"fresh start: no checkpoint in {self.folder}", step=0)
        return 0

    def _check(self, found: Checkpoint) -> None:
        if different := differences(found.state["fingerprint"], _through_json(self.task.fingerprint())):
            raise _another_experiment(found.path, different)

    def _take(self, found: Checkpoint, recorder: Recorder) -> None:
        totals, rng = dict(found.state["totals"]), found.state["rng"]
        try:
            self.task.load(found.tensors, found.state["task"])
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        checkpoint.set_rng_state(rng)
        recorder.totals |= totals
        self.saved_step = found.step
        self.diary.write("resumed", f"resumed from step {found.step:,} of checkpoint {found.path}", step=found.step)
        if (before := found.state["num_steps"]) != recorder.num_steps:
            self.diary.log(f"the run has {recorder.num_steps:,} steps now, {before:,} before: learning rates follow the new number")
        if changes := differences(found.state["machine"], machine()):
            self.diary.log(f"another machine than the checkpoint's ({changes}): numbers may differ in their last bits from here on")


def check_state(task: Task) -> None:
    """Raise ValueError where what state() gives cannot be saved: before the first step, not when it is to be kept."""
    try:
        answer = task.state()
    except Exception:  # it may need a step that was made
        return
    _, meta = _checked(task, answer)
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{type(task).__name__}.state() gave a meta that JSON cannot hold: {error}") from None


def _checked(task: Task, answer: Any) -> tuple[Mapping[str, Mapping[str, Tensor]], Mapping[str, Any]]:
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Mapping) and set(answer[0]) == set(TENSOR_GROUPS)):
        shown = f"a {type(answer).__name__}" if not isinstance(answer, tuple) else f"{len(answer)} values, not the tensors by these names"
        raise ValueError(f"{type(task).__name__}.state() gave {shown}; it must give ({{'trainable': {{...}}, 'optimizer': {{...}}}}, meta)")
    return answer


def refuse(folder: Path, resume: bool, identity: Callable[[], Mapping[str, Any]] | None = None) -> None:
    """Raise ValueError where a resume from the checkpoints in `folder` will be refused, as far as that is known before the
    task is prepared: with resume=False where there is any, else where identity() differs from what the newest says of it."""
    run = folder.parent
    is_one, has_some = ((path / checkpoint.MANIFEST).exists() for path in (run, next(iter(checkpoint.listed(run)), run)))
    if is_one or has_some:  # the diary of a new run would spoil the checkpoint
        owner = run.parent.parent if is_one else run.parent
        raise ValueError(f"run_dir: {run} is part of the run in {owner}; give that folder to go on, or another one")
    paths = checkpoint.listed(folder)
    if not resume and paths:
        raise ValueError(f"resume=False, but {folder} has checkpoints; give an empty run folder, or leave resume out")
    if not paths or identity is None:
        return
    try:
        saved: dict[str, Any] = dict(json.loads((paths[0] / checkpoint.STATE).read_text())["fingerprint"])
    except (OSError, ValueError, LookupError, TypeError):
        return  # restore() says what is wrong with it, and takes an older one
    mine = _through_json(identity())
    known = saved.keys() & mine.keys()
    if different := differences({k: saved[k] for k in saved if k in known}, {k: mine[k] for k in mine if k in known}):
        raise _another_experiment(paths[0], different)


def _through_json(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """What it is when it is read again: tuples are lists there."""
    return json.loads(json.dumps(fingerprint))


def _another_experiment(path: Path, different: str) -> ValueError:
    return ValueError(
        f"checkpoint {path} belongs to another experiment ({different}); use the same data and settings, or give another run folder"
    )


def differences(saved: Mapping[str, Any], mine: Mapping[str, Any], whose: str = "checkpoint") -> str:
    """Where two flat mappings differ, for people; empty if they are equal."""
    names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
    shown = [f"{name}: {whose} {saved.get(name)!r}, now {mine.get(name)!r}" for name in names[:SHOWN]]
    return "; ".join(shown + [f"and {len(names) - SHOWN} more"] * (len(names) > SHOWN))


def adopt_diary(folder: Path) -> None:
    """Where the run folder has checkpoints but no diary (it came from elsewhere), take the newest one's."""
    newest = checkpoint.listed(folder / "checkpoints")[:1]
    if newest and not (folder / DIARY_FILE).exists() and (newest[0] / DIARY_FILE).exists():
        (folder / DIARY_FILE).write_bytes((newest[0] / DIARY_FILE).read_bytes())
