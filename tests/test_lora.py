"""LoRA under slicing, and its stateless dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colabtrain.config import SubnetConfig
from colabtrain.mmjev.lora import Dropout, LoRALinear, elastic_linear
from colabtrain.mmjev.model import MMJev

pytestmark = pytest.mark.colab


def adapter(name: str = "layers.0.mlp.up_proj") -> LoRALinear:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(24, 40, bias=False)
    module = LoRALinear(linear, name, r=4, alpha=8.0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


@torch.no_grad()
@pytest.mark.parametrize(("rows", "cols"), [(None, None), (10, None), (None, 7), (10, 7)])
def test_a_slice_of_the_adapter_is_the_adapter_of_the_slice(rows: int | None, cols: int | None) -> None:
    module = adapter()
    x = torch.randn(2, 5, 24)[..., :cols]
    merged = module.base_layer.weight + module.scaling * module.lora_B @ module.lora_A
    torch.testing.assert_close(elastic_linear(module, x, rows=rows, cols=cols), F.linear(x, merged[:rows, :cols]), rtol=1e-4, atol=1e-4)


def masks(p: float, seed: int = 0, step: int = 3, name: str = "layers.0.a", records: int = 16, tokens: int = 100) -> Tensor:
    """[records * tokens, channels] of 0 (dropped) and 1 / (1 - p)."""
    record = torch.arange(records).repeat_interleave(tokens)
    dropout = Dropout.for_step(p, seed, step, record, torch.arange(tokens).repeat(records))
    assert dropout is not None
    columns = LoRALinear(nn.Linear(128, 8), name, 4, 8.0).columns
    return dropout(torch.ones(records * tokens, 128), columns)


def test_dropout_drops_its_share_everywhere_and_keeps_the_mean() -> None:
    for p in (0.05, 0.3):
        kept = masks(p)
        assert kept.unique().tolist() == [0.0, pytest.approx(1 / (1 - p))]
        dropped = (kept == 0).double()
        num = dropped.numel()
        assert abs(dropped.mean() - p) < 4 * (p * (1 - p) / num) ** 0.5
        for axis in (0, 1):  # no token and no channel is dropped much more often than chance allows
            n = dropped.shape[axis]
            assert (dropped.mean(axis) - p).abs().max() < 6 * (p * (1 - p) / n) ** 0.5


def test_dropout_depends_on_seed_step_module_record_and_token_alone() -> None:
    first = masks(0.5)
    assert torch.equal(first, masks(0.5))
    for other in (masks(0.5, seed=1), masks(0.5, step=4), masks(0.5, name="layers.1.a")):
        agreement = ((first == 0) == (other == 0)).double().mean()
        assert 0.49 < agreement < 0.51
    tokens = first.view(16, 100, 128) == 0
    for a, b in ((tokens[0], tokens[1]), (tokens[:, 0], tokens[:, 1])):  # two records, two tokens
        assert 0.4 < (a == b).double().mean() < 0.6


def test_no_dropout_is_no_object() -> None:
    assert Dropout.for_step(0.0, 0, 0, torch.zeros(3), torch.zeros(3)) is None


def test_lora_sits_where_the_spec_says_and_starts_without_effect() -> None:
    model = MMJev.tiny(0)
    model.configure(model.default_subnets(), 16, 32.0)
    model.reset_trainable(0)
    attention = {f"layers.{i}.self_attn.{p}_proj" for i in range(6) for p in "qkvo" if i < 4 or p in "qo"}
    mlp = {f"layers.{i}.mlp.{p}_proj" for i in range(2, 6) for p in ("gate", "up", "down")}
    assert set(model.adapters) == attention | mlp
    for module in model.adapters.values():
        assert module.scaling == 2.0 and not bool(module.lora_B.any())
        in_features = module.lora_A.shape[1]
        assert float(module.lora_A.detach().std() * in_features**0.5) == pytest.approx(1.0, abs=0.15)


def test_reset_restores_the_start_and_depends_on_the_seed() -> None:
    model = MMJev.tiny(0)
    model.configure(model.default_subnets(), 16, 32.0)
    model.reset_trainable(7)
    start = {name: p.detach().clone() for name, p in model.trainable().items()}
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.add_(1.0)
    model.reset_trainable(7)
    assert all(torch.equal(start[name], p) for name, p in model.trainable().items())
    model.reset_trainable(8)
    assert not torch.equal(start["latents"], model.latents)


def test_a_used_model_takes_other_shapes_and_heads() -> None:
    """What the trainable parts are depends on the settings, not on what the model object did before."""
    model = MMJev.tiny(0)
    model.configure({"only": SubnetConfig(exit_layer=2)}, 8, 8.0)
    model.configure(model.default_subnets(), 16, 32.0)
    fresh = MMJev.tiny(0)
    fresh.configure(fresh.default_subnets(), 16, 32.0)
    for jev in (model, fresh):
        jev.reset_trainable(0)
    assert list(model.trainable()) == list(fresh.trainable())
    assert all(torch.equal(p, fresh.trainable()[name]) for name, p in model.trainable().items())
    assert all(adapter.scaling == 2.0 for adapter in model.adapters.values())


@pytest.mark.parametrize(
    ("fc", "words"),
    [
        (SubnetConfig(exit_layer=7), "sub-network 'x': exit_layer=7, but the model has 6"),
        (SubnetConfig(exit_layer=6, ffn_width=257), "ffn_width=257, but the model has 256"),
        (SubnetConfig(exit_layer=6, n_latents=9), "n_latents=9, but the model has 8"),
    ],
)
def test_a_subnetwork_beyond_the_model_is_refused(fc: SubnetConfig, words: str) -> None:
    model = MMJev.tiny(0)
    with pytest.raises(ValueError, match=words):
        model.validate({"x": fc})


def test_trained_parts_are_fp32_whatever_the_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = MMJev.tiny(0)
        model.configure(model.default_subnets(), 16, 32.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.trainable().values()} == {torch.float32}
