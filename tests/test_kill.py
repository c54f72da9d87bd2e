"""The promise: killed at any instruction, a run goes on in a new process as if nothing had been.

A chain of real SIGKILLs in one run folder, each followed by a new process with the same line, until the run has finished;
then the next folder. Half of the kills come at a random time, half at a random change of the disk, just before or just
after it. What was trained is compared, to the last bit, with a run that nobody killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import kill_child
import pytest
from helpers import events
from kill_child import KEEP, NOT_FINITE, OUT_OF_MEMORY, SAVE_EVERY, SECONDS, STEPS

import colabtrain
from colabtrain.runtime.diary import Tail, history

MODES = ("by time", "at a call")
STARTING, TRAINING = "starting: before the run resumed", "training"
STAGING, MANIFEST = "staging: no manifest yet", "manifest written, not renamed"
REPLACED, RENAMED, PRUNING = "renamed over an older one", "renamed, not yet pruned", "pruning"
ENDING = "ending: after the last save"
PHASES = (STARTING, TRAINING, STAGING, MANIFEST, REPLACED, RENAMED, PRUNING, ENDING)
MOMENTS = {"training": 0.8, "starting": 0.05, "ending": 0.1}  # what the child tells, and the seconds up to which it lives on
TURNS = ("training", "starting", "training", "ending", "training", "training")
RENAMES = ("replace", "rename")
DISK_CALLS = (*RENAMES, "fsync", "unlink", "rmdir")
# Of the number of the call. A save renames once, or twice over an older one; it makes eight calls, and six more to prune.
BOUNDS = {RENAMES: ((1, 4), (1, 3)), DISK_CALLS: ((1, 45), (7, 22))}  # any save; the first one, over an older one
DAMAGED = "damaged-by-the-test"  # a file in a checkpoint that the test spoiled; one that is written anew has none
FILES = {"trainable.safetensors", "optimizer.safetensors", "state.json", "diary.jsonl"}


def live(folder: Path, number: int, *arguments: str, seconds: float | None = None) -> bool:
    """One life of the run in `folder`: False if it ended by itself, True if it was killed. seconds: when, after its word."""
    root = str(Path(colabtrain.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": str(number)}  # no set's or dict's order may matter
    command = [sys.executable, kill_child.__file__, str(folder), *arguments]
    with (
        folder.with_suffix(".stderr").open("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as child,
    ):
        try:
            if seconds is not None:
                assert child.stdout is not None and select.select([child.stdout], [], [], SECONDS)[0], "the child says nothing"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(seconds)
                child.kill()
            status = child.wait(2 * SECONDS)
        finally:
            child.kill()
        errors.seek(0)
        assert status in (0, -signal.SIGKILL), f"the child ended with status {status}:\n{errors.read()}"
    return status != 0


# What lies on the disk


def is_whole(path: Path) -> bool:
    """Whether the folder has all files of its manifest, with the sizes and hashes that it says."""
    try:
        entries = json.loads((path / "manifest.json").read_text())["files"]
        found = {entry["name"]: (path / entry["name"]).read_bytes() for entry in entries}
    except (OSError, ValueError):
        return False
    right = all(len(found[e["name"]]) == e["size"] and hashlib.sha256(found[e["name"]]).hexdigest() == e["sha256"] for e in entries)
    return right and found.keys() == FILES


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def good_checkpoints(folder: Path) -> list[Path]:
    """Newest first. Asserts that each checkpoint is whole, but for one that the test damaged."""
    paths, good = sorted(folder.glob("checkpoints/step-*"), reverse=True), list[Path]()
    for path in paths:
        if is_whole(path):
            good.append(path)
        elif not (path / DAMAGED).exists():
            raise AssertionError(f"{path.name} is broken; there are {[other.name for other in paths]}")
    for path in good:
        assert json.loads((path / "state.json").read_text())["step"] == step_of(path)
        assert history(Tail(path / "diary.jsonl").new())["step"] == list(range(1, step_of(path) + 1))
    return good


def phase(folder: Path, lived: list[dict[str, Any]]) -> str:
    """Where the last life was when it ended. lived: its events."""
    resumed = [event["step"] for event in lived if event["event"] == "resumed"]
    saved = max((event["step"] for event in lived if event["event"] == "checkpoint_saved"), default=0)
    staging, replaced, removed = (list(folder.glob(f"checkpoints/.{what}-step-*")) for what in ("staging", "replaced", "removed"))
    newest = max(map(step_of, good_checkpoints(folder)), default=0)
    if not resumed:
        return STARTING
    if replaced:
        return REPLACED
    if removed:
        return PRUNING
    if staging:
        return MANIFEST if (staging[0] / "manifest.json").exists() else STAGING
    if newest > max(saved, *resumed):
        return RENAMED
    return ENDING if newest == STEPS else TRAINING


def damage(path: Path, rng: random.Random) -> None:
    """Turn a bit in a file of the checkpoint."""
    (path / DAMAGED).touch()
    victim = path / rng.choice(sorted(FILES))
    flip(victim, rng.randrange(8 * victim.stat().st_size))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# What was learned


def outcome(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on how often it was killed."""
    last = folder / f"checkpoints/step-{STEPS:08d}"
    state = json.loads((last / "state.json").read_text())
    del state["totals"]["seconds"]
    steps = {event["step"]: event for event in events(folder, "step")}  # one walked twice counts as it was the last time
    names = ("loss", "parts", "ema", "lr", "grad_norm", "scale", "skipped", "epoch", "tokens", "questions")
    joined = history(Tail(folder / "diary.jsonl").new())
    hashed = [last / "trainable.safetensors", last / "optimizer.safetensors", *(path for path in (folder / "adapter").iterdir())]
    assert is_whole(last)
    return {
        "walked": joined["step"],
        **{f"joined {name}": joined[name] for name in ("loss/full", "loss/fast", "ema/full", "ema/fast", "scale")},
        **{name: {step: event[name] for step, event in sorted(steps.items())} for name in names},
        **{f"state {name}": state[name] for name in ("step", "num_steps", "fingerprint", "task", "totals", "rng")},
        **{f"bytes of {path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in hashed},
        **{name: events(folder, name)[-1]["results"] for name in ("evaluation", "calibration")},
        "failures": [event for event in events(folder) if event["event"] in ("failed", "checkpoint_failed", "ending_failed", "set_aside")],
        "left behind": sorted(path.name for parent in (folder, folder / "checkpoints") for path in parent.glob(".*")),
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill") / "undisturbed"
    assert not live(folder, 0)
    return folder


@pytest.mark.colab
def test_the_job_has_what_a_resume_may_get_wrong(undisturbed: Path) -> None:
    """More than three epochs; a scale that grows and falls; steps in halves, and steps not taken; checkpoints that are pruned."""
    found = outcome(undisturbed)
    assert found["walked"] == list(range(1, STEPS + 1)) and set(found["epoch"].values()) == {0, 1, 2, 3}
    scales = [found["scale"][step] for step in found["walked"]]
    assert {after / before for before, after in itertools.pairwise(scales)} == {0.5, 1.0, 2.0}
    assert [step - 1 for step, skipped in found["skipped"].items() if skipped] == list(NOT_FINITE)
    assert [(event["step"] - 1, event["splits"]) for event in events(undisturbed, "oom")] == [(i, 1) for i in OUT_OF_MEMORY]
    assert found["state totals"]["out_of_memory"] == len(OUT_OF_MEMORY) and found["state totals"]["skipped"] == len(NOT_FINITE)
    good = good_checkpoints(undisturbed)
    assert step_of(good[0]) == STEPS and len(good) == KEEP < STEPS // SAVE_EVERY
    assert found["failures"] == found["left behind"] == []


# The kills


class Chain:
    """Lives of one experiment, in one run folder after another."""

    def __init__(self, root: Path, undisturbed: Path, seed: int) -> None:
        self.root, self.wanted, self.rng = root, outcome(undisturbed), random.Random(seed)
        self.landed: dict[str, Counter[str]] = {mode: Counter() for mode in MODES}
        self.num_lives = self.num_runs = self.num_damaged = 0
        self._next_run()

    @property
    def num_kills(self) -> int:
        return sum(counter.total() for counter in self.landed.values())

    def kill(self) -> None:
        """One more life, which is to be killed; the modes take turns."""
        turn, mode = divmod(self.num_kills, len(MODES))
        if MODES[mode] == "by time":
            moment = TURNS[turn % len(TURNS)]
            self._live(MODES[mode], "--tell", moment, seconds=self.rng.uniform(0, MOMENTS[moment]))
            return
        calls, after = (RENAMES, DISK_CALLS)[turn % 2], turn % 4 in (0, 3)
        if aimed := len(good_checkpoints(self.folder)) > 1 and self.rng.random() < 0.4:
            self._damage()  # so that the run goes back, and renames over what is there
        self._live(MODES[mode], "--die-at", str(self.rng.randint(*BOUNDS[calls][aimed])), *calls, *["--after"] * after)

    def finish(self) -> None:
        self._live(None)

    def _next_run(self) -> None:
        self.num_runs += 1
        self.folder, self.newest = self.root / f"run-{self.num_runs}", 0

    def _damage(self) -> None:
        newest, before, *_ = good_checkpoints(self.folder)
        damage(newest, self.rng)
        self.num_damaged += 1
        self.newest = step_of(before)

    def _live(self, mode: str | None, *arguments: str, seconds: float | None = None) -> None:
        self.num_lives += 1
        num_events = len(events(self.folder))
        killed = live(self.folder, self.num_lives, *arguments, seconds=seconds)
        lived, good = events(self.folder)[num_events:], good_checkpoints(self.folder)
        plan = f"life {self.num_lives} ({arguments}, {seconds}) in {self.folder}"
        assert [event["step"] for event in lived if event["event"] == "resumed"] in ([], [self.newest]), plan
        if self.newest:
            assert good and step_of(good[0]) >= self.newest, f"the newest checkpoint is gone after {plan}"
        self.newest = step_of(good[0]) if good else 0
        if killed:
            assert mode is not None, f"nobody killed {plan}"
            self.landed[mode][phase(self.folder, lived)] += 1
        else:
            self._compare(plan)

    def _compare(self, plan: str) -> None:
        found = outcome(self.folder)
        assert found.keys() == self.wanted.keys()
        for name, value in self.wanted.items():
            assert found[name] == value, f"{name} is another one than without kills, after {plan}"
        self._next_run()

    def table(self) -> str:
        lines = [f"{'where the kills landed':34}{MODES[0]:>10}{MODES[1]:>12}"]
        lines += [f"{name:34}{self.landed[MODES[0]][name]:10}{self.landed[MODES[1]][name]:12}" for name in PHASES]
        return "\n".join(lines)


@pytest.mark.parametrize(
    ("num_kills", "least_phases"), [pytest.param(12, 4, marks=pytest.mark.colab), pytest.param(60, 7, marks=pytest.mark.full)]
)
def test_killed_again_and_again_a_run_learns_the_same(
    num_kills: int, least_phases: int, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, started = Chain(tmp_path, undisturbed, seed=num_kills), time.monotonic()
    while chain.num_kills < num_kills:
        assert chain.num_lives < 3 * num_kills, "most lives ended before their kill"
        chain.kill()
    chain.finish()
    with capsys.disabled():
        about = f"{num_kills} kills over {chain.num_runs - 1} runs, {chain.num_damaged} checkpoints damaged in between"
        print(f"\n{about}, {time.monotonic() - started:.0f} s\n{chain.table()}")
    assert sum(any(counter[name] for counter in chain.landed.values()) for name in PHASES) >= least_phases


def test_a_broken_checkpoint_is_seen(undisturbed: Path, tmp_path: Path) -> None:
    """The look at the disk, on which the test above hangs, can fail."""
    (path,) = [path for path in good_checkpoints(undisturbed) if step_of(path) == STEPS]
    for name in sorted(FILES | {"manifest.json"}):
        copy = tmp_path / name / "checkpoints" / path.name
        copy.mkdir(parents=True)
        for file in path.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        assert good_checkpoints(tmp_path / name) == [copy]
        flip(copy / name, 4 * (copy / name).stat().st_size)
        with pytest.raises(AssertionError, match="is broken"):
            good_checkpoints(tmp_path / name)
