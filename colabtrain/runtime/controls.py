"""Controls: what other threads ask of the worker, and the gate where it answers, between two steps.

Asking is idempotent and may come from any thread; it takes effect at the next step boundary. A file named STOP or PAUSE
in the run folder does the same when the kernel is too busy to run a cell.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

FILES = ("STOP", "PAUSE")
POLL_SECONDS = 0.2  # how soon a paused run sees that a file came or went, and a waiting cell its interrupt


def check_timeout(call: str, timeout: Any) -> None:
    """Raise ValueError where `timeout` is no number of seconds, nor None."""
    if timeout is not None and (not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout >= 0):
        raise ValueError(f"{call}(timeout={timeout!r}) is no time; give seconds of at least 0, or None to wait for ever")


def check_wait(call: str, wait: Any) -> None:
    """Raise ValueError where `wait` is not a bool, such as a time that was meant for `timeout`."""
    if not isinstance(wait, bool):
        raise ValueError(f"{call}(wait={wait!r}) is of type {type(wait).__name__}; it must be True or False (seconds go by timeout=)")


class Controls:
    """Requests to one worker. In the gate it lends its task to one borrower at most; after its end anybody may have it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed = threading.Condition()  # guards what follows
        self._stop = self._pause = False
        self._saves_asked = self._saves_answered = 0
        self._lent = self._ended = False
        self._turn = threading.RLock()  # one borrower at a time; a thread may borrow what it has borrowed
        self._borrower: int | None = None  # the thread that has the turn: it waits for the worker, or holds it

    # Asked by any thread

    @property
    def stop_asked(self) -> bool:
        return self._stop

    def stop(self) -> None:
        with self._changing():
            self._stop = True

    def pause(self) -> None:
        with self._changing():
            self._pause = True

    def resume(self) -> None:
        self.take_file("PAUSE")
        with self._changing():
            self._pause = False

    @contextlib.contextmanager
    def _changing(self) -> Generator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def ask_to_save(self) -> int:
        """Ask for a checkpoint at the next step boundary; the number to give to await_save()."""
        with self._changing():
            self._saves_asked += 1
            return self._saves_asked

    def await_save(self, number: int) -> None:
        self._await(lambda: self._saves_answered >= number or self._ended)

    @contextlib.contextmanager
    def parked(self) -> Generator[None]:
        """Hold the worker between two steps for the time of the context. Between two such times it makes a step."""
        with self._turn:
            if self.parked_by_me():
                yield
                return
            try:
                with self._changing():
                    self._borrower = threading.get_ident()
                self._await(lambda: self._lent or self._ended)
                yield
            finally:
                with self._changing():
                    self._borrower, self._lent = None, False

    def parked_by_me(self) -> bool:
        """Whether this very thread holds the worker, and so must not wait for it."""
        return self._lent and self._borrower == threading.get_ident()

    def _await(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(condition, POLL_SECONDS):
                pass  # between two waits an interrupt gets through

    # Asked by the worker

    def end(self) -> None:
        with self._changing():
            self._ended = True

    def passed(self, before_pause: Callable[[], object], save: Callable[[], bool], after_pause: Callable[[], object]) -> bool:
        """The gate: hold while paused or borrowed from, save when asked to; False when the run is to stop. save() is False
        where it is to be asked again later."""
        paused = False
        while True:
            self._answer(save)
            self._lend()
            if self._stopping():
                return False
            if not (self._pause or self._has_file("PAUSE")):
                break
            if not paused:
                paused = True
                before_pause()
            with self._changed:
                if self._borrower is None:
                    self._changed.wait(POLL_SECONDS)
        if paused:
            after_pause()
        return True

    def _answer(self, save: Callable[[], bool]) -> None:
        asked = self._saves_asked
        if asked > self._saves_answered and save():
            with self._changing():
                self._saves_answered = asked

    def _lend(self) -> None:
        """Hold for the one who waits to borrow now, if any; the next one's turn is after a step, so that training goes on."""
        with self._changed:
            self._lent = self._borrower is not None
            self._changed.notify_all()
            while self._lent and not self._turn_is_free():
                self._changed.wait(POLL_SECONDS)
            self._lent = False

    def _turn_is_free(self) -> bool:
        """An interrupt may hit a borrower before it could say that it is done; the lock is let go of all the same."""
        if free := self._turn.acquire(blocking=False):
            self._borrower = None
            self._turn.release()
        return free

    def _stopping(self) -> bool:
        if not self._stop and self.take_file("STOP"):
            self.stop()
        return self._stop

    # Files

    def _has_file(self, name: str) -> bool:
        try:
            return (self._folder / name).exists()
        except OSError:  # a mounted drive that dropped out says nothing, and must not end the training
            return False

    def take_file(self, name: str) -> bool:
        """Remove a control file; False if there was none."""
        if not self._has_file(name):
            return False
        with contextlib.suppress(OSError):
            (self._folder / name).unlink(missing_ok=True)
        return True
