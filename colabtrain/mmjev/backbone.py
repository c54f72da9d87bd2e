"""The elastic forward over transformers' Gemma3nTextModel: its submodules and weights, our order of work.

Why not call its layers: here FFN width is an argument, shared keys / values are arguments and return values (so that
gradient checkpointing is right in any order of backwards), media tokens can leave, and nothing depends on train mode.
At full width and depth the result is bit-identical to Gemma3nTextModel's; the parity test holds that.

Only the read-out tokens matter in the end. Once the last layer that makes keys and values has made them, no other
token's state is read again, so from there on only the read-outs are computed: at E4B 15 of 35 layers.

Mixed precision (float16 projections and embedding tables, all else float32) is a matter of the weights: the residual
stream has the final norm's dtype, attention and the projections that of their weights.

Shapes: A AltUp streams, T tokens, H hidden, R read-outs; rows have batch size 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from colabtrain.config import SubnetConfig
from colabtrain.mmjev.lora import ATTENTION_TARGETS, MLP_TARGETS, Dropout, elastic_linear, plain
from colabtrain.mmjev.packing import Layout, Packed

USABLE_SHARE = 0.8  # of the free memory; the rest is for what is not counted

KeyValue = tuple[Tensor, Tensor]
Rope = tuple[Tensor, Tensor]  # cos, sin, each [1, T, D]


def weight_dtype(name: str, matmul: torch.dtype, residual: torch.dtype) -> torch.dtype:
    """The dtype of the parameter `name` of a text model where large products run in `matmul`, all else in `residual`."""
    large = {*ATTENTION_TARGETS, *MLP_TARGETS, "embed_tokens", "embed_tokens_per_layer"}
    return matmul if name.endswith(".weight") and large & set(name.split(".")) else residual


def matmul_dtype(lm: Any) -> torch.dtype:
    """The dtype of the projections' weights."""
    return _weight(lm.layers[0].self_attn.q_proj).dtype


def _weight(projection: Any) -> Tensor:
    return plain(projection).weight


def embed(lm: Any, ids: Tensor) -> Tensor:
    """Input embeddings [..., H] of `ids`, scaled, in the dtype of the residual stream."""
    table, dtype = lm.embed_tokens, lm.norm.weight.dtype
    return F.embedding(ids, table.weight).to(dtype) * table.embed_scale.to(dtype)


def _per_layer_rows(lm: Any, packed: Packed, like: Tensor) -> Tensor:
    """Per-layer embeddings [1, T, L, P], looked up where the table is, on the device and in the dtype of `like`."""
    there = lm.embed_tokens_per_layer.weight.device
    ids = packed.ids if there == packed.ids.device else packed.host_ids.to(there)
    rows = lm.get_per_layer_inputs(ids[None])
    return rows.to(like.device).to(like.dtype)  # in this order the narrow rows travel


def kv_roles(config: Any) -> list[str]:
    """`own`, `store` (own, and kept for others) or `reuse` for each layer, from the config's oldest two fields."""
    num_layers = config.num_hidden_layers
    first_shared = num_layers - config.num_kv_shared_layers
    roles = ["own" if i < first_shared else "reuse" for i in range(num_layers)]
    if first_shared < num_layers:
        for kind in set(config.layer_types[first_shared:]):
            roles[max(i for i in range(first_shared) if config.layer_types[i] == kind)] = "store"
    return roles


def layers_to_checkpoint(lm: Any, num_tokens: int, free: int | None) -> int:
    """How many of the first layers to recompute in the backward pass so that a batch of `num_tokens` fits into `free`
    bytes (None: not known, then 0).

    A layer keeps about 7 values a feed-forward channel and 14 a hidden one for each token: 0.27 MiB at E4B in bfloat16,
    as measured there. What is there in any case: the streams between layers, and two layers in the making.
    """
    if free is None:
        return 0
    config, wide = lm.config, num_wide_layers(lm.config)
    token_bytes = num_tokens * lm.norm.weight.dtype.itemsize
    layer_bytes = token_bytes * (7 * max(config.intermediate_size) + 14 * config.hidden_size)
    always = 2 * layer_bytes + token_bytes * wide * config.altup_num_inputs * config.hidden_size
    lacking = always + wide * layer_bytes - int(USABLE_SHARE * free)
    return min(wide, max(0, math.ceil(lacking / layer_bytes)))


def num_wide_layers(config: Any) -> int:
    """The first layers, which run on all tokens; behind the last one with keys of its own only read-outs go on."""
    return max(i for i, role in enumerate(kv_roles(config)) if role != "reuse") + 1


@dataclass
class _Stream:
    """What flows from layer to layer. hidden [A, 1, t, H], per_layer [1, t, L, P], rope and dropout cover the same t
    tokens: those of layout, or once `narrow` its read-outs alone; shared keys and values cover all of layout."""

    hidden: Tensor
    per_layer: Tensor
    rope: dict[str, Rope]
    layout: Layout
    dropout: Dropout | None
    shared: dict[str, KeyValue]
    narrow: bool = False

    def drop_media(self, kept: Tensor, text_layout: Layout) -> None:
        self.layout = text_layout
        self.shared = {kind: (key.index_select(2, kept), value.index_select(2, kept)) for kind, (key, value) in self.shared.items()}
        if not self.narrow:  # a read-out is no media token
            self.hidden = self.hidden.index_select(2, kept)
            self._take(kept)

    def keep_reads(self) -> None:
        """Follow layer_forward, which took the read-outs of `hidden`."""
        self._take(self.layout.reads)
        self.narrow = True

    def _take(self, index: Tensor) -> None:
        self.per_layer = self.per_layer.index_select(1, index)
        self.rope = {kind: _take_rope(rope, index) for kind, rope in self.rope.items()}
        self.dropout = self.dropout and self.dropout.take(index)


def forward(
    lm: Any,
    embeds: Tensor,
    packed: Packed,
    fc: SubnetConfig,
    dropout: Dropout | None = None,
    checkpoint_layers: frozenset[int] = frozenset(),
) -> Tensor:
    """Final hidden states [R, H] of the read-out tokens, after fc.exit_layer layers and the final norm.

    embeds [1, T, H]: input embeddings of the row. checkpoint_layers: layers recomputed in the backward pass.
    """
    config, layout = lm.config, packed.layout
    stream = _Stream(
        hidden=expand_altup(lm, embeds),
        per_layer=lm.project_per_layer_inputs(embeds, _per_layer_rows(lm, packed, embeds)),
        rope={kind: lm.rotary_emb(embeds, layout.position[None], kind) for kind in set(config.layer_types)},
        layout=layout,
        dropout=dropout,
        shared={},
    )
    roles, mask_dtype = kv_roles(config), matmul_dtype(lm)
    last_own = max(i for i in range(fc.exit_layer) if roles[i] != "reuse")
    for i in range(fc.exit_layer):
        if i == fc.media_exit and packed.kept is not None:
            stream.drop_media(packed.kept, packed.text_layout)
        kind = config.layer_types[i]
        siblings = fc.sibling_from is not None and i >= fc.sibling_from
        window = config.sliding_window if kind == "sliding_attention" else None
        masks = stream.layout.attention_masks(siblings, window, mask_dtype, reads_only=i >= last_own)
        reads = stream.layout.reads if i == last_own else None
        key, value = stream.shared[kind] if roles[i] == "reuse" else (None, None)
        inputs = (stream.hidden, stream.per_layer[:, :, i], *stream.rope[kind], masks, fc.ffn_width, key, value, stream.dropout, reads)
        if i in checkpoint_layers and torch.is_grad_enabled():
            run_layer: Callable[..., Any] = checkpoint
            stream.hidden, key, value = run_layer(layer_forward, lm.layers[i], *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            stream.hidden, key, value = layer_forward(lm.layers[i], *inputs)
        if roles[i] == "store":
            stream.shared[kind] = (key, value)
        if reads is not None:
            stream.keep_reads()
    return collapse_altup(lm, stream.hidden)[0]


def layer_forward(
    layer: Any,
    hidden: Tensor,
    per_layer: Tensor,
    cos: Tensor,
    sin: Tensor,
    masks: Sequence[Tensor],
    ffn_width: int | None,
    key: Tensor | None,
    value: Tensor | None,
    dropout: Dropout | None,
    reads: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoder layer, as Gemma3nTextDecoderLayer in eval mode. hidden [A, 1, T, H], per_layer [1, T, P].

    key, value: another layer's to read instead of its own. reads [R]: go on with these tokens alone once keys and
    values are made. Returns (hidden, key, value), hidden [A, 1, R or T, H].
    """
    active = layer.config.altup_active_idx
    predicted = layer.altup.predict(hidden)
    normed = layer.input_layernorm(predicted[active])
    if key is None or value is None:
        key, value = keys_values(layer.self_attn, normed, cos, sin, dropout)
    if reads is not None:
        predicted, normed, per_layer = (t.index_select(-2, reads) for t in (predicted, normed, per_layer))
        cos, sin = _take_rope((cos, sin), reads)
        dropout = dropout and dropout.take(reads)
    laurel = layer.laurel(normed)
    attended = attention(layer.self_attn, normed, cos, sin, masks, key, value, dropout)
    x = (predicted[active] + layer.post_attention_layernorm(attended) + laurel) / math.sqrt(2)
    x = x + layer.post_feedforward_layernorm(feed_forward(layer.mlp, layer.pre_feedforward_layernorm(x), ffn_width, dropout))
    corrected = layer.altup.correct(predicted, x)
    first = corrected[active].clone()
    if layer.config.altup_correct_scale:
        first = layer.altup.scale_corrected_output(first)
    first = layer.act_fn(layer.per_layer_input_gate(first)) * per_layer
    corrected[1:] += layer.post_per_layer_input_norm(layer.per_layer_projection(first))
    return corrected, key, value


def keys_values(module: Any, x: Tensor, cos: Tensor, sin: Tensor, dropout: Dropout | None) -> KeyValue:
    """Keys and values [1, KV, T, D] of the row x [1, T, H], in the dtype that attention runs in."""
    heads, dtype = (*x.shape[:2], -1, module.head_dim), _weight(module.k_proj).dtype
    key = _rotate(module.k_norm(elastic_linear(module.k_proj, x, dropout).view(heads)), cos, sin)
    value = module.v_norm(elastic_linear(module.v_proj, x, dropout).view(heads))
    return key.transpose(1, 2).to(dtype), value.transpose(1, 2).to(dtype)


def attention(
    module: Any, x: Tensor, cos: Tensor, sin: Tensor, masks: Sequence[Tensor], key: Tensor, value: Tensor, dropout: Dropout | None
) -> Tensor:
    """Attention of the tokens x [1, t, H] over keys and values [1, KV, T, D], record by record (masks: [t_i, T_i])."""
    heads = (*x.shape[:2], -1, module.head_dim)
    query = _rotate(module.q_norm(elastic_linear(module.q_proj, x, dropout).view(heads)), cos, sin).transpose(1, 2)
    queries = query.to(key.dtype).split([mask.shape[0] for mask in masks], dim=2)
    keys, values = (_repeat(t, module).split([mask.shape[1] for mask in masks], dim=2) for t in (key, value))
    records = zip(queries, keys, values, masks, strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=module.scaling) for q, k, v, mask in records]
    joined = torch.cat(outputs, dim=2).transpose(1, 2).reshape(*x.shape[:2], -1)
    return elastic_linear(module.o_proj, joined.to(x.dtype), dropout)


def feed_forward(module: Any, x: Tensor, ffn_width: int | None, dropout: Dropout | None) -> Tensor:
    """The gated feed-forward with its first `ffn_width` channels; the sparsity cut-off comes from these alone."""
    gate = elastic_linear(module.gate_proj, x, dropout, rows=ffn_width)
    if module.activation_sparsity > 0.0:
        gate = sparse(gate, _cutoff(module.activation_sparsity, gate.dtype, gate.device))
    inner = module.act_fn(gate) * elastic_linear(module.up_proj, x, dropout, rows=ffn_width)
    return elastic_linear(module.down_proj, inner, dropout, cols=ffn_width)


def sparse(gate: Tensor, cutoff: Tensor) -> Tensor:
    """What of `gate` [..., F] lies above its own mean by `cutoff` standard deviations; as _gaussian_topk of the module."""
    mean, deviation = gate.mean(dim=-1, keepdim=True), torch.std(gate, dim=-1, keepdim=True, unbiased=False)
    return F.relu(gate - (mean + deviation * cutoff))


@functools.lru_cache(maxsize=64)  # made once a device: a scalar that travels to it stops the host
def _cutoff(sparsity: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The quantile of the normal distribution below which the share `sparsity` lies."""
    with torch.inference_mode(False):  # a cell's first call must not leave a tensor that no gradient may pass by
        quantile = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(sparsity, dtype=torch.float32))
        return quantile.to(dtype).to(device)


def expand_altup(lm: Any, embeds: Tensor) -> Tensor:
    """[1, T, H] -> [A, 1, T, H]: the other streams are projections with the first one's magnitude."""
    magnitude = torch.mean(embeds**2, dim=-1, keepdim=True) ** 0.5
    return torch.stack([embeds] + [_with_magnitude(project(embeds), magnitude) for project in lm.altup_projections])


def collapse_altup(lm: Any, hidden: Tensor) -> Tensor:
    """[A, 1, R, H] -> [1, R, H]: the streams' mean after the final norm."""
    magnitude = torch.mean(hidden[0] ** 2, dim=-1, keepdim=True) ** 0.5
    others = zip(lm.altup_unembed_projections, hidden[1:], strict=True)
    streams = [hidden[0]] + [_with_magnitude(project(stream), magnitude) for project, stream in others]
    return lm.norm(torch.mean(torch.stack(streams), dim=0))


def _with_magnitude(x: Tensor, magnitude: Tensor) -> Tensor:
    return x * magnitude / torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True).clamp(min=1e-5))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat((-second, first), dim=-1) * sin[:, :, None]


def _repeat(x: Tensor, module: Any) -> Tensor:
    """Keys or values [1, KV, T, D] for every query head; expand, because its backward is a plain sum."""
    groups = module.num_key_value_groups
    return x if groups == 1 else x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _take_rope(rope: Rope, index: Tensor) -> Rope:
    return rope[0].index_select(1, index), rope[1].index_select(1, index)
