"""What a checkpoint costs the training: copies at a step boundary, and nothing of the disk, the hashes or more memory.

By counts and bytes; the times are for tests/benchmarks/checkpoint_cost.py, whose parts are used here on small states.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers import HOLD_SECONDS, all_written, events
from torch import Tensor
from toy_task import ToyTask

import colabtrain
from colabtrain.config import RunConfig
from colabtrain.runtime import buffers, checkpoint
from colabtrain.runtime.buffers import Buffers, Groups
from colabtrain.runtime.checkpoint import read
from colabtrain.runtime.diary import Tail
from colabtrain.runtime.keeper import THREAD_NAME, Keeper

BENCHMARK = Path(__file__).parent / "benchmarks" / "checkpoint_cost.py"
sys.path.insert(0, str(BENCHMARK.parent))
from checkpoint_cost import Saver, status  # noqa: E402
from e4b_trained import SHAPES_FILE  # noqa: E402

pytestmark = pytest.mark.colab
SECONDS = 120.0
MIB = 2**20


def write_shapes(folder: Path, num_bytes: int) -> None:
    """Of E4B's kinds, with AdamW's state `num_bytes` and a little more."""
    pair = {"lora_A": (16, 2048), "lora_B": (16384, 16)}
    pair_bytes = 3 * 4 * sum(rows * columns for rows, columns in pair.values())
    shapes = {f"{i}.{name}": shape for i in range(-(-num_bytes // pair_bytes)) for name, shape in pair.items()}
    (folder / SHAPES_FILE).write_text(json.dumps(shapes))


# Which thread does it


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What is done to the disk under checkpoints/, and what is hashed -> the thread of each call."""
    found: dict[str, list[str]] = defaultdict(list)
    folder = tmp_path / "checkpoints"

    def watch(owner: Any, name: str, counts: Callable[..., bool], label: str = "") -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            if counts(*arguments, **named):
                found[label or name].append(threading.current_thread().name)
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    def below(path: Any, *_: Any, **__: Any) -> bool:
        return isinstance(path, (str, Path)) and Path(path).is_relative_to(folder)

    def to_write(path: Any, mode: str = "r", *_: Any, **__: Any) -> bool:
        return below(path) and bool(set(mode) & set("wax+"))

    for name in ("replace", "rename", "mkdir"):
        watch(os, name, below)
    watch(os, "fsync", lambda _: True)
    watch(io, "open", to_write)
    watch(builtins, "open", to_write)
    watch(shutil, "rmtree", below)
    watch(hashlib, "file_digest", lambda *_: True)
    watch(checkpoint, "save_file", lambda *_: True)
    return found


def test_the_training_thread_neither_writes_nor_hashes(tmp_path: Path, calls: dict[str, list[str]]) -> None:
    task = ToyTask(9, all_written)
    run = colabtrain.start(task=task, run_dir=tmp_path, display=False, checkpoint_every=2, keep_local=2)
    assert run.wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path, "checkpoint_saved")] == [2, 4, 6, 8, 9]
    assert set(calls) == {"fsync", "replace", "rename", "mkdir", "open", "rmtree", "file_digest", "save_file"}
    assert {thread for threads in calls.values() for thread in threads} == {THREAD_NAME}
    assert len(calls["save_file"]) == 5 * 2 and len(calls["file_digest"]) == 5 * 4 and len(calls["rename"]) == 3


# Where the copies go


def groups() -> dict[str, dict[str, Tensor]]:
    weight = torch.randn(5, 3)
    return {"trainable": {"w": weight, "b": torch.randn(7).bfloat16()}, "optimizer": {"w.exp_avg": weight + 1, "w.step": torch.tensor(3.0)}}


def pointers(buffers: Buffers) -> list[int]:
    return [tensor.data_ptr() for named in buffers.tensors.values() for tensor in named.values()]


def another_shape(of: dict[str, dict[str, Tensor]]) -> None:
    of["optimizer"]["w.exp_avg"] = torch.randn(3, 5)


def another_dtype(of: dict[str, dict[str, Tensor]]) -> None:
    of["trainable"]["w"] = of["trainable"]["w"].view(torch.int32)


def another_name(of: dict[str, dict[str, Tensor]]) -> None:
    of["trainable"] = {{"w": "v"}.get(name, name): tensor for name, tensor in of["trainable"].items()}


def one_more(of: dict[str, dict[str, Tensor]]) -> None:
    of["optimizer"]["b.step"] = torch.tensor(3.0)


def one_less(of: dict[str, dict[str, Tensor]]) -> None:
    del of["optimizer"]["w.step"]


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each group that got memory: how many tensors of other layouts were there still."""
    real, mine, older, found = buffers._allocated, list[Any](), list[Any](), list[int]()

    def allocate(tensors: Any) -> dict[str, Tensor]:
        if len(found) % len(checkpoint.TENSOR_GROUPS) == 0:
            older.extend(mine)
            mine.clear()
        found.append(sum(tensor() is not None for tensor in older))
        views = real(tensors)
        mine.extend(weakref.ref(view) for view in views.values())
        return views

    monkeypatch.setattr(buffers, "_allocated", allocate)
    return found


@pytest.mark.parametrize("change", [another_shape, another_dtype, another_name, one_more, one_less])
def test_new_memory_only_where_the_tensors_are_others_and_after_the_old_is_gone(
    change: Callable[[dict[str, dict[str, Tensor]]], None], allocated: list[int]
) -> None:
    buffers, live = Buffers(), groups()
    buffers.fill(live)
    first = pointers(buffers)
    for _ in range(3):
        buffers.fill(other := groups())  # others of the same layout
        assert pointers(buffers) == first and same(buffers.tensors, other)
    assert len(allocated) == 2
    change(live)
    for _ in range(2):
        buffers.fill(live)
        assert same(buffers.tensors, live)
    assert allocated == [0] * 4


def same(one: Groups, other: Groups) -> bool:
    return {group: set(named) for group, named in one.items()} == {group: set(named) for group, named in other.items()} and all(
        tensor.dtype == other[group][name].dtype and torch.equal(tensor, other[group][name])
        for group, named in one.items()
        for name, tensor in named.items()
    )


def test_tensors_that_are_not_their_bytes_in_order_are_copied_as_what_they_are() -> None:
    whole, complex_ = torch.randn(2, 4, 6, 3), torch.randn(4, dtype=torch.complex64)
    kinds = {
        "row": whole[1, 2],
        "every second": whole[0, 0, ::2],
        "transposed": whole.mT,
        "expanded": whole[0, 0, 0, :1].expand(5),
        "channels last": whole.to(memory_format=torch.channels_last),
        "conjugated": complex_.conj(),
        "negated": complex_.conj().imag,
        "negated and in order": torch._neg_view(whole),
        "trained": torch.nn.Parameter(whole.clone()),
    }
    buffers = Buffers()
    buffers.fill({"trainable": kinds, "optimizer": {}})
    assert same(buffers.tensors, {"trainable": {name: tensor.detach() for name, tensor in kinds.items()}, "optimizer": {}})
    assert all(tensor.is_contiguous() for tensor in buffers.tensors["trainable"].values())


def test_all_saves_of_a_run_use_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocated: list[int]) -> None:
    real, seen = checkpoint.capture, list[list[int]]()

    def capture(*arguments: Any) -> Any:
        snapshot = real(*arguments)
        seen.append(pointers(snapshot.buffers))
        return snapshot

    monkeypatch.setattr(checkpoint, "capture", capture)
    run = colabtrain.start(task=ToyTask(7, all_written), run_dir=tmp_path, display=False, checkpoint_every=1)
    assert run.wait(SECONDS) == "finished"
    assert len(seen) == 7 and seen == [seen[0]] * 7 and len(seen[0]) == 4
    assert allocated == [0, 0]


# What it costs


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # thread_time() is of this one alone
    yield
    torch.set_num_threads(before)


def test_a_save_takes_a_quarter_of_the_cpu_time_of_torch_save(tmp_path: Path, one_thread: None) -> None:
    """In the training thread. CPU time: what else runs on the machine does not count."""
    write_shapes(tmp_path, 60 * MIB)
    saver = Saver(tmp_path)
    saver.ours()  # allocates
    spent: dict[str, list[float]] = {"plain": [], "ours": []}
    for _ in range(9):
        started = time.thread_time()
        saver.begin()
        spent["ours"].append(time.thread_time() - started)
        saver.keeper.drain()
        started = time.thread_time()
        torch.save(saver.task.state()[0], tmp_path / "plain.pt")
        spent["plain"].append(time.thread_time() - started)
        (tmp_path / "plain.pt").unlink()
    assert len(events(tmp_path / "run", "checkpoint_saved")) == 10
    assert statistics.median(spent["ours"]) <= statistics.median(spent["plain"]) / 4


def test_saves_take_one_copy_of_the_state_in_memory(tmp_path: Path) -> None:
    """In a process that does nothing else."""
    write_shapes(tmp_path, 100 * MIB)
    line = [sys.executable, str(BENCHMARK), "--folder", str(tmp_path), "--part", json.dumps(["memory", "ours"])]
    found = json.loads(subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS).stdout)
    assert found["state"] >= 100 * MIB
    assert found["first"] >= 0.6 * found["state"]  # some may lie where the step's gradient lay, a third of the state
    assert found["after"] <= 1.15 * found["state"]


def test_what_a_resume_read_is_given_back(tmp_path: Path) -> None:
    """On a thread of its own, as it is: the allocator keeps memory thread by thread."""
    write_shapes(tmp_path, 100 * MIB)
    saver = Saver(tmp_path)
    saver.ours()
    saver.keeper.close()
    keeper, grown = Keeper(saver.task, saver.diary, tmp_path / "run", RunConfig()), list[int]()

    def resume() -> None:
        keeper.find(True)
        before = status()["RssAnon"]
        assert keeper.restore(saver.recorder) == 1
        grown.append(status()["RssAnon"] - before)

    worker = threading.Thread(target=resume)
    worker.start()
    worker.join(HOLD_SECONDS)
    assert grown and grown[0] <= 0.1 * saver.task.num_bytes()


# One step boundary


def draws(_: int) -> None:
    random.random(), numpy.random.rand(), torch.rand(1)


def seeded() -> None:
    random.seed(5), numpy.random.seed(6), torch.manual_seed(7)


def parts_of(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Of the checkpoint of step 4: tensors, and what state.json has beside the settings, without what a clock says."""
    found = read(folder / "checkpoints" / "step-00000004")
    state = {name: found.state[name] for name in ("step", "rng", "totals", "task", "fingerprint")}
    steps = [event for event in Tail(found.path / "diary.jsonl").new() if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert state["totals"].pop("seconds") == sum(event["seconds"] for event in steps)
    return found.tensors, {**state, "losses": [event["loss"] for event in steps]}


def test_all_parts_are_of_one_step_though_the_writer_is_five_steps_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded()
    reference = colabtrain.start(task=ToyTask(4, draws), run_dir=tmp_path / "a", display=False)
    assert reference.wait(SECONDS) == "finished"

    real, later, waited = checkpoint.save_file, threading.Event(), list[str]()

    def save_file(tensors: Any, path: Path) -> None:
        assert later.wait(HOLD_SECONDS)
        real(tensors, path)
        waited.append(path.parent.name)

    def before_step(i: int) -> None:
        if i == 4 + 5:
            later.set()
        draws(i)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    seeded()
    run = colabtrain.start(task=ToyTask(12, before_step), run_dir=tmp_path / "b", display=False, checkpoint_every=4)
    assert run.wait(SECONDS) == "finished"
    first = events(tmp_path / "b", "checkpoint_saved")[0]
    steps_before = [event["step"] for event in events(tmp_path / "b") if event["event"] == "step" and event["time"] < first["time"]]
    assert waited[0] == ".staging-step-00000004" and first["step"] == 4 and 9 in steps_before
    (wanted, wanted_state), (tensors, state) = parts_of(tmp_path / "a"), parts_of(tmp_path / "b")
    assert same(tensors, wanted) and state == wanted_state
    assert float(tensors["optimizer"]["step"]) == 4.0 and state["totals"]["tokens"] == 4 * 3


def test_a_capture_does_without_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    groups = {"trainable": {"w": torch.randn(5, 3)}, "optimizer": {"step": torch.tensor(3.0)}}
    filled = Buffers()
    filled.fill(groups)
    assert all(torch.equal(filled.tensors[group][name], tensor) for group, named in groups.items() for name, tensor in named.items())


def test_a_tensor_that_means_more_than_its_bytes_is_not_moved_as_bytes() -> None:
    class Doubled(torch.Tensor):
        """Stands for one whose numbers are not what lies in memory."""

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(function, types, args, kwargs or {})
            if function is torch.Tensor.copy_:
                args[0].mul_(2)
            return result

    filled = Buffers()
    filled.fill({"trainable": {"w": torch.ones(3).as_subclass(Doubled)}, "optimizer": {}})
    assert filled.tensors["trainable"]["w"].tolist() == [2.0, 2.0, 2.0]
