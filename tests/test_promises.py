"""Promises of the training that no other test holds: one a test, each on real parts."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Halt, events
from safetensors.torch import load_file
from toy_task import LentTask, ToyTask

import colabtrain
from colabtrain.compat import TOKEN_BUDGET_VARIABLE
from colabtrain.config import RunConfig, TrainConfig
from colabtrain.elastic import task as elastic_task
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev import backbone
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.lora import add_lora
from colabtrain.mmjev.model import LATENT_WORD, MMJev
from colabtrain.records.selection import select
from colabtrain.runtime.diary import Diary
from colabtrain.runtime.recorder import Recorder
from colabtrain.runtime.run import Run
from colabtrain.task import StepReport

SECONDS = 120.0


def start(folder: Path, model: MMJev | None = None, **options: Any) -> Run:
    return colabtrain.start(model or MMJev.tiny(0), help_desk(24), **{"run_dir": folder, "steps": 1, "display": False, **options})


def prepared(**options: Any) -> ElasticTask:
    train = TrainConfig(**options)
    task = ElasticTask(MMJev.tiny(0), select(help_desk(24), train), train, RunConfig(steps=4))
    task.prepare()
    return task


# What is trained


@pytest.mark.colab
def test_the_adapters_of_e4b_have_28_3_million_parameters() -> None:
    from transformers import Gemma3nTextConfig, Gemma3nTextModel

    with torch.device("meta"):
        lm = Gemma3nTextModel(Gemma3nTextConfig())  # E4B's size is the config's default
    adapters = add_lora(lm, 16, 32.0, mlp_from=10)
    assert sum(p.numel() for adapter in adapters.values() for p in (adapter.lora_A, adapter.lora_B)) == 28_344_320
    assert "layers.19.self_attn.k_proj" in adapters and "layers.20.self_attn.k_proj" not in adapters
    assert "layers.10.mlp.up_proj" in adapters and "layers.9.mlp.up_proj" not in adapters


def test_latents_start_around_the_mean_embedding_of_summary() -> None:
    model = MMJev.tiny(0)
    mean = backbone.embed(model.lm, torch.tensor(model.tokenizer.encode(LATENT_WORD))).float().mean(dim=0)
    noise = (model.latents.detach() - mean) / (0.02 * mean.std())
    assert model.latents.shape == (8, model.lm.config.hidden_size)
    assert abs(float(noise.mean())) < 0.15 and float(noise.std()) == pytest.approx(1.0, abs=0.1)
    assert len({tuple(row) for row in model.latents.tolist()}) == 8


@pytest.mark.colab
def test_the_optimizer_is_adamw_with_its_defaults_and_no_decay() -> None:
    task = prepared()
    assert type(task.optimizer.adamw) is torch.optim.AdamW
    for group in task.optimizer.adamw.param_groups:
        assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (0.0, (0.9, 0.999), 1e-8)


@pytest.mark.colab
def test_recomputed_layers_are_never_of_the_reentrant_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    real, kinds = backbone.checkpoint, list[bool]()

    def checkpoint(*arguments: Any, use_reentrant: bool, **named: Any) -> Any:
        kinds.append(use_reentrant)
        return real(*arguments, use_reentrant=use_reentrant, **named)

    monkeypatch.setattr(backbone, "checkpoint", checkpoint)
    prepared().step(0, 2)
    assert kinds and not any(kinds)


# Names of before, and the environment


@pytest.mark.colab
def test_the_environment_overrules_neither_a_config_nor_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_BUDGET_VARIABLE, "1234")
    assert colabtrain.start(task=ToyTask(2), run_dir=tmp_path / "task", display=False).wait(SECONDS) == "finished"
    for name, options, budget in (("config", {"config": TrainConfig(token_budget=700)}, 700), ("run", {"config": RunConfig()}, 1234)):
        assert start(tmp_path / name, **options).wait(SECONDS) == "finished"
        (path,) = (tmp_path / name / "checkpoints").iterdir()
        assert json.loads((path / "state.json").read_text())["fingerprint"]["config.token_budget"] == budget


# What a step reports


class Far(torch.Tensor):
    """A number that is still being computed on an accelerator."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


def test_what_an_accelerator_computes_is_read_at_most_ten_steps_late(tmp_path: Path) -> None:
    """And in order, with what was skipped at its own step."""
    recorder = Recorder(Diary(tmp_path), 50, 100)
    for step in range(1, 26):
        far = [torch.tensor(value).as_subclass(Far) for value in (float(step), float(step == 7))]
        recorder.add(step, StepReport(loss={"full": far[0]}, skipped=far[1]), 0.0)
        assert len(events(tmp_path, "step")) == step // 10 * 10
    recorder.flush()  # as before a checkpoint
    assert [(event["step"], event["loss"]["full"], event["skipped"]) for event in events(tmp_path)] == [
        (i, i, i == 7) for i in range(1, 26)
    ]


# Saving


def test_a_hook_that_raises_costs_nothing(tmp_path: Path) -> None:
    def hook(path: Path, step: int) -> None:
        raise OSError("no route to host")

    assert start(tmp_path, steps=2, checkpoint_every=1, on_checkpoint=hook).wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path, "hook_failed")] == [1, 2]
    assert "no route to host; training goes on" in events(tmp_path, "hook_failed")[0]["text"]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
)
def test_a_save_that_finds_no_memory_costs_that_save_alone(error: Exception, tmp_path: Path) -> None:
    class Full(ToyTask):
        def state(self) -> Any:
            self.asked += 1
            if self.asked == 3:  # the first save; before it, state() was looked at twice
                raise error
            return super().state()

    task = Full(3)
    task.asked = 0
    run = colabtrain.start(task=task, run_dir=tmp_path, display=False, checkpoint_every=1)
    assert run.wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path, "checkpoint_failed")] == [1]
    assert [event["step"] for event in events(tmp_path, "checkpoint_saved")] == [2, 3]


@pytest.mark.colab
def test_init_sets_the_start_and_a_checkpoint_overrides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is that of the cell, wherever later cells go."""
    monkeypatch.chdir(tmp_path)
    assert start(tmp_path / "first", steps=3).wait(SECONDS) == "finished"
    first, halt = MMJev.tiny(0), Halt(0)
    first.configure(first.default_subnets(), 16, 32.0)
    colabtrain.load_adapter(first, tmp_path / "first" / "adapter")
    real, seen = ElasticTask.prepare, list[bool]()

    def prepare(self: ElasticTask) -> None:
        halt(0)
        real(self)
        seen.append(all(torch.equal(p, first.trainable()[name]) for name, p in self.model.trainable().items()))

    monkeypatch.setattr(ElasticTask, "prepare", prepare)
    run = start(tmp_path / "second", init="first/adapter", adapter_dir="out")
    os.chdir("first")
    halt.go.set()
    assert run.wait(SECONDS) == "finished" and seen == [True]
    assert (tmp_path / "out" / "adapter_config.json").exists() and not (tmp_path / "first" / "out").exists()

    os.chdir(tmp_path)
    assert start(tmp_path / "third", steps=1).wait(SECONDS) == "finished"
    shutil.copytree(tmp_path / "third", tmp_path / "fourth")
    for name, options in (("third", {}), ("fourth", {"init": "first/adapter"})):
        assert start(tmp_path / name, steps=2, **options).wait(SECONDS) == "finished"
    ends = [load_file(tmp_path / name / "checkpoints/step-00000002/trainable.safetensors") for name in ("third", "fourth")]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


# The end of a run


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyError("x"), ValueError("no questions")])
def test_a_calibration_that_fails_does_not_cost_the_adapter(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(*_: Any) -> None:
        raise error

    monkeypatch.setattr(elastic_task, "calibrate", calibrate)
    assert start(tmp_path).wait(SECONDS) == "finished"
    (failed,) = events(tmp_path, "calibration_failed")
    assert type(error).__name__ in failed["text"] and str(error) in failed["text"]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_what_is_not_there_at_the_end_is_said(tmp_path: Path) -> None:
    assert start(tmp_path, calibration_share=0.0, lora_r=0).wait(SECONDS) == "finished"
    log = (tmp_path / "train.log").read_text()
    assert "no temperatures: ValueError: there are no calibration records; raise calibration_share" in log
    assert "no adapter folder is made of tiny-0, for it has no LoRA; the checkpoint has what it learned" in log


def test_calibration_says_nll_and_ece_before_and_after(tmp_path: Path) -> None:
    assert start(tmp_path).wait(SECONDS) == "finished"
    number = r"\d\.\d{4} -> \d\.\d{4}"
    line = rf"calibrated on \d+ records: full nll {number}, ece {number}; fast nll {number}, ece {number}\n"
    assert re.search(line, (tmp_path / "train.log").read_text())


def test_an_adapter_dir_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"full holds \['thesis.txt'\], which a new adapter would replace"):
        start(tmp_path / "run", adapter_dir=str(tmp_path / "full"))
    assert not (tmp_path / "run").exists()


@pytest.mark.colab
def test_the_model_is_in_eval_mode_at_the_end_and_the_log_has_its_lines(tmp_path: Path) -> None:
    model = MMJev.tiny(0)
    assert start(tmp_path, model, steps=5, log_every=2).wait(SECONDS) == "finished"
    assert not any(module.training for module in model.modules())
    line = r" step (\d)/5: loss full \d+\.\d{4}, fast \d+\.\d{4} \(EMA\), \d+\.\d{3} s/step, .+ left, peak \d+\.\d GiB"
    assert re.findall(line, (tmp_path / "train.log").read_text()) == ["1", "2", "4", "5"]  # the first, every second, the last


# Other threads and other runs


def test_an_ended_run_does_not_lend_a_model_that_another_one_trains(tmp_path: Path) -> None:
    """It could not hold the other one's worker, and would pull the gradients from under its step."""
    halt = Halt(1)
    ended, live = LentTask(1), LentTask(3, halt)
    first = colabtrain.start(task=ended, run_dir=tmp_path / "a", display=False)
    assert first.wait(SECONDS) == "finished"
    with first.borrow() as model:
        assert model is ended.model
    second = Run(live, tmp_path / "b", RunConfig(), owned=first.owned)
    second.launch()
    assert halt.reached.wait(SECONDS)
    with pytest.raises(RuntimeError, match=r"<colabtrain run '.*b': running, step 1 of 3> trains this model now; borrow it from that run"):
        first.borrow().__enter__()
    halt.go.set()
    assert second.wait(SECONDS) == "finished"
    with first.borrow() as model:
        assert model is ended.model
