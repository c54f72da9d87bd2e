"""The snake game's records are recognised by their board, and nothing else is."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from colabtrain.config import TrainConfig
from colabtrain.records import Record, Seg, load_records, select
from colabtrain.records.schema import to_record
from colabtrain.records.selection import PREDICATES
from colabtrain.records.snake import is_snake_game

GAME = {"board": {"width": 8, "height": 8}, "snake": [[3, 4], [3, 5], [2, 5]], "food": [6, 1], "direction": "up", "score": 2}
MOVE = {"type": "choice", "instructions": "Which way should it turn?", "criteria": {"left": None, "right": None, "straight": None}}
TEXTUAL = "Board:\n. . . .\n. S S .\n. . . F\nSnake: (1, 1), (2, 1)\nFood: (3, 2)\nDirection: left"


def record(*state: Any, question: dict[str, Any] = MOVE, **fields: Any) -> Record:
    segments = [seg if isinstance(seg, Seg) else {"kind": "text", "data": seg} for seg in state]
    return to_record({"task": "mine", "state": segments, "qs": [question], "ys": [0], **fields}, "here")


GAMES = {
    "spaced": json.dumps(GAME),
    "compact": json.dumps(GAME, separators=(",", ":")),
    "indented": json.dumps(GAME, indent=2),
    "data": GAME,
    "data in data": {"state": {"game": GAME}},
    "JSON in JSON": {"state": json.dumps(GAME)},
    "Python's notation": str(GAME),
    "in a sentence": f"You play a game. The state is {json.dumps(GAME)} and it is your turn.",
    "upper case": json.dumps(GAME).upper(),
    "mappings": '{"snake": [{"x": 3, "y": 4}, {"x": 3, "y": 5}], "apple": {"x": 6, "y": 1}}',
    "one level down": '{"snake":{"direction":"up","body":[[3,4],[3,5]]},"grid":[8,8]}',
    "head and body": '{"snake_head": [3, 4], "snake_body": [[3, 5]], "food_position": [1, 1]}',
    "camel case": '{"snakeBody":[[3,5]],"foodPos":[1,1]}',
    "many snakes": '{"board": {"food": [{"x": 1, "y": 1}], "snakes": [{"id": "a", "body": [{"x": 0, "y": 0}]}]}}',
    "dead": '{"snake": [], "food": [1, 1]}',
    "named": '{"game": "snake", "grid": ["....", ".SS.", "...F"], "direction": "left"}',
    "numbers": '{"game":"snake","grid":[[0,0,1],[0,0,2]],"direction":"left"}',
    "cells": '{"game": "Snake", "board": [["S", ".", "."], [".", ".", "F"]], "score": 0}',
    "drawing in JSON": '{"name":"snake","board":"..s..\\n..s..\\n....f","direction":"up"}',
    "textual": TEXTUAL,
    "numbers alone": "snake: 3,4 3,5\nfood: 6,1",
}
OTHERS = {
    "review": "The snake game was fun! Graphics: good. Score: 9/10. Snake: a classic.",
    "tweet": "just saw a snake eat an apple on the board walk lol #snake",
    "python": "Snake case: use my_name. Board: see [1, 2] for details about grid search.",
    "labels": '{"snake": 0.93, "bird": 0.01, "food": 0.02, "apple": 0.001}',
    "caption": '{"caption": "a snake on a road", "head": "triangular", "score": 0.9}',
    "zoology": "Snake: Vipera berus. Head: triangular. Food: mice, frogs. Length: 60 cm",
    "zoology in JSON": '{"snake": {"name": "adder", "facts": ["long", "thin"]}, "food": ["mice"], "head": "flat"}',
    "keypoints": '{"detections": [{"class": "snake", "head": [120, 44], "score": 0.9}]}',
    "chess": '{"board": ["rnbqkbnr", "pppppppp", "........"], "direction": "up", "score": 3, "food": [1, 1]}',
    "other game": '{"worm": [[3, 4]], "food": [1, 1], "board": [8, 8]}',
    "one key": '{"snake": [[3, 4], [3, 5]]}',
}


@pytest.mark.parametrize("name", GAMES)
def test_the_game_is_recognised(name: str) -> None:
    assert is_snake_game(record(GAMES[name]))


def test_the_question_and_the_other_segments_do_not_matter() -> None:
    for asked in ({"type": "noul", "instructions": "Is the fruit above the head?"}, {**MOVE, "instructions": {"ask": 1}}):
        assert is_snake_game(record(GAME, question=asked))
    picture = Seg("image", torch.ones(2, 4))
    assert is_snake_game(record("Your turn.", picture, "snake: [(3, 4)]", "food: (1, 1)"))


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_speaks_of_snakes_is_not_the_game(name: str) -> None:
    assert not is_snake_game(record(OTHERS[name]))


def test_a_question_about_a_snake_is_not_the_game() -> None:
    assert not is_snake_game(record("I like it here.", question={"type": "noul", "instructions": json.dumps(GAME)}))
    photo = Seg("image", "snake_food_board.png")
    assert not is_snake_game(record(photo, question={"type": "noul", "instructions": "Is a snake in the picture?"}))
    assert not is_snake_game(record(photo, "A snake on a road."))


@pytest.mark.parametrize("kind", ["text", "image", "audio", "video"])
@pytest.mark.parametrize(
    "data", [torch.ones(3, 4), b"snake: [[1, 2]] food:", object(), {1: {2}}, ["snake", None], 7, float("nan"), "", "\ud800 snake"]
)
def test_no_state_makes_it_raise(kind: str, data: Any) -> None:
    odd = Record("t", "train", kind, (Seg(kind, data), Seg("text", "x")), (), (), (), "r")
    assert is_snake_game(odd) is False
    assert is_snake_game(Record("t", "train", kind, (), (), (), (), "r")) is False


def test_long_text_takes_no_longer_than_its_length() -> None:
    """No pattern goes back over what it has read: 1 MB of near misses is a matter of a second, not of hours."""
    for near in ("snake: {" * 9, "snake " * 9, "food: [[[[" * 9, "board: .", "snakesnake", "snake: 1;x ", "snake: {a: "):
        assert is_snake_game(record((near * 1_000_000)[:1_000_000] + " snake: x, grid: y")) is False


# Selection


def mixed() -> list[Record]:
    """100 of each split, every fifth one the game's."""
    splits = ("train", "calibration", "test")
    return [record(GAME if i % 5 == 0 else f"text {i}", id=f"{split}-{i}", split=split) for split in splits for i in range(100)]


def parts(records: list[Record], config: TrainConfig, **options: Any) -> tuple[list[str], list[str], list[str]]:
    chosen = select(records, config, **options)
    return tuple([r.id for r in part] for part in (chosen.train, chosen.calibration, chosen.held_out))  # type: ignore[return-value]


@pytest.mark.colab
def test_the_game_is_dropped_on_every_path_and_counted() -> None:
    chosen = select(mixed(), TrainConfig(calibration_share=0))
    assert [len(part) for part in (chosen.train, chosen.calibration, chosen.held_out)] == [80, 80, 80]
    assert not any(is_snake_game(r) for r in (*chosen.train, *chosen.calibration, *chosen.held_out))
    assert chosen.dropped == Counter({("excluded as snake_game", "mine"): 60})
    kept = select(mixed(), TrainConfig(exclude=(), calibration_share=0))
    assert [len(part) for part in (kept.train, kept.calibration, kept.held_out)] == [100, 100, 100] and not kept.dropped


def test_the_game_is_dropped_before_the_hash_hold_out() -> None:
    records = [r for r in mixed() if r.split == "train"]
    chosen = select(records, TrainConfig(calibration_share=0.5))
    assert chosen.calibration and len(chosen.train) + len(chosen.calibration) == 80
    assert not any(is_snake_game(r) for r in chosen.train + chosen.calibration)


def test_a_predicate_of_the_persons_own() -> None:
    def odd(asked: Record) -> bool:
        return asked.id.endswith(("1", "3"))

    chosen = select(mixed(), TrainConfig(), odd)
    assert chosen.dropped == Counter({("excluded as snake_game", "mine"): 60, ("excluded as odd", "mine"): 60})
    assert not any(odd(r) or is_snake_game(r) for r in (*chosen.train, *chosen.calibration, *chosen.held_out))

    def snake_game(asked: Record) -> bool:
        return False

    assert select(mixed(), TrainConfig(), snake_game) == select(mixed(), TrainConfig()), "its name replaces nothing"


def test_a_predicate_that_raises_names_the_record() -> None:
    def broken(asked: Record) -> Any:
        return asked.id == "train-1" and torch.ones(2)

    with pytest.raises(ValueError, match=r"record 'train-1' of task 'mine': the predicate broken raised RuntimeError: Boolean value"):
        select(mixed(), TrainConfig(), broken)


def test_config_names_the_predicates_there_are() -> None:
    for name in PREDICATES:
        assert TrainConfig(exclude=(name,)).exclude == (name,)
    with pytest.raises(ValueError, match=f"it must be one of {', '.join(PREDICATES)}"):
        TrainConfig(exclude=("no such",))


@pytest.mark.colab
def test_a_split_named_calibration_joins_what_is_held_out_of_train() -> None:
    records = mixed()
    train, calibration, held_out = parts(records, TrainConfig(exclude=(), calibration_share=0))
    assert (train, calibration, held_out) == tuple([r.id for r in records if r.split == name] for name in ("train", "calibration", "test"))
    without = parts([r for r in records if r.split != "calibration"], TrainConfig(calibration_share=0.5))
    both = parts(records, TrainConfig(calibration_share=0.5))
    assert both[0] == without[0], "an explicit calibration set moves no record into training"
    assert set(both[1]) == set(without[1]) | {r.id for r in records if r.split == "calibration" and not is_snake_game(r)}


def test_calibration_alone_is_nothing_to_train_on() -> None:
    records = load_records([{"id": "c", "split": "calibration", "state": [{"kind": "text", "data": "x"}], "qs": [MOVE], "ys": [0]}])
    with pytest.raises(ValueError, match=r"splits found: \{'calibration': 1\}; dropped: none; set aside for calibration: 1"):
        select(records, TrainConfig())
