"""The promise: the machine is gone, and the same line on a new one goes on from the Hub, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hub_child
import pytest
from helpers import Halt, all_written, events
from hub_setup import EVERY, HUB, LATEST, REPO, TOKEN, Bell, Told, a_hub, environment, use
from kill_child import STEPS
from minihub import MiniHub
from test_kill import outcome
from toy_task import ToyTask

import colabtrain
from colabtrain.runtime import publisher, remote
from colabtrain.runtime.diary import Tail, history

HELD_AT = (11, 13)  # of the first two lives; a checkpoint is made at every second step
OPTIONS: dict[str, Any] = {**EVERY, **HUB, "checkpoint_every": 5}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MiniHub]:
    with a_hub(monkeypatch, tmp_path / "home") as hub:
        yield hub


@pytest.fixture
def bell(monkeypatch: pytest.MonkeyPatch) -> Bell:
    return Bell(monkeypatch)


def latest(hub: MiniHub) -> dict[str, Any]:
    return json.loads(hub.read(REPO, "main", LATEST))


def before(act: Callable[[int], object]) -> Callable[[int], None]:
    """act(i) before step i, with each checkpoint taken at its own step."""

    def before_step(i: int) -> None:
        all_written()
        act(i)

    return before_step


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*"))


@pytest.mark.colab
def test_machines_come_and_go_and_the_run_learns_the_same(hub: MiniHub, tmp_path: Path) -> None:
    def life(name: str, *arguments: object) -> Told:
        """A new machine: an empty folder, and nothing that the Hub's client may have kept."""
        return Told(
            [hub_child.__file__, tmp_path / name, *arguments], environment(hub.url, tmp_path / f"home-{name}"), tmp_path / f"{name}.txt"
        )

    with life("undisturbed") as child:
        assert child.end() == 0, child.errors.read_text()
    assert not hub.repos
    wanted = outcome(tmp_path / "undisturbed")

    with life("first", "--hub", REPO, "--hold-at", HELD_AT[0]) as child:
        child.hear("checkpoint_published 10")
        os.kill(child.pid, signal.SIGKILL)
        assert child.end() == -signal.SIGKILL
    shutil.rmtree(tmp_path / "first")

    # Killed once its commit has landed, before it knows: the answer got lost, and it looks at HEAD.
    with life("second", "--hub", REPO, "--hold-at", HELD_AT[1]) as child:
        hub.fault("POST", "/commit/main", "apply_then_drop", after=1)  # after the claim
        hub.fault("GET", "/revision/main", "call", lambda hub: latest(hub)["step"] == 12 and os.kill(child.pid, 9), times=None)
        assert child.hear("hub_claimed") and child.end() == -signal.SIGKILL
        assert "checkpoint_published 12" not in child.lines and latest(hub)["step"] == 12
    assert events(tmp_path / "second", "resumed")[-1]["step"] == 10
    shutil.rmtree(tmp_path / "second")
    hub.faults.clear()

    with life("third", "--hub", REPO, "--then", tmp_path / "fourth") as child:
        assert child.end() == 0, child.errors.read_text()
        assert "resumed 12" in child.lines and f"resumed {STEPS}" in child.lines
    found = outcome(tmp_path / "third")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == value, f"{name} is another one than undisturbed"
    more, whole = hub_child.MORE_STEPS, history(Tail(tmp_path / "fourth/diary.jsonl").new())
    assert whole["step"] == list(range(1, more + 1)) and whole["loss/full"][:STEPS] == wanted["joined loss/full"]
    assert latest(hub)["step"] == more and latest(hub)["claim"] == 4


# What stands in the way of it


def test_a_hub_out_of_reach_at_the_start_is_an_error_and_nothing_is_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with MiniHub() as gone:
        use(monkeypatch, tmp_path / "home", gone.url)
    steps = list[int]()
    for _ in range(2):  # neither is it taken for a start of some kind by the next one
        with pytest.raises(colabtrain.HubError, match=f"hub='{REPO}': the Hub is out of reach, .* hub_required=False"):
            colabtrain.start(task=ToyTask(20, before(steps.append)), run_dir=tmp_path / "run", **OPTIONS)
    assert not steps and not events(tmp_path / "run") and not saved_steps(tmp_path / "run")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("colabtrain")]


@pytest.mark.colab
def test_a_hub_that_is_not_required_is_joined_when_it_comes_back(monkeypatch: pytest.MonkeyPatch, bell: Bell, tmp_path: Path) -> None:
    with MiniHub() as gone:
        use(monkeypatch, tmp_path / "home", gone.url)
    halt = Halt(at=12)
    run = colabtrain.start(task=ToyTask(20, before(halt)), run_dir=tmp_path / "run", hub_required=False, **OPTIONS)
    assert halt.reached.wait(60)
    said = events(run.folder, "hub_error")[0]["text"]
    assert f"{REPO} is left out: the Hub is out of reach" in said and "from what is on this machine" in said
    assert saved_steps(run.folder) == [5, 10] and not events(run.folder, "checkpoint_published")
    with MiniHub(tokens={TOKEN: "write"}, port=gone.port) as back:
        bell.wait("run", "checkpoint_published", step=10)  # while it trains, and of all that were saved the newest
        halt.go.set()
        assert run.wait(60) == "finished"
        assert latest(back)["step"] == 20 and latest(back)["claim"] == 1
    assert not events(run.folder, "not_published")


@pytest.mark.parametrize("at_once", [True, False])
def test_what_was_left_over_is_published_by_the_next_start(
    at_once: bool, hub: MiniHub, bell: Bell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """at_once: while there is more to train; else there is nothing left to train."""
    monkeypatch.setattr(remote, "DRAIN_SECONDS", 0.3)
    monkeypatch.setattr(publisher, "FIRST_WAIT_SECONDS", 0.1)

    def fail_from_now_on(i: int) -> None:
        if i == 6:
            bell.wait("run", "checkpoint_published", step=5)
            hub.fault("POST", "/commit/main", "status", 500, times=None)

    run = colabtrain.start(task=ToyTask(20, before(fail_from_now_on)), run_dir=tmp_path / "run", **OPTIONS)
    assert run.wait(60) == "finished"
    said = events(run.folder, "not_published")[0]
    assert (said["saved_step"], said["published_step"]) == (20, 5) and latest(hub)["step"] == 5
    assert f"step 20 is on this machine only, not in {REPO} (the Hub has trouble (HTTP 500" in said["text"]
    assert "the same start() on this machine publishes it" in said["text"]

    hub.faults.clear()
    monkeypatch.setattr(remote, "DRAIN_SECONDS", 60.0)
    halt = Halt(at=20)
    again = colabtrain.start(task=ToyTask(30 if at_once else 20, before(halt)), run_dir=tmp_path / "run", **OPTIONS)
    if at_once:
        bell.wait("run", "checkpoint_published", step=20)
        halt.go.set()
    assert again.wait(60) == "finished"
    published = [event["step"] for event in events(run.folder, "checkpoint_published")]
    assert published[:2] == [5, 20] and latest(hub)["step"] == (30 if at_once else 20)
    assert len(events(run.folder, "not_published")) == 1


@pytest.mark.colab
def test_of_two_sessions_the_second_publishes_and_the_first_goes_on_alone(hub: MiniHub, bell: Bell, tmp_path: Path) -> None:
    first_halt, second_halt = Halt(at=12), Halt(at=17)
    first = colabtrain.start(task=ToyTask(20, before(first_halt)), run_dir=tmp_path / "first", keep_local=9, **OPTIONS)
    assert first_halt.reached.wait(60)
    bell.wait("first", "checkpoint_published", step=10)

    second = colabtrain.start(task=ToyTask(20, before(second_halt)), run_dir=tmp_path / "second", **OPTIONS)
    bell.wait("second", "checkpoint_published", step=15)
    claimed = events(second.folder, "hub_claimed")[-1]["text"]  # the first one travelled
    assert "another one" in claimed and "if it is alive, it cannot any more" in claimed
    assert [event["step"] for event in events(second.folder, "resumed")][-1] == 10

    head = hub.head(REPO)
    first_halt.go.set()
    assert first.wait(60) == "finished"
    (fenced,) = events(first.folder, "fenced")
    assert f"another session (on {os.uname().nodename}) has taken over {REPO}" in fenced["text"]
    assert saved_steps(first.folder) == [5, 10, 15, 20] and first.history()["step"] == list(range(1, 21))
    assert hub.head(REPO) == head, "the one that was fenced has changed the repo"
    assert events(first.folder, "not_published")[0]["saved_step"] == 20

    second_halt.go.set()
    assert second.wait(60) == "finished"
    assert latest(hub)["step"] == 20 and not events(second.folder, "fenced")
