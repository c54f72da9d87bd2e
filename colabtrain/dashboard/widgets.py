"""The live view in a notebook: core ipywidgets (VBox, HBox, HTML, Button), filled by a thread, with buttons that act.

It knows a run by a few members and by its diary on disk. Widgets are built and displayed by the thread that asks for
them; after that only traits are set, which any thread may do. Nothing here may hurt a training: what fails is said and
tried again, and a view that fails three times in a row turns itself off. ipywidgets 7.7.1 and 8 are both served, so only
what they share is used.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from colabtrain.dashboard import charts
from colabtrain.dashboard.fields import clock
from colabtrain.dashboard.view import ALIVE, Status, View, turned_off
from colabtrain.runtime.diary import DIARY_FILE, Tail

LOOK_SECONDS = 0.5  # how soon a change of state is seen
REFRESH_SECONDS = 2.0  # between two refreshes because the diary grew
HEARTBEAT_SECONDS = 8.0  # a page that hears nothing for 20 s says so itself
MAX_FAILURES = 3  # in a row
PIECES = ("head", "losses", "plot", "log")
VIEW_MIME = "application/vnd.jupyter.widget-view+json"

# Text and ground come from one family of theme variables, Colab's first: ipywidgets 7 defines the others with light values.
CSS = """
.ct{max-width:940px;padding:12px 14px!important;border:1px solid rgba(127,127,127,.3);border-radius:10px;box-sizing:border-box;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
color:var(--colab-primary-text-color,var(--jp-content-font-color1,#1f1f1f));
background:var(--colab-primary-surface-color,var(--jp-layout-color0,#fff))}
.ct .jupyter-widgets{color:inherit;font-family:inherit}
.ct .widget-html-content{font-size:13px;line-height:1.45}
.ct-head-row{gap:6px 16px}.ct-btns{gap:6px}
.ct-top{display:flex;flex-wrap:wrap;align-items:center;gap:0 8px;font-size:15px}
.ct-name,.ct-sub,.ct-dim,.ct-chip span,.ct-lines i,.ct-table th{opacity:.7}
.ct-dot{width:9px;height:9px;border-radius:50%}
.ct-live{background:#3b82f6}.ct-done{background:#16a34a}.ct-bad{background:#ef4444}.ct-wait{background:#d97706}.ct-off{background:#888}
.ct-going{animation:ct-old 1s 20s forwards}@keyframes ct-old{to{background:#888}}
.ct-going+b{animation:ct-was .1s 20s forwards}@keyframes ct-was{to{opacity:.6;text-decoration:line-through}}
.ct-stale{visibility:hidden;max-height:0;overflow:hidden;animation:ct-see .1s 20s forwards}
@keyframes ct-see{to{visibility:visible;max-height:4em}}
.ct.jupyter-widgets-disconnected .ct-stale,.ct.jupyter-widgets-disconnected .ct-going,
.ct.jupyter-widgets-disconnected .ct-going+b{animation-delay:0s}
.ct.jupyter-widgets-disconnected::before,.ct .jupyter-widgets-disconnected::before{display:none!important}
.ct-note{border-left:3px solid #d97706;padding-left:8px;margin:6px 0 0;overflow-wrap:anywhere}.ct-note.ct-error{border-color:#ef4444}
.ct-bar{height:6px;border-radius:3px;background:rgba(127,127,127,.2);overflow:hidden;margin:8px 0 10px}
.ct-bar i{display:block;height:100%;border-radius:3px}
.ct-chips{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:8px}
.ct-chip{background:rgba(127,127,127,.1);border-radius:8px;padding:5px 10px;white-space:nowrap;overflow:hidden}
.ct-chip span{display:block;font-size:11px;overflow:hidden;text-overflow:ellipsis}
.ct-sub{overflow:hidden}.ct-sub>div{display:flex;flex-wrap:wrap;margin-left:-16px}
.ct-sub span{position:relative;padding-left:16px;min-width:0;overflow-wrap:anywhere}.ct-sub i{position:absolute;left:6px;font-style:normal}
.ct-chip b{font-size:16px;font-weight:600}.ct-chip small{font-size:11px;margin-left:8px;opacity:.7}
.ct-chip b,.ct-table{font-variant-numeric:tabular-nums}
.ct .ct-table{border-collapse:collapse;margin:10px 0 0;border:0;font-size:13px;color:inherit;background:none;table-layout:auto}
.ct .ct-table tr{background:none;border:0}
.ct .ct-table th,.ct .ct-table td{border:0;border-bottom:1px solid rgba(127,127,127,.2);padding:3px 0 3px 24px;text-align:right;
font-weight:400;color:inherit;background:none;max-width:none}
.ct .ct-table :first-child{text-align:left;padding-left:0}
.ct-lines{margin-top:10px;padding:8px 10px 8px 4px;border-radius:8px;background:rgba(127,127,127,.1)}
.ct-lines>div{max-height:126px;overflow:auto}
.ct .ct-lines p{display:flex;gap:12px;margin:0;padding:0 0 0 7px;border-left:3px solid transparent;overflow-wrap:anywhere;
font:12px/18px ui-monospace,Menlo,Consolas,monospace}
.ct-lines i{font-style:normal;white-space:nowrap}.ct .ct-lines .ct-err{font-weight:600;border-color:#ef4444}
.ct .ct-btn{background:transparent;border:1px solid rgba(127,127,127,.45);border-radius:6px;color:inherit;padding:0 10px}
.ct .ct-btn:hover:enabled{background:rgba(127,127,127,.12);box-shadow:none}
.ct .ct-btn:focus-visible{outline:2px solid #3b82f6;outline-offset:1px}
"""


class Log(Protocol):
    """What the view needs of a diary."""

    def log(self, text: str) -> None: ...


class Shown(Protocol):
    """What the view needs of a run."""

    folder: Path
    step: int
    num_steps: int

    @property
    def diary(self) -> Log: ...

    @property
    def state(self) -> str: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def stop(self, wait: bool = True) -> object: ...


def show(run: Shown) -> Live | None:
    """Display a live view of `run` under the current cell and keep it up to date; None if there can be none. Never raises."""
    try:
        live = Live(run)
        live.display()
        threading.Thread(target=live.follow, name="colabtrain-view", daemon=True).start()
        return live
    except Exception as error:  # no ipywidgets, or one that does not work here: the run goes on all the same
        print(f"No live view ({_line(error)}). The run goes on: run.wait() waits for its end, {run.folder}/train.log has its progress.")
        return None


class Live:
    """One run's widgets. refresh() and the buttons may be called from any thread."""

    def __init__(self, run: Shown, now: Callable[[], float] = time.time) -> None:
        self.run: Shown | None = run
        self._view, self._tail, self._now = View(), Tail(run.folder / DIARY_FILE), now
        self._lock = threading.RLock()
        self._closed = threading.Event()  # the final state is shown, or the view has turned itself off
        self._failures, self._note, self._note_step, self._error = 0, "", 0, ""
        self._shown_state, self._shown_size, self._shown_time = "", -1, float("-inf")
        self._folder, self._diary = str(run.folder), run.diary
        self._build()

    def _build(self) -> None:
        import ipywidgets

        def html(**layout: str) -> Any:
            return ipywidgets.HTML(layout=ipywidgets.Layout(**{"width": "auto", "margin": "0", **layout}))

        def button(text: str, icon: str, tooltip: str, act: Callable[[Any], None]) -> Any:
            layout = ipywidgets.Layout(width="auto", height="28px", margin="0")
            made = ipywidgets.Button(description=text, icon=icon, tooltip=tooltip, layout=layout)
            made.add_class("ct-btn")
            made.on_click(act)
            return made

        self.pieces: dict[str, Any] = {name: html() for name in PIECES}
        self.pieces["head"].layout.flex = "1 1 300px"
        self.toggle = button("Pause", "pause", "Halt after the current step", self._on_toggle)
        self.stop = button("Stop", "stop", "Save and end after the current step", self._on_stop)
        box = {"margin": "0", "overflow": "visible", "width": "auto"}
        buttons = ipywidgets.HBox([self.toggle, self.stop], layout=ipywidgets.Layout(**box))
        row = ipywidgets.Layout(**box, flex_flow="row wrap", justify_content="space-between", align_items="flex-start")
        head = ipywidgets.HBox([self.pieces["head"], buttons], layout=row)
        style = html(display="none")
        style.value = f"<style>{CSS}{charts.colour_css()}</style>"
        self.root = ipywidgets.VBox([style, head, *(self.pieces[name] for name in PIECES[1:])], layout=ipywidgets.Layout(**box))
        for widget, name in ((self.root, "ct"), (head, "ct-head-row"), (buttons, "ct-btns")):
            widget.add_class(name)

    def display(self) -> None:
        """Put the view under the cell that runs now. Only from the thread that runs it."""
        from IPython.display import display

        self.refresh()
        reference = {"version_major": 2, "version_minor": 0, "model_id": self.root.model_id}
        plain = f"(live view of the run {self._folder}; its progress is also in {self._folder}/train.log)"
        display({VIEW_MIME: reference, "text/plain": plain}, raw=True)

    # Refreshing

    def follow(self) -> None:
        """The view thread: refresh when there is news, until the final state is shown."""
        while not self._closed.is_set():
            self.refresh(always=False)
            self._closed.wait(LOOK_SECONDS)

    def refresh(self, always: bool = True) -> None:
        """Show what is new; without `always`, only if it is time to. Never raises; gives up after three failures in a row."""
        with self._lock:
            if self.run is None:
                return
            try:
                if always or self._due(self.run):
                    self._show(self.run)
                    self._failures = 0
            except Exception as error:
                self._failures += 1
                self._shown_time = self._now()
                if self._failures >= MAX_FAILURES:
                    self._turn_off(_line(error))

    def _due(self, run: Shown) -> bool:
        waited = self._now() - self._shown_time
        if self._failures:
            return waited >= REFRESH_SECONDS
        grew = waited >= REFRESH_SECONDS and _size(self._tail.path) != self._shown_size
        return grew or run.state != self._shown_state or waited >= HEARTBEAT_SECONDS

    def _show(self, run: Shown) -> None:
        state = run.state  # before the diary is read: a run writes its end there first, and an ended view reads no more
        if state != self._shown_state or run.step > self._note_step + 1:
            self._note = ""  # what was asked for came, or was called off
        size, unread = _size(self._tail.path), ""
        try:
            self._view.feed(self._tail.new())
        except OSError as error:  # a mounted folder dropped out; what was missed is read later
            unread = f"The diary of the run cannot be read now: {_line(error)}"
        status = Status(state, run.step, run.num_steps, self._folder, self._now(), self._note, self._error or unread)
        for name, text in self._view.pieces(status).items():
            self.pieces[name].value = text
        self.toggle.description, self.toggle.icon = ("Resume", "play") if state == "paused" else ("Pause", "pause")
        self.toggle.disabled = state not in ("starting", "running", "paused")
        self.stop.disabled = state not in ("starting", "running", "paused")
        self._shown_state, self._shown_size, self._shown_time = state, size, self._now()
        if state not in ALIVE:
            self._close()

    def _turn_off(self, reason: str) -> None:
        self._close()
        for attempt in (
            lambda: self._diary.log(f"the live view turned itself off ({reason}); training goes on"),
            lambda: setattr(self.pieces["head"], "value", turned_off(self._folder, reason)),
            lambda: [setattr(button, "disabled", True) for button in (self.toggle, self.stop)],
        ):
            with contextlib.suppress(Exception):
                attempt()

    def _close(self) -> None:
        """Let go of the run: the page keeps its widgets, and these must not keep the model in memory."""
        self._closed.set()
        self.run = None
        self.toggle.on_click(self._on_toggle, remove=True)
        self.stop.on_click(self._on_stop, remove=True)

    # Buttons

    def _on_toggle(self, button: Any) -> None:
        """The text on the button decides, not the state: two quick clicks on Pause pause."""
        if button.description == "Resume":
            self._act("Resume", lambda run: run.resume())
        else:
            self._act("Pause", lambda run: run.pause())

    def _on_stop(self, button: Any) -> None:
        self._act("Stop", lambda run: run.stop(wait=False))

    def _act(self, name: str, act: Callable[[Shown], object]) -> None:
        """Do what a button says; what goes wrong is shown and logged, never raised into the kernel."""
        with self._lock:
            run = self.run
        if run is None:
            return
        try:
            self._error, self._note_step = "", run.step
            self._note = f"{name} asked for at {clock(self._now())}; it takes effect after the current step."
            act(run)
        except Exception as error:
            self._note, self._error = "", f"{name} failed: {_line(error)}"
            with contextlib.suppress(Exception):
                self._diary.log(self._error)
        self.refresh()


def _size(path: Path) -> int:
    """Bytes; -1 where they cannot be seen, as in a mounted folder that dropped out."""
    try:
        return path.stat().st_size if path.exists() else 0
    except OSError:
        return -1


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
