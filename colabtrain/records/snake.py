"""Which records are the snake game's. The demo plays it zero-shot, so training must not see it.

No record of the game is at hand, so the rule goes by what a board has to say, and leans towards taking a record for
the game: one that is dropped wrongly is counted and shown, one that is trained on spoils the demo unseen. A record is
the game's if its state's text (or its JSON data as text) has all of

- the word snake,
- two different keys of the game, in JSON or as `name: value`: snake, food, apple, fruit, board, grid, head, direction,
  score (plural and one more word allowed: `snake_body`, `Food position`),
- and a board: positions under snake, food, apple or fruit (`[[3, 4], ...]`, `(3, 4)`, `{"x": 3, "y": 4}`, `[]`, also one
  level down), or a drawing under board or grid (a row of signs, or of numbers).

The questions do not matter. A photo, a tweet about snakes, a review of the game and a table of labels have no board.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from colabtrain.records.schema import Record, Seg, as_text

IS = r"s?(?:[_ -]?[a-z]+)?\s*[:=][\s\[(]*"
INSIDE = r"(?:\{[^\[\](){}]{0,200}?[:=][\s\[({]*)?"  # a mapping's first keys, up to the one that holds positions
PAIR = r"(?:\w+\s*[:=]\s*)?-?\d+\s*[,;]\s*(?:\w+\s*[:=]\s*)?-?\d"
KEY = re.compile(r"\b(snake|food|apple|fruit|board|grid|head|direction|score)s?(?:[_ -]?[a-z]+)?\s*[:=]")
POSITIONS = re.compile(rf"\b(?:snake|food|apple|fruit){IS}(?:{INSIDE}{PAIR}|(?<=[\[(])[\])])")
SIGNS, LONE_CELL = r"[.#_+*|-]", r"(?:[.#_+*|-]|\b[a-z\d]\b)"
DRAWING = re.compile(rf"\b(?:board|grid){IS}(?:[a-z]{{0,9}}{SIGNS}{{2}}|\d{{3}}|{LONE_CELL}[\s,]+{LONE_CELL})")
TO_PLAIN = str.maketrans("", "", "\"'\\")  # then JSON, JSON inside a JSON string and Python's notation read alike


def is_snake_game(record: Record) -> bool:
    """Whether `record` shows a board of the snake game (the module says by what rule). Never raises."""
    text = _text(record.state).lower().replace("\\n", "\n").translate(TO_PLAIN)
    if "snake" not in text or len(set(KEY.findall(text))) < 2:
        return False
    return bool(POSITIONS.search(text) or DRAWING.search(text))


def _text(state: Sequence[Seg]) -> str:
    return "\n".join(_as_text(seg.data) for seg in state if seg.kind == "text")


def _as_text(data: Any) -> str:
    try:
        return as_text(data)
    except (TypeError, ValueError, RecursionError):  # no JSON, so not the game's
        return ""
