"""Keeper: when to save, and what to do when a save fails.

A save is taken on the training thread, between two steps, and written by a thread of its own. One that comes due while
that thread is at work waits for it, and then takes the newest step. One that fails is said and tried again at its next
time; training goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from colabtrain.config import RunConfig
from colabtrain.device import is_out_of_memory, machine, release_memory, sync_to_disk
from colabtrain.runtime import checkpoint, disk, manifest, resume, task_state
from colabtrain.runtime.buffers import Buffers, num_bytes
from colabtrain.runtime.checkpoint import Snapshot
from colabtrain.runtime.diary import Diary, duration
from colabtrain.runtime.manifest import CheckpointError
from colabtrain.runtime.pace import Pace
from colabtrain.runtime.recorder import Recorder
from colabtrain.runtime.remote import Remote
from colabtrain.task import Task

Hook = Callable[[Path, int], object]
LAST_SAVE_TRIES, RETRY_SECONDS = 3, 1.0
WAIT_SECONDS = 0.5
THREAD_NAME = "colabtrain-writer"
MAY_PASS = (OSError, CheckpointError, TypeError, ValueError, RecursionError)  # may be better the next time


class Keeper:
    """Saves and restores one run's checkpoints. All but drain(), is_me() and hold() is for the training thread."""

    def __init__(
        self, task: Task, diary: Diary, folder: Path, config: RunConfig, hook: Hook | None = None, remote: Remote | None = None
    ) -> None:
        """hook(path, step) is called after each save, on the writer's thread. remote: where checkpoints are published, open."""
        self._task: Task | None = task
        self.diary, self.config, self._hook, self._remote = diary, config, hook, remote
        self.folder = folder / "checkpoints"
        self.saved_step = 0  # of the newest good checkpoint; 0: none
        self.pace = Pace(config)
        self._paths: list[Path] = []  # to go on from
        self._broken = set[Path]()  # known not to be
        self._buffers = Buffers()
        self._taken_step = 0  # of the newest snapshot
        self._writer: threading.Thread | None = None  # the newest one
        # Not the thread's is_alive(): an interrupt of join() calls it dead while it is not, in Python 3.11 and 3.12.
        self._idle = threading.Event()
        self._idle.set()
        self._in_hook = False
        self._held: list[Path] = []
        self._why = ""  # the last save failed
        self._then = "; training goes on"  # said with a failure

    @property
    def task(self) -> Task:
        assert self._task is not None
        return self._task

    # Going on from a checkpoint

    def find(self, resumes: bool) -> None:
        """Look for what to go on from, and say it; before the task is prepared. Raises ValueError as resume.refuse(), find()."""
        resume.refuse(self.folder, resumes)
        manifest.clear_staging(self.folder)
        if self._remote:
            self._remote.bring(self.folder, self.diary)
        self._paths = resume.find(self.folder, self.diary)

    def restore(self, recorder: Recorder) -> int:
        """Go on from the newest good checkpoint; returns its step, 0 on a fresh start. Raises ValueError as resume.restore(), and
        what Remote does."""
        found = resume.restore(self.task, self._paths, self.diary, recorder, self.config)
        while self._remote and not self._remote.claim(self.diary, self.hold):
            self.find(resumes=True)  # another session published while this one was getting ready
            found = resume.restore(self.task, self._paths, self.diary, recorder, self.config)
        self._look_for_room()
        if found is not None:
            self.saved_step = found.step
            self._broken = {path for path in manifest.listed(self.folder) if manifest.number(path) > manifest.number(found.path)}
            release_memory()  # what was read is the size of the buffers, which come with the first save
            if self._remote:
                self._remote.offer_left_over(found.path, found.step)
        self.pace.start()
        return self.saved_step

    def _look_for_room(self) -> None:
        """Say now what the first save would say later."""
        try:
            size = num_bytes(self.task.state()[0])
        except Exception:  # it may need a step that was made
            return
        if self._remote:
            self.diary.log(self._remote.budget(size))
        try:
            disk.check_room(self.folder, size)
        except OSError as error:
            text = f"there is no room for a checkpoint: {disk.explain(error, self.folder)}; training goes on"
            self.diary.write("checkpoint_failed", text, step=self.saved_step)

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
        if self.busy and step == self._taken_step:
            return True  # else one that was asked for would come due again and again, each time a step too late
        if self.busy:
            if (seconds := self.pace.postpone()) is not None:
                text = f"{self.doing} after {duration(seconds)}; training goes on, but nothing newer is saved until that is done"
                self.diary.write("checkpoint_late", text, step=step)
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
        self._then = ""
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
        self._then = ""
        try:
            self.save_now(step, recorder)
        except Exception as error:
            self.diary.log(f"after the failure step {step:,} could not be saved: {type(error).__name__}: {error}")

    def _take(self, step: int, recorder: Recorder) -> None:
        started = time.perf_counter()
        try:
            tensors, meta = task_state.checked(self.task, self.task.state())
            snapshot = checkpoint.capture(step, tensors, self._state(meta, recorder), self.diary.size(), self._buffers)
            self._taken_step = step
            blocked_seconds = time.perf_counter() - started
            self._writer = threading.Thread(target=self._work, args=(snapshot, blocked_seconds), name=THREAD_NAME, daemon=True)
            self._idle.clear()
            try:
                self._writer.start()
            except (RuntimeError, MemoryError):  # no more threads, or, from Python 3.12 on, an interpreter that is about to end
                self._work(snapshot, blocked_seconds)
        except Exception as error:
            if not (isinstance(error, MAY_PASS) or is_out_of_memory(error)):
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
        self.diary.write("checkpoint_failed", f"checkpoint of step {step:,} failed: {self._why}{self._then}", step=step)

    # The writer's thread

    def _work(self, snapshot: Snapshot, blocked_seconds: float) -> None:
        try:
            self._write(snapshot, blocked_seconds)
        finally:
            self._idle.set()

    def _write(self, snapshot: Snapshot, blocked_seconds: float) -> None:
        """Whatever goes wrong here is said; it is no reason to end the training."""
        step, started = snapshot.step, time.perf_counter()
        try:
            path = checkpoint.write(self.folder, snapshot, self.diary.path)
        except Exception as error:
            self._failed(step, error)
            return
        self.saved_step = step
        seconds = time.perf_counter() - started
        text = f"saved step {step:,} in {seconds:.2f} s (training waited {blocked_seconds:.2f} s)"
        self.diary.write("checkpoint_saved", text, step=step, path=str(path), seconds=seconds, blocked_seconds=blocked_seconds)
        self._broken.discard(path)
        if self._remote:
            self._remote.offer(path, step, snapshot.time)
        try:
            sync_to_disk(self.folder)  # before older ones go
            manifest.prune(path, self.config.keep_local, self._held, self._broken)
        except OSError as error:
            self.diary.log(f"the older checkpoints stay: {disk.explain(error, self.folder)}")
        self._call_hook(path, step)

    def _call_hook(self, path: Path, step: int) -> None:
        if self._hook is None:
            return
        self._in_hook = True
        try:
            with self.hold(path):
                self._hook(path, step)
        except BaseException as error:  # a sys.exit(), too
            text = f"on_checkpoint failed at step {step:,}: {type(error).__name__}: {error}{self._then}"
            self.diary.write("hook_failed", text, step=step, traceback=traceback.format_exc())
        finally:
            self._in_hook = False

    # For any thread

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, or its hook is at work."""
        return not self._idle.is_set()

    @property
    def doing(self) -> str:
        """What is at work, for people; "" if nothing is."""
        if self.busy:
            return "on_checkpoint is still at work" if self._in_hook else "a checkpoint is still being written"
        return self._remote.doing if self._remote else ""

    def drain(self) -> None:
        """Return when no checkpoint is being written any more."""
        while not self._idle.wait(WAIT_SECONDS):
            pass  # an interrupt gets through between two

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
        """Finish what is being written and published, the hook too, and give the buffers back."""
        self.drain()
        self._buffers = Buffers()
        if self._remote:
            self._remote.close()

    def hurry(self, seconds: float) -> None:
        """Publish for so long at most from now on: the interpreter is about to end."""
        if self._remote:
            self._remote.hurry(seconds)

    def free(self) -> None:
        """Let go of the task and the hook."""
        self._task = self._hook = None
