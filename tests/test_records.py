"""Records: what the door lets in, what it refuses and in which words, what is held out, and what a cap leaves."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from colabtrain.config import TrainConfig
from colabtrain.records import Record, Seg, cap_record, load_records, select
from colabtrain.records.schema import option_names, question_key

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

CHOICE = {"type": "choice", "name": "team", "instructions": "Which team?", "criteria": {"a": "first", "b": None, "c": "third"}}
SCORE = {"type": "score", "name": "size", "instructions": "How large?", "criteria": ["small", "middle", "large"]}
NOUL = {"type": "noul", "name": "even", "instructions": "Is it even?"}


def raw(**changes: Any) -> dict[str, Any]:
    """A valid record of three questions with `changes`; a field set to ... is left out."""
    record: dict[str, Any] = {
        "id": "r-1",
        "task": "demo",
        "split": "train",
        "state": [{"kind": "text", "data": "hello"}],
        "qs": [CHOICE, SCORE, NOUL],
        "targets": [[0.25, 0.75, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0]],
        "ys": [1, 2, 0],
    }
    return {name: value for name, value in {**record, **changes}.items() if value is not ...}


def question(**changes: Any) -> dict[str, Any]:
    """A valid record of one choice between three options, its question with `changes`."""
    asked = {name: value for name, value in {**CHOICE, **changes}.items() if value is not ...}
    return raw(qs=[asked], targets=..., ys=[0])


def one(record: Any) -> Record:
    (loaded,) = load_records([record])
    return loaded


def simple(name: str, **changes: Any) -> Record:
    return one({"id": name, "state": [{"kind": "text", "data": name}], "qs": [NOUL], "ys": [0], **changes})


def through_json(record: Record) -> Record:
    return one(json.loads(json.dumps(dataclasses.asdict(record))))


# What comes in


def test_record_keeps_what_was_given() -> None:
    record = one(raw(group="g", split="val"))
    assert (record.id, record.task, record.split, record.modality, record.group) == ("r-1", "demo", "val", "text", "g")
    assert record.state == (Seg("text", "hello"),)
    assert record.targets == ((0.25, 0.75, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0)) and record.ys == (1, 2, 0)
    assert [option_names(asked) for asked in record.qs] == [["a", "b", "c"], ["small", "middle", "large"], ["false", "true"]]
    assert list(record.qs[0]["criteria"].items()) == [("a", "first"), ("b", None), ("c", "third")]


def test_defaults_of_a_record() -> None:
    record = one(raw(id=..., task=..., split=..., targets=...))
    assert (record.task, record.split, record.modality, record.group) == ("data", "train", "text", None)
    assert one(raw(state=[{"kind": "text", "data": "look"}, {"kind": "image", "data": "x.png"}])).modality == "image"
    assert one(raw(modality="photo")).modality == "photo"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"id": ..., "group": "writer-7"},
        {"targets": [[0.3333, 0.3333, 0.3333], [0.1, 0.2, 0.7], [0.5, 0.5]]},
        {"state": [{"kind": "video", "data": "v.mp4", "audio": "v.wav", "fps": 2.5}, {"kind": "text", "data": {"deep": [1, None, True]}}]},
        {
            "qs": [
                {**CHOICE, "criteria": {1: "one", 2: {"en": "two"}, "3": None}},
                SCORE,
                {**NOUL, "criteria": {"true": "t", "false": None}},
            ]
        },
        {"qs": [CHOICE, {**SCORE, "criteria": ("small", "middle", "large")}, {**NOUL, "instructions": {"ask": ["even", "?"]}}]},
    ],
    ids=["plain", "no id", "soft", "media and JSON", "option names", "tuple levels"],
)
def test_round_trip_through_json(changes: dict[str, Any]) -> None:
    record = one(raw(**changes))
    assert through_json(record) == record
    assert one(record) == record, "a Record is accepted at the door as it is"
    assert one(dataclasses.asdict(record)) == record


def test_rounded_targets_are_normalised_once() -> None:
    """Reading a written record again must not move its targets by a last bit: they are part of the fingerprint."""
    rng = random.Random(0)
    for _ in range(200):
        weights = [rng.random() for _ in range(3)]
        target = [round(weight / sum(weights), 4) for weight in weights]
        record = one(raw(qs=[CHOICE], targets=[target], ys=...))
        assert sum(record.targets[0]) == pytest.approx(1, abs=1e-15)
        assert record.targets[0] == pytest.approx(target, abs=1e-3)
        assert through_json(record) == record


def test_targets_from_ys_and_ys_from_targets() -> None:
    assert one(raw(targets=...)).targets == ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0))
    assert one(raw(ys=...)).ys == (1, 2, 0)
    assert one(raw(ys=..., targets=[[0.4, 0.2, 0.4], [0.0, 0.5, 0.5], [0.5, 0.5]])).ys == (0, 1, 0), "the first of equals"
    assert one(raw(targets=[[0.25, 0.75, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0]], ys=[0, 2, 1])).ys == (0, 2, 1), "ys need not be the top target"


def test_default_id_is_the_content() -> None:
    first = one(raw(id=...))
    assert first.id == one(raw(id=None)).id == one(raw(id=..., split="test", group="g")).id and len(first.id) == 16
    others = [
        one(raw(id=..., state=[{"kind": "text", "data": "hello!"}])),
        one(raw(id=..., targets=[[0.75, 0.25, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0]])),
        one(raw(id=..., qs=[CHOICE, SCORE, {**NOUL, "instructions": "Is it odd?"}])),
        one(raw(id=..., qs=[{**CHOICE, "criteria": {"b": None, "a": "first", "c": "third"}}, SCORE, NOUL])),
        one(raw(id=..., state=[{"kind": "audio", "data": "hello"}])),
    ]
    assert len({first.id, *(record.id for record in others)}) == len(others) + 1


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.numpy(), lambda t: t.numpy().tobytes()], ids=["tensor", "array", "bytes"])
def test_default_id_sees_all_of_the_media(make: Callable[[torch.Tensor], Any]) -> None:
    pytest.importorskip("numpy")
    quiet = torch.zeros(4000)
    loud = quiet.clone()
    loud[2000] = 1.0  # in the middle, which a printed array leaves out
    ids = [one(raw(id=..., state=[{"kind": "audio", "data": make(sound)}])).id for sound in (quiet, loud, quiet.clone())]
    assert ids[0] == ids[2] != ids[1]


def test_question_key_tells_questions_apart() -> None:
    record = one(raw(qs=[CHOICE, SCORE, {**NOUL, "name": ""}]))
    keys = [question_key(record, i) for i in range(3)]
    assert keys[0] == ("demo", "team", "choice", "a", "b", "c")
    assert keys[2] == ("demo", "Is it even?", "noul", "false", "true")
    assert question_key(dataclasses.replace(record, task="other"), 0) != keys[0]


# What is refused: (record, words that the message must have)

REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("qs missing", raw(qs=...), ["qs", "missing", "list of questions"]),
    ("qs empty", raw(qs=[], targets=[], ys=[]), ["qs", "empty", "at least one question"]),
    ("qs a text", raw(qs="Which?"), ["qs", "'Which?'", "list"]),
    ("qs a mapping", raw(qs=CHOICE), ["qs", "list of questions"]),
    ("question a text", raw(qs=[CHOICE, "How large?", NOUL]), ["question '1'", "'How large?'", "mapping"]),
    ("type missing", question(type=...), ["question 'team'", "type", "missing", "choice, score, noul"]),
    ("type unknown", question(type="multi"), ["question 'team'", "type", "'multi'", "choice, score, noul"]),
    ("type unhashable", question(type=["choice"]), ["question 'team'", "type", "['choice']"]),
    ("instructions missing", question(instructions=...), ["question 'team'", "instructions", "missing"]),
    ("instructions empty", question(instructions=""), ["question 'team'", "instructions"]),
    ("instructions no JSON", question(instructions={1, 2}), ["question 'team'", "instructions"]),
    ("name no text", question(name=["team"]), ["team", "name"]),
    ("criteria missing", question(criteria=...), ["question 'team'", "criteria", "missing", "mapping option"]),
    ("criteria a list", question(criteria=["a", "b"]), ["question 'team'", "criteria", "['a', 'b']", "mapping"]),
    ("criteria empty", question(criteria={}), ["question 'team'", "criteria", "1 to 255"]),
    ("criteria too many", question(criteria={str(i): None for i in range(256)}), ["question 'team'", "criteria", "1 to 255"]),
    (
        "criteria of one name",
        raw(qs=[{**CHOICE, "criteria": {1: "x", "1": "y"}}], targets=..., ys=[0]),
        ["question 'team'", "criteria", "1"],
    ),
    ("description no JSON", question(criteria={"a": object(), "b": None}), ["question 'team'", "criteria"]),
    ("levels a mapping", raw(qs=[{**SCORE, "criteria": {"a": "b"}}], targets=..., ys=[0]), ["question 'size'", "criteria", "2 to 10"]),
    ("one level", raw(qs=[{**SCORE, "criteria": ["a"]}], targets=..., ys=[0]), ["question 'size'", "criteria", "2 to 10"]),
    (
        "eleven levels",
        raw(qs=[{**SCORE, "criteria": list("abcdefghijk")}], targets=..., ys=[0]),
        ["question 'size'", "criteria", "2 to 10"],
    ),
    ("levels a text", raw(qs=[{**SCORE, "criteria": "abc"}], targets=..., ys=[0]), ["question 'size'", "criteria", "'abc'"]),
    (
        "noul criteria",
        raw(qs=[{**NOUL, "criteria": {"yes": "y"}}], targets=..., ys=[0]),
        ["question 'even'", "criteria", "'true' and 'false'"],
    ),
    ("noul a list", raw(qs=[{**NOUL, "criteria": ["no", "yes"]}], targets=..., ys=[0]), ["question 'even'", "criteria"]),
    ("no answer", raw(targets=..., ys=...), ["targets and ys are both missing"]),
    ("targets too few", raw(targets=[[1.0, 0.0, 0.0]]), ["targets", "1 entries for 3 questions"]),
    ("ys too many", raw(ys=[0, 0, 0, 0]), ["ys", "4 entries for 3 questions"]),
    ("ys a number", raw(ys=1), ["ys", "list"]),
    ("target too short", raw(targets=[[0.5, 0.5], [0, 0, 1], [1, 0]]), ["question 'team'", "targets", "2 probabilities for 3 options"]),
    ("target too long", raw(targets=[[1, 0, 0], [0, 0, 1], [1, 0, 0]]), ["question 'even'", "targets", "3 probabilities for 2 options"]),
    ("target of one missing", raw(targets=[[1, 0, 0], None, [1, 0]]), ["question 'size'", "targets", "missing"]),
    ("target a number", raw(targets=[0.3, [0, 0, 1], [1, 0]]), ["question 'team'", "targets", "0.3", "list"]),
    ("target negative", raw(targets=[[1.5, -0.5, 0], [0, 0, 1], [1, 0]]), ["question 'team'", "targets", "-0.5", "at least 0"]),
    ("target NaN", raw(targets=[[1, 0, 0], [0, float("nan"), 1], [1, 0]]), ["question 'size'", "targets", "nan", "finite"]),
    ("target infinite", raw(targets=[[1, 0, 0], [0, 0, 1], [float("inf"), 0]]), ["question 'even'", "targets", "inf", "finite"]),
    ("target a text", raw(targets=[["1", 0, 0], [0, 0, 1], [1, 0]]), ["question 'team'", "targets", "'1'"]),
    ("target a bool", raw(targets=[[1, 0, 0], [0, 0, 1], [True, False]]), ["question 'even'", "targets", "True"]),
    ("target sums to 2", raw(targets=[[1, 1, 0], [0, 0, 1], [1, 0]]), ["question 'team'", "targets sum to 2", "sum to 1"]),
    ("target all zero", raw(targets=[[1, 0, 0], [0, 0, 0], [1, 0]]), ["question 'size'", "targets sum to 0"]),
    ("target off by 0.002", raw(targets=[[0.998, 0, 0], [0, 0, 1], [1, 0]]), ["question 'team'", "targets sum to 0.998"]),
    ("y too large", raw(ys=[3, 2, 0]), ["question 'team'", "ys", "3", "0 to 2"]),
    ("y negative", raw(ys=[1, -1, 0]), ["question 'size'", "ys", "-1", "0 to 2"]),
    ("y missing", raw(ys=[1, 2, None]), ["question 'even'", "ys", "missing", "0 to 1"]),
    ("y a float", raw(ys=[1.0, 2, 0], targets=...), ["question 'team'", "ys", "1.0"]),
    ("y a bool", raw(ys=[1, 2, True], targets=...), ["question 'even'", "ys", "True"]),
    ("y a name", raw(ys=["b", 2, 0], targets=...), ["question 'team'", "ys", "'b'"]),
    ("state missing", raw(state=...), ["state", "missing", "list of segments"]),
    ("state empty", raw(state=[]), ["state", "empty"]),
    ("state a text", raw(state="hello"), ["state", "'hello'", "list of segments"]),
    ("segment a text", raw(state=[{"kind": "text", "data": "x"}, "hello"]), ["state[1]", "'hello'", "kind and data"]),
    ("kind missing", raw(state=[{"data": "x"}]), ["state[0]", "kind", "text, image, audio, video"]),
    ("kind unknown", raw(state=[{"kind": "smell", "data": "x"}]), ["state[0]", "kind", "'smell'", "text, image, audio, video"]),
    ("data missing", raw(state=[{"kind": "image"}]), ["state[0]", "data", "missing", "image"]),
    ("text no JSON", raw(state=[{"kind": "text", "data": b"bytes"}]), ["state[0]", "data"]),
    ("segment field unknown", raw(state=[{"kind": "text", "data": "x", "text": "y"}]), ["state[0]", "unknown fields", "'text'"]),
    ("task empty", raw(task=""), ["task", "''", "non-empty string"]),
    ("task a number", raw(task=3), ["task", "3", "non-empty string"]),
    ("split null", raw(split=None), ["split", "non-empty string"]),
    ("id a number", raw(id=7), ["id", "7", "non-empty string"]),
    ("id zero", raw(id=0), ["id", "0", "non-empty string"]),
    ("group a number", raw(group=7), ["group", "7", "non-empty string"]),
    ("modality a number", raw(modality=2), ["modality", "2", "non-empty string"]),
]


@pytest.mark.parametrize(("record", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refusal_names_record_question_and_field(record: dict[str, Any], words: Sequence[str]) -> None:
    with pytest.raises(ValueError) as error:
        load_records({"mine": [raw(), record]})
    message = str(error.value)
    assert message.startswith("data['mine'][1]"), message
    assert record.get("id") != "r-1" or "'r-1'" in message, "the id is said where there is one"
    assert [word for word in words if word not in message] == [], message


# Sources


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", ["not JSON", "column 2", "one record a line"]),
        ("[1, 2]", ["JSON list", "JSON object"]),
        ('"text"', ["JSON str"]),
        (json.dumps(raw(ys=[9, 2, 0])), ["'r-1'", "question 'team'", "ys", "9"]),
        (json.dumps(raw(state=[])), ["'r-1'", "state is empty"]),
        ('{"id": "r-1", "targets": [[NaN, 0]], "qs": [{"type": "noul", "instructions": "?"}]}', ["question '0'", "targets", "nan"]),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path: Path, line: str, words: Sequence[str]) -> None:
    path = write_lines(tmp_path / "mine.jsonl", raw(), "", line, raw())
    with pytest.raises(ValueError) as error:
        load_records(path)
    message = str(error.value)
    assert message.startswith("mine.jsonl line 3"), message
    assert [word for word in words if word not in message] == [], message


def test_jsonl_that_is_not_utf8_names_file_and_line(tmp_path: Path) -> None:
    good = json.dumps(raw()).encode() + b"\n"
    path = tmp_path / "latin.jsonl"
    path.write_bytes(good * 100 + json.dumps(raw(task="caf#")).encode().replace(b"#", b"\xe9") + b"\n")
    with pytest.raises(ValueError, match=r"latin\.jsonl line 101.*UTF-8"):
        load_records(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl' does not exist"):
        load_records(tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        load_records(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        load_records({"a": [raw()], "b": tmp_path / "none.jsonl"})


def test_sources_give_the_same_records(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.records.jsonl", raw(id="x", task=...), raw(id="y", task="own"))
    from_path = load_records(path)
    assert [(record.id, record.task) for record in from_path] == [("x", "mine"), ("y", "own")], "a file's name is the default task"
    assert load_records(str(path)) == load_records([path]) == from_path
    assert load_records([path, str(path)]) == from_path * 2
    assert load_records(from_path) == load_records(tuple(from_path)) == from_path
    named = load_records({"first": path, "second": [raw(id="z", task=...), from_path[0]], "third": [path]})
    wanted = [("x", "first"), ("y", "own"), ("z", "second"), ("x", "mine"), ("x", "third"), ("y", "own")]
    assert [(record.id, record.task) for record in named] == wanted


def test_mapping_name_is_the_task_whatever_it_is(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.jsonl", raw(task=...))
    assert load_records({"data": path})[0].task == "data"


@pytest.mark.parametrize("source", [[], {}, {"a": []}, ()])
def test_no_records_is_an_error(source: Any) -> None:
    with pytest.raises(ValueError, match="holds no records; give at least one"):
        load_records(source)


def test_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty\.jsonl.*holds no records"):
        load_records(write_lines(tmp_path / "empty.jsonl", "", "  "))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (7, r"data is a int; give a path, a list of records, or a mapping"),
        (None, r"data is a NoneType"),
        ([raw(), 3], r"data\[1\] is a int; give a record"),
        ({"a": [raw()], "b": 3}, r"data\['b'\] is a int"),
        ({"b": [[raw()]]}, r"data\['b'\]\[0\] is a list"),
        (raw(), r"data is a dict"),
    ],
)
def test_source_of_another_kind_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_records(source)


def test_real_data_loads() -> None:
    paths = sorted(DATA.glob("*.records.jsonl"))
    if not paths:
        pytest.skip(f"no sample data: {DATA} holds no *.records.jsonl")
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = load_records(path)
        assert len(records) == sum(bool(line.strip()) for line in lines) > 0
        assert [record.id for record in records] == [json.loads(line)["id"] for line in lines]
        for record in records:
            assert len(record.qs) == len(record.targets) == len(record.ys) > 0
            for asked, target, y in zip(record.qs, record.targets, record.ys, strict=True):
                assert len(target) == len(option_names(asked)) and 0 <= y < len(target)
                assert sum(target) == pytest.approx(1, abs=1e-12)
        assert load_records([dataclasses.asdict(record) for record in records[::50]]) == records[::50]


# Selection


def many(num: int, task: str = "demo", split: str = "train") -> list[Record]:
    return [simple(f"{task}-{split}-{i}", task=task, split=split) for i in range(num)]


def ids(records: Sequence[Record]) -> set[str]:
    return {record.id for record in records}


@pytest.mark.parametrize(
    ("splits", "name"),
    [
        (("validation", "val", "test"), "test"),
        (("validation", "val"), "val"),
        (("validation",), "validation"),
        (("other",), "calibration hold-out"),
        ((), "calibration hold-out"),
    ],
)
def test_held_out_order(splits: Sequence[str], name: str) -> None:
    records = many(100) + [record for split in splits for record in many(3, split=split)]
    chosen = select(records, TrainConfig())
    assert chosen.held_out_name == name
    if name == "calibration hold-out":
        assert chosen.held_out == chosen.calibration and chosen.held_out
    else:
        assert chosen.held_out == [record for record in records if record.split == name]
    unused = [split for split in splits if split != name]
    assert chosen.dropped == Counter({(f"split {split!r} is not used", "demo"): 3 for split in unused})
    assert all(record.split == "train" for record in chosen.train + chosen.calibration)


def test_every_record_is_used_once_or_counted_as_dropped() -> None:
    records = many(200) + many(30, "other") + many(7, "typed_decisions") + many(5, "snake_syn", "test") + many(9, split="test")
    records += [simple(f"image-{i}", modality="image") for i in range(11)]
    chosen = select(records, TrainConfig(modalities=("text",), max_records=50))
    parts = [chosen.train, chosen.calibration, chosen.held_out]
    assert sum(map(len, parts)) + chosen.dropped.total() == len(records)
    assert len(ids([record for part in parts for record in part])) == sum(map(len, parts))
    assert len(chosen.train) == 50 and len(chosen.held_out) == 9
    assert chosen.dropped["excluded task", "typed_decisions"] == 7 and chosen.dropped["excluded task", "snake_syn"] == 5
    assert chosen.dropped["modality 'image' is not among ('text',)", "data"] == 11
    cut = {task: n for (reason, task), n in chosen.dropped.items() if reason == "beyond max_records=50"}
    assert sum(cut.values()) == 230 - len(chosen.calibration) - 50


def test_excluded_tasks_are_an_option() -> None:
    records = many(20) + many(20, "typed_decisions")
    assert {record.task for record in select(records, TrainConfig(exclude_tasks=())).train} == {"demo", "typed_decisions"}
    assert {record.task for record in select(records, TrainConfig(exclude_tasks=("demo",))).train} == {"typed_decisions"}


def test_excluded_task_is_excluded_from_every_part() -> None:
    records = many(100) + many(100, "typed_decisions") + many(20, "typed_decisions", "test") + many(20, split="val")
    chosen = select(records, TrainConfig(calibration_share=0.5))
    assert {record.task for record in chosen.train + chosen.calibration + chosen.held_out} == {"demo"}
    assert chosen.held_out_name == "val"


def test_max_records_keeps_the_first_and_does_not_touch_the_hold_out() -> None:
    records = many(300)
    free, cut = select(records, TrainConfig()), select(records, TrainConfig(max_records=10))
    assert cut.train == free.train[:10] and cut.calibration == free.calibration
    assert select(records, TrainConfig(max_records=1000)) == free


def test_hold_out_share_and_stability() -> None:
    old, new = many(2000), many(2000, "another")
    config = TrainConfig()
    alone = select(old, config)
    assert 60 <= len(alone.calibration) <= 140, "about 5 % of 2,000"
    for together in (select(old + new, config), select(new + old, config), select(list(reversed(old)) + new, config)):
        assert {name for name in ids(together.calibration) if name.startswith("demo-")} == ids(alone.calibration)
        assert ids(alone.train) <= ids(together.train)
    assert ids(select(old + new, TrainConfig(max_records=100, seed=9)).calibration) == ids(select(old + new, config).calibration)
    assert ids(select(old[:500], config).calibration) <= ids(alone.calibration)
    assert ids(alone.calibration) <= ids(select(old, TrainConfig(calibration_share=0.1)).calibration), "a larger share adds to it"
    assert select(old, TrainConfig(calibration_share=0)).calibration == []


def test_a_group_is_held_out_as_a_whole() -> None:
    records = [simple(f"r-{i}", group=f"g-{i % 100}") for i in range(1000)]
    chosen = select(records, TrainConfig(calibration_share=0.2))
    groups = [{record.group for record in part} for part in (chosen.train, chosen.calibration)]
    assert groups[0] & groups[1] == set() and len(groups[0] | groups[1]) == 100 and groups[1]


def test_nothing_left_to_train_on_says_why() -> None:
    with pytest.raises(ValueError, match=r"splits found: \{'test': 3\}; dropped: none; set aside for calibration: 0\)"):
        select(many(3, split="test"), TrainConfig())
    with pytest.raises(ValueError, match=r"4 of task 'typed_decisions': excluded task.*give more records of split 'train'"):
        select(many(4, "typed_decisions"), TrainConfig())
    with pytest.raises(ValueError, match=r"5 of task 'demo': modality 'text' is not among \('image',\)"):
        select(many(5), TrainConfig(modalities=("image",)))


# Caps


def texts(*parts: str) -> Record:
    return simple("r", state=[{"kind": "text", "data": part} for part in parts])


def cut(record: Record, chars: int) -> list[Any]:
    return [seg.data for seg in cap_record(record, chars).state]


@pytest.mark.parametrize(
    ("parts", "chars", "wanted"),
    [
        (["abcdef"], 10, ["abcdef"]),
        (["abcdef"], 6, ["abcdef"]),
        (["abcdef"], 5, ["abcde"]),
        (["abcdef"], 1, ["a"]),
        (["abc", "def", "ghi"], 9, ["abc", "def", "ghi"]),
        (["abc", "def", "ghi"], 8, ["abc", "def", "gh"]),
        (["abc", "def", "ghi"], 6, ["abc", "def"]),
        (["abc", "def", "ghi"], 4, ["abc", "d"]),
        (["abc", "def", "ghi"], 3, ["abc"]),
        ([""], 5, [""]),
        (["", "abc"], 2, ["", "ab"]),
        (["\u00e9\U0001f600x"], 2, ["\u00e9\U0001f600"]),
    ],
)
def test_text_is_cut_at_exactly_n_characters(parts: list[str], chars: int, wanted: list[str]) -> None:
    assert cut(texts(*parts), chars) == wanted
    assert sum(map(len, wanted)) == min(chars, sum(map(len, parts)))


def test_cut_keeps_media_and_json() -> None:
    state = [{"kind": "text", "data": "abc"}, {"kind": "image", "data": "x.png"}, {"kind": "text", "data": {"k": 1}}]
    record = simple("r", state=[*state, {"kind": "audio", "data": "x.wav"}])
    assert cut(record, 100) == ["abc", "x.png", {"k": 1}, "x.wav"]
    assert cut(record, 7) == ["abc", "x.png", '{"k"', "x.wav"], "JSON counts as its text"
    assert cut(record, 2) == ["ab", "x.png", "x.wav"], "media take no characters and are never cut"


def wide(num: int, target: Mapping[int, float] | None = None, y: int = 0, name: str = "w") -> Record:
    """A record with a choice of `num` options, a score and a noul."""
    asked = {**CHOICE, "criteria": {f"option {i}": f"meaning {i}" for i in range(num)}}
    soft = [(target or {y: 1.0}).get(i, 0.0) for i in range(num)]
    return simple(name, qs=[asked, SCORE, NOUL], targets=[soft, [0.2, 0.3, 0.5], [0.25, 0.75]], ys=[y, 2, 1])


def options(record: Record) -> list[str]:
    return list(record.qs[0]["criteria"])


def masses(record: Record) -> dict[str, float]:
    return {name: p for name, p in zip(options(record), record.targets[0], strict=True) if p > 0}


@pytest.mark.parametrize("draw", [f"0/{epoch}" for epoch in range(10)])
def test_gold_options_are_kept_and_y_names_the_same_option(draw: str) -> None:
    record = wide(77, {3: 0.5, 40: 0.25, 76: 0.25}, y=40)
    capped = cap_record(record, 100, 32, draw)
    assert len(options(capped)) == len(set(options(capped))) == len(capped.targets[0]) == 32
    assert masses(capped) == {"option 3": 0.5, "option 40": 0.25, "option 76": 0.25}
    assert options(capped)[capped.ys[0]] == "option 40"
    assert all(text == record.qs[0]["criteria"][name] for name, text in capped.qs[0]["criteria"].items())
    assert (capped.qs[0]["type"], capped.qs[0]["instructions"], capped.qs[0].get("name")) == ("choice", "Which team?", "team")


def test_soft_mass_is_renormalised_over_the_heaviest() -> None:
    record = wide(6, {0: 0.05, 1: 0.1, 2: 0.15, 3: 0.2, 4: 0.25, 5: 0.25}, y=1)
    capped = cap_record(record, 100, 3, "0/0")
    assert masses(capped) == pytest.approx({"option 1": 0.1 / 0.6, "option 4": 0.25 / 0.6, "option 5": 0.25 / 0.6})
    assert options(capped)[capped.ys[0]] == "option 1", "the answer stays, however light"
    assert sum(capped.targets[0]) == pytest.approx(1, abs=1e-15)


def test_answer_without_mass_is_kept() -> None:
    capped = cap_record(wide(10, {2: 0.5, 3: 0.5}, y=7), 100, 2, "0/0")
    assert options(capped)[capped.ys[0]] == "option 7" and len(options(capped)) == 2
    assert masses(capped) in ({"option 2": 1.0}, {"option 3": 1.0})


def test_subset_is_a_function_of_seed_epoch_and_id() -> None:
    def drawn(draw: str, name: str = "w") -> list[str]:
        return options(cap_record(wide(77, name=name), 100, 32, draw))

    random.seed(5)
    before = random.getstate()
    first = drawn("0/0")
    assert random.getstate() == before, "the global generator is left alone"
    random.random()
    assert drawn("0/0") == first
    others = [drawn("0/1"), drawn("1/0"), drawn("0/0", "another"), drawn("0/11")]
    assert all(set(other) != set(first) for other in others)
    seen = Counter(name for epoch in range(300) for name in drawn(f"0/{epoch}"))
    assert len(seen) == 77 and seen["option 0"] == 300
    chance = [seen[f"option {i}"] / 300 for i in range(1, 77)]
    assert min(chance) > 0.25 and max(chance) < 0.58, "31 of 76, each as likely as the other"


def test_order_of_a_choice_is_drawn_anew_and_score_and_noul_keep_theirs() -> None:
    record = wide(4, {1: 0.75, 2: 0.25}, y=1)
    orders = set()
    for epoch in range(40):
        capped = cap_record(record, 100, 32, f"0/{epoch}")
        orders.add(tuple(options(capped)))
        assert capped.qs[1:] == record.qs[1:] and capped.targets[1:] == record.targets[1:] and capped.ys[1:] == record.ys[1:]
        assert masses(capped) == {"option 1": 0.75, "option 2": 0.25} and options(capped)[capped.ys[0]] == "option 1"
    assert len(orders) > 12, "of 24"
    assert cap_record(record, 100, 2, None) == record, "without a draw nothing but the text is cut"


def test_score_is_not_capped() -> None:
    levels = {**SCORE, "criteria": [f"level {i}" for i in range(10)]}
    record = simple("s", qs=[levels], ys=[9])
    assert cap_record(record, 100, 2, "0/0") == record


def test_cap_leaves_the_given_record_alone() -> None:
    record = wide(77, {5: 0.5, 6: 0.5}, y=5)
    before = json.dumps(dataclasses.asdict(record))
    cap_record(record, 1, 2, "0/0")
    assert json.dumps(dataclasses.asdict(record)) == before
