"""Live curves: numbers in, one SVG string out.

An SVG follows the page's theme and width, costs a millisecond and a few kB, and draws in no global state. Its labels
are HTML placed in percent, since text inside an SVG that is stretched to the page's width would be stretched too. A
curve keeps a bounded number of points, however long the run is.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

MAX_POINTS = 400  # a curve that has so many is halved, and from then on each point stands for twice as many steps
NUM_COLOURS = 4
LABEL_GAP = 8.0  # percent of the height between two names at the right edge

CSS = """
.ct{--ct-0:#3b82f6;--ct-1:#d97706;--ct-2:#16a34a;--ct-3:#ef4444}
.ct-cap{font-size:12px;opacity:.7;margin-top:12px}
.ct-fig{height:210px;padding:10px 52px 24px 36px;box-sizing:border-box}
.ct-empty{display:grid;place-items:center;opacity:.7}
.ct-area{position:relative;height:100%}
.ct-area line{stroke:currentColor;stroke-opacity:.13;vector-effect:non-scaling-stroke}
.ct-area polyline{fill:none;stroke-width:2;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.ct-area .ct-raw{stroke-width:1;stroke-opacity:.45}
.ct-y,.ct-x,.ct-end{position:absolute;font-size:11px;line-height:1;opacity:.7;white-space:nowrap}
.ct-y{right:100%;margin-right:6px;transform:translateY(-50%)}
.ct-x{top:100%;margin-top:6px;transform:translateX(-50%)}
.ct-end{left:100%;margin-left:6px;max-width:46px;overflow:hidden;text-overflow:ellipsis;line-height:1.3;
transform:translateY(-50%);font-weight:600;opacity:1}
"""


@dataclass(frozen=True)
class Point:
    """One or more steps; `step` is the last of them. None: not a finite number."""

    step: int
    raw: float | None
    average: float | None


class Curve:
    """The loss of one sub-network: the steps' own values, averaged over `stride` steps, and the moving average."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.stride = 1
        self._waiting: list[float | None] = []

    def add(self, step: int, raw: float | None, average: float | None) -> None:
        self._waiting.append(raw)
        if len(self._waiting) < self.stride:
            return
        self.points.append(Point(step, _mean(self._waiting), average))
        self._waiting.clear()
        if len(self.points) >= MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [Point(b.step, _mean((a.raw, b.raw)), b.average) for a, b in pairs]
            self.stride *= 2

    def cut(self, step: int) -> None:
        """Forget what lies beyond `step`."""
        self._waiting.clear()
        while self.points and self.points[-1].step > step:
            self.points.pop()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def colour_class(index: int) -> str:
    return f"ct-k{index % NUM_COLOURS}"


def colour_css() -> str:
    """The rules that give a line (stroke) or the left edge of a box its sub-network's colour."""
    rules = (
        f".ct-area .ct-k{k}{{stroke:var(--ct-{k})}}.ct-chip.ct-k{k}{{border-left:3px solid var(--ct-{k});border-radius:3px 8px 8px 3px}}"
        for k in range(NUM_COLOURS)
    )
    return CSS + "\n".join(rules)


def picture(curves: Mapping[str, Curve]) -> str:
    """The curves as HTML: every step faint, the moving average strong, each named at its right end."""
    points = [point for curve in curves.values() for point in curve.points]
    values = sorted(point.raw for point in points if point.raw is not None)
    if len(values) < 2:
        return '<div class="ct-fig ct-empty">The curve appears after the first steps.</div>'
    frame = frame_of(points, values)
    y_ticks = [tick for tick in _ticks(frame.low, frame.high, 5) if 20 < frame.y(tick) < 980]
    x_ticks = [tick for tick in _ticks(0, frame.last, 5) if tick == int(tick) and tick > 0]
    grid = "".join(f'<line x1="0" x2="1000" y1="{frame.y(tick)}" y2="{frame.y(tick)}"/>' for tick in y_ticks)
    lines = "".join(_lines(curve, frame, colour_class(k)) for k, curve in reversed(list(enumerate(curves.values()))))
    svg = '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true" style="display:block;width:100%;height:100%">'
    labels = "".join(f'<span class="ct-y" style="top:{frame.y(tick) / 10:.1f}%">{tick:g}</span>' for tick in y_ticks)
    labels += "".join(f'<span class="ct-x" style="left:{frame.x(tick) / 10:.1f}%">{tick:,.0f}</span>' for tick in x_ticks)
    labels += "".join(_end_labels(curves, frame))
    said = html.escape(_said(curves, frame.last))
    stride = max(curve.stride for curve in curves.values())
    faint = "each step" if stride == 1 else f"mean of {stride:,} steps"
    caption = f'<div class="ct-cap">Loss by step. Faint: {faint}. Strong: moving average.</div>'
    return f'{caption}<div class="ct-fig"><div class="ct-area" role="img" aria-label="{said}">{svg}{grid}{lines}</svg>{labels}</div></div>'


@dataclass(frozen=True)
class Frame:
    """What the plot shows: steps 0 to `last`, losses `low` to `high`."""

    last: int
    low: float
    high: float

    def x(self, step: float) -> int:
        return round(1000 * step / self.last)

    def y(self, value: float) -> int:
        """Down from the top; values beyond the frame stick to its edge."""
        return round(1000 * min(1.0, max(0.0, (self.high - value) / (self.high - self.low))))


def frame_of(points: Sequence[Point], values: Sequence[float]) -> Frame:
    """Some outliers may leave the frame: a single bad step must not flatten the rest."""
    averages = [point.average for point in points if point.average is not None]
    low = min([values[int(0.005 * len(values))], *averages])
    high = max([values[min(len(values) - 1, int(0.995 * len(values)))], *averages])
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
    return Frame(max(1, *(point.step for point in points)), low - margin, high + margin)


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    """About `wanted` round numbers from `low` to `high`."""
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    return [float(f"{k * step:.6g}") for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _lines(curve: Curve, frame: Frame, colour: str) -> str:
    raw = (f'<polyline class="ct-raw {colour}" points="{text}"/>' for text in _segments(curve, frame, lambda point: point.raw))
    strong = (f'<polyline class="{colour}" points="{text}"/>' for text in _segments(curve, frame, lambda point: point.average))
    return "".join((*raw, *strong))


def _segments(curve: Curve, frame: Frame, value_of: Callable[[Point], float | None]) -> Iterator[str]:
    """The `points` of each polyline; a value that was not finite breaks the line, so that the hole is seen."""
    for known, group in groupby(curve.points, lambda point: value_of(point) is not None):
        if known:
            yield " ".join(f"{frame.x(point.step)},{frame.y(value_of(point) or 0.0)}" for point in group)


def _end_labels(curves: Mapping[str, Curve], frame: Frame) -> Iterator[str]:
    """Names at the height where the averages end, pushed apart where they would overlap."""
    ends = sorted((frame.y(end) / 10, name) for name, curve in curves.items() if (end := _last(curve)) is not None)
    floor = 3.0
    for k, (top, name) in enumerate(ends):
        ceiling = 97.0 - LABEL_GAP * (len(ends) - 1 - k)
        at = min(max(top, floor), ceiling)
        floor = at + LABEL_GAP
        yield f'<b class="ct-end" style="top:{at:.1f}%">{html.escape(name)}</b>'


def _last(curve: Curve) -> float | None:
    return curve.points[-1].average if curve.points else None


def _said(curves: Mapping[str, Curve], last: int) -> str:
    """The picture in words, for those who cannot see it."""
    ends = ", ".join(f"{name} {'not finite' if (end := _last(curve)) is None else f'{end:.3f}'}" for name, curve in curves.items())
    return f"loss over {last:,} steps: {ends}"
