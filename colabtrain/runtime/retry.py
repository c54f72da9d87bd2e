"""A step that runs out of memory is tried again in more parts; an item that alone does not fit is set aside.

The retry happens outside the `except` block, when nothing of the failed attempt is alive any more. It is bounded, and
every attempt is in the diary. Each step starts in one part, so there is nothing to save or to restore.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colabtrain import device
from colabtrain.runtime.recorder import Recorder
from colabtrain.task import Divides, StepReport, Task

MAX_SPLITS = 64  # for a Task that cannot say how many items a step has
MIN_SPLITS = 2  # tried for a lone item, too: a Task may save memory in a retry
MAX_EMPTY_IN_A_ROW = 20  # steps of which no item fits; long records, each a batch of its own, may follow each other
SAID, SAID_EVERY = 5, 50  # times out of memory that reach the log: the first ones, then some
MAX_LOST_BYTES = 2 * 2**30  # accelerator memory that a failed attempt may keep


class NeedsRestart(RuntimeError):
    """Only a new process can go on; the text says why."""


class Retry:
    """Steps of `task`, tried again where memory runs out. used_bytes: what the accelerator's tensors hold now."""

    def __init__(self, task: Task, recorder: Recorder, used_bytes: Callable[[], int] = device.accelerator_bytes) -> None:
        self.task, self.recorder, self._used_bytes = task, recorder, used_bytes
        self._empty_in_a_row = 0

    def step(self, i: int) -> StepReport:
        """task.step(i). Raises MemoryError when it does not fit in any number of parts, NeedsRestart when the memory of a
        failed attempt does not come back."""
        splits, used, num_aside = 1, self._used_bytes(), 0
        while isinstance(failure := _attempt(self.task, i, splits), str):
            device.release_memory()
            items = self.task.contents(i) if isinstance(self.task, Divides) else []
            max_splits = max(MIN_SPLITS, len(items)) if isinstance(self.task, Divides) else MAX_SPLITS
            next_splits = min(2 * splits, max_splits)
            self._say(i, splits, next_splits if next_splits > splits else 0, failure, items)
            self._check_lost(used)
            if next_splits > splits:
                splits = next_splits
            elif num_aside < len(items) and self._set_aside(i):
                num_aside += 1
            else:
                raise MemoryError(f"step {i + 1:,} does not fit into memory in {splits} parts either: {failure}")
        self._check_empty(i, num_aside > 0 and not failure.loss)
        return failure

    def _say(self, i: int, splits: int, next_splits: int, failure: str, items: list[dict[str, Any]]) -> None:
        times = self.recorder.count("out_of_memory")
        tasks = ", ".join(dict.fromkeys(str(item["task"]) for item in items if "task" in item))
        tokens = sum(item.get("tokens", 0) for item in items)
        what = f" ({len(items)} item{'s' * (len(items) > 1)} of {tasks}; {tokens:,} tokens)" if items else ""
        again = "trying again, sparing memory" if len(items) == 1 else f"trying again in {next_splits} parts"
        then = again if next_splits else "it has no smaller parts"
        text = f"step {i + 1:,}: out of memory in {splits} part{'s' * (splits > 1)}{what}; {then}"
        if times == SAID:
            text += f". That is {SAID} times: a smaller batch_size or token_budget would save the failed tries"
            text += f"; from here on every {SAID_EVERY}th is said"
        said = times <= SAID or times % SAID_EVERY == 0
        fields = {"step": i + 1, "splits": splits, "error": failure, "items": items, "memory": device.memory_bytes()}
        self.recorder.diary.write("oom", text if said else None, **fields)

    def _set_aside(self, i: int) -> bool:
        item = self.task.set_aside(i) if isinstance(self.task, Divides) else None
        if item is None:
            return False
        self.recorder.count("set_aside")
        name = ", ".join(f"{key} {value!r}" for key, value in item.items())
        text = f"step {i + 1:,}: an item does not fit into memory alone and is set aside ({name}); training goes on without it"
        self.recorder.diary.write("set_aside", text, step=i + 1, item=item)
        return True

    def _check_lost(self, used_before: int) -> None:
        lost = self._used_bytes() - used_before
        if lost > MAX_LOST_BYTES:
            raise NeedsRestart(f"{lost / 2**30:.1f} GiB of the accelerator's memory did not come back after a step ran out of it")

    def _check_empty(self, i: int, empty: bool) -> None:
        self._empty_in_a_row = self._empty_in_a_row + 1 if empty else 0
        if self._empty_in_a_row >= MAX_EMPTY_IN_A_ROW:
            raise MemoryError(
                f"no item of the last {MAX_EMPTY_IN_A_ROW} steps (to step {i + 1:,}) fits into memory, even alone; lower max_state_chars "
                "or max_options, free what else uses the device, or take a larger one"
            )


def _attempt(task: Task, i: int, splits: int) -> StepReport | str:
    """The report, or the text of an error that says that memory ran out."""
    try:
        report: Any = task.step(i, splits) if splits > 1 else task.step(i)
    except Exception as error:
        if not device.is_out_of_memory(error):
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        device.forget(error)
        return text
    if not isinstance(report, StepReport):
        name = type(task).__name__
        raise ValueError(
            f"{name}.step() gave a {type(report).__name__}; it must give a StepReport, such as StepReport(loss={{'loss': loss}})"
        )
    return report
