"""The loop: gate, step, record, checkpoint. It runs on the worker thread and knows any Task."""

from __future__ import annotations

import functools
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from colabtrain.config import RunConfig
from colabtrain.device import is_dead, release_memory
from colabtrain.runtime.diary import Diary, duration
from colabtrain.runtime.keeper import Keeper
from colabtrain.runtime.recorder import Recorder
from colabtrain.runtime.retry import Retry
from colabtrain.runtime.task_state import check_state
from colabtrain.task import Describes, Diagnoses, Ends, Evaluates, Says, Task


class Gate(Protocol):
    """What the loop asks at each step boundary, and tells on the way."""

    def passed(self, step: int, save: Callable[[], bool], save_now: Callable[[], object]) -> bool:
        """Wait while the run is held up; False when it is to stop. save() begins a checkpoint, or says that it cannot
        yet; save_now() returns when it is made."""
        ...

    def reached(self, step: int, num_steps: int) -> None:
        """Step `step` of `num_steps` is done."""
        ...


def train(task: Task, diary: Diary, keeper: Keeper, config: RunConfig, gate: Gate, resume: bool) -> bool:
    """Train to the end or to a stop. True when all steps are done."""
    started = time.monotonic()
    if isinstance(task, Says):
        task.say = diary.log
    keeper.find(resume)
    task.prepare()
    check(task)
    if isinstance(task, Describes):
        for line in task.describe():
            diary.log(line)
    recorder = Recorder(diary, config.log_every, task.num_steps)
    step = keeper.restore(recorder)
    gate.reached(step, task.num_steps)
    if step >= task.num_steps:
        diary.log(f"nothing to train: step {step:,} is reached and the run has {task.num_steps:,}; ask for more steps or epochs to go on")
    reached = steps(task, keeper, recorder, config, gate, step)
    keeper.save_last(reached, recorder)
    if reached < task.num_steps:
        return False
    evaluate(task, diary, recorder, reached)
    end(task, diary, keeper.folder.parent)
    diary.log(f"done in {duration(time.monotonic() - started)}")
    return True


def check(task: Task) -> None:
    """Raise ValueError where a prepared task cannot be trained or resumed."""
    name, number = type(task).__name__, task.num_steps
    if type(number) is not int or number < 1:
        raise ValueError(f"{name}.num_steps is {number!r} after prepare(); it must be an int of at least 1")
    fingerprint: Any = task.fingerprint()
    try:
        good = isinstance(fingerprint, Mapping) and bool(json.dumps(fingerprint))
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"{name}.fingerprint() gave {repr(fingerprint)[:80]}; it must give a mapping that JSON can hold")
    check_state(task)


def steps(task: Task, keeper: Keeper, recorder: Recorder, config: RunConfig, gate: Gate, step: int) -> int:
    """Train from `step` on; the step reached at the end or at a stop."""
    retry = Retry(task, recorder)
    try:
        while step < task.num_steps and gate.passed(
            step, functools.partial(keeper.save, step, recorder), functools.partial(keeper.save_now, step, recorder)
        ):
            started = time.perf_counter()
            report = retry.step(step)
            step += 1
            gate.reached(step, task.num_steps)
            recorder.add(step, report, time.perf_counter() - started)
            if keeper.pace.due(step):
                keeper.save(step, recorder)
            if config.eval_every and step % config.eval_every == 0 and step < task.num_steps:
                evaluate(task, recorder.diary, recorder, step)
            time.sleep(0)  # let the kernel's other threads have the interpreter
    except BaseException as error:
        if not is_dead(error):  # then nothing on the device may be touched
            keeper.save_after_failure(step, recorder)
        if isinstance(error, FloatingPointError) and isinstance(task, Diagnoses):
            raise FloatingPointError(f"{error}; {diagnosis(task, step - 1)}") from None
        raise
    return step


def diagnosis(task: Diagnoses, i: int) -> str:
    try:
        return task.first_bad_module(i)
    except Exception as error:
        return f"the module could not be found: {type(error).__name__}: {error}"


def end(task: Task, diary: Diary, folder: Path) -> None:
    """Let the task put in order what it leaves behind. What fails here is said; the training is done and saved."""
    if not isinstance(task, Ends):
        return
    try:
        for event, text, fields in task.ending(folder):
            diary.write(event, text, **fields)
    except Exception as error:
        text = f"after the last step something failed: {type(error).__name__}: {error}; the training itself is done and saved"
        diary.write("ending_failed", text, traceback=traceback.format_exc())


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
        if is_dead(error):  # then training cannot go on either
            raise
        text = f"the evaluation at step {step:,} failed: {type(error).__name__}: {error}; training goes on"
        diary.write("evaluation_failed", text, step=step, traceback=traceback.format_exc())
    else:
        return
    release_memory()
