"""The matrix objective against a plain loop over questions, and the step built on it."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colabtrain.config import SubnetConfig, TrainConfig
from colabtrain.elastic import objective
from colabtrain.elastic.batches import MASKED, build
from colabtrain.elastic.optimizer import Optimizer, rate_factor
from colabtrain.elastic.step import accumulate, split
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev
from colabtrain.records.schema import Question, Record, Seg

pytestmark = pytest.mark.colab

CONFIG = TrainConfig(lr_lora=1e-3, lr_heads=1e-3, rps_weight=0.3)


def ragged(num_questions: int, seed: int) -> tuple[list[int], list[str], list[Tensor]]:
    """Branches, types and targets (soft, one-hot, and with exact zeros) of questions with 1 to 32 options."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes, kinds, targets = [], [], []
    for i in range(num_questions):
        kind = rng.choice(["choice", "score", "noul"])
        n = 1 if kind == "noul" else rng.randrange(2, 33) if kind == "choice" else rng.randrange(2, 11)
        options = 2 if kind == "noul" else n
        soft = torch.softmax(2 * torch.randn(options, generator=generator), -1)
        target = soft if i % 3 == 0 else F.one_hot(torch.tensor(rng.randrange(options)), options).float()
        sizes.append(n)
        kinds.append(kind)
        targets.append(target)
    return sizes, kinds, targets


def loop_loss(scores: Tensor, teacher: Tensor, sizes: list[int], kinds: list[str], targets: list[Tensor]) -> Tensor:
    """Question by question, written from the definition."""
    total, at = torch.zeros(()), 0
    for n, kind, target in zip(sizes, kinds, targets, strict=True):
        logits, teacher_logits = scores[at : at + n], teacher[at : at + n].detach()
        at += n
        if kind == "noul":
            logits, teacher_logits = torch.cat([torch.zeros(1), logits]), torch.cat([torch.zeros(1), teacher_logits])
        p = torch.softmax(logits, -1)
        total = total - (target * torch.log_softmax(logits, -1)).sum() + CONFIG.brier_weight * ((p - target) ** 2).sum()
        if kind == "score":
            total = total + CONFIG.rps_weight * ((p.cumsum(-1) - target.cumsum(-1)) ** 2).sum()
        q = torch.softmax(teacher_logits, -1)
        total = total + CONFIG.kl_weight * F.kl_div(torch.log_softmax(logits, -1), q, reduction="sum")
    return total / len(sizes)


def matrix_loss(scores: Tensor, teacher: Tensor, sizes: list[int], kinds: list[str], targets: list[Tensor]) -> Tensor:
    index = torch.full((len(sizes), max(len(t) for t in targets)), len(scores) + 1)
    target = torch.zeros(index.shape)
    at = 0
    for row, (n, kind, t) in enumerate(zip(sizes, kinds, targets, strict=True)):
        index[row, : len(t)] = torch.tensor(([len(scores)] if kind == "noul" else []) + list(range(at, at + n)))
        target[row, : len(t)] = t
        at += n
    is_score = torch.tensor([kind == "score" for kind in kinds])
    logits = objective.logit_matrix(scores, index)
    parts = objective.decision_parts(logits, target, is_score, with_rps=True)
    parts["kl"] = objective.distillation(logits, objective.logit_matrix(teacher, index))
    return objective.total(parts, CONFIG).mean()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1.0, 30.0])  # at 30 most options have probability 0 in fp32
def test_matrices_equal_the_loop_over_questions(seed: int, scale: float) -> None:
    sizes, kinds, targets = ragged(60, seed)
    generator = torch.Generator().manual_seed(100 + seed)
    scores = (scale * torch.randn(sum(sizes), generator=generator)).requires_grad_()
    teacher = (scale * torch.randn(sum(sizes), generator=generator)).requires_grad_()
    mine, reference = (loss(scores, teacher, sizes, kinds, targets) for loss in (matrix_loss, loop_loss))
    torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)
    (my_gradient,), (gradient,) = torch.autograd.grad(mine, scores, retain_graph=True), torch.autograd.grad(reference, scores)
    torch.testing.assert_close(my_gradient, gradient, rtol=0, atol=1e-6)
    assert torch.autograd.grad(mine, teacher, allow_unused=True) == (None,)  # the teacher learns nothing from its student


def test_absent_options_have_no_probability() -> None:
    logits = objective.logit_matrix(torch.tensor([2.0, 1.0]), torch.tensor([[0, 1, 3], [2, 1, 3]]))
    assert logits.tolist() == [[2.0, 1.0, torch.tensor(MASKED).item()], [0.0, 1.0, torch.tensor(MASKED).item()]]
    assert torch.softmax(logits, -1)[:, 2].tolist() == [0.0, 0.0]


# The batch and the step


def mixed_records() -> list[Record]:
    """Eight records of very different lengths and numbers of questions."""
    wide = Question(type="choice", instructions="which number", criteria={str(k): None for k in range(12)})
    records = help_desk(7)
    records[0] = dataclasses.replace(records[0], state=(Seg("text", "short"),))
    long = Record("t", "train", "text", (Seg("text", "word " * 300),), (wide,), (tuple(1 / 12 for _ in range(12)),), (0,), "long")
    return [*records[:4], long, *records[4:]]


def prepared(dropout: float = 0.0) -> tuple[MMJev, Optimizer, TrainConfig]:
    model = MMJev.tiny(0)
    config = TrainConfig(lr_lora=1e-3, lr_heads=1e-3, lora_dropout=dropout)
    model.configure(model.default_subnets(), config.lora_r, config.lora_alpha)
    model.reset_trainable(0)
    with torch.no_grad():
        for adapter in model.adapters.values():  # B = 0 would hide A's gradient
            adapter.lora_B.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    return model, Optimizer(model.trainable(), config, fp16=False), config


def test_batch_matrices_match_the_per_question_logits() -> None:
    model, _, _ = prepared()
    subnets, records = model.default_subnets(), mixed_records()
    batch = build(model, records, subnets)
    with torch.no_grad():
        packed = batch.packed[8]
        matrix = objective.logit_matrix(model.scores(packed, subnets["full"]), batch.option_index)
        listed = [logits for record in model.run(packed, subnets["full"]) for logits in record]
    assert batch.num_questions == len(listed) == 7 * 3 + 1
    for row, target, logits in zip(matrix, batch.targets, listed, strict=True):
        torch.testing.assert_close(row[: len(logits)], logits)
        assert bool((row[len(logits) :] == MASKED).all()) and bool((target[len(logits) :] == 0).all())
        torch.testing.assert_close(target.sum(), torch.tensor(1.0))


def first_step(full: list[Tensor], fast: list[Tensor], targets: list[Tensor]) -> Tensor:
    """The first implementation's loss of one step, question by question, over Q questions of a batch:

    1/Q sum_q [ CE(t, z_full) + 0.1 |p_full - t|^2 ]
    + 1/Q sum_q [ CE(t, z_fast) + 0.1 |p_fast - t|^2 + 0.5 KL(stop-grad p_full || p_fast) ]
    """
    total = torch.zeros((), dtype=full[0].dtype)
    for z_full, z_fast, t in zip(full, fast, targets, strict=True):
        for z in (z_full, z_fast):
            total = total - (t * F.log_softmax(z, -1)).sum() + 0.1 * ((F.softmax(z, -1) - t) ** 2).sum()
        p_full = F.softmax(z_full, -1).detach()
        total = total + 0.5 * F.kl_div(F.log_softmax(z_fast, -1), p_full, reduction="sum")
    return total / len(targets)


def test_the_step_on_given_logits_equals_the_first_implementation_s() -> None:
    """Loss, and gradient with respect to every logit of both sub-networks, to 1e-6."""
    _, kinds, targets = ragged(40, 11)
    generator = torch.Generator().manual_seed(12)
    logits = [[(3 * torch.randn(len(t), generator=generator)).requires_grad_() for t in targets] for _ in range(2)]
    reference = first_step(logits[0], logits[1], targets)
    wanted = torch.autograd.grad(reference, [*logits[0], *logits[1]])

    index = torch.full((len(targets), max(map(len, targets))), sum(map(len, targets)) + 1)
    matrix, at = torch.zeros(index.shape), 0
    for row, t in enumerate(targets):
        index[row, : len(t)] = torch.arange(at, at + len(t))
        matrix[row, : len(t)] = t
        at += len(t)
    is_score = torch.tensor([kind == "score" for kind in kinds])
    config, (full, fast) = TrainConfig(), (objective.logit_matrix(torch.cat(flat), index) for flat in logits)
    parts = [objective.decision_parts(z, matrix, is_score) for z in (full, fast)]
    parts[1]["kl"] = objective.distillation(fast, full)
    mine = sum(objective.total(each, config).sum() / len(targets) for each in parts)
    assert isinstance(mine, Tensor)
    assert abs(float((mine - reference).detach())) < 1e-6
    for a, b in zip(torch.autograd.grad(mine, [*logits[0], *logits[1]]), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_whole_step_has_the_first_implementation_s_loss_and_gradient() -> None:
    """accumulate() on packed rows against the loop over model.run()'s questions, in fp64: every trained parameter."""
    model, optimizer, config = prepared()
    model.to(torch.float64)
    losses, _ = add_gradient(model, optimizer, config, 0)
    mine = {name: p.grad.clone() for name, p in model.trainable().items() if p.grad is not None}
    optimizer.abandon()
    records, subnets = mixed_records(), model.default_subnets()
    targets = [torch.tensor(t, dtype=torch.float64) for record in records for t in record.targets]
    packed = build(model, records, subnets).packed[8]
    full, fast = ([z for record in model.run(packed, subnets[name]) for z in record] for name in ("full", "fast"))
    reference = first_step(full, fast, targets)
    reference.backward()
    assert abs(float(losses["full"]["total"] + losses["fast"]["total"] - reference.detach())) < 1e-6
    wanted = {name: p.grad for name, p in model.trainable().items() if p.grad is not None}
    assert relative_error(mine, wanted) < 1e-6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_distillation_at_a_temperature_is_hinton_s(temperature: float) -> None:
    logits, teacher = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mine = objective.distillation(logits, teacher, temperature)
    p, log_p = F.softmax(teacher / temperature, -1), F.log_softmax(logits / temperature, -1)
    torch.testing.assert_close(mine, temperature**2 * F.kl_div(log_p, p, reduction="none").sum(-1))


def losses_of(dropout: float = 0.3, **options: Any) -> dict[str, dict[str, Tensor]]:
    model, optimizer, config = prepared(dropout)
    return add_gradient(model, optimizer, dataclasses.replace(config, **options), 5)[0]


def test_the_teacher_is_the_same_pass_or_one_without_dropout_or_none() -> None:
    same, without, none = (losses_of(teacher=teacher) for teacher in ("train", "eval", "none"))
    assert set(none["fast"]) == {"log", "brier", "total"} and "kl" in same["fast"]
    for part in ("log", "brier"):
        assert torch.equal(same["fast"][part], without["fast"][part]) and torch.equal(same["full"][part], none["full"][part])
    assert not torch.equal(same["fast"]["kl"], without["fast"]["kl"])
    quiet = [losses_of(dropout=0.0, teacher=teacher) for teacher in ("train", "eval")]
    assert torch.equal(quiet[0]["fast"]["kl"], quiet[1]["fast"]["kl"])  # without dropout the two are one


def test_more_than_two_sub_networks_learn_from_the_first() -> None:
    model, optimizer, config = prepared()
    subnets = {**model.default_subnets(), "tiny": SubnetConfig(exit_layer=2, media_exit=1, sibling_from=1, ffn_width=64)}
    model.configure(subnets, config.lora_r, config.lora_alpha)
    records = mixed_records()
    losses, _ = accumulate(model, optimizer, split(records, 1), sum(len(r.qs) for r in records), subnets, config, 0)
    assert set(losses) == {"full", "fast", "tiny"} and "kl" in losses["tiny"] and "kl" not in losses["full"]


def test_a_record_is_encoded_once_a_step_for_all_sub_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, config = prepared()
    encoded: list[Any] = []
    real = MMJev.encode_state
    monkeypatch.setattr(MMJev, "encode_state", lambda self, state, fc: (encoded.append(state), real(self, state, fc))[1])
    add_gradient(model, optimizer, config, 0)
    assert len(encoded) == len(mixed_records())


def test_a_step_reads_nothing_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loss, norm or flag is turned into a number on the way: on a GPU each would stop the host."""
    from colabtrain.config import RunConfig
    from colabtrain.elastic.task import ElasticTask
    from colabtrain.records.selection import select

    train = TrainConfig(batch_size=4)
    task = ElasticTask(MMJev.tiny(0), select(help_desk(24), train), train, RunConfig(steps=2))
    task.prepare()
    task.step(0)
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        real = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, *a, _real=real, _name=name, **k: (reads.append(_name), _real(self, *a, **k))[1])
    report = task.step(1)
    monkeypatch.undo()
    assert reads == []
    assert all(isinstance(value, Tensor) for value in report.loss.values()) and isinstance(report.skipped, Tensor)


def add_gradient(model: MMJev, optimizer: Optimizer, config: TrainConfig, i: int, splits: int = 1) -> tuple[Any, int]:
    records = mixed_records()
    questions = sum(len(record.qs) for record in records)
    return accumulate(model, optimizer, split(records, splits), questions, model.default_subnets(), config, i)


def gradients(splits: int, dropout: float, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model, optimizer, config = prepared(dropout)
    model.to(dtype)
    losses, tokens = add_gradient(model, optimizer, config, 5, splits)
    found = {name: p.grad.clone() for name, p in model.trainable().items() if p.grad is not None}
    return found, {"losses": losses, "tokens": tokens}


def relative_error(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Of the whole gradient as one vector."""
    assert mine.keys() == reference.keys()
    a, b = (torch.cat([gradient.double().flatten() for gradient in gradients.values()]) for gradients in (mine, reference))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 5e-6)])  # norms are fp32 in both
def test_a_batch_in_parts_has_the_gradient_of_the_whole(dtype: torch.dtype, tolerance: float, dropout: float) -> None:
    whole, report = gradients(1, dropout, dtype)
    assert len(whole) > 60
    for splits in (2, 4, 8):
        parts, other = gradients(splits, dropout, dtype)
        assert other["tokens"] == report["tokens"]
        assert relative_error(parts, whole) < tolerance
        for name, losses in report["losses"].items():
            torch.testing.assert_close(other["losses"][name], losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", [range(6), (0, 3)])
def test_layer_checkpointing_changes_no_gradient(layers: Any) -> None:
    plain, _ = gradients(1, 0.3)
    model, optimizer, config = prepared(0.3)
    model.checkpoint_layers = frozenset(layers)
    add_gradient(model, optimizer, config, 5)
    assert relative_error({name: p.grad for name, p in model.trainable().items() if p.grad is not None}, plain) < 1e-6


def test_the_step_neither_reads_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    first, _ = gradients(1, 0.3)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second, _ = gradients(1, 0.3)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_gradient_is_the_same_to_the_last_bit_each_time_with_many_threads() -> None:
    """No index with repeats lies on the way of a gradient: its backward adds in whatever order the threads come."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, _ = gradients(1, 0.3)
        for _ in range(8):
            again, _ = gradients(1, 0.3)
            assert all(torch.equal(first[name], again[name]) for name in first)
    finally:
        torch.set_num_threads(threads)


def test_a_cell_under_inference_mode_leaves_nothing_that_stops_training() -> None:
    from colabtrain.mmjev import backbone

    backbone._cutoff.cache_clear()
    model, _, _ = prepared()
    with torch.inference_mode():
        model.scores(build(model, mixed_records(), model.default_subnets()).packed[8], model.default_subnets()["full"])
    assert len(gradients(1, 0.0)[0]) > 60


def test_only_what_is_trained_gets_a_gradient_and_the_base_never_moves() -> None:
    model, optimizer, config = prepared()
    frozen = {name: p.clone() for name, p in model.lm.named_parameters() if "lora_" not in name}
    add_gradient(model, optimizer, config, 0)
    optimizer.step({"lora": 1e-2, "heads": 1e-2})
    for name, parameter in model.lm.named_parameters():
        if "lora_" not in name:
            assert parameter.grad is None and torch.equal(parameter, frozen[name]), name


# Optimizer


def test_rate_is_a_pure_function_of_the_step() -> None:
    factors = [rate_factor(i, 1000, None) for i in range(1000)]
    assert factors[0] == pytest.approx(1 / 50) and factors[49] == max(factors)
    assert all(b < a for a, b in pairwise(factors[49:]))
    assert factors[-1] < 1e-5
    assert factors[500] == pytest.approx(0.5)
    assert rate_factor(0, 10, None) == 1.0  # warm-up of max(1, 5 %) steps
    assert rate_factor(0, 10, 0) == 1.0
    assert rate_factor(4, 5, 500) > 0.0  # a warm-up longer than the run is a slow run, not an error


@pytest.mark.parametrize(("clip", "expected"), [("group", {"lora", "heads"}), ("joint", {"all"})])
def test_clip_bounds_each_group_or_all(clip: str, expected: set[str]) -> None:
    parameters = {"a.lora_A": torch.nn.Parameter(torch.zeros(4)), "heads.6.weight": torch.nn.Parameter(torch.zeros(4))}
    config = TrainConfig(lr_lora=1.0, lr_heads=1.0, clip=clip, clip_norm=1.0)
    optimizer = Optimizer(parameters, config, fp16=False)
    parameters["a.lora_A"].grad, parameters["heads.6.weight"].grad = torch.full((4,), 0.1), torch.full((4,), 50.0)
    kept: dict[str, Tensor] = {}
    optimizer.adamw.register_step_pre_hook(lambda *_: kept.update({name: p.grad.clone() for name, p in parameters.items()}))
    norms, skipped = optimizer.step({"lora": 1.0, "heads": 1.0})
    assert not skipped
    assert set(norms) == expected
    lora = float(kept["a.lora_A"].norm())
    assert lora == pytest.approx(0.2) if clip == "group" else lora < 0.01  # a large head gradient starves LoRA only when joint
    assert float(kept["heads.6.weight"].norm()) == pytest.approx(1.0, abs=1e-3)


def test_fp16_uses_a_scaler_that_skips_an_overflow() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Optimizer({"heads.w": weight}, TrainConfig(lr_lora=1.0, lr_heads=1.0), fp16=True)
    for factor in (1.0, float("inf")):
        before, scale = weight.detach().clone(), optimizer.scaler.get_scale()
        optimizer.scaler.scale((weight * factor).sum()).backward()
        optimizer.step({"heads": 0.1})
        assert torch.equal(before, weight) is (factor != 1.0)
        assert optimizer.scaler.get_scale() == (scale if factor == 1.0 else scale / 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_a_gradient_that_is_not_finite_is_not_taken(bad: float) -> None:
    model, optimizer, config = prepared()
    for i in range(2):
        add_gradient(model, optimizer, config, i)
        _, skipped = optimizer.step({"lora": 1e-3, "heads": 1e-3})
        assert not skipped
    before = {name: tensor.clone() for name, tensor in (*model.trainable().items(), *optimizer.tensors().items())}
    add_gradient(model, optimizer, config, 2)
    gradient = model.trainable()["layers.3.mlp.up_proj.lora_A"].grad
    assert gradient is not None
    gradient[0, 0] = bad
    _, skipped = optimizer.step({"lora": 1e-3, "heads": 1e-3})
    assert bool(skipped)
    for name, tensor in (*model.trainable().items(), *optimizer.tensors().items()):
        assert torch.equal(before[name], tensor), name


def test_optimizer_state_round_trip_is_exact() -> None:
    model, optimizer, config = prepared(0.1)
    other, copy, _ = prepared(0.1)
    for i in range(3):
        add_gradient(model, optimizer, config, i)
        optimizer.step({"lora": 1e-3, "heads": 1e-3})
    with torch.no_grad():
        for name, parameter in other.trainable().items():
            parameter.copy_(model.trainable()[name])
    copy.load({name: tensor.clone() for name, tensor in optimizer.tensors().items()}, optimizer.meta())
    for m, o in ((model, optimizer), (other, copy)):
        add_gradient(m, o, config, 3)
        o.step({"lora": 1e-3, "heads": 1e-3})
    assert all(torch.equal(p, other.trainable()[name]) for name, p in model.trainable().items())


@pytest.mark.parametrize("wrong", ["missing", "all of it missing", "extra", "shape"])
def test_optimizer_load_is_strict(wrong: str) -> None:
    model, optimizer, config = prepared()
    add_gradient(model, optimizer, config, 0)
    optimizer.step({"lora": 1e-3, "heads": 1e-3})
    tensors = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    key = "heads.6.weight.exp_avg"
    if wrong == "missing":
        del tensors[key]
    elif wrong == "all of it missing":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("heads.6.weight")}
    elif wrong == "extra":
        tensors["heads.99.weight.exp_avg"] = tensors[key]
    else:
        tensors[key] = tensors[key][:, :3]
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    with pytest.raises(ValueError, match=r"heads\.(6|99)\.weight"):
        optimizer.load(tensors, optimizer.meta())
    assert all(torch.equal(before[name], tensor) for name, tensor in optimizer.tensors().items())  # nothing was taken over
