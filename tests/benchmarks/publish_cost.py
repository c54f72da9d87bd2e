"""What publishing a checkpoint costs the process that trains: CPU time by thread, and memory.

The Hub is the tests' own, in a process of its own, and takes the upload at a rate that makes it last as long as asked for. The
"training" holds tensors of random numbers and waits for an Event while its checkpoint is published, so whatever CPU time its process
uses then is the publishing's. The upload itself is the work of the Hub's child process.

Run it with colabtrain installed:
    python tests/benchmarks/publish_cost.py [--megabytes 340] [--seconds 30] [--folder /mnt/disk] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import colabtrain
from colabtrain.runtime import remote
from colabtrain.runtime.diary import Diary, Tail
from colabtrain.runtime.keeper import THREAD_NAME
from colabtrain.task import StepReport

MB = 1e6
TOKEN, REPO, WAIT_SECONDS = "hf_cost", "user/cost", 600.0
HUB = Path(__file__).resolve().parents[1] / "minihub"
BOUND = 0.01  # of the time that the publishing takes
NUM_TENSORS = 3  # of one size: the parameters, and AdamW's two of each


class Idle:
    """A Task that waits in its second step."""

    num_steps = 2

    def __init__(self, num_bytes: int) -> None:
        self.numel, self.go = num_bytes // NUM_TENSORS // 4, threading.Event()

    def prepare(self) -> None:
        self.tensors = [torch.randn(self.numel) for _ in range(NUM_TENSORS)]

    def step(self, i: int, splits: int = 1) -> StepReport:
        assert i == 0 or self.go.wait(WAIT_SECONDS)
        return StepReport(loss={"none": 0.0})

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        first, *moments = self.tensors
        return {"trainable": {"weight": first}, "optimizer": {str(i): moment for i, moment in enumerate(moments)}}, {}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        return {}


# The measured process


def measured(folder: Path, num_bytes: int) -> dict[str, Any]:
    torch.manual_seed(0)
    saved, published = rings("checkpoint_saved"), rings("checkpoint_published")
    remote.DRAIN_SECONDS = 0.0  # what the end saves is not published
    task = Idle(num_bytes)
    run = colabtrain.start(task=task, run_dir=folder / "run", hub=REPO, publish_every=0.0, checkpoint_every=1, display=False)
    assert saved.wait(WAIT_SECONDS)
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()  # the save is no part of it
    child, resident = child_of_mine(), memory(os.getpid(), "VmRSS")
    threads_before, before, child_before = cpu_by_thread(), time.process_time(), cpu_of(child)
    assert published.wait(WAIT_SECONDS)
    total, threads, child_seconds = time.process_time() - before, cpu_by_thread(), cpu_of(child) - child_before
    peaks = {"peak": memory(os.getpid(), "VmHWM"), "child_peak": memory(child, "VmHWM")}
    early = sum(seconds for name, seconds in threads_before.items() if "-hub" in name)  # while the save was under way
    task.go.set()
    run.wait()
    (event,) = (event for event in Tail(run.diary.path).new() if event["event"] == "checkpoint_published")
    used = {name: seconds - threads_before.get(name, 0.0) * ("-hub" not in name) for name, seconds in threads.items()}
    found = {"bytes": event["bytes"], "seconds": event["seconds"], "cpu": total + early, "cpu_by_thread": used}
    return {**found, "child_cpu": child_seconds, "resident": resident, **peaks}


def rings(event: str) -> threading.Event:
    """Set at the first such event of a diary."""
    write, rung = Diary.write, threading.Event()

    def written(diary: Diary, name: str, text: str | None = None, **fields: Any) -> None:
        write(diary, name, text, **fields)
        if name == event:
            rung.set()

    Diary.write = written
    return rung


def cpu_by_thread() -> dict[str, float]:
    """Seconds of each thread since it began."""
    return {thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threading.enumerate() if thread.ident}


def child_of_mine() -> int:
    lists = Path("/proc/self/task").glob("*/children")
    (child,) = {int(pid) for path in lists for pid in path.read_text().split()}
    return child


def cpu_of(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int, what: str) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == f"{what}:")


# The processes around it


def measure(folder: Path, num_bytes: int, seconds: float) -> dict[str, Any]:
    hub_line = [sys.executable, HUB, "--root", folder / "hub", "--token", f"{TOKEN}=write", "--throttle", str(num_bytes / seconds)]
    with subprocess.Popen(hub_line, stdout=subprocess.PIPE, text=True) as hub:
        try:
            assert hub.stdout is not None
            settings = {"HF_ENDPOINT": hub.stdout.readline().strip(), "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "home")}
            settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
            line = [sys.executable, __file__, "--folder", folder, "--part", str(num_bytes)]
            done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}, check=True)
            stored = sum(path.stat().st_size for path in (folder / "hub/objects").iterdir())
        finally:
            hub.terminate()
    return {**json.loads(done.stdout), "stored": stored}


def report(found: Mapping[str, Any], say: Callable[[str, str], object]) -> None:
    say("published: MB; seconds; MB that the Hub stored", f"{found['bytes'] / MB:.1f}; {found['seconds']:.1f}; {found['stored'] / MB:.1f}")
    bound = f"{1e3 * BOUND * found['seconds']:.0f}"
    say(f"CPU time of the process that trains, ms (at most 1 % of it: {bound})", f"{1e3 * found['cpu']:.1f}")
    for name, seconds in sorted(found["cpu_by_thread"].items(), key=lambda item: -item[1]):
        say(f"   of its thread {name}", f"{1e3 * seconds:.1f}")
    say("CPU time of the Hub's child process, ms", f"{1e3 * found['child_cpu']:.0f}")
    peaks = [found[key] / MB for key in ("resident", "peak", "child_peak")]
    say("resident MB of the process that trains: before; at its peak", f"{peaks[0]:.0f}; {peaks[1]:.0f}")
    say("resident MB of the child at its peak", f"{peaks[2]:.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description="What publishing a checkpoint costs the process that trains.")
    parser.add_argument("--megabytes", type=float, default=340.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="that the upload is made to last")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to use (default: here)")
    parser.add_argument("--json", action="store_true", help="print what was measured, for programs")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is not None:
        print(json.dumps(measured(given.folder, given.part)))
        return 0
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        found = measure(Path(made), int(given.megabytes * MB), given.seconds)
    if given.json:
        print(json.dumps(found))
    else:
        report(found, lambda what, value: print(f"| {what:<76} | {value:>24} |"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
