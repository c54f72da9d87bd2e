"""The live view: what it makes of a diary, and what of it reaches the page. No kernel, no torch."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from colabtrain.dashboard import charts, view
from colabtrain.dashboard.view import Status, View


def step(i: int, full: float | None = 1.0, **fields: Any) -> dict[str, Any]:
    return {
        "time": 1000.0 + i,
        "event": "step",
        "step": i,
        "loss": {"full": full, "fast": 2.0},
        "ema": {"full": full, "fast": 2.0},
        **fields,
    }


def evaluation(at: int) -> dict[str, Any]:
    def scores(accuracy: float, nll: float) -> dict[str, Any]:
        return {"overall": {"n": 60, "accuracy": accuracy, "nll": nll}}

    results = {"full": scores(0.915, 0.31), "fast": scores(0.85, 0.42)}
    return {"event": "evaluation", "step": at, "split": "test", "results": results, "baselines": {"prior": scores(0.25, 1.1)}}


def pieces(events: list[dict[str, Any]], state: str = "running", at: int = 10, now: float = 1011.0, **more: str) -> dict[str, str]:
    folded = View()
    folded.feed(events)
    return folded.pieces(Status(state, at, 100, "runs/demo", now, **more))


def words(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


# The log


def test_no_text_reaches_the_page_as_markup():
    evil = "<script>alert(1)</script>\"'&"
    events = [
        {"event": "log", "time": 0.0, "text": evil},
        {**step(1), "loss": {evil: 1.0}, "ema": {evil: 1.0}},
        {**step(2), "loss": {evil: 1.0}, "ema": {evil: 1.0}},
        {**evaluation(2), "split": evil, "results": {evil: {}}},
        {"event": "failed", "error": evil, "message": evil},
    ]
    folded = View()
    folded.feed(events)
    made = folded.pieces(Status("failed", 2, 100, evil, 0.0, note=evil, error=evil))
    made["off"] = view.turned_off(evil, evil)
    for name, markup in made.items():
        assert "<script" not in markup, name
        assert "&lt;script&gt;" in markup, name


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("\x1b[31mred\x1b[0m and \x1b]0;title\x07plain", ["red and plain"]),
        ("10%\r50%\r100%", ["100%"]),
        ("100%\r", ["100%"]),
        ("one\r\ntwo\n\nthree", ["one", "two", "three"]),
        ("bell\x07 null\x00 csi\x9b turned \u202egnp.exe", ["bell null csi turned gnp.exe"]),
        ("caf\u00e9 \u65e5\u672c", ["caf\u00e9 \u65e5\u672c"]),
        ("x" * 5000, ["x" * 2000 + " ..."]),
    ],
)
def test_log_text_is_what_a_terminal_would_leave(text: str, lines: list[str]):
    assert view.plain_lines(text) == lines


def test_log_is_newest_first_and_bounded():
    log = pieces([{"event": "log", "time": 0.0, "text": f"line {i}"} for i in range(1000)])["log"]
    assert log.count("<p") == view.MAX_LINES
    assert log.index("line 999") < log.index("line 998")
    assert "line 799<" not in log
    long = pieces([{"event": "log", "time": 0.0, "text": "&" * 1900} for _ in range(100)])["log"]
    assert len(long.encode()) < view.MAX_LOG_BYTES + 300


# Steps and evaluations


def test_resumed_drops_what_lies_beyond():
    folded = View()
    folded.feed([step(i) for i in range(1, 9)])
    folded.feed([{"event": "checkpoint_saved", "step": 8}, evaluation(8), {"event": "resumed", "step": 4, "text": "resumed from step 4"}])
    assert [point.step for point in folded.curves["full"].points] == [1, 2, 3, 4]
    assert folded.evaluation == {} and folded.saved_step == 4
    folded.feed([step(5, full=9.0), evaluation(5), {"event": "resumed", "step": 5}])
    assert [point.raw for point in folded.curves["full"].points] == [1.0] * 4 + [9.0]
    assert folded.evaluation["step"] == 5
    folded.feed([{"event": "resumed", "step": 0}])
    assert folded.curves["full"].points == [] and folded.evaluation == {} and folded.saved_step is None


def test_steps_made_again_without_a_word_replace_the_old_ones():
    folded = View()
    folded.feed([*(step(i) for i in range(1, 9)), step(5, full=9.0)])
    assert [point.step for point in folded.curves["full"].points] == [1, 2, 3, 4, 5]


def test_null_loss_is_said_and_leaves_a_hole():
    made = pieces([step(1), step(2), step(3, None), step(4), step(5)])
    assert made["plot"].count('class="ct-raw ct-k0"') == 2
    assert "nan" not in made["plot"].lower()
    bad = pieces([step(1), step(2), step(3, None)])
    assert "not finite" in bad["losses"] and "full not finite" in bad["plot"]
    never = [{**step(i), "loss": {"full": None}, "ema": {"full": None}} for i in range(1, 9)]
    assert "appears after the first steps" in pieces(never)["plot"] and "not finite" in pieces(never)["losses"]


@pytest.mark.parametrize(
    "event",
    [
        {"event": "step"},
        {"event": "step", "step": "7", "loss": 3},
        {"event": "step", "step": 0, "loss": {"full": 1.0}},
        {"event": "step", "step": 3, "loss": {"full": "x"}, "ema": [], "seconds": None, "memory": 5, "tokens": {}, "epoch": "one"},
        {"event": "step", "step": 3, "loss": {"full": float("nan")}, "ema": {"full": float("inf")}},
        {"event": "evaluation", "results": {"full": None}, "baselines": []},
        {"event": "evaluation", "results": {"full": {"overall": {"accuracy": None, "nll": None}}}},
        {"event": "resumed"},
        {"event": "failed"},
        {"event": "checkpoint_saved", "step": None},
        {"event": ["odd"], "text": 7, "time": "late"},
        {"event": "log", "text": "far future", "time": 1e99},
        {},
    ],
)
@pytest.mark.parametrize("state", list(view.STATES))
def test_odd_events_are_survived(event: dict[str, Any], state: str):
    made = pieces([step(1), event, step(2), event], state)
    assert set(made) == {"head", "losses", "plot", "log"}


def test_curves_stay_bounded_and_keep_their_shape():
    curve = charts.Curve()
    for i in range(1, 100_001):
        curve.add(i, float(i), float(i))
        assert len(curve.points) < charts.MAX_POINTS
    assert len(curve.points) >= charts.MAX_POINTS / 2 - 1
    steps = [point.step for point in curve.points]
    assert steps == sorted(set(steps)) and steps[-1] > 100_000 - curve.stride
    assert all(point.raw == point.step - (curve.stride - 1) / 2 for point in curve.points)


def test_picture_is_small_flat_lines_and_outliers_included():
    curves = {name: charts.Curve() for name in ("full", "fast")}
    for i in range(1, 399):
        for curve in curves.values():
            curve.add(i, 1e30 if i == 200 else 0.5, 0.5)
    picture = charts.picture(curves)
    assert len(picture) < 20_000
    assert 'role="img" aria-label="loss over 398 steps: full 0.500, fast 0.500"' in picture
    assert all(0 <= int(y) <= 1000 for y in re.findall(r"\d+,(-?\d+)", " ".join(re.findall(r'points="([^"]*)"', picture))))
    tops = sorted(float(top) for top in re.findall(r'class="ct-end" style="top:([\d.]+)%', picture))
    assert tops[1] - tops[0] >= charts.LABEL_GAP and tops[-1] <= 100


@pytest.mark.parametrize("value", [0.0, 1e-12, -3.0, 1e12, 1e299])
def test_picture_of_a_constant(value: float):
    curve = charts.Curve()
    for i in range(1, 4):
        curve.add(i, value, value)
    assert "<polyline" in charts.picture({"only": curve})


def test_losses_and_evaluation_are_shown():
    more = {"seconds": 0.5, "tokens": 1000, "memory": {"ram_peak": 3 * 2**30}}
    text = words(pieces([step(1), step(2, **more), evaluation(2)])["losses"])
    assert text == (
        "loss full 1.000 last 1.000 loss fast 2.000 last 2.000 tokens / s 2,000 RAM peak 3.0 GiB "
        "held out: test, step 2 accuracy nll full 91.5 % 0.310 fast 85.0 % 0.420 class prior 25.0 % 1.100"
    )


# The head


@pytest.mark.parametrize(("state", "word"), [(state, word) for state, (word, _) in view.STATES.items()])
def test_state_is_what_the_run_says_whatever_the_diary_says(state: str, word: str):
    made = pieces([{"event": "finished", "text": "finished"}, step(10, seconds=0.5)], state)
    assert words(made["head"]).startswith(word)
    assert ("ct-stale" in made["head"]) == (state in view.ALIVE)
    assert ("left" in words(made["head"])) == (state == "running")
    assert 'aria-valuenow="10"' in made["losses"]


def test_head_tells_progress():
    events = [step(10, seconds=0.5, epoch=0), {"event": "checkpoint_saved", "step": 8}]
    assert words(pieces(events)["head"]).startswith(
        "Training runs/demo step 10 of 100 (10 %) \u00b7 epoch 1 \u00b7 0.50 s/step \u00b7 45 s left \u00b7 saved at step 8"
    )


def test_a_stalled_step_is_said():
    events = [step(10, seconds=1.0)]
    assert "No step for" not in pieces(events, now=1039.0)["head"]
    assert "No step for 50 s." in pieces(events, now=1060.0)["head"]
    assert "No step for" not in pieces(events, "paused", now=2000.0)["head"]


def test_failure_is_told_with_its_step_and_forgotten_by_the_next_process():
    failed = {"event": "failed", "error": "RuntimeError", "message": "bad\x1b[1m thing", "step": 10, "text": "failed"}
    made = pieces([step(10), failed], "failed")
    assert "RuntimeError: bad thing (at step 10; the traceback is in runs/demo/train.log)" in words(made["head"])
    assert "ct-err" in made["log"]
    assert "bad thing" not in pieces([failed, {"event": "run_started"}], "failed")["head"]
    assert "bad thing" not in pieces([failed], "running")["head"]


# Getting ready, and what went by


def test_what_a_run_does_before_its_first_step_is_shown():
    events = [
        {"event": "run_started", "text": "run runs/demo started"},
        {"event": "log", "text": "loading google/gemma-3n-E4B-it: shard 2 of 4, 7.9 of 15.7 GB <b>"},
    ]
    folded = View()
    folded.feed(events)
    starting = Status("starting", 0, 0, "runs/demo", 0.0)
    assert "shard 2 of 4, 7.9 of 15.7 GB <b>" in words(folded.pieces(starting)["head"])
    assert "<b>" not in folded.pieces(starting)["head"].split("ct-sub")[1].replace("&lt;b&gt;", "")
    folded.feed([{"event": "run_started"}])
    assert "preparing model and data" in words(folded.pieces(starting)["head"])


def test_retries_records_set_aside_and_skipped_steps_are_counted():
    oom = {"event": "oom", "step": 2, "text": "step 2: out of memory in 1 part; trying again in 2 parts"}
    aside = {"event": "set_aside", "step": 2, "text": "step 2: an item does not fit"}
    made = pieces([step(1), oom, oom, aside, step(2, skipped=True), step(3)])
    assert "2 retried for memory · 1 set aside · 1 skipped" in words(made["head"])
    assert made["log"].count("ct-err") == 1, "a record that is left out is red, a retry is not"
    assert "retried" not in words(pieces([step(1)])["head"])


def test_a_checkpoint_that_failed_is_shown_until_one_succeeds():
    failed = {
        "event": "checkpoint_failed",
        "time": 0.0,
        "step": 5,
        "text": "checkpoint of step 5 failed: the disk is full; training goes on",
    }
    events = [step(5), failed, step(6), *({"event": "log", "time": 0.0, "text": f"line {i}"} for i in range(500))]
    assert "the disk is full" not in pieces(events)["log"], "other lines have pushed it out"
    assert 'ct-error">checkpoint of step 5 failed: the disk is full' in pieces(events)["head"]
    for cured in ({"event": "checkpoint_saved", "step": 9}, {"event": "run_started"}):
        assert "the disk is full" not in pieces([*events, cured])["head"]
