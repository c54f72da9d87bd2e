"""The process that test_hub_story.py kills: kill_child.py's training job, faults included, with its checkpoints on a Hub.

    hub_child.py FOLDER [--hub REPO] [--steps NUMBER] [--hold-at STEP]

Prints "EVENT STEP" for each event of its diary. --hold-at: stand still for ever before that step, counted from 0.
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hub")
    parser.add_argument("--steps", type=int, default=kill_child.STEPS)
    parser.add_argument("--hold-at", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)  # what a resume must replace
    kill_child.train_with_faults(tell_at=0)
    hold_at(given.hold_at)
    ring_diaries(setattr, tell)
    model, records = colabtrain.MMJev.tiny(0), help_desk(kill_child.NUM_RECORDS)
    options = {**kill_child.OPTIONS, **EVERY, **({**HUB, "hub": given.hub} if given.hub else {}), "steps": given.steps}
    run = colabtrain.start(model, records, run_dir=given.folder, **options)
    state = run.wait(kill_child.SECONDS)
    sys.exit(0 if state == "finished" else f"the run is {state}")


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
