"""Pictures that people keep. matplotlib's Figure with the Agg canvas, never pyplot: no global state, safe in threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#3b82f6", "#d97706", "#16a34a", "#ef4444")
MAX_POINTS = 2000


def loss_figure(history: Mapping[str, Sequence[Any]], title: str) -> Figure:
    """The loss of each sub-network over the steps: every step faint, its moving average strong."""
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = list(history.get("step", ()))
    stride = max(1, len(steps) // MAX_POINTS)
    names = [name.removeprefix("loss/") for name in history if name.startswith("loss/")]
    for name, colour in zip(names, COLOURS * len(names), strict=False):
        axes.plot(steps[::stride], list(history[f"loss/{name}"])[::stride], color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps[::stride], list(history[f"ema/{name}"])[::stride], color=colour, linewidth=1.8, label=name)
    axes.set_title(title.replace("$", r"\$"))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per question)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if names:
        axes.legend(frameon=False)
    return figure


def save_loss_picture(history: Mapping[str, Sequence[Any]], path: Path, title: str) -> Path:
    loss_figure(history, title).savefig(path)
    return path
