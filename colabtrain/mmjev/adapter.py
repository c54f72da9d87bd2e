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
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from colabtrain.config import SUBNET_FIELDS, SubnetConfig
from colabtrain.mmjev.model import MMJev, check_magnitudes

WEIGHTS, CONFIG, EXTRAS, ABOUT = "adapter_model.safetensors", "adapter_config.json", "heads_latents.safetensors", "colabtrain.json"
CHECKPOINT_WEIGHTS, CHECKPOINT_STATE = "trainable.safetensors", "state.json"
NESTED = ("state", "lora", "trainable")  # what old files may call the mapping of their tensors
OTHER_LORA = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
SHOWN = 8  # names in an error

Named = list[tuple[str, Tensor]]


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
    folder = Path(folder).resolve()
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
    path = Path(path)
    found, about = _read(model, path)
    take_tensors(model, _by_our_names(model, found, path), str(path))
    return about


@torch.no_grad()
def take_tensors(model: Any, tensors: Mapping[str, Tensor], where: str = "the given state") -> None:
    """Set `model`'s trained tensors from `tensors`, by the names of trainable(); raises as load_adapter()."""
    parameters = model.trainable()
    _check_fit(tensors, parameters, where)
    _check_values(tensors, where)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


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
        "subnets": {name: {field: getattr(fc, field) for field in SUBNET_FIELDS} for name, fc in subnets.items()},
        "temperatures": dict(temperatures),
    }
    return json.dumps(fields, indent=1)


def check_replaceable(folder: Path) -> None:
    """Raise ValueError if an adapter saved in `folder` would replace anything but an adapter."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder")
    others = {path.name for path in folder.iterdir()} - {WEIGHTS, CONFIG, EXTRAS, ABOUT} if folder.exists() else set[str]()
    if others:
        raise ValueError(f"{folder} holds {sorted(others)[:SHOWN]}, which a new adapter would replace; give a folder of its own")


def _put_in_place(staging: Path, folder: Path) -> None:
    for path in (*staging.iterdir(), staging):
        _sync(path)
    replaced = folder.with_name(f".replaced-{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    try:
        os.rename(staging, folder)
        _sync(folder.parent)
    except OSError:
        if not folder.exists() and replaced.exists():
            os.rename(replaced, folder)
        raise
    finally:
        shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What is read


def _read(model: MMJev, path: Path) -> tuple[Named, dict[str, Any]]:
    if not path.exists():
        raise FileNotFoundError(f"adapter {str(path)!r} does not exist; give a folder with {WEIGHTS}, a checkpoint or a .pt file")
    if path.is_file():
        return _read_pt(path), {}
    if (path / WEIGHTS).exists():
        _check_lora_config(model, _read_json(path / CONFIG), path)
        tensors = _read_safetensors(path / WEIGHTS)
        if (path / EXTRAS).exists():
            tensors += _read_safetensors(path / EXTRAS)
        return tensors, _read_json(path / ABOUT) if (path / ABOUT).exists() else {}
    if (path / CHECKPOINT_WEIGHTS).exists():
        fingerprint = _read_json(path / CHECKPOINT_STATE).get("fingerprint", {})
        _check_alpha(model, fingerprint.get("config.lora_alpha"), path)
        return _read_safetensors(path / CHECKPOINT_WEIGHTS), {}
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


def _by_our_names(model: MMJev, tensors: Named, path: Path) -> dict[str, Tensor]:
    """`tensors` by the names of trainable(). peft's may come from any class of the same text model."""
    at = rf"(?:{re.escape(_prefix(model))}|(?:model\.)?(?:language_model\.)?)"
    peft = re.compile(rf"base_model\.model\.{at}(layers\..+\.lora_[AB])(?:\.default)?\.weight")
    named: dict[str, Tensor] = {}
    for name, tensor in tensors:
        match = peft.fullmatch(name)
        name = match[1] if match else name
        if name in named:
            raise ValueError(f"{path} has {name!r} twice, under two names; keep one")
        named[name] = tensor
    return named


def _check_lora_config(model: MMJev, config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA can be loaded")
    for name in OTHER_LORA:
        if config.get(name):
            raise ValueError(f"{path}: {name}={config[name]!r}; only plain LoRA can be loaded")
    _check_alpha(model, config.get("lora_alpha"), path)


def _check_alpha(model: MMJev, alpha: float | None, path: Path) -> None:
    """alpha is in no tensor: with another one the same weights would be another function."""
    _, mine = _lora_shape(model)
    if alpha is not None and not math.isclose(alpha, mine):
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
            if name in tensors and tensors[name].shape != parameter.shape
        ],
        "no plain numbers": [name for name, tensor in tensors.items() if not _is_plain(tensor)],
    }
    if any(wrong.values()):
        said = "; ".join(f"{what} {len(names)}: {', '.join(names[:SHOWN])}" for what, names in wrong.items() if names)
        raise ValueError(f"{where} does not fit the model ({said}); configure it with the exits and LoRA shape it was trained with")


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout == torch.strided and tensor.device.type == "cpu"


def _check_values(tensors: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{where}: tensor {name!r} is not finite; take an earlier checkpoint")
    check_magnitudes(tensors["latents"], f"{where}: tensor 'latents'")
