"""Config: every wrong value is refused by field and value, and options find their config."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
import types
from typing import Any, NamedTuple

import numpy
import pytest

from colabtrain.config import RunConfig, SubnetConfig, TrainConfig, default_subnets, split_options

WRONG_VALUES: list[tuple[type, str, Any]] = [
    # another type
    (TrainConfig, "seed", "0"),
    (TrainConfig, "seed", 1.0),
    (TrainConfig, "seed", None),
    (TrainConfig, "batch_size", True),
    (TrainConfig, "batch_size", 4.0),
    (TrainConfig, "token_budget", "6000"),
    (TrainConfig, "lr_lora", "2e-4"),
    (TrainConfig, "lr_heads", True),
    (TrainConfig, "lr_heads", math.nan),
    (TrainConfig, "clip_norm", None),
    (TrainConfig, "clip", 1),
    (TrainConfig, "warmup_steps", 0.5),
    (TrainConfig, "exclude_tasks", "typed_decisions"),
    (TrainConfig, "exclude_tasks", "typed_decisions"),
    (TrainConfig, "exclude_tasks", (1,)),
    (TrainConfig, "exclude", "snake_game"),
    (TrainConfig, "exclude", (len,)),
    (TrainConfig, "modalities", "text"),
    (TrainConfig, "modalities", ("text", None)),
    (TrainConfig, "subnets", {1: SubnetConfig()}),
    (TrainConfig, "subnets", [SubnetConfig()]),
    (RunConfig, "steps", "10"),
    (RunConfig, "epochs", 1.5),
    (RunConfig, "checkpoint_seconds", "5 min"),
    (RunConfig, "first_checkpoint_seconds", math.nan),
    (RunConfig, "keep_local", False),
    (SubnetConfig, "n_latents", None),
    (SubnetConfig, "exit_layer", 20.0),
    (SubnetConfig, "media_exit", "8"),
    (SubnetConfig, "sibling_from", True),
    (SubnetConfig, "ffn_width", 0.5),
    # too small
    (TrainConfig, "batch_size", 0),
    (TrainConfig, "token_budget", -1),
    (TrainConfig, "lr_lora", -1e-4),
    (TrainConfig, "lr_heads", -math.inf),
    (TrainConfig, "warmup_steps", -1),
    (TrainConfig, "clip_norm", -0.5),
    (TrainConfig, "brier_weight", -0.1),
    (TrainConfig, "rps_weight", -1),
    (TrainConfig, "kl_weight", -2.0),
    (TrainConfig, "lora_r", -1),
    (TrainConfig, "teacher", "ema"),
    (TrainConfig, "kl_temperature", 0.0),
    (RunConfig, "on_unrecoverable", "sleep"),
    (TrainConfig, "lora_alpha", -1.0),
    (TrainConfig, "lora_dropout", -0.01),
    (TrainConfig, "max_state_chars", 0),
    (TrainConfig, "max_options", 1),
    (TrainConfig, "calibration_share", -0.05),
    (TrainConfig, "max_records", 0),
    (RunConfig, "steps", 0),
    (RunConfig, "epochs", 0),
    (RunConfig, "checkpoint_every", 0),
    (RunConfig, "checkpoint_seconds", -1.0),
    (RunConfig, "keep_local", 0),
    (RunConfig, "log_every", 0),
    (RunConfig, "eval_every", -50),
    (RunConfig, "max_eval_records", 0),
    (SubnetConfig, "n_latents", -1),
    (SubnetConfig, "exit_layer", 0),
    (SubnetConfig, "media_exit", -1),
    (SubnetConfig, "sibling_from", -2),
    (SubnetConfig, "ffn_width", 0),
    # too large
    (TrainConfig, "lora_dropout", 1.0),
    (TrainConfig, "calibration_share", 0.51),
    # not a choice
    (TrainConfig, "clip", "layer"),
    (TrainConfig, "exclude", ("snake_game", "chess_game")),
]


@pytest.mark.parametrize(("config", "name", "value"), WRONG_VALUES, ids=lambda item: getattr(item, "__name__", None) or repr(item))
def test_wrong_value_is_refused_by_field_and_value(config: type, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")) as error:
        config(**{name: value})
    assert re.search(r"must be", str(error.value)), "the message says what is allowed"


def test_limits_are_named() -> None:
    with pytest.raises(ValueError, match=r"batch_size=0 is too small; it must be at least 1"):
        TrainConfig(batch_size=0)
    with pytest.raises(ValueError, match=r"calibration_share=0.6 is too large; it must be at most 0.5"):
        TrainConfig(calibration_share=0.6)
    with pytest.raises(ValueError, match=r"clip='all' is unknown; it must be one of group, joint"):
        TrainConfig(clip="all")
    with pytest.raises(ValueError, match=r"exclude=\('chess_game',\) is unknown; it must be one of snake_game"):
        TrainConfig(exclude=("chess_game",))
    with pytest.raises(ValueError, match=r"batch_size='4' is of type str; it must be int"):
        TrainConfig(batch_size="4")  # type: ignore[arg-type]


def test_type_error_does_not_call_none_the_default_where_it_is_not() -> None:
    with pytest.raises(ValueError, match=r"sibling_from='x'") as error:
        SubnetConfig(sibling_from="x")  # type: ignore[arg-type]
    assert "the default" not in str(error.value)
    with pytest.raises(ValueError, match=r"media_exit='x' is of type str; it must be int \| None \(the default\)"):
        SubnetConfig(media_exit="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (TrainConfig, {"lr_lora": 0, "lr_heads": 1, "warmup_steps": 0, "calibration_share": 0.0, "lora_dropout": 0.99, "max_options": 2}),
        (TrainConfig, {"calibration_share": 0.5, "clip": "joint", "modalities": (), "exclude_tasks": (), "exclude": (), "max_records": 1}),
        (RunConfig, {"steps": 1, "checkpoint_seconds": 0, "keep_local": 1, "eval_every": 1}),
        (SubnetConfig, {"n_latents": 0, "exit_layer": 1, "media_exit": 0, "sibling_from": None, "ffn_width": 1}),
    ],
)
def test_values_at_the_limit_are_kept(config: type, fields: dict[str, Any]) -> None:
    made = config(**fields)
    assert {name: getattr(made, name) for name in fields} == fields


def test_defaults_are_those_of_the_system() -> None:
    train, run = TrainConfig(), RunConfig()
    wanted = {
        "batch_size": 4,
        "token_budget": 6000,
        "clip_norm": 1.0,
        "brier_weight": 0.1,
        "rps_weight": 0.0,
        "kl_weight": 0.5,
        "lora_r": 16,
        "lora_alpha": 32.0,
        "lora_dropout": 0.05,
        "max_state_chars": 1500,
        "max_options": 32,
        "calibration_share": 0.05,
        "exclude_tasks": ("typed_decisions", "snake_syn"),
        "exclude": ("snake_game",),
    }
    assert {name: getattr(train, name) for name in wanted} == wanted
    assert (run.checkpoint_every, run.checkpoint_seconds, run.first_checkpoint_seconds, run.keep_local) == (200, 300.0, 60.0, 3)


def test_configs_are_frozen() -> None:
    for config, name in ((TrainConfig(), "seed"), (RunConfig(), "steps"), (SubnetConfig(), "exit_layer")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 3)


def test_empty_subnets_are_refused() -> None:
    with pytest.raises(ValueError, match="subnets is empty"):
        TrainConfig(subnets={})


def test_steps_and_epochs_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"steps=10 and epochs=2 contradict"):
        RunConfig(steps=10, epochs=2)
    with pytest.raises(ValueError, match=r"steps=10 and epochs=2 contradict"):
        split_options({"epochs": 2}, base=RunConfig(steps=10))
    with pytest.raises(ValueError, match=r"steps=3 and epochs=1 contradict"):
        split_options({"steps": 3, "epochs": 1})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("lr_lra", "lr_lora"), ("batchsize", "batch_size"), ("epoch", "epochs"), ("keep_locals", "keep_local"), ("Seed", "seed")],
)
def test_unknown_option_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown option {wrong}=7; did you mean {right}\?"):
        split_options({wrong: 7})


def test_unknown_option_far_from_all_lists_them() -> None:
    with pytest.raises(ValueError, match=r"unknown option zzz='x'; known options: ") as error:
        split_options({"zzz": "x"})
    known = str(error.value).partition("known options: ")[2].split(", ")
    fields = {item.name for config in (TrainConfig, RunConfig) for item in dataclasses.fields(config)}
    assert known == sorted(fields)


def test_split_options_sorts_into_both_configs() -> None:
    train, run = split_options({"seed": 3, "steps": 20, "lora_r": 4, "log_every": 1})
    assert train == TrainConfig(seed=3, lora_r=4)
    assert run == RunConfig(steps=20, log_every=1)
    assert split_options({}) == (TrainConfig(), RunConfig())


def test_split_options_precedence() -> None:
    """An option beats the base, the base beats the default, and a base is not changed."""
    train_base, run_base = TrainConfig(seed=1, batch_size=2), RunConfig(steps=5, keep_local=1)
    both = split_options({"seed": 9, "steps": 6}, base=(train_base, run_base))
    assert both == (TrainConfig(seed=9, batch_size=2), RunConfig(steps=6, keep_local=1))
    assert split_options({"seed": 9, "steps": 6}, base=(run_base, train_base)) == both
    assert split_options({"steps": 6}, base=train_base) == (train_base, RunConfig(steps=6))
    assert split_options({"seed": 9}, base=run_base) == (TrainConfig(seed=9), run_base)
    assert split_options({"steps": None, "epochs": 2}, base=run_base) == (TrainConfig(), RunConfig(epochs=2, keep_local=1))
    assert (train_base, run_base) == (TrainConfig(seed=1, batch_size=2), RunConfig(steps=5, keep_local=1))


def test_split_options_checks_values_and_base() -> None:
    with pytest.raises(ValueError, match=r"lora_r=-1"):
        split_options({"lora_r": -1}, base=TrainConfig())
    with pytest.raises(ValueError, match=r"config=\{'seed': 1\} is a dict; give a TrainConfig, a RunConfig or both"):
        split_options({}, base={"seed": 1})
    with pytest.raises(ValueError, match=r"config='fast' is a str"):
        split_options({}, base=(TrainConfig(), "fast"))


def test_default_subnets_of_the_35_layer_model() -> None:
    assert default_subnets(35, 16384) == {
        "full": SubnetConfig(n_latents=8, exit_layer=35, media_exit=None, sibling_from=14, ffn_width=None),
        "fast": SubnetConfig(n_latents=8, exit_layer=20, media_exit=8, sibling_from=14, ffn_width=8192),
    }
    assert next(iter(default_subnets(35, 16384))) == "full", "the first one is the teacher"


@pytest.mark.parametrize(("layers", "width", "fast"), [(30, 8192, (17, 7, 12, 4096)), (6, 256, (3, 1, 2, 128))])
def test_default_subnets_by_proportion(layers: int, width: int, fast: tuple[int, int, int, int]) -> None:
    subnets = default_subnets(layers, width)
    assert subnets["full"] == SubnetConfig(exit_layer=layers, sibling_from=fast[2])
    assert dataclasses.astuple(subnets["fast"]) == (8, *fast, None)


@pytest.mark.parametrize("layers", range(1, 61))
def test_default_subnets_are_sane_at_any_depth(layers: int) -> None:
    full, fast = default_subnets(layers, 1).values()
    assert full.exit_layer == layers and full.ffn_width is None and full.media_exit is None
    assert 1 <= fast.exit_layer <= layers and fast.ffn_width == 1
    assert fast.media_exit is not None and 1 <= fast.media_exit <= fast.exit_layer
    assert fast.sibling_from == full.sibling_from and fast.sibling_from is not None and fast.sibling_from >= 1


def test_config_imports_no_torch() -> None:
    code = "import sys, colabtrain.config; print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_toml_file_can_say_is_taken() -> None:
    """Lists for tuples, tables for sub-networks, and numpy's integers."""
    config = TrainConfig(exclude_tasks=["a"], exclude=["snake_game"], modalities=["text"], subnets={"only": {"exit_layer": 3}})  # type: ignore[arg-type,dict-item]
    assert (config.exclude_tasks, config.exclude, config.modalities) == (("a",), ("snake_game",), ("text",))
    assert config.subnets == {"only": SubnetConfig(exit_layer=3)}
    steps = RunConfig(steps=numpy.int64(7)).steps  # type: ignore[arg-type]
    assert steps == 7 and type(steps) is int
    with pytest.raises(ValueError, match=r"subnets\['x'\]=.*'exits': 3.* has an unknown field 'exits'; a sub-network has n_latents"):
        TrainConfig(subnets={"x": {"exits": 3}})  # type: ignore[dict-item]


class Positional(NamedTuple):
    """As in code of one's own: four fields, by position."""

    n_latents: int
    exit_layer: int
    media_exit: int | None
    sibling_from: int | None


@pytest.mark.parametrize(
    "fc", [Positional(4, 3, 1, 2), types.SimpleNamespace(**Positional(4, 3, 1, 2)._asdict()), (4, 3, 1, 2), [4, 3, 1, 2]]
)
def test_sub_networks_may_be_ones_own_objects(fc: Any) -> None:
    subnets = TrainConfig(subnets={"small": fc}).subnets
    assert subnets is not None and subnets["small"] == SubnetConfig(4, 3, 1, 2)
    assert subnets["small"].given is (fc if hasattr(fc, "exit_layer") else None)  # what the person's own model gets to see


@pytest.mark.parametrize("fc", [6, "fast", (8, 6, None, 2, 128, 1), object()])
def test_what_is_no_sub_network_is_refused_by_name(fc: Any) -> None:
    with pytest.raises(ValueError, match=r"subnets\['small'\]=.* must be a SubnetConfig, a mapping of its fields"):
        TrainConfig(subnets={"small": fc})
