"""Limits on one record, and the order of its options.

The option subset and the option order are drawn anew each epoch from (seed, epoch, record id, question), so a resumed
run sees the same ones without any saved state.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import cast

from colabtrain.records.schema import Question, Record, Seg, as_text


def cap_record(record: Record, max_state_chars: int, max_options: int | None = None, draw: str | None = None) -> Record:
    """`record` with its text state cut to `max_state_chars` characters, and its choices to `max_options` options.

    draw: what the option subset and order depend on (seed and epoch); None leaves the options as they are. The gold
    options are kept first, heaviest first; soft targets are renormalised.
    """
    questions, targets, ys = list(record.qs), list(record.targets), list(record.ys)
    for i, question in enumerate(record.qs):
        if draw is not None and question["type"] == "choice":
            rng = random.Random(f"{draw}/{record.id}/{i}")  # a string seed is hashed with sha512: stable everywhere
            order = _draw_options(rng, record.targets[i], record.ys[i], max_options)
            questions[i], targets[i], ys[i] = _reorder(question, record.targets[i], record.ys[i], order)
    return dataclasses.replace(
        record, state=_cut_text(record.state, max_state_chars), qs=tuple(questions), targets=tuple(targets), ys=tuple(ys)
    )


def _cut_text(state: Sequence[Seg], max_chars: int) -> tuple[Seg, ...]:
    kept, left = list[Seg](), max_chars
    for seg in state:
        if seg.kind == "text":
            text = as_text(seg.data)
            if left < len(text):
                seg = dataclasses.replace(seg, data=text[:left])
            left = max(0, left - len(text))
            if seg.data == "" and kept:
                continue
        kept.append(seg)
    return tuple(kept)


def _draw_options(rng: random.Random, target: Sequence[float], y: int, max_options: int | None) -> list[int]:
    indices = list(range(len(target)))
    if max_options is not None and len(indices) > max_options:
        gold = sorted((k for k in indices if target[k] > 0 or k == y), key=lambda k: (k != y, -target[k]))[:max_options]
        rest = [k for k in indices if k not in gold]
        indices = sorted(gold + rng.sample(rest, max_options - len(gold)))
    rng.shuffle(indices)
    return indices


def _reorder(question: Question, target: Sequence[float], y: int, order: Sequence[int]) -> tuple[Question, tuple[float, ...], int]:
    options = list(question.get("criteria", {}).items())
    mass = sum(target[k] for k in order)
    question = cast(Question, {**question, "criteria": dict(options[k] for k in order)})
    kept = tuple(target[k] / mass if mass > 0 else float(k == y) for k in order)
    return question, kept, list(order).index(y)
