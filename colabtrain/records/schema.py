"""The shape of one record, and the check at the door.

A record is a state (segments of text, image, audio or video) with typed questions about it; each question has one
target distribution over its options. Everything behind the door may rely on what `to_record` proved: types, lengths,
probabilities that sum to one, answers in range. Everything it refuses, it refuses by record, question and field.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

KINDS = ("text", "image", "audio", "video")
TYPES = ("choice", "score", "noul")
NOUL_OPTIONS = ("false", "true")  # the option order of a yes / no question
MAX_CHOICE_OPTIONS, MAX_SCORE_LEVELS = 255, 10
MAX_PROBABILITY, SUM_TOLERANCE = 1e6, 1e-3  # targets come rounded to a few decimals; within this they are renormalised


class Question(TypedDict):
    """type: choice (criteria: option -> description or None, in order), score (criteria: levels, low to high) or noul
    (yes / no; criteria optional, {"true": ..., "false": ...}). Instructions and descriptions may be any JSON."""

    type: str
    instructions: Any
    criteria: NotRequired[Any]
    name: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Seg:
    """One segment of a state. data: text (or any JSON) for kind `text`; else a path, raw media, or a float tensor
    [num_tokens, hidden] of ready soft tokens. audio and fps belong to video."""

    kind: str
    data: Any
    audio: Any = None
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A state, its questions and their targets. targets[i] is a distribution over the options of qs[i] in option order
    (noul: false, true); ys[i] is the index of its answer."""

    task: str
    split: str
    modality: str
    state: tuple[Seg, ...]
    qs: tuple[Question, ...]
    targets: tuple[tuple[float, ...], ...]
    ys: tuple[int, ...]
    id: str
    group: str | None = None


def option_names(question: Question) -> list[str]:
    """The question's options in the order of its target."""
    if question["type"] == "noul":
        return list(NOUL_OPTIONS)
    return [as_text(option) for option in question.get("criteria", ())]


def as_text(value: Any) -> str:
    """Text as it is, anything else as JSON text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def question_key(record: Record, index: int) -> tuple[str, ...]:
    """What makes two questions of different records the same question: task, name or wording, and options."""
    question = record.qs[index]
    return (record.task, question.get("name") or as_text(question["instructions"]), question["type"], *option_names(question))


def to_record(raw: Mapping[str, Any] | Record, where: str, default_task: str = "data") -> Record:
    """Check `raw` and return it as a Record. `where` names its origin (file and line, or list and index).

    Raises ValueError that names the record, the question and the field, with the value and the remedy.
    """
    if not isinstance(raw, Mapping):  # not `is a Record`: after a reload of modules those from before are of another class
        raw = {name: getattr(raw, name) for name in Record.__slots__}
    who = where if raw.get("id") is None else f"{where} (id {raw['id']!r})"
    _check_names(raw, who)
    qs = _sequence(raw.get("qs"), f"{who}: qs", "questions")
    if not qs:
        raise ValueError(f"{who}: qs is empty; a record needs at least one question, or leave the record out")
    names = [f"{who}, question {_name(question, i)!r}" for i, question in enumerate(qs)]
    questions = tuple(_question(question, name) for question, name in zip(qs, names, strict=True))
    targets, ys = _answers(raw, questions, names, who)
    state = tuple(_seg(seg, f"{who}: state[{i}]") for i, seg in enumerate(_sequence(raw.get("state"), f"{who}: state", "segments")))
    if not state:
        raise ValueError(f"{who}: state is empty; give at least one segment such as {{'kind': 'text', 'data': '...'}}")
    media = [seg.kind for seg in state if seg.kind != "text"]
    return Record(
        task=_text(raw.get("task", default_task), f"{who}: task"),
        split=_text(raw.get("split", "train"), f"{who}: split"),
        modality=_text(raw.get("modality") or (media[0] if media else "text"), f"{who}: modality"),
        state=state,
        qs=questions,
        targets=targets,
        ys=ys,
        id=_text(content_digest(state, questions, targets)[:16] if raw.get("id") is None else raw["id"], f"{who}: id"),
        group=None if raw.get("group") is None else _text(raw["group"], f"{who}: group"),
    )


def _check_names(raw: Mapping[str, Any], who: str) -> None:
    """A field that is not known may be anything, but for one that is nearly the name of a field that is missing."""
    absent = [name for name in Record.__slots__ if raw.get(name) is None]
    for name in raw:
        if name not in Record.__slots__ and (meant := difflib.get_close_matches(str(name).lower(), absent, n=1, cutoff=0.8)):
            raise ValueError(f"{who}: unknown field {name!r}; did you mean {meant[0]!r}?")


def _sequence(value: Any, what: str, of: str) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value  # an array of numpy, torch or pandas
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"{what} is {_shown(value)}; it must be a list of {of}")
    return list(cast(Sequence[Any], value))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} is {_shown(value)}; it must be a non-empty string")
    _check_json(value, what)
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]


def _check_json(value: Any, what: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is {_shown(value)}; it contains half a character (a lone surrogate, from text cut in an emoji)") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} is {_shown(value)}; it must be text or JSON ({error})") from None


def _name(question: Any, index: int) -> str:
    return str(question.get("name") or index) if isinstance(question, Mapping) else str(index)


def _seg(seg: Any, what: str) -> Seg:
    if isinstance(seg, Mapping):
        unknown = set(seg) - {"kind", "data", "audio", "fps"}
        if unknown:
            raise ValueError(f"{what} has unknown fields {sorted(unknown)}; a segment has kind, data, audio and fps")
        seg = Seg(seg.get("kind", ""), seg.get("data"), seg.get("audio"), seg.get("fps"))
    if not all(hasattr(seg, name) for name in Seg.__slots__):
        raise ValueError(f"{what} is {_shown(seg)}; it must be a Seg or a mapping with kind and data")
    if seg.kind not in KINDS:
        raise ValueError(f"{what}: kind is {_shown(seg.kind)}; it must be one of {', '.join(KINDS)}")
    if seg.data is None:
        raise ValueError(f"{what}: data is missing; give the {seg.kind}")
    if seg.kind == "text":
        _check_json(seg.data, f"{what}: data")
    return seg


def _question(raw: Any, who: str) -> Question:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{who} is {_shown(raw)}; it must be a mapping with type, instructions and criteria")
    question = cast(Question, dict(raw))
    if question.get("type") not in TYPES:
        raise ValueError(f"{who}: type is {_shown(raw.get('type'))}; it must be one of {', '.join(TYPES)}")
    if raw.get("instructions") in (None, ""):
        raise ValueError(f"{who}: instructions are missing; say what is asked")
    _check_json(raw["instructions"], f"{who}: instructions")
    if raw.get("name") is not None:
        _text(raw["name"] or "-", f"{who}: name")
    criteria = raw.get("criteria")
    {"choice": _check_choice, "score": _check_score, "noul": _check_noul}[question["type"]](criteria, who)
    if question["type"] == "choice":
        question["criteria"] = {as_text(option): description for option, description in (criteria or {}).items()}
        if len(question["criteria"]) < len(criteria or {}):
            raise ValueError(f"{who}: criteria is {_shown(criteria)}; two options read the same as text")
    elif question["type"] == "score":
        question["criteria"] = list(criteria or ())
    _check_json(question.get("criteria"), f"{who}: criteria")
    return question


def _check_choice(criteria: Any, who: str) -> None:
    if not isinstance(criteria, Mapping) or not 1 <= len(criteria) <= MAX_CHOICE_OPTIONS:
        raise ValueError(
            f"{who}: criteria is {_shown(criteria)}; a choice needs a mapping option -> description (or null) with 1 to "
            f"{MAX_CHOICE_OPTIONS} options"
        )


def _check_score(criteria: Any, who: str) -> None:
    if not isinstance(criteria, Sequence) or isinstance(criteria, str) or not 2 <= len(criteria) <= MAX_SCORE_LEVELS:
        raise ValueError(
            f"{who}: criteria is {_shown(criteria)}; a score needs a list of 2 to {MAX_SCORE_LEVELS} level descriptions, low to high"
        )


def _check_noul(criteria: Any, who: str) -> None:
    if criteria is not None and (not isinstance(criteria, Mapping) or not set(criteria) <= set(NOUL_OPTIONS)):
        raise ValueError(f"{who}: criteria is {_shown(criteria)}; a noul takes none, or a mapping with 'true' and 'false'")


def _answers(
    raw: Mapping[str, Any], qs: Sequence[Question], names: Sequence[str], who: str
) -> tuple[tuple[tuple[float, ...], ...], tuple[int, ...]]:
    targets, ys = raw.get("targets"), raw.get("ys")
    if targets is None and ys is None:
        raise ValueError(f"{who}: targets and ys are both missing; give one target distribution or one answer index a question")
    columns: list[list[Any]] = []
    for field, value in (("targets", targets), ("ys", ys)):
        column = [None] * len(qs) if value is None else _sequence(value, f"{who}: {field}", "one entry a question")
        if len(column) != len(qs):
            raise ValueError(f"{who}: {field} has {len(column)} entries for {len(qs)} questions; give one entry a question")
        columns.append(column)
    probabilities = [
        _target(target, y, len(option_names(question)), name, targets is None)
        for question, target, y, name in zip(qs, *columns, names, strict=True)
    ]
    answers = [_answer(y, target, name, ys is None) for y, target, name in zip(columns[1], probabilities, names, strict=True)]
    return tuple(probabilities), tuple(answers)


def _target(target: Any, y: Any, num_options: int, name: str, from_ys: bool) -> tuple[float, ...]:
    if from_ys:
        return tuple(float(k == _index(y, num_options, name)) for k in range(num_options))
    values = _sequence(target, f"{name}: targets", "probabilities")
    if len(values) != num_options:
        raise ValueError(f"{name}: targets has {len(values)} probabilities for {num_options} options; give one an option, in option order")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= MAX_PROBABILITY:
            raise ValueError(f"{name}: targets contains {value!r}; probabilities are finite numbers of at least 0")
    total = float(sum(values))
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise ValueError(f"{name}: targets sum to {total:g}; they must sum to 1 (divide them by their sum)")
    if abs(total - 1.0) < 1e-12:  # as they are: a record that is written and read again stays the same to the last bit
        total = 1.0
    return tuple(float(value / total) for value in values)


def _answer(y: Any, target: tuple[float, ...], name: str, from_targets: bool) -> int:
    return target.index(max(target)) if from_targets else _index(y, len(target), name)


def _index(y: Any, num_options: int, name: str) -> int:
    if isinstance(y, bool) or not isinstance(y, numbers.Integral) or not 0 <= int(y) < num_options:
        raise ValueError(f"{name}: ys is {_shown(y)}; it must be the index of the answer, 0 to {num_options - 1}")
    return int(y)


def content_digest(state: Sequence[Seg], qs: Sequence[Question], targets: Sequence[Sequence[float]]) -> str:
    """sha256 (hex) of what a record says: the same in every run and file, whatever its id or split."""
    parts = [[seg.kind, _media_digest(seg.data), _media_digest(seg.audio), seg.fps] for seg in state]
    return hashlib.sha256(json.dumps([parts, qs, targets], default=str).encode()).hexdigest()


def _media_digest(data: Any) -> Any:
    if hasattr(data, "detach"):  # a tensor: its repr leaves most of it out
        data = data.detach().float().cpu().contiguous().numpy().tobytes()
    elif hasattr(data, "tobytes"):  # an array or a picture
        data = data.tobytes()
    return hashlib.sha256(data).hexdigest() if isinstance(data, bytes) else data
