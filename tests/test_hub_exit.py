"""The end of the process, whichever it is: nothing hangs, nothing is left behind, and what is not on the Hub is said."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import exit_child
import pytest
from helpers import events
from hub_setup import LATEST, REPO, TOKEN, Told, children, ends, environment, seconds_of
from minihub import MiniHub

WITHIN_SECONDS = 3.0  # of its parent's death the Hub's process is gone
BOUND, IMPORTS_AND_ALL_ELSE = 2.0, 20.0  # seconds


@pytest.fixture
def hub() -> Iterator[MiniHub]:
    with MiniHub(tokens={TOKEN: "write"}) as hub:
        yield hub


def script(hub: MiniHub, folder: Path, *arguments: object) -> Told:
    line = [exit_child.__file__, folder / "run", *arguments]
    return Told(line, environment(hub.url, folder / "home"), folder / "stderr.txt", start_new_session=True)


def worker_of(child: Told) -> int:
    (pid,) = (pid for pid in children(child.pid) if b"hub_worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


def published_step(hub: MiniHub) -> int:
    return json.loads(hub.read(REPO, "main", LATEST))["step"]


@pytest.mark.colab
def test_an_interpreter_that_ends_publishes_what_it_saves(hub: MiniHub, tmp_path: Path) -> None:
    with script(hub, tmp_path, "--hold-at", 7) as child:
        assert child.end() == 0
        assert child.errors.read_text() == ""
    (ended,) = events(tmp_path / "run", "stopped")
    assert 7 < ended["step"] < exit_child.NUM_STEPS and published_step(hub) == ended["step"]
    assert not events(tmp_path / "run", "not_published")


@pytest.mark.parametrize("shorter", [pytest.param("exit", marks=pytest.mark.colab), "drain"])
def test_an_interpreter_that_ends_does_not_wait_for_ever_for_a_hub_that_hangs(shorter: str, hub: MiniHub, tmp_path: Path) -> None:
    """shorter: which of the two bounds comes first."""
    hub.fault("PUT", "/_lfs/", "hang", times=None)
    with script(hub, tmp_path, "--hold-at", 7, f"--{shorter}-seconds", BOUND) as child:
        child.hear("checkpoint_saved 5")
        worker = worker_of(child)
        assert seconds_of(lambda: child.end()) < BOUND + IMPORTS_AND_ALL_ELSE
        assert child.end() == 0
        assert ends(worker, WITHIN_SECONDS)
        assert child.errors.read_text() == ""
    saved, said = events(tmp_path / "run", "checkpoint_saved")[-1]["step"], events(tmp_path / "run", "not_published")
    assert [event["saved_step"] for event in said] == [saved] and said[0]["published_step"] == 0
    assert f"step {saved} is on this machine only, not in {REPO}" in (tmp_path / "run/train.log").read_text()


@pytest.mark.parametrize("at_work", [pytest.param(True, marks=pytest.mark.colab), False])
def test_a_killed_process_takes_its_child_along(at_work: bool, hub: MiniHub, tmp_path: Path) -> None:
    """at_work: in the middle of an upload."""
    fault = hub.fault("PUT", "/_lfs/", "hang", times=None) if at_work else None
    with script(hub, tmp_path, "--hold-at", 7, "--wait", "--relative") as child:
        relative = int(child.hear("relative").split()[1])
        try:
            if fault is not None:
                assert fault.reached.wait(60)
            else:
                child.hear("checkpoint_published 5")
            worker = worker_of(child)
            os.kill(child.pid, signal.SIGKILL)
            assert ends(worker, WITHIN_SECONDS), "the Hub's process lives on"
            assert not ends(relative, 0), "the relative that holds the pipes is gone, so that nothing was shown"
        finally:
            os.kill(relative, signal.SIGKILL)
        assert child.end() == -signal.SIGKILL
    head = hub.head(REPO)
    hub.release()
    assert hub.head(REPO) == head


def test_an_interrupt_of_the_whole_group_does_not_reach_the_child(hub: MiniHub, tmp_path: Path) -> None:
    with script(hub, tmp_path, "--hold-at", 7, "--wait") as child:
        child.hear("checkpoint_published 5")
        child.hear("waiting")
        worker = worker_of(child)
        os.killpg(child.pid, signal.SIGINT)
        child.hear("interrupted")
        child.hear("finished")
        assert child.end() == 0 and ends(worker, WITHIN_SECONDS)
    assert published_step(hub) == exit_child.NUM_STEPS
    assert not events(tmp_path / "run", "hub_error"), "the child was interrupted"
