"""The process of test_hub_exit.py: a script of a person that starts a run of ToyTask with a Hub.

    exit_child.py FOLDER [--exit-seconds S] [--drain-seconds S] [--hold-at STEP] [--relative] [--wait]

Its last line is the one after start(), so that the interpreter ends while the run lives; with --wait it waits for the run instead,
and is not impressed by an interrupt. Prints "EVENT STEP" for each event of the diary. --hold-at: stand still before that step,
counted from 0; where the script ends, until it ends. --relative: start a relative that has all pipes of this process.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path
from typing import Any

from helpers import all_written
from hub_setup import EVERY, HUB, ring_diaries
from toy_task import ToyTask

import colabtrain
from colabtrain.runtime import publisher, remote, run

NUM_STEPS, SAVE_EVERY = 20, 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exit-seconds", type=float, default=60.0)
    parser.add_argument("--drain-seconds", type=float, default=60.0)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--relative", action="store_true")
    parser.add_argument("--wait", action="store_true")
    given = parser.parse_args()
    run.EXIT_SECONDS, remote.DRAIN_SECONDS, publisher.FIRST_WAIT_SECONDS = given.exit_seconds, given.drain_seconds, 0.1
    held, go = threading.Event(), threading.Event()

    def before_step(i: int) -> None:
        all_written()
        if i == given.hold_at:
            held.set()
            go.wait()

    ring_diaries(setattr, tell)
    task = ToyTask(NUM_STEPS, before_step)
    job = colabtrain.start(task=task, run_dir=given.folder, checkpoint_every=SAVE_EVERY, **EVERY, **HUB)
    if given.hold_at is not None:
        held.wait()
    if given.relative:
        start_relative()
    if given.wait:
        wait(job, go)
    go.set()


def wait(job: colabtrain.Run, go: threading.Event) -> None:
    try:
        print("waiting", flush=True)
        job.wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        go.set()
        print(job.wait(), flush=True)


def start_relative() -> None:
    """As a data loader's worker is one: it does nothing but live."""
    if pid := os.fork():
        print("relative", pid, flush=True)
    else:
        signal.pause()


def tell(folder: Path, event: str, fields: dict[str, Any]) -> None:
    print(event, fields.get("step", ""), flush=True)


if __name__ == "__main__":
    main()
