"""The view for terminals: the diary's lines as they come, and the evaluation as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from colabtrain.runtime.diary import Tail

POLL_SECONDS = 0.5
METRICS = ("accuracy", "nll", "brier", "ece")
LEGEND = """accuracy: higher is better. nll (nats), brier and ece (calibration error): lower is better.
prior, majority and uniform guess without reading: the mean training target, its most frequent answer, all options alike."""


class Followed(Protocol):
    """What following a run needs of it."""

    folder: Path

    def wait(self, timeout: float | None = None) -> str: ...

    @property
    def state(self) -> str: ...


def follow(run: Followed, tail: Tail, write: Callable[[str], None]) -> str:
    """Pass on each new line of the diary until the run ends; returns its last state. Raises what run.wait() raises."""
    try:
        while run.wait(POLL_SECONDS) not in ("finished", "stopped"):
            _pass_on(tail, write)
    finally:
        _pass_on(tail, write)
    return run.state


def _pass_on(tail: Tail, write: Callable[[str], None]) -> None:
    try:
        events = tail.new()
    except OSError:  # a mounted folder dropped out; the training goes on, and what was missed is read later
        return
    for event in events:
        if "text" in event:
            write(event["text"])


def evaluation_table(event: Mapping[str, Any]) -> str:
    """An evaluation event as text: a block for each question type, a row for each sub-network and baseline."""
    rows: list[tuple[str, ...]] = [("", "n", *METRICS)]
    results: Mapping[str, Any] = event["results"]
    kinds = list(next(iter(results.values()))["by_type"])
    for kind in (*kinds, "overall"):
        for name, result in (*results.items(), *event["baselines"].items()):
            row = result["overall"] if kind == "overall" else result["by_type"][kind]
            # A majority guess puts all its weight on one option; its nll only says how often it is wrong.
            cells = ("-" if name == "majority" and metric == "nll" else f"{row[metric]:.3f}" for metric in METRICS)
            rows.append((f"{kind}: {name}", str(row["n"]), *cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]) for row in rows]
    block = len(results) + len(event["baselines"])
    for at in range(len(lines) - block, 0, -block):
        lines.insert(at, "-" * len(lines[0]))
    return f"held out: {event['split']}\n" + "\n".join([*lines, "", LEGEND])
