"""The thread of one run. Threads know each other whatever became of variables and modules, so they are the registry."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any
from weakref import WeakSet

NAME = "colabtrain-train"
lending: WeakSet[Any] = WeakSet()  # the runs with an open borrow(), ended ones too


class Worker(threading.Thread):
    """Runs job.work(). job: the Run, as long as the thread lives."""

    def __init__(self, job: Any) -> None:
        super().__init__(name=NAME, daemon=True)
        self.job: Any = job

    def run(self) -> None:
        try:
            self.job.work()
        finally:
            self.job = None  # an ended run must not be kept by its thread


def jobs() -> list[Any]:
    """The Run of every worker thread in this process, whatever class it has after a reload of modules."""
    found = [getattr(thread, "job", None) for thread in threading.enumerate() if thread.name == NAME]
    return [job for job in found if job is not None]


def heir(job: Any, ended: Collection[str]) -> Any | None:
    """The live run that has the model of `job`, once that has ended. ended: the states of one that has."""
    others = (other for other in jobs() if other is not job and other.state not in ended and other.owned is job.owned)
    return next(others, None) if job.state in ended else None
