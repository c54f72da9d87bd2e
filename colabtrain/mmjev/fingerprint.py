"""What a base model is recognised by, in whatever precision and by whatever release of transformers it was loaded."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

SAMPLE_ROWS, SAMPLE_STEPS = 64, 1024  # of the embedding, in steps of 1 / 1024, hashed into the fingerprint
ARCHITECTURE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "num_kv_shared_layers",
    "hidden_size_per_layer_input",
    "laurel_rank",
    "altup_num_inputs",
    "activation_sparsity_pattern",
)


def base_fingerprint(lm: Any) -> dict[str, Any]:
    """Architecture and a sample of the weights of a language model, hashed: the same in every precision that it may be
    loaded in on another card, and on every release of transformers."""
    config = getattr(lm, "config", None)  # a person's own model may have none
    architecture = {name: getattr(config, name, None) for name in ARCHITECTURE}
    sample = (lm.embed_tokens.weight[:SAMPLE_ROWS].float() * SAMPLE_STEPS).round().to(torch.int32).cpu()
    return {
        "config": hashlib.sha256(json.dumps(architecture, default=str).encode()).hexdigest()[:12],
        "weights": hashlib.sha256(json.dumps(sample.tolist()).encode()).hexdigest()[:12],
    }
