"""Promises of the training that no other test holds: one a test, each on real parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import events

import colabtrain
from colabtrain.elastic import task as elastic_task
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev

SECONDS = 120.0


def start(folder: Path, **options: Any) -> colabtrain.Run:
    return colabtrain.start(MMJev.tiny(0), help_desk(24), **{"run_dir": folder, "steps": 1, "display": False, **options})


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
