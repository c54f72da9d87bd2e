"""Saving beside the training: what waits for what, when it is due, and what a resume accepts."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Halt, all_written, events
from test_checkpoint import rehash
from toy_task import LentTask, ToyTask

import colabtrain
from colabtrain.config import RunConfig, TrainConfig
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev
from colabtrain.records.selection import select
from colabtrain.runtime import checkpoint, disk, keeper, manifest
from colabtrain.runtime.diary import Diary
from colabtrain.runtime.pace import MAX_BLOCKED_SHARE, WINDOW_SECONDS, Pace
from colabtrain.runtime.recorder import Recorder
from colabtrain.runtime.run import Run, RunFailed
from colabtrain.task import StepReport

pytestmark = pytest.mark.colab

SECONDS = 30.0


def start(task: ToyTask, folder: Path, **options: Any) -> Run:
    return colabtrain.start(task=task, run_dir=folder, display=False, **options)


def saved_steps(folder: Path) -> list[int]:
    return [event["step"] for event in events(folder, "checkpoint_saved")]


class SlowDisk:
    """Holds the first write of a checkpoint until let go. `writes`: the steps that were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int = 0) -> None:
        self.begun, self.go, self.writes, self._at = threading.Event(), threading.Event(), list[int](), at
        self._real = checkpoint.write
        monkeypatch.setattr(checkpoint, "write", self._write)

    def _write(self, folder: Path, snapshot: checkpoint.Snapshot, diary: Path) -> Path:
        self.writes.append(snapshot.step)
        if len(self.writes) == self._at + 1:
            self.begun.set()
            assert self.go.wait(SECONDS)
        return self._real(folder, snapshot, diary)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    made = SlowDisk(monkeypatch)
    yield made
    made.go.set()


# Beside the training


def test_a_save_that_is_due_waits_for_the_one_before_and_the_newest_step_wins(tmp_path: Path, slow_disk: SlowDisk) -> None:
    halt = Halt(11)
    run = start(ToyTask(20, halt), tmp_path, checkpoint_every=3)
    assert halt.reached.wait(SECONDS), "training goes on while a checkpoint is written"
    assert slow_disk.writes == [3] and run.saved_step == 0
    slow_disk.go.set()
    all_written()
    assert run.saved_step == 3
    halt.go.set()
    assert run.wait(SECONDS) == "finished"
    assert slow_disk.writes[:2] == [3, 12] and slow_disk.writes[-1] == 20, "6 and 9 came due in vain, and 12 is newer"


def test_pause_and_stop_return_when_the_step_is_on_the_disk(tmp_path: Path, slow_disk: SlowDisk) -> None:
    halt = Halt(5)
    run = start(ToyTask(50, halt), tmp_path, checkpoint_every=3)
    assert halt.reached.wait(SECONDS) and slow_disk.begun.is_set()
    run.pause()
    halt.go.set()
    assert run.state == "running" and saved_steps(tmp_path) == []
    slow_disk.go.set()
    while run.state != "paused":
        threading.Event().wait(0.01)
    assert saved_steps(tmp_path) == [3, 6] == [*slow_disk.writes] and run.saved_step == 6
    assert run.stop() == "stopped" and saved_steps(tmp_path) == [3, 6], "the step is saved already"


def test_a_stop_that_waits_for_the_disk_says_so(tmp_path: Path, slow_disk: SlowDisk) -> None:
    run = start(ToyTask(10**6), tmp_path, checkpoint_every=3)
    assert slow_disk.begun.wait(SECONDS)
    assert run.stop(timeout=0.01) == "stopping"
    assert any(event["text"].startswith("a checkpoint is still being written 0.01 s after stop()") for event in events(tmp_path, "log"))
    slow_disk.go.set()
    assert run.wait(SECONDS) == "stopped" and run.saved_step == run.step


def test_a_checkpoint_on_demand_is_of_now_though_one_is_being_written(tmp_path: Path, slow_disk: SlowDisk) -> None:
    halt = Halt(5)
    run = start(ToyTask(10**6, halt), tmp_path, checkpoint_every=3)
    assert halt.reached.wait(SECONDS)
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(run.checkpoint(wait=True)))
    asking.start()
    halt.go.set()
    while run.step < 8:
        threading.Event().wait(0.001)
    assert asking.is_alive()  # X
    slow_disk.go.set()
    asking.join(SECONDS)
    assert len(answers) == 1 and answers[0] >= 8
    assert run.stop() == "stopped"


def test_a_checkpoint_on_demand_is_the_one_that_is_due_at_the_same_step(tmp_path: Path, slow_disk: SlowDisk) -> None:
    """Where a step takes longer than a write, the one asked for would come too late at each step, and each step be saved."""
    runs: list[Run] = []

    def before_step(i: int) -> None:
        if i == 2:
            assert known.wait(SECONDS)
            runs[0].checkpoint()
        if i == 4:
            slow_disk.go.set()
        if i >= 4:
            all_written()

    known = threading.Event()
    runs.append(start(ToyTask(9, before_step), tmp_path, checkpoint_every=3))
    known.set()
    assert runs[0].wait(SECONDS) == "finished" and saved_steps(tmp_path) == [3, 6, 9]


def test_a_wait_for_a_checkpoint_that_is_interrupted_does_not_mix_two_steps(tmp_path: Path, slow_disk: SlowDisk) -> None:
    """An interrupt of Thread.join() calls a live thread dead (Python 3.11 and 3.12): its buffers would be filled anew."""
    weight = torch.zeros(3)

    def before_step(i: int) -> None:
        for halt in (first, second):
            halt(i)
        if i == 3:
            weight.copy_(task.weight.detach())

    first, second = Halt(4), Halt(8)
    task = ToyTask(9, before_step)
    run = start(task, tmp_path, checkpoint_every=3)
    assert slow_disk.begun.wait(SECONDS) and first.reached.wait(SECONDS)
    interrupting = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        run._keeper.drain()  # the last thing that checkpoint(wait=True) waits for
    first.go.set()
    assert second.reached.wait(SECONDS) and slow_disk.writes == [3], "the 6th is due, and waits"
    slow_disk.go.set()
    all_written()
    second.go.set()
    assert run.wait(SECONDS) == "finished"
    found = checkpoint.read(tmp_path / "checkpoints/step-00000003")
    assert torch.equal(found.tensors["trainable"]["weight"], weight)


def test_a_checkpoint_on_demand_is_made_while_the_run_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = iter([False, True])  # the first look is before the first step

    def check_room(folder: Path, num_bytes: int) -> None:
        if next(fails, False):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "check_room", check_room)
    halt = Halt(2)
    run = start(ToyTask(9, halt), tmp_path)
    assert halt.reached.wait(SECONDS)
    run.pause()
    halt.go.set()
    while run.state != "paused":
        threading.Event().wait(0.01)
    assert run.saved_step == 0 and len(events(tmp_path, "checkpoint_failed")) == 1
    assert run.checkpoint(wait=True) == 3
    assert run.stop() == "stopped"


# The hook


def test_a_hook_runs_beside_the_training_and_may_use_the_controls(tmp_path: Path) -> None:
    said: list[Any] = []
    runs: list[Run] = []
    known = threading.Event()

    def hook(path: Path, step: int) -> None:
        assert known.wait(SECONDS)
        said.append((threading.current_thread().name, sorted(file.name for file in path.iterdir())))
        if step == 2:
            said.extend([runs[0].checkpoint(wait=True), runs[0].wait(), runs[0].stop()])  # none may wait for itself
            with pytest.raises(RuntimeError, match="a hook must not wait"), runs[0].borrow():
                pass

    runs.append(colabtrain.start(task=LentTask(10**6), run_dir=tmp_path, display=False, checkpoint_every=2, on_checkpoint=hook))
    known.set()
    assert runs[0].wait(SECONDS) == "stopped" and not events(tmp_path, "hook_failed")
    names = sorted([*manifest.TENSOR_FILES, "diary.jsonl", "manifest.json", "state.json"])
    assert said[0] == (keeper.THREAD_NAME, names) and said[1:4] == [2, "running", "stopping"]


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(1), KeyboardInterrupt()])
def test_what_a_hook_raises_is_said_and_costs_nothing(error: BaseException, tmp_path: Path) -> None:
    def hook(path: Path, step: int) -> None:
        raise error

    assert start(ToyTask(4, all_written), tmp_path, checkpoint_every=2, on_checkpoint=hook).wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path, "hook_failed")] == [2, 4] == saved_steps(tmp_path)
    assert type(error).__name__ in events(tmp_path, "hook_failed")[0]["text"]


def test_the_end_waits_for_the_hook(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def hook(path: Path, step: int) -> None:
        begun.set()
        assert go.wait(SECONDS)

    run = start(ToyTask(2), tmp_path, on_checkpoint=hook)
    assert begun.wait(SECONDS) and run.saved_step == 2
    with pytest.raises(colabtrain.AlreadyRunning):
        start(ToyTask(2), tmp_path)
    assert run.state == "running"
    go.set()
    assert run.wait(SECONDS) == "finished"


def test_a_hook_that_hangs_is_said_once_and_at_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it does nothing newer is saved: nobody may train on for days without knowing."""
    monkeypatch.setattr("colabtrain.runtime.pace.LATE_SECONDS", 0.0)

    def before_step(i: int) -> None:
        assert i != 4 or in_hook.wait(SECONDS)
        halt(i)

    def hook(path: Path, step: int) -> None:
        in_hook.set()
        assert go.wait(SECONDS)

    go, in_hook, halt = threading.Event(), threading.Event(), Halt(20)
    run = start(ToyTask(10**6, before_step), tmp_path, checkpoint_every=3, on_checkpoint=hook)
    assert halt.reached.wait(SECONDS) and run.saved_step == 3
    (late,) = events(tmp_path, "checkpoint_late")
    assert late["step"] == 6
    assert late["text"] == "on_checkpoint is still at work after 0 s; training goes on, but nothing newer is saved until that is done"
    halt.go.set()
    assert run.stop(timeout=0.01) == "stopping"
    assert any(event["text"].startswith("on_checkpoint is still at work 0.01 s after stop()") for event in events(tmp_path, "log"))
    go.set()
    assert run.wait(SECONDS) == "stopped" and run.saved_step == run.step


def test_a_checkpoint_that_is_held_is_not_removed(tmp_path: Path) -> None:
    """As long as somebody reads its files: the hook, or what publishes it."""
    task, diary = ToyTask(9), Diary(tmp_path)
    task.prepare()
    diary.log("begun")
    kept = keeper.Keeper(task, diary, tmp_path, RunConfig(keep_local=1))
    recorder = Recorder(diary, 50, 9)

    def names() -> list[str]:
        return [path.name for path in manifest.listed(tmp_path / "checkpoints")]

    assert kept.save_now(1, recorder)
    with kept.hold(tmp_path / "checkpoints/step-00000001"):
        assert kept.save_now(2, recorder) and kept.save_now(3, recorder)
        assert names() == ["step-00000003", "step-00000001"]
    assert kept.save_now(4, recorder)
    assert names() == ["step-00000004"]


# What goes wrong on the writer's thread


def test_an_error_that_nobody_thought_of_is_said_and_the_next_save_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, errors = checkpoint.write, iter([ZeroDivisionError("a bug")])

    def write(*arguments: Any) -> Path:
        for error in errors:
            raise error
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "write", write)
    assert start(ToyTask(4, all_written), tmp_path, checkpoint_every=2).wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path, "checkpoint_failed")] == [2] and saved_steps(tmp_path) == [4]
    assert "a bug" in events(tmp_path, "checkpoint_failed")[0]["text"]


NO_THREADS = ["can't start new thread", "can't create new thread at interpreter shutdown"]


@pytest.mark.parametrize("why", NO_THREADS)
def test_where_no_thread_can_be_had_the_training_thread_writes(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is what Python 3.12 says at its end: the last steps must be saved all the same."""
    real = threading.Thread.start

    def start_thread(self: threading.Thread) -> None:
        if self.name == keeper.THREAD_NAME:
            raise RuntimeError(why)
        real(self)

    def hook(path: Path, step: int) -> None:
        said.extend([threading.current_thread().name, runs[0].checkpoint(wait=True), runs[0].stop()])
        with pytest.raises(RuntimeError, match="a hook must not wait"), runs[0].borrow():
            pass

    said: list[Any] = []
    monkeypatch.setattr(threading.Thread, "start", start_thread)
    halt = Halt(0)
    runs = [colabtrain.start(task=LentTask(9, halt), run_dir=tmp_path, display=False, checkpoint_every=2, on_checkpoint=hook)]
    halt.go.set()
    assert runs[0].wait(SECONDS) == "stopped" and runs[0].saved_step == 2 and saved_steps(tmp_path) == [2]
    assert said == ["colabtrain-train", 2, "stopping"] and not events(tmp_path, "checkpoint_failed") and not events(tmp_path, "hook_failed")


def test_a_weight_that_is_not_finite_never_becomes_the_newest_good_one(tmp_path: Path) -> None:
    def before_step(i: int) -> None:
        all_written()
        if i == 3:
            with torch.no_grad():
                task.weight[1] = float("inf")

    task = ToyTask(4, before_step)
    run = start(task, tmp_path, checkpoint_every=2)
    with pytest.raises(RunFailed, match="step 4 could not be saved; the newest checkpoint is of step 2"):
        run.wait(SECONDS)
    assert saved_steps(tmp_path) == [2] and "weight is not finite" in events(tmp_path, "checkpoint_failed")[0]["text"]


@pytest.mark.parametrize("breaks", [False, True])
def test_after_the_last_step_nothing_is_said_to_go_on(breaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before_step(i: int) -> None:
        all_written()
        if breaks and i == 3:
            raise KeyError("a bug")

    def write(folder: Path, snapshot: checkpoint.Snapshot, diary: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", write)
    monkeypatch.setattr(keeper, "RETRY_SECONDS", 0.0)
    with pytest.raises(RunFailed, match="a bug" if breaks else "step 4 could not be saved"):
        start(ToyTask(4, before_step), tmp_path, checkpoint_every=2).wait(SECONDS)
    said = [(event["step"], event["text"].endswith("; training goes on")) for event in events(tmp_path, "checkpoint_failed")]
    assert said[0] == (2, True) and said[-1] == (3 if breaks else 4, False)


def test_a_diary_that_the_disk_refuses_is_no_part_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps would be lost with the machine, and nobody would know."""
    diary, real = Diary(tmp_path), Path.open
    diary.log("one")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        diary.log("two")
        with pytest.raises(OSError, match="No space left"):
            diary.size()
    assert Path.open is real and diary.size() == (tmp_path / "diary.jsonl").stat().st_size
    assert [event["text"] for event in events(tmp_path)] == ["one", "two"]


def test_a_disk_without_room_is_said_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_room(folder: Path, num_bytes: int) -> None:
        asked.append(num_bytes)
        if len(asked) == 1:
            raise OSError(28, "1 KiB free")

    asked: list[int] = []
    monkeypatch.setattr(disk, "check_room", check_room)
    assert start(ToyTask(2), tmp_path).wait(SECONDS) == "finished"
    told = [event["event"] for event in events(tmp_path) if event["event"] in ("checkpoint_failed", "step", "checkpoint_saved")]
    assert told == ["checkpoint_failed", "step", "step", "checkpoint_saved"] and asked[0] == 3 * 4
    text = events(tmp_path, "checkpoint_failed")[0]["text"]
    assert text.startswith("there is no room for a checkpoint: ") and "1 KiB free" in text


UNSAVABLE: dict[str, tuple[Any, Any]] = {
    "number": ("a", 5),
    "None": ("a", None),
    "no string": (3, torch.zeros(2)),
    "reserved": ("__metadata__", torch.zeros(2)),
    "sparse": ("a", torch.eye(2).to_sparse()),
    "no data": ("a", torch.zeros(2, device="meta")),
    "complex128": ("a", torch.zeros(2, dtype=torch.complex128)),
}


@pytest.mark.parametrize("group", manifest.TENSOR_GROUPS)
@pytest.mark.parametrize("what", UNSAVABLE)
def test_a_state_that_cannot_be_saved_is_said_as_soon_as_it_is_seen(
    what: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(ToyTask):
        def state(self) -> Any:
            tensors, meta = super().state()
            if self.adam.state or not late:
                tensors[group][name] = value
            return tensors, meta

    monkeypatch.setattr(keeper, "RETRY_SECONDS", 0.0)
    name, value = UNSAVABLE[what]
    shown = f"tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
    words = rf"Odd\.state\(\) gave a {shown} by the name {name!r} in '{group}'; it must give dense tensors"
    for late in (False, True):  # before the first step; when an optimizer has a state
        run = start(Odd(2, all_written), tmp_path / str(late), checkpoint_every=1)
        with pytest.raises(RunFailed, match=words):
            run.wait(SECONDS)
        assert run.step == (2 if late else 0) and run.saved_step == 0
        assert bool(events(run.folder, "checkpoint_failed")) == late


def test_a_task_that_sets_the_default_device_is_saved_and_goes_on(tmp_path: Path) -> None:
    """Buffers and random states are host memory whatever it is; `meta` stands for a GPU."""

    class Sets(ToyTask):
        def prepare(self) -> None:
            super().prepare()
            torch.set_default_device("meta")  # of this thread

        def step(self, i: int, splits: int = 1) -> StepReport:
            with torch.device("cpu"):
                return super().step(i, splits)

    assert start(Sets(2), tmp_path).wait(SECONDS) == "finished"
    assert start(Sets(4), tmp_path).wait(SECONDS) == "finished" and saved_steps(tmp_path) == [2, 4]


def test_a_diary_that_was_refused_keeps_nothing_of_the_save_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept:
        """Stands for the tensors in the frame of a save."""

    def save(diary: Diary) -> weakref.ref[Kept]:
        kept = Kept()
        with contextlib.suppress(OSError):
            diary.size()
        return weakref.ref(kept)

    diary = Diary(tmp_path)
    monkeypatch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    diary.log("one")
    assert save(diary)() is None


# When it is due


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def due_steps(
    pace: Pace, clock: Clock, seconds_per_step: float, blocked: Callable[[int], float], steps: range
) -> tuple[list[int], list[str]]:
    """Which of `steps` were saved, each holding up the training for blocked(step) seconds, and what was said."""
    taken, said = list[int](), list[str]()
    for step in steps:
        clock.now += seconds_per_step
        if pace.due(step):
            taken.append(step)
            clock.now += blocked(step)
            said += filter(None, [pace.taken(blocked(step))])
    return taken, said


def test_due_by_steps_and_by_time_the_first_one_early() -> None:
    clock = Clock()
    pace = Pace(RunConfig(), clock)
    clock.now += 3600  # a model was loaded
    pace.start()
    taken, said = due_steps(pace, clock, 2.0, lambda step: 0.01, range(1, 1001))
    assert taken == [30, 180, 200, 350, 400, 550, 600, 750, 800, 950, 1000] and said == []


def test_the_interval_doubles_while_saving_holds_up_the_training_and_comes_back() -> None:
    clock = Clock()
    pace = Pace(RunConfig(checkpoint_every=10), clock)
    pace.start()
    taken, said = due_steps(pace, clock, 1.0, lambda step: 1.0 if step < 400 else 0.01, range(1, 1000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(taken)]
    assert gaps[:2] == [10, 10] and max(gaps) == 40 and gaps[-1] == 10
    assert 1.0 / 41 < MAX_BLOCKED_SHARE < 1.0 / 21
    assert [line.split(": ")[1].split(" from")[0] for line in said] == [
        f"a checkpoint every {every} steps or {30 * every:,} s" for every in (20, 40, 20, 10)
    ]


def test_a_short_time_says_nothing_of_the_share() -> None:
    clock = Clock()
    pace = Pace(RunConfig(checkpoint_every=1), clock)
    pace.start()
    _, said = due_steps(pace, clock, 0.1, lambda step: 0.1, range(1, int(WINDOW_SECONDS / 0.2)))
    assert said == []


def test_one_that_cannot_be_taken_stays_due() -> None:
    clock = Clock()
    pace = Pace(RunConfig(checkpoint_every=10), clock)
    assert [step for step in range(1, 12) if pace.due(step)] == [10]
    assert pace.postpone() is None
    assert pace.due(11) and pace.due(12)
    clock.now += 301
    assert [pace.postpone(), pace.postpone()] == [301, None], "said once"
    pace.taken(0.0)
    assert not pace.due(13) and pace.postpone() is None
    clock.now += 400
    assert pace.postpone() == 400


# What a resume says and accepts


def test_what_is_found_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    class Loads(ToyTask):
        def prepare(self) -> None:
            loading.extend(event.get("text", "") for event in events(tmp_path))
            super().prepare()

    loading: list[str] = []
    assert start(Loads(4, all_written), tmp_path, checkpoint_every=2).wait(SECONDS) == "finished"
    assert loading[-1] == f"fresh start: no checkpoint in {tmp_path / 'checkpoints'}"
    (tmp_path / "checkpoints/step-00000004/state.json").unlink()
    assert start(Loads(4), tmp_path).wait(SECONDS) == "finished"
    assert loading[-2].startswith("checkpoint step-00000004 cannot be used: state.json")
    assert loading[-1] == f"going on from step 2 of checkpoint {tmp_path / 'checkpoints/step-00000002'}, once all is loaded"
    loading.clear()
    for path in manifest.listed(tmp_path / "checkpoints"):
        (path / "manifest.json").unlink()
    with pytest.raises(RunFailed, match=r"no checkpoint in .* can be used"):
        start(Loads(4), tmp_path).wait(SECONDS)
    assert loading == [], "nobody waits for a model to hear that"


@pytest.mark.parametrize("why", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error"), None])
def test_checkpoints_that_cannot_be_seen_are_not_none(why: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a disk that fails nor of a link to one that is not mounted: a fresh start would be a loss."""

    def refuse(real: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any = ".") -> Any:
            if why is not None and Path(path).name == "checkpoints":
                raise why
            return real(path)

        return look

    if why is None:
        (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
    else:
        assert start(ToyTask(2), tmp_path).wait(SECONDS) == "finished"
    before = events(tmp_path)
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))
    with pytest.raises(ValueError, match=r"^run_dir: whether there are checkpoints cannot be seen: .*'\S*/checkpoints'"):
        start(ToyTask(4), tmp_path)
    assert events(tmp_path) == before


def jev_run(folder: Path, **options: Any) -> Run:
    options = {"steps": 3, "batch_size": 2, "max_eval_records": 2, **options}
    return colabtrain.start(MMJev.tiny(0), help_desk(24), run_dir=folder, display=False, **options)


def test_a_mismatch_is_refused_with_the_line_that_accepts_it(tmp_path: Path) -> None:
    assert jev_run(tmp_path).wait(SECONDS) == "finished"
    with pytest.raises(ValueError, match=r"config\.batch_size: checkpoint 2, now 3.*allow_mismatch=\['config\.batch_size'\]$"):
        jev_run(tmp_path, batch_size=3)
    with pytest.raises(ValueError, match=r"\(config\.seed: checkpoint 0, now 1\).*allow_mismatch=\['config\.seed'\]$"):
        jev_run(tmp_path, batch_size=3, seed=1, allow_mismatch=["config.batch_size"])
    for accepted in (["config.batch_size"], ("batch_size",)):  # the second one from here on is no mismatch any more
        run = jev_run(tmp_path, batch_size=3, steps=5, allow_mismatch=accepted)
        assert run.wait(SECONDS) == "finished" and run.step == 5
    (said,) = [event["text"] for event in events(tmp_path, "log") if "allow_mismatch" in event["text"]]
    assert said == "going on although the checkpoint differs, as allow_mismatch says: config.batch_size: checkpoint 2, now 3"
    assert jev_run(tmp_path, batch_size=3, steps=5).wait(SECONDS) == "finished"


def test_what_cannot_be_accepted_is_refused_all_the_same(tmp_path: Path) -> None:
    assert jev_run(tmp_path, lora_r=4).wait(SECONDS) == "finished"
    with pytest.raises(RunFailed, match=r"no checkpoint in .* can be used"):
        jev_run(tmp_path, lora_r=8, allow_mismatch=["lora_r", "trainable"]).wait(SECONDS)
    assert "lora_A" in events(tmp_path, "checkpoint_rejected")[0]["reason"]
    assert jev_run(tmp_path, lora_r=4, steps=4).wait(SECONDS) == "finished"


@pytest.mark.parametrize(("fresh", "words"), [(True, "did you mean config.seed"), (False, "did you mean config.seed")])
def test_a_name_that_names_nothing_is_refused(fresh: bool, words: str, tmp_path: Path) -> None:
    if not fresh:
        assert jev_run(tmp_path).wait(SECONDS) == "finished"
    with pytest.raises(RunFailed, match=rf"allow_mismatch='config\.sed' names nothing that could differ; {words}"):
        jev_run(tmp_path, allow_mismatch=["config.sed"]).wait(SECONDS)
    assert len(events(tmp_path, "step")) == (0 if fresh else 3)


def test_a_fingerprint_may_have_keys_that_are_no_strings(tmp_path: Path) -> None:
    class Numbered(ToyTask):
        def fingerprint(self) -> dict[Any, Any]:
            return {1: (self.mark, 2)}

    for steps in (2, 4):
        assert start(Numbered(steps), tmp_path, allow_mismatch=["1"]).wait(SECONDS) == "finished"
    assert start(Numbered(6), tmp_path).wait(SECONDS) == "finished" and saved_steps(tmp_path) == [2, 4, 6]


def test_a_live_run_gives_way_to_one_that_accepts_the_difference(tmp_path: Path) -> None:
    run = jev_run(tmp_path, steps=10**6)
    with pytest.raises(colabtrain.AlreadyRunning, match="trains something else in this folder"):
        jev_run(tmp_path, steps=10**6, batch_size=3, replace=True)
    other = jev_run(tmp_path, steps=10**6, batch_size=3, replace=True, allow_mismatch=["batch_size"])
    assert run.state == "stopped" and other.step >= 0
    assert other.stop() == "stopped" and other.step >= run.step


@pytest.mark.parametrize(("options", "wanted"), [({}, "finished"), ({"kl_temperature": 3.0}, None)])
def test_a_field_that_an_old_checkpoint_lacks_was_at_its_default(options: dict[str, Any], wanted: str | None, tmp_path: Path) -> None:
    assert jev_run(tmp_path).wait(SECONDS) == "finished"
    path = tmp_path / "checkpoints/step-00000003"
    state = json.loads((path / "state.json").read_text())
    for name in ("config.teacher", "config.kl_temperature", "config.exclude"):
        del state["fingerprint"][name]
    (path / "state.json").write_text(json.dumps(state))
    rehash(path)
    run = jev_run(tmp_path, steps=4, **options)
    if wanted:
        assert run.wait(SECONDS) == wanted and run.step == 4
    else:
        with pytest.raises(RunFailed, match=r"config\.kl_temperature: checkpoint 1\.0, now 3\.0"):
            run.wait(SECONDS)


def test_the_defaults_are_those_of_a_run_with_defaults() -> None:
    train = TrainConfig()
    task = ElasticTask(MMJev.tiny(0), select(help_desk(24), train), train, RunConfig(steps=1))
    mine, before = task.identity(), task.before_it_was_recorded()
    decided_by_model = {"config.lr_lora", "config.lr_heads", "config.subnets"}
    assert {name for name in before if before[name] != mine[name]} <= decided_by_model and set(before) <= set(mine)


def test_a_run_on_a_mounted_network_folder_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "mount_warning", lambda folder: f"{folder} is on Google Drive")
    assert start(ToyTask(1), tmp_path).wait(SECONDS) == "finished"
    assert events(tmp_path)[0]["text"] == f"{tmp_path} is on Google Drive"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool, torch.uint16])
def test_whatever_safetensors_can_hold_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    class Holds(ToyTask):
        def state(self) -> Any:
            tensors, meta = super().state()
            tensors["optimizer"]["held"] = torch.ones(2).to(dtype)
            return tensors, meta

    assert start(Holds(1), tmp_path).wait(SECONDS) == "finished"
    held = checkpoint.read(tmp_path / "checkpoints/step-00000001").tensors["optimizer"]["held"]
    assert held.dtype == dtype and held.to(torch.complex64).tolist() == [1, 1]


@pytest.mark.parametrize("error", [RuntimeError("size mismatch for weight"), KeyError("weight"), TypeError("no"), AttributeError("no")])
def test_a_checkpoint_that_a_task_cannot_load_gives_way_to_the_one_before(error: Exception, tmp_path: Path) -> None:
    class Strict(ToyTask):
        def load(self, tensors: Any, meta: Any) -> None:
            if refused:
                raise refused.pop()
            super().load(tensors, meta)

    refused: list[Exception] = []
    assert start(Strict(4, all_written), tmp_path, checkpoint_every=2).wait(SECONDS) == "finished"
    refused.append(error)
    assert start(Strict(4), tmp_path).wait(SECONDS) == "finished"
    (rejected,) = events(tmp_path, "checkpoint_rejected")
    assert rejected["name"] == "step-00000004" and f"Strict.load(): {type(error).__name__}: {error}" in rejected["reason"]
    assert events(tmp_path, "resumed")[-1]["step"] == 2


def test_no_memory_for_a_checkpoint_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    class Full(ToyTask):
        def load(self, tensors: Any, meta: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert start(ToyTask(2), tmp_path).wait(SECONDS) == "finished"
    with pytest.raises(RunFailed, match="CUDA out of memory"):
        start(Full(4), tmp_path).wait(SECONDS)
    assert not events(tmp_path, "checkpoint_rejected")
