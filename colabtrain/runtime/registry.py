"""Which runs are alive in this process, and what a second start() of one of them means.

Two runs of one folder or one model would destroy each other. The worker threads are the registry: they are found
whatever became of the variable that held the run, or of the modules after a reload.
"""

from __future__ import annotations

import dataclasses
import threading

from colabtrain.runtime.lock import AlreadyRunning
from colabtrain.runtime.resume import differences
from colabtrain.runtime.run import ENDED, Run
from colabtrain.runtime.worker import jobs, lending

REPLACE_SECONDS = 120.0  # what a live run gets to end its step and save

_launching = threading.Lock()  # of two threads that start at once, one sees the other's run


def live_runs() -> list[Run]:
    """Every run in this process that has not ended."""
    return [job for job in jobs() if not _ended(job)]


def _ended(job: Run) -> bool:
    if job.state in ENDED:
        job.thread.join()  # it is about to let go of its folder
        return True
    return False


def launch(run: Run, replace: bool = False) -> Run:
    """Start `run`, or return the live run that does just the same in the same folder.

    Raises AlreadyRunning, naming the live run and the differences, where another one has the folder or the model;
    with replace those are stopped first, once nothing else is seen to be wrong. Raises ValueError as Run.check().
    """
    with _launching:
        others = [other for other in live_runs() if _same_folder(other, run) or other.owned is run.owned]
        for other in others:
            if _same_folder(other, run) and (learned := _learned(other, run)):
                raise AlreadyRunning(f"{other!r} trains something else in this folder ({learned}); stop it, and give another run_dir")
            if replace and not run.resumes and _same_folder(other, run):
                raise ValueError(f"resume=False, but {other!r} saves in this folder when it is replaced; give another run_dir")
        if not replace:
            for other in others:
                if not (why := _conflict(other, run)):
                    return other
                raise AlreadyRunning(f"{other!r} is alive {why}; stop it first (run.stop()), or give replace=True to have it stopped")
        for lender in (other for other in lending if other.state in ENDED and other.owned is run.owned):
            raise AlreadyRunning(f"the model is borrowed from {lender!r}; leave that `with` block first")
        run.check()
        for other in others:
            _replace(other)
        run.launch()
        return run


def _same_folder(other: Run, run: Run) -> bool:
    return other.folder.resolve() == run.folder.resolve()


def _learned(other: Run, run: Run) -> str:
    """Where the two learn something else. Of Tasks that cannot say, the checkpoint's fingerprint tells it later."""
    if other.identity and run.identity:
        return differences(dict(other.identity()), dict(run.identity()), "the live run has", run.config.allow_mismatch)
    return "" if other.identity is run.identity else "one has a Task of its own, the other has not"


def _conflict(other: Run, run: Run) -> str:
    """Why `other` cannot stand for `run`; empty if it can."""
    if not _same_folder(other, run):
        return "and has this model"
    if lived := differences(dataclasses.asdict(other.config), dataclasses.asdict(run.config), "the live run has"):
        return f"with other settings ({lived})"
    return "" if run.identity or other.owned is run.owned else f"with another {type(other.owned).__name__}"


def _replace(other: Run) -> None:
    if other.held_up_by_me():
        raise AlreadyRunning(f"{other!r} cannot be replaced from inside its own step, hook or borrow(); leave that first")
    other.diary.log("another start(replace=True) asks this run to stop")
    if (state := other.stop(timeout=REPLACE_SECONDS)) not in ENDED:
        raise AlreadyRunning(
            f"{other!r} is {state} for {REPLACE_SECONDS:g} s and has not ended; interrupt what it does, or restart the kernel"
        )
    other.thread.join()
