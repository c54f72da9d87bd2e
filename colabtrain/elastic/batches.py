"""Which records make up logical step i, from the seed alone; and those records as tensors.

An epoch is a shuffle of the records cut into chunks of 64 batches; within a chunk records of similar length go
together, at most batch_size records and token_budget tokens a batch; then the batches are shuffled. Every epoch has
its own order from (seed, epoch), so a resumed run needs no saved position but the step.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colabtrain.config import SubnetConfig, TrainConfig
from colabtrain.records.caps import cap_record
from colabtrain.records.schema import Question, Record

CHUNK_BATCHES = 64
MASKED = -1e30  # the logit of an option that is not there; finite, so that 0 * logit is 0


class Schedule:
    """The batches of every epoch, as indices into the records. lengths: tokens of each record."""

    def __init__(self, lengths: Sequence[int], batch_size: int, token_budget: int, seed: int) -> None:
        self.lengths, self.batch_size, self.token_budget, self.seed = list(lengths), batch_size, token_budget, seed
        self._first_steps = [0]  # of each epoch seen so far, and of the one after
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def num_steps(self, epochs: int) -> int:
        """Number of batches in the first `epochs` epochs; where the token budget binds, epochs may differ in length."""
        while len(self._first_steps) <= epochs:
            epoch = len(self._first_steps) - 1
            self._first_steps.append(self._first_steps[-1] + len(self.batches(epoch)))
        return self._first_steps[epochs]

    def locate(self, step: int) -> tuple[int, list[int]]:
        """(epoch, record indices) of logical step `step` (from 0)."""
        while self._first_steps[-1] <= step:
            self.num_steps(len(self._first_steps))
        epoch = bisect_right(self._first_steps, step) - 1
        return epoch, self.batches(epoch)[step - self._first_steps[epoch]]

    def batches(self, epoch: int) -> list[list[int]]:
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffled(random.Random(f"batches/{self.seed}/{epoch}")))
        return self._epoch[1]

    def _shuffled(self, rng: random.Random) -> list[list[int]]:
        order = list(range(len(self.lengths)))
        rng.shuffle(order)
        chunk = CHUNK_BATCHES * self.batch_size
        batches = [
            batch
            for start in range(0, len(order), chunk)
            for batch in fill(
                sorted(order[start : start + chunk], key=self.lengths.__getitem__), self.lengths, self.batch_size, self.token_budget
            )
        ]
        rng.shuffle(batches)
        return batches


def fill(indices: Sequence[int], lengths: Sequence[int], batch_size: int, token_budget: int) -> list[list[int]]:
    """Cut `indices` in order into batches; a record longer than the budget gets a batch of its own."""
    batches, tokens = list[list[int]](), 0
    for index in indices:
        if not batches or len(batches[-1]) == batch_size or tokens + lengths[index] > token_budget:
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += lengths[index]
    return batches


def estimated_length(record: Record) -> int:
    """Tokens of a record before anything is tokenised: chars / 4, image 64, video 150, audio 60, question 30 + 12 an option."""
    media = {"image": 64, "video": 150, "audio": 60}
    state = sum(media.get(seg.kind) or len(str(seg.data)) // 4 for seg in record.state)
    return state + sum(30 + 12 * len(target) for target in record.targets)


def plan_record(model: Any, record: Record, subnets: Mapping[str, SubnetConfig]) -> Any:
    """The plan of `record` for the sub-network that makes it longest (they differ in the number of latents)."""
    fc = max(subnets.values(), key=lambda subnet: subnet.n_latents)
    return model.plan(model.encode_state(record.state, fc), record.qs, fc)


def planned_length(plan: Any, questions: Sequence[Question], max_options: int) -> int:
    """Tokens of a plan; a choice with more options counts with its `max_options` longest branches."""
    wide = {i for i, question in enumerate(questions) if question["type"] == "choice" and plan.branches[i] > max_options}
    lengths: dict[int, dict[int, int]] = {}
    for question, option in zip(plan.question, plan.option, strict=True):
        if question in wide and option >= 0:
            options = lengths.setdefault(question, {})
            options[option] = options.get(option, 0) + 1
    dropped = [sum(sorted(options.values(), reverse=True)[max_options:]) for options in lengths.values()]
    return len(plan) - sum(dropped)


@dataclass
class Batch:
    """One batch (or part of one). packed: by number of latents, shared by all sub-networks that have it.

    Over Q questions with at most K options: option_index [Q, K] points into the flat scores, followed by a 0 and a
    MASKED; targets [Q, K] (0 where there is no option); is_score [Q].
    """

    packed: Mapping[int, Any]
    option_index: Tensor
    targets: Tensor
    is_score: Tensor
    num_tokens: int

    @property
    def num_questions(self) -> int:
        return len(self.is_score)


def build(model: Any, records: Sequence[Record], subnets: Mapping[str, SubnetConfig], first_slot: int = 0) -> Batch:
    """Plan and pack `records` once for each number of latents among `subnets`. first_slot: see MMJev.pack."""
    packed: dict[int, Any] = {}
    for fc in subnets.values():
        if fc.n_latents not in packed:
            plans = [model.plan(model.encode_state(record.state, fc), record.qs, fc) for record in records]
            packed[fc.n_latents] = model.pack(plans, first_slot)
    first = next(iter(packed.values()))
    questions = [(target, question["type"]) for record in records for target, question in zip(record.targets, record.qs, strict=True)]
    branches = [branch for record in first.segments for branch in record]
    num_scores, num_options = sum(n for n, _ in branches), max(len(target) for target, _ in questions)
    index = torch.full((len(questions), num_options), num_scores + 1)
    targets = torch.zeros(len(questions), num_options, dtype=torch.float32)
    read = 0
    for row, ((target, _), (n, is_noul)) in enumerate(zip(questions, branches, strict=True)):
        scores = list(range(read, read + n))
        index[row, : len(target)] = torch.tensor([num_scores, *scores] if is_noul else scores)
        targets[row, : len(target)] = torch.tensor(target, dtype=torch.float32)
        read += n
    is_score = torch.tensor([kind == "score" for _, kind in questions])
    device = first.device
    return Batch(packed, index.to(device), targets.to(device), is_score.to(device), first.num_tokens)


def capped(record: Record, config: TrainConfig, epoch: int) -> Record:
    """`record` as it is trained on in `epoch`."""
    return cap_record(record, config.max_state_chars, config.max_options, f"{config.seed}/{epoch}")
