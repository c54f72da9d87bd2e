"""From the diary to pieces of HTML. Pure: no widgets, no files, no threads, no clock.

A View folds events one by one, so a refresh costs what is new. It keeps what the page shows and nothing else: the last
step, bounded curves, the newest log lines. Events may lack fields, hold null where a number was not finite, or carry any
text at all: what is not understood is left out, and no text reaches the page as markup. What a run is doing now is not
in the diary of a process that died, so it is told by the caller, in a Status.
"""

from __future__ import annotations

import html
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from colabtrain.dashboard import charts
from colabtrain.dashboard.charts import Curve
from colabtrain.dashboard.fields import clock, loss_text, mapping, number, one_line, plain_lines, whole
from colabtrain.dashboard.safety import Safety
from colabtrain.runtime.diary import Event, duration

MAX_LINES, MAX_LOG_BYTES = 200, 32_000
ALIVE = ("starting", "running", "paused", "stopping")
STATES = {
    "starting": ("Starting", "wait"),
    "running": ("Training", "live"),
    "paused": ("Paused", "wait"),
    "stopping": ("Stopping", "wait"),
    "stopped": ("Stopped", "off"),
    "finished": ("Finished", "done"),
    "failed": ("Failed", "bad"),
}
BAD_EVENTS = (
    "failed",
    "checkpoint_failed",
    "checkpoint_late",
    "checkpoint_rejected",
    "lines_lost",
    "not_published",
    "set_aside",
    "evaluation_failed",
    "hook_failed",
    "ending_failed",
    "hub_error",
    "fenced",
)
COUNTED = {"oom": "retried for memory", "set_aside": "set aside", "skipped": "skipped"}
QUIET_SECONDS, QUIET_STEPS = 30.0, 5.0  # a step that takes longer than both of these (the second in usual steps) is said


@dataclass(frozen=True)
class Status:
    """What the run says of itself at a refresh, and what the buttons have to say."""

    state: str
    step: int
    num_steps: int
    folder: str
    now: float  # epoch seconds
    note: str = ""
    error: str = ""


class View:
    """What a page shows of one run."""

    def __init__(self) -> None:
        self.last: Event = {}  # the newest step
        self.curves: dict[str, Curve] = {}
        self.evaluation: Event = {}
        self.failure: Event = {}
        self.safety = Safety()
        self.preparing = ""  # the newest line of a run that has not begun to step
        self.counts: Counter[str] = Counter()
        self.seconds_per_step: float | None = None
        self.lines: deque[tuple[str, str, bool]] = deque(maxlen=MAX_LINES)  # time of day, text, is it bad

    @property
    def saved_step(self) -> int | None:
        return self.safety.saved_step

    def feed(self, events: Iterable[Event]) -> None:
        """Take in new events, oldest first."""
        for event in events:
            kind = event.get("event")
            if kind == "step":
                self._step(event)
            elif kind in ("run_started", "adopted"):  # an earlier process may have failed, on another machine
                self.failure, self.seconds_per_step, self.preparing = {}, None, ""
            elif kind == "resumed":
                self._go_back(whole(event.get("step")) or 0)
            elif kind == "evaluation":
                self.evaluation = event
            elif kind == "failed":
                self.failure = event
            elif kind == "log":
                self.preparing = next(iter(plain_lines(str(event.get("text") or ""))), "")
            self.safety.feed(event)
            self.counts[str(kind)] += 1
            self._log(event)

    def pieces(self, status: Status) -> dict[str, str]:
        """HTML by name: head, losses, plot and log."""
        losses = _bar(status) + self._chips() + _evaluation(self.evaluation)
        return {"head": self._head(status), "losses": losses, "plot": charts.picture(self.curves), "log": self._lines_html()}

    # Folding

    def _step(self, event: Event) -> None:
        step = whole(event.get("step"))
        if step is None:
            return
        if step <= (whole(self.last.get("step")) or 0):
            self._go_back(step - 1)
        self.last = event
        self.counts["skipped"] += event.get("skipped") is True
        loss, average = mapping(event.get("loss")), mapping(event.get("ema"))
        for name in loss:
            curve = self.curves.setdefault(str(name), Curve())
            curve.add(step, number(loss[name]), number(average.get(name)))
        if (seconds := number(event.get("seconds"))) is not None:
            usual = self.seconds_per_step
            self.seconds_per_step = seconds if usual is None else 0.9 * usual + 0.1 * seconds

    def _go_back(self, step: int) -> None:
        """What lies beyond `step` is made anew; it happened, but it is not part of this model."""
        for curve in self.curves.values():
            curve.cut(step)
        if (whole(self.last.get("step")) or 0) > step:
            self.last = {}
        if (whole(self.evaluation.get("step")) or 0) > step:
            self.evaluation = {}

    def _log(self, event: Event) -> None:
        text = event.get("text")
        if isinstance(text, str):
            bad = event.get("event") in BAD_EVENTS
            when = clock(number(event.get("time")))
            self.lines.extend((when, line, bad) for line in plain_lines(text))

    # Drawing

    def _head(self, status: Status) -> str:
        word, kind = STATES.get(status.state, (status.state, "off"))
        alive = status.state in ALIVE
        dot = f'<i class="ct-dot ct-{kind}{" ct-going" if alive else ""}"></i>'
        top = f'<div class="ct-top">{dot}<b>{html.escape(word)}</b><span class="ct-name">{html.escape(status.folder)}</span></div>'
        # A dot stands before its fact, in a margin that is cut off where the fact begins a line.
        first, *more = self._facts(status)
        facts = f"<span>{first}</span>" + "".join(f"<span><i>&middot;</i>{fact}</span>" for fact in more)
        sub = f'<div class="ct-sub"><div>{facts}</div></div>'
        notes = self._notes(status)
        # Each refresh replaces the node and so restarts its style's delay: when none comes any more, the text appears.
        stale = f"No news since {clock(status.now)}: the kernel is busy or gone. After a restart, run the cell again to go on."
        return top + sub + "".join(notes) + (f'<div class="ct-stale">{stale}</div>' if alive else "")

    def _facts(self, status: Status) -> list[str]:
        if not status.num_steps:
            getting_ready = self.preparing or "preparing model and data"
            return [html.escape(getting_ready) if status.state == "starting" else "before the first step"]
        facts = [f"step {status.step:,} of {status.num_steps:,} ({100 * status.step // status.num_steps} %)"]
        if (epoch := whole(self.last.get("epoch"))) is not None:
            facts.append(f"epoch {epoch + 1}")
        if (pace := self.seconds_per_step) is not None:
            facts.append(f"{1000 * pace:.0f} ms/step" if pace < 0.1 else f"{pace:.2f} s/step")
            if status.state == "running":
                facts.append(f"{duration((status.num_steps - status.step) * pace)} left")
        facts += self.safety.facts()
        return facts + [f"{self.counts[event]:,} {what}" for event, what in COUNTED.items() if self.counts[event]]

    def _notes(self, status: Status) -> list[str]:
        notes: list[str] = []
        if status.state == "failed":
            message = ": ".join(str(self.failure[key]) for key in ("error", "message") if self.failure.get(key))
            reason = one_line(message) or "no reason was recorded"
            notes.append(_note(f"{reason} (at step {status.step:,}; the traceback is in {status.folder}/train.log)", "ct-error"))
        notes += [_note(text, "ct-error") for text in self.safety.notes()]
        quiet = status.now - (number(self.last.get("time")) or status.now)
        if status.state == "running" and quiet > max(QUIET_SECONDS, QUIET_STEPS * (self.seconds_per_step or 0.0)):
            notes.append(_note(f"No step for {duration(quiet)}."))
        if status.error:
            notes.append(_note(status.error, "ct-error"))
        if status.note:
            notes.append(_note(status.note))
        return notes

    def _chips(self) -> str:
        average, loss = mapping(self.last.get("ema")), mapping(self.last.get("loss"))
        chips: list[str] = []
        for k, name in enumerate(self.curves):
            if name in loss:
                chips.append(_chip(f"loss {name}", loss_text(average, name), charts.colour_class(k), f"last {loss_text(loss, name)}"))
        seconds, tokens = number(self.last.get("seconds")), number(self.last.get("tokens"))
        if seconds and tokens:
            chips.append(_chip("tokens / s", f"{tokens / seconds:,.0f}"))
        memory = mapping(self.last.get("memory"))
        for key, label in (("gpu_peak", "GPU peak"), ("ram_peak", "RAM peak")):
            if (peak := number(memory.get(key))) is not None:
                chips.append(_chip(label, f"{peak / 2**30:.1f} GiB"))
                break
        return f'<div class="ct-chips">{"".join(chips)}</div>' if chips else ""

    def _lines_html(self) -> str:
        rows: list[str] = []
        room = MAX_LOG_BYTES
        for when, text, bad in reversed(self.lines):
            row = f"<p{' class=ct-err' if bad else ''}><i>{when}</i><span>{html.escape(text)}</span></p>"
            room -= len(row.encode())
            if room < 0:
                break
            rows.append(row)
        return f'<div class="ct-lines"><div tabindex="0" role="region" aria-label="log, newest first">{"".join(rows)}</div></div>'


def turned_off(folder: str, reason: str) -> str:
    """The head of a view that gave up: it must not go on saying what the run did last."""
    text = f"This view turned itself off ({reason}); the run is not affected. Progress: {folder}/train.log"
    return f'<div class="ct-top"><i class="ct-dot ct-off"></i><b>Not shown any more</b></div>{_note(text, "ct-error")}'


def _bar(status: Status) -> str:
    percent = 100 * min(1.0, status.step / status.num_steps) if status.num_steps else 0.0
    kind = STATES.get(status.state, ("", "off"))[1]
    aria = f'role="progressbar" aria-label="training progress" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent:.0f}"'
    return f'<div class="ct-bar" {aria}><i class="ct-{kind}" style="width:{percent:.2f}%"></i></div>'


def _chip(label: str, value: str, colour: str = "", beside: str = "") -> str:
    small = f" <small>{html.escape(beside)}</small>" if beside else ""
    return f'<div class="ct-chip {colour}"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>{small}</div>'


def _note(text: str, kind: str = "") -> str:
    return f'<div class="ct-note {kind}">{html.escape(text)}</div>'


def _evaluation(event: Event) -> str:
    """Each sub-network, and what guessing by the class prior reaches, as a small table."""
    rows = [*mapping(event.get("results")).items()]
    prior = mapping(event.get("baselines")).get("prior")
    rows += [("class prior", prior)] if prior else []
    if not rows:
        return ""
    parts = [f"held out: {event.get('split', '?')}", f"step {whole(event.get('step')) or 0:,}"]
    caption = html.escape(", ".join(parts))
    return f'<table class="ct-table"><tr><th>{caption}</th><th>accuracy</th><th>nll</th></tr>{"".join(map(_evaluation_row, rows))}</table>'


def _evaluation_row(row: Sequence[Any]) -> str:
    overall = mapping(mapping(row[1]).get("overall"))
    accuracy = number(overall.get("accuracy"))
    cells = ("n/a" if accuracy is None else f"{100 * accuracy:.1f} %", loss_text(overall, "nll"))
    return f"<tr><td>{html.escape(str(row[0]))}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
