"""Pace: when a checkpoint is due. By steps and by time; both wait longer while saving holds up the training too much."""

from __future__ import annotations

import time
from collections.abc import Callable

from colabtrain.config import RunConfig

MAX_BLOCKED_SHARE = 0.035  # of the training time (CheckFreq, Mohan et al. 2021)
LOW_BLOCKED_SHARE = MAX_BLOCKED_SHARE / 4  # from here on half the interval costs at most half of what is allowed
WINDOW_SECONDS = 30.0  # a share of less time says nothing
LATE_SECONDS = 300.0  # that one checkpoint keeps the next one waiting, until people should know


class Pace:
    """clock: seconds, monotonic."""

    def __init__(self, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._taken_at, self._wait = clock(), config.first_checkpoint_seconds
        self._window_from, self._blocked = clock(), 0.0
        self._overdue = self._said_late = False
        self._stretch = 1

    def start(self) -> None:
        """The first step is next: what came before it is no training time."""
        self._taken_at = self._window_from = self._clock()

    def due(self, step: int) -> bool:
        every = self._config.checkpoint_every * self._stretch
        return self._overdue or step % every == 0 or self._clock() - self._taken_at >= self._wait

    def postpone(self) -> float | None:
        """The one that is due cannot be taken yet: it is due at the next step again. For how many seconds the one before has
        kept it waiting, once for each that takes too long."""
        self._overdue = True
        seconds = self._clock() - self._taken_at
        if self._said_late or seconds < LATE_SECONDS:
            return None
        self._said_late = True
        return seconds

    def taken(self, blocked_seconds: float) -> str:
        """A checkpoint was taken, which held up the training for `blocked_seconds`. What people should know, or ""."""
        self._overdue, self._said_late, self._taken_at = False, False, self._clock()
        self._blocked += blocked_seconds
        said = self._judge()
        self._wait = self._config.checkpoint_seconds * self._stretch
        return said

    def _judge(self) -> str:
        seconds = self._clock() - self._window_from
        if seconds < WINDOW_SECONDS:
            return ""
        share, before = self._blocked / seconds, self._stretch
        self._window_from, self._blocked = self._clock(), 0.0
        if share > MAX_BLOCKED_SHARE:
            self._stretch *= 2
        elif share <= LOW_BLOCKED_SHARE and self._stretch > 1:
            self._stretch //= 2
        if self._stretch == before:
            return ""
        every, wait = self._config.checkpoint_every * self._stretch, self._config.checkpoint_seconds * self._stretch
        return f"saving held up {100 * share:.1f} % of the training: a checkpoint every {every:,} steps or {wait:,.0f} s from here on"
