"""What of an event can be shown. Events may lack fields, hold null where a number was not finite, or carry any text at all."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

MAX_TEXT_CHARS, MAX_LINE_CHARS = 32_000, 2_000

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")  # ANSI: CSI, OSC, others
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")  # also what turns text around


def plain_lines(text: str) -> list[str]:
    """Lines as a terminal would leave them: a carriage return starts over; colours and control characters go."""
    lines: list[str] = []
    for line in _ESCAPES.sub("", text[:MAX_TEXT_CHARS]).replace("\r\n", "\n").split("\n"):
        shown = _CONTROLS.sub("", line.rstrip("\r").rpartition("\r")[2])
        if shown.strip():
            lines.append(shown if len(shown) <= MAX_LINE_CHARS else shown[:MAX_LINE_CHARS] + " ...")
    return lines


def one_line(text: object) -> str:
    """The text of an event's field as one plain line; nothing where there is none."""
    return " ".join(plain_lines(str(text or "")))


def clock(seconds: float | None) -> str:
    """Time of day, or nothing where `seconds` is no time at all."""
    try:
        return "" if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


def loss_text(values: Mapping[str, Any], name: str) -> str:
    """null in the diary is what JSON makes of NaN and infinity."""
    value = number(values.get(name))
    return f"{value:.3f}" if value is not None else "not finite" if name in values else "n/a"


def number(value: object) -> float | None:
    """A finite number within reason, else None (NaN compares as False)."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 else None


def whole(value: object) -> int | None:
    known = number(value)
    return None if known is None else int(known)


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
