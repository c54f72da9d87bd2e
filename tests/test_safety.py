"""What the head says of saving and publishing, and when it stops saying it. No kernel, no torch."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

import pytest

from colabtrain.dashboard.fields import clock
from colabtrain.dashboard.safety import Safety
from colabtrain.dashboard.view import Status, View

pytestmark = pytest.mark.colab
Events = list[dict[str, Any]]
STARTED = {"event": "run_started", "time": 0.0}


def step(i: int, time: float | None = None) -> dict[str, Any]:
    """Step i, at 1,000 + i seconds unless told."""
    return {"event": "step", "step": i, "time": 1000.0 + i if time is None else time, "loss": {"full": 1.0}, "ema": {"full": 1.0}}


def saved(i: int) -> dict[str, Any]:
    return {"event": "checkpoint_saved", "step": i, "time": 1000.0 + i}


def claimed(published: int = 0) -> dict[str, Any]:
    return {"event": "hub_claimed", "repo": "me/run", "claim": 1, "published_step": published, "time": 1.0, "text": "claimed me/run"}


def published(i: int, at: float | None = None) -> dict[str, Any]:
    """Step i, captured at the time of its step, and on the Hub some time later."""
    return {"event": "checkpoint_published", "step": i, "saved_at": 1000.0 + i if at is None else at, "time": 5000.0, "text": "published"}


def refused(text: str = "the Hub refuses: 403", **fields: Any) -> dict[str, Any]:
    return {"event": "hub_error", "kind": "refused", "time": 1.0, "retry_at": None, "text": text, **fields}


def folded(events: Iterable[dict[str, Any]]) -> Safety:
    safety = Safety()
    for event in events:
        safety.feed(event)
    return safety


def facts(*events: dict[str, Any]) -> list[str]:
    return folded(events).facts()


def head(*events: dict[str, Any], state: str = "running") -> str:
    view = View()
    view.feed(events)
    markup = view.pieces(Status(state, 10, 1000, "runs/demo", 1011.0))["head"]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


# What is where


def test_without_a_hub_only_the_disk_is_told():
    assert facts(STARTED, step(1), step(2)) == []
    assert facts(STARTED, step(1), saved(1), step(2)) == ["saved at step 1"]


def test_a_hub_with_nothing_on_it_says_so_and_counts_from_the_first_step():
    assert facts(STARTED, claimed()) == ["nothing on the Hub yet"]
    assert facts(STARTED, claimed(), step(1)) == ["nothing on the Hub yet", "at risk: 1 s"]
    assert facts(STARTED, claimed(), step(1), saved(1), step(181)) == ["saved at step 1", "nothing on the Hub yet", "at risk: 3 min"]


def test_what_is_at_risk_counts_from_the_capture_and_not_from_the_upload():
    events = [STARTED, claimed(), *map(step, range(1, 481)), saved(400), published(400)]
    assert facts(*events) == ["saved at step 400", "on the Hub: step 400", "at risk: 1 min"]
    assert folded(events).seconds_at_risk() == 80.0
    assert facts(*events, published(480)) == ["saved at step 400", "on the Hub: step 480", "nothing at risk"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (59.4, "59 s"), (59.6, "1 min"), (180, "3 min"), (3569, "59 min"), (3580, "1 h 00 min"), (7620, "2 h 07 min")],
)
def test_time_at_risk_is_rounded(seconds: float, text: str):
    assert facts(STARTED, claimed(), step(1, 0.0), step(2, seconds))[-1] == f"at risk: {text}"


def test_a_clock_that_was_set_back_is_no_negative_time():
    assert folded([claimed(), step(1, 100.0), step(2, 50.0)]).seconds_at_risk() == 0.0


@pytest.mark.parametrize("event", [claimed(), published(1), refused(), {"event": "publish_skipped"}, {"event": "fenced"}])
def test_any_word_of_the_hub_shows_that_one_is_in_use_until_the_next_process(event: dict[str, Any]):
    assert "Hub" in " ".join(facts(STARTED, step(2), event))
    assert facts(STARTED, step(2), event, STARTED) == [], "the next process may have none"


def test_a_new_process_takes_from_its_claim_what_is_published():
    before = [STARTED, claimed(), *map(step, range(1, 9)), saved(8), published(8)]
    now = [STARTED, claimed(8), {"event": "resumed", "step": 8}]
    assert facts(*before, *now) == ["saved at step 8", "on the Hub: step 8", "nothing at risk"]
    later = [*before, *now, step(9, 90_000.0), step(10, 90_010.0)]
    assert folded(later).seconds_at_risk() == 10.0, "the time between the two processes is no training"
    timed = [*before, STARTED, claimed(8), {"event": "resumed", "step": 8, "time": 89_990.0}, step(9, 90_000.0)]
    assert folded(timed).seconds_at_risk() == 10.0
    assert folded([*before, STARTED, claimed(4), {"event": "resumed", "step": 8}]).seconds_at_risk() is None, (
        "nobody knows how long it took"
    )


def test_a_pause_is_nothing_to_lose_once_all_is_published():
    events = [STARTED, claimed(), *map(step, range(1, 9)), published(8), {"event": "resumed", "step": 8, "time": 9000.0}]
    assert folded(events).seconds_at_risk() == 0.0
    assert folded([*events, step(9, 9002.0)]).seconds_at_risk() == 2.0


def test_a_step_back_takes_what_lies_beyond_along():
    events = [STARTED, claimed(), *map(step, range(1, 9)), saved(8), published(6)]
    assert facts(*events, {"event": "resumed", "step": 4}) == ["saved at step 4", "on the Hub: step 4", "nothing at risk"]
    assert facts(*events, {"event": "resumed", "step": 0}) == ["nothing on the Hub yet"]
    assert facts(*events, {"event": "resumed", "step": 7}) == ["saved at step 7", "on the Hub: step 6", "at risk: 2 s"]
    assert facts(*events, step(5, 2000.0))[:2] == ["saved at step 4", "on the Hub: step 4"], "made anew without a word"
    assert folded([*events, step(5, 2000.0)]).seconds_at_risk() == 2000.0 - 1001.0, "when step 4 was captured is not known"


# What goes wrong


def test_publishing_that_fails_is_said_until_it_succeeds():
    assert folded([STARTED, refused()]).notes() == ["the Hub refuses: 403"]
    assert folded([STARTED, refused(), claimed(), saved(1), step(2), {"event": "publish_skipped"}]).notes() == ["the Hub refuses: 403"]
    for cure in (published(1), STARTED):
        assert folded([STARTED, refused(), cure]).notes() == []


def test_the_next_try_is_told_where_there_is_one():
    at = clock(1_700_000_000.0)
    retry = {"kind": "retry", "retry_at": 1_700_000_000.0, "status": 503}
    assert folded([refused("no answer.", **retry)]).notes() == [f"no answer. Next try at {at}."]
    assert folded([refused("no answer", **retry)]).notes() == [f"no answer. Next try at {at}."]
    assert folded([refused("no answer", **retry, time=5.0), refused("not allowed")]).notes() == ["not allowed"]
    for odd in (None, "soon", float("nan"), 1e99):
        assert folded([refused("no answer", kind="retry", retry_at=odd)]).notes() == ["no answer"]


def test_another_publisher_is_said_until_the_next_process():
    fenced = {"event": "fenced", "text": "claim 2 has the repo"}
    assert folded([refused(), fenced]).notes() == ["claim 2 has the repo"]
    assert folded([fenced, published(3), refused(), saved(4)]).notes() == ["claim 2 has the repo"]
    assert folded([fenced, STARTED]).notes() == []
    assert "another process" in folded([{"event": "fenced"}]).notes()[0]


def test_a_save_that_failed_stands_beside_what_the_hub_says():
    failed = {"event": "checkpoint_failed", "text": "the disk is full"}
    assert folded([failed, refused()]).notes() == ["the disk is full", "the Hub refuses: 403"]
    assert folded([failed, refused(), saved(3)]).notes() == ["the Hub refuses: 403"]
    assert folded([{"event": "checkpoint_late", "text": "it takes long"}, STARTED]).notes() == []


# In the view


def test_the_head_tells_it_between_pace_and_counts():
    events = [STARTED, claimed(), *map(step, range(1, 11)), saved(8), published(8), {"event": "oom", "step": 10}]
    assert "(1 %) · saved at step 8 · on the Hub: step 8 · at risk: 2 s · 1 retried for memory" in head(*events)


def test_errors_are_red_in_head_and_log_and_no_markup():
    events = [step(1), refused("<b>no</b>"), {"event": "publish_skipped", "text": "step 3 skipped", "time": 0.0}]
    view = View()
    view.feed([*events, {"event": "fenced", "text": "<i>fenced</i>", "time": 0.0}])
    made = view.pieces(Status("running", 1, 10, "runs/demo", 2.0))
    assert '<div class="ct-note ct-error">&lt;i&gt;fenced&lt;/i&gt;</div>' in made["head"]
    assert re.findall(r"<p class=ct-err><i>[^<]*</i><span>(.*?)</span>", made["log"]) == [
        "&lt;i&gt;fenced&lt;/i&gt;",
        "&lt;b&gt;no&lt;/b&gt;",
    ]
    assert "step 3 skipped" in made["log"]


@pytest.mark.parametrize("kind", ["hub_claimed", "checkpoint_published", "hub_error", "publish_skipped", "fenced"])
@pytest.mark.parametrize(
    "odd", [{}, {"step": "x", "saved_at": "y", "published_step": [], "text": 7, "retry_at": {}, "kind": 3, "time": None}]
)
def test_odd_events_are_survived(kind: str, odd: dict[str, Any]):
    assert "Training" in head(step(1), {**odd, "event": kind}, {"event": "step", "step": 2}, {**odd, "event": kind}, step(3))
