"""The process that test_kill.py kills: one training job, with faults that come at the same steps in each life.

    kill_child.py FOLDER [--tell starting|training|ending] [--die-at NUMBER CALL ... [--after]]

--tell: print one line when start() is called, at the first step, or after the last one. --die-at: SIGKILL itself at the
NUMBER-th call of os.CALL ... (any of them, from any thread, counted from start() on), before the call is made or after
it. Status 0: the run in FOLDER has finished.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

import colabtrain
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.task import StepReport

SECONDS = 120.0  # far more than a life takes
STEPS, SAVE_EVERY, KEEP = 17, 2, 2
NUM_RECORDS = 20  # 15 to train on: an epoch is 5 batches, so that the last steps are of the fourth one
OPTIONS: dict[str, Any] = {
    "steps": STEPS,
    "batch_size": 3,
    "lora_dropout": 0.2,
    "checkpoint_every": SAVE_EVERY,
    "checkpoint_seconds": 3600.0,  # only steps decide, on a slow machine too
    "first_checkpoint_seconds": 3600.0,
    "keep_local": KEEP,
    "max_eval_records": 4,
    "log_every": 4,
}
# Steps counted from 0, the first attempt at each
OUT_OF_MEMORY: dict[int, Callable[[], Exception]] = {
    3: lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    8: lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    14: MemoryError,
}
NOT_FINITE = (5, 11)
GROWTH_INTERVAL = 3  # steps until the scaler doubles its factor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tell", choices=("starting", "training", "ending"))
    parser.add_argument("--die-at", nargs="+", default=[])
    parser.add_argument("--after", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)  # what a resume must replace
    model, records = colabtrain.MMJev.tiny(0), help_desk(NUM_RECORDS)
    write_late()
    train_with_faults({"training": 1, "ending": STEPS}.get(wanted.tell, 0))
    if wanted.die_at:
        die_at(int(wanted.die_at[0]), wanted.die_at[1:], wanted.after)
    if wanted.tell == "starting":
        tell()
    state = colabtrain.start(model, records, run_dir=wanted.folder, display=False, **OPTIONS).wait(SECONDS)
    sys.exit(0 if state == "finished" else f"the run is {state} after {SECONDS:g} s")


def tell() -> None:
    print("now", flush=True)


TRAINER, STEPPED = set[int](), threading.Event()


def write_late() -> None:
    """A slow disk: to any thread but the one that trains, a folder is there only after the next step, so that a save
    which runs beside the training has every chance to take something from there."""
    mkdir = os.mkdir

    def slow_mkdir(*arguments: Any, **named: Any) -> None:
        if TRAINER and threading.get_ident() not in TRAINER:
            STEPPED.clear()
            STEPPED.wait(0.5)  # there may be no next one
        mkdir(*arguments, **named)

    os.mkdir = slow_mkdir


def train_with_faults(tell_at: int) -> None:
    """A scaler in use, as on a card without bfloat16; gradients that are not finite; memory that runs out; draws from
    the global generators, as of a person's augmentation. tell_at: 1 for the first step of this life, STEPS for the last one."""
    prepare, step, steps = ElasticTask.prepare, ElasticTask.step, itertools.count(1)

    def prepare_with_scaler(self: ElasticTask) -> None:
        prepare(self)
        self.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=GROWTH_INTERVAL)

    def faulty_step(self: ElasticTask, i: int, splits: int = 1) -> StepReport:
        TRAINER.add(threading.get_ident())
        if next(steps) == tell_at == 1:
            tell()
        with faulty_gradient(self.model, i if splits == 1 else -1):
            report = step(self, i, splits)
        random.random(), numpy.random.rand(), torch.rand(1)
        STEPPED.set()
        if i + 1 == tell_at == STEPS:
            tell()
        return report

    ElasticTask.prepare, ElasticTask.step = prepare_with_scaler, faulty_step


@contextlib.contextmanager
def faulty_gradient(model: Any, i: int) -> Iterator[None]:
    """In the backward pass, with most of its gradients already made."""

    def fault(gradient: torch.Tensor) -> torch.Tensor:
        if i in OUT_OF_MEMORY:
            raise OUT_OF_MEMORY[i]()
        return gradient * torch.inf if i in NOT_FINITE else gradient

    hook = next(iter(model.trainable().values())).register_hook(fault)
    try:
        yield
    finally:
        hook.remove()


def die_at(number: int, names: list[str], after: bool) -> None:
    calls = itertools.count(1)

    def mortal(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            due = next(calls) == number
            if due and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **named)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in names:
        setattr(os, name, mortal(getattr(os, name)))


if __name__ == "__main__":
    main()
