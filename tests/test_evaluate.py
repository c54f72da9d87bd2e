"""Evaluation against numbers computed by hand, and its promise to change nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import perturbed_model

from colabtrain.config import SubnetConfig, TrainConfig
from colabtrain.elastic.evaluate import Outcome, baselines, evaluate, grouped, outcome, priors, summary
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev
from colabtrain.records import Record, load_records

pytestmark = pytest.mark.colab

CHOICE = {"type": "choice", "name": "team", "instructions": "Which team?", "criteria": {"a": None, "b": None, "c": None}}
NOUL = {"type": "noul", "name": "even", "instructions": "Is it even?"}


def records(*targets: Sequence[float], question: dict[str, Any] = CHOICE, **changes: Any) -> list[Record]:
    """One record a target; the answer is its top option."""
    raw = {"task": "demo", "state": [{"kind": "text", "data": "x"}], "qs": [question], **changes}
    return load_records([{**raw, "id": f"r-{i}", "targets": [list(target)]} for i, target in enumerate(targets)])


def answered(accuracy: float, confidence: float, nll: float = 0.0, brier: float = 0.0, kind: str = "choice", name: str = "t/q") -> Outcome:
    return Outcome(kind, name, accuracy, nll, brier, confidence)


def test_outcome_by_hand() -> None:
    (record,) = records([0.25, 0.75, 0.0])
    found = outcome(record, 0, [0.5, 0.25, 0.25])
    assert (found.kind, found.question, found.accuracy, found.confidence) == ("choice", "demo/team", 0.0, 0.5)
    assert found.nll == pytest.approx(-0.25 * math.log(0.5) - 0.75 * math.log(0.25), rel=1e-12)
    assert found.brier == pytest.approx(0.25**2 + 0.5**2 + 0.25**2, rel=1e-12)
    assert outcome(record, 0, [0.2, 0.6, 0.2]).accuracy == 1.0


def test_accuracy_goes_by_ys_not_by_the_target() -> None:
    (record,) = load_records([{"state": [{"kind": "text", "data": "x"}], "qs": [CHOICE], "targets": [[0.25, 0.75, 0.0]], "ys": [0]}])
    assert outcome(record, 0, [0.6, 0.3, 0.1]).accuracy == 1.0
    assert outcome(record, 0, [0.3, 0.6, 0.1]).accuracy == 0.0


def test_impossible_answer_has_a_finite_nll() -> None:
    (record,) = records([0.0, 1.0, 0.0])
    assert outcome(record, 0, [1.0, 0.0, 0.0]).nll == pytest.approx(-math.log(1e-9))
    assert outcome(record, 0, [0.0, 1.0, 0.0]).nll == 0.0
    assert outcome(record, 0, [1.0, 0.0, 0.0]).brier == 2.0


def test_summary_by_hand() -> None:
    outcomes = [answered(1.0, 0.5, nll=0.5, brier=0.25), answered(0.0, 0.9, nll=2.0, brier=1.5), answered(1.0, 0.9, nll=0.25, brier=0.5)]
    found = summary(outcomes)
    assert found["n"] == 3
    assert found["accuracy"] == pytest.approx(2 / 3) and found["nll"] == pytest.approx(2.75 / 3) and found["brier"] == pytest.approx(0.75)
    assert found["ece"] == pytest.approx((abs(1 - 0.5) + abs(1 - 1.8)) / 3)


@pytest.mark.parametrize(
    ("outcomes", "ece"),
    [
        ([(1.0, 1.0)], 0.0),
        ([(0.0, 1.0)], 1.0),
        ([(1.0, 0.8), (0.0, 0.8)], 0.3),
        ([(1.0, 0.75), (1.0, 0.75), (1.0, 0.75), (0.0, 0.75)], 0.0),  # three of four at 75 %
        ([(1.0, 0.61), (0.0, 0.65)], 0.13),  # one bin, 9/15 to 10/15: |1 - 1.26| / 2
        ([(1.0, 0.59), (0.0, 0.65)], 0.53),  # two bins: (0.41 + 0.65) / 2
        ([(1.0, 0.99), (0.0, 1.0)], 0.495),  # certainty belongs to the last bin
    ],
)
def test_ece_by_hand(outcomes: list[tuple[float, float]], ece: float) -> None:
    assert summary([answered(*pair) for pair in outcomes])["ece"] == pytest.approx(ece)


def test_grouped_by_type_and_by_question() -> None:
    outcomes = [answered(1.0, 0.5, name="t/a"), answered(0.0, 0.5, name="t/b"), answered(1.0, 0.5, kind="noul", name="t/c")]
    found = grouped(outcomes)
    assert found["overall"] == summary(outcomes)
    assert found["by_type"] == {"choice": summary(outcomes[:2]), "noul": summary(outcomes[2:])}
    assert found["by_question"] == {f"t/{name}": summary([o]) for name, o in zip("abc", outcomes, strict=True)}


def test_baselines_by_hand() -> None:
    known = priors(records([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.25, 0.25]))
    held_out = records([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    found = {name: results["overall"] for name, results in baselines(held_out, known).items()}
    p = [0.625, 0.3125, 0.0625]
    assert found["prior"]["n"] == 2
    assert found["prior"]["accuracy"] == 0.5
    assert found["prior"]["nll"] == pytest.approx(-(math.log(p[0]) + math.log(p[1])) / 2)
    brier = ((1 - p[0]) ** 2 + p[1] ** 2 + p[2] ** 2 + p[0] ** 2 + (1 - p[1]) ** 2 + p[2] ** 2) / 2
    assert found["prior"]["brier"] == pytest.approx(brier)
    assert found["prior"]["ece"] == pytest.approx(abs(0.5 - p[0]))
    assert found["majority"] == pytest.approx({"n": 2, "accuracy": 0.5, "nll": -math.log(1e-9) / 2, "brier": 1.0, "ece": 0.5})
    assert found["uniform"]["accuracy"] == pytest.approx(1 / 3) and found["uniform"]["nll"] == pytest.approx(math.log(3))
    assert found["uniform"]["brier"] == pytest.approx(4 / 9 + 1 / 9 + 1 / 9)


def test_majority_is_the_most_frequent_answer_not_the_heaviest_mean() -> None:
    known = priors(records([0.51, 0.49, 0.0], [0.51, 0.49, 0.0], [0.0, 1.0, 0.0]))  # answers a a b; mean 0.34, 0.66
    found = baselines(records([1.0, 0.0, 0.0]), known)
    assert found["majority"]["overall"]["accuracy"] == 1.0 and found["prior"]["overall"]["accuracy"] == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"task": "another"},
        {"question": {**CHOICE, "name": "crew"}},
        {"question": {**CHOICE, "criteria": {"a": None, "b": None, "d": None}}},
    ],
    ids=["task", "name", "options"],
)
def test_unseen_question_is_guessed_uniformly(change: dict[str, Any]) -> None:
    known = priors(records([0.0, 0.0, 1.0]))
    found = baselines(records([0.0, 0.0, 1.0], **change), known)
    assert found["prior"] == found["uniform"]
    assert found["prior"]["overall"]["nll"] == pytest.approx(math.log(3))
    assert found["prior"]["overall"]["accuracy"] == pytest.approx(1 / 3), "all alike: a coin toss"
    assert baselines(records([0.0, 0.0, 1.0]), known)["prior"]["overall"]["accuracy"] == 1.0, "the same question is known"


def test_baselines_know_nothing_of_held_out_targets() -> None:
    known = priors(records([1.0, 0.0, 0.0]))
    before = repr(known)
    baselines(records([0.0, 1.0, 0.0]), known)
    assert repr(known) == before


@pytest.fixture(scope="module")
def trained() -> MMJev:
    return perturbed_model()


def test_evaluate_counts_every_question_once(trained: MMJev) -> None:
    held_out = [*help_desk(13, seed=3), *records([0.5, 0.5], question=NOUL, id=..., task="other")]
    results = evaluate(trained, held_out, trained.default_subnets(), TrainConfig(batch_size=1))
    assert list(results) == ["full", "fast"]
    for found in results.values():
        assert found["overall"]["n"] == 3 * 13 + 1
        assert {name: group["n"] for name, group in found["by_type"].items()} == {"choice": 13, "noul": 14, "score": 13}
        assert sum(group["n"] for group in found["by_question"].values()) == 40
        for measure in ("accuracy", "nll", "brier"):
            mean = sum(group["n"] * group[measure] for group in found["by_type"].values()) / 40
            assert found["overall"][measure] == pytest.approx(mean)
            assert math.isfinite(mean)
        assert 0 <= found["overall"]["accuracy"] <= 1 and 0 <= found["overall"]["ece"] <= 1 and 0 <= found["overall"]["brier"] <= 2
    assert results["full"]["overall"]["nll"] != results["fast"]["overall"]["nll"]


def test_evaluate_agrees_with_the_model_record_by_record(trained: MMJev) -> None:
    held_out = help_desk(9, seed=4)
    subnets = trained.default_subnets()
    results = evaluate(trained, held_out, subnets, TrainConfig(batch_size=2, token_budget=300))
    for name, fc in subnets.items():
        outcomes: list[Outcome] = []
        with torch.no_grad():
            for record in held_out:
                plan = trained.plan(trained.encode_state(record.state, fc), record.qs, fc)
                (logits,) = trained.run(trained.pack([plan]), fc)
                outcomes += [outcome(record, i, torch.softmax(row.double(), -1).tolist()) for i, row in enumerate(logits)]
        wanted = grouped(outcomes)
        assert results[name]["overall"] == pytest.approx(wanted["overall"], abs=1e-4)
        for question, values in wanted["by_question"].items():
            assert results[name]["by_question"][question] == pytest.approx(values, abs=1e-4)


def test_evaluate_cuts_text_but_shows_all_options(trained: MMJev) -> None:
    wide = {"type": "choice", "instructions": "Which?", "criteria": {f"option {i}": None for i in range(40)}}
    long, short = (
        load_records([{"id": "w", "state": [{"kind": "text", "data": text}], "qs": [wide], "ys": [39]}])
        for text in ("ab " * 999, "ab " * 10)
    )
    config, subnets = TrainConfig(max_state_chars=30, max_options=2), {"full": SubnetConfig(exit_layer=6)}
    found = evaluate(trained, long, subnets, config)
    assert found == evaluate(trained, short, subnets, config)
    assert found != evaluate(trained, long, subnets, TrainConfig(max_options=2))
    assert found["full"]["overall"]["nll"] > math.log(2) / 10 and found["full"]["overall"]["brier"] > 0


def test_evaluate_leaves_everything_as_it_was(trained: MMJev) -> None:
    trained.train()
    weights = {name: parameter.detach().clone() for name, parameter in trained.state_dict(keep_vars=True).items()}
    needs_grad = {name: parameter.requires_grad for name, parameter in trained.named_parameters()}
    modes = {name: module.training for name, module in trained.named_modules()}
    torch.manual_seed(11)
    rng = torch.get_rng_state()
    first = evaluate(trained, help_desk(6), trained.default_subnets(), TrainConfig())
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(weights[name], parameter) for name, parameter in trained.state_dict().items())
    assert {name: module.training for name, module in trained.named_modules()} == modes
    assert {name: parameter.requires_grad for name, parameter in trained.named_parameters()} == needs_grad
    assert all(parameter.grad is None for parameter in trained.parameters())
    assert torch.is_grad_enabled()
    trained.eval()
    assert evaluate(trained, help_desk(6), trained.default_subnets(), TrainConfig()) == first, "no dropout in either mode"
