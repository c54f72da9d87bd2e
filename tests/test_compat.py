"""Old notebooks keep working: each old name reaches the field it means, and says its new name once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import colabtrain
from colabtrain.compat import RENAMED, translate
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.runtime.diary import Tail

SECONDS = 120.0
CASES: dict[str, tuple[Any, Any]] = {  # old name: an old value, and what it means under the new name
    "bs": (2, 2),
    "lr_head": (1e-4, 1e-4),
    "warmup": (7, 7),
    "save_path": ("out/adapter.pt", "out/adapter"),
    "lora": (True, 16),
    "ckpt_dir": ("runs/old", "runs/old"),
    "ckpt_every": (25, 25),
    "on_ckpt": (print, print),
    "recs": (([{"qs": []}], [{"qs": [], "split": "x"}]), [{"qs": [], "split": "train"}, {"qs": [], "split": "calibration"}]),
}


@pytest.mark.colab
def test_every_old_name_has_its_case() -> None:
    assert CASES.keys() == RENAMED.keys()


@pytest.mark.colab
@pytest.mark.parametrize("old", CASES)
def test_an_old_name_is_taken_and_said(old: str) -> None:
    value, wanted = CASES[old]
    new, lines = translate({old: value, "epochs": 3}, {})
    name = RENAMED[old][0]
    assert new[name] == wanted and new["epochs"] == 3 and old not in new
    assert len(lines) == 1 and lines[0].startswith(f"{old} is called {name} now: taken as {name}=")


@pytest.mark.parametrize(("value", "r"), [(False, 0), (8, 8), (True, 16)])
def test_lora_was_a_switch_or_a_rank(value: Any, r: int) -> None:
    assert translate({"lora": value}, {})[0]["lora_r"] == r


def test_new_names_pass_through_unsaid() -> None:
    options = {"batch_size": 3, "lr_lora": 1e-4, "epochs": 1, "modalities": ("text",), "max_records": 9, "init": "x"}
    assert translate(options, {}) == (options, [])


def test_one_option_under_both_names_is_refused() -> None:
    with pytest.raises(ValueError, match="bs=2 and batch_size=3 are the same option; give batch_size alone"):
        translate({"bs": 2, "batch_size": 3}, {})


def test_the_environment_s_token_budget() -> None:
    new, lines = translate({}, {"MMJEV_TOKEN_BUDGET": "3000"})
    assert new == {"token_budget": 3000} and lines == ["MMJEV_TOKEN_BUDGET is called token_budget now: taken as token_budget=3000"]
    assert translate({"token_budget": 5}, {"MMJEV_TOKEN_BUDGET": "3000"}) == ({"token_budget": 5}, [])
    with pytest.raises(ValueError, match="MMJEV_TOKEN_BUDGET='many' is no number of tokens"):
        translate({}, {"MMJEV_TOKEN_BUDGET": "many"})


@pytest.mark.parametrize("recs", ["train", ([],), 5])
def test_recs_that_are_no_pair_are_refused(recs: Any) -> None:
    with pytest.raises(ValueError, match=r"recs=.*it must be two lists: \(train, calibration\)"):
        translate({"recs": recs}, {})


@pytest.mark.colab
def test_an_old_cell_trains_in_the_foreground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMJEV_TOKEN_BUDGET", "700")
    monkeypatch.chdir(tmp_path)
    records = help_desk(30)
    saved: list[tuple[str, int]] = []
    jev = colabtrain.MMJev.tiny(0)
    run = colabtrain.train(
        jev,
        {"desk": records},
        bs=4,
        lr_lora=1e-3,
        lr_head=1e-3,
        warmup=2,
        epochs=1,
        modalities=("text",),
        max_records=12,
        save_path="adapter.pt",
        lora=4,
        ckpt_dir=tmp_path / "ckpt",
        ckpt_every=2,
        recs=(records[:16], records[16:24]),
        on_ckpt=lambda path, step: saved.append((Path(path).name, step)),
        display=False,
    )
    assert run.state == "finished" and run.num_steps == 3
    assert saved == [("step-00000002", 2), ("step-00000003", 3)]
    assert len(jev.adapters["layers.0.self_attn.q_proj"].lora_A) == 4 and not jev.training
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    log = (tmp_path / "ckpt" / "train.log").read_text()
    for old in ("bs", "lr_head", "warmup", "save_path", "lora", "ckpt_dir", "ckpt_every", "on_ckpt", "recs", "MMJEV_TOKEN_BUDGET"):
        assert log.count(f" {old} is called ") == 1
    (calibration,) = [e for e in Tail(tmp_path / "ckpt" / "diary.jsonl").new() if e["event"] == "calibration"]
    assert calibration["results"]["full"]["overall"]["n"] == 24

    # the start of another run: what was saved is where it begins; a checkpoint overrides it
    other = colabtrain.MMJev.tiny(0)
    again = {"lora_r": 4, "steps": 1, "lr_lora": 0.0, "lr_heads": 0.0, "display": False, "run_dir": tmp_path / "warm"}
    assert colabtrain.start(other, records, init=tmp_path / "adapter", **again).wait(SECONDS) == "finished"
    trained = jev.trainable()
    assert all(torch.equal(p, trained[name]) for name, p in other.trainable().items())
    colabtrain.reset_trainable(other)
    assert colabtrain.start(other, records, init=tmp_path / "ckpt" / "checkpoints" / "step-00000002", **again).wait(SECONDS) == "finished"
    assert all(torch.equal(p, trained[name]) for name, p in other.trainable().items())


def test_scripts_of_ones_own_have_their_functions(tmp_path: Path) -> None:
    jev = colabtrain.MMJev.tiny(0)
    names = colabtrain.add_lora(jev, 4, 8.0)
    state = colabtrain.trainable_state(jev)
    assert state.keys() == names.keys() and all(tensor.device.type == "cpu" for tensor in state.values())
    with torch.no_grad():
        for parameter in jev.trainable().values():
            parameter.add_(1.0)
    changed = colabtrain.trainable_state(jev)
    assert colabtrain.save_trainable(jev, tmp_path / "mine.pt") == tmp_path / "mine"
    colabtrain.reset_trainable(jev)
    assert all(torch.equal(p, state[name]) for name, p in jev.trainable().items())
    colabtrain.load_trainable(jev, tmp_path / "mine")
    assert all(torch.equal(p, changed[name]) for name, p in jev.trainable().items())
    colabtrain.load_trainable(jev, state)
    assert all(torch.equal(p, state[name]) for name, p in jev.trainable().items())
    with pytest.raises(ValueError, match=r"the given state does not fit the model .missing 1: latents"):
        colabtrain.load_trainable(jev, {name: tensor for name, tensor in state.items() if name != "latents"})
    torch.save(changed, tmp_path / "old.pt")
    colabtrain.load_trainable(jev, tmp_path / "old.pt")
    assert all(torch.equal(p, changed[name]) for name, p in jev.trainable().items())


def test_temperatures_by_type_and_by_bucket() -> None:
    items = [("choice", n, [2.0] + [0.0] * (n - 1), [0.8] + [0.2 / (n - 1)] * (n - 1)) for n in (2, 4) for _ in range(20)]
    assert set(colabtrain.fit_temperatures(items)) == {"choice/2", "choice/3-5"}
    assert set(colabtrain.fit_temperatures(items, by="type")) == {"choice"}
    with pytest.raises(ValueError, match="by='kind' is unknown; it must be one of type, bucket"):
        colabtrain.fit_temperatures(items, by="kind")


def test_an_interrupt_of_train_stops_and_saves(tmp_path: Path) -> None:
    def interrupt(path: Path, step: int) -> None:
        import _thread

        if step == 1:
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        colabtrain.train(
            colabtrain.MMJev.tiny(0),
            help_desk(30),
            steps=10**6,
            run_dir=tmp_path,
            display=False,
            checkpoint_every=1,
            on_checkpoint=interrupt,
        )
    events = Tail(tmp_path / "diary.jsonl").new()
    assert events[-1]["event"] == "stopped" and events[-1]["step"] >= 1
