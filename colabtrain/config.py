"""Leaf: what is learned (TrainConfig), how the run lives (RunConfig) and what a sub-network is (SubnetConfig).

TrainConfig is part of a run's fingerprint: a checkpoint made with other values is another experiment, and resuming
onto it is refused. RunConfig never refuses a resume: more steps, other intervals and another display are free.
Nothing here imports torch, so that a command line that only looks at a run starts fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

LORA_LR, HEADS_LR = 2e-4, 1e-3  # used where neither the person nor the model says otherwise
MAX_WEIGHT, MAX_RANK = 1e3, 4096  # beyond, it is a slip: the numbers overflow, or the memory does


@dataclass(frozen=True)
class SubnetConfig:
    """One inference configuration; all of them share every weight.

    n_latents: memory tokens appended after each media segment.
    exit_layer: number of decoder layers run.
    media_exit: media tokens leave the row before this layer index; None keeps them.
    sibling_from: from this layer index on an option sees the other options of its question; None: never.
    ffn_width: number of feed-forward channels used in every layer; None uses all.
    """

    n_latents: int = 8
    exit_layer: int = 35
    media_exit: int | None = None
    sibling_from: int | None = 14
    ffn_width: int | None = None
    given: Any = field(default=None, repr=False, compare=False)  # the person's own object this was read from

    def __post_init__(self) -> None:
        check_types(self)
        for name, lowest in (("n_latents", 0), ("exit_layer", 1), ("media_exit", 0), ("sibling_from", 0), ("ffn_width", 1)):
            check_at_least(self, name, lowest)
        if self.media_exit is not None and self.media_exit > self.exit_layer:
            raise ValueError(
                f"media_exit={self.media_exit} is beyond exit_layer={self.exit_layer}; media must leave by the last layer that is run, "
                "or give media_exit=None to keep them"
            )


SUBNET_FIELDS = tuple(item.name for item in dataclasses.fields(SubnetConfig) if item.name != "given")


def as_subnet(name: str, fc: Any) -> SubnetConfig:
    """A SubnetConfig from one, a mapping of its fields, a sequence of their values, or any object with those attributes.

    Raises ValueError naming the sub-network.
    """
    if isinstance(fc, SubnetConfig):
        return fc
    fields = _subnet_fields(fc)
    if fields is None:
        raise ValueError(
            f"subnets[{name!r}]={fc!r} is of type {type(fc).__name__}; it must be a SubnetConfig, a mapping of its fields, a sequence of "
            "their values, or an object that has them"
        )
    if unknown := sorted(set(fields) - set(SUBNET_FIELDS)):
        raise ValueError(f"subnets[{name!r}]={fc!r} has an unknown field {unknown[0]!r}; a sub-network has {', '.join(SUBNET_FIELDS)}")
    try:
        return SubnetConfig(**fields, given=fc if hasattr(fc, "exit_layer") else None)
    except ValueError as error:
        raise ValueError(f"subnets[{name!r}]: {error}") from None


def _subnet_fields(fc: Any) -> dict[str, Any] | None:
    if isinstance(fc, (str, bytes, type)):
        return None
    if isinstance(fc, Mapping):
        return dict(fc)
    if hasattr(fc, "exit_layer"):
        return {field: getattr(fc, field) for field in SUBNET_FIELDS if hasattr(fc, field)}
    if isinstance(fc, Sequence) and len(fc) <= len(SUBNET_FIELDS):
        return dict(zip(SUBNET_FIELDS, fc, strict=False))
    return None


def default_subnets(num_layers: int, ffn_width: int | None) -> dict[str, SubnetConfig]:
    """`full` and `fast` for a backbone of `num_layers` layers: Gemma 3n E4B's 20, 8 and 14 of 35, by proportion."""

    def share(of_35: int) -> int:
        return max(1, round(of_35 / 35 * num_layers))

    full = SubnetConfig(exit_layer=num_layers, sibling_from=share(14))
    fast = dataclasses.replace(full, exit_layer=share(20), media_exit=share(8), ffn_width=ffn_width and max(1, ffn_width // 2))
    return {"full": full, "fast": fast}


def _at_least(default: Any, lowest: float, highest: float | None = None) -> Any:
    return field(default=default, metadata={"lowest": lowest, "highest": highest})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What is learned. lr_* and subnets left at None take the model's own, else the house's defaults."""

    seed: int = _at_least(0, -(2**63), 2**63 - 1)
    batch_size: int = _at_least(4, 1)  # records
    token_budget: int = _at_least(6000, 1)  # tokens of one batch, all its records together
    lr_lora: float | None = _at_least(None, 0, 1)
    lr_heads: float | None = _at_least(None, 0, 1)  # heads and latents
    warmup_steps: int | None = _at_least(None, 0)  # None: 5 % of the steps, at least 1, at most 50
    clip_norm: float = _at_least(1.0, 1e-9)
    clip: str = field(default="group", metadata={"choices": ("group", "joint")})
    brier_weight: float = _at_least(0.1, 0, MAX_WEIGHT)
    rps_weight: float = _at_least(0.0, 0, MAX_WEIGHT)  # ranked probability score, `score` questions only
    kl_weight: float = _at_least(0.5, 0, MAX_WEIGHT)  # KL(teacher || every other sub-network)
    kl_temperature: float = _at_least(1.0, 0.01, 100)
    # The first sub-network's answers in the same pass, in a pass without dropout, or no distillation:
    teacher: str = field(default="train", metadata={"choices": ("train", "eval", "none")})
    lora_r: int = _at_least(16, 0, MAX_RANK)  # 0: heads and latents alone are trained
    lora_alpha: float = _at_least(32.0, 0, 1e4)
    lora_dropout: float = _at_least(0.05, 0, 0.99)
    max_state_chars: int = _at_least(1500, 1)
    max_options: int = _at_least(32, 2)
    calibration_share: float = _at_least(0.05, 0, 0.5)  # of the train split, held out by a hash of id or group
    exclude_tasks: tuple[str, ...] = ("typed_decisions", "snake_syn")
    exclude: tuple[str, ...] = field(default=("snake_game",), metadata={"choices": ("snake_game",)})  # records, by what they show
    modalities: tuple[str, ...] | None = None  # None: all
    max_records: int | None = _at_least(None, 1)
    subnets: Mapping[str, SubnetConfig] | None = None  # the first one is the teacher

    def __post_init__(self) -> None:
        for name in ("exclude_tasks", "exclude", "modalities"):  # a TOML file has lists
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.subnets, Mapping):
            names: list[Any] = list(self.subnets)
            if unnamed := [name for name in names if not isinstance(name, str) or not name]:
                raise ValueError(f"subnets={self.subnets!r} has the name {unnamed[0]!r}; a name must be a string that is not empty")
            object.__setattr__(self, "subnets", {name: as_subnet(name, fc) for name, fc in self.subnets.items()})
        check_types(self)
        check_metadata(self)
        if self.subnets is not None and not self.subnets:
            raise ValueError("subnets is empty; name at least one SubnetConfig, or leave it out for full and fast")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How the run lives. Free to change when a run is resumed."""

    steps: int | None = _at_least(None, 1)
    epochs: int | None = _at_least(None, 1)  # None with steps=None: one epoch
    checkpoint_every: int = _at_least(200, 1)  # steps
    checkpoint_seconds: float = _at_least(300.0, 0)
    first_checkpoint_seconds: float = _at_least(60.0, 0)
    keep_local: int = _at_least(3, 1)
    hub: str | None = None  # the Hub repo, owner/name, where every checkpoint is published
    private: bool = True  # a repo that is made is seen by its owner alone
    hub_required: bool = True  # False: a Hub that is out of reach at the start is left out until it works
    publish_every: float = _at_least(180.0, 0)  # seconds between two commits at least; 60 or more
    keep_remote: int = _at_least(2, 1)
    squash_every: int = _at_least(25, 1)  # checkpoints in the history of a repo that colabtrain made
    log_every: int = _at_least(50, 1)  # steps
    eval_every: int | None = _at_least(None, 1)  # steps; None: at the end only
    max_eval_records: int | None = _at_least(None, 1)
    checkpoint_layers: int | None = _at_least(None, 0)  # layers recomputed in the backward pass; None: as memory needs
    adapter_dir: str | None = None  # where the adapter is saved at the end; None: <run>/adapter
    allow_mismatch: tuple[str, ...] = ()  # differences that a resume accepts, by the names its refusal gives
    on_unrecoverable: str = field(default="fail", metadata={"choices": ("fail", "exit")})  # exit: end the process with status 3

    def __post_init__(self) -> None:
        if isinstance(self.adapter_dir, Path):
            object.__setattr__(self, "adapter_dir", str(self.adapter_dir))
        if isinstance(self.allow_mismatch, list):
            object.__setattr__(self, "allow_mismatch", tuple(self.allow_mismatch))
        check_types(self)
        check_metadata(self)
        if self.adapter_dir is not None and not self.adapter_dir.strip():
            raise ValueError(f"adapter_dir={self.adapter_dir!r} is empty; name a folder, or leave it out for <run>/adapter")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs} contradict each other; give one of them")


def check_types(config: Any) -> None:
    """Raise ValueError naming the first field whose value is not of its declared type."""
    hints = get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if not isinstance(value, bool) and isinstance(value, numbers.Real):  # numpy's numbers
            value = int(value) if isinstance(value, numbers.Integral) else float(value)
            object.__setattr__(config, item.name, value)
        if not _is_a(value, hints[item.name]):
            wanted = str(item.type).replace("None", "None (the default)") if item.default is None else str(item.type)
            if isinstance(value, str) and wanted.startswith("tuple"):
                wanted += f", such as ({value!r},)"
            what = "not a number" if isinstance(value, float) and value != value else f"of type {type(value).__name__}"
            raise ValueError(f"{item.name}={value!r} is {what}; it must be {wanted}")


def _is_a(value: Any, hint: Any) -> bool:
    options = get_args(hint)
    if hint is Any:
        return True
    if isinstance(hint, type) and not options:
        if hint is float:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
        return isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    origin = getattr(hint, "__origin__", None)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_a(item, options[0]) for item in value)
    if origin is not None and isinstance(origin, type):
        return isinstance(value, origin) and all(_is_a(key, options[0]) and _is_a(item, options[1]) for key, item in value.items())
    return any(_is_a(value, option) for option in options)


def check_metadata(config: Any) -> None:
    """Raise ValueError naming the first field that is out of its range or not one of its choices."""
    for item in dataclasses.fields(config):
        value, limits = getattr(config, item.name), item.metadata
        if value is None:
            continue
        if "choices" in limits and not set(value if isinstance(value, tuple) else (value,)) <= set(limits["choices"]):
            raise ValueError(f"{item.name}={value!r} is unknown; it must be one of {', '.join(limits['choices'])}")
        if "lowest" in limits:
            check_at_least(config, item.name, limits["lowest"])
        if limits.get("highest") is not None and value > limits["highest"]:
            raise ValueError(f"{item.name}={value!r} is too large; it must be at most {limits['highest']:g}")


def check_at_least(config: Any, name: str, lowest: float) -> None:
    value = getattr(config, name)
    if value is not None and value < lowest:
        raise ValueError(f"{name}={value!r} is too small; it must be at least {lowest:g}")


def split_options(options: Mapping[str, Any], base: Any = None, also: Sequence[str] = ()) -> tuple[TrainConfig, RunConfig]:
    """Sort keyword options into the two configs. `base`: a TrainConfig or RunConfig (or both in a tuple) to start from.

    Raises ValueError that names an unknown option and the nearest known one, those that the caller takes `also` among them.
    """
    train_fields = {item.name for item in dataclasses.fields(TrainConfig)}
    run_fields = {item.name for item in dataclasses.fields(RunConfig)}
    for name in options:
        if name not in train_fields | run_fields:
            raise ValueError(f"unknown option {name}={options[name]!r}; {_nearest(name, train_fields | run_fields | set(also))}")
    given: dict[type, Any] = {}
    for config in base if isinstance(base, (tuple, list)) else (base,):
        kind = next((kind for kind in (TrainConfig, RunConfig) if isinstance(config, kind)), type(None))
        if kind in given:
            raise ValueError(f"config has two of type {kind.__name__}; give one TrainConfig, one RunConfig or one of each")
        if kind is not type(None):
            given[kind] = config
        elif config is not None:
            what = f"the class {config.__name__}" if isinstance(config, type) else f"a {type(config).__name__}"
            raise ValueError(f"config={repr(config)[:80]} is {what}; give a TrainConfig, a RunConfig or both in a tuple")
    train, run = given.get(TrainConfig, TrainConfig()), given.get(RunConfig, RunConfig())
    train = dataclasses.replace(train, **{k: v for k, v in options.items() if k in train_fields})
    run = dataclasses.replace(run, **{k: v for k, v in options.items() if k in run_fields})
    return train, run


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1) or sorted(other for other in known if other.startswith(name))
    return f"did you mean {' or '.join(close)}?" if close else "known options: " + ", ".join(sorted(known))


def settings(config: Any) -> dict[str, Any]:
    """The fields of a config as JSON, sub-networks as mappings: what a fingerprint is made of."""
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.compare}
    if subnets := values.get("subnets"):
        values["subnets"] = {name: settings(fc) for name, fc in subnets.items()}
    return values


def as_path(value: Any, name: str, remedy: str) -> Path:
    """`value` as a path, ~ expanded. Raises ValueError naming it `name` where it is none, or empty."""
    if not isinstance(value, (str, Path)) or not str(value).strip():
        what = "is empty" if isinstance(value, str) else f"is a {type(value).__name__}, which is no path"
        raise ValueError(f"{name}={repr(value)[:80]} {what}; {remedy}")
    return Path(value).expanduser()


def check_subnets(subnets: Mapping[str, SubnetConfig], **most: int | None) -> None:
    """Raise ValueError that names the first sub-network with a field beyond what the model has (None: not known)."""
    for name, fc in subnets.items():
        for item, limit in most.items():
            if limit is not None and (value := getattr(fc, item)) is not None and value > limit:
                raise ValueError(f"sub-network {name!r}: {item}={value}, but the model has {limit}; give at most that")
