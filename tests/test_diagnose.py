"""What is broken is named, by the first place that shows it; what is healthy is left as it was."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import perturbed_model
from torch import Tensor

from colabtrain.config import SubnetConfig, TrainConfig
from colabtrain.elastic.diagnose import first_bad_module
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev
from colabtrain.records import Record, Seg

CONFIG = TrainConfig(seed=3)
HEALTHY = "not reproduced: the weights, and all outputs and gradients of this batch, are finite"


@pytest.fixture(scope="module")
def made() -> MMJev:
    return perturbed_model()


@pytest.fixture
def model(made: MMJev) -> Iterator[MMJev]:
    """The model, put right again after a test broke it."""
    kept = {name: value.clone() for name, value in made.state_dict().items()}
    yield made
    made.load_state_dict(kept)
    assert not any(module._forward_hooks for module in made.modules()), "no hook is left behind"
    assert not any(parameter._backward_hooks for parameter in made.trainable().values())


@torch.no_grad()
def broken(model: MMJev, name: str, change: Callable[[Tensor], Any]) -> None:
    change(model.get_parameter(name))


def said(model: MMJev, records: list[Record] | None = None, **options: Any) -> str:
    subnets = options.pop("subnets", model.default_subnets())
    return first_bad_module(model, help_desk(3) if records is None else records, subnets, dataclasses.replace(CONFIG, **options), 7)


@pytest.mark.colab
def test_a_healthy_model_is_not_blamed_and_not_changed(model: MMJev) -> None:
    model.train()
    model.heads.eval()  # no pattern that train() or eval() would make
    modes = {name: module.training for name, module in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    needs_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    assert said(model) == HEALTHY
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == needs_grad
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_are_there_stay_as_they_are(model: MMJev) -> None:
    kept = {name: torch.full_like(parameter, 0.5) for name, parameter in model.trainable().items()}
    for name, parameter in model.trainable().items():
        parameter.grad = kept[name]
    try:
        assert said(model) == HEALTHY
        assert all(parameter.grad is kept[name] and bool((kept[name] == 0.5).all()) for name, parameter in model.trainable().items())
    finally:
        for parameter in model.trainable().values():
            parameter.grad = None


@pytest.mark.parametrize(
    "options", [{"lora_dropout": 0.0}, {"kl_weight": 0.0, "rps_weight": 0.5}, {"subnets": {"one": SubnetConfig(exit_layer=3)}}]
)
def test_healthy_under_other_settings(model: MMJev, options: dict[str, Any]) -> None:
    with torch.no_grad():  # as a caller may have it
        assert said(model, **options) == HEALTHY
    model.checkpoint_layers = frozenset(range(6))
    try:
        assert said(model, **options) == HEALTHY
    finally:
        model.checkpoint_layers = frozenset()


@pytest.mark.colab
@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("base.layers.3.laurel.linear_left.weight", math.nan, "the frozen parameter {} is not finite (1 of 2,048 values)"),
        ("base.layers.4.mlp.up_proj.lora_B", math.inf, "the trained parameter {} is not finite (1 of 1,024 values)"),
        ("latents", -math.inf, "the trained parameter {} is not finite (1 of 1,024 values)"),
        ("heads.3.bias", math.nan, "the trained parameter {} is not finite (1 of 1 values)"),
    ],
)
def test_a_parameter_that_is_not_finite_is_named(model: MMJev, name: str, value: float, sentence: str) -> None:
    broken(model, name, lambda p: p.view(-1)[0].fill_(value))
    assert said(model) == sentence.format(name)


@pytest.mark.colab
@pytest.mark.parametrize(
    ("name", "module", "cause"),
    [
        ("base.layers.3.laurel.post_laurel_norm.weight", "base.layers.3.laurel.post_laurel_norm", ""),
        ("base.layers.1.per_layer_projection.weight", "base.layers.1.per_layer_projection", ""),
        ("base.layers.2.post_attention_layernorm.weight", "base.layers.2.post_attention_layernorm", ""),
        ("base.altup_projections.0.weight", "base.altup_projections.0", ""),
        ("base.layers.4.self_attn.o_proj.base_layer.weight", "base.layers.4.post_attention_layernorm", "before"),
        ("heads.6.weight", "heads.6", ""),
    ],
)
def test_an_overflow_is_named_where_it_first_shows(model: MMJev, name: str, module: str, cause: str) -> None:
    broken(model, name, lambda p: p.div_(p.abs().max()).mul_(3e38))
    assert torch.isfinite(model.get_parameter(name)).all(), "the weight itself is fine"
    wanted = f"the output of module {module} is the first that is not finite"
    if cause:
        wanted += ", and so is its input: the cause is the projection just before it"
    assert said(model) == f"{wanted} (sub-network 'full', record 'help_desk-0', number 1 of the batch's 3)"


def test_the_sub_network_that_fails_is_named(model: MMJev) -> None:
    broken(model, "heads.3.weight", lambda p: p.mul_(1e38))
    assert said(model) == (
        "the output of module heads.3 is the first that is not finite (sub-network 'fast', record 'help_desk-0', number 1 of the batch's 3)"
    )


def test_the_record_that_fails_is_named(model: MMJev) -> None:
    """A word that one record has, with an embedding too large to be squared."""
    records = help_desk(4)
    records[2] = dataclasses.replace(records[2], state=(Seg("text", "xylophone"),), id="music")
    broken(model, "base.embed_tokens.weight", lambda p: p[model.tokenizer.encode("xylophone")[0]].mul_(1e37))
    assert said(model, records).endswith("(sub-network 'full', record 'music', number 3 of the batch's 4)")
    assert said(model, [*records[:2], records[3]]) == HEALTHY


def test_dropout_is_the_steps_own(model: MMJev, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record is looked at with the masks it had in the batch: its slot, the seed and the step."""
    seen: list[tuple[Any, int]] = []

    def scores(packed: Any, fc: SubnetConfig, dropout: Any = None) -> Tensor:
        seen.append((dropout, int(packed.layout.record[0])))
        return MMJev.scores(model, packed, fc, dropout)

    monkeypatch.setattr(model, "scores", scores)
    assert said(model) == HEALTHY
    slots = [0, 0, 1, 1, 2, 2]
    assert seen == [((0.05, 3, 7), slot) for slot in slots + slots], "forward alone, then with the backward"


class _Poison(torch.autograd.Function):
    """Leaves a tensor as it is; its gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.inf


@pytest.mark.colab
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_gradient_alone_is_named_in_backward_order(model: MMJev, checkpointed: bool) -> None:
    """Outputs are finite, but the backward through layer 2's norm is not: layers 3 to 5 come before it and are right."""
    handle = model.get_submodule("base.layers.2.post_feedforward_layernorm").register_forward_hook(lambda m, i, y: _Poison.apply(y))
    model.checkpoint_layers = frozenset(range(6) if checkpointed else ())
    try:
        found = said(model)
    finally:
        handle.remove()
        model.checkpoint_layers = frozenset()
    assert found == (
        "all outputs are finite, but not all gradients; backwards from the loss the first bad one is that of "
        "layers.2.mlp.down_proj.lora_B, and comes from behind module base.layers.2.mlp.act_fn"
    )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_overflow_that_a_norm_hides_is_found_in_the_backward_pass(model: MMJev) -> None:
    """x / sqrt(mean(x^2)) is 0 where x^2 overflows: a finite output with a gradient that is none."""
    broken(model, "base.layers.3.laurel.linear_right.weight", lambda p: p.mul_(1e38))
    assert said(model).endswith("and comes from behind module base.layers.3.laurel.linear_right")


def test_what_fails_otherwise_leaves_no_hook(model: MMJev, monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return MMJev.scores(model, *args, **kwargs)
        raise RuntimeError("no memory")

    monkeypatch.setattr(model, "scores", scores)
    model.train()
    with pytest.raises(RuntimeError, match="no memory"):
        said(model)
    assert model.heads.training and not model.base.training
