"""Checkpoints: bit-exact or refused by file and reason, nothing half-written stays, nothing pickled is read or written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import pickletools
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import FILES, Trap, damaged, rehash
from safetensors import SafetensorError
from torch import Tensor

from colabtrain.runtime import checkpoint
from colabtrain.runtime.buffers import Buffers, Groups
from colabtrain.runtime.checkpoint import Snapshot, capture, read, write
from colabtrain.runtime.manifest import CheckpointError, clear_staging, listed, prune
from colabtrain.runtime.rng import rng_state, set_rng_state

pytestmark = pytest.mark.colab

DIARY_LINE = b'{"time": 1.0, "event": "step", "step": 1}\n'


def newest_good(folder: Path) -> tuple[checkpoint.Checkpoint | None, list[tuple[str, str]]]:
    """The newest checkpoint that can be read, and (name, reason) of each newer one that cannot."""
    rejected: list[tuple[str, str]] = []
    for path in listed(folder):
        try:
            return read(path), rejected
        except CheckpointError as error:
            rejected.append((path.name, str(error)))
    return None, rejected


def tensors(seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """Every dtype that a run may hold, with values that a conversion would lose."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(8, 8, generator=generator)
    return {
        "trainable": {
            "float32": noise,
            "bfloat16": noise[0].bfloat16(),
            "float16": noise[1].half(),
            "float64": noise[2].double() / 3,
            "transposed": noise[:4].T,
            "scalar": torch.tensor(1 / 3),
            "empty": torch.zeros(0, 4),
            "signs": torch.tensor([0.0, -0.0, 1e-45, 3.4e38]),
        },
        "optimizer": {
            "step": torch.tensor(2**40 + 1, dtype=torch.int64),
            "int32": torch.arange(5, dtype=torch.int32),
            "bytes": torch.arange(256, dtype=torch.uint8),
            "bool": torch.tensor([True, False]),
            "moment": torch.tensor([float("nan"), float("inf"), -0.0]),
        },
    }


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().flatten()
    data = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), data


def all_bits(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Any]]:
    return {group: {name: bits(tensor) for name, tensor in named.items()} for group, named in groups.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints folder of a run that has a diary."""
    (tmp_path / "diary.jsonl").write_bytes(DIARY_LINE * 3)
    return tmp_path / "checkpoints"


def taken(step: int, groups: Groups, state: Mapping[str, Any] | None = None, diary_bytes: int = 0) -> Snapshot:
    return capture(step, groups, state or {}, diary_bytes, Buffers())


def save(folder: Path, step: int, seed: int = 0, **state: Any) -> Path:
    snapshot = taken(step, tensors(seed), state, diary_bytes=2 * len(DIARY_LINE))
    return write(folder, snapshot, folder.parent / "diary.jsonl")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Round trip


def test_round_trip_is_bit_exact(folder: Path) -> None:
    path = save(folder, 1200, ema={"full": 0.1 + 0.2}, counters=[1, None, "x"])
    assert path == folder / "step-00001200"
    found = read(path)
    assert (found.path, found.step) == (path, 1200)
    assert all_bits(found.tensors) == all_bits(tensors())
    assert found.state["ema"] == {"full": 0.30000000000000004} and found.state["counters"] == [1, None, "x"]
    assert found.state["step"] == 1200 and found.state["format"] == 1 and "torch" in found.state["rng"]


def test_folder_holds_the_files_and_the_manifest_their_hashes(folder: Path) -> None:
    path = save(folder, 3)
    assert sorted(item.name for item in path.iterdir()) == sorted(FILES)
    assert [item.name for item in folder.iterdir()] == ["step-00000003"]
    manifest = json.loads((path / "manifest.json").read_text())
    for entry in manifest["files"]:
        data = (path / entry["name"]).read_bytes()
        assert entry["size"] == len(data) and entry["sha256"] == hashlib.sha256(data).hexdigest()
    assert {entry["name"] for entry in manifest["files"]} == set(FILES) - {"manifest.json"}
    assert (path / "diary.jsonl").read_bytes() == DIARY_LINE * 2, "the diary up to the captured step, not what came after"


def test_groups_without_tensors_round_trip(folder: Path) -> None:
    snapshot = taken(1, {"trainable": {"w": torch.ones(1)}, "optimizer": {}})
    found = read(write(folder, snapshot, folder.parent / "diary.jsonl"))
    assert all_bits(found.tensors) == {"trainable": {"w": bits(torch.ones(1))}, "optimizer": {}}


def test_capture_is_out_of_reach_of_training(folder: Path) -> None:
    live = tensors()
    shared = live["trainable"]["float32"]
    live["trainable"]["tied"] = shared  # two names of one weight
    wanted = all_bits(live)
    snapshot = taken(1, live)
    for group in live.values():
        for tensor in group.values():
            tensor.zero_()
    assert all_bits(snapshot.buffers.tensors) == wanted
    assert all_bits(read(write(folder, snapshot, folder.parent / "diary.jsonl")).tensors) == wanted


def test_capture_takes_tensors_that_train() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    snapshot = taken(1, {"trainable": {"w": parameter}, "optimizer": {}})
    assert not snapshot.buffers.tensors["trainable"]["w"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weight_that_is_not_finite_is_refused_by_name(folder: Path, dtype: torch.dtype, value: float) -> None:
    groups = tensors()
    groups["trainable"]["layers.3.lora_A"] = torch.tensor([[1.0, 2.0], [value, 3.0]], dtype=dtype)
    with pytest.raises(CheckpointError, match=r"layers\.3\.lora_A is not finite"):
        write(folder, taken(7, groups), folder.parent / "diary.jsonl")
    assert not folder.exists()


def test_saving_a_step_again_replaces_it(folder: Path) -> None:
    save(folder, 5, seed=1)
    (folder / "step-00000005" / "trainable.safetensors").write_bytes(b"broken")
    save(folder, 5, seed=2)
    assert all_bits(read(folder / "step-00000005").tensors) == all_bits(tensors(2))
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]


# Damage


@pytest.mark.parametrize("how", ["0 bytes", "half", "one byte less", "one byte more", "first bit", "middle bit", "last bit"])
@pytest.mark.parametrize("name", FILES)
def test_damaged_file_is_named_and_the_older_checkpoint_used(folder: Path, name: str, how: str) -> None:
    save(folder, 1, seed=1)
    path = save(folder, 2, seed=2) / name
    path.write_bytes(damaged(path.read_bytes(), how))
    found, rejected = newest_good(folder)
    assert found is not None and found.step == 1 and all_bits(found.tensors) == all_bits(tensors(1))
    ((checkpoint_name, reason),) = rejected
    assert checkpoint_name == "step-00000002" and (name in reason or (name == "manifest.json" and "safetensors" in reason)), reason


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named_and_the_older_checkpoint_used(folder: Path, name: str) -> None:
    save(folder, 1)
    (save(folder, 2) / name).unlink()
    found, rejected = newest_good(folder)
    assert found is not None and found.step == 1
    assert [checkpoint_name for checkpoint_name, _ in rejected] == ["step-00000002"] and name in rejected[0][1]


def test_any_flipped_bit_of_the_manifest_is_seen(folder: Path) -> None:
    save(folder, 1)
    path = save(folder, 2) / "manifest.json"
    data = path.read_bytes()
    for position in range(0, 8 * len(data), 37):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        found, rejected = newest_good(folder)
        assert found is not None and found.step == 1 and len(rejected) == 1, (position, bytes(flipped))
    path.write_bytes(data)
    assert read(path.parent).step == 2


def test_all_rejected_are_listed_newest_first(folder: Path) -> None:
    for step in (1, 2, 30):
        (save(folder, step) / "state.json").write_bytes(b"")
    found, rejected = newest_good(folder)
    assert found is None
    assert [name for name, _ in rejected] == ["step-00000030", "step-00000002", "step-00000001"]
    assert all("state.json has 0 bytes" in reason for _, reason in rejected)


def test_nothing_there_is_no_checkpoint(folder: Path) -> None:
    assert newest_good(folder) == (None, [])
    folder.mkdir()
    (folder / ".staging-step-00000009").mkdir()
    assert newest_good(folder) == (None, [])


@pytest.mark.parametrize("made_with", ["pickle", "torch.save"])
@pytest.mark.parametrize("name", [name for name in FILES if name != "diary.jsonl"])  # the diary is copied, never parsed, here
def test_planted_pickle_does_not_execute(folder: Path, tmp_path: Path, name: str, made_with: str) -> None:
    save(folder, 1)
    path, mark = save(folder, 2), tmp_path / "executed"
    if made_with == "pickle":
        (path / name).write_bytes(pickle.dumps({"weights": Trap(mark)}))
    else:
        torch.save({"weights": Trap(mark)}, path / name)
    if name != "manifest.json":
        rehash(path)
    found, rejected = newest_good(folder)
    assert not mark.exists(), "it was executed"
    assert found is not None and found.step == 1
    assert [checkpoint_name for checkpoint_name, _ in rejected] == ["step-00000002"] and name in rejected[0][1], rejected


@pytest.mark.parametrize(
    "text", ["[]", "7", "null", "{}", '{"step": null}', '{"step": "x"}', '{"step": 1e999}', '{"step": [1]}', "[" * 100_000]
)
def test_planted_state_is_refused(folder: Path, text: str) -> None:
    save(folder, 1)
    path = save(folder, 2)
    (path / "state.json").write_text(text)
    rehash(path)
    found, rejected = newest_good(folder)
    assert found is not None and found.step == 1
    assert [name for name, _ in rejected] == ["step-00000002"] and "state.json" in rejected[0][1], rejected


@pytest.mark.parametrize(
    "manifest",
    [
        [],
        {},
        None,
        {"format": 1},
        {"format": 1, "files": []},
        {"format": 1, "files": None},
        {"format": 1, "files": ["state.json"]},
        {"format": 1, "files": [{"name": "../../diary.jsonl", "size": 0, "sha256": ""}]},
        {"format": 1, "files": [{"name": name, "size": float("inf"), "sha256": ""} for name in FILES]},
        {"format": 1, "files": [{"name": name, "size": 1} for name in FILES]},
    ],
    ids=repr,
)
def test_planted_manifest_is_refused(folder: Path, manifest: Any) -> None:
    save(folder, 1)
    path = save(folder, 2)
    (path / "manifest.json").write_text(json.dumps(manifest))
    found, rejected = newest_good(folder)
    assert found is not None and found.step == 1
    assert [name for name, _ in rejected] == ["step-00000002"] and "manifest.json" in rejected[0][1], rejected


def test_other_format_is_refused_by_its_number(folder: Path) -> None:
    path = save(folder, 2) / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match=r"manifest\.json is of format 2"):
        read(path.parent)


def test_file_or_folder_in_the_way_is_refused(folder: Path) -> None:
    save(folder, 1)
    (folder / "step-00000002").write_text("a file")
    (folder / "step-00000003").mkdir()
    found, rejected = newest_good(folder)
    assert found is not None and found.step == 1
    assert [name for name, _ in rejected] == ["step-00000003", "step-00000002"]
    assert all("manifest.json" in reason for _, reason in rejected)


def test_nothing_written_is_a_pickle(folder: Path) -> None:
    path = save(folder, 1)
    for item in path.iterdir():
        data = item.read_bytes()
        assert not data.startswith(b"PK\x03\x04"), f"{item.name} is a zip, as torch.save writes"
        with pytest.raises(Exception):  # noqa: B017 - whatever it dislikes, it is no pickle
            list(pickletools.genops(data))
            pytest.fail(f"{item.name} is a pickle", pytrace=False)


# Failing disks


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_space_from_safetensors(*_: Any, **__: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def only_at(call: int, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, failing: Callable[..., None] = no_space) -> None:
    """Make the call number `call` (from 0) of owner.name fail, and leave the others as they are."""
    real, calls = getattr(owner, name), iter(range(10**6))

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        return failing() if next(calls) == call else real(*args, **kwargs)

    monkeypatch.setattr(owner, name, sometimes)


FAILURES: list[tuple[str, Any, str, int, Callable[..., None]]] = [
    ("replace", os, "replace", 0, no_space),
    *((f"save_file {i}", checkpoint, "save_file", i, no_space) for i in range(2)),
    *((f"safetensors {i}", checkpoint, "save_file", i, no_space_from_safetensors) for i in range(2)),
    *((f"fsync {i}", os, "fsync", i, no_space) for i in range(6)),
    *((f"write_text {i}", Path, "write_text", i, no_space) for i in range(2)),
    ("diary", checkpoint, "_copy_start", 0, no_space),
    ("room", checkpoint.disk, "check_room", 0, no_space),
    ("mkdir", Path, "mkdir", 0, no_space),
]


@pytest.mark.parametrize(("owner", "name", "call", "failing"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES])
def test_failing_disk_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, failing: Callable[..., None]
) -> None:
    save(folder, 1)
    before = contents(folder)
    with monkeypatch.context() as patch:
        only_at(call, patch, owner, name, failing)
        with pytest.raises(OSError):
            save(folder, 2, seed=2)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert contents(folder) == before
    assert read(save(folder, 2, seed=2)).step == 2, "the next attempt works"


@pytest.mark.parametrize("row", [row for row in FAILURES if row[0] != "mkdir"], ids=lambda row: row[0])
def test_failing_disk_does_not_cost_the_checkpoint_of_the_same_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, row: tuple[str, Any, str, int, Callable[..., None]]
) -> None:
    _, owner, name, call, failing = row
    save(folder, 2, seed=1)
    with monkeypatch.context() as patch:
        only_at(call, patch, owner, name, failing)
        with pytest.raises(OSError):
            save(folder, 2, seed=2)
    found, rejected = newest_good(folder)
    assert found is not None and not rejected and all_bits(found.tensors) == all_bits(tensors(1))


def test_state_that_is_no_json_leaves_nothing_behind(folder: Path) -> None:
    with pytest.raises(TypeError):
        save(folder, 1, oops=object())
    assert not folder.exists()


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 2,000 bytes: a disk that is really full, as the file system reports it."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_really_full_disk_is_an_os_error(folder: Path) -> None:
    snapshot = taken(1, {"trainable": {"w": torch.zeros(5000)}, "optimizer": {}})
    with pytest.raises(OSError), small_files():
        write(folder, snapshot, folder.parent / "diary.jsonl")
    assert list(folder.iterdir()) == []


def test_interrupted_write_is_cleared(folder: Path) -> None:
    path = save(folder, 1)
    staging = folder / ".staging-step-00000002"
    shutil.copytree(path, staging)
    assert listed(folder) == [path]
    clear_staging(folder)
    assert [item.name for item in folder.iterdir()] == ["step-00000001"]
    clear_staging(folder / "missing")
    shutil.copytree(path, staging)
    (staging / "left.over").write_text("x")
    assert sorted(item.name for item in save(folder, 2).iterdir()) == sorted(FILES), "a stale staging folder lends no files"


@pytest.mark.parametrize("keep", [1, 3, 9])
def test_prune_keeps_the_newest(folder: Path, keep: int) -> None:
    steps = [1, 2, 10, 200, 1000]
    for step in steps:
        save(folder, step)
    prune(folder / "step-00001000", keep)
    assert [path.name for path in listed(folder)] == [f"step-{step:08d}" for step in sorted(steps, reverse=True)[:keep]]
    assert sorted(folder.iterdir(), reverse=True) == listed(folder)
    assert read(listed(folder)[0]).step == 1000


def test_prune_neither_counts_nor_removes_later_ones(folder: Path) -> None:
    """A run that went back behind unreadable checkpoints must not lose the good ones to them."""
    for step in (1, 2, 3, 50, 60):
        save(folder, step)
    prune(folder / "step-00000003", 2)
    assert [path.name for path in listed(folder)] == [f"step-{step:08d}" for step in (60, 50, 3, 2)]


def test_a_copy_that_a_person_keeps_is_no_checkpoint_and_stays(folder: Path) -> None:
    shutil.copytree(save(folder, 1), folder / "step-00000001-best")
    (folder / "step-00000002.txt").write_text("a note")
    for step in (2, 3):
        prune(save(folder, step), 1)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001-best", "step-00000002.txt", "step-00000003"]
    assert listed(folder) == [folder / "step-00000003"]


def test_the_newest_is_the_one_of_the_latest_step_however_long_its_name(folder: Path) -> None:
    paths = [save(folder, step) for step in (99_999_998, 99_999_999, 100_000_000)]
    assert listed(folder) == paths[::-1]
    prune(paths[-1], 2)
    assert listed(folder) == paths[:0:-1]
    prune(paths[1], 1)
    assert listed(folder) == paths[:0:-1], "a later one is not removed"


# Random state


def draws() -> list[Any]:
    numpy = pytest.importorskip("numpy")
    return [
        [random.random(), random.gauss(0, 1), random.randrange(10**9)],
        [float(value) for value in numpy.random.standard_normal(3)] + [int(numpy.random.randint(10**9))],
        torch.rand(3).tolist() + torch.randn(20).tolist() + torch.randperm(5).tolist(),
    ]


@pytest.mark.parametrize("warm_up", [0, 1, 700])
def test_random_state_round_trip(warm_up: int) -> None:
    """Also through JSON, and with a half-used gauss pair in each generator."""
    numpy = pytest.importorskip("numpy")
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    for _ in range(warm_up):
        random.gauss(0, 1)
        numpy.random.standard_normal()
        torch.randn(1)
    state = rng_state()
    wanted = draws()
    assert draws() != wanted
    set_rng_state(json.loads(json.dumps(state)))
    assert rng_state() == state
    assert draws() == wanted


def test_reading_the_random_state_does_not_move_it() -> None:
    torch.manual_seed(0)
    first = rng_state()
    assert rng_state() == first
    taken(1, tensors())
    torch.manual_seed(0)
    assert rng_state()["torch"] == first["torch"]


def test_capture_and_restore_through_the_disk(folder: Path) -> None:
    random.seed(4)
    torch.manual_seed(4)
    path = save(folder, 1)
    wanted = draws()
    set_rng_state(read(path).state["rng"])
    assert draws() == wanted


def test_state_without_numpy_leaves_numpy_alone() -> None:
    numpy = pytest.importorskip("numpy")
    state = rng_state()
    del state["numpy"]
    numpy.random.seed(9)
    before = numpy.random.get_state()[1].tolist()
    set_rng_state(state)
    assert numpy.random.get_state()[1].tolist() == before
