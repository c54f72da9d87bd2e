"""The whole way on real parts: records, tiny model, background run, stop, kill and resume."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import events
from safetensors.torch import load_file

import colabtrain
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.records.schema import Record, Seg
from colabtrain.runtime.diary import Tail
from colabtrain.task import StepReport

pytestmark = pytest.mark.colab

ROOT = Path(__file__).parents[1]
SECONDS = 120.0
OPTIONS: dict[str, Any] = {"steps": 14, "batch_size": 3, "lora_dropout": 0.2, "max_eval_records": 6, "log_every": 4}
NUM_RECORDS = 30  # 22 to train on: an epoch is 8 batches, so 14 steps cross into the second one


def start(folder: Path, **options: Any) -> colabtrain.Run:
    model = colabtrain.MMJev.tiny(0)
    return colabtrain.start(model, help_desk(NUM_RECORDS), run_dir=folder, display=False, **{**OPTIONS, **options})


def numbers(folder: Path) -> dict[int, Any]:
    """What must be equal of each step; a step that was walked twice counts as it was the last time."""
    return {e["step"]: [e["loss"], e["parts"], e["ema"], e["lr"], e["grad_norm"], e["tokens"]] for e in events(folder, "step")}


def weights(folder: Path, step: int) -> list[str]:
    manifest = json.loads((folder / f"checkpoints/step-{step:08d}/manifest.json").read_text())
    return [entry["sha256"] for entry in manifest["files"] if entry["name"].endswith(".safetensors")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder).wait(SECONDS) == "finished"
    return folder


def test_what_the_diary_says_of_a_step(undisturbed: Path) -> None:
    steps = events(undisturbed, "step")
    assert [event["step"] for event in steps] == list(range(1, 15))
    assert {event["epoch"] for event in steps} == {0, 1}
    for event in steps:
        assert set(event["loss"]) == {"full", "fast"} and set(event["lr"]) == {"lora", "heads"}
        assert set(event["parts"]["full"]) == {"log", "brier"} and set(event["parts"]["fast"]) == {"log", "brier", "kl"}
        for name, parts in event["parts"].items():
            total = parts["log"] + 0.1 * parts["brier"] + 0.5 * parts.get("kl", 0.0)
            assert event["loss"][name] == pytest.approx(total, rel=1e-5)
        assert event["tokens"] > 0 and event["questions"] in (3, 6, 9) and event["seconds"] > 0 and event["memory"]["ram"] > 0
    (evaluation,) = events(undisturbed, "evaluation")
    assert evaluation["step"] == 14 and evaluation["split"] == "test"
    for name in ("full", "fast"):
        assert evaluation["results"][name]["overall"]["n"] == 18
        assert set(evaluation["results"][name]["by_type"]) == {"choice", "score", "noul"}
    assert set(evaluation["baselines"]) == {"prior", "majority", "uniform"}


def test_stopped_in_the_middle_and_started_again_equals_an_undisturbed_run(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped twice, once in each epoch, with dropout; the numbers and the final weights are equal bit for bit."""
    real, runs, known = ElasticTask.step, list[colabtrain.Run](), threading.Event()
    stop_before = {1: 5, 2: 11}  # by the number of the start

    def step(self: ElasticTask, i: int, splits: int = 1) -> StepReport:
        if i == stop_before.get(len(events(tmp_path, "run_started"))):
            assert known.wait(SECONDS)
            runs[-1].stop(wait=False)
        return real(self, i, splits)

    monkeypatch.setattr(ElasticTask, "step", step)
    for stopped_at in (6, 12):
        known.clear()
        runs.append(start(tmp_path))
        known.set()
        assert runs[-1].wait(SECONDS) == "stopped" and runs[-1].step == stopped_at
        torch.manual_seed(stopped_at)  # a cell that uses the global generator changes nothing
    assert start(tmp_path).wait(SECONDS) == "finished"
    assert numbers(tmp_path) == numbers(undisturbed)
    assert weights(tmp_path, 14) == weights(undisturbed, 14)
    assert [event["step"] for event in events(tmp_path, "resumed")] == [0, 6, 12]


CHILD = """
import sys
import torch
torch.set_num_threads(1)
sys.path[:0] = sys.argv[1:3]
import test_training
print(test_training.start(test_training.Path(sys.argv[3]), checkpoint_every=3).wait())
"""


def test_killed_and_started_again_in_a_new_process(undisturbed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(ROOT), str(ROOT / "tests"), str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": "1"})
    tail, walked, deadline = Tail(tmp_path / "diary.jsonl"), 0, time.monotonic() + SECONDS
    while walked < 8:  # two checkpoints and at least one step behind them
        walked += sum(event["event"] == "step" for event in tail.new())
        assert child.poll() is None and time.monotonic() < deadline
    child.send_signal(signal.SIGKILL)
    assert child.wait(SECONDS) == -signal.SIGKILL
    child.communicate()
    environment = {**os.environ, "PYTHONHASHSEED": "2"}  # no set's or dict's order may matter
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True, env=environment)
    assert done.stdout == "finished\n"
    assert events(tmp_path, "resumed")[-1]["step"] % 3 == 0 and events(tmp_path, "resumed")[-1]["step"] > 0
    assert numbers(tmp_path) == numbers(undisturbed)
    assert weights(tmp_path, 14) == weights(undisturbed, 14)


def test_a_used_model_starts_from_scratch(undisturbed: Path, tmp_path: Path) -> None:
    """Weights left in memory are never the starting point."""
    model = colabtrain.MMJev.tiny(0)
    for name in ("first", "second"):
        run = colabtrain.start(model, help_desk(NUM_RECORDS), run_dir=tmp_path / name, display=False, **OPTIONS)
        assert run.wait(SECONDS) == "finished"
        assert numbers(tmp_path / name) == numbers(undisturbed)


def test_a_run_that_failed_between_backward_and_update_leaves_nothing_behind(undisturbed: Path, tmp_path: Path) -> None:
    """Neither gradients in the model's memory nor half a step: the same cell runs again, and the numbers are the same."""
    model, real, calls = colabtrain.MMJev.tiny(0), colabtrain.MMJev.scores, [0]

    def scores(*arguments: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 8:  # fast's forward in the fourth step, after the backward pass of full
            raise RuntimeError("in the middle")
        return real(model, *arguments)

    model.scores = scores  # type: ignore[method-assign]
    options = {**OPTIONS, "checkpoint_every": 1, "run_dir": tmp_path, "display": False}
    with pytest.raises(colabtrain.RunFailed, match="in the middle"):
        colabtrain.start(model, help_desk(NUM_RECORDS), **options).wait(SECONDS)
    assert all(parameter.grad is None for parameter in model.trainable().values())
    del model.scores
    assert colabtrain.start(model, help_desk(NUM_RECORDS), **options).wait(SECONDS) == "finished"
    assert numbers(tmp_path) == numbers(undisturbed)


def test_evaluating_in_between_changes_nothing(undisturbed: Path, tmp_path: Path) -> None:
    assert start(tmp_path, eval_every=3).wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path, "evaluation")] == [3, 6, 9, 12, 14]
    assert numbers(tmp_path) == numbers(undisturbed)


@pytest.mark.parametrize(
    ("options", "difference"),
    [({"batch_size": 2}, "config.batch_size: checkpoint 3, now 2"), ({"lr_lora": 1e-5}, "config.lr_lora"), ({"seed": 1}, "config.seed")],
)
def test_other_settings_are_another_experiment(undisturbed: Path, options: dict[str, Any], difference: str) -> None:
    with pytest.raises(ValueError, match=difference):
        start(undisturbed, **options)


def test_a_record_the_model_cannot_read_is_refused_by_name(tmp_path: Path) -> None:
    record = help_desk(1)[0]
    photo = dataclasses.replace(record, state=(Seg("image", "a.jpg"),), modality="image", id="the-photo")
    with pytest.raises(ValueError, match=r"record 'the-photo' of task 'help_desk': tiny-0 cannot read a segment of kind 'image'"):
        colabtrain.start(colabtrain.MMJev.tiny(0), [*help_desk(9), photo], run_dir=tmp_path, display=False)


def test_soft_tokens_and_text_train_together(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    records: list[Record] = []
    for i, record in enumerate(help_desk(12)):
        soft = Seg("image", torch.randn(5 + i % 3, 128, generator=generator))
        records.append(dataclasses.replace(record, split="train", state=(*record.state, soft) if i % 2 else record.state))
    run = colabtrain.start(colabtrain.MMJev.tiny(0), records, run_dir=tmp_path, display=False, steps=4, batch_size=4)
    assert run.wait(SECONDS) == "finished"
    assert all(value == value for value in run.history()["loss/fast"])


def test_an_end_for_numbers_that_are_not_finite_names_the_module(tmp_path: Path) -> None:
    model = colabtrain.MMJev.tiny(0)
    with torch.no_grad():
        model.lm.layers[1].laurel.linear_left.weight[0, 0] = float("nan")
    run = colabtrain.start(model, help_desk(NUM_RECORDS), run_dir=tmp_path, display=False, **{**OPTIONS, "steps": 40})
    with pytest.raises(
        colabtrain.RunFailed, match=r"21 steps in a row .*the frozen parameter .*layers\.1\.laurel\.linear_left\.weight is not finite"
    ):
        run.wait(SECONDS)
    assert run.step == 21 and len([event for event in events(tmp_path, "step") if event["skipped"]]) == 21


def test_what_is_there_at_the_end(undisturbed: Path) -> None:
    """Temperatures in the diary, the adapter in its folder, and how long it took in the log."""
    (calibration,) = events(undisturbed, "calibration")
    for report in calibration["results"].values():
        assert report["overall"]["nll_after"] <= report["overall"]["nll_before"] + 1e-9
    model = colabtrain.MMJev.tiny(0)
    model.configure(model.default_subnets(), 16, 32.0)
    about = colabtrain.load_adapter(model, undisturbed / "adapter")
    assert about["temperatures"] == calibration["results"]
    saved = {name: tensor for name, tensor in load_file(undisturbed / "checkpoints/step-00000014/trainable.safetensors").items()}
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.trainable().items())
    assert re.search(r" done in \d+ s\n.* finished at step 14 of 14", (undisturbed / "train.log").read_text())


def test_a_warm_up_longer_than_the_run_is_a_slow_run_and_said(tmp_path: Path) -> None:
    """Old cells have warmup=50 whatever the data; that is sane, and worth a word."""
    assert start(tmp_path, warmup_steps=50).wait(SECONDS) == "finished"
    assert "take care: warmup_steps=50 is more than the run's 14 steps" in (tmp_path / "train.log").read_text()
    assert 0 < events(tmp_path, "step")[0]["lr"]["lora"] == pytest.approx(2e-3 / 50)
