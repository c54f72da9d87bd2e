"""Batches: every record once an epoch, within the limits, from the seed alone; and records as tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from colabtrain.config import RunConfig, SubnetConfig, TrainConfig
from colabtrain.elastic.batches import CHUNK_BATCHES, MASKED, Schedule, build, capped, estimated_length, fill
from colabtrain.elastic.objective import logit_matrix
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev.model import MMJev
from colabtrain.records import Record, Selection, load_records

pytestmark = pytest.mark.colab


def random_lengths(num: int, seed: int = 0, highest: int = 400) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, highest) for _ in range(num)]


def simple(name: str, *qs: dict[str, Any], text: str = "hello there") -> Record:
    raw = {"id": name, "task": "demo", "state": [{"kind": "text", "data": text}], "qs": list(qs), "ys": [0] * len(qs)}
    (record,) = load_records([raw])
    return record


def choice(num: int, words: int = 1) -> dict[str, Any]:
    """A choice whose options differ in length."""
    criteria = {f"option {i}": " ".join(["word"] * (1 + i % 5 * words)) for i in range(num)}
    return {"type": "choice", "instructions": "Which one?", "criteria": criteria}


SCORE: dict[str, Any] = {"type": "score", "instructions": "How large?", "criteria": [f"level number {i} of all" for i in range(10)]}
NOUL: dict[str, Any] = {"type": "noul", "instructions": "Is it even?"}


@pytest.fixture(scope="module")
def model() -> MMJev:
    return MMJev.tiny()


# The schedule


@pytest.mark.parametrize(
    ("num", "batch_size", "budget"),
    [(1, 4, 6000), (4, 4, 6000), (257, 4, 6000), (1000, 3, 500), (600, 1, 100), (50, 64, 10**9), (300, 8, 1)],
)
def test_every_record_once_an_epoch_within_the_limits(num: int, batch_size: int, budget: int) -> None:
    lengths = random_lengths(num)
    schedule = Schedule(lengths, batch_size, budget, seed=0)
    for epoch in range(3):
        batches = schedule.batches(epoch)
        assert sorted(index for batch in batches for index in batch) == list(range(num))
        for batch in batches:
            assert 1 <= len(batch) <= batch_size
            assert len(batch) == 1 or sum(lengths[index] for index in batch) <= budget


def test_without_a_budget_batches_are_full() -> None:
    sizes = [len(batch) for batch in Schedule(random_lengths(1003), 4, 10**9, seed=1).batches(0)]
    assert len(sizes) == 251 and sorted(sizes)[:2] == [3, 4]


def test_longer_record_alone() -> None:
    lengths = [10, 7000, 10, 6001, 6000, 10]
    batches = Schedule(lengths, 4, 6000, seed=0).batches(0)
    assert {tuple(sorted(batch)) for batch in batches} == {(0, 2, 5), (1,), (3,), (4,)}


def test_similar_lengths_go_together_within_a_chunk() -> None:
    lengths = random_lengths(CHUNK_BATCHES * 4)
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    spreads = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in Schedule(lengths, 4, 10**9, 0).batches(0)]
    neighbours = [lengths[by_length[i + 3]] - lengths[by_length[i]] for i in range(0, len(lengths), 4)]
    assert sorted(spreads) == sorted(neighbours)


def test_schedule_is_a_function_of_the_seed() -> None:
    lengths = random_lengths(500)
    random.seed(3)
    before = random.getstate()
    first = [Schedule(lengths, 4, 900, seed=7).batches(epoch) for epoch in range(3)]
    assert random.getstate() == before, "the global generator is left alone"
    random.random()
    torch.rand(1)
    again = Schedule(lengths, 4, 900, seed=7)
    assert [again.batches(epoch) for epoch in (2, 0, 1)] == [first[2], first[0], first[1]]
    assert Schedule(lengths, 4, 900, seed=8).batches(0) != first[0]


def test_epochs_differ_in_order_and_in_company() -> None:
    schedule = Schedule(random_lengths(500), 4, 10**9, seed=0)
    epochs = [schedule.batches(epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    groups = [{frozenset(batch) for batch in batches} for batches in epochs]
    assert len(groups[0] & groups[1]) < len(groups[0]) / 2
    one_chunk = Schedule(random_lengths(200), 4, 10**9, seed=0)
    totals = [sum(one_chunk.lengths[i] for i in batch) for batch in one_chunk.batches(0)]
    assert totals != sorted(totals), "batches are shuffled, short ones do not come first"


@pytest.mark.parametrize("budget", [10**9, 700])
def test_locate_agrees_with_num_steps(budget: int) -> None:
    schedule = Schedule(random_lengths(700, seed=2), 4, budget, seed=0)
    ends = [schedule.num_steps(epochs) for epochs in range(4)]
    assert ends[0] == 0 and all(start < end for start, end in itertools.pairwise(ends))
    for epoch in range(3):
        located = [schedule.locate(step) for step in range(ends[epoch], ends[epoch + 1])]
        assert {found for found, _ in located} == {epoch}
        assert [indices for _, indices in located] == schedule.batches(epoch)
    assert schedule.locate(ends[3])[0] == 3


def test_epochs_may_differ_in_length_and_are_still_located() -> None:
    """Where the budget binds, the chunks of another epoch fill another number of batches."""
    schedule = Schedule(random_lengths(700, seed=2), 4, 700, seed=0)
    lengths = [schedule.num_steps(epoch + 1) - schedule.num_steps(epoch) for epoch in range(6)]
    assert len(set(lengths)) > 1, "else the test before proves less than it says"


def test_locate_is_independent_of_the_order_of_calls() -> None:
    lengths = random_lengths(300, seed=4)
    schedule = Schedule(lengths, 4, 700, seed=5)
    forward = [schedule.locate(step) for step in range(schedule.num_steps(3))]
    steps = list(range(len(forward)))
    random.Random(0).shuffle(steps)
    jumping = Schedule(lengths, 4, 700, seed=5)
    assert all(jumping.locate(step) == forward[step] for step in steps)
    last = Schedule(lengths, 4, 700, seed=5).locate(len(forward) - 1)
    assert last == forward[-1], "a resumed run asks for a late step first"


@pytest.mark.parametrize(
    ("lengths", "size", "budget", "wanted"),
    [
        ([], 2, 10, []),
        ([5, 5, 5], 2, 10, [[0, 1], [2]]),
        ([5, 6, 5], 3, 10, [[0], [1], [2]]),
        ([4, 4, 2, 1], 9, 10, [[0, 1, 2], [3]]),
        ([99, 1, 1], 9, 10, [[0], [1, 2]]),
        ([1, 99, 1], 9, 10, [[0], [1], [2]]),
    ],
)
def test_fill(lengths: list[int], size: int, budget: int, wanted: list[list[int]]) -> None:
    assert fill(range(len(lengths)), lengths, size, budget) == wanted


# Lengths


def test_estimated_length_by_hand() -> None:
    state = [{"kind": "text", "data": "x" * 41}, *({"kind": kind, "data": "f"} for kind in ("image", "video", "audio"))]
    (record,) = load_records([{"state": state, "qs": [choice(5), SCORE, NOUL], "ys": [0, 0, 0]}])
    assert estimated_length(record) == 10 + 64 + 150 + 60 + (30 + 12 * 5) + (30 + 12 * 10) + (30 + 12 * 2)


def exact_length(model: MMJev, record: Record, subnets: Sequence[SubnetConfig]) -> int:
    return max(len(model.plan(model.encode_state(record.state, fc), record.qs, fc)) for fc in subnets)


def scheduled_lengths(records: Sequence[Record], config: TrainConfig) -> list[int]:
    """What the schedule is made from."""
    task = ElasticTask(MMJev.tiny(), Selection(list(records), [], [], "test"), config, RunConfig(steps=1))
    task.prepare()
    return task.schedule.lengths


@pytest.mark.parametrize("max_options", [2, 5, 9, 32, 76])
def test_planned_length_bounds_every_epoch(model: MMJev, max_options: int) -> None:
    """With a wide choice, and beside it a score: a score's levels are never cut, whatever max_options is."""
    records = [
        simple("wide", choice(77)),
        simple("wide and narrow", choice(77, words=4), choice(3), NOUL),
        simple("wide and score", choice(77), SCORE, NOUL),
        simple("score", SCORE),
        simple("long text", choice(40), text="word " * 1000),
    ]
    config = TrainConfig(max_options=max_options)
    subnets = list(model.default_subnets().values())
    for record, planned in zip(records, scheduled_lengths(records, config), strict=True):
        lengths = [exact_length(model, capped(record, config, epoch), subnets) for epoch in range(8)]
        assert max(lengths) <= planned, record.id
        assert planned <= exact_length(model, record, subnets)


def test_planned_length_is_exact_below_the_cap_and_where_options_are_equally_long(model: MMJev) -> None:
    even = {**choice(77), "criteria": {f"option {i}": None for i in range(77)}}
    records = [simple("below", choice(32), SCORE, NOUL), simple("at", choice(5), NOUL), simple("noul", NOUL), simple("even", even)]
    config = TrainConfig()
    subnets = list(model.default_subnets().values())
    planned = scheduled_lengths(records, config)
    for epoch in range(3):
        assert [exact_length(model, capped(record, config, epoch), subnets) for record in records] == planned
    assert planned[3] < exact_length(model, records[3], subnets)


def test_planned_length_counts_the_most_latents() -> None:
    soft = torch.randn(7, 128, generator=torch.Generator().manual_seed(0))
    (record,) = load_records([{"state": [{"kind": "image", "data": soft}], "qs": [NOUL], "ys": [0]}])
    subnets = {"full": SubnetConfig(n_latents=2, exit_layer=6), "fast": SubnetConfig(n_latents=8, exit_layer=3)}
    (planned,) = scheduled_lengths([record], TrainConfig(subnets=subnets))
    (text_only,) = scheduled_lengths([simple("t", NOUL, text="")], TrainConfig())
    assert planned == text_only + 7 + 8


# Tensors


def test_batch_reads_the_right_scores(model: MMJev) -> None:
    records = [simple("a", choice(3), NOUL), simple("b", SCORE), simple("c", NOUL, choice(2))]
    batch = build(model, records, model.default_subnets())
    scores = torch.arange(1.0, 3 + 1 + 10 + 1 + 2 + 1)
    logits = logit_matrix(scores, batch.option_index)
    wanted = [[1, 2, 3], [0, 4], list(range(5, 15)), [0, 15], [16, 17]]
    assert batch.num_questions == 5 and logits.shape == (5, 10)
    for row, values in zip(logits.tolist(), wanted, strict=True):
        assert row == [float(value) for value in values] + [pytest.approx(MASKED)] * (10 - len(values))
    assert batch.is_score.tolist() == [False, False, True, False, False]
    flat = [target for record in records for target in record.targets]
    assert [row[: len(t)] for row, t in zip(batch.targets.tolist(), flat, strict=True)] == [list(t) for t in flat]
    assert torch.equal(batch.targets.sum(dim=1), torch.ones(5))


def test_batch_agrees_with_the_model_question_by_question(model: MMJev) -> None:
    records = [simple("a", choice(3), NOUL), simple("b", SCORE, text="another text"), simple("c", NOUL, choice(2))]
    subnets = model.default_subnets()
    batch = build(model, records, subnets)
    assert list(batch.packed) == [8], "one row for all sub-networks that have as many latents"
    with torch.no_grad():
        for fc in subnets.values():
            logits = logit_matrix(model.scores(batch.packed[8], fc), batch.option_index)
            singly = [question for record in records for question in model.run(build(model, [record], {"x": fc}).packed[8], fc)[0]]
            for row, question in zip(logits, singly, strict=True):
                assert torch.allclose(row[: len(question)], question, atol=1e-4)


def test_batch_packs_once_for_each_number_of_latents(model: MMJev) -> None:
    subnets = {"a": SubnetConfig(2, 6), "b": SubnetConfig(8, 3), "c": SubnetConfig(2, 3)}
    soft = torch.randn(7, 128, generator=torch.Generator().manual_seed(0))
    (record,) = load_records([{"state": [{"kind": "image", "data": soft}], "qs": [NOUL], "ys": [0]}])
    batch = build(model, [record], subnets)
    assert sorted(batch.packed) == [2, 8]
    assert batch.packed[8].num_tokens - batch.packed[2].num_tokens == 6
