"""The process that test_hub_story.py kills: kill_child.py's training job, faults included, with its checkpoints on a Hub.

    hub_child.py FOLDER [--hub REPO] [--hold-at STEP] [--then FOLDER]

Prints "EVENT STEP" for each event of its diary. --hold-at: stand still for ever before that step, counted from 0. --then: once it
has finished, the same again in another folder, with MORE_STEPS.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from pathlib import Path
from typing import Any

import kill_child
import numpy
import torch
from hub_setup import EVERY, HUB, ring_diaries

import colabtrain
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev.demo_data import help_desk

MORE_STEPS = kill_child.STEPS + 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hub")
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--then", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)  # what a resume must replace
    kill_child.train_with_faults(tell_at=0)
    hold_at(given.hold_at)
    ring_diaries(setattr, tell)
    train(given.folder, given.hub, kill_child.STEPS)
    if given.then:
        train(given.then, given.hub, MORE_STEPS)


def train(folder: Path, hub: str | None, steps: int) -> None:
    model, records = colabtrain.MMJev.tiny(0), help_desk(kill_child.NUM_RECORDS)
    options = {**kill_child.OPTIONS, **EVERY, **({**HUB, "hub": hub} if hub else {}), "steps": steps}
    state = colabtrain.start(model, records, run_dir=folder, **options).wait(kill_child.SECONDS)
    if state != "finished":
        sys.exit(f"the run is {state}")


def tell(folder: Path, event: str, fields: dict[str, Any]) -> None:
    print(event, fields.get("step", ""), flush=True)


def hold_at(number: int | None) -> None:
    step = ElasticTask.step

    def held(self: ElasticTask, i: int, splits: int = 1) -> Any:
        if i == number:
            threading.Event().wait()
        return step(self, i, splits)

    ElasticTask.step = held


if __name__ == "__main__":
    main()
