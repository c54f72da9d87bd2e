"""The queue of one: what is published when, and what is said when it is not. The Hub's process is played by a script."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import HOLD_SECONDS, events

from colabtrain.config import RunConfig
from colabtrain.runtime import publisher
from colabtrain.runtime.diary import Diary
from colabtrain.runtime.hub_process import HubFailure
from colabtrain.runtime.publisher import Publisher


class Process:
    """Answers one job after the other as the test decides: answer() is called with what is asked."""

    access = SimpleNamespace(repo="me/run")

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.begun: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.answer: Callable[[str, dict[str, Any]], Any] = lambda job, given: None
        self.killed = threading.Event()
        self.seq = 0

    def ask(self, job: str, **given: Any) -> Any:
        self.asked.append((job, given))
        self.begun.put((job, given))
        self.answer(job, given)
        if job == "squash":
            return None
        self.seq += 1
        return {"pointer": {"seq": self.seq, "created": True, "step": given["step"]}, "bytes": 1000, "complaint": ""}

    def kill(self) -> None:
        self.killed.set()

    def steps(self) -> list[int]:
        return [given["step"] for job, given in self.asked if job == "publish"]


class Bench:
    """A publisher, its diary, and the folders that are held for it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.process, self.held = folder, Process(), set[Path]()
        self.diary = Diary(folder)
        config = RunConfig(**{"publish_every": 0.0, "squash_every": 1000, **options})
        self.joined = 0
        self.publisher = Publisher(self.process, self.diary, config, self.hold, self.join, "a:card", lambda step: {"step": step})  # type: ignore[arg-type]

    @contextlib.contextmanager
    def hold(self, path: Path) -> Iterator[None]:
        self.held.add(path)
        yield
        self.held.remove(path)

    def join(self) -> dict[str, Any]:
        self.joined += 1
        return {"seq": 0, "created": False, "step": 0}

    def start(self, published_step: int = 0) -> Bench:
        self.publisher.start({"seq": 0, "created": True, "step": published_step}, published_step)
        return self

    def offer(self, step: int) -> None:
        self.publisher.offer(self.folder / str(step), step, time.time())

    def events(self, name: str) -> list[dict[str, Any]]:
        return events(self.folder, name)

    def wait_for(self, name: str, number: int = 1) -> dict[str, Any]:
        deadline = time.monotonic() + HOLD_SECONDS
        while len(found := self.events(name)) < number:
            assert time.monotonic() < deadline, f"no {name}; there is {events(self.folder)}"
            time.sleep(0.005)
        return found[number - 1]

    def close(self, seconds: float = HOLD_SECONDS) -> None:
        self.publisher.close(seconds)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close(0.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_WAIT_SECONDS", "MAX_WAIT_SECONDS", "REFUSED_SECONDS"):
        monkeypatch.setattr(publisher, name, 0.01)


def fail_once(*failures: Exception) -> Callable[[str, dict[str, Any]], None]:
    left = list(failures)

    def answer(job: str, given: dict[str, Any]) -> None:
        if left and job == "publish":
            raise left.pop(0)

    return answer


def test_a_checkpoint_is_published_and_told(bench: Bench) -> None:
    bench.start()
    saved_at = time.time() - 5
    bench.publisher.offer(bench.folder / "10", 10, saved_at)
    told = bench.wait_for("checkpoint_published")
    assert (told["step"], told["seq"], told["bytes"], told["saved_at"], told["retries"], told["skipped"]) == (10, 1, 1000, saved_at, 0, 0)
    assert (told["repo"], told["saved_step"], told["published_step"]) == ("me/run", 10, 10) and 5 <= told["at_risk_seconds"] < 60
    assert told["bytes_per_second"] == pytest.approx(1000 / max(told["seconds"], 1e-3))
    job, given = bench.process.asked[0]
    assert job == "publish" and (given["path"], given["keep"], given["facts"]) == (str(bench.folder / "10"), 2, {"step": 10})
    assert not bench.held, "its folder may go"


def test_the_newest_wins_and_what_is_skipped_is_told(bench: Bench) -> None:
    go = threading.Event()
    bench.process.answer = lambda job, given: go.wait(HOLD_SECONDS)
    bench.start().offer(1)
    bench.process.begun.get(timeout=HOLD_SECONDS)
    for step in (2, 3, 4):
        bench.offer(step)
    assert bench.held == {bench.folder / "1", bench.folder / "4"}
    go.set()
    told = bench.wait_for("checkpoint_published", 2)
    assert bench.process.steps() == [1, 4] and told["skipped"] == 2 and "2 before it skipped" in told["text"]
    assert [(event["step"], event["by"]) for event in bench.events("publish_skipped")] == [(2, 3), (3, 4)]


def test_commits_keep_their_distance_and_the_last_one_is_the_newest(tmp_path: Path) -> None:
    bench = Bench(tmp_path, publish_every=0.3).start()
    started, step = time.monotonic(), 0
    while time.monotonic() - started < 1.0:
        step += 1
        bench.offer(step)
        time.sleep(0.002)
    published, seconds = list(bench.process.steps()), time.monotonic() - started
    assert 1 <= len(published) <= 1 + seconds / 0.3
    bench.close()
    assert bench.process.steps()[-1] == step == bench.publisher.published_step and not bench.events("not_published")


def test_the_end_does_not_wait_for_the_distance(tmp_path: Path) -> None:
    bench = Bench(tmp_path, publish_every=1000.0).start()
    bench.offer(1)
    bench.wait_for("checkpoint_published")
    bench.offer(2)
    bench.close()
    assert bench.process.steps() == [1, 2]


@pytest.mark.parametrize("kind", ["retry", "conflict", "changed"])
def test_what_may_pass_is_tried_again(quick: None, bench: Bench, kind: str) -> None:
    bench.process.answer = fail_once(*(HubFailure("out of reach", kind, status=503) for _ in range(3)))
    bench.start().offer(1)
    told = bench.wait_for("checkpoint_published")
    errors = bench.events("hub_error")
    assert bench.process.steps() == [1, 1, 1, 1] and told["retries"] == 3 and [event["retries"] for event in errors] == [1, 2, 3]
    assert {(event["kind"], event["reason"], event["status"]) for event in errors} == {("retry", "out of reach", 503)}
    assert "step 1 could not be published to me/run: out of reach; tried again at" in errors[0]["text"]
    assert "training goes on" in errors[0]["text"] and "text" not in errors[2], "a Hub that is down for hours does not fill the log"
    assert len({given["nonce"] for job, given in bench.process.asked}) == 1, "the Hub's process knows it again"


def test_waits_double_and_the_hub_s_own_wish_is_honoured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "RANDOM", SimpleNamespace(uniform=lambda low, high: 1.0))
    monkeypatch.setattr(publisher, "FIRST_WAIT_SECONDS", 0.1)
    bench.publisher._wait = 0.1
    bench.process.answer = fail_once(HubFailure("a"), HubFailure("b"), HubFailure("c", wait=0.9), HubFailure("d"))
    bench.start().offer(1)
    bench.wait_for("hub_error", 4)
    waits = [event["retry_at"] - event["time"] for event in bench.events("hub_error")]
    assert waits == pytest.approx([0.1, 0.2, 0.9, 0.8], abs=0.05)


def test_a_newer_checkpoint_takes_the_place_of_one_that_failed(quick: None, bench: Bench) -> None:
    def answer(job: str, given: dict[str, Any]) -> None:
        if given["step"] == 1:
            bench.offer(2)
            raise HubFailure("reset")

    bench.process.answer = answer
    bench.start().offer(1)
    bench.wait_for("checkpoint_published")
    assert bench.process.steps() == [1, 2] and not bench.held
    assert [(event["step"], event["by"]) for event in bench.events("publish_skipped")] == [(1, 2)]


def test_what_is_refused_is_red_and_tried_again_much_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.process.answer = fail_once(HubFailure("the account's storage is used up", "refused", status=403))
    bench.start().offer(1)
    error = bench.wait_for("hub_error")
    assert (error["kind"], error["status"]) == ("refused", 403) and 590 < error["retry_at"] - error["time"] < 610
    bench.offer(2)
    bench.close(0.1)
    assert bench.process.steps() == [1], "not hammered, not at the end either"
    told = bench.events("not_published")[0]["text"]
    assert "step 2 is on this machine only, not in me/run (the account's storage is used up)" in told and "same start()" in told


def test_a_checkpoint_that_is_gone_is_dropped_and_the_next_one_tried(bench: Bench) -> None:
    bench.process.answer = fail_once(HubFailure("no such folder", "local"))
    bench.start().offer(1)
    assert "the next one is tried" in bench.wait_for("hub_error")["text"] and not bench.held
    bench.offer(2)
    bench.wait_for("checkpoint_published")
    assert bench.process.steps() == [1, 2]


def test_a_fenced_session_publishes_nothing_more_and_says_so(bench: Bench) -> None:
    bench.process.answer = fail_once(HubFailure("another session (on vm) has taken over me/run", "fenced"))
    bench.start().offer(1)
    told = bench.wait_for("fenced")["text"]
    assert told.startswith("another session (on vm) has taken over me/run: nothing is published") and "training and checkpoints" in told
    bench.offer(2), bench.offer(3)
    bench.close()
    assert bench.process.steps() == [1] and not bench.held and bench.process.killed.is_set()
    assert "has taken over" in bench.events("not_published")[0]["text"] and bench.events("not_published")[0]["saved_step"] == 3


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyError("pointer"), ImportError("y"), MemoryError(), OSError(28, "full")], ids=repr)
def test_no_error_of_any_class_ends_the_publisher(quick: None, bench: Bench, error: Exception) -> None:
    bench.process.answer = fail_once(error)
    bench.start().offer(1)
    bench.wait_for("checkpoint_published")
    assert type(error).__name__ in bench.events("hub_error")[0]["reason"]


def test_a_hub_that_hangs_does_not_hold_up_the_end(bench: Bench) -> None:
    bench.process.answer = lambda job, given: bench.process.killed.wait(HOLD_SECONDS) and None
    bench.start().offer(1)
    bench.process.begun.get(timeout=HOLD_SECONDS)
    bench.close(0.2)
    assert bench.process.killed.is_set() and "not done after 0 s" in bench.events("not_published")[0]["text"]
    assert bench.events("log")[0]["text"].startswith("publishing step 1 to me/run before the run ends")


def test_nothing_is_said_at_the_end_where_all_is_published(bench: Bench) -> None:
    bench.start().offer(1)
    bench.close()
    assert bench.events("checkpoint_published") and not bench.events("not_published") and not bench.publisher.doing
    assert not bench.publisher._thread.is_alive()


def test_the_history_is_squashed_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, squash_every=2).start()
    for step in (1, 2, 3, 4, 5):
        bench.offer(step)
        bench.wait_for("checkpoint_published", step)
    bench.offer(6)
    bench.close()
    jobs = "".join(job[0] for job, _ in bench.process.asked)
    assert jobs.startswith("ppsppsp") and jobs.endswith("ps")


def test_a_repo_that_is_not_ours_is_never_squashed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, squash_every=1)
    ask = bench.process.ask
    bench.process.ask = lambda job, **given: (lambda told: told | {"pointer": told["pointer"] | {"created": False}})(ask(job, **given))  # type: ignore[method-assign]
    bench.start().offer(1)
    bench.close()
    assert [job for job, _ in bench.process.asked] == ["publish"]


def test_a_squash_that_fails_costs_a_line_and_one_that_is_fenced_is_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, squash_every=1)
    failures = [HubFailure("busy"), HubFailure("taken over", "fenced")]

    def answer(job: str, given: dict[str, Any]) -> None:
        if job == "squash":
            raise failures.pop(0)

    bench.process.answer = answer
    bench.start().offer(1)
    bench.wait_for("log")
    assert "could not be squashed: busy" in bench.events("log")[0]["text"]
    bench.offer(2)
    bench.wait_for("fenced")
    bench.close()
    assert bench.publisher.published_step == 2 and not bench.events("not_published"), "it was published before"


def test_the_claim_that_could_not_be_made_at_the_start_is_made_first(bench: Bench) -> None:
    bench.publisher.start(None, 0)
    bench.offer(1)
    bench.wait_for("checkpoint_published")
    bench.offer(2)
    bench.wait_for("checkpoint_published", 2)
    assert bench.joined == 1


def test_a_complaint_about_the_card_is_told(bench: Bench) -> None:
    ask = bench.process.ask
    bench.process.ask = lambda job, **given: ask(job, **given) | {"complaint": "the card could not be made: x"}  # type: ignore[method-assign]
    bench.start().offer(1)
    assert bench.wait_for("log")["text"] == "the card could not be made: x"
