"""Run: one training job on a daemon thread, with its state machine and its controls.

Only the worker thread touches the task, but for run.borrow(). Controls may be used from any thread, any number of times.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from colabtrain import device
from colabtrain.config import RunConfig
from colabtrain.runtime import disk, loop
from colabtrain.runtime.controls import FILES, Controls, check_timeout, check_wait
from colabtrain.runtime.diary import Diary, Tail, history
from colabtrain.runtime.keeper import Hook, Keeper
from colabtrain.runtime.lock import FolderLock
from colabtrain.runtime.remote import Remote
from colabtrain.runtime.resume import adopt_diary, refuse
from colabtrain.runtime.retry import NeedsRestart
from colabtrain.runtime.rng import rng_state, set_rng_state
from colabtrain.runtime.worker import Worker, heir, lending
from colabtrain.task import Borrows, Task

State = Literal["starting", "running", "paused", "stopping", "stopped", "finished", "failed"]
ENDED: tuple[State, ...] = ("stopped", "finished", "failed")
EXIT_SECONDS, LAST_WORDS_SECONDS = 60.0, 5.0  # what the end of the interpreter waits: to end a step, save and publish; to say so
WAIT_SECONDS = 0.5  # one piece of a long wait: an interrupt is seen between two
LONG_BORROW_SECONDS = 10.0  # said in the log: the training stood still
EXIT_FOR_RESTART = 3


class RunFailed(RuntimeError):
    """Training failed; the text is the traceback of the worker thread."""


class Run:
    """A training job in the background. Made by start(); all methods may be called from any thread."""

    def __init__(
        self,
        task: Task,
        folder: Path,
        config: RunConfig,
        resume: bool = True,
        owned: Any = None,
        identity: Callable[[], Mapping[str, Any]] | None = None,
        on_checkpoint: Hook | None = None,
        remote: Remote | None = None,
    ) -> None:
        """owned: what the task trains; two live runs of one model would destroy each other. identity: what is learned (JSON), to tell
        whether another start() asks for the same; None: nobody knows before prepare(). remote: the Hub repo, not yet open."""
        self.folder = Path(folder).absolute()  # a cell may change the working directory
        self.step, self.num_steps = 0, 0
        self.exception_text: str | None = None  # the traceback
        self.error_line: str | None = None  # type and message
        self.needs_restart = False  # failed in a way that only a new process helps against
        self.when_ended: list[Callable[[], None]] = []  # called by wait() and stop(): what a notebook saves shows the end
        self.config, self.identity = config, identity
        self.owned = task if owned is None else owned
        self._task: Task | None = task
        self.resumes, self._on_checkpoint, self._remote = resume, on_checkpoint, remote
        self._state: State = "starting"  # written by the worker alone
        self._controls, self._lock, self._done = Controls(self.folder), FolderLock(self.folder), threading.Event()
        self.thread = Worker(self)

    def __repr__(self) -> str:
        return f"<colabtrain run {str(self.folder)!r}: {self.state}, step {self.step:,} of {self.num_steps:,}>"

    @property
    def state(self) -> State:
        """starting, running, paused, stopping, stopped, finished or failed."""
        return "stopping" if self._controls.stop_asked and self._state not in ENDED else self._state

    @property
    def saved_step(self) -> int:
        """Step of the newest good checkpoint; 0 if there is none."""
        return self._keeper.saved_step

    def check(self) -> None:
        """Raise ValueError where it is seen beforehand that the folder cannot be used, or holds another experiment."""
        self._lock.check()
        refuse(self.folder / "checkpoints", self.resumes, self.identity, self.config.allow_mismatch)

    def launch(self) -> None:
        """Lock the folder, look at the Hub, start the thread. Raises AlreadyRunning, and what Remote.open() does."""
        locked = self._lock.take()
        try:
            if self._remote:
                self._remote.open(self.resumes, self.identity)
            adopt_diary(self.folder)
            self.diary = Diary(self.folder)
            if not locked:
                self.diary.log("this file system has no locks: take care that no second run uses the folder")
            for name in filter(self._controls.take_file, FILES):
                self.diary.log(f"removed a file {name} left from before")
            if warning := disk.mount_warning(self.folder):
                self.diary.log(warning)
            assert self._task is not None
            self._keeper = Keeper(self._task, self.diary, self.folder, self.config, self._on_checkpoint, self._remote)
            atexit.register(self._at_exit)
            self.thread.start()
        except BaseException:
            if self.thread not in threading.enumerate():  # an interrupt of start() leaves a thread that has begun alone
                self._let_go()
            raise

    def _let_go(self) -> None:
        atexit.unregister(self._at_exit)
        if self._remote:
            self._remote.end()
        self._lock.release()

    # Controls

    def pause(self) -> None:
        """Save, and halt, at the next step boundary. Returns at once."""
        self._controls.pause()

    def resume(self) -> None:
        """Go on after pause(). Returns at once."""
        self._controls.resume()

    def stop(self, wait: bool = True, timeout: float | None = 120.0) -> State:
        """Stop at the next step boundary and save. With wait, returns when that is done, at most `timeout` seconds later:
        then the state is still `stopping`, and the step that is stuck is named in the log."""
        check_wait("stop", wait)
        check_timeout("stop", timeout)
        self._controls.stop()
        if wait and not self._await_end(timeout) and timeout is not None:
            late = self._keeper.doing or f"step {self.step + 1:,} has not ended"
            self.diary.log(f"{late} {timeout:g} s after stop(); the run stops when that is done")
        return self.state

    def wait(self, timeout: float | None = None) -> State:
        """Wait for the end; an interrupt leaves the run alive. Raises RunFailed with the traceback if it failed."""
        check_timeout("wait", timeout)
        try:
            self._await_end(timeout)
        except KeyboardInterrupt:
            text = f"only wait() was interrupted: the run is {self.state} at step {self.step:,}; run.stop() stops it"
            raise KeyboardInterrupt(text) from None
        if self.state == "failed":
            raise RunFailed(self.exception_text)
        return self.state

    def held_up_by_me(self) -> bool:
        """Whether this very thread is the worker or its writer, or has borrowed from it, and so must not wait for it."""
        return threading.current_thread() is self.thread or self._keeper.is_me() or self._controls.parked_by_me()

    def _await_end(self, timeout: float | None) -> bool:
        """False if the run has not ended in time. A thread that holds up the run itself does not wait for it."""
        if self.held_up_by_me():
            return True
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._done.wait(max(0.0, min(WAIT_SECONDS, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        for call in self.when_ended:
            call()
        return True

    def checkpoint(self, wait: bool = False) -> int:
        """Save at the next step boundary; with wait, when that is done. Returns the step of the newest good checkpoint."""
        check_wait("checkpoint", wait)
        number = self._controls.ask_to_save()
        if wait and not self.held_up_by_me():
            self._controls.await_save(number)
            self._keeper.drain()
        return self.saved_step

    @contextlib.contextmanager
    def borrow(self) -> Generator[Any]:
        """The model, for inference between two steps: eval mode, no gradients, full width and depth.

        Waits for the step in progress; training waits for the end of the context and goes on as if nothing had been: modes and
        random state are put back. Raises RuntimeError where there is no model to lend.
        """
        if threading.current_thread() is self.thread or self._keeper.is_me():
            raise RuntimeError("borrow() is for other threads; a step already has the model to itself, and a hook must not wait for one")
        with self._controls.parked():
            started, task = time.monotonic(), self._task
            if task is None:
                raise RuntimeError("this run has let go of its model (run.free()); start it again to have one")
            if other := heir(self, ENDED):
                raise RuntimeError(f"{other!r} trains this model now; borrow it from that run")
            if not isinstance(task, Borrows):
                raise RuntimeError(f"{type(task).__name__} has no borrow(); give it one, such as: return inference(self.model)")
            outermost = self not in lending
            lending.add(self)
            random_state = None if self._state in ENDED else rng_state()  # nobody's numbers hang on it any more
            try:
                with torch.no_grad(), task.borrow() as model:
                    yield model
            finally:
                if outermost:
                    lending.discard(self)
                if random_state is not None:
                    set_rng_state(random_state)
                if (seconds := time.monotonic() - started) > LONG_BORROW_SECONDS and self._state not in ENDED:
                    self.diary.log(f"training stood still for {seconds:.0f} s while the model was borrowed")

    def history(self) -> dict[str, list[Any]]:
        """What was recorded at each step so far, over all machines: column name -> values."""
        return history(Tail(self.diary.path).new())

    def free(self) -> None:
        """Let go of model, optimizer and the frames of errors that passed through them, once the run has ended.

        Names that your own cells hold stay; `del` those too. Raises RuntimeError while the run is live.
        """
        if self._state not in ENDED:
            raise RuntimeError(f"the run is {self.state} at step {self.step:,}; stop it first: run.stop()")
        self._done.wait()
        self._task = self.owned = self.identity = self._on_checkpoint = None
        self._keeper.free()
        device.forget_last_error(__name__.partition(".")[0])
        with contextlib.suppress(RuntimeError):  # of a device that is dead
            device.release_memory()

    def _at_exit(self) -> None:
        """An interpreter that ends must not pull the floor from under a step in C++, nor lose what was trained."""
        self._keeper.hurry(EXIT_SECONDS)
        self.stop(timeout=EXIT_SECONDS + LAST_WORDS_SECONDS)

    # The worker thread

    def work(self) -> None:
        try:
            assert self._task is not None
            if self.identity:
                self.identity()  # now, for later: it must not be asked for the first time after a reload of modules
            with torch.enable_grad():  # grad mode is per thread; whatever the calling cell had does not hold here
                self.diary.write("run_started", f"run {self.folder} started", pid=os.getpid(), torch=torch.__version__)
                try:
                    done = loop.train(self._task, self.diary, self._keeper, self.config, self, self.resumes)
                finally:
                    self._keeper.close()
            self._end("finished" if done else "stopped")
        except BaseException as error:
            # Only the text is kept: the exception would keep every tensor of the failed step alive.
            self.exception_text = traceback.format_exc()
            self.error_line = traceback.format_exception_only(error)[-1].strip()
            self.needs_restart = isinstance(error, NeedsRestart) or device.is_dead(error)
            device.forget(error)
            self._fail(type(error).__name__, self.error_line.partition(": ")[2])
        finally:
            if self._state not in ENDED:
                self._state = "failed"
            self._let_go()
            if self.needs_restart and self.config.on_unrecoverable == "exit":
                os._exit(EXIT_FOR_RESTART)  # before a thread that waits for the end goes on, and exits with another status
            self._controls.end()
            self._done.set()

    def _fail(self, error: str, message: str) -> None:
        saved, then = self._keeper.outlook()
        again = f"restart the runtime, then the same start() {then}" if self.needs_restart else f"the same start() {then}"
        fields = {"error": error, "message": message, "traceback": self.exception_text, "saved_step": self.saved_step}
        self._end("failed", f": {self.error_line}; {saved}; {again}", needs_restart=self.needs_restart, **fields)

    def _end(self, state: State, why: str = "", **fields: Any) -> None:
        self.diary.write(state, f"{state} at step {self.step:,} of {self.num_steps:,}{why}", step=self.step, **fields)
        self._state = state

    # The loop's gate

    def reached(self, step: int, num_steps: int) -> None:
        self.step, self.num_steps = step, num_steps
        if self._state == "starting":
            self._state = "running"

    def passed(self, step: int, save: Callable[[], bool], save_now: Callable[[], object]) -> bool:
        """Hold while paused or borrowed from, save when asked to; False when the run is to stop."""

        def paused() -> None:
            save_now()
            self._state = "paused"
            self.diary.write("paused", f"paused at step {step:,}", step=step)

        def going_on() -> None:
            self._state = "running"
            self.diary.write("resumed", f"going on from step {step:,}", step=step)

        return self._controls.passed(paused, save, going_on)
