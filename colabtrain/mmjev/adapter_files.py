"""The tensors in an adapter folder, a checkpoint folder or an old `.pt` file, before any model is asked whether they fit.

Of pickles only files of plain tensors are read, with torch's loader that executes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

WEIGHTS, CONFIG, EXTRAS, ABOUT = "adapter_model.safetensors", "adapter_config.json", "heads_latents.safetensors", "colabtrain.json"
CHECKPOINT_WEIGHTS, CHECKPOINT_STATE = "trainable.safetensors", "state.json"
NESTED = ("state", "lora", "trainable")  # what old files may call the mapping of their tensors
OTHER_LORA = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
ANY_PREFIX = r"(?:model\.)?(?:language_model\.)?"  # of the text model, by the class it was in when peft saved it

Named = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Found:
    """What is at `path`. about: its colabtrain.json; alpha: lora_alpha it was trained with, where that is known."""

    path: Path
    tensors: Named
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    alpha: float | None = None

    def by_our_names(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors by the names of trainable(). prefix: where the text model lies in its base."""
        peft = re.compile(rf"base_model\.model\.(?:{re.escape(prefix)}|{ANY_PREFIX})(layers\..+\.lora_[AB])(?:\.default)?\.weight")
        named: dict[str, Tensor] = {}
        for name, tensor in self.tensors:
            match = peft.fullmatch(name)
            name = match[1] if match else name
            if name in named:
                raise ValueError(f"{self.path} has {name!r} twice, under two names; keep one")
            named[name] = tensor
        return named

    def check_shape(self, lora_r: int, lora_alpha: float, exits: Collection[int]) -> None:
        """Raise ValueError where a model with these settings could not take it, so far as that is seen without the model."""
        named = self.by_our_names()
        ranks = {len(tensor) for name, tensor in named.items() if name.endswith("lora_A")} or {0}
        if ranks != {lora_r}:
            raise ValueError(f"{self.path}: its LoRA is of rank {max(ranks)}, but lora_r={lora_r}; give lora_r={max(ranks)}")
        if lora_r and self.alpha is not None and abs(self.alpha - lora_alpha) > 1e-9 * lora_alpha:
            raise ValueError(f"{self.path}: lora_alpha={self.alpha:g}, but here it is {lora_alpha:g}; give lora_alpha={self.alpha:g}")
        heads = {name.split(".")[1] for name in named if name.startswith("heads.")}
        if heads != {str(exit_layer) for exit_layer in exits}:
            raise ValueError(
                f"{self.path}: its heads are for exits after layers {sorted(heads)}, the sub-networks exit after {sorted(exits)}; "
                "give the subnets it was trained with"
            )


def read(path: Path) -> Found:
    """Raises FileNotFoundError, or ValueError that says why the file is refused."""
    if not path.exists():
        raise FileNotFoundError(f"adapter {str(path)!r} does not exist; give a folder with {WEIGHTS}, a checkpoint or a .pt file")
    if path.is_file():
        return Found(path, _read_pt(path))
    if (path / WEIGHTS).exists():
        config = _read_json(path / CONFIG)
        _check_plain(config, path)
        tensors = _read_safetensors(path / WEIGHTS)
        if (path / EXTRAS).exists():
            tensors += _read_safetensors(path / EXTRAS)
        return Found(path, tensors, _read_json(path / ABOUT) if (path / ABOUT).exists() else {}, config.get("lora_alpha"))
    if (path / CHECKPOINT_WEIGHTS).exists():
        fingerprint = _read_json(path / CHECKPOINT_STATE).get("fingerprint", {})
        return Found(path, _read_safetensors(path / CHECKPOINT_WEIGHTS), alpha=fingerprint.get("config.lora_alpha"))
    raise ValueError(f"{path} holds neither {WEIGHTS} nor {CHECKPOINT_WEIGHTS}; give the folder of an adapter or of one checkpoint")


def _read_safetensors(path: Path) -> Named:
    try:
        return list(load_file(path).items())
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no JSON object")
    return cast(dict[str, Any], fields)


def _read_pt(path: Path) -> Named:
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its own text advises to switch the protection off
        asked = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it asks for {asked[1]}, and nothing in it is executed" if asked else f"{type(error).__name__} on reading it"
        raise ValueError(f"{path} is refused: not a file of plain tensors ({why})") from None
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} is refused: it holds a {type(loaded).__name__}, not a mapping name -> tensor")
    pairs = list[tuple[Any, Any]]()
    for name, value in cast(Mapping[Any, Any], loaded).items():
        pairs += cast(Mapping[Any, Any], value).items() if name in NESTED and isinstance(value, Mapping) else [(name, value)]
    return [(str(name), value) for name, value in pairs if isinstance(value, Tensor)]  # a step count and the like is no tensor


def _check_plain(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA can be loaded")
    for name in OTHER_LORA:
        if config.get(name):
            raise ValueError(f"{path}: {name}={config[name]!r}; only plain LoRA can be loaded")
