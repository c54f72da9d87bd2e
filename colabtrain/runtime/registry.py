"""Which runs are alive in this process, and what a second start() of one of them means.

Two runs of one folder or one model would destroy each other. The worker threads are the registry: they are found
whatever became of the variable that held the run, or of the modules after a reload.
"""

from __future__ import annotations

import dataclasses
import threading

from colabtrain.runtime.keeper import differences
from colabtrain.runtime.lock import AlreadyRunning
from colabtrain.runtime.run import ENDED, Run

REPLACE_SECONDS = 120.0  # what a live run gets to end its step and save

_launching = threading.Lock()  # of two threads that start at once, one sees the other's run


def live_runs() -> list[Run]:
    """Every run in this process that has not ended."""
    jobs: list[Run | None] = [getattr(thread, "job", None) for thread in threading.enumerate() if thread.name == "colabtrain-train"]
    return [job for job in jobs if job is not None and not _ended(job)]


def _ended(job: Run) -> bool:
    if job.state in ENDED:
        job.thread.join()  # it is about to let go of its folder
        return True
    return False


def launch(run: Run, replace: bool = False) -> Run:
    """Start `run`, or return the live run that does just the same in the same folder.

    Raises AlreadyRunning, naming the live run and the differences, where another one has the folder or the model;
    with replace that one is stopped first, once nothing else is seen to be wrong. Raises ValueError as Run.check().
    """
    with _launching:
        in_the_way: list[Run] = []
        for other in live_runs():
            same_folder = other.folder.resolve() == run.folder.resolve()
            if not same_folder and other.owned is not run.owned:
                continue
            learned = differences(dict(other.identity()), dict(run.identity()), "the live run has")
            lived = differences(dataclasses.asdict(other.config), dataclasses.asdict(run.config), "the live run has")
            if same_folder and learned:
                raise AlreadyRunning(f"{other!r} trains something else in this folder ({learned}); stop it, and give another run_dir")
            if replace and (run.resumes or not same_folder):
                in_the_way.append(other)
            elif replace:
                raise ValueError(f"resume=False, but {other!r} saves in this folder when it is replaced; give another run_dir")
            elif same_folder and not lived:
                return other
            else:
                why = f"with other settings ({lived})" if same_folder else "and has this model"
                raise AlreadyRunning(f"{other!r} is alive {why}; stop it first (run.stop()), or give replace=True to have it stopped")
        run.check()
        for other in in_the_way:
            _replace(other)
        run.launch()
        return run


def _replace(other: Run) -> None:
    other.diary.log("another start(replace=True) asks this run to stop")
    if (state := other.stop(timeout=REPLACE_SECONDS)) not in ENDED:
        raise AlreadyRunning(
            f"{other!r} is {state} for {REPLACE_SECONDS:g} s and has not ended; interrupt what it does, or restart the kernel"
        )
    other.thread.join()
