"""The embedded default: a small random Gemma 3n and a tokenizer of hashed words, for demos, tests and two CPU cores.

transformers' own initialisation zeroes correct_output_scale, which switches the per-layer embeddings off; every weight
is drawn anew here, so that the tiny model uses each part of the architecture that the large one uses.
"""

from __future__ import annotations

import functools
import re
import zlib
from typing import Any

import torch

VOCABULARY = 4096
RATES = {"lr_lora": 2e-3, "lr_heads": 2e-3}  # at 2e-4 it barely moves in the minutes a CPU run has
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


class HashedWords:
    """Lower-case words and punctuation marks, each hashed (crc32) into 4,096 ids; id 0 is left to media tokens."""

    def encode(self, text: str) -> list[int]:
        return list(_encode(text))


@functools.lru_cache(maxsize=4096)  # questions and options come again and again
def _encode(text: str) -> tuple[int, ...]:
    return tuple(1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in re.findall(r"\w+|[^\w\s]", text.lower()))


def language_model(seed: int, **overrides: Any) -> Any:
    """A Gemma3nTextModel of 6 layers and width 128 in fp32, in eval mode, all weights drawn from `seed`.

    overrides: Gemma3nTextConfig fields. The global random state is neither read nor moved.
    """
    try:
        from transformers import Gemma3nTextConfig, Gemma3nTextModel
    except ImportError as error:
        raise ImportError(f"MMJev needs transformers >= 5.12 ({error}); pip install 'colabtrain[mmjev]'") from None

    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size": 128,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": 256,
        "num_hidden_layers": len(LAYER_TYPES),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": list(LAYER_TYPES),
        "sliding_window": 512,
        "num_kv_shared_layers": 2,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4,
        "altup_num_inputs": 2,
        "max_position_embeddings": 8192,
        "attn_implementation": "sdpa",
    }
    config = Gemma3nTextConfig(**(fields | overrides))
    with torch.random.fork_rng(devices=[]):
        lm = Gemma3nTextModel(config).eval()
    randomise(lm, seed)
    return lm


@torch.no_grad()
def randomise(lm: Any, seed: int) -> None:
    """Draw every weight from `seed`: norms near 1, other vectors near 0.5, matrices with unit gain."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in lm.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.copy_((1.0 if "norm" in name else 0.5) + 0.1 * noise)
        elif "embed" in name:
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise / parameter.shape[1] ** 0.5)
