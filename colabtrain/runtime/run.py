"""Run: one training job on a daemon thread, with its state machine and its controls.

Only the worker thread touches the task. Controls are Events and may be used from any thread, any number of times; a
file named STOP or PAUSE in the run folder does the same when the kernel is too busy to run a cell.
"""

from __future__ import annotations

import importlib
import os
import threading
import traceback
from pathlib import Path
from typing import Any, Literal

import torch

from colabtrain.config import RunConfig
from colabtrain.runtime import checkpoint, loop
from colabtrain.runtime.diary import Diary, Tail, history
from colabtrain.task import Task

State = Literal["starting", "running", "paused", "stopping", "stopped", "finished", "failed"]
ENDED: tuple[State, ...] = ("stopped", "finished", "failed")
POLL_SECONDS = 0.2  # how soon a paused run sees that a STOP or PAUSE file came or went


class RunFailed(RuntimeError):
    """Training failed; the text is the traceback of the worker thread."""


class AlreadyRunning(RuntimeError):
    """The run folder is in use by a live run."""


class Run:
    """A training job in the background. Made by start(); all methods may be called from any thread."""

    def __init__(self, task: Task, folder: Path, config: RunConfig, resume: bool = True) -> None:
        self.folder = Path(folder)
        self.step, self.num_steps = 0, 0
        self.exception_text: str | None = None  # the traceback
        self.error_line: str | None = None  # type and message
        self._task, self._config, self._resume_saved = task, config, resume
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

    def launch(self) -> None:
        """Lock the folder and start the thread. Raises AlreadyRunning if another run has the folder."""
        self._lock.take()
        try:
            loop.adopt_diary(self.folder)
            self.diary = Diary(self.folder)
            for name in ("STOP", "PAUSE"):
                if (self.folder / name).exists():
                    (self.folder / name).unlink()
                    self.diary.log(f"removed a file {name} left from before")
            checkpoint.clear_staging(self.folder / "checkpoints")
        except BaseException:
            self._lock.release()
            raise
        self._thread.start()

    # Controls

    def pause(self) -> None:
        """Halt at the next step boundary. Returns at once."""
        self._pause.set()

    def resume(self) -> None:
        """Go on after pause(). Returns at once."""
        (self.folder / "PAUSE").unlink(missing_ok=True)
        self._pause.clear()
        self._wake.set()

    def stop(self, wait: bool = True, timeout: float = 120.0) -> State:
        """Stop at the next step boundary and save. With wait, returns when that is done, at most `timeout` seconds later."""
        self._stop.set()
        self._wake.set()
        if wait:
            self._done.wait(timeout)
        return self.state

    def wait(self, timeout: float | None = None) -> State:
        """Wait for the end; an interrupt leaves the run alive. Raises RunFailed with the traceback if it failed."""
        self._done.wait(timeout)
        if self.state == "failed":
            raise RunFailed(self.exception_text)
        return self.state

    def history(self) -> dict[str, list[Any]]:
        """What was recorded at each step so far, over all machines: column name -> values."""
        return history(Tail(self.diary.path).new())

    # The worker thread

    def _work(self) -> None:
        try:
            with torch.enable_grad():  # grad mode is per thread; whatever the calling cell had does not hold here
                self.diary.write("run_started", f"run {self.folder} started", pid=os.getpid(), torch=torch.__version__)
                done = loop.train(self._task, self.diary, self.folder, self._config, self, self._resume_saved, self._on_step)
            self._end("finished" if done else "stopped")
        except BaseException as error:
            # Only the text is kept: the exception would keep every tensor of the failed step alive.
            self.exception_text = traceback.format_exc()
            self.error_line = f"{type(error).__name__}: {error}"
            self._end("failed", error=type(error).__name__, message=str(error), traceback=self.exception_text)
        finally:
            self._lock.release()
            self._done.set()

    def _end(self, state: State, **fields: Any) -> None:
        reason = f": {fields['error']}: {fields['message']}" if fields else ""
        self.diary.write(state, f"{state} at step {self.step:,} of {self.num_steps:,}{reason}", step=self.step, **fields)
        self._state = state

    def _on_step(self, step: int, num_steps: int) -> None:
        self.step, self.num_steps = step, num_steps
        if self._state == "starting":
            self._state = "running"

    def passed(self, step: int) -> bool:
        """The loop's gate: hold while paused; False when the run is to stop."""
        held = False
        while not self._asked_to_stop() and (self._pause.is_set() or (self.folder / "PAUSE").exists()):
            if not held:
                held = True
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
        if not self._stop.is_set() and (self.folder / "STOP").exists():
            (self.folder / "STOP").unlink(missing_ok=True)
            self._stop.set()
        return self._stop.is_set()


class FolderLock:
    """One live run a folder: an advisory lock on <run>/lock that ends with the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._file: Any = None

    def take(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+")
        try:
            fcntl = importlib.import_module("fcntl")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # no advisory locks on Windows
        except OSError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise AlreadyRunning(
                f"a live run uses {str(self.path.parent)!r} (process {owner}); stop it first, or give another run folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
