"""The loop: gate, step, record, checkpoint. It runs on the worker thread and knows any Task."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Protocol

from colabtrain.config import RunConfig
from colabtrain.runtime.diary import Diary
from colabtrain.runtime.keeper import Keeper
from colabtrain.runtime.recorder import Recorder
from colabtrain.task import Describes, Evaluates, Task


class Gate(Protocol):
    """What the loop asks at each step boundary, and tells on the way."""

    def passed(self, step: int, before_holding: Callable[[], None]) -> bool:
        """Wait while paused; False when the run is to stop."""
        ...

    def reached(self, step: int, num_steps: int) -> None:
        """Step `step` of `num_steps` is done."""
        ...


def train(task: Task, diary: Diary, keeper: Keeper, config: RunConfig, gate: Gate, resume: bool) -> bool:
    """Train to the end or to a stop. True when all steps are done."""
    task.prepare()
    if isinstance(task, Describes):
        for line in task.describe():
            diary.log(line)
    recorder = Recorder(diary, config.log_every, task.num_steps)
    step = keeper.restore(recorder, resume)
    gate.reached(step, task.num_steps)
    if step >= task.num_steps:
        diary.log(f"nothing to train: step {step:,} is reached and the run has {task.num_steps:,}; ask for more steps or epochs to go on")
    while step < task.num_steps:
        if not gate.passed(step, recorder.flush):
            keeper.save_last(step, recorder)
            return False
        started = time.perf_counter()
        report = task.step(step)
        step += 1
        recorder.add(step, report, time.perf_counter() - started)
        gate.reached(step, task.num_steps)
        if keeper.due(step):
            keeper.save(step, recorder)
        if config.eval_every and step % config.eval_every == 0 and step < task.num_steps:
            evaluate(task, diary, recorder, step)
        time.sleep(0)  # let the kernel's other threads have the interpreter
    keeper.save_last(step, recorder)
    evaluate(task, diary, recorder, step)
    return True


def evaluate(task: Task, diary: Diary, recorder: Recorder, step: int) -> None:
    """Measure, if the task can. An evaluation that fails is said; it must not cost the training."""
    recorder.flush()
    if not isinstance(task, Evaluates):
        return
    try:
        fields = dict(task.evaluate())
        if fields:
            text = fields.pop("text", "done")
            diary.write("evaluation", f"evaluation at step {step:,}: {text}", step=step, **fields)
    except Exception as error:
        text = f"the evaluation at step {step:,} failed: {type(error).__name__}: {error}; training goes on"
        diary.write("evaluation_failed", text, step=step, traceback=traceback.format_exc())
