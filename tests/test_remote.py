"""Where a run goes on from when there is a Hub repo and a run folder: what is newer is found, and nothing is lost. Real children."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import events, make_checkpoint
from huggingface_hub import CommitOperationAdd, HfApi
from minihub import MiniHub

from colabtrain.config import RunConfig
from colabtrain.dashboard.view import View
from colabtrain.hub_token import HubError
from colabtrain.runtime import manifest, remote
from colabtrain.runtime.diary import Diary, history
from colabtrain.runtime.hub_access import HubAccess, check_pace, check_repo
from colabtrain.runtime.lineage import Lineage
from colabtrain.runtime.remote import Remote

REPO = "user/run"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.01)


class Machine:
    """A run folder, and what the keeper does with its Remote."""

    def __init__(self, hub: MiniHub, folder: Path, **options: Any) -> None:
        self.hub, self.folder = hub, folder
        self.options = {"publish_every": 0.0, **options}
        self.remotes = list[Remote]()

    def start(self) -> Machine:
        """Up to the first step."""
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.remote = Remote(HubAccess(REPO, "hf_write", self.hub.url), folder, RunConfig(**self.options))
        self.remotes.append(self.remote)
        self.remote._process.with_xet = False
        self.remote.open()
        self.diary = Diary(folder)
        self.remote.bring(folder / "checkpoints", self.diary)
        while not self.remote.claim(self.diary, contextlib.nullcontext):
            self.remote.bring(folder / "checkpoints", self.diary)
        if found := manifest.listed(folder / "checkpoints"):
            self.remote.offer_left_over(found[0], manifest.number(found[0]))
        return self

    def save(self, step: int) -> Path:
        return make_checkpoint(self.folder / "checkpoints", step)

    def publish(self, *steps: int) -> Machine:
        for step in steps:
            self.remote.offer(self.save(step), step, 0.0)
            self.await_published(step)
        return self

    def await_published(self, step: int) -> None:
        deadline = time.monotonic() + 60
        while self.remote.published_step != step:
            assert time.monotonic() < deadline, events(self.folder)
            time.sleep(0.01)

    def die(self) -> Machine:
        """As a kill: nothing more is published or said."""
        self.remote._process.kill()
        return self

    def lose_disk(self) -> Machine:
        shutil.rmtree(self.folder)
        return self

    def steps(self) -> list[int]:
        return [manifest.number(path) for path in manifest.listed(self.folder / "checkpoints")]

    def said(self) -> str:
        return (self.folder / "train.log").read_text()


@pytest.fixture
def machine(hub: MiniHub, tmp_path: Path) -> Iterator[Any]:
    made: list[Machine] = []

    def make(name: str = "a", **options: Any) -> Machine:
        made.append(Machine(hub, tmp_path / name, **options))
        return made[-1]

    yield make
    for opened in [opened for machine in made for opened in machine.remotes]:
        opened._process.kill()
        opened.close()


def pointer(hub: MiniHub) -> dict[str, Any]:
    return json.loads(hub.read(REPO, "main", "colabtrain/latest.json"))


def describe_anew(path: Path) -> None:
    (path / manifest.MANIFEST).unlink()
    manifest.write(path)


# What a run goes on from


@pytest.mark.colab
def test_a_new_machine_goes_on_from_the_newest_with_its_history(hub: MiniHub, machine: Any) -> None:
    machine("a").start().publish(3, 5).die()
    wanted = {path.name: path.read_bytes() for path in (machine("a").folder / "checkpoints/step-00000005").iterdir()}
    b = machine("b").start()
    assert b.steps() == [5] and {path.name: path.read_bytes() for path in (b.folder / "checkpoints/step-00000005").iterdir()} == wanted
    assert history(events(b.folder))["step"] == [1, 2, 3, 4, 5], "the curves are whole"
    assert "user/run has step 5, published" in b.said() and "every hash is right" in b.said()
    assert "another one (on" in b.said(), "its session was there a moment ago"
    assert events(b.folder, "hub_claimed")[-1]["published_step"] == 5 and pointer(hub)["claim"] == 2
    b.publish(7)
    assert not (b.folder / remote.FOLDER / "checkpoint").exists()


def test_the_same_machine_goes_on_from_its_own_newer_checkpoint_and_publishes_it(hub: MiniHub, machine: Any) -> None:
    a = machine().start().publish(3).die()
    a.save(5)
    hub.take_log()
    a.start()
    assert a.steps()[0] == 5 and not any("safetensors" in seen.path and seen.method == "GET" for seen in hub.take_log())
    a.await_published(5)
    assert "another one" not in a.said() and "aside" not in a.said()


def test_a_claim_whose_process_died_before_its_first_checkpoint_costs_nothing(hub: MiniHub, machine: Any) -> None:
    a = machine().start().publish(3).die()
    a.save(5)
    a.start().die(), a.start()
    assert a.steps()[0] == 5
    a.await_published(5)


@pytest.mark.colab
def test_a_folder_that_another_session_went_past_takes_the_hub_s_and_keeps_its_own_aside(hub: MiniHub, machine: Any) -> None:
    a = machine("a").start().publish(3).die()
    a.save(9)
    machine("b").start().publish(4, 6).die()
    a.start()
    assert a.steps() == [6]
    aside = next(a.folder.glob("checkpoints-aside-*"))
    assert [manifest.number(path) for path in manifest.listed(aside)] == [9, 3] and str(aside) in a.said()
    assert "up to step 9, does not come after it" in a.said()
    a.publish(8)
    assert pointer(hub)["step"] == 8


def test_what_is_set_aside_twice_in_a_second_is_kept_twice(hub: MiniHub, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strftime, now = time.strftime, time.localtime()
    monkeypatch.setattr(time, "strftime", lambda form, when=now: strftime(form, when))
    a, b = machine("a").start().publish(3), machine("b")
    b.start().publish(4).die()
    a.start().die()
    b.start().publish(6).die()
    a.start()
    aside = sorted(a.folder.glob("checkpoints-aside-*"))
    assert [[manifest.number(path) for path in manifest.listed(one)] for one in aside] == [[3], [4]] and a.steps() == [6]


def test_a_download_that_was_not_claimed_is_no_lineage_once_the_other_went_on(hub: MiniHub, machine: Any, tmp_path: Path) -> None:
    a = machine("a").start().publish(3)
    b = machine("b")
    b.folder.mkdir()
    b.remote = Remote(HubAccess(REPO, "hf_write", hub.url), b.folder, RunConfig(publish_every=0))
    b.remote.open()
    b.remote.bring(b.folder / "checkpoints", Diary(b.folder))  # and dies before its claim
    b.die()
    assert b.steps() == [3]
    a.publish(4).die()
    b.start()
    assert b.steps() == [4]


def test_a_repo_that_another_session_claimed_and_never_published_to(hub: MiniHub, machine: Any) -> None:
    """What the newest claim was made for is what goes on, though this folder has more."""
    a = machine("a").start().publish(3).die()
    machine("b").start().die()
    a.save(5)
    a.start()
    assert a.steps() == [3] and list(a.folder.glob("checkpoints-aside-*"))


def test_a_local_run_that_is_given_a_new_repo_is_published_there(hub: MiniHub, machine: Any) -> None:
    a = machine()
    a.save(4)
    a.start().await_published(4)
    assert pointer(hub)["step"] == 4


def test_a_run_folder_of_another_repo_takes_what_this_one_has(hub: MiniHub, machine: Any) -> None:
    machine("a").start().publish(3).die()
    b = machine("b")
    b.folder.mkdir()
    Lineage(b.folder, "user/other").claiming("somebody")
    b.save(50)
    b.start()
    assert b.steps() == [3]


def test_a_session_that_publishes_while_the_next_one_gets_ready_is_followed(hub: MiniHub, machine: Any) -> None:
    a = machine("a").start().publish(3)
    hub.fault("POST", "/commit/main", "call", lambda _: None)
    fault = hub.fault("POST", "/preupload/main", "call", lambda _: a.publish(5))
    b = machine("b").start()
    assert fault.used == 1 and b.steps()[0] == 5 and pointer(hub)["claim"] == 2
    a.remote.offer(a.save(7), 7, 0.0)
    b.publish(9)
    assert pointer(hub)["step"] == 9


def test_a_session_that_squashes_while_the_next_one_downloads_is_followed(hub: MiniHub, machine: Any) -> None:
    a = machine("a").start().publish(3)

    def go_on(hub: MiniHub) -> None:
        a.publish(5)
        a.remote._process.ask("squash")
        hub.gc(REPO)

    hub.fault("HEAD", "/resolve/.*/optimizer.safetensors", "call", go_on)
    assert machine("b").start().steps()[0] == 5


def test_a_local_newest_that_is_damaged_gives_way_to_the_hub_s(hub: MiniHub, machine: Any) -> None:
    a = machine().start().publish(3, 5).die()
    (a.folder / "checkpoints/step-00000005/state.json").write_text("{}")
    a.start()
    assert a.steps() == [5] and manifest.check(a.folder / "checkpoints/step-00000005")["step"] == 5


@pytest.mark.colab
def test_after_a_fall_back_the_run_goes_on_from_what_it_made_since(hub: MiniHub, machine: Any) -> None:
    machine("a").start().publish(3, 5).die()
    entry = next(entry for path, entry in hub.repos["model", REPO].revision("main").tree.items() if path.endswith("/trainable.safetensors"))
    newest = pointer(hub)["checkpoint"]
    entry = hub.repos["model", REPO].revision("main").tree[f"{newest}/trainable.safetensors"]
    hub.store.path(entry.sha256).write_bytes(b"\0" * entry.size)
    b = machine("b").start()
    assert b.steps() == [3] and "cannot be used: trainable.safetensors" in b.said() and pointer(hub)["step"] == 3
    b.die().save(4)
    b.start()
    assert b.steps()[0] == 4
    b.await_published(4)


def test_no_checkpoint_that_can_be_used_is_an_error_and_no_fresh_start(hub: MiniHub, machine: Any) -> None:
    machine("a").start().publish(3).die()
    for path, entry in hub.repos["model", REPO].revision("main").tree.items():
        if path.endswith("optimizer.safetensors"):
            hub.store.path(entry.sha256).write_bytes(b"\0" * entry.size)
    before = hub.head(REPO)
    with pytest.raises(ValueError, match=r"no checkpoint in user/run can be used .*; name another repo to start anew"):
        machine("b").start()
    assert hub.head(REPO) == before


# What stops a start


@pytest.mark.colab
def test_a_hub_that_is_out_of_reach_is_an_error_and_without_it_a_red_line(hub: MiniHub, machine: Any) -> None:
    machine("a").start().publish(3).die()
    hub.fault("*", "/api/models/user/run", "status", 503, times=None)
    with pytest.raises(HubError, match=r"hub='user/run': the Hub has trouble \(HTTP 503.*hub_required=False") as raised:
        machine("b").start()
    assert "same line again" in str(raised.value)
    b = machine("c", hub_required=False).start()
    error = events(b.folder, "hub_error")[0]
    assert "user/run is left out: the Hub has trouble" in error["text"] and b.steps() == []


def test_a_hub_that_comes_back_is_claimed_then(hub: MiniHub, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fault("*", "/api/models/user/run", "status", 503, times=remote.OPEN_TRIES)
    a = machine(hub_required=False).start()
    a.publish(3)
    assert pointer(hub)["step"] == 3 and pointer(hub)["claim"] == 1
    order = [event["event"] for event in events(a.folder)]
    assert order.index("hub_error") < order.index("hub_claimed") < order.index("checkpoint_published")


def test_a_hub_that_comes_back_does_not_get_again_what_it_has(hub: MiniHub, machine: Any) -> None:
    machine("a").start().publish(3).die()
    hub.fault("*", "/api/models/user/run", "status", 503, times=remote.OPEN_TRIES)
    again = machine("a", hub_required=False).start()
    again.await_published(3)
    assert pointer(hub)["claim"] == 2 and pointer(hub)["seq"] == 1
    again.publish(5)
    assert pointer(hub)["seq"] == 2


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(("method", "path"), [("HEAD", "/resolve/.*/optimizer.safetensors"), ("POST", "/commit/main")])
def test_a_hub_that_fails_after_the_first_look(hub: MiniHub, machine: Any, method: str, path: str, required: bool) -> None:
    a = machine("a").start().publish(3).die()
    hub.fault(method, path, "status", 403, times=None)
    b = machine("b", hub_required=required)
    if required:
        with pytest.raises(HubError, match=r"user/run (could not be downloaded|cannot be claimed): the token may not .*HTTP 403"):
            b.start()
    else:
        b.start()
        assert events(b.folder, "hub_error")[0]["text"].startswith("user/run is left out: ") and b.remote.published_step == 0
    hub.faults.clear()
    assert a.start().steps() == [3], "nobody was fenced"


def test_what_is_tried_again_is_said(hub: MiniHub, machine: Any) -> None:
    machine("a").start().publish(3).die()
    hub.fault("GET", "/resolve/.*/optimizer.safetensors", "drop", times=2)
    b = machine("b").start()
    assert b.steps() == [3] and b.said().count("; tried again") == 2


def test_what_had_failed_on_the_other_machine_has_not_failed_here(hub: MiniHub, machine: Any) -> None:
    a = machine("a").start()
    path = a.save(3)
    for event in ("run_started", "checkpoint_failed", "hub_error", "fenced", "failed"):
        with (path / "diary.jsonl").open("a") as file:
            file.write(json.dumps({"time": 1.0, "event": event, "text": "bad", "step": 3}) + "\n")
    describe_anew(path)
    a.remote.offer(path, 3, 0.0)
    a.await_published(3)
    view = View()
    view.feed(events(machine("b").start().folder))
    assert not view.safety.notes() and not view.failure and view.safety.published_step == 3


def test_a_hub_that_comes_back_with_another_run_is_left_alone(hub: MiniHub, machine: Any) -> None:
    machine("a").start().publish(3).die()
    before = hub.head(REPO)
    hub.fault("*", "/api/models/user/run", "status", 503, times=remote.OPEN_TRIES)
    b = machine("b", hub_required=False).start()
    b.remote.offer(b.save(1), 1, 0.0)
    b.remote.close()
    assert "has step 3 of a run that this one does not come after" in events(b.folder, "fenced")[0]["text"] and hub.head(REPO) == before


@pytest.mark.parametrize(("token", "what"), [("hf_read", "may not write there"), ("hf_unknown", "is not accepted")])
def test_a_token_that_may_not_is_said_before_anything_else(hub: MiniHub, tmp_path: Path, token: str, what: str) -> None:
    one = Remote(HubAccess(REPO, token, hub.url), tmp_path / "a", RunConfig())
    with pytest.raises(HubError, match=what) as raised:
        one.open()
    assert token not in str(raised.value) and not hub.repos


def test_another_experiment_in_the_repo_is_refused_before_any_commit(hub: MiniHub, machine: Any) -> None:
    a = machine("a").start()
    path = a.save(3)
    state = json.loads((path / "state.json").read_text()) | {"fingerprint": {"config.batch_size": 4, "data": "other"}}
    (path / "state.json").write_text(json.dumps(state))
    describe_anew(path)
    a.remote.offer(path, 3, 0.0)
    a.await_published(3)
    before = hub.head(REPO)
    b = Remote(HubAccess(REPO, "hf_write", hub.url), a.folder.parent / "b", RunConfig())
    with pytest.raises(
        ValueError, match=r"checkpoint of step 3 in user/run belongs to another experiment .*data: checkpoint 'other', now 'mine'"
    ):
        b.open(identity=lambda: {"data": "mine", "config.batch_size": 4})
    with pytest.raises(ValueError, match="resume=False, but user/run has checkpoints; name another repo"):
        b.open(resumes=False)
    b.open(identity=lambda: {"data": "other"})
    b.end()
    assert hub.head(REPO) == before


def test_a_repo_of_something_else_is_refused(hub: MiniHub, tmp_path: Path) -> None:
    api = HfApi(hub.url, "hf_write")
    api.create_repo(REPO)
    api.create_commit(REPO, [CommitOperationAdd("pytorch_model.bin", b"theirs")], commit_message="theirs")
    one = Remote(HubAccess(REPO, "hf_write", hub.url), tmp_path / "a", RunConfig())
    with pytest.raises(ValueError, match=r"hub='user/run': user/run is not empty and no run of colabtrain"):
        one.open()


def test_a_public_repo_is_told(hub: MiniHub, machine: Any) -> None:
    HfApi(hub.url, "hf_write").create_repo(REPO, private=False)
    assert "user/run is public: anybody can read" in machine().start().said()


def test_a_repo_is_made_public_only_when_asked(hub: MiniHub, machine: Any) -> None:
    assert "made the public repo user/run" in machine(private=False).start().said() and hub.repos["model", REPO].private is False


@pytest.mark.parametrize(
    "name", ["run", "me/", "/run", "me/my run", "me/run/x", "https://huggingface.co/me/run", "me/a--b", "me/x.git", ""]
)
def test_a_name_that_is_none_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"hub={name!r} is no name of a Hub repo; give owner/name"):
        check_repo(name)


def test_names_and_paces_that_are_right() -> None:
    for name in ("me/run", "My-Org/run_1.2", "a/b"):
        check_repo(name)
    check_pace(60.0, "https://huggingface.co"), check_pace(0.0, "http://127.0.0.1:80"), check_pace(0.0, "http://localhost:1")
    with pytest.raises(ValueError, match="publish_every=59 is too small; it must be at least 60 seconds"):
        check_pace(59.0, "https://huggingface.co")
    with pytest.raises(ValueError, match="publish_every"):
        check_pace(1.0, "https://127.0.0.1.example.com")


def test_the_budget_says_bytes_and_a_day_s_total(hub: MiniHub, tmp_path: Path) -> None:
    one = Remote(HubAccess(REPO, "hf_write", hub.url), tmp_path, RunConfig())
    told = one.budget(340_000_000)
    assert re.search(r"340\.0 MB; one every 3 min 00 s at most is up to 163\.2 GB of uploads a day; user/run keeps the newest 2", told), (
        told
    )
