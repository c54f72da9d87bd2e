"""The live view's widgets: what its buttons and its thread do. No kernel, no torch."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colabtrain.dashboard import view, widgets
from colabtrain.dashboard.view import Status, View
from colabtrain.runtime.diary import Diary

pytestmark = pytest.mark.colab


def words(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


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


def test_an_outage_of_the_run_folder_is_shown_and_outlived(run: FakeRun, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    live = widgets.Live(run, clock)
    live.refresh()
    with monkeypatch.context() as patch:

        def away(*_: Any, **__: Any) -> Any:
            raise OSError(107, "Transport endpoint is not connected")

        for name in ("exists", "stat", "open"):
            patch.setattr(Path, name, away)
        for _ in range(10):
            clock.now += 10
            live.refresh(always=False)
        assert "cannot be read now: OSError: [Errno 107] Transport endpoint" in words(live.pieces["head"].value)
    assert live.run is run
    run.diary.log("back again")
    clock.now += 10
    live.refresh(always=False)
    assert "cannot be read" not in live.pieces["head"].value and "back again" in live.pieces["log"].value
