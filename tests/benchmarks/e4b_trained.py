"""What is trained of Gemma 3n E4B, with AdamW's state, and nothing else: 340 MB of random numbers by their real names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colabtrain.config import default_subnets
from colabtrain.task import StepReport

LORA_PARAMETERS, NUM_LATENTS = 28_344_320, 8
SHAPES_FILE = "shapes.json"


def e4b_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of what is trained, from the model's own classes; nothing is allocated."""
    from transformers import Gemma3nTextConfig, Gemma3nTextModel

    from colabtrain.mmjev.lora import add_lora

    config = Gemma3nTextConfig()  # E4B's size is its default
    with torch.device("meta"):
        adapters = add_lora(Gemma3nTextModel(config), 16, 32.0, mlp_from=10)
    shapes = {f"{name}.{part}": tuple(getattr(adapter, part).shape) for name, adapter in adapters.items() for part in ("lora_A", "lora_B")}
    assert sum(map(torch.Size.numel, map(torch.Size, shapes.values()))) == LORA_PARAMETERS
    for fc in default_subnets(config.num_hidden_layers, max(config.intermediate_size)).values():
        shapes |= {f"heads.{fc.exit_layer}.weight": (1, config.hidden_size), f"heads.{fc.exit_layer}.bias": (1,)}
    return {**shapes, "latents": (NUM_LATENTS, config.hidden_size)}


class Trained:
    """A Task of the trained tensors and AdamW alone. A step takes a random gradient.

    Names and shapes come from a file, so that a process that is measured need not load transformers.
    """

    def __init__(self, folder: Path, num_steps: int = 1) -> None:
        self.num_steps = num_steps
        self.shapes: dict[str, list[int]] = json.loads((folder / SHAPES_FILE).read_text())

    def prepare(self) -> None:
        self.parameters = {name: nn.Parameter(0.01 * torch.randn(shape)) for name, shape in self.shapes.items()}
        self.adamw = torch.optim.AdamW(self.parameters.values(), lr=1e-4, fused=True)
        for p in self.parameters.values():
            self.adamw.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def step(self, i: int, splits: int = 1) -> StepReport:
        for parameter in self.parameters.values():
            parameter.grad = torch.randn_like(parameter)
        self.adamw.step()
        self.adamw.zero_grad()
        return StepReport(loss={"none": 0.0})

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        return {"trainable": {name: p.detach() for name, p in self.parameters.items()}, "optimizer": self.moments()}, {}

    def moments(self) -> dict[str, Tensor]:
        named = self.parameters.items()
        return {f"{name}.{field}": value for name, p in named for field, value in self.adamw.state[p].items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
        for mine, saved in ((self.parameters, tensors["trainable"]), (self.moments(), tensors["optimizer"])):
            for name, tensor in mine.items():
                tensor.copy_(saved[name])

    def fingerprint(self) -> dict[str, Any]:
        return {"model": "E4B's trained tensors"}

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for named in self.state()[0].values() for tensor in named.values())
