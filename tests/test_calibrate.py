"""Temperatures against a dense grid and against known ones; what a calibration says, and that it changes nothing."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
import torch
from helpers import perturbed_model

from colabtrain.config import SubnetConfig, TrainConfig
from colabtrain.elastic import objective
from colabtrain.elastic.batches import build
from colabtrain.elastic.calibrate import HIGHEST, LOWEST, Item, bucket, calibrate, fit, fit_by_type, golden_section, temperature
from colabtrain.elastic.evaluate import Outcome, summary
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev
from colabtrain.records import Record, load_records
from colabtrain.records.caps import cap_record


def drawn(num: int, num_options: int, true_t: float, kind: str = "choice", seed: int = 0, soft: bool = False) -> list[Item]:
    """Questions whose answers are drawn from softmax(logits / true_t); soft: with that distribution as target."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num, num_options, generator=generator, dtype=torch.float64)
    p = torch.softmax(logits / true_t, -1)
    answers = torch.nn.functional.one_hot(torch.multinomial(p, 1, generator=generator)[:, 0], num_options).double()
    return [(kind, num_options, row.tolist(), target.tolist()) for row, target in zip(logits, p if soft else answers, strict=True)]


def nll(items: list[Item], t: float) -> float:
    """From the definition, question by question."""
    total = 0.0
    for _, _, logits, target in items:
        peak = max(logits) / t
        norm = peak + math.log(sum(math.exp(z / t - peak) for z in logits))
        total -= sum(p * (z / t - norm) for p, z in zip(target, logits, strict=True))
    return total / len(items)


def on_a_grid(items: list[Item]) -> float:
    """The best T of a dense grid in log T, refined once: steps of 0.0002."""
    grid = [math.exp(math.log(LOWEST) + k * 0.02) for k in range(round(math.log(HIGHEST / LOWEST) / 0.02) + 1)]
    coarse = min(grid, key=lambda t: nll(items, t))
    return min((coarse * math.exp(k * 2e-4) for k in range(-100, 101)), key=lambda t: nll(items, t))


@pytest.mark.parametrize(("num_options", "true_t", "soft"), [(2, 0.4, True), (4, 1.0, False), (7, 2.5, False), (12, 6.0, True)])
def test_a_dense_grid_finds_the_same_temperature(num_options: int, true_t: float, soft: bool) -> None:
    items = drawn(60, num_options, true_t, soft=soft)
    found = fit(items)["buckets"][f"choice/{bucket(num_options)}"]
    assert abs(math.log(found["temperature"] / on_a_grid(items))) < 1e-3
    assert found["nll_before"] == pytest.approx(nll(items, 1.0), rel=1e-12)
    assert found["nll_after"] == pytest.approx(nll(items, found["temperature"]), rel=1e-12)
    assert found["nll_after"] <= found["nll_before"] and (found["source"], found["edge"], found["n"]) == ("bucket", "", 60)


@pytest.mark.parametrize("true_t", [0.3, 0.8, 1.7, 5.0])
def test_a_known_temperature_is_recovered(true_t: float) -> None:
    exact = fit(drawn(200, 5, true_t, soft=True))["buckets"]["choice/3-5"]
    assert exact["temperature"] == pytest.approx(true_t, rel=1e-5)
    sampled = fit(drawn(20_000, 5, true_t))["buckets"]["choice/3-5"]
    assert sampled["temperature"] == pytest.approx(true_t, rel=0.04)
    assert sampled["ece_after"] < 0.02 < sampled["ece_before"]


def test_ragged_questions_are_fitted_together_by_type() -> None:
    items = [*drawn(50, 3, 2.0, seed=1), *drawn(50, 9, 2.0, seed=2), *drawn(50, 2, 0.5, "noul", seed=3)]
    found = fit_by_type(items)
    assert list(found) == ["choice", "noul"] and [one["n"] for one in found.values()] == [100, 50]
    for kind, one in found.items():
        group = [item for item in items if item[0] == kind]
        assert abs(math.log(one["temperature"] / on_a_grid(group))) < 1e-3
        assert one["nll_after"] == pytest.approx(nll(group, one["temperature"]), rel=1e-12), "padding takes no probability"
    assert fit(items)["types"] == found


def test_the_order_of_options_and_of_questions_is_irrelevant() -> None:
    items, rng = drawn(80, 6, 2.0), random.Random(0)
    shuffled = []
    for kind, n, logits, target in items:
        order = rng.sample(range(n), n)
        shuffled.append((kind, n, [logits[k] for k in order], [target[k] for k in order]))
    rng.shuffle(shuffled)
    one, other = fit(items)["buckets"]["choice/6-10"], fit(shuffled)["buckets"]["choice/6-10"]
    for name in ("temperature", "nll_before", "nll_after", "ece_before", "ece_after"):
        assert one[name] == pytest.approx(other[name], rel=1e-6), name  # type: ignore[literal-required]


def test_each_bucket_has_its_own_temperature() -> None:
    sizes = {2: ("2", 0.5), 5: ("3-5", 1.0), 6: ("6-10", 2.0), 11: ("11-30", 3.0), 31: ("31+", 4.0)}
    found = fit([item for n, (_, t) in sizes.items() for item in drawn(30, n, t, soft=True)])
    assert {name: one["temperature"] for name, one in found["buckets"].items()} == pytest.approx(
        {f"choice/{name}": t for name, t in sizes.values()}, rel=1e-4
    )
    for n, (_, t) in sizes.items():
        assert temperature(found, "choice", n) == pytest.approx(t, rel=1e-4)
    assert found["notes"] == []


@pytest.mark.parametrize(
    ("num_options", "name"),
    [(2, "2"), (3, "3-5"), (5, "3-5"), (6, "6-10"), (10, "6-10"), (11, "11-30"), (30, "11-30"), (31, "31+"), (255, "31+")],
)
def test_buckets(num_options: int, name: str) -> None:
    assert bucket(num_options) == name


def test_too_few_questions_fall_back_and_it_is_said() -> None:
    items = [*drawn(20, 3, 2.0, soft=True), *drawn(19, 8, 2.0, soft=True), *drawn(19, 2, 3.0, "noul")]
    found = fit(items)
    assert found["buckets"]["choice/3-5"]["source"] == "bucket"
    few, none = found["buckets"]["choice/6-10"], found["buckets"]["noul/2"]
    assert (few["source"], few["temperature"], few["n"]) == ("type", found["types"]["choice"]["temperature"], 19)
    assert few["nll_after"] == pytest.approx(nll(items[20:39], few["temperature"])) and few["nll_after"] < few["nll_before"]
    assert (none["source"], none["temperature"]) == ("none", 1.0) and none["nll_after"] == none["nll_before"]
    assert found["types"]["noul"]["source"] == "none"
    assert found["notes"] == [
        "choice/6-10: 19 questions are fewer than 20: it takes its type's temperature",
        "noul/2: 19 questions are fewer than 20: it takes temperature 1, for its type has too few as well",
    ]


def test_look_up_falls_back_too() -> None:
    found = fit([*drawn(30, 3, 2.0, soft=True), *drawn(30, 3, 4.0, "score", soft=True)])
    assert temperature(found, "choice", 200) == found["types"]["choice"]["temperature"] == pytest.approx(2.0, rel=1e-4)
    assert temperature(found, "noul", 2) == 1.0
    assert temperature(json.loads(json.dumps(found)), "score", 4) == temperature(found, "score", 4) == pytest.approx(4.0, rel=1e-4)


@pytest.mark.parametrize(
    ("right", "logit", "edge", "t"),
    [(True, 1.0, "low", LOWEST), (False, 1.0, "high", HIGHEST), (True, 0.0, "", 1.0), (True, 1e4, "", 1.0), (False, 1e4, "high", HIGHEST)],
    ids=["always right", "always wrong", "no opinion", "certain and right", "certain and wrong"],
)
def test_an_optimum_at_an_edge_is_reported(right: bool, logit: float, edge: str, t: float) -> None:
    items: list[Item] = [("choice", 3, [logit, 0.0, 0.0], [1.0, 0.0, 0.0] if right else [0.0, 1.0, 0.0])] * 20
    found = fit(items)
    one = found["buckets"]["choice/3-5"]
    assert (one["edge"], one["temperature"]) == (edge, t)
    assert found["notes"] == (
        [f"choice/3-5: T = {t:g} is an edge of the search; the logits say little about probabilities"] if edge else []
    )


def test_ece_is_that_of_the_evaluation() -> None:
    items = drawn(50, 4, 2.0)
    one = fit(items)["types"]["choice"]
    outcomes = []
    for _, _, logits, target in items:
        p = torch.softmax(torch.tensor(logits, dtype=torch.float64), -1)
        outcomes.append(Outcome("choice", "q", target[int(p.argmax())], 0.0, 0.0, float(p.max())))
    assert one["ece_before"] == pytest.approx(summary(outcomes)["ece"], rel=1e-12)


def test_overall_is_the_mean_over_questions_each_at_its_own_temperature() -> None:
    items = [*drawn(40, 3, 3.0), *drawn(60, 12, 0.5)]
    found = fit(items)
    parts = list(found["buckets"].values())
    for name in ("nll_before", "nll_after"):
        assert found["overall"][name] == pytest.approx(sum(p["n"] * p[name] for p in parts) / 100, rel=1e-12)  # type: ignore[literal-required]
    assert found["overall"]["n"] == 100 and found["overall"]["ece_after"] < found["overall"]["ece_before"]


def test_nothing_to_calibrate_on_is_an_error() -> None:
    for nothing in ([], [("choice", 1, [2.0], [1.0])] * 30):
        with pytest.raises(ValueError, match=r"no questions .* to calibrate on"):
            fit(nothing)
        with pytest.raises(ValueError, match=r"no questions .* to calibrate on"):
            fit_by_type(nothing)


def test_odd_items_are_refused_by_name() -> None:
    good = drawn(1, 3, 1.0)
    with pytest.raises(ValueError, match=r"item 1 \(choice, 3 options\) has logits \[1.0, nan, 0.0\], which are not all finite"):
        fit([*good, ("choice", 3, [1.0, math.nan, 0.0], [1.0, 0.0, 0.0])])
    with pytest.raises(ValueError, match=r"item 1 \(noul, 2 options\) has 3 logits and 2 target probabilities"):
        fit([*good, ("noul", 2, [1.0, 2.0, 0.0], [1.0, 0.0])])
    assert fit([*good, ("choice", 1, [2.0], [1.0])])["overall"]["n"] == 1, "one option leaves nothing to calibrate"


@pytest.mark.parametrize("place", [-2.0, 0.3, 1.0])
def test_golden_section(place: float) -> None:
    assert golden_section(lambda x: abs(x - place), -2.0, 1.0) == pytest.approx(place, abs=1e-7)


# With a model


@pytest.fixture(scope="module")
def trained() -> MMJev:
    return perturbed_model()


def wide(num_options: int) -> Record:
    question = {"type": "choice", "instructions": "Which?", "criteria": {f"option {i}": None for i in range(num_options)}}
    (record,) = load_records([{"id": "w", "state": [{"kind": "text", "data": "ab " * 99}], "qs": [question], "ys": [num_options - 1]}])
    return record


@pytest.mark.colab
def test_calibrate_fits_the_models_own_logits(trained: MMJev) -> None:
    records, subnets, config = help_desk(24, seed=3), trained.default_subnets(), TrainConfig(batch_size=2, token_budget=300)
    found = calibrate(trained, records, subnets, config)
    assert list(found) == ["full", "fast"] and found["full"] != found["fast"]
    for name, fc in subnets.items():
        items: list[Item] = []
        for record in records:
            plan = trained.plan(trained.encode_state(record.state, fc), record.qs, fc)
            with torch.no_grad():
                ((*rows,),) = trained.run(trained.pack([plan]), fc)
            items += [(q["type"], len(t), row.tolist(), t) for q, t, row in zip(record.qs, record.targets, rows, strict=True)]
        wanted = fit(items)
        for group, one in found[name]["types"].items():
            assert one["n"] == 24 and one["temperature"] == pytest.approx(wanted["types"][group]["temperature"], rel=1e-3)
            assert one["nll_before"] == pytest.approx(wanted["types"][group]["nll_before"], rel=1e-4)
        assert found[name]["overall"]["nll_after"] <= found[name]["overall"]["nll_before"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.colab
def test_calibration_records_are_capped_with_a_fixed_draw(trained: MMJev) -> None:
    subnets, config = {"full": SubnetConfig(exit_layer=6)}, TrainConfig(max_options=7, max_state_chars=20, seed=5)
    record = wide(40)
    (report,) = calibrate(trained, [record], subnets, config).values()
    assert list(report["buckets"]) == ["choice/6-10"]
    capped = cap_record(record, 20, 7, "5/calibration")
    with torch.no_grad():
        batch = build(trained, [capped], subnets)
        logits = objective.logit_matrix(trained.scores(batch.packed[8], subnets["full"]), batch.option_index)
    assert report["overall"]["nll_before"] == pytest.approx(nll([("choice", 7, logits[0].tolist(), capped.targets[0])], 1.0), rel=1e-6)
    assert calibrate(trained, [record], subnets, config) == {"full": report}


@pytest.mark.colab
@pytest.mark.parametrize("fails", [False, True])
def test_calibrate_leaves_everything_as_it_was(trained: MMJev, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trained.train()
    trained.heads.eval()  # no pattern that train() or eval() would make
    modes = {name: module.training for name, module in trained.named_modules()}
    weights = {name: value.clone() for name, value in trained.state_dict().items()}
    torch.manual_seed(11)
    random.seed(11)
    states = torch.get_rng_state(), random.getstate()
    seen: list[bool] = []

    def scores(*args: Any, **kwargs: Any) -> Any:
        seen.extend([torch.is_grad_enabled(), *(module.training for module in trained.modules())])
        if fails:
            raise RuntimeError("no memory")
        return MMJev.scores(trained, *args, **kwargs)

    monkeypatch.setattr(trained, "scores", scores)
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            calibrate(trained, help_desk(4), trained.default_subnets(), TrainConfig())
    else:
        calibrate(trained, help_desk(4), trained.default_subnets(), TrainConfig())
    assert seen and not any(seen), "eval mode and no gradients all the while"
    assert {name: module.training for name, module in trained.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert all(itertools.starmap(torch.equal, zip(weights.values(), trained.state_dict().values(), strict=True)))
    assert all(parameter.grad is None for parameter in trained.parameters()) and torch.is_grad_enabled()
    trained.eval()


def test_no_records_is_an_error(trained: MMJev) -> None:
    with pytest.raises(ValueError, match="no calibration records; raise calibration_share"):
        calibrate(trained, [], trained.default_subnets(), TrainConfig())
