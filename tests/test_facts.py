"""What goes wrong in notebooks, fact by fact, without a kernel: failures, borrowing, second starts, memory."""

from __future__ import annotations

import gc
import linecache
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from helpers import Halt, events
from toy_task import LentTask, ToyTask

import colabtrain
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.runtime import checkpoint, controls
from colabtrain.runtime.diary import Diary
from colabtrain.runtime.lock import AlreadyRunning
from colabtrain.runtime.recorder import Recorder
from colabtrain.runtime.retry import NeedsRestart, Retry
from colabtrain.runtime.run import Run, RunFailed
from colabtrain.task import StepReport

SECONDS = 30.0  # far more than anything here takes; a wait that long is a failure
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"
DEAD = "CUDA error: device-side assert triggered"


def start(task: ToyTask, folder: Path, **options: Any) -> Run:
    return colabtrain.start(task=task, run_dir=folder, display=False, **options)


def losses(folder: Path) -> list[Any]:
    return [[event["step"], event["loss"], event.get("grad_norm")] for event in events(folder, "step")]


def raising(at: int, error: Exception) -> Callable[[int], None]:
    def before_step(i: int) -> None:
        if i == at:
            raise error

    return before_step


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def goes_on(run: Run, steps: int = 2) -> bool:
    wanted = run.step + steps
    for _ in range(int(SECONDS / 0.01)):
        if run.step >= wanted or run.state not in ("starting", "running"):
            break
        threading.Event().wait(0.01)
    return run.step >= wanted


# Failures


def test_what_the_steps_before_a_failure_reached_is_saved(tmp_path: Path) -> None:
    run = start(ToyTask(10, raising(7, KeyError("the seventh"))), tmp_path)
    with pytest.raises(RunFailed):
        run.wait(SECONDS)
    assert run.saved_step == 7 and checkpoint.read(tmp_path / "checkpoints/step-00000007").step == 7
    assert not run.needs_restart and run.error_line == "KeyError: 'the seventh'"
    text = events(tmp_path, "failed")[0]["text"]
    assert text.endswith("the newest checkpoint is of step 7; the same start() goes on from there")
    assert start(ToyTask(10), tmp_path).wait(SECONDS) == "finished"


class Watched(ToyTask):
    """Counts who asks for its state."""

    asked = 0

    def state(self) -> Any:
        self.asked += 1
        return super().state()


@pytest.mark.colab
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError] if hasattr(torch, "AcceleratorError") else [RuntimeError])
def test_a_dead_device_is_left_alone(kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    task = Watched(10, raising(7, kind(DEAD)))
    halt = Halt(6)
    before = task.before_step
    task.before_step = lambda i: (halt(i), before(i))[1]
    run = start(task, tmp_path, checkpoint_every=5)
    assert halt.reached.wait(SECONDS)
    for name in ("is_initialized", "empty_cache", "memory_allocated", "get_rng_state_all", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: threading.current_thread() is run.thread and run.step >= 7)
    halt.go.set()
    with pytest.raises(RunFailed, match="device-side assert"):
        run.wait(SECONDS)
    assert task.asked == 3 and run.saved_step == 5 and run.needs_restart  # two looks before the first step, the save at step 5, none after
    assert events(tmp_path, "oom") == [] and "empty_cache" not in calls and "synchronize" not in calls
    failed = events(tmp_path, "failed")[0]
    assert failed["needs_restart"] is True
    assert failed["text"].endswith("the newest checkpoint is of step 5; restart the runtime, then the same start() goes on from there")


def test_a_dead_device_in_an_evaluation_ends_the_run(tmp_path: Path) -> None:
    task = Watched(4)
    task.evaluate = lambda: raising(0, RuntimeError(DEAD))(0)  # pyright: ignore
    run = start(task, tmp_path, eval_every=2)
    with pytest.raises(RunFailed, match="device-side assert"):
        run.wait(SECONDS)
    assert run.needs_restart and run.step == 2 and task.asked == 2 and events(tmp_path, "evaluation_failed") == []


def test_a_failure_before_the_resume_names_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    start(ToyTask(3), tmp_path).wait(SECONDS)
    with pytest.raises(RunFailed):
        start(ToyTask(3, mark="b"), tmp_path).wait(SECONDS)
    assert events(tmp_path, "failed")[0]["text"].endswith(
        "the newest checkpoint, step-00000003, was not loaded; the same start() tries again"
    )
    with pytest.raises(RunFailed):
        start(ToyTask(3, raising(0, KeyError("first"))), tmp_path / "new").wait(SECONDS)
    assert events(tmp_path / "new", "failed")[0]["text"].endswith("there is no checkpoint; the same start() starts anew")


# A second start()


def test_two_threads_that_start_at_once_get_one_run(tmp_path: Path) -> None:
    halt, runs = Halt(1), list[Run]()
    task, together = ToyTask(5, halt), threading.Barrier(4)

    def begin() -> None:
        together.wait(SECONDS)
        runs.append(start(task, tmp_path))

    for thread in [in_thread(begin) for _ in range(4)]:
        thread.join(SECONDS)
    halt.go.set()
    assert len(runs) == 4 and len({id(run) for run in runs}) == 1
    assert runs[0].wait(SECONDS) == "finished" and len(events(tmp_path, "run_started")) == 1


def test_a_task_of_ones_own_is_replaced_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first = start(ToyTask(10**6), tmp_path)
    assert goes_on(first)
    with pytest.raises(AlreadyRunning, match=r"alive with another ToyTask; stop it first .* replace=True"):
        start(ToyTask(10**6), tmp_path)
    run = start(ToyTask(10**6), tmp_path, replace=True)
    assert first.state == "stopped" and not first.thread.is_alive() and goes_on(run)
    assert events(tmp_path, "resumed")[-1]["step"] == first.step == first.saved_step
    assert run.stop() == "stopped"


def test_nothing_is_stopped_before_all_is_checked(tmp_path: Path) -> None:
    model = colabtrain.MMJev.tiny(0)
    options: dict[str, Any] = {"steps": 10**6, "display": False}
    has_model = colabtrain.start(model, help_desk(20), run_dir=tmp_path / "a", **options)
    has_folder = colabtrain.start(colabtrain.MMJev.tiny(0), help_desk(20), run_dir=tmp_path / "b", **options)
    try:
        with pytest.raises(AlreadyRunning, match=r"trains something else in this folder \(config.batch_size"):
            colabtrain.start(model, help_desk(20), run_dir=tmp_path / "b", batch_size=2, replace=True, **options)
        assert goes_on(has_model) and goes_on(has_folder)
    finally:
        assert (has_model.stop(), has_folder.stop()) == ("stopped", "stopped")


def test_a_run_is_not_replaced_from_inside_itself(tmp_path: Path) -> None:
    task = LentTask(10**6)
    run = start(task, tmp_path)
    with run.borrow(), pytest.raises(AlreadyRunning, match="cannot be replaced from inside its own step, hook or borrow"):
        start(task, tmp_path, replace=True)
    assert goes_on(run) and run.stop() == "stopped"


def test_an_interrupted_start_leaves_a_live_run_with_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        real(thread)
        if thread.name == "colabtrain-train":
            raise KeyboardInterrupt

    task = ToyTask(10**6)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", begin)
        with pytest.raises(KeyboardInterrupt):
            start(task, tmp_path)
    run = start(task, tmp_path)  # the same cell again finds it
    assert goes_on(run)
    assert len(events(tmp_path, "run_started")) == 1
    other = Run(ToyTask(1), tmp_path, run.config)
    with pytest.raises(AlreadyRunning, match="a live run uses"):
        other.launch()
    assert run.stop() == "stopped"


# Borrowing


OPTIONS: dict[str, Any] = {"steps": 10, "batch_size": 3, "lora_dropout": 0.2, "display": False}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.trainable().items()}


def disturb(model: Any) -> None:
    """What cells do to a model they have been lent."""
    parameter = next(iter(model.trainable().values()))
    with torch.enable_grad():
        parameter.square().sum().backward()
    model.train()
    random.random(), numpy.random.rand(), torch.rand(3)


@pytest.mark.colab
def test_what_cells_do_meanwhile_changes_no_bit(tmp_path: Path) -> None:
    quiet, model = colabtrain.MMJev.tiny(0), colabtrain.MMJev.tiny(0)
    assert colabtrain.start(quiet, help_desk(30), run_dir=tmp_path / "quiet", **OPTIONS).wait(SECONDS) == "finished"
    run = colabtrain.start(model, help_desk(30), run_dir=tmp_path / "loud", **OPTIONS)
    while run.state in ("starting", "running"):
        model.eval()
        random.random(), numpy.random.rand(), torch.rand(3)
        with pytest.raises(ZeroDivisionError), run.borrow() as lent:
            assert lent is model and not model.heads.training and not torch.is_grad_enabled()
            disturb(lent)
            raise ZeroDivisionError
        assert torch.is_grad_enabled()
    assert run.wait(SECONDS) == "finished"
    assert losses(tmp_path / "loud") == losses(tmp_path / "quiet")
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(quiet).items())


def test_random_state_and_modes_are_put_back(tmp_path: Path) -> None:
    """A Task whose dropout and data come from the global generator: each borrow draws from it."""
    torch.manual_seed(3)
    assert start(LentTask(12), tmp_path / "quiet").wait(SECONDS) == "finished"
    torch.manual_seed(3)
    halt = Halt(4)
    task = LentTask(12, halt)
    run = start(task, tmp_path / "loud")
    assert halt.reached.wait(SECONDS)
    task.model[1].eval()
    lenders = [in_thread(lambda: borrowed(run)) for _ in range(3)]
    halt.go.set()
    for thread in lenders:
        thread.join(SECONDS)
    assert run.wait(SECONDS) == "finished"
    assert losses(tmp_path / "loud") == losses(tmp_path / "quiet") and task.modes == [True] * 12


def borrowed(run: Run) -> None:
    with run.borrow() as model:
        model(torch.rand(2, 3))
        torch.rand(1), random.random(), numpy.random.rand()


def test_modes_and_learning_parts_come_back_exactly(tmp_path: Path) -> None:
    task = LentTask(2)
    run = start(task, tmp_path)
    assert run.wait(SECONDS) == "finished"
    task.model.train()
    task.model[1].eval()
    before = [part.training for part in task.model.modules()]
    with pytest.raises(KeyError), torch.enable_grad(), run.borrow() as model:
        assert not any(part.training for part in model.modules()) and not torch.is_grad_enabled()
        model.train().requires_grad_(False)
        raise KeyError
    assert [part.training for part in task.model.modules()] == before and all(p.requires_grad for p in task.model.parameters())


def test_borrowers_take_turns_and_training_goes_on_between(tmp_path: Path) -> None:
    run = start(LentTask(10**6), tmp_path)
    inside, most, steps = list[int](), list[int](), list[int]()

    def use() -> None:
        for _ in range(5):
            with run.borrow(), run.borrow():  # one has what it has
                inside.append(1)
                most.append(len(inside))
                steps.append(run.step)
                inside.pop()

    for thread in [in_thread(use) for _ in range(3)]:
        thread.join(SECONDS)
    assert most == [1] * 15
    assert sorted(set(steps)) == steps, "a step between any two, or a cell that borrows in a loop would stop the training"
    assert run.stop() == "stopped"


def test_when_there_is_a_model_to_borrow(tmp_path: Path) -> None:
    runs, said, known = list[Run](), list[str](), threading.Event()

    def from_the_worker(i: int) -> None:
        if i == 2:
            assert known.wait(SECONDS)
            with pytest.raises(RuntimeError, match=r"borrow\(\) is for other threads") as error, runs[0].borrow():
                pass
            said.append(str(error.value))

    run = start(LentTask(10**6, from_the_worker), tmp_path)
    runs.append(run)
    known.set()
    assert goes_on(run, 3) and said
    run.pause()
    assert run.checkpoint(wait=True) > 0
    for _ in range(2):  # while paused
        with run.borrow() as model:
            assert model is not None
    run.resume()
    with run.borrow():
        assert run.stop(timeout=SECONDS) == "stopping" and run.wait(SECONDS) == "stopping" and run.checkpoint(wait=True) > 0
        with pytest.raises(RuntimeError, match="stop it first"):
            run.free()
    assert run.wait(SECONDS) == "stopped"
    with run.borrow() as model, run.borrow():  # after the end
        assert model is not None
    run.free()
    run.free()
    with pytest.raises(RuntimeError, match="has let go of its model"), run.borrow():
        pass
    unlent = start(ToyTask(1), tmp_path / "unlent")
    with pytest.raises(RuntimeError, match=r"ToyTask has no borrow\(\)"), unlent.borrow():
        pass
    assert unlent.wait(SECONDS) == "finished"


class InterruptAt:
    """A trace function that raises KeyboardInterrupt at the `at`-th line of controls.py.

    Not at a `with`, whose exit calls what it must before Python looks for interrupts again, nor at a `try:`, where it never looks.
    """

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> InterruptAt | None:
        file = frame.f_code.co_filename
        if Path(file).name not in ("controls.py", "run.py", "contextlib.py"):
            return None
        if (
            file == controls.__file__
            and event == "line"
            and not linecache.getline(file, frame.f_lineno).lstrip().startswith(("with ", "try:"))
        ):
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self


@pytest.mark.colab
def test_an_interrupt_anywhere_in_borrowing_leaves_the_run_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "POLL_SECONDS", 0.01)
    run, before, interrupts = start(LentTask(10**6), tmp_path), sys.gettrace(), 0
    while True:
        interrupt = InterruptAt(interrupts + 1)
        sys.settrace(interrupt)
        try:
            with run.borrow():
                pass
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(before)
        assert goes_on(run), f"after an interrupt at line {interrupt.seen} of the controls"
        if interrupt.seen < interrupt.at:
            break
    assert interrupts > 10 and run.stop() == "stopped"


# Memory


class Fails(ToyTask):
    """Runs out of memory in the first attempts of step 2, with a tensor in its frame."""

    def __init__(self, chained: bool, attempts: int = 1) -> None:
        super().__init__(6)
        self.chained, self.attempts = chained, attempts
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []  # of the failed attempts' tensors, when each attempt begins
        self.tried: list[tuple[int, int]] = []

    def step(self, i: int, splits: int = 1) -> StepReport:
        self.alive.append(sum(ref() is not None for ref in self.held))
        self.tried.append((i, splits))
        if i == 2 and len(self.held) < self.attempts:
            large = torch.zeros(10)
            self.held.append(weakref.ref(large))
            try:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            except torch.OutOfMemoryError as error:
                if self.chained:
                    raise RuntimeError("while doing something else") from error
                raise
        return super().step(i)


@pytest.mark.colab
@pytest.mark.parametrize("chained", [False, True])
def test_nothing_of_a_failed_attempt_is_alive_in_the_next(chained: bool, tmp_path: Path) -> None:
    task = Fails(chained, attempts=2)
    gc.disable()  # the collector must not be what saves it
    try:
        run = start(task, tmp_path)
        assert run.wait(SECONDS) == "finished"
    finally:
        gc.enable()
    assert task.tried == [(0, 1), (1, 1), (2, 1), (2, 2), (2, 4), (3, 1), (4, 1), (5, 1)]
    assert task.alive == [0] * 8
    assert [event["splits"] for event in events(tmp_path, "oom")] == [1, 2] and len(losses(tmp_path)) == 6


def test_a_retried_step_is_as_if_it_had_not_failed(tmp_path: Path) -> None:
    torch.manual_seed(3)
    assert start(ToyTask(6), tmp_path / "quiet").wait(SECONDS) == "finished"
    torch.manual_seed(3)
    assert start(Fails(False), tmp_path / "retried").wait(SECONDS) == "finished"
    assert losses(tmp_path / "retried") == losses(tmp_path / "quiet")


@pytest.mark.parametrize("chained", [False, True])
def test_nothing_of_the_last_attempt_is_alive_after_the_end(chained: bool, tmp_path: Path) -> None:
    task = Fails(chained, attempts=100)
    run = start(task, tmp_path)
    with pytest.raises(RunFailed, match="does not fit into memory in 64 parts either"):
        run.wait(SECONDS)
    gc.collect()
    assert len(task.held) == 7 and not any(ref() is not None for ref in task.held)
    assert run.saved_step == 2 and not run.needs_restart


def test_free_drops_the_model_and_the_hook(tmp_path: Path) -> None:
    task = LentTask(2)

    def hook(path: Path, step: int) -> None: ...

    run = start(task, tmp_path, on_checkpoint=hook)
    assert run.wait(SECONDS) == "finished"
    kept = [weakref.ref(task.model), weakref.ref(hook)]
    del task, hook
    gc.collect()
    assert all(ref() is not None for ref in kept)
    run.free()
    assert all(ref() is None for ref in kept)


def test_memory_that_does_not_come_back_ends_the_step(tmp_path: Path) -> None:
    used = iter([1 * 2**30, 4 * 2**30])
    recorder = Recorder(Diary(tmp_path), 50, 6)
    with pytest.raises(NeedsRestart, match=r"3.0 GiB of the accelerator's memory did not come back"):
        Retry(Fails(False), recorder, used_bytes=lambda: next(used)).step(2)
    used = iter([1 * 2**30, 3 * 2**30])  # two are borne
    task = Fails(False)
    task.prepare()
    assert Retry(task, recorder, used_bytes=lambda: next(used)).step(2).loss


LEAKING = """
import sys
sys.path[:0] = sys.argv[3:]
import colabtrain
from colabtrain import device
from test_facts import Fails
gauge = iter(range(0, 100 * 2**30, 3 * 2**30))
loop = __import__("colabtrain.runtime.loop", fromlist=["Retry"])
retry = loop.Retry
loop.Retry = lambda task, recorder: retry(task, recorder, used_bytes=lambda: next(gauge))
run = colabtrain.start(task=Fails(False), run_dir=sys.argv[1], on_unrecoverable=sys.argv[2])
try:
    run.wait()
except colabtrain.RunFailed:
    print(run.state, run.needs_restart, run.saved_step)
"""


@pytest.mark.parametrize(("choice", "status", "printed"), [("exit", 3, ""), ("fail", 0, "failed True 2\n")])
def test_the_process_ends_only_if_asked_to_and_after_the_save(choice: str, status: int, printed: str, tmp_path: Path) -> None:
    paths = [str(Path(colabtrain.__file__).parents[1]), str(Path(__file__).parent)]
    command = [sys.executable, "-c", LEAKING, str(tmp_path), choice, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * SECONDS, check=False)
    assert (done.returncode, done.stdout) == (status, printed), done.stderr
    assert checkpoint.read(tmp_path / "checkpoints/step-00000002").step == 2
    text = events(tmp_path, "failed")[0]["text"]
    assert text.endswith("the newest checkpoint is of step 2; restart the runtime, then the same start() goes on from there")


@pytest.mark.colab
def test_nothing_of_the_loaded_checkpoint_is_alive_after_the_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(steps: int, **options: Any) -> Run:
        return colabtrain.start(colabtrain.MMJev.tiny(0), help_desk(20), run_dir=tmp_path, display=False, steps=steps, **options)

    assert begin(2).wait(SECONDS) == "finished"
    real, loaded = checkpoint.read, list[weakref.ref[torch.Tensor]]()

    def read(path: Path) -> checkpoint.Checkpoint:
        found = real(path)
        loaded.extend(weakref.ref(tensor) for group in found.tensors.values() for tensor in group.values())
        return found

    monkeypatch.setattr(checkpoint, "read", read)
    run = begin(10**6)
    assert goes_on(run, 3)
    assert len(loaded) > 100 and not any(ref() is not None for ref in loaded)
    assert run.stop() == "stopped"


def test_a_skipped_step_uses_up_its_number_and_is_counted(tmp_path: Path) -> None:
    class Skips(ToyTask):
        def step(self, i: int, splits: int = 1) -> StepReport:
            return StepReport(loss={"toy": 1.0}, lr={"all": 0.1 * i}, skipped=i in (1, 2))

    assert start(Skips(5), tmp_path).wait(SECONDS) == "finished"
    steps = events(tmp_path, "step")
    assert [(event["step"], event["skipped"], event["lr"]["all"]) for event in steps] == [(i + 1, i in (1, 2), 0.1 * i) for i in range(5)]
    assert steps[-1]["text"].endswith(", 2 steps skipped")


def test_no_run_starts_on_a_model_that_an_ended_run_still_lends(tmp_path: Path) -> None:
    """The end of the borrow would put modes and gradients back under the new training."""
    model, options = colabtrain.MMJev.tiny(0), {"steps": 1, "display": False}
    run = colabtrain.start(model, help_desk(12), run_dir=tmp_path / "a", **options)
    assert run.wait(SECONDS) == "finished"
    with run.borrow(), run.borrow():
        pass
    with run.borrow():
        with run.borrow():
            pass
        with pytest.raises(
            colabtrain.AlreadyRunning, match=r"the model is borrowed from <colabtrain run .*a.: finished.*; leave that `with` block first"
        ):
            colabtrain.start(model, help_desk(12), run_dir=tmp_path / "b", **options)
    assert colabtrain.start(model, help_desk(12), run_dir=tmp_path / "b", **options).wait(SECONDS) == "finished"


def test_an_ended_runs_borrow_leaves_the_random_numbers_alone(tmp_path: Path) -> None:
    """Nobody's numbers hang on them any more, and a cell that samples twice means two samples."""
    run = colabtrain.start(colabtrain.MMJev.tiny(0), help_desk(12), run_dir=tmp_path, steps=1, display=False)
    assert run.wait(SECONDS) == "finished"
    drawn = []
    for _ in range(2):
        with run.borrow():
            drawn.append(float(torch.rand(())))
    assert drawn[0] != drawn[1]
