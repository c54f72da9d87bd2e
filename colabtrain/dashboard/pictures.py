"""Pictures that people keep. matplotlib's Figure with the Agg canvas, never pyplot: no global state, safe in threads."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from colabtrain.dashboard.charts import Curve, Point, frame_of

COLOURS = ("#3b82f6", "#d97706", "#16a34a", "#ef4444")
MAX_POINTS = 2000
MAX_NAMES, MAX_NAME_CHARS = 8, 24  # in a legend


def loss_figure(history: Mapping[str, Sequence[Any]], title: str) -> Figure:
    """The loss of each sub-network over the steps: every step faint, its moving average strong."""
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = list(history.get("step", ()))
    stride = max(1, len(steps) // MAX_POINTS)
    names = [name.removeprefix("loss/") for name in history if name.startswith("loss/")]
    for name, colour in zip(names, COLOURS * len(names), strict=False):
        raw, average = (list(history[f"{column}/{name}"])[::stride] for column in ("loss", "ema"))
        _lines(axes, colour, steps[::stride], raw, average)
    axes.set_title(_drawable(title), parse_math=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per question)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    _legend(axes, names)
    return figure


def save_loss_picture(history: Mapping[str, Sequence[Any]], path: Path, title: str) -> Path:
    loss_figure(history, title).savefig(path)
    return path


def small_loss_png(curves: Mapping[str, Curve]) -> bytes:
    """The same as a small picture in bytes, out of the live view's bounded curves."""
    figure = Figure(figsize=(6, 2.8), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.09, 0.16, 0.89, 0.80))  # fixed: finding margins that fit takes longer than the drawing
    shown = {name: curve for name, curve in curves.items() if curve.points}
    axes.set_ylim(*_limits([point for curve in shown.values() for point in curve.points]))
    for curve, colour in zip(shown.values(), COLOURS * len(shown), strict=False):
        steps = [point.step for point in curve.points]
        _lines(axes, colour, steps, [point.raw for point in curve.points], [point.average for point in curve.points])
    axes.tick_params(labelsize=8)
    axes.set_xlabel("step", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    _legend(axes, list(shown), fontsize=8)
    if not shown:
        axes.text(0.5, 0.5, "no step yet", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
    with io.BytesIO() as file:
        figure.savefig(file, format="png")
        return file.getvalue()


def _lines(axes: Axes, colour: str, steps: Sequence[float], raw: Sequence[Any], average: Sequence[Any]) -> None:
    axes.plot(steps, raw, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, average, color=colour, linewidth=1.8)


def _limits(points: Sequence[Point]) -> tuple[float, float]:
    """As in the live view, some outliers may leave the frame."""
    values = sorted(point.raw for point in points if point.raw is not None)
    if not values:
        return 0.0, 1.0
    frame = frame_of(points, values)
    return frame.low, frame.high


def _legend(axes: Axes, names: Sequence[str], **options: Any) -> None:
    """Names of the strong lines; of very many, the first."""
    if names:
        labels = [_drawable(name[:MAX_NAME_CHARS]) for name in names[:MAX_NAMES]]
        for text in axes.legend(axes.get_lines()[1::2][:MAX_NAMES], labels, frameon=False, **options).get_texts():
            text.set_parse_math(False)


def _drawable(text: str) -> str:
    """`text` in signs that the font has: matplotlib warns of others."""
    font = get_font(findfont(FontProperties()))
    return "".join(sign if sign.isprintable() and font.get_char_index(ord(sign)) else "?" for sign in text)
