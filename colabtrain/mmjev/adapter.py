"""What was trained, on disk as PEFT's adapter folder, and back.

`adapter_model.safetensors` and `adapter_config.json` load with peft's PeftModel onto the plain base; beside them lie
`heads_latents.safetensors` (heads and latents, by the names of trainable()) and `colabtrain.json` (base, sub-networks,
temperatures). A folder is made under another name, synced and renamed, so a half-written one never has its name.

Loading is strict: every trained tensor once, in its shape, finite, and no latent without a magnitude. Of pickles only
old `.pt` files of plain tensors are read, with torch's loader that executes nothing.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from colabtrain.config import SubnetConfig, as_path, settings
from colabtrain.device import sync_to_disk
from colabtrain.mmjev.adapter_files import ABOUT, CONFIG, EXTRAS, WEIGHTS, read
from colabtrain.mmjev.model import MMJev, check_magnitudes

SHOWN = 8  # names in an error


def save_adapter(
    model: MMJev,
    folder: str | Path,
    temperatures: Mapping[str, Any] | None = None,
    subnets: Mapping[str, SubnetConfig] | None = None,
) -> Path:
    """Write what `model` has learned to `folder`, replacing an adapter that is there. Returns the folder.

    temperatures: calibrate()'s reports by sub-network. subnets: None means the model's default ones. Raises ValueError
    for values that load_adapter() would refuse, for sub-networks other than the heads, and for a folder that holds
    anything but an adapter; OSError if the disk fails, and then an older adapter is still whole.
    """
    check_model(model)
    folder = as_path(folder, "folder", "name the folder of the adapter").resolve()
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in model.trainable().items()}
    _check_values(tensors, model.name)
    texts = {CONFIG: _peft_config(model), ABOUT: _about(model, temperatures or {}, subnets)}
    prefix = f"base_model.model.{_prefix(model)}"
    lora = {f"{prefix}{name}.weight": tensor for name, tensor in tensors.items() if ".lora_" in name}
    extras = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    check_replaceable(folder)
    staging = folder.with_name(f".staging-{folder.name}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        save_file(lora, staging / WEIGHTS, metadata={"format": "pt"})
        save_file(extras, staging / EXTRAS)
        for name, text in texts.items():
            (staging / name).write_text(text)
        _put_in_place(staging, folder)
    except SafetensorError as error:  # safetensors says so when the disk is full
        raise OSError(f"{folder}: {error}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def load_adapter(model: MMJev, path: str | Path) -> dict[str, Any]:
    """Set `model`'s trained tensors from an adapter folder, a checkpoint folder, or an old `.pt` file of tensors.

    The model must be configured with the same exits and LoRA shape before. Returns what `colabtrain.json` says (base,
    subnets, temperatures), {} where there is none. Raises FileNotFoundError, or ValueError naming the tensors that are
    missing, extra, misshapen, not finite or zero, or why the file is refused; the model is then unchanged.
    """
    check_model(model)
    path = as_path(path, "path", "give the folder of an adapter or of a checkpoint, or a .pt file")
    found = read(path)
    if found.alpha is not None and any("lora_" in name for name, _ in found.tensors):
        _check_alpha(model, found.alpha, path)
    take_tensors(model, found.by_our_names(_prefix(model)), str(path))
    return found.about


@torch.no_grad()
def take_tensors(model: Any, tensors: Mapping[str, Tensor], where: str = "the given state") -> None:
    """Set `model`'s trained tensors from `tensors`, by the names of trainable(); raises as load_adapter()."""
    check_model(model)
    parameters = model.trainable()
    _check_fit(tensors, parameters, where)
    _check_values(tensors, where)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def check_model(model: Any, name: str = "the model") -> None:
    """Raise ValueError where `model`, which the caller calls `name`, has no trained parts."""
    if isinstance(model, type) or not hasattr(model, "trainable"):
        raise ValueError(f"{name} is {repr(model)[:80]}; give an MMJev, such as MMJev.tiny()")


# What is written


def _prefix(model: MMJev) -> str:
    """Where the text model lies in the whole model: nothing if it is the whole, `model.` and the like otherwise."""
    name = next((name for name, module in model.base.named_modules() if module is model.lm), None)
    if name is None:
        raise ValueError(f"the text model of {model.name} is no part of its base, so there is no name for its adapter")
    return f"{name}." if name else ""


def _lora_shape(model: MMJev) -> tuple[int, float]:
    if not model.adapters:
        raise ValueError(f"{model.name} has no LoRA; call model.configure(subnets, lora_r=..., lora_alpha=...) first")
    adapter = next(iter(model.adapters.values()))
    return len(adapter.lora_A), adapter.scaling * len(adapter.lora_A)


def _peft_config(model: MMJev) -> str:
    (r, alpha), prefix = _lora_shape(model), _prefix(model)
    fields = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(model.base.config, "_name_or_path", "") or model.name,
        "r": r,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": [prefix + name for name in model.adapters],  # in full: `q_proj` is an audio tower's too
    }
    return json.dumps(fields, indent=1)


def _about(model: MMJev, temperatures: Mapping[str, Any], subnets: Mapping[str, SubnetConfig] | None) -> str:
    subnets = model.default_subnets() if subnets is None else subnets
    exits = {str(fc.exit_layer) for fc in subnets.values()}
    if exits != set(model.heads):
        raise ValueError(f"the sub-networks exit after layers {sorted(exits)}, the heads are for {sorted(model.heads)}; give subnets=")
    fields = {
        "format": 1,
        "base": model.fingerprint(),
        "subnets": {name: settings(fc) for name, fc in subnets.items()},
        "temperatures": dict(temperatures),
    }
    return json.dumps(fields, indent=1)


def check_replaceable(folder: Path) -> None:
    """Raise ValueError where `folder` is something else than an adapter, or nothing yet."""
    if files := [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]:
        raise ValueError(f"{files[0]} is a file; give a folder")
    others = {path.name for path in folder.iterdir()} - {WEIGHTS, CONFIG, EXTRAS, ABOUT} if folder.exists() else set[str]()
    if others:
        raise ValueError(f"{folder} holds {sorted(others)[:SHOWN]}, which a new adapter would replace; give a folder of its own")


def _put_in_place(staging: Path, folder: Path) -> None:
    for path in (*staging.iterdir(), staging):
        sync_to_disk(path)
    replaced = folder.with_name(f".replaced-{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    try:
        os.rename(staging, folder)
        sync_to_disk(folder.parent)
    except OSError:
        if not folder.exists() and replaced.exists():
            os.rename(replaced, folder)
        raise
    finally:
        shutil.rmtree(replaced, ignore_errors=True)


# What is read


def _check_alpha(model: MMJev, alpha: float, path: Path) -> None:
    """alpha is in no tensor: with another one the same weights would be another function."""
    _, mine = _lora_shape(model)
    if not math.isclose(alpha, mine):
        raise ValueError(
            f"{path}: lora_alpha={alpha}, but the model has {mine:g}; call model.configure(subnets, lora_r, lora_alpha={alpha})"
        )


def _check_fit(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor], where: str) -> None:
    wrong = {
        "missing": sorted(parameters.keys() - tensors.keys()),
        "extra": sorted(tensors.keys() - parameters.keys()),
        "misshapen": [
            f"{name} {list(tensors[name].shape)} for {list(parameter.shape)}"
            for name, parameter in parameters.items()
            if isinstance(tensors.get(name), Tensor) and tensors[name].shape != parameter.shape
        ],
        "no plain numbers": [name for name, tensor in tensors.items() if not _is_plain(tensor)],
    }
    if any(wrong.values()):
        said = "; ".join(f"{what} {len(names)}: {', '.join(names[:SHOWN])}" for what, names in wrong.items() if names)
        raise ValueError(f"{where} does not fit the model ({said}); configure it with the exits and LoRA shape it was trained with")


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.layout == torch.strided and tensor.device.type == "cpu"


def _check_values(tensors: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{where}: tensor {name!r} is not finite; take an earlier checkpoint")
    check_magnitudes(tensors["latents"], f"{where}: tensor 'latents'")
