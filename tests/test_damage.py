"""A new start on checkpoints that a disk, or a hand that means harm, has damaged: the next good one, or a plain error."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_disk import is_whole, losses
from damage import FILES, Trap, damaged, rehash
from helpers import all_written, events
from toy_task import ToyTask

import colabtrain
from colabtrain.runtime.resume import refuse
from colabtrain.runtime.run import Run, RunFailed

pytestmark = pytest.mark.colab

SECONDS = 30.0  # far more than anything here takes; a wait that long is a failure
NUM_STEPS, MORE_STEPS = 8, 10
SAVED = ("step-00000008", "step-00000006", "step-00000004")  # what the run has before it is damaged, newest first
WAYS = {  # what the reason says where it is not the manifest itself that is damaged
    "0 bytes": "has 0 bytes, not the",
    "half": r"has \d+ bytes, not the",
    "one byte less": r"has \d+ bytes, not the",
    "first bit": "has another sha256 than the manifest",
    "middle bit": "has another sha256 than the manifest",
    "last bit": "has another sha256 than the manifest",
    "missing": "No such file",
    "pickle": r"has \d+ bytes, not the",
    "torch.save": r"has \d+ bytes, not the",
    "pickle, right hashes": r"\w+Error: ",
    "torch.save, right hashes": r"\w+Error: ",
}
# The manifest has no hash of itself, and a diary with the right one is never parsed; see below.
CASES = [(file, way) for file in FILES for way in WAYS if not (way.endswith("right hashes") and file in ("manifest.json", "diary.jsonl"))]


def start(num_steps: int, folder: Path) -> Run:
    return colabtrain.start(task=ToyTask(num_steps, all_written), run_dir=folder, display=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of all steps."""
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(5)
    assert start(MORE_STEPS, folder).wait(SECONDS) == "finished"
    return folder


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one that ended, and was saved, three times."""
    folder = tmp_path_factory.mktemp("ended")
    torch.manual_seed(5)
    for num_steps in (NUM_STEPS - 4, NUM_STEPS - 2, NUM_STEPS):
        assert start(num_steps, folder).wait(SECONDS) == "finished"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == sorted(SAVED)
    return folder


@pytest.fixture
def folder(ended: Path, tmp_path: Path) -> Path:
    """A run folder to be damaged."""
    return shutil.copytree(ended, tmp_path / "run")


def damage(path: Path, way: str, mark: Path) -> None:
    """Do it to one file of a checkpoint. mark: what comes to be where a planted pickle is executed."""
    kind, _, hashes = way.partition(", ")
    if kind == "missing":
        path.unlink()
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"weights": Trap(mark)}))
    elif kind == "torch.save":
        torch.save({"weights": Trap(mark)}, path)
    else:
        path.write_bytes(damaged(path.read_bytes(), kind))
    if hashes:
        rehash(path.parent)


def this_start(folder: Path) -> list[dict[str, Any]]:
    """The events of the newest start."""
    told = events(folder)
    return told[max(at for at, event in enumerate(told) if event["event"] == "run_started") :]


def check_rejected(event: dict[str, Any], checkpoint: str, file: str, way: str) -> None:
    """The folder, the file and the reason are named, in the fields and in the line for people."""
    assert event["name"] == checkpoint and event["text"] == f"checkpoint {checkpoint} cannot be used: {event['reason']}"
    if file == "manifest.json":  # a bit of it may be one of a file's name, size or hash
        assert any(name in event["reason"] for name in FILES), event
    else:
        assert file in event["reason"] and re.search(WAYS[way], event["reason"]), event


def check_resumed(folder: Path, whole: Path, damages: list[tuple[str, str]], mark: Path) -> None:
    """After a start whose newest checkpoints had these (file, way), newest first."""
    told = this_start(folder)
    assert not mark.exists(), "a planted pickle was executed"
    rejected = [event for event in told if event["event"] == "checkpoint_rejected"]
    assert len(rejected) == len(damages)
    for event, checkpoint, (file, way) in zip(rejected, SAVED, damages, strict=False):
        check_rejected(event, checkpoint, file, way)
    good = NUM_STEPS - 2 * len(damages)
    assert [event["step"] for event in told if event["event"] == "resumed"] == [good]
    assert [event["step"] for event in told if event["event"] == "step"] == list(range(good + 1, MORE_STEPS + 1))
    assert losses(folder) == losses(whole) and told[-1]["event"] == "finished"
    last = [run / f"checkpoints/step-{MORE_STEPS:08d}" for run in (folder, whole)]
    assert is_whole(last[0]) and len({(path / "trainable.safetensors").read_bytes() for path in last}) == 1


def test_the_trap_snaps_and_the_check_sees_damage(folder: Path, tmp_path: Path) -> None:
    """What the tests below rest on."""
    for name, read in (("pickle", pickle.load), ("torch.save", lambda file: torch.load(file, weights_only=False))):
        mark, planted = tmp_path / f"mark of {name}", tmp_path / name
        damage(planted, name, mark)
        with planted.open("rb") as file:
            read(file)["weights"].close()
        assert mark.exists()
    newest = folder / "checkpoints" / SAVED[0]
    assert is_whole(newest)
    damage(newest / "state.json", "last bit", tmp_path)
    assert not is_whole(newest)


@pytest.mark.parametrize(("file", "way"), CASES)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(file: str, way: str, folder: Path, whole: Path, tmp_path: Path) -> None:
    damage(folder / "checkpoints" / SAVED[0] / file, way, tmp_path / "mark")
    torch.manual_seed(99)
    start(MORE_STEPS, folder).wait(SECONDS)
    check_resumed(folder, whole, [(file, way)], tmp_path / "mark")


@pytest.mark.parametrize(
    "damages",
    [
        [("manifest.json", "missing"), ("manifest.json", "missing")],
        [("trainable.safetensors", "half"), ("state.json", "pickle, right hashes")],
        [("optimizer.safetensors", "torch.save, right hashes"), ("diary.jsonl", "one byte less")],
        [("state.json", "first bit"), ("trainable.safetensors", "0 bytes")],
    ],
    ids=str,
)
def test_two_damaged_ones_give_way_to_the_third(damages: list[tuple[str, str]], folder: Path, whole: Path, tmp_path: Path) -> None:
    for checkpoint, (file, way) in zip(SAVED, damages, strict=False):
        damage(folder / "checkpoints" / checkpoint / file, way, tmp_path / "mark")
    start(MORE_STEPS, folder).wait(SECONDS)
    check_resumed(folder, whole, damages, tmp_path / "mark")


@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_damaged_ones_is_an_error_and_nothing_is_removed(way: str, folder: Path, tmp_path: Path) -> None:
    files = [file for file in FILES if (file, way) in CASES][-3:]
    for checkpoint, file in zip(SAVED, files, strict=True):
        damage(folder / "checkpoints" / checkpoint / file, way, tmp_path / "mark")
    before = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    for _ in range(2):  # the second start is no better off
        run = start(MORE_STEPS, folder)
        with pytest.raises(RunFailed, match=r"ValueError: no checkpoint in .*checkpoints can be used \(see the log\)"):
            run.wait(SECONDS)
        told = this_start(folder)
        assert run.step == 0 and not [event for event in told if event["event"] in ("step", "resumed", "checkpoint_saved")]
        rejected = [event for event in told if event["event"] == "checkpoint_rejected"]
        for event, checkpoint, file in zip(rejected, SAVED, files, strict=True):
            check_rejected(event, checkpoint, file, way)
        assert told[-1]["event"] == "failed" and "can be used" in told[-1]["message"]
        assert {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()} == before
    assert not (tmp_path / "mark").exists(), "a planted pickle was executed"


@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
@pytest.mark.parametrize("own_diary", [True, False])
def test_a_planted_diary_with_right_hashes_is_no_more_than_bytes(
    own_diary: bool, kind: str, folder: Path, whole: Path, tmp_path: Path
) -> None:
    damage(folder / "checkpoints" / SAVED[0] / "diary.jsonl", f"{kind}, right hashes", tmp_path / "mark")
    if not own_diary:  # then the checkpoint's is taken
        (folder / "diary.jsonl").unlink()
    run = start(MORE_STEPS, folder)
    assert run.wait(SECONDS) == "finished" and not (tmp_path / "mark").exists()
    told = this_start(folder)
    assert [event["step"] for event in told if event["event"] == "resumed"] == [NUM_STEPS]
    assert {step: loss for step, loss in losses(folder).items() if step > NUM_STEPS} == {9: losses(whole)[9], 10: losses(whole)[10]}
    assert run.history()["step"][-2:] == [9, 10]


@pytest.mark.parametrize("way", ["half", "0 bytes", "missing"])
def test_a_folder_without_its_diary_gets_a_good_ones_history(way: str, folder: Path, whole: Path, tmp_path: Path) -> None:
    """The newest checkpoint's diary may be what is damaged; the one that the run goes on from has a whole one."""
    (folder / "diary.jsonl").unlink()
    damage(folder / "checkpoints" / SAVED[0] / "diary.jsonl", way, tmp_path / "mark")
    run = start(MORE_STEPS, folder)
    assert run.wait(SECONDS) == "finished"
    assert run.history()["step"] == list(range(1, MORE_STEPS + 1)) and losses(folder) == losses(whole)


def test_a_state_too_deep_to_read_is_no_error_before_the_start(folder: Path) -> None:
    """start() looks at the newest state of a run whose settings it knows; what is wrong with it is the resume's to say."""
    (folder / "checkpoints" / SAVED[0] / "state.json").write_text("[" * 100_000)
    refuse(folder / "checkpoints", True, lambda: {"mark": "a"})
    assert start(MORE_STEPS, folder).wait(SECONDS) == "finished"


PLANTED: dict[str, Any] = {
    "fingerprint": [5, None, [1, 2]],
    "totals": [5, [1]],
    "rng": [5, {}, {"python": [3, [1], None], "torch": ""}, {"python": 5}],
    "machine": [5, None],
    "num_steps": ["x", None],
    "step": [-1, 10**9],
}


@pytest.mark.parametrize(("part", "value"), [(part, value) for part, values in PLANTED.items() for value in values])
def test_a_planted_state_with_right_hashes_gives_way_to_the_one_before(part: str, value: Any, folder: Path) -> None:
    newest = folder / "checkpoints" / SAVED[0]
    state = json.loads((newest / "state.json").read_text())
    (newest / "state.json").write_text(json.dumps({**state, part: value}))
    rehash(newest)
    before = len(events(folder, "resumed"))
    assert start(MORE_STEPS, folder).wait(SECONDS) == "finished"
    (rejected,) = events(folder, "checkpoint_rejected")
    assert rejected["name"] == SAVED[0] and rejected["reason"].startswith(f"state.json: {part}")
    assert [event["step"] for event in events(folder, "resumed")[before:]] == [NUM_STEPS - 2]


def test_damaged_ones_do_not_push_out_the_good_ones(folder: Path, tmp_path: Path) -> None:
    """keep_local is the number of checkpoints that a run can go back to; one that was refused is none."""
    for checkpoint in SAVED[:2]:
        damage(folder / "checkpoints" / checkpoint / "state.json", "half", tmp_path / "mark")
    assert start(MORE_STEPS, folder).wait(SECONDS) == "finished"
    damage(folder / "checkpoints" / f"step-{MORE_STEPS:08d}" / "state.json", "half", tmp_path / "mark")
    assert start(MORE_STEPS, folder).wait(SECONDS) == "finished"


def test_a_bit_turned_in_the_newest_settings_is_damage_not_another_experiment(folder: Path) -> None:
    """What start() sees beforehand is believed only where its hash is right."""
    state = folder / "checkpoints" / SAVED[0] / "state.json"
    turned = state.read_text().replace('"mark": "a"', '"mark": "b"')
    assert turned != state.read_text()
    state.write_text(turned)
    refuse(folder / "checkpoints", True, lambda: {"mark": "a"})
    with pytest.raises(ValueError, match=f"checkpoint .*{SAVED[1]} belongs to another experiment"):
        refuse(folder / "checkpoints", True, lambda: {"mark": "b"})
