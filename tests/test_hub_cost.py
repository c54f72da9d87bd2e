"""What the Hub costs the training: next to no CPU time while it works, and nothing at all when it hangs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import all_written, events
from hub_setup import EVERY, HUB, REPO, Bell, a_hub
from minihub import MiniHub

import colabtrain
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.runtime import remote
from colabtrain.task import StepReport

BENCHMARK = Path(__file__).parent / "benchmarks/publish_cost.py"
SHARE = 0.01  # of the time that a publish takes
STEPS, SAVE_EVERY, DRAIN_SECONDS = 8, 2, 1.0


@pytest.mark.parametrize(
    ("megabytes", "seconds"), [pytest.param(20, 4, marks=pytest.mark.colab), pytest.param(340, 30, marks=pytest.mark.full)]
)
def test_publishing_takes_hardly_any_cpu_time_from_the_training(megabytes: int, seconds: int, tmp_path: Path) -> None:
    line = [sys.executable, BENCHMARK, "--json", "--folder", tmp_path, "--megabytes", str(megabytes), "--seconds", str(seconds)]
    found = json.loads(subprocess.run(line, stdout=subprocess.PIPE, check=True).stdout)
    assert found["bytes"] > 1e6 * megabytes - 12 and found["stored"] > 1e6 * megabytes - 12 and found["seconds"] > 0.9 * seconds
    assert found["cpu"] <= SHARE * seconds
    assert found["child_cpu"] > found["cpu"], "somebody else did the work"
    assert {"colabtrain-train", "colabtrain-hub", "colabtrain-hub-reader", "MainThread"} <= found["cpu_by_thread"].keys()
    assert found["child_peak"] < 160e6, "the child reads whole files into its memory"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MiniHub]:
    with a_hub(monkeypatch, tmp_path / "home") as hub:
        yield hub


def test_a_hub_that_hangs_for_ever_changes_nothing_in_the_training(hub: MiniHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "DRAIN_SECONDS", DRAIN_SECONDS)
    step = ElasticTask.step

    def one_that_draws(self: ElasticTask, i: int, splits: int = 1) -> StepReport:
        all_written()
        report = step(self, i, splits)
        torch.rand(1)  # as a person's augmentation does: the state of the generator is part of what must not change
        return report

    monkeypatch.setattr(ElasticTask, "step", one_that_draws)

    def learned(name: str, **options: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        folder, train = tmp_path / name, {"steps": STEPS, "batch_size": 3, "lora_dropout": 0.2, "max_eval_records": 4}
        saves = {"checkpoint_every": SAVE_EVERY, "keep_local": STEPS}
        run = colabtrain.start("tiny", help_desk(20), run_dir=folder, **train, **saves, **EVERY, **options)
        assert run.wait(60) == "finished"
        paths = sorted(folder.glob("checkpoints/step-*"))
        return {
            "checkpoints": [path.name for path in paths],
            "bytes": [hashlib.sha256(file.read_bytes()).hexdigest() for path in paths for file in sorted(path.glob("*.safetensors"))],
            "rng": [json.loads((path / "state.json").read_text())["rng"] for path in paths],
            **{name: values for name, values in run.history().items() if not name.startswith(("time", "seconds", "memory"))},
        }

    alone = learned("alone")
    bell = Bell(monkeypatch, lambda event: event == "hub_claimed" and hub.fault("*", "", "hang", times=None))
    with_hub = learned("with_hub", **HUB)
    assert with_hub.keys() == alone.keys()
    for name, value in alone.items():
        assert with_hub[name] == value, f"{name} is another one than without a Hub"
    assert len(alone["checkpoints"]) == STEPS // SAVE_EVERY and len(alone["bytes"]) == 2 * STEPS // SAVE_EVERY
    bell.wait("with_hub", "finished")
    (said,) = events(tmp_path / "with_hub", "not_published")
    assert (said["saved_step"], said["published_step"]) == (STEPS, 0)
    assert f"step {STEPS} is on this machine only, not in {REPO} (not done after 1 s)" in said["text"]
    assert not events(tmp_path / "with_hub", "checkpoint_published")
