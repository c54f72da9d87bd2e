"""Mixed precision: float16 products in a float32 residual stream, where plain float16 overflows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colabtrain.mmjev import backbone, lora, tiny
from colabtrain.mmjev.lora import elastic_linear
from colabtrain.mmjev.model import MMJev
from colabtrain.records.schema import Question, Seg

pytestmark = pytest.mark.colab

HALF_MAX = 65504.0
QUESTIONS = [
    Question(type="choice", instructions="which colour is it", criteria={"red": None, "dark green": "as grass", "blue": None}),
    Question(type="noul", instructions="is it large", criteria=None),
]


def model(scaled: dict[str, float]) -> MMJev:
    """A tiny model with adapters that do something; scaled: factor of the base's weights whose name has the key in it."""
    lm, words = tiny.language_model(0), tiny.HashedWords()
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            for part, factor in scaled.items():
                parameter.mul_(factor if part in name else 1.0)
    jev = MMJev(lm, lm, words, 1, 2, "scaled")
    jev.configure(jev.default_subnets(), 4, 8.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in jev.trainable().items():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.05 if "lora" in name else 1.0))
    return jev


def base_to(jev: MMJev, dtype: torch.dtype) -> MMJev:
    for parameter in jev.base.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return jev


def scores_and_gradients(jev: MMJev, subnet: str) -> tuple[Tensor, Tensor]:
    """Both flat; the gradient of a loss scaled as a GradScaler does at its start."""
    fc = jev.default_subnets()[subnet]
    row = jev.pack([jev.plan(jev.encode_state([Seg("text", f"a state with a few words in it, {i}")], fc), QUESTIONS, fc) for i in range(2)])
    scores = jev.scores(row, fc, (0.1, 0, 0))
    ((scores * torch.linspace(-1, 1, len(scores))).mean() * 2**16).backward()
    return scores.detach(), torch.cat([p.grad.flatten() for p in jev.trainable().values() if p.grad is not None]) / 2**16


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


CASES = {"altup": {"embed_tokens.": 15000.0}, "mlp": {"gate_proj": 300.0, "up_proj": 300.0}}


@pytest.mark.parametrize("subnet", ["full", "fast"])
@pytest.mark.parametrize("case", CASES)
def test_mixed_is_right_where_float16_overflows(case: str, subnet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, gradient = scores_and_gradients(model(CASES[case]), subnet)
    plain, _ = scores_and_gradients(base_to(model(CASES[case]), torch.float16), subnet)
    assert not bool(plain.isfinite().all())
    bfloat, bfloat_gradient = scores_and_gradients(base_to(model(CASES[case]), torch.bfloat16), subnet)

    largest = list[float]()
    magnitude = backbone.expand_altup if case == "altup" else lora._scaled
    watched = "colabtrain.mmjev.backbone.expand_altup" if case == "altup" else "colabtrain.mmjev.lora._scaled"

    def watch(*arguments: Any) -> Tensor:
        largest.append(max(float(a.abs().max()) for a in arguments if isinstance(a, Tensor)))
        return magnitude(*arguments)

    monkeypatch.setattr(watched, watch)
    mixed, mixed_gradient = scores_and_gradients(model(CASES[case]).to_mixed_precision(), subnet)
    assert max(largest) > HALF_MAX
    assert mixed.dtype is torch.float32
    assert error(mixed, exact) < 0.01 and error(mixed_gradient, gradient) < 0.04
    assert error(mixed, exact) < error(bfloat, exact) / 3 and error(mixed_gradient, gradient) < error(bfloat_gradient, gradient) / 3


def test_what_is_narrow_and_what_is_not() -> None:
    jev = model({}).to_mixed_precision()
    assert jev.matmul_dtype is torch.float16
    narrow = {name.split(".")[-2] for name, p in jev.lm.named_parameters() if p.dtype is torch.float16}
    assert narrow - {"base_layer"} == {"embed_tokens", "embed_tokens_per_layer", "gate_proj", "up_proj", "down_proj"}
    assert all(p.dtype is torch.float16 for name, p in jev.lm.named_parameters() if "base_layer" in name)
    others = [p for name, p in jev.named_parameters() if p.dtype is not torch.float16]
    assert {p.dtype for p in others} == {torch.float32} and {id(p) for p in jev.trainable().values()} <= {id(p) for p in others}
    assert (model({}).matmul_dtype, base_to(model({}), torch.bfloat16).matmul_dtype) == (torch.float32, torch.bfloat16)


def test_recomputed_layers_have_the_same_gradient() -> None:
    gradients = list[Tensor]()
    for layers in (frozenset[int](), frozenset(range(6))):
        jev = model(CASES["mlp"]).to_mixed_precision()
        jev.checkpoint_layers = layers
        gradients.append(scores_and_gradients(jev, "full")[1])
    assert torch.equal(*gradients)


def test_the_scale_is_an_exact_power_of_two() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-45, 3e-45], [3e38, -1.0], [65536.0, 131071.0], [-0.75, 0.1], [torch.inf, 1.0], [torch.nan, 1.0]])
    scale = lora._token_scale(x)
    finite = scale[:5]
    assert bool((finite.log2() == finite.log2().round()).all())
    assert float((x[:5] / finite).abs().max()) < 2.0
    assert torch.equal(x[:5] / finite * finite, x[:5])
    assert finite[3:, 0].tolist() == [65536.0, 0.5]
    assert not bool((x[5:] / scale[5:]).isfinite().all(dim=-1).any())  # what is not finite stays so


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_dtype_is_one_product(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where input and weight agree nothing is scaled or cast."""
    monkeypatch.delattr(lora, "_token_scale")
    linear, x = nn.Linear(8, 6, bias=False, dtype=dtype), torch.randn(1, 5, 8).to(dtype)
    assert torch.equal(elastic_linear(linear, x, rows=4), F.linear(x, linear.weight[:4]))


@torch.no_grad()
def test_a_bias_and_a_slice_in_mixed_precision() -> None:
    linear, x = nn.Linear(8, 6), 1e6 * torch.randn(1, 5, 8)
    expected = F.linear(x[..., :4], linear.weight[:3, :4], linear.bias[:3])
    linear.weight.data = linear.weight.data.half()
    found = elastic_linear(linear, x[..., :4], rows=3, cols=4)
    assert found.dtype is torch.float32 and error(found, expected) < 1e-3


def test_per_layer_rows_are_looked_up_where_the_table_is() -> None:
    asked = list[torch.device]()

    def rows(ids: Tensor) -> Tensor:
        asked.append(ids.device)
        return torch.ones(1, 3, 2, 4, dtype=torch.float16)

    weight = torch.empty(9, 8, device="meta")  # a device that is not the row's
    lm = SimpleNamespace(embed_tokens_per_layer=SimpleNamespace(weight=weight), get_per_layer_inputs=rows)
    found = backbone._per_layer_rows(lm, SimpleNamespace(ids=torch.arange(3), host_ids=torch.arange(3)), torch.zeros(1))
    assert asked == [torch.device("meta")] and found.device == torch.device("cpu") and found.dtype is torch.float32


def test_a_run_may_go_on_in_the_precision_of_another_card() -> None:
    """A T4 today, an L4 tomorrow: the fingerprint is the model's, not the precision's."""
    model = MMJev.tiny(0)
    model.lm.to(torch.bfloat16)
    rounded = model.fingerprint()
    model.lm.float()
    assert model.to_mixed_precision().fingerprint() == rounded  # published weights are bf16: both cards start from these
    assert MMJev.tiny(1).fingerprint()["weights"] != MMJev.tiny(0).fingerprint()["weights"]
