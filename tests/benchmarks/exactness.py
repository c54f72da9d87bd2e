"""Prints how exact the step is: a batch in parts against the whole, layers recomputed against kept, our step against the
first implementation's formula, and a run that was disturbed against one that was not. Tests hold the same with bounds.

Run it with colabtrain installed:
    python tests/benchmarks/exactness.py
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import events
from test_objective import add_gradient, first_step, gradients, mixed_records, prepared, relative_error

import colabtrain
from colabtrain.elastic.batches import build
from colabtrain.mmjev.demo_data import help_desk

torch.set_num_threads(1)


def say(what: str, value: object) -> None:
    print(f"| {what:<78} | {value!s:>28} |", flush=True)


def parts() -> None:
    lengths = [len(record.qs) for record in mixed_records()]
    model, _, _ = prepared()
    fc = model.default_subnets()["full"]
    tokens = [len(model.plan(model.encode_state(r.state, fc), r.qs, fc)) for r in mixed_records()]
    say("batch: tokens of its records", tokens)
    say("  questions of its records", lengths)
    for dtype in (torch.float64, torch.float32):
        for dropout in (0.0, 0.3):
            whole, _ = gradients(1, dropout, dtype)
            errors = [relative_error(gradients(splits, dropout, dtype)[0], whole) for splits in (2, 4, 8)]
            say(f"gradient in 2, 4, 8 parts against 1, {dtype}, dropout {dropout}", ", ".join(f"{error:.1e}" for error in errors))


def recomputed() -> None:
    for dropout in (0.0, 0.3):
        plain, _ = gradients(1, dropout)
        model, optimizer, config = prepared(dropout)
        model.checkpoint_layers = frozenset(range(6))
        add_gradient(model, optimizer, config, 5)
        found = {name: p.grad for name, p in model.trainable().items() if p.grad is not None}
        say(f"gradient with all layers recomputed against kept, fp32, dropout {dropout}", f"{relative_error(found, plain):.1e}")


def first_implementation() -> None:
    for dtype in (torch.float64, torch.float32):
        model, optimizer, config = prepared()
        model.to(dtype)
        losses, _ = add_gradient(model, optimizer, config, 0)
        mine = {name: p.grad.clone() for name, p in model.trainable().items() if p.grad is not None}
        optimizer.abandon()
        records, subnets = mixed_records(), model.default_subnets()
        targets = [torch.tensor(t, dtype=dtype) for record in records for t in record.targets]
        packed = build(model, records, subnets).packed[8]
        full, fast = ([z for record in model.run(packed, subnets[name]) for z in record] for name in ("full", "fast"))
        reference = first_step(full, fast, targets)
        reference.backward()
        difference = abs(float(losses["full"]["total"] + losses["fast"]["total"] - reference.detach()))
        wanted = {name: p.grad for name, p in model.trainable().items() if p.grad is not None}
        say(
            f"our step against the first implementation's formula, {dtype}: loss; gradient",
            f"{difference:.1e}; {relative_error(mine, wanted):.1e}",
        )


def numbers(folder: Path) -> list[Any]:
    return [[event["loss"], event["parts"], event["grad_norm"]] for event in events(folder, "step")]


def disturbed(folder: Path) -> None:
    options: dict[str, Any] = {"steps": 20, "batch_size": 3, "lora_dropout": 0.2, "display": False}
    colabtrain.start(colabtrain.MMJev.tiny(0), help_desk(30), run_dir=folder / "quiet", **options).wait()
    model, many = colabtrain.MMJev.tiny(0), threading.Event()
    run = colabtrain.start(model, help_desk(30), run_dir=folder / "loud", **options)
    borrowed = 0
    while run.step < 20 and run.state in ("starting", "running"):
        with run.borrow() as lent:
            torch.randn(3)
            lent.train()
            borrowed += 1
        model.eval()
        torch.randn(5)
        try:
            raise ValueError("a cell that raises")
        except ValueError:
            many.wait(0.01)
    run.wait()
    say(
        f"losses of a run that was borrowed from {borrowed} times, put into eval mode, and drawn beside",
        "equal" if numbers(folder / "quiet") == numbers(folder / "loud") else "DIFFERENT",
    )


if __name__ == "__main__":
    parts()
    recomputed()
    first_implementation()
    with tempfile.TemporaryDirectory() as made:
        disturbed(Path(made))
