"""LoRA that stays exact when a feed-forward layer is sliced, with dropout that is a pure function.

y = W x + (alpha / r) B A dropout(x), A ~ N(0, 1) / sqrt(in), B = 0 (Hu et al. 2021, arXiv:2106.09685). A sliced
layer uses the first rows of W and B, or the first columns of W and A: the adapter of a slice is the slice of the
adapter, so a narrow sub-network can be merged and exported as a plain smaller model.

Dropout is a hash of (seed, step, record, token) and (layer, module, channel): no generator is read or moved, so a
checkpointed recompute, a batch run in parts, and a cell that draws random numbers all see or leave the same masks.

Mixed precision: where a frozen weight is float16 and its input float32, the product runs in float16 on an input scaled
per token, and everything around it, LoRA too, in float32.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True)
class Dropout:
    """Dropout with probability `p`; rows [T] (int32) is the hash of (seed, step, record, token)."""

    p: float
    rows: Tensor

    @staticmethod
    def for_step(p: float, seed: int, step: int, record: Tensor, token: Tensor) -> Dropout | None:
        """The masks of one step; record, token [T]: slot in the logical batch, index in the record's own plan."""
        if p == 0.0:
            return None
        rows = torch.full_like(record, _signed(zlib.crc32(f"{seed}/{step}".encode())), dtype=torch.int32)
        for part in (record, token):
            rows = scramble(rows + part.to(torch.int32) * 40503 + 1)
        return Dropout(p, rows | 1)

    def take(self, index: Tensor) -> Dropout:
        return Dropout(self.p, self.rows.index_select(0, index))

    def __call__(self, x: Tensor, columns: Tensor) -> Tensor:
        """x [..., T, C] with channels dropped; columns [C] (int32) names module and channel.

        One product of two scrambled odd numbers is enough of a hash here, and a third of the cost of a full one.
        """
        kept = self.rows[:, None] * columns[None, :] >= round(self.p * 2**32) - 2**31
        return x * kept.to(x.dtype).mul_(1.0 / (1.0 - self.p))


def scramble(x: Tensor) -> Tensor:
    """A 32-bit integer finaliser (multiply and xor-shift; C. Wellons' search, "lowbias32"); int32 wraps around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as a signed number
    return x ^ ((x >> 16) & 0xFFFF)


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank part; A [r, in], B [out, r], both fp32."""

    columns: Tensor

    def __init__(self, base: nn.Linear, name: str, r: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base
        self.scaling = alpha / r
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.zeros(r, base.in_features, device=device, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r, device=device, dtype=torch.float32))
        channel = torch.arange(base.in_features, dtype=torch.int32, device=device)
        columns = scramble(scramble(channel + 1) + _signed(zlib.crc32(name.encode())))
        self.register_buffer("columns", columns | 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return elastic_linear(self, x)

    def reset(self, generator: torch.Generator) -> None:
        a = torch.randn(self.lora_A.shape, generator=generator) / math.sqrt(self.lora_A.shape[1])
        with torch.no_grad():
            self.lora_A.copy_(a)
            self.lora_B.zero_()


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def elastic_linear(
    module: nn.Module, x: Tensor, dropout: Dropout | None = None, rows: int | None = None, cols: int | None = None
) -> Tensor:
    """The linear layer's first `rows` outputs from its first `cols` inputs (None: all). Slices are views."""
    base: nn.Linear = plain(module)
    adapter = None if base is module else cast(LoRALinear, module)
    y = _product(x, base.weight[:rows, :cols], _bias(base, rows))
    if adapter is not None:
        if dropout is not None:
            x = dropout(x, adapter.columns[:cols])
        low = F.linear(x, adapter.lora_A[:, :cols].to(x.dtype))
        y = y + F.linear(low, adapter.lora_B[:rows].to(x.dtype)) * adapter.scaling
    return y


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in x's dtype, or in the weight's where that is narrower."""
    if x.dtype == weight.dtype:
        return F.linear(x, weight, bias)
    y: Tensor = _NarrowProduct.apply(x, weight)  # pyright: ignore[reportAssignmentType]
    return y if bias is None else y + bias


class _NarrowProduct(torch.autograd.Function):
    """x [..., T, in] times the frozen weight [out, in], x and then the gradient scaled token by token into the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return _scaled(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return _scaled(gradients[0], weight.T), None


def _scaled(x: Tensor, weight: Tensor) -> Tensor:
    scale = _token_scale(x)
    return F.linear((x / scale).to(weight.dtype), weight) * scale  # in x's dtype again, the wider of the two


def _token_scale(x: Tensor) -> Tensor:
    """The largest power of two within each token's largest magnitude, [..., T, 1]: exact to divide and multiply by.

    x / scale is below 2, so neither it nor a sum over thousands of channels reaches float16's end, and what float16
    rounds to zero is 2^-24 of the token's largest channel.
    """
    largest = torch.linalg.vector_norm(x, math.inf, dim=-1, keepdim=True)
    scale = largest.view(torch.int32).bitwise_and(EXPONENT_BITS).view(torch.float32)
    return scale.clamp_min(torch.finfo(torch.float32).tiny)


def _bias(base: nn.Linear, rows: int | None) -> Tensor | None:
    bias: Any = base.bias
    return None if bias is None else bias[:rows]


def add_lora(lm: Any, r: int, alpha: float, mlp_from: int) -> dict[str, LoRALinear]:
    """Wrap q / k / v / o of every decoder layer (k, v where the layer has them) and the feed-forward from layer
    `mlp_from` on, anew where another shape is there; r = 0 takes all away. Returns the adapters by full module name."""
    adapters: dict[str, LoRALinear] = {}
    for name, owner, target in _targets(lm, mlp_from):
        module, base = getattr(owner, target), plain(getattr(owner, target))
        if not isinstance(base, nn.Linear):
            continue
        if r == 0:
            setattr(owner, target, base)
        elif isinstance(module, LoRALinear) and (len(module.lora_A), module.scaling) == (r, alpha / r):
            adapters[name] = module
        else:
            adapters[name] = LoRALinear(base, name, r, alpha)
            setattr(owner, target, adapters[name])
    return adapters


def plain(module: Any) -> Any:
    """The linear layer under an adapter, which is told by what it is not: when this module is reloaded under a training,
    its adapters are of the class from before."""
    return module if isinstance(module, nn.Linear) else getattr(module, "base_layer", module)


def check_projections(lm: nn.Module) -> None:
    """Raise ValueError that names the first projection whose weight is no plain matrix, as 4-bit and 8-bit layers have."""
    for name, owner, target in _targets(lm):
        base = plain(getattr(owner, target))
        if not isinstance(base, nn.Linear):
            raise ValueError(
                f"{name} is of type {type(base).__name__}, not torch.nn.Linear; load the model without quantisation or adapters"
            )
        shape, dtype = tuple(base.weight.shape), base.weight.dtype
        if not dtype.is_floating_point or shape != (base.out_features, base.in_features):
            raise ValueError(
                f"{name} ({type(base).__name__}) holds a packed weight, {dtype} of shape {list(shape)} for {base.out_features} x "
                f"{base.in_features}: a sub-network's slice cannot be taken from it; load the model without 4-bit or 8-bit quantisation"
            )


def _targets(lm: Any, mlp_from: int = 0) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, owner, attribute) of each projection there is: attention's, and the feed-forward's from layer `mlp_from` on."""
    for index, layer in enumerate(lm.layers):
        for parent, targets in (("self_attn", ATTENTION_TARGETS), ("mlp", MLP_TARGETS if index >= mlp_from else ())):
            owner = getattr(layer, parent, None)
            for target in targets:
                if owner is not None and hasattr(owner, target):
                    yield f"layers.{index}.{parent}.{target}", owner, target
