"""Keeper: when to save, and what to do when a save fails.

A save is taken on the training thread, between two steps, and written by a thread of its own. One that comes due while
that thread is at work waits for it, and then takes the newest step. One that fails is said and tried again at its next
time; training goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from colabtrain.config import RunConfig
from colabtrain.device import is_out_of_memory, machine, release_memory
from colabtrain.runtime import checkpoint, disk, manifest, resume
from colabtrain.runtime.checkpoint import Buffers, Snapshot
from colabtrain.runtime.diary import Diary
from colabtrain.runtime.manifest import TENSOR_GROUPS, CheckpointError
from colabtrain.runtime.pace import Pace
from colabtrain.runtime.recorder import Recorder
from colabtrain.task import Task

Hook = Callable[[Path, int], object]
LAST_SAVE_TRIES, RETRY_SECONDS = 3, 1.0
WAIT_SECONDS = 0.5
THREAD_NAME = "colabtrain-writer"
MAY_PASS, NO_THREAD = (OSError, CheckpointError, TypeError, ValueError), "can't start new thread"  # may be better the next time


class Keeper:
    """Saves and restores one run's checkpoints. All but drain(), is_me() and hold() is for the training thread."""

    def __init__(self, task: Task, diary: Diary, folder: Path, config: RunConfig, hook: Hook | None = None) -> None:
        """hook(path, step) is called after each save, on the writer's thread."""
        self._task: Task | None = task
        self.diary, self.config, self._hook = diary, config, hook
        self.folder = folder / "checkpoints"
        self.saved_step = 0  # of the newest good checkpoint; 0: none
        self.pace = Pace(config)
        self._paths: list[Path] = []  # to go on from
        self._buffers = Buffers()
        self._writer: threading.Thread | None = None  # the newest one
        self._held: list[Path] = []
        self._why = ""  # the last save failed

    @property
    def task(self) -> Task:
        assert self._task is not None
        return self._task

    # Going on from a checkpoint

    def find(self, resumes: bool) -> None:
        """Look for what to go on from, and say it; before the task is prepared. Raises ValueError as resume.refuse(), find()."""
        resume.refuse(self.folder, resumes)
        manifest.clear_staging(self.folder)
        self._paths = resume.find(self.folder, self.diary)

    def restore(self, recorder: Recorder) -> int:
        """Go on from the newest good checkpoint; returns its step, 0 on a fresh start. Raises ValueError as resume.restore()."""
        self.saved_step = resume.restore(self.task, self._paths, self.diary, recorder, self.config)
        if self.saved_step:
            release_memory()  # what was read is the size of the buffers, which come with the first save
        self.pace.start()
        return self.saved_step

    def outlook(self) -> tuple[str, str]:
        """What is saved, and what the same start() does, for people to whom the run has failed."""
        if self.saved_step:
            return f"the newest checkpoint is of step {self.saved_step:,}", "goes on from there"
        try:
            found = manifest.listed(self.folder)
        except OSError as error:
            return f"what is saved cannot be seen ({error})", "tries again"
        if found:
            return f"the newest checkpoint, {found[0].name}, was not loaded", "tries again"
        return "there is no checkpoint", "starts anew"

    # Saving

    def save(self, step: int, recorder: Recorder) -> bool:
        """Save step `step` in the background; False if the one before is still being written: then ask again after the next step."""
        recorder.flush()
        if self.busy:
            self.pace.postpone()
            return False
        if step != self.saved_step:
            self._take(step, recorder)
        return True

    def save_now(self, step: int, recorder: Recorder) -> bool:
        """Save step `step` and return when that is done; False if it failed."""
        recorder.flush()
        self.drain()
        if step != self.saved_step:
            self._take(step, recorder)
            self.drain()
        return step == self.saved_step

    def save_last(self, step: int, recorder: Recorder) -> None:
        """Save before the run ends. Raises RuntimeError if that fails three times: nobody may believe it is safe."""
        for attempt in range(LAST_SAVE_TRIES):
            if attempt:
                time.sleep(RETRY_SECONDS)
            if self.save_now(step, recorder):
                return
        raise RuntimeError(
            f"step {step:,} could not be saved; the newest checkpoint is of step {self.saved_step:,} ({self._why}). Put that right (if it "
            f"is the disk, make room in {str(self.folder)!r}) and start the run again"
        )

    def save_after_failure(self, step: int, recorder: Recorder) -> None:
        """Save what the steps before the failed one reached. Whatever goes wrong here must not hide the failure."""
        try:
            self.save_now(step, recorder)
        except Exception as error:
            self.diary.log(f"after the failure step {step:,} could not be saved: {type(error).__name__}: {error}")

    def _take(self, step: int, recorder: Recorder) -> None:
        started = time.perf_counter()
        try:
            tensors, meta = _checked(self.task, self.task.state())
            snapshot = checkpoint.capture(step, tensors, self._state(meta, recorder), self.diary.size(), self._buffers)
            blocked_seconds = time.perf_counter() - started
            writer = threading.Thread(target=self._write, args=(snapshot, blocked_seconds), name=THREAD_NAME, daemon=True)
            writer.start()
            self._writer = writer
        except Exception as error:
            if not (isinstance(error, MAY_PASS) or is_out_of_memory(error) or str(error) == NO_THREAD):
                raise
            self._failed(step, error)
        if said := self.pace.taken(time.perf_counter() - started):
            self.diary.log(said)

    def _state(self, meta: Mapping[str, Any], recorder: Recorder) -> dict[str, Any]:
        return {
            "fingerprint": self.task.fingerprint(),
            "task": meta,
            "totals": recorder.totals,
            "num_steps": recorder.num_steps,
            "run_config": dataclasses.asdict(self.config),
            "machine": machine(),
        }

    def _failed(self, step: int, error: Exception) -> None:
        self._why = disk.explain(error, self.folder) if isinstance(error, OSError) else str(error) or type(error).__name__
        self.diary.write("checkpoint_failed", f"checkpoint of step {step:,} failed: {self._why}; training goes on", step=step)

    # The writer's thread

    def _write(self, snapshot: Snapshot, blocked_seconds: float) -> None:
        """Whatever goes wrong here is said; it is no reason to end the training."""
        step, started, self._writer = snapshot.step, time.perf_counter(), threading.current_thread()
        try:
            path = checkpoint.write(self.folder, snapshot, self.diary.path)
        except Exception as error:
            self._failed(step, error)
            return
        self.saved_step = step
        seconds = time.perf_counter() - started
        text = f"saved step {step:,} in {seconds:.2f} s (training waited {blocked_seconds:.2f} s)"
        self.diary.write("checkpoint_saved", text, step=step, path=str(path), seconds=seconds, blocked_seconds=blocked_seconds)
        try:
            manifest.prune(path, self.config.keep_local, self._held)
        except OSError as error:
            self.diary.log(f"an old checkpoint could not be removed: {disk.explain(error, self.folder)}")
        self._call_hook(path, step)

    def _call_hook(self, path: Path, step: int) -> None:
        if self._hook is None:
            return
        try:
            with self.hold(path):
                self._hook(path, step)
        except BaseException as error:  # a sys.exit(), too
            text = f"on_checkpoint failed at step {step:,}: {type(error).__name__}: {error}; training goes on"
            self.diary.write("hook_failed", text, step=step, traceback=traceback.format_exc())

    # For any thread

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, or its hook is at work."""
        return self._writer is not None and self._writer.is_alive()

    def drain(self) -> None:
        """Return when no checkpoint is being written any more."""
        while (writer := self._writer) is not None and writer.is_alive():
            writer.join(WAIT_SECONDS)  # an interrupt gets through between two

    def is_me(self) -> bool:
        """Whether the calling thread is the writer's, which a save would wait for in vain."""
        return threading.current_thread() is self._writer

    @contextlib.contextmanager
    def hold(self, path: Path) -> Generator[None]:
        """Keep the checkpoint `path` on the disk for the time of the context, however many newer ones come."""
        self._held.append(path)
        try:
            yield
        finally:
            self._held.remove(path)

    def close(self) -> None:
        """Finish what is being written, its hook too, and give the buffers back."""
        self.drain()
        self._buffers = Buffers()

    def free(self) -> None:
        """Let go of the task and the hook."""
        self._task = self._hook = None


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
