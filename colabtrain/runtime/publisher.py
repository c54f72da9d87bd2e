"""Publisher: brings the newest checkpoint to the Hub, beside the training, as long as this session owns the repo.

A queue of one: a checkpoint that waits gives way to a newer one, and the diary says which were skipped. Whatever goes wrong is said
and tried again; it never reaches the training.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colabtrain.config import RunConfig
from colabtrain.runtime.diary import Diary, duration
from colabtrain.runtime.hub_process import HubFailure, HubProcess

THREAD_NAME = "colabtrain-hub"
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 2.0, 60.0  # between two tries; doubled each time
REFUSED_SECONDS = 600.0  # a person may put right what the Hub refuses: storage, the token's rights
SLICE_SECONDS = 0.5
MAY_PASS = ("retry", "conflict", "changed")
RANDOM = secrets.SystemRandom()  # the global generators belong to the training


@dataclass
class Item:
    """A checkpoint on its way. saved_at: epoch seconds of its state. skipped: how many it took the place of. nonce: names it in the
    repo, however often it is tried."""

    path: Path
    step: int
    saved_at: float
    skipped: int = 0
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class Publisher:
    """offer() and close() may be called from any thread.

    join(): claims the repo where that could not be done at the start, raises HubFailure. facts(): what the card is told.
    """

    def __init__(
        self,
        process: HubProcess,
        diary: Diary,
        config: RunConfig,
        hold: Callable[[Path], AbstractContextManager[object]],
        join: Callable[[], Mapping[str, Any]],
        card: str,
        facts: Callable[[int], Mapping[str, Any]],
    ) -> None:
        self.process, self.diary, self.config, self.repo = process, diary, config, process.access.repo
        self._hold, self._join, self._card, self._facts = hold, join, card, facts
        self._changed = threading.Condition()  # guards what follows
        self._pending: Item | None = None
        self._busy = self._closing = self._over = False
        self._fenced = False  # nothing is published any more
        self._why = ""  # the newest try failed
        self._deadline = math.inf
        self._commit_at = self._try_at = -math.inf  # monotonic: the next one not before
        self._wait, self._retries = FIRST_WAIT_SECONDS, 0
        self._pointer: Mapping[str, Any] | None = None
        self.saved_step = self.published_step = 0
        self._lost_since = time.time()  # the work since then is on this machine only
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)

    # For other threads

    def start(self, pointer: Mapping[str, Any] | None, published_step: int) -> None:
        """pointer: of the claim; None: it is still to be made."""
        self._pointer, self.published_step = pointer, published_step
        self._thread.start()

    def offer(self, path: Path, step: int, saved_at: float) -> None:
        """The newest checkpoint on the disk. Returns at once."""
        with self._changed:
            self.saved_step = step
            if self._closing or self._fenced:
                return
            item = Item(path, step, saved_at)
            item.held.enter_context(self._hold(path))
            self._skip(self._pending, item)
            self._pending = item
            self._changed.notify_all()

    def _skip(self, old: Item | None, newer: Item | None) -> None:
        if old is not None:
            old.held.close()
        if old is not None and newer is not None:
            newer.skipped += old.skipped + 1
            self.diary.write("publish_skipped", repo=self.repo, step=old.step, by=newer.step)

    @property
    def doing(self) -> str:
        """What the end of the run waits for, for people; "" if nothing."""
        with self._changed:
            at_work = self._closing and (self._busy or self._pending is not None)
            return f"a checkpoint is still on its way to {self.repo}" if at_work else ""

    def close(self, seconds: float) -> None:
        """Publish what waits, at most for `seconds`, and end the Hub's process. What is not on the Hub then is said."""
        with self._changed:
            self._closing, self._deadline = True, min(self._deadline, time.monotonic() + seconds)
            self._changed.notify_all()
        if self.doing:
            self.diary.log(f"publishing step {self.saved_step:,} to {self.repo} before the run ends, for at most {seconds:.0f} s")
        while self._thread.is_alive() and time.monotonic() < self._deadline:
            self._thread.join(SLICE_SECONDS)
        self._over, why = True, self._why or f"not done after {seconds:.0f} s"
        self.process.kill()
        if self.published_step < self.saved_step:
            where = f"on this machine only, not in {self.repo} ({why})"
            text = f"step {self.saved_step:,} is {where}; the same start() on this machine publishes it"
            self.diary.write("not_published", text, **self._standing())

    def hurry(self, deadline: float) -> None:
        """Have close() end then, also one that is under way."""
        with self._changed:
            self._deadline = min(self._deadline, deadline)
            self._changed.notify_all()

    # The publisher's thread

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._publish(item)
            except Exception as error:
                if self._over:  # what failed now was ended by close()
                    return
                # Another one than a HubFailure is our own fault, and no reason to stop publishing.
                self._failed(item, error if isinstance(error, HubFailure) else HubFailure(f"{type(error).__name__}: {error}"))
            with self._changed:
                self._busy = False

    def _next(self) -> Item | None:
        """The item whose time has come; None at the end."""
        with self._changed:
            while not self._fenced:
                now = time.monotonic()
                due = self._try_at if self._closing else max(self._try_at, self._commit_at)
                if self._closing and (self._pending is None or due >= self._deadline):
                    return None
                if self._pending is not None and now >= due:
                    item, self._pending, self._busy = self._pending, None, True
                    return item
                self._changed.wait(None if self._pending is None else min(due - now, threading.TIMEOUT_MAX))
            return None

    def _publish(self, item: Item) -> None:
        if self._pointer is None:
            self._pointer = self._join()
            self.published_step = self._pointer["step"]
            if item.step <= self.published_step:  # what the run went on from is there already
                self._done(item)
                return
        started = time.monotonic()
        answer = self.process.ask(
            "publish",
            path=str(item.path),
            step=item.step,
            nonce=item.nonce,
            keep=self.config.keep_remote,
            card=self._card,
            facts=dict(self._facts(item.step)),
        )
        seconds, size = time.monotonic() - started, answer["bytes"]
        self._pointer, self.published_step, retries = answer["pointer"], item.step, self._retries
        self._done(item)
        self._commit_at = time.monotonic() + self.config.publish_every
        skipped = f", {item.skipped:,} before it skipped" if item.skipped else ""
        text = f"published step {item.step:,} to {self.repo} in {duration(seconds)} ({size / 1e6:,.1f} MB{skipped})"
        rate = {"bytes": size, "seconds": seconds, "bytes_per_second": size / max(seconds, 1e-3), "saved_at": item.saved_at}
        told = {"step": item.step, "seq": answer["pointer"]["seq"], "retries": retries, "skipped": item.skipped}
        self.diary.write("checkpoint_published", text, **told, **rate, **self._standing())
        if answer["complaint"]:
            self.diary.log(answer["complaint"])
        self._squash()

    def _done(self, item: Item) -> None:
        """It is on the Hub."""
        item.held.close()
        self._lost_since = item.saved_at
        self._wait, self._retries, self._why = FIRST_WAIT_SECONDS, 0, ""

    def _squash(self) -> None:
        """Every so many checkpoints, and at the end: the history holds every one that ever was."""
        assert self._pointer is not None
        due = self._pointer["seq"] % self.config.squash_every == 0 or (self._closing and self._pending is None)
        if not (self._pointer["created"] and due):
            return
        try:
            self.process.ask("squash")
        except HubFailure as failure:
            if failure.kind == "fenced":
                raise
            self.diary.log(f"the history of {self.repo} could not be squashed: {failure}")

    def _failed(self, item: Item, failure: HubFailure) -> None:
        """Say it, and decide when the next try is."""
        self._why, self._retries = str(failure), self._retries + 1
        if failure.kind == "fenced":
            self._be_fenced(item)
            return
        passes, is_local = failure.kind in MAY_PASS, failure.kind == "local"
        if passes:
            wait = max(self._wait * RANDOM.uniform(0.5, 1.5), failure.wait or 0.0)
            self._wait = min(2 * self._wait, MAX_WAIT_SECONDS)
        else:
            wait = 0.0 if is_local else REFUSED_SECONDS
        at, self._try_at = time.time() + wait, time.monotonic() + wait
        with self._changed:
            newer = self._pending
            if newer is None and not is_local:
                self._pending = item
            else:
                self._skip(item, newer)
        then = "the next one is tried" if is_local else f"tried again at {time.strftime('%H:%M:%S', time.localtime(at))}"
        text = f"step {item.step:,} could not be published to {self.repo}: {failure}; {then}; training goes on"
        told = {"kind": "retry" if passes else "refused", "reason": self._why, "status": failure.status, "retries": self._retries}
        is_news = self._retries & (self._retries - 1) == 0  # the first, second, fourth ... in a row
        self.diary.write(
            "hub_error", text if is_news else None, step=item.step, **told, retry_at=at, traceback=failure.traceback, **self._standing()
        )

    def _be_fenced(self, item: Item) -> None:
        with self._changed:
            self._fenced = True
            self._skip(item, None)
            self._skip(self._pending, None)
            self._pending = None
        self.process.kill()
        text = f"{self._why}: nothing is published from here any more; training and checkpoints on this machine go on"
        self.diary.write("fenced", text, step=item.step, **self._standing())

    def _standing(self) -> dict[str, Any]:
        at_risk = 0.0 if self.saved_step <= self.published_step and self._closing else time.time() - self._lost_since
        standing = {"repo": self.repo, "saved_step": self.saved_step, "published_step": self.published_step}
        return {**standing, "at_risk_seconds": max(0.0, at_risk)}
