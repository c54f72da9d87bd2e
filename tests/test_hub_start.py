"""start(hub=...): what a person sees of it, in the cell and on the command line."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import HOLD_SECONDS, Halt, events
from minihub import MiniHub
from toy_task import ToyTask

import colabtrain
from colabtrain.__main__ import main
from colabtrain.hub_token import NoToken
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.runtime.worker import jobs

REPO = "user/run"
OPTIONS: dict[str, Any] = {"hub": REPO, "publish_every": 0.0, "display": False, "checkpoint_every": 2, "steps": 4}


@pytest.fixture(autouse=True)
def token(online_client: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")


def pointer(hub: MiniHub) -> dict[str, Any]:
    return json.loads(hub.read(REPO, "main", "colabtrain/latest.json"))


@pytest.mark.colab
def test_one_line_publishes_and_the_same_line_on_a_new_machine_goes_on(hub: MiniHub, tmp_path: Path) -> None:
    data = help_desk(40)
    assert colabtrain.start("tiny", data, run_dir=tmp_path / "a", **OPTIONS).wait(HOLD_SECONDS) == "finished"
    assert (pointer(hub)["step"], hub.repos["model", REPO].private) == (4, True)
    run = colabtrain.start("tiny", data, run_dir=tmp_path / "b", **{**OPTIONS, "steps": 6})
    assert run.wait(HOLD_SECONDS) == "finished" and run.history()["step"] == [1, 2, 3, 4, 5, 6]
    log = (tmp_path / "b/train.log").read_text()
    assert "user/run has step 4, published" in log and "resumed from step 4" in log and "MB; one every" in log
    assert pointer(hub)["step"] == 6 and [event["step"] for event in events(tmp_path / "b", "checkpoint_published")][-1] == 6
    card = hub.read(REPO, "main", "README.md").decode()
    assert "run = colabtrain.start('tiny', data, hub='user/run')" in card and "**step 6 of 6**" in card and "full" in card
    assert hub.read(REPO, "main", "losses.png").startswith(b"\x89PNG")


def test_the_same_cell_again_is_the_live_run_and_another_repo_is_refused(hub: MiniHub, tmp_path: Path) -> None:
    halt = Halt(1)
    task = ToyTask(num_steps=4, before_step=halt)
    run = colabtrain.start(task=task, run_dir=tmp_path / "a", **{**OPTIONS, "steps": None})
    try:
        assert halt.reached.wait(HOLD_SECONDS)
        hub.take_log()
        assert colabtrain.start(task=task, run_dir=tmp_path / "a", **{**OPTIONS, "steps": None}) is run and not hub.take_log()
        with pytest.raises(colabtrain.AlreadyRunning, match="hub: the live run has 'user/run', now 'user/other'"):
            colabtrain.start(task=task, run_dir=tmp_path / "a", **{**OPTIONS, "steps": None, "hub": "user/other"})
    finally:
        halt.go.set()
    assert run.wait(HOLD_SECONDS) == "finished" and pointer(hub)["step"] == 4


def test_a_hook_neither_holds_up_nor_fails_what_is_published(hub: MiniHub, tmp_path: Path) -> None:
    release, called = threading.Event(), threading.Event()

    def hook(path: Path, step: int) -> None:
        assert (path / "manifest.json").exists(), "it is durable"
        called.set()
        release.wait(HOLD_SECONDS)
        raise SystemExit("the hook fails")

    run = colabtrain.start(task=ToyTask(num_steps=2), run_dir=tmp_path / "a", on_checkpoint=hook, **{**OPTIONS, "steps": None})
    try:
        assert called.wait(HOLD_SECONDS)
        deadline = threading.Event()
        while not events(run.folder, "checkpoint_published"):
            assert not deadline.wait(0.02) and run.state not in ("failed",)
    finally:
        release.set()
    assert run.wait(HOLD_SECONDS) == "finished" and events(run.folder, "hook_failed")


@pytest.mark.parametrize("fault", [("status", 403), ("status", 413), ("status", 401), ("status", 404), ("status", 503), ("drop",)], ids=str)
def test_whatever_the_hub_says_in_mid_run_training_goes_on(
    hub: MiniHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: tuple[Any, ...]
) -> None:
    monkeypatch.setattr("colabtrain.runtime.remote.DRAIN_SECONDS", 0.5)
    hub.fault("POST", "/commit/main", *fault, times=None, after=2)  # the pointer, the claim
    run = colabtrain.start(task=ToyTask(num_steps=6), run_dir=tmp_path / "a", **{**OPTIONS, "steps": None})
    assert run.wait(HOLD_SECONDS) == "finished" and run.saved_step == 6
    error = events(run.folder, "hub_error")[0]
    assert error["kind"] == ("refused" if fault[-1] in (401, 403, 404, 413) else "retry") and error["status"] == (fault[1:] or (None,))[0]
    assert "step 6 is on this machine only, not in user/run" in events(run.folder, "not_published")[0]["text"]
    order = [event["event"] for event in events(run.folder)]
    assert order.index("not_published") < order.index("finished")


# Refusals in the cell


def nothing_was_begun(folder: Path) -> bool:
    return not (folder / "diary.jsonl").exists() and not jobs()


def test_no_token_is_said_in_the_cell(hub: MiniHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(colabtrain.HubError, match="there is no Hugging Face token") as raised:
        colabtrain.start(task=ToyTask(num_steps=2), run_dir=tmp_path / "a", hub=REPO, display=False)
    assert isinstance(raised.value, NoToken) and nothing_was_begun(tmp_path / "a") and not hub.take_log()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hub": "run"}, "hub='run' is no name of a Hub repo; give owner/name"),
        ({"hub": ""}, "hub='' is no name"),
        ({"hub": 3}, "hub=3 is of type int"),
        ({"hub": REPO, "publish_every": -1.0}, "publish_every=-1.0 is too small"),
        ({"hub": REPO, "keep_remote": 0}, "keep_remote=0 is too small; it must be at least 1"),
        ({"hub": REPO, "squash_every": 0}, "squash_every=0 is too small"),
        ({"hub": REPO, "private": "yes"}, "private='yes' is of type str"),
        ({"hub": REPO, "hub_required": 1}, "hub_required=1 is of type int"),
        ({"hub_repo": REPO}, "unknown option hub_repo='user/run'; did you mean hub"),
    ],
)
def test_a_wrong_option_is_named(hub: MiniHub, tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        colabtrain.start(task=ToyTask(num_steps=2), run_dir=tmp_path / "a", display=False, **options)
    assert nothing_was_begun(tmp_path / "a") and not hub.take_log()


def test_commits_that_come_too_fast_for_the_real_hub_are_refused(
    tmp_path: Path, online_client: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://huggingface.co")
    with pytest.raises(ValueError, match="publish_every=10 is too small; it must be at least 60 seconds"):
        colabtrain.start(task=ToyTask(num_steps=2), run_dir=tmp_path / "a", display=False, hub=REPO, publish_every=10)


def test_a_client_that_is_offline_is_said(hub: MiniHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(colabtrain.HubError, match="HF_HUB_OFFLINE is set, which keeps the Hub out of reach; unset it"):
        colabtrain.start(task=ToyTask(num_steps=2), run_dir=tmp_path / "a", **{**OPTIONS, "steps": None})


@pytest.mark.colab
def test_a_token_that_may_only_read_is_refused_and_the_folder_let_go(hub: MiniHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    with pytest.raises(colabtrain.HubError, match="the token may not write there"):
        colabtrain.start(task=ToyTask(num_steps=2), run_dir=tmp_path / "a", **{**OPTIONS, "steps": None})
    assert nothing_was_begun(tmp_path / "a") and not hub.repos
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    assert (
        colabtrain.start(task=ToyTask(num_steps=2), run_dir=tmp_path / "a", **{**OPTIONS, "steps": None}).wait(HOLD_SECONDS) == "finished"
    )


def test_other_data_for_the_same_repo_is_refused_in_the_cell_and_fences_nobody(hub: MiniHub, tmp_path: Path) -> None:
    colabtrain.start("tiny", help_desk(40), run_dir=tmp_path / "a", **OPTIONS).wait(HOLD_SECONDS)
    before = hub.head(REPO)
    with pytest.raises(
        ValueError, match=r"checkpoint of step 4 in user/run belongs to another experiment \(data: checkpoint .*allow_mismatch="
    ):
        colabtrain.start("tiny", help_desk(44), run_dir=tmp_path / "b", **OPTIONS)
    assert hub.head(REPO) == before and nothing_was_begun(tmp_path / "b")


def test_what_only_the_prepared_task_can_tell_is_refused_before_the_claim(hub: MiniHub, tmp_path: Path) -> None:
    colabtrain.start(task=ToyTask(num_steps=2), run_dir=tmp_path / "a", **{**OPTIONS, "steps": None}).wait(HOLD_SECONDS)
    before = hub.head(REPO)
    other = ToyTask(num_steps=2)
    other.fingerprint = lambda: {"toy": "another"}  # type: ignore[method-assign]
    run = colabtrain.start(task=other, run_dir=tmp_path / "b", **{**OPTIONS, "steps": None})
    with pytest.raises(colabtrain.RunFailed, match="belongs to another experiment"):
        run.wait(HOLD_SECONDS)
    assert hub.head(REPO) == before


@pytest.mark.colab
def test_an_interrupt_of_a_start_that_waits_for_the_hub_leaves_nothing_behind(hub: MiniHub, tmp_path: Path) -> None:
    fault = hub.fault("GET", "/api/models/user/run", "hang")
    threading.Thread(target=lambda: (fault.reached.wait(HOLD_SECONDS), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        colabtrain.start(task=ToyTask(num_steps=2), run_dir=tmp_path / "a", **{**OPTIONS, "steps": None})
    hub.release()
    assert nothing_was_begun(tmp_path / "a")
    assert (
        colabtrain.start(task=ToyTask(num_steps=2), run_dir=tmp_path / "a", **{**OPTIONS, "steps": None}).wait(HOLD_SECONDS) == "finished"
    )


# The command line


def test_the_command_line_publishes_and_goes_on(hub: MiniHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    from dataclasses import asdict

    data.write_text("".join(json.dumps(asdict(record) if not isinstance(record, dict) else record) + "\n" for record in help_desk(40)))
    line = ["train", "--model", "tiny", "--data", str(data), "--hub", REPO, "--set", "publish_every=0", "--set", "max_eval_records=4"]
    assert main([*line, "--run", str(tmp_path / "a"), "--steps", "2"]) == 0 and pointer(hub)["step"] == 2
    assert main([*line, "--run", str(tmp_path / "b"), "--steps", "3"]) == 0 and pointer(hub)["step"] == 3
    assert "user/run has step 2" in capsys.readouterr().out
    hub.fault("*", "/api/models/user/run", "status", 403, times=None)
    assert main([*line, "--run", str(tmp_path / "c"), "--steps", "3"]) == 1
    assert "colabtrain: hub='user/run': the token may not write there" in capsys.readouterr().err
