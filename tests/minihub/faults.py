"""What goes wrong on demand: which request, and how."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any

# How many arguments each action takes at least and at most.
ACTIONS = {
    "status": (1, 3),  # code, headers, JSON: answered without doing the work
    "apply_then_status": (1, 3),  # the same, after the work was done
    "drop": (0, 1),  # bytes of the body to read first (all of it if left out), then a reset, without doing the work
    "apply_then_drop": (0, 0),  # the work is done, then a reset instead of an answer
    "hang": (0, 1),  # seconds to wait before the work; until `MiniHub.release()` if left out
    "truncate": (1, 1),  # bytes of the answer's body that are sent before the connection closes
    "call": (1, 1),  # function of the hub, called before the work
}
QUOTA_FULL = (
    "status",
    403,
    {},
    {"error": "Private repository storage limit reached, please upgrade your plan to increase your private storage limit."},
)


def rate_limited(seconds: int) -> tuple[Any, ...]:
    """An action: 429 with the headers that tell how long to wait."""
    return "status", 429, {"Retry-After": str(seconds), "ratelimit": f'"api";r=0;t={seconds}'}, {"error": "Too Many Requests"}


@dataclass
class Fault:
    """A fault that waits for its request. `used` counts, `reached` is set at the first use (before its effect is over)."""

    method: str
    path: re.Pattern[str]
    action: tuple[Any, ...]
    times: int | None = 1
    after: int = 0
    used: int = 0
    reached: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return self.action[0]

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of a fault that answers."""
        _, status, *more = self.action
        headers, body = (*more, None, None)[:2]
        return status, headers or {}, body or {"error": "injected fault"}

    def __str__(self) -> str:
        shown = [str(part) for part in self.action[:2] if isinstance(part, str | int | float)]
        return " ".join(shown)


class Faults:
    """All faults of a hub, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Fault] = []

    def add(self, method: str, path: str, action: tuple[Any, ...], times: int | None, after: int) -> Fault:
        name, arguments = action[0], action[1:]
        if name not in ACTIONS:
            raise ValueError(f"no fault is called {name}; there are {', '.join(ACTIONS)}")
        least, most = ACTIONS[name]
        if not least <= len(arguments) <= most:
            raise TypeError(f"the fault {name} takes {least} to {most} arguments, not {len(arguments)}")
        fault = Fault(method, re.compile(path), action, times, after)
        with self._lock:
            self._waiting.append(fault)
        return fault

    def take(self, method: str, path: str) -> Fault | None:
        """The first fault that this request meets; those that still let requests through count it."""
        with self._lock:
            for fault in self._waiting:
                if fault.method not in (method, "*") or not fault.path.search(path):
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    continue
                fault.used += 1
                if fault.times is not None and fault.used >= fault.times:
                    self._waiting.remove(fault)
                fault.reached.set()
                return fault
        return None

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
