"""The live view: what it makes of a diary, and how its buttons and its thread behave. No kernel, no torch."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colabtrain.dashboard import charts, view, widgets
from colabtrain.dashboard.view import Status, View
from colabtrain.runtime.diary import Diary

pytestmark = pytest.mark.colab


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


# Widgets


class FakeRun:
    """A run whose state the test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.diary = folder, Diary(folder)
        self.state, self.step, self.num_steps = "running", 3, 10
        self.calls: list[Any] = []
        for i in range(1, 4):
            self.diary.write("step", step=i, loss={"full": 1.0}, ema={"full": 1.0}, seconds=0.5)

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def stop(self, wait: bool = True) -> None:
        self.calls.append(("stop", wait))


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "demo")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_buttons_call_the_run(run: FakeRun):
    live = widgets.Live(run)
    live.refresh()
    live.toggle.click()
    live.toggle.click()  # still running: the text still says Pause
    assert run.calls == ["pause", "pause"]
    assert "Pause asked for" in live.pieces["head"].value
    run.state = "paused"
    live.refresh()
    assert (live.toggle.description, live.toggle.icon) == ("Resume", "play")
    assert "asked for" not in live.pieces["head"].value
    live.toggle.click()
    live.stop.click()
    assert run.calls[2:] == ["resume", ("stop", False)]


def test_a_request_that_was_called_off_is_not_shown_for_ever(run: FakeRun):
    live = widgets.Live(run)
    live.refresh()
    live.toggle.click()
    run.step += 2
    live.refresh()
    assert "asked for" not in live.pieces["head"].value


def test_error_in_a_handler_is_shown_and_logged(run: FakeRun, monkeypatch: pytest.MonkeyPatch):
    def refuse(wait: bool = True) -> None:
        raise OSError("no <disk>")

    monkeypatch.setattr(run, "stop", refuse)
    live = widgets.Live(run)
    live.stop.click()
    assert "Stop failed: OSError: no <disk>" in words(live.pieces["head"].value)
    assert "Stop failed: OSError: no <disk>" in (run.folder / "train.log").read_text()
    live.toggle.click()
    assert "Stop failed" not in live.pieces["head"].value


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_the_end_disables_the_buttons_and_lets_go_of_the_run(run: FakeRun, state: str):
    live = widgets.Live(run)
    live.refresh()
    run.diary.write(state, f"{state} at step 3", step=3)
    run.state = state
    live.follow()  # returns: the final state is shown
    assert words(live.pieces["head"].value).startswith(view.STATES[state][0])
    assert f"{state} at step 3" in live.pieces["log"].value
    assert live.toggle.disabled and live.stop.disabled and live.run is None
    live.toggle.click()
    live.stop.click()
    assert run.calls == []


def test_refreshes_only_when_there_is_news(run: FakeRun, monkeypatch: pytest.MonkeyPatch):
    clock, shown = Clock(), []
    live = widgets.Live(run, clock)
    monkeypatch.setattr(live, "_show", lambda run, show=live._show: (shown.append(clock.now), show(run)))
    live.refresh(always=False)
    for seconds, grows, due in [(1, True, False), (1, False, True), (3, False, False), (5, False, True), (2, True, True)]:
        clock.now += seconds
        if grows:
            run.diary.log("news")
        before = len(shown)
        live.refresh(always=False)
        assert (len(shown) > before) == due, (seconds, grows)
    run.state = "paused"
    live.refresh(always=False)
    assert live.toggle.description == "Resume"


def test_three_failures_in_a_row_turn_the_view_off(run: FakeRun, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    live = widgets.Live(run, clock)
    draw = View.pieces

    def broken(self: View, status: Status) -> dict[str, str]:
        raise KeyError("no <such> thing")

    monkeypatch.setattr(View, "pieces", broken)
    live.refresh()
    live.refresh()
    monkeypatch.setattr(View, "pieces", draw)
    live.refresh()  # one that works starts the count anew
    monkeypatch.setattr(View, "pieces", broken)
    live.refresh()
    live.refresh()
    assert live.run is run
    live.refresh(always=False)  # not yet: a failure is not tried again at once
    assert live.run is run
    clock.now += 10
    live.follow()  # returns: the view is off
    assert live.run is None and live.toggle.disabled and live.stop.disabled
    assert "turned itself off (KeyError: 'no <such> thing')" in words(live.pieces["head"].value)
    assert (run.folder / "train.log").read_text().count("turned itself off") == 1


def test_a_full_disk_does_not_stop_the_turning_off(run: FakeRun, monkeypatch: pytest.MonkeyPatch):
    live = widgets.Live(run)
    monkeypatch.setattr(View, "pieces", lambda self, status: 1 / 0)
    monkeypatch.setattr(run.diary, "log", lambda text: 1 / 0)
    for _ in range(3):
        live.refresh()
    assert live.run is None and "turned itself off" in live.pieces["head"].value


def test_without_ipywidgets_one_line_says_where_to_look(run: FakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    widgets.show(run)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "run.wait()" in said and "train.log" in said


def test_show_displays_one_bundle(run: FakeRun, monkeypatch: pytest.MonkeyPatch):
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append((data, raw)))
    run.state = "finished"
    widgets.show(run)
    ((bundle, raw),) = shown
    assert raw and set(bundle) == {widgets.VIEW_MIME, "text/plain"}
    assert bundle[widgets.VIEW_MIME]["model_id"]
    json.dumps(bundle)


def test_a_look_at_a_run_needs_neither_torch_nor_widgets():
    heavy = ("torch", "ipywidgets", "IPython", "matplotlib", "colabtrain.runtime.run")
    code = f"import sys, colabtrain.dashboard.widgets; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
