"""The process of test_hub_token.py: a run of ToyTask whose Hub fails in every way, and starts that fail.

    token_child.py FOLDER

Prints "EVENT STEP" for each event of its diaries, "held STEP" where it stands still until it reads a line, and what start() raises.
FOLDER/reprs.txt gets the repr() of every object of ours that can be reached from the run.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from helpers import all_written
from hub_setup import EVERY, HUB, ring_diaries
from toy_task import ToyTask

import colabtrain
from colabtrain.runtime import hub_process, publisher, remote

NUM_STEPS, SAVE_EVERY, HELD_AT = 20, 4, (1, 18)
UNREACHED, UNCLAIMED = "user/unreached", "user/unclaimed"  # repos where the Hub refuses the first look, the claim


def main() -> None:
    hub_process.WORKER = "dying_worker"
    publisher.FIRST_WAIT_SECONDS = publisher.REFUSED_SECONDS = remote.WAIT_SECONDS = 0.05
    folder, options = Path(sys.argv[1]), {"checkpoint_every": SAVE_EVERY, **EVERY, **HUB}
    ring_diaries(setattr, tell)
    run = colabtrain.start(task=ToyTask(NUM_STEPS, before_step), run_dir=folder / "run", **options)
    print(run.wait(), flush=True)
    warnings.warn(repr(run), stacklevel=1)
    (folder / "reprs.txt").write_text("\n".join(reprs(run)))
    for repo in (UNREACHED, UNCLAIMED):
        try:
            colabtrain.start(task=ToyTask(NUM_STEPS), run_dir=folder / repo, **{**options, "hub": repo}).wait()
        except RuntimeError as error:
            print(f"raised for {repo}: {type(error).__name__}", "".join(traceback.format_exception(error)), flush=True)


def before_step(i: int) -> None:
    all_written()
    if i in HELD_AT:
        print("held", i, flush=True)
        sys.stdin.readline()


def tell(folder: Path, event: str, fields: dict[str, Any]) -> None:
    print(event, fields.get("step", ""), flush=True)


def reprs(start: Any) -> Iterator[str]:
    """Of what is reachable by attributes, items and values; the attributes that have the token alone are for the Hub's process."""
    seen, left = set[int](), [start]
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, str):
            continue
        seen.add(id(found))
        yield repr(found)
        if isinstance(found, Mapping):
            left += found.values()
        elif isinstance(found, (list, tuple, set)):
            left += found
        elif type(found).__module__.startswith(("colabtrain", "subprocess")):
            left += vars(found).values() if hasattr(found, "__dict__") else ()


if __name__ == "__main__":
    main()
