"""The names of the first implementation: old notebooks keep working, and each old name is said once with its new one.

RENAMED is the table. What people scripted their own runs with is here, too, as plain functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colabtrain.config import TrainConfig

TOKEN_BUDGET_VARIABLE = "MMJEV_TOKEN_BUDGET"
DEFAULT_LORA_R = 16


def _lora(value: Any) -> int:
    return DEFAULT_LORA_R if value is True else 0 if value in (False, None) else value


def _folder(value: Any) -> Any:
    if not isinstance(value, (str, Path)):
        return value
    return str(Path(value).with_suffix("")) if str(value).endswith(".pt") else str(value)


def _records(value: Any) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueError(f"recs={repr(value)[:80]} is a {type(value).__name__}; it must be two lists: (train, calibration)")
    parts: list[tuple[str, Any]] = list(zip(("train", "calibration"), value, strict=True))
    for split, records in parts:
        if not isinstance(records, Iterable) or isinstance(records, (str, bytes, Mapping)):
            raise ValueError(f"recs: the {split} records are {repr(records)[:80]}; they must be a list of records")
    return [_with_split(record, split) for split, records in parts for record in records]


def _with_split(record: Any, split: str) -> Any:
    if not isinstance(record, Mapping) and not hasattr(type(record), "__slots__"):
        raise ValueError(f"recs: the {split} records hold {repr(record)[:80]}; a record is a mapping or a Record")
    if isinstance(record, Mapping):
        return {**record, "split": split}
    fields = {name: getattr(record, name) for name in type(record).__slots__}
    return type(record)(**fields | {"split": split})


RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {  # old name -> new name, its value from the old one
    "bs": ("batch_size", lambda value: value),
    "lr_head": ("lr_heads", lambda value: value),
    "warmup": ("warmup_steps", lambda value: value),
    "save_path": ("adapter_dir", _folder),
    "lora": ("lora_r", _lora),
    "ckpt_dir": ("run_dir", lambda value: value),
    "ckpt_every": ("checkpoint_every", lambda value: value),
    "on_ckpt": ("on_checkpoint", lambda value: value),
    "recs": ("data", _records),
}  # lr_lora, epochs, modalities, max_records and init are what they were


def translate(options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> tuple[dict[str, Any], list[str]]:
    """`options` (None: not given) under today's names, and a line for each name that was old.

    Raises ValueError where an option is given under both names.
    """
    new, lines = {name: value for name, value in options.items() if name not in RENAMED}, list[str]()
    for old, (name, convert) in RENAMED.items():
        if (value := options.get(old)) is None:
            continue
        if new.get(name) is not None and old != "recs":  # recs stood beside the data it was taken from
            raise ValueError(f"{old}={value!r} and {name}={new[name]!r} are the same option; give {name} alone")
        new[name] = convert(value)
        shown = f"{len(new[name])} records" if old == "recs" else f"{new[name]!r}"
        lines.append(f"{old} is called {name} now: taken as {name}={shown}")
        if old == "recs":
            new.setdefault("calibration_share", 0.0)
    if (budget := environ.get(TOKEN_BUDGET_VARIABLE)) and new.get("token_budget") is None:
        if not budget.strip().isdecimal():
            raise ValueError(f"the environment variable {TOKEN_BUDGET_VARIABLE}={budget!r} is no number of tokens; give one, or unset it")
        new["token_budget"] = int(budget)
        lines.append(f"{TOKEN_BUDGET_VARIABLE} is called token_budget now: taken as token_budget={budget}")
    return new, lines


def _checked(jev: Any) -> Any:
    from colabtrain.mmjev.adapter import check_model

    check_model(jev, "jev")
    return jev


def add_lora(jev: Any, r: int = DEFAULT_LORA_R, alpha: float = 32.0) -> dict[str, Any]:
    """Put adapters of rank `r` on the model, each without effect yet; the trained parameters by name."""
    TrainConfig(lora_r=r, lora_alpha=alpha)  # checks them
    _checked(jev).configure(jev.default_subnets(), r, alpha)
    jev.reset_trainable(0)
    return jev.trainable()


def reset_trainable(jev: Any, seed: int = 0) -> None:
    """Set adapters, heads and latents to their start."""
    TrainConfig(seed=seed)  # checks it
    _checked(jev).reset_trainable(seed)


def trainable_state(jev: Any) -> dict[str, Any]:
    """A copy of every trained tensor, on the CPU, by name."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in _checked(jev).trainable().items()}


def load_trainable(jev: Any, source: Any) -> None:
    """Take over what trainable_state() gave, an adapter folder, a checkpoint, or an old .pt file (never unpickled).

    Strict: a missing, extra or misshapen tensor raises ValueError naming it.
    """
    from colabtrain.mmjev.adapter import load_adapter, take_tensors

    if isinstance(source, Mapping):
        take_tensors(jev, source)
    else:
        load_adapter(jev, source)


def save_trainable(jev: Any, path: str | Path) -> Path:
    """Save adapters, heads and latents as an adapter folder; a name that ends in .pt loses that."""
    from colabtrain.mmjev.adapter import save_adapter

    return save_adapter(jev, _folder(path))


def fit_temperatures(items: Iterable[Any], by: str = "bucket") -> dict[str, float]:
    """Temperatures of (type, number of options, logits, target) items, by `type`, or by `bucket`: type and option count."""
    from colabtrain.elastic import calibrate

    if by not in ("type", "bucket"):
        raise ValueError(f"by={by!r} is unknown; it must be one of type, bucket")
    fits = calibrate.fit_by_type(items) if by == "type" else calibrate.fit(items)["buckets"]
    return {name: fit["temperature"] for name, fit in fits.items()}
