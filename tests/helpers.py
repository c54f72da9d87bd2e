"""What several tests need: a run's events, a worker held at a known step, a model away from its start."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from colabtrain.mmjev.model import MMJev
from colabtrain.runtime import manifest
from colabtrain.runtime.diary import DIARY_FILE, Tail
from colabtrain.runtime.keeper import THREAD_NAME

HOLD_SECONDS = 60.0  # far more than anything here takes; a wait that long is a failure


def events(folder: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The events of a run's diary, all or those called `name`."""
    return [event for event in Tail(folder / "diary.jsonl").new() if name in (None, event["event"])]


class Halt:
    """Holds the worker before step `at` until let go, so that a test acts at a known step."""

    def __init__(self, at: int) -> None:
        self.at, self.reached, self.go = at, threading.Event(), threading.Event()

    def __call__(self, i: int) -> None:
        if i == self.at:
            self.reached.set()
            assert self.go.wait(HOLD_SECONDS)


def all_written(*_: Any) -> None:
    """Wait until no checkpoint is being written: before each step, so that one that is due is taken at its own step."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(HOLD_SECONDS)


def perturbed_model() -> MMJev:
    """A tiny model whose LoRA, heads and latents are all away from their start."""
    model = MMJev.tiny()
    model.configure(model.default_subnets(), lora_r=4, lora_alpha=8.0)
    model.reset_trainable(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def make_checkpoint(folder: Path, step: int, size: int = 1000) -> Path:
    """A small checkpoint folder that verifies, of tensors of `size` numbers that only this step has."""
    path = folder / f"{manifest.PREFIX}{step:08d}"
    path.mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(manifest.TENSOR_FILES):
        values = torch.arange(size, dtype=torch.float32) * (step + k / 8)
        save_file({"weight": values}, path / name)
    (path / manifest.STATE).write_text(json.dumps({"step": step, "fingerprint": {}, "num_steps": 100}))
    (path / DIARY_FILE).write_text("".join(json.dumps({"time": i, "event": "step", "step": i}) + "\n" for i in range(1, step + 1)))
    manifest.write(path)
    return path
