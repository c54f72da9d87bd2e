"""Adapters on disk: peft reads ours, we read back what we wrote, and nothing else is taken for one."""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from colabtrain.config import SubnetConfig
from colabtrain.mmjev import adapter, backbone, tiny
from colabtrain.mmjev.adapter import load_adapter, save_adapter
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev
from colabtrain.mmjev.packing import Piece, Plan, pack
from colabtrain.records.schema import Seg

LORA = "layers.3.self_attn.q_proj.lora_A"


def changed(model: MMJev, seed: int = 1) -> MMJev:
    """Adapters of rank 4, and every trained tensor moved away from its start."""
    model.configure(model.default_subnets(), lora_r=4, lora_alpha=8.0)
    model.reset_trainable(0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def fresh() -> MMJev:
    """Another model, which has learned something else."""
    return changed(MMJev.tiny(), seed=2)


@pytest.fixture(scope="module")
def trained() -> MMJev:
    return changed(MMJev.tiny())


@pytest.fixture(scope="module")
def other() -> MMJev:
    return fresh()


def values(model: MMJev) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.trainable().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


ALL_FILES = {"adapter_model.safetensors", "adapter_config.json", "heads_latents.safetensors", "colabtrain.json"}
TEMPERATURES = {"full": {"types": {}, "buckets": {"choice/3-5": {"temperature": 1.5}}}}


@pytest.mark.colab
def test_what_is_saved_is_loaded(trained: MMJev, other: MMJev, tmp_path: Path) -> None:
    folder = save_adapter(trained, tmp_path / "a" / "b", TEMPERATURES)
    assert folder == tmp_path / "a" / "b" and files(folder) == ALL_FILES and files(folder.parent) == {"b"}
    about = load_adapter(other, folder)
    assert same(values(trained), values(other))
    assert about["temperatures"] == TEMPERATURES and about["base"] == json.loads(json.dumps(trained.fingerprint()))
    assert {name: SubnetConfig(**fc) for name, fc in about["subnets"].items()} == trained.default_subnets()
    record, fc = help_desk(1)[0], trained.default_subnets()["fast"]
    plans = [model.plan(model.encode_state(record.state, fc), record.qs, fc) for model in (trained, other)]
    with torch.no_grad():
        assert torch.equal(trained.scores(trained.pack(plans[:1]), fc), other.scores(other.pack(plans[1:]), fc))


def test_names_and_config_are_pefts(trained: MMJev, tmp_path: Path) -> None:
    folder = save_adapter(trained, tmp_path / "a")
    weights = load_file(folder / "adapter_model.safetensors")
    assert set(weights) == {f"base_model.model.{name}.weight" for name in trained.trainable() if ".lora_" in name}
    assert set(load_file(folder / "heads_latents.safetensors")) == {
        "heads.3.weight",
        "heads.3.bias",
        "heads.6.weight",
        "heads.6.bias",
        "latents",
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == list(trained.adapters) and "layers.3.self_attn.q_proj" in config["target_modules"]
    wanted = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none", "base_model_name_or_path": "tiny-0"}
    assert {name: config[name] for name in wanted} == wanted


def hidden(lm: Any, ids: list[int]) -> Tensor:
    """Final hidden states of a plain sequence, through our forward."""
    plan = Plan(reads=list(range(len(ids))), branches=[len(ids)], is_noul=[False])
    plan.put(Piece("text", ids), 0)
    row = pack([plan])
    return backbone.forward(lm, lm.embed_tokens(row.ids)[None], row, SubnetConfig(exit_layer=6, sibling_from=None))


def causal(lm: Any) -> Any:
    """`lm` inside a Gemma3nForCausalLM, where its modules are called model.layers..."""
    from transformers import Gemma3nForCausalLM

    with torch.random.fork_rng(devices=[]):
        whole = Gemma3nForCausalLM(lm.config).eval()
    whole.model = lm
    return whole


def text_model(whole: Any) -> Any:
    return getattr(whole, "model", whole)


def no_network(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a socket was opened")


@pytest.mark.parametrize("wrap", [lambda lm: lm, causal], ids=["text model", "causal model"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
def test_peft_loads_it_with_equal_outputs(wrap: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    lm = tiny.language_model(0)
    words = tiny.HashedWords()
    model = changed(MMJev(wrap(lm), lm, words, 5, 6, "mine"))
    monkeypatch.setattr(socket, "socket", no_network)
    folder = save_adapter(model, tmp_path / "a")
    plain = wrap(tiny.language_model(0))
    ids = list(range(7, 47))
    with torch.no_grad():
        before = hidden(text_model(plain), ids)
        loaded = peft.PeftModel.from_pretrained(plain, str(folder)).eval()
        theirs = text_model(loaded.base_model.model)(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        ours = hidden(lm, ids)
    assert (ours - before).abs().max() > 0.01, "the adapter does something"
    assert (ours - theirs).abs().max() == 0.0


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
def test_pefts_own_folder_is_read(trained: MMJev, other: MMJev, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = save_adapter(trained, tmp_path / "ours")
    peft.PeftModel.from_pretrained(tiny.language_model(0), str(folder)).save_pretrained(
        str(tmp_path / "theirs"), save_embedding_layers=False
    )
    os.link(folder / "heads_latents.safetensors", tmp_path / "theirs" / "heads_latents.safetensors")
    reset(other)
    assert load_adapter(other, tmp_path / "theirs") == {}
    assert same(values(trained), values(other))


def reset(model: MMJev) -> None:
    model.reset_trainable(3)


# Writing


def test_an_adapter_is_replaced_and_nothing_else(trained: MMJev, other: MMJev, tmp_path: Path) -> None:
    folder = save_adapter(trained, tmp_path / "a", TEMPERATURES)
    assert load_adapter(other, save_adapter(trained, folder))["temperatures"] == {}
    assert files(tmp_path) == {"a"}
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds \['notes\.txt'\], which a new adapter would replace"):
        save_adapter(trained, folder)
    with pytest.raises(ValueError, match=r"notes\.txt is a file; give a folder"):
        save_adapter(trained, folder / "notes.txt")
    assert (folder / "notes.txt").read_text() == "mine" and files(tmp_path) == {"a"}


@pytest.mark.colab
@pytest.mark.parametrize("call", range(13))
def test_a_write_that_fails_leaves_a_whole_adapter(
    trained: MMJev, other: MMJev, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The disk fails at the n-th call that touches it: 4 files, 5 syncs, 2 renames, and a sync of the folder around it."""
    reset(other)
    folder = save_adapter(other, tmp_path / "a")
    old, calls = values(other), iter(range(100))

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                raise OSError("No space left on device")
            return function(*args, **kwargs)

        return run

    raised = False
    with monkeypatch.context() as patch:
        for owner, name in ((adapter, "save_file"), (Path, "write_text"), (os, "fsync"), (os, "rename")):
            patch.setattr(owner, name, failing(getattr(owner, name)))
        try:
            save_adapter(trained, folder)
        except OSError:
            raised = True
    assert raised == (call < 12)
    load_adapter(other, folder)
    assert same(values(other), old if call < 11 else values(trained))
    assert files(tmp_path) == {"a"}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (LORA, lambda t: t[0, 0].fill_(math.nan), rf"tiny-0: tensor '{LORA}' is not finite"),
        ("heads.6.bias", lambda t: t.fill_(math.inf), r"tensor 'heads\.6\.bias' is not finite"),
        ("latents", lambda t: t[5].zero_(), r"tensor 'latents': row 5 of 8 is exactly zero"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    trained: MMJev, tmp_path: Path, name: str, change: Callable[[Tensor], Any], message: str
) -> None:
    kept = values(trained)
    with torch.no_grad():
        change(trained.trainable()[name])
    try:
        with pytest.raises(ValueError, match=message):
            save_adapter(trained, tmp_path / "a")
    finally:
        with torch.no_grad():
            trained.trainable()[name].copy_(kept[name])
    assert files(tmp_path) == set()


def test_a_model_that_has_no_adapter_or_other_exits_says_so(trained: MMJev, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiny-0 has no LoRA; call model\.configure"):
        save_adapter(MMJev.tiny(), tmp_path / "a")
    with pytest.raises(ValueError, match=r"exit after layers \['4'\], the heads are for \['3', '6'\]; give subnets="):
        save_adapter(trained, tmp_path / "a", subnets={"x": SubnetConfig(exit_layer=4)})
    stray = changed(MMJev.tiny())
    stray.base = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="text model of tiny-0 is no part of its base"):
        save_adapter(stray, tmp_path / "a")


def test_sub_networks_of_ones_own_are_kept(tmp_path: Path) -> None:
    model, subnets = MMJev.tiny(), {"one": SubnetConfig(exit_layer=4, n_latents=2, sibling_from=None)}
    model.configure(subnets, lora_r=2, lora_alpha=3.0)
    about = load_adapter(model, save_adapter(model, tmp_path / "a", subnets=subnets))
    assert SubnetConfig(**about["subnets"]["one"]) == subnets["one"]


# Reading


def pt(tmp_path: Path, content: Any) -> Path:
    torch.save(content, tmp_path / "old.pt")
    return tmp_path / "old.pt"


def peft_style(tensors: dict[str, Tensor], at: str, end: str = ".weight") -> dict[str, Tensor]:
    return {f"base_model.model.{at}{name}{end}" if ".lora_" in name else name: tensor for name, tensor in tensors.items()}


SHAPES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "our names": lambda t: t,
    "peft's names": lambda t: peft_style(t, ""),
    "of another class": lambda t: peft_style(t, "model.language_model."),
    "of a live peft model": lambda t: peft_style(t, "model.", ".default.weight"),
    "state": lambda t: {"state": t, "step": 100, "notes": "a"},
    "lora beside the rest": lambda t: {
        "lora": peft_style({n: v for n, v in t.items() if ".lora_" in n}, ""),
        **{n: v for n, v in t.items() if ".lora_" not in n},
    },
    "trainable beside an optimizer": lambda t: {"trainable": t, "optimizer": {"state": {0: torch.ones(3)}}},
    "half precision": lambda t: {name: tensor.bfloat16() for name, tensor in t.items()},
    "parameters": lambda t: {name: torch.nn.Parameter(tensor) for name, tensor in t.items()},
}


@pytest.mark.colab
@pytest.mark.parametrize("shape", SHAPES)
def test_old_files_of_tensors_are_read(trained: MMJev, other: MMJev, tmp_path: Path, shape: str) -> None:
    reset(other)
    assert load_adapter(other, pt(tmp_path, SHAPES[shape](values(trained)))) == {}
    wanted = values(trained) if shape != "half precision" else {name: t.bfloat16().float() for name, t in values(trained).items()}
    assert same(values(other), wanted)


class Planted:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.colab
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [None, 2, 5], ids=["torch.save", "pickle 2", "pickle 5"])
def test_a_pickle_that_would_execute_is_refused(trained: MMJev, other: MMJev, tmp_path: Path, protocol: int | None) -> None:
    reset(other)
    before, content = values(other), {**values(trained), "x": Planted(tmp_path / "executed")}
    path = pt(tmp_path, content)
    if protocol is not None:
        path.write_bytes(pickle.dumps(content["x"], protocol=protocol))
    why = "UnpicklingError on reading it" if protocol == 5 else r"it asks for \w+\.mkdir, and nothing in it is executed"
    with pytest.raises(ValueError, match=rf"old\.pt is refused: not a file of plain tensors \({why}\)"):
        load_adapter(other, path)
    assert files(tmp_path) == {"old.pt"} and same(values(other), before)
    torch.load(path, weights_only=False) if protocol is None else pickle.loads(path.read_bytes())
    assert "executed" in files(tmp_path), "the trap works"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "on reading it"), (b"PK\x03\x04 cut off", "on reading it"), (b"\x80\x02]q\x00.", "on reading it|holds a list")],
)
def test_other_files_are_refused(other: MMJev, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.pt is refused: .*({message})"):
        load_adapter(other, tmp_path / "x.pt")


def test_a_list_is_refused(other: MMJev, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it holds a list, not a mapping name -> tensor"):
        load_adapter(other, pt(tmp_path, [torch.ones(2)]))


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (lambda t: without(t, LORA, "heads.6.bias"), rf"missing 2: heads\.6\.bias, {LORA}\)"),
    "extra": (lambda t: {**t, "heads.5.weight": torch.ones(1)}, r"extra 1: heads\.5\.weight\)"),
    "misshapen": (lambda t: {**t, "latents": torch.ones(4, 128)}, r"misshapen 1: latents \[4, 128\] for \[8, 128\]"),
    "integers": (lambda t: {**t, LORA: torch.ones(4, 128, dtype=torch.int64)}, rf"no plain numbers 1: {LORA}"),
    "sparse": (lambda t: {**t, LORA: torch.ones(4, 128).to_sparse()}, rf"no plain numbers 1: {LORA}"),
    "twice": (lambda t: {**t, f"base_model.model.{LORA}.weight": t[LORA].clone()}, rf"has '{LORA}' twice, under two names"),
    "not finite": (lambda t: {**t, LORA: torch.full((4, 128), math.nan)}, rf"tensor '{LORA}' is not finite"),
    "infinite": (lambda t: {**t, "heads.3.weight": torch.full((1, 128), math.inf)}, r"tensor 'heads\.3\.weight' is not finite"),
    "zero latent": (lambda t: {**t, "latents": t["latents"] * torch.arange(-2.0, 6.0)[:, None]}, "'latents': row 2 of 8 is exactly zero"),
    "tiny latent": (lambda t: {**t, "latents": t["latents"] * 1e-30}, "'latents': row 0 of 8 is not finite, or too large or small"),
}


@pytest.mark.colab
@pytest.mark.parametrize(("kind", "case"), [("pt", case) for case in WRONG] + [("checkpoint", case) for case in WRONG if case != "sparse"])
def test_tensors_that_do_not_fit_are_named(trained: MMJev, other: MMJev, tmp_path: Path, case: str, kind: str) -> None:
    change, message = WRONG[case]
    before, content = values(other), change(values(trained))
    path = pt(tmp_path, content) if kind == "pt" else checkpoint(tmp_path, content)
    with pytest.raises(ValueError, match=message):
        load_adapter(other, path)
    assert same(values(other), before), "nothing is taken over in part"


def test_at_most_eight_names_are_said(trained: MMJev, other: MMJev, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing 68: ") as error:
        load_adapter(other, pt(tmp_path, {"latents": values(trained)["latents"]}))
    assert str(error.value).count(", ") == 7


def checkpoint(folder: Path, tensors: dict[str, Tensor], alpha: float = 8.0) -> Path:
    save_file(tensors, folder / "trainable.safetensors")
    (folder / "state.json").write_text(json.dumps({"fingerprint": {"config.lora_alpha": alpha}}))
    return folder


@pytest.mark.colab
def test_a_checkpoint_folder_is_read(trained: MMJev, other: MMJev, tmp_path: Path) -> None:
    reset(other)
    assert load_adapter(other, checkpoint(tmp_path, values(trained))) == {}
    assert same(values(other), values(trained))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": 32}, r"lora_alpha=32, but the model has 8; call model\.configure\(subnets, lora_r, lora_alpha=32\)"),
        ({"use_dora": True}, r"use_dora=True; only plain LoRA can be loaded"),
        ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern=\{'q_proj': 8\}; only plain LoRA"),
        ({"peft_type": "IA3"}, r"peft_type is 'IA3'; only LORA can be loaded"),
    ],
)
def test_another_kind_of_adapter_is_refused(trained: MMJev, other: MMJev, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = save_adapter(trained, tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        load_adapter(other, folder)


def test_another_alpha_in_a_checkpoint_is_refused(trained: MMJev, other: MMJev, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora_alpha=16\.0, but the model has 8"):
        load_adapter(other, checkpoint(tmp_path, values(trained), alpha=16.0))


def test_a_checkpoint_without_adapters_has_no_alpha_that_could_be_another(tmp_path: Path) -> None:
    """lora_r=0: heads and latents alone."""
    one, two = MMJev.tiny(), MMJev.tiny()
    for model in (one, two):
        model.configure(model.default_subnets(), lora_r=0, lora_alpha=32.0)
    with torch.no_grad():
        for parameter in one.trainable().values():
            parameter.add_(1.0)
    load_adapter(two, checkpoint(tmp_path, values(one), alpha=16.0))
    assert same(values(two), values(one)) and values(one)


def test_damaged_and_missing_files_are_named(trained: MMJev, other: MMJev, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"adapter '.*nowhere' does not exist"):
        load_adapter(other, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds neither adapter_model\.safetensors nor trainable\.safetensors"):
        load_adapter(other, tmp_path)
    folder = save_adapter(trained, tmp_path / "a")
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors cannot be read"):
        load_adapter(other, folder)
    (folder / "adapter_model.safetensors").write_bytes(whole)
    (folder / "heads_latents.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing 5: heads\.3\.bias, heads\.3\.weight, heads\.6\.bias, heads\.6\.weight, latents"):
        load_adapter(other, folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"adapter_config\.json holds no JSON object"):
        load_adapter(other, folder)


# Soft tokens


@pytest.mark.colab
@pytest.mark.parametrize(
    ("row", "why"),
    [
        (torch.zeros(128), "exactly zero"),
        (torch.full((128,), math.nan), "not finite"),
        (torch.tensor([math.inf] + [1.0] * 127), "not finite"),
        (torch.full((128,), 1e-30), "not finite, or too large or small for fp32"),
    ],
)
def test_a_soft_token_without_a_magnitude_is_refused(trained: MMJev, row: Tensor, why: str) -> None:
    soft = torch.ones(6, 128)
    soft[4] = row
    with pytest.raises(ValueError, match=f"soft tokens of a segment of kind 'image': row 4 of 6 is {why}.*NaN gradients; leave such rows"):
        trained.check_state([Seg("text", "x"), Seg("image", soft)])
    soft[4] = torch.tensor([1e-3] + [0.0] * 127)
    trained.check_state([Seg("image", soft)])  # one channel is enough


def test_such_a_token_would_have_made_nan_gradients(trained: MMJev) -> None:
    """The reason of the refusal, held as a fact: with transformers' AltUp a zero row has no finite gradient."""
    lm = tiny.language_model(0)
    rows = torch.zeros(1, 2, 128).index_fill(1, torch.tensor([0]), 1.0).requires_grad_()
    backbone.expand_altup(lm, rows).sum().backward()
    assert rows.grad is not None and torch.isfinite(rows.grad[0, 0]).all() and not torch.isfinite(rows.grad[0, 1]).any()
