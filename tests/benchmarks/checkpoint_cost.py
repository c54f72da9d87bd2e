"""What a checkpoint of Gemma 3n E4B's trained tensors costs: the training thread's time, memory, and memory at a resume.

The state is real in names, shapes and dtypes: 28.3 million fp32 LoRA parameters, two heads, eight latents, and AdamW's
state of them, random numbers throughout, 340 MB, on the host. No base model is there, and a step's gradient is random: what
is measured is saving alone. Each part runs in a fresh process, all on one disk:

1. Blocking: torch.save of the same tensors in the training thread against Keeper.save(), which copies them and leaves the
   rest to the writer's thread; in one process, in pairs whose order alternates, each on a disk that is at rest (what was
   written before is synced, and its writer has ended). Then how fast the training thread works while the writer writes,
   which is as any other work on the machine's cores slows it.
2. Memory: what is resident beyond the state itself, after and at the peak of six saves.
3. Resume: the peak of a process that starts a run against that of one that resumes it, three steps each.

Bounds are shown beside the figures. Times hang on the memory's and the disk's speed, and on what else runs.

Run it with colabtrain and transformers installed:
    python tests/benchmarks/checkpoint_cost.py [--folder /mnt/disk] [--pairs 15] [--threads 1]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from e4b_trained import SHAPES_FILE, Trained, e4b_shapes

import colabtrain
from colabtrain.config import RunConfig
from colabtrain.device import release_memory
from colabtrain.runtime import disk
from colabtrain.runtime.diary import Diary, Tail
from colabtrain.runtime.keeper import Keeper
from colabtrain.runtime.recorder import Recorder

SAVES, STEPS, STARTS, WINDOWS = 6, 3, 3, 7
MB = 1e6
SAMPLE_SECONDS = 0.002
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Saver:
    """Both ways to save, each timed. Steps count on, so that no save is refused as one that is there."""

    def __init__(self, folder: Path) -> None:
        self.task, self.folder, self.step = Trained(folder), folder, 0
        self.task.prepare()
        self.task.step(0)  # AdamW's state is no longer zeros
        run = folder / "run"
        self.diary = Diary(run)
        self.diary.log("a checkpoint takes the diary along")
        self.recorder = Recorder(self.diary, 50, 10**6)
        self.keeper = Keeper(self.task, self.diary, run, RunConfig(keep_local=1))

    def begin(self) -> float:
        """Seconds that Keeper.save() takes."""
        self.step += 1
        started = time.perf_counter()
        assert self.keeper.save(self.step, self.recorder)
        return time.perf_counter() - started

    def ours(self) -> dict[str, float]:
        blocked = self.begin()
        self.keeper.drain()
        saved = Tail(self.diary.path).new()[-1]
        assert (saved["event"], saved["step"]) == ("checkpoint_saved", self.step), saved
        return {"blocked": blocked, "durable": blocked + saved["seconds"]}

    def plain(self) -> dict[str, float]:
        """To a new file, as one a step; over an old one it takes longer."""
        path = self.folder / "plain.pt"
        started = time.perf_counter()
        tensors, meta = self.task.state()
        torch.save({**tensors, "meta": meta}, path)
        blocked = time.perf_counter() - started
        with path.open("rb") as file:
            os.fsync(file.fileno())
        durable = time.perf_counter() - started
        path.unlink()
        return {"blocked": blocked, "durable": durable}


# The parts, each in a process of its own


def blocking(folder: Path, pairs: int) -> dict[str, Any]:
    saver = Saver(folder)
    found: dict[str, Any] = {"bytes": saver.task.num_bytes(), "tensors": sum(map(len, saver.task.state()[0].values()))}
    found["first"] = {"ours": saver.ours(), "plain": saver.plain()}
    found["pairs"] = {"ours": [], "plain": []}
    for i in range(pairs):
        for name in ("plain", "ours") if i % 2 == 0 else ("ours", "plain"):
            found["pairs"][name].append(getattr(saver, name)())
    return found


def beside(folder: Path) -> dict[str, Any]:
    """Speed of the training thread's own work while the writer writes, against windows of the same length without it."""
    saver, found = Saver(folder), dict[str, Any]()
    saver.ours()
    for size in (512, 16):
        a = torch.randn(size, size)
        work = functools.partial(torch.mm, a, a, out=torch.empty(size, size))
        work()
        windows = []
        for _ in range(WINDOWS):
            saver.begin()
            with_writer, seconds, longest = worked(work, lambda _: saver.keeper.busy)
            alone, _, longest_alone = worked(work, lambda passed, seconds=seconds: passed < seconds)  # type: ignore[misc]
            windows.append({"speed": with_writer / alone, "longest": longest, "longest_alone": longest_alone})
        found[f"{size} x {size}"] = windows
    return found


def worked(work: Callable[[], object], goes_on: Callable[[float], bool]) -> tuple[float, float, float]:
    """Calls a second, seconds, and the longest call."""
    calls, longest, started = 0, 0.0, time.perf_counter()
    now = started
    while goes_on(now - started):
        before = now
        work()
        now = time.perf_counter()
        calls, longest = calls + 1, max(longest, now - before)
    return calls / (now - started), now - started, longest


def memory(folder: Path, way: str) -> dict[str, Any]:
    saver, anonymous = Saver(folder), list[int]()
    release_memory()  # of the step's gradient: the buffers would lie where it lay
    before = status()

    def saves() -> None:
        for _ in range(SAVES):
            getattr(saver, way)()
            anonymous.append(status()["RssAnon"] - before["RssAnon"])

    peak = peak_of(saves) - before["VmRSS"]
    return {"state": saver.task.num_bytes(), "first": anonymous[0], "after": anonymous[-1], "peak": peak}


def peak_of(call: Callable[[], None]) -> int:
    """Peak of the resident bytes during `call`: the kernel's own, where it may be set back, else that of samples."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return sampled_peak_of(call)
    call()
    return status()["VmHWM"]


def sampled_peak_of(call: Callable[[], None]) -> int:
    samples, done = [status()["VmRSS"]], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            samples.append(status()["VmRSS"])

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        call()
    finally:
        done.set()
        sampler.join()
    return max(samples)


def status() -> dict[str, int]:
    """Bytes: VmRSS, its peak VmHWM, and RssAnon, which is without mapped files."""
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0].startswith(("VmRSS", "VmHWM", "RssAnon"))}


def training(folder: Path, name: str, num_steps: int) -> dict[str, Any]:
    """Start the run `name`, or go on with it; saves at every second step and at the end."""
    imported = status()["VmRSS"]
    run = colabtrain.start(task=Trained(folder, num_steps), run_dir=folder / name, checkpoint_every=2, display=False)
    run.wait()
    events = Tail(run.folder / "diary.jsonl").new()
    resumed = [event["step"] for event in events if event["event"] == "resumed"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"imported": imported, "peak": peak, "from": resumed[-1], "saved": run.saved_step}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {part.__name__: part for part in (blocking, beside, memory, training)}


# The table


def say(what: str, value: str) -> None:
    print(f"| {what:<84} | {value:>31} |", flush=True)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and middle half."""
    low, middle, high = statistics.quantiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def report_blocking(found: dict[str, Any]) -> None:
    say("state: tensors; MB", f"{found['tensors']:,}; {found['bytes'] / MB:.1f}")
    first, pairs = found["first"], found["pairs"]
    say(
        "1. the training thread waits, ms: first torch.save; first Keeper.save() (allocates)",
        f"{1e3 * first['plain']['blocked']:.1f}; {1e3 * first['ours']['blocked']:.1f}",
    )
    times = {(way, key): [1e3 * pair[key] for pair in pairs[way]] for way in pairs for key in ("blocked", "durable")}
    rows = {
        "torch.save": times["plain", "blocked"],
        "torch.save and fsync": times["plain", "durable"],
        "Keeper.save()": times["ours", "blocked"],
        "Keeper.save() to hashed and durable": times["ours", "durable"],
    }
    for name, values in rows.items():
        say(f"   {name}: ms, median of {len(values)} (middle half); fastest", f"{spread(values)}; {min(values):.1f}")
    for name, bound in (("torch.save", " (at least 8)"), ("torch.save and fsync", "")):
        ratios = [by(rows[name]) / by(rows["Keeper.save()"]) for by in (statistics.median, min)]
        say(f"   {name} / Keeper.save(): of the medians{bound}; of the fastest", "; ".join(f"{ratio:.1f}" for ratio in ratios))


def report_beside(found: dict[str, Any]) -> None:
    for size, windows in found.items():
        say(f"   products of {size} while one is written: speed, of that without", spread([w["speed"] for w in windows], 2))
        longest = [max(1e3 * w[key] for w in windows) for key in ("longest", "longest_alone")]
        say("     the longest one, ms: while it is written; without", f"{longest[0]:.1f}; {longest[1]:.1f}")


def report_memory(found: dict[str, Any], bound: str) -> None:
    first, after, peak = (found[key] / found["state"] for key in ("first", "after", "peak"))
    say(f"   after the first; after {SAVES}; at the peak{bound}", f"{first:.3f}; {after:.3f}; {peak:.3f}")


def report_resume(fresh: Sequence[dict[str, Any]], resumed: Sequence[dict[str, Any]]) -> None:
    assert [(each["from"], each["saved"]) for each in (*fresh, *resumed)] == [(0, STEPS)] * STARTS + [(STEPS, 2 * STEPS)] * STARTS
    peaks = [[each["peak"] / MB for each in side] for side in (fresh, resumed)]
    say("3. peak of the process, MB: after imports", f"{statistics.median(each['imported'] for each in fresh) / MB:.0f}")
    for name, values in zip(("fresh", "resumed"), peaks, strict=True):
        say(f"   {name}, {STEPS} steps, {STARTS} times", ", ".join(f"{value:.0f}" for value in values))
    say("   ratio of the medians, resumed / fresh (at most 1.05)", f"{statistics.median(peaks[1]) / statistics.median(peaks[0]):.3f}")


def child(folder: Path, threads: int, part: str, *arguments: object) -> dict[str, Any]:
    """What `part` finds in a fresh process. This one stays small: a child's ru_maxrss starts at its parent's."""
    line = [sys.executable, __file__, "--folder", str(folder), "--threads", str(threads), "--part", json.dumps([part, *arguments])]
    return json.loads(subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout)


def measure(folder: Path, pairs: int, threads: int) -> None:
    run = functools.partial(child, folder, threads)
    (folder / SHAPES_FILE).write_text(json.dumps(e4b_shapes()))
    device, _, kind = disk._mount(folder.resolve(), disk.MOUNTS.read_text())
    if kind == "tmpfs":
        raise SystemExit(f"{folder.parent.resolve()} is on a tmpfs, which is memory; give a folder on a disk: --folder")
    say("file system; torch; its threads", f"{kind} on {device}; {torch.__version__}; {threads}")
    report_blocking(run("blocking", pairs))
    report_beside(run("beside"))
    say("2. memory beyond the state, in units of it: torch.save", "")
    report_memory(run("memory", "plain"), "")
    say("   Keeper.save()", "")
    report_memory(run("memory", "ours"), " (at most 1.1)")
    fresh = [run("training", f"run-{i}", STEPS) for i in range(STARTS)]
    report_resume(fresh, [run("training", f"run-{i}", 2 * STEPS) for i in range(STARTS)])


def main() -> int:
    parser = argparse.ArgumentParser(description="What a checkpoint of Gemma 3n E4B's trained tensors costs.")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to save to (default: here); needs 5 GB there")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of saves, at least 2")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        torch.set_num_threads(arguments.threads)
        torch.manual_seed(0)
        part, *rest = json.loads(arguments.part)
        print(json.dumps(PARTS[part](arguments.folder, *rest)))
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        measure(Path(made), arguments.pairs, arguments.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
