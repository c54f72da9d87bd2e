"""Run: one training job on a daemon thread, with its state machine and its controls.

Only the worker thread touches the task. Controls are Events and may be used from any thread, any number of times; a
file named STOP or PAUSE in the run folder does the same when the kernel is too busy to run a cell.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from colabtrain.config import RunConfig
from colabtrain.runtime import checkpoint, loop
from colabtrain.runtime.diary import Diary, Tail, history
from colabtrain.runtime.keeper import Keeper, adopt_diary
from colabtrain.task import Task

State = Literal["starting", "running", "paused", "stopping", "stopped", "finished", "failed"]
ENDED: tuple[State, ...] = ("stopped", "finished", "failed")
EXIT_SECONDS = 60.0  # what the end of the interpreter waits for a step to end and its checkpoint to be saved
WAIT_SECONDS = 0.5  # one piece of a long wait: an interrupt is seen between two
POLL_SECONDS = 0.2  # how soon a paused run sees that a STOP or PAUSE file came or went


class RunFailed(RuntimeError):
    """Training failed; the text is the traceback of the worker thread."""


class AlreadyRunning(RuntimeError):
    """The run folder, or the model, is in use by a live run."""


_owners: WeakKeyDictionary[Any, Run] = WeakKeyDictionary()  # what is being trained -> by whom
_owners_lock = threading.Lock()


class Run:
    """A training job in the background. Made by start(); all methods may be called from any thread."""

    def __init__(self, task: Task, folder: Path, config: RunConfig, resume: bool = True, owned: Any = None) -> None:
        """owned: what the task trains; two live runs of one model would destroy each other."""
        self.folder = Path(folder).absolute()  # a cell may change the working directory
        self.step, self.num_steps = 0, 0
        self.exception_text: str | None = None  # the traceback
        self.error_line: str | None = None  # type and message
        # Called by wait() and stop() on their own thread once the run has ended: what a notebook saves shows the end.
        self.when_ended: list[Callable[[], None]] = []
        self._task, self._config, self._resume_saved = task, config, resume
        self._owned = task if owned is None else owned
        self._state: State = "starting"  # written by the worker alone
        self._stop, self._pause, self._wake, self._done = (threading.Event() for _ in range(4))
        self._lock = FolderLock(self.folder)
        self._thread = threading.Thread(target=self._work, name="colabtrain-train", daemon=True)

    def __repr__(self) -> str:
        return f"<colabtrain run {str(self.folder)!r}: {self.state}, step {self.step:,} of {self.num_steps:,}>"

    @property
    def state(self) -> State:
        """starting, running, paused, stopping, stopped, finished or failed."""
        return "stopping" if self._stop.is_set() and self._state not in ENDED else self._state

    @property
    def saved_step(self) -> int:
        """Step of the newest good checkpoint; 0 if there is none."""
        return self._keeper.saved_step

    def launch(self) -> None:
        """Lock folder and model and start the thread. Raises AlreadyRunning if another live run has one of them."""
        locked = self._lock.take()
        try:
            self._take_owned()
            adopt_diary(self.folder)
            self.diary = Diary(self.folder)
            if not locked:
                self.diary.log("this file system has no locks: take care that no second run uses the folder")
            for name in ("STOP", "PAUSE"):
                if self._take_file(name):
                    self.diary.log(f"removed a file {name} left from before")
            checkpoint.clear_staging(self.folder / "checkpoints")
            self._keeper = Keeper(self._task, self.diary, self.folder, self._config)
            atexit.register(self._at_exit)
            self._thread.start()
        except BaseException:
            self._let_go()
            raise

    def _take_owned(self) -> None:
        with _owners_lock:
            other = _owners.get(self._owned)
            if other is not None and other.state not in ENDED:
                raise AlreadyRunning(f"the model is being trained by {other!r}; stop it first, or make a new model")
            _owners[self._owned] = self

    def _let_go(self) -> None:
        """Undo what launch() took; what is left in _owners would keep the model in memory for ever."""
        atexit.unregister(self._at_exit)
        with _owners_lock:
            if _owners.get(self._owned) is self:
                del _owners[self._owned]
        self._lock.release()

    # Controls

    def pause(self) -> None:
        """Halt at the next step boundary. Returns at once."""
        self._pause.set()

    def resume(self) -> None:
        """Go on after pause(). Returns at once."""
        self._take_file("PAUSE")
        self._pause.clear()
        self._wake.set()

    def stop(self, wait: bool = True, timeout: float = 120.0) -> State:
        """Stop at the next step boundary and save. With wait, returns when that is done, at most `timeout` seconds later."""
        self._stop.set()
        self._wake.set()
        if wait:
            self._await_end(timeout)
        return self.state

    def wait(self, timeout: float | None = None) -> State:
        """Wait for the end; an interrupt leaves the run alive. Raises RunFailed with the traceback if it failed."""
        self._await_end(timeout)
        if self.state == "failed":
            raise RunFailed(self.exception_text)
        return self.state

    def _await_end(self, timeout: float | None) -> None:
        if threading.current_thread() is self._thread:
            return  # a step that stops its own run cannot wait for it
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._done.wait(max(0.0, min(WAIT_SECONDS, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return
        for call in self.when_ended:
            call()

    def history(self) -> dict[str, list[Any]]:
        """What was recorded at each step so far, over all machines: column name -> values."""
        return history(Tail(self.diary.path).new())

    def _at_exit(self) -> None:
        """An interpreter that ends must not pull the floor from under a step in C++, nor lose what was trained."""
        self.stop(timeout=EXIT_SECONDS)

    # The worker thread

    def _work(self) -> None:
        try:
            with torch.enable_grad():  # grad mode is per thread; whatever the calling cell had does not hold here
                self.diary.write("run_started", f"run {self.folder} started", pid=os.getpid(), torch=torch.__version__)
                done = loop.train(self._task, self.diary, self._keeper, self._config, self, self._resume_saved)
            self._end("finished" if done else "stopped")
        except BaseException as error:
            # Only the text is kept: the exception would keep every tensor of the failed step alive.
            self.exception_text = traceback.format_exc()
            self.error_line = traceback.format_exception_only(error)[-1].strip()
            self._fail(type(error).__name__, self.error_line.partition(": ")[2])
        finally:
            if self._state not in ENDED:
                self._state = "failed"
            self._let_go()
            self._done.set()

    def _fail(self, error: str, message: str) -> None:
        saved = f"the newest checkpoint is of step {self.saved_step:,}" if self.saved_step else "there is no checkpoint"
        fields = {"error": error, "message": message, "traceback": self.exception_text, "saved_step": self.saved_step}
        self._end("failed", f": {self.error_line}; {saved}; the same start() goes on from there", **fields)

    def _end(self, state: State, why: str = "", **fields: Any) -> None:
        self.diary.write(state, f"{state} at step {self.step:,} of {self.num_steps:,}{why}", step=self.step, **fields)
        self._state = state

    # The loop's gate

    def reached(self, step: int, num_steps: int) -> None:
        self.step, self.num_steps = step, num_steps
        if self._state == "starting":
            self._state = "running"

    def passed(self, step: int, before_holding: Callable[[], None]) -> bool:
        """Hold while paused; False when the run is to stop."""
        held = False
        while not self._asked_to_stop() and (self._pause.is_set() or self._has_file("PAUSE")):
            if not held:
                held = True
                before_holding()
                self._state = "paused"
                self.diary.write("paused", f"paused at step {step:,}", step=step)
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
        if self._asked_to_stop():
            return False
        if held:
            self._state = "running"
            self.diary.write("resumed", f"going on from step {step:,}", step=step)
        return True

    def _asked_to_stop(self) -> bool:
        if not self._stop.is_set() and self._take_file("STOP"):
            self._stop.set()
        return self._stop.is_set()

    def _has_file(self, name: str) -> bool:
        try:
            return (self.folder / name).exists()
        except OSError:  # a mounted drive that dropped out says nothing, and must not end the training
            return False

    def _take_file(self, name: str) -> bool:
        """Remove a control file; False if there was none."""
        if not self._has_file(name):
            return False
        with contextlib.suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)
        return True


class FolderLock:
    """One live run a folder: an advisory lock on <run>/lock that ends with the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._file: Any = None

    def take(self) -> bool:
        """Lock; False where the system has no such locks. Raises AlreadyRunning if another run has the folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+")
        try:
            fcntl = importlib.import_module("fcntl")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise AlreadyRunning(
                f"a live run uses {str(self.path.parent)!r} (process {owner}); stop it first, or give another run folder"
            ) from None
        except (ImportError, OSError):  # Windows, and mounted folders of some kinds
            file.close()
            return False
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(ImportError, OSError):
                fcntl = importlib.import_module("fcntl")
                fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked child shares the open file, and with it the lock
            self._file.close()
            self._file = None
