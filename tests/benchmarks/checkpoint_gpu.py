"""What a checkpoint of E4B's trained tensors costs the steps of a CUDA card, and whether it is of one step there.

A window is some matrix products, which keep the card busy as a step would, an AdamW step on the 28.3 million trained
parameters, and a wait for the card. Windows with nothing else, with Keeper.save() at their start, and with torch.save at
their start take turns, each on a disk at rest. The stall is what a window takes longer than the one before it with
nothing. Before each Keeper.save() the tensors are copied on the card; what is then on the disk must equal that copy bit
for bit, though the steps went on at once.

Run it with colabtrain and transformers installed:
    python tests/benchmarks/checkpoint_gpu.py [--folder /mnt/disk] [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoint_cost import MB, Saver, say, spread
from e4b_trained import SHAPES_FILE, e4b_shapes

from colabtrain.runtime import checkpoint, manifest

MATRIX, PRODUCTS = 8192, 40


def window(saver: Saver, matrix: torch.Tensor, before: Callable[[], object]) -> float:
    """Milliseconds."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    before()
    for _ in range(PRODUCTS):
        matrix @ matrix
    saver.task.step(0)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


def is_of_one_step(saver: Saver, copy: dict[str, dict[str, torch.Tensor]]) -> bool:
    found = checkpoint.read(manifest.listed(saver.keeper.folder)[0])
    assert found.step == saver.step
    return all(torch.equal(tensor, copy[group][name].cpu()) for group, named in found.tensors.items() for name, tensor in named.items())


def measure(folder: Path, rounds: int) -> bool:
    (folder / SHAPES_FILE).write_text(json.dumps(e4b_shapes()))
    saver = Saver(folder)
    matrix = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16)
    for _ in range(3):
        window(saver, matrix, lambda: None)
    first = window(saver, matrix, saver.begin)
    saver.keeper.drain()
    times: dict[str, list[float]] = {"nothing": [], "ours": [], "call": [], "plain": []}
    equal = True
    for _ in range(rounds):
        alone = window(saver, matrix, lambda: None)
        copy = {group: {name: tensor.clone() for name, tensor in named.items()} for group, named in saver.task.state()[0].items()}
        calls: list[float] = []
        times["ours"].append(window(saver, matrix, lambda calls=calls: calls.append(1e3 * saver.begin())) - alone)
        saver.task.step(0)
        saver.keeper.drain()
        equal &= is_of_one_step(saver, copy)
        times["call"] += calls
        times["nothing"].append(alone)
        times["plain"].append(window(saver, matrix, saver.plain) - window(saver, matrix, lambda: None))
    say("card; torch", f"{torch.cuda.get_device_name()}; {torch.__version__}")
    say("state, MB", f"{saver.task.num_bytes() / MB:.1f}")
    say(f"a window without a save, ms, median of {rounds} (middle half)", spread(times["nothing"]))
    say("the first save, which allocates pinned memory, takes longer by, ms", f"{first - statistics.median(times['nothing']):.1f}")
    say("Keeper.save(): stall of the window, ms (at most 50)", spread(times["ours"]))
    say("Keeper.save(): the call itself, ms", spread(times["call"]))
    say("torch.save and fsync: stall of the window, ms", spread(times["plain"]))
    say(f"what is on the disk is of one step, bit for bit, {rounds} times", str(equal))
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description="What a checkpoint of E4B's trained tensors costs the steps of a CUDA card.")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to save to (default: here); needs 2 GB there")
    parser.add_argument("--rounds", type=int, default=20, help="at least 2")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made, torch.device("cuda"):
        return 0 if measure(Path(made), arguments.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
