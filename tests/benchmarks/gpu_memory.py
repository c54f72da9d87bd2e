"""What a CUDA card shows of loading and of running out of memory, at E4B's size with random weights.

Writes a checkpoint of E4B's text model (13.7 GB) with weights drawn on the card, loads it shard by shard in each
precision, with the table of per-layer embeddings on the card and on the host, and trains a few steps under real memory
limits (torch.cuda.set_per_process_memory_fraction), so that steps really fail and are retried in parts. Prints one
table; nothing here passes or fails by a wall clock. Needs a CUDA card with 40 GB, 20 GB of disk, and transformers.

Run it with colabtrain installed:
    python tests/benchmarks/gpu_memory.py [--folder runs/e4b] [--layers 35]
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import colabtrain
from colabtrain.config import RunConfig, TrainConfig
from colabtrain.device import _ram_bytes
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev import backbone, pretrained
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev
from colabtrain.mmjev.pretrained import Pretrained
from colabtrain.records.schema import Record, Seg
from colabtrain.records.selection import select
from colabtrain.runtime.diary import Tail

sys.path.insert(0, str(Path(__file__).parents[1]))
GIB = 2**30
LAYER_TYPES = ["sliding_attention"] * 4 + ["full_attention"]
OPTIONS: dict[str, Any] = {"batch_size": 8, "token_budget": 6000, "log_every": 1, "display": False, "calibration_share": 0.0}


def say(what: str, value: str) -> None:
    print(f"| {what:<72} | {value:>34} |", flush=True)


def write_checkpoint(folder: Path, num_layers: int) -> None:
    from small_tokenizer import write_tokenizer
    from transformers import Gemma3nTextConfig

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, [("Y", "e"), ("Ye", "s"), ("N", "o")])
    config = Gemma3nTextConfig(
        num_hidden_layers=num_layers,
        layer_types=(LAYER_TYPES * 7)[:num_layers],
        intermediate_size=[16384] * num_layers,
        activation_sparsity_pattern=[0.95 if i < 10 else 0.0 for i in range(num_layers)],
        num_kv_shared_layers=15 * num_layers // 35,
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": config.to_dict()}, default=str))
    lm = pretrained._skeleton(config)
    generator = torch.Generator("cuda").manual_seed(0)
    where, shard, size, number = {}, {}, 0, 1
    for name, parameter in lm.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        scale = 0.02 if "embed" in name else parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        value = noise * scale + (1.0 if "norm" in name and parameter.dim() == 1 else 0.0)
        shard[f"model.language_model.{name}"] = value.cpu()
        size += value.numel() * 2
        where[f"model.language_model.{name}"] = f"model-{number:05}.safetensors"
        if size > 4 * GIB:
            save_file(shard, folder / f"model-{number:05}.safetensors")
            shard, size, number = {}, 0, number + 1
    if shard:
        save_file(shard, folder / f"model-{number:05}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def texts(num_records: int, words: int) -> list[Record]:
    return [
        Record("long", "train", "text", (Seg("text", f"{i} " + "abc " * words),), record.qs, record.targets, record.ys, f"long-{i}")
        for i, record in enumerate(help_desk(num_records))
    ]


def fresh() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def load(folder: Path, **options: Any) -> tuple[MMJev, float]:
    fresh()
    started = time.perf_counter()
    model = Pretrained.open(str(folder), **options).load()
    torch.cuda.synchronize()
    return model, time.perf_counter() - started


def loading(folder: Path) -> MMJev:
    before = _ram_bytes()["ram"]
    model, seconds = load(folder)
    say("load, bf16: seconds; GiB on the card", f"{seconds:.1f}; {torch.cuda.memory_allocated() / GIB:.2f}")
    anonymous = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    say("  host memory that is not the mapped file, GiB (before the load: all)", f"{anonymous / 2**20:.2f} ({before / GIB:.2f})")
    records = texts(6, 40)
    with torch.no_grad():
        on_card = scores(model, records)
    del model
    model, seconds = load(folder, ple_device="cpu")
    say("load, bf16, table on the host: seconds; GiB on the card", f"{seconds:.1f}; {torch.cuda.memory_allocated() / GIB:.2f}")
    with torch.no_grad():
        say("  same scores as with the table on the card", str(all(map(torch.equal, on_card, scores(model, records)))))
    return model


def scores(model: MMJev, records: list[Record]) -> list[torch.Tensor]:
    model.eval()
    found = []
    for fc in model.default_subnets().values():
        plans = [model.plan(model.encode_state(record.state, fc), record.qs, fc) for record in records]
        found.append(model.scores(model.pack(plans), fc))
    return found


def task_of(model: MMJev, records: list[Record], **options: Any) -> ElasticTask:
    train = TrainConfig(**{k: v for k, v in OPTIONS.items() if k in ("batch_size", "token_budget", "calibration_share")})
    task = ElasticTask(model, select(records, train), train, RunConfig(steps=50, **options))
    task.prepare()
    return task


def peak_of(call: Callable[[], object]) -> tuple[float, float]:
    """GiB beyond what was there, seconds."""
    fresh()
    before, started = torch.cuda.memory_allocated(), time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB, time.perf_counter() - started


def estimates(model: MMJev) -> None:
    """The memory that a step takes, against what layers_to_checkpoint() counts with."""
    records = texts(64, 200)
    for layers in (0, 10, 20):
        task = task_of(model, records, checkpoint_layers=layers)
        task.step(0)
        peak, seconds = peak_of(lambda task=task: task.step(1))  # type: ignore[misc]
        tokens = task.step(2).tokens
        say(f"step of {tokens:,} tokens, {layers} layers checkpointed: peak GiB; seconds", f"{peak:.1f}; {seconds:.2f}")
    for free in (6, 12, 24, 48, 96):
        chosen = backbone.layers_to_checkpoint(model.lm, 6000, free * GIB)
        say(f"layers_to_checkpoint at {free} GiB free, 6,000 tokens", str(chosen))


def running_out(model: MMJev, folder: Path) -> None:
    """Limits at which a whole batch fails: the same losses, in parts."""
    records, losses = texts(64, 200), {}
    total = torch.cuda.get_device_properties(0).total_memory
    held = torch.cuda.memory_allocated()
    for name, extra in (("no limit", None), ("12 GiB", 12), ("5 GiB", 5), ("2 GiB", 2)):
        fresh()
        torch.cuda.set_per_process_memory_fraction(1.0 if extra is None else min(1.0, (held + extra * GIB) / total))
        run = colabtrain.start(model, records, run_dir=folder / name.replace(" ", "-"), steps=4, checkpoint_layers=0, **OPTIONS)
        state = wait(run)
        events = Tail(run.folder / "diary.jsonl").new()
        losses[name] = [event["loss"]["fast"] for event in events if event["event"] == "step" and event["loss"]]
        ooms = [event["splits"] for event in events if event["event"] == "oom"]
        lost = (torch.cuda.memory_allocated() - held) / GIB
        say(f"4 steps with {name} for a step: state; splits that failed", f"{state}; {ooms}")
        say("  records set aside", str(sum(event["event"] == "set_aside" for event in events)))
        run.free()
        say("  GiB more than before the run; peak GiB", f"{lost:.2f}; {torch.cuda.max_memory_allocated() / GIB:.1f}")
        if run.exception_text:
            print(run.exception_text[-300:])
    torch.cuda.set_per_process_memory_fraction(1.0)
    for name, values in losses.items():
        if len(values) == len(losses["no limit"]):
            first, last = (abs(values[i] - losses["no limit"][i]) / abs(losses["no limit"][i]) for i in (0, -1))
            say(f"relative difference of the first and last loss, {name} (bf16 noise)", f"{first:.1e}; {last:.1e}")


def wait(run: Any) -> str:
    try:
        return run.wait()
    except colabtrain.RunFailed:
        return run.state


def update(model: MMJev) -> None:
    """What the copy to fall back on costs the update."""
    task = task_of(model, texts(16, 20))
    optimizer = task.optimizer
    task.step(0)

    def plain() -> None:
        optimizer.adamw.found_inf = torch.zeros((), device="cuda")
        optimizer.adamw.step()
        del optimizer.adamw.found_inf

    def ours() -> None:
        optimizer._update(torch.zeros((), device="cuda"))

    for parameter in optimizer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    for _ in range(30):
        for name, call in (("plain", plain), ("ours", ours)):
            times[name].append(1000 * peak_of(call)[1])
    parameters = sum(p.numel() for p in optimizer.parameters.values())
    say(
        f"update of {parameters:,} parameters, plain; with the copy: median ms",
        "; ".join(f"{statistics.median(t):.2f}" for t in times.values()),
    )
    optimizer.abandon()


def syncs(model: MMJev) -> None:
    task = task_of(model, texts(32, 100))
    task.step(0)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task.step(1)
    torch.cuda.set_sync_debug_mode("default")
    places: dict[str, int] = {}
    for warning in caught:
        place = f"{Path(warning.filename).name}:{warning.lineno}"
        places[place] = places.get(place, 0) + 1
    say("host waits for the card in one step", str(sum(places.values())))
    for place, count in sorted(places.items(), key=lambda item: -item[1])[:12]:
        say(f"  {place}", str(count))


def mixed(folder: Path) -> None:
    """The precision of a card before Ampere (fp16 products, fp32 stream), at a T4's memory."""
    records, found, real = texts(4, 40), {}, pretrained.precision
    for name, dtypes in (("fp32", (torch.float32,) * 2), ("bf16", (torch.bfloat16,) * 2), ("mixed", (torch.float16, torch.float32))):
        pretrained.precision = lambda device, dtypes=dtypes: dtypes
        model, _ = load(folder, ple_device="cpu")
        say(f"{name}, table on the host: GiB on the card", f"{torch.cuda.memory_allocated() / GIB:.2f}")
        with torch.no_grad():
            found[name] = torch.cat([each.float() for each in scores(model, records)])
        if name != "mixed":
            del model
    pretrained.precision = real
    for name in ("bf16", "mixed"):
        error = (found[name] - found["fp32"]).norm() / found["fp32"].norm()
        say(f"  scores of {name} against fp32, relative error of the vector", f"{float(error):.4f}")
    fresh()
    torch.cuda.set_per_process_memory_fraction(14.6 * GIB / torch.cuda.get_device_properties(0).total_memory)
    run = colabtrain.start(model, texts(64, 200), run_dir=folder.parent / "runs" / "t4", steps=4, **OPTIONS)
    state = wait(run)
    events = Tail(run.folder / "diary.jsonl").new()
    steps = [event for event in events if event["event"] == "step"]
    say("  4 steps in a T4's 14.6 GiB: state; splits that failed", f"{state}; {[e['splits'] for e in events if e['event'] == 'oom']}")
    say("  tokens of a step; peak GiB", f"{steps[-1]['tokens']:,}; {torch.cuda.max_memory_allocated() / GIB:.1f}")
    say("  losses of fast; skipped", f"{[round(e['loss'].get('fast', -1), 3) for e in steps]}; {sum(e['skipped'] for e in steps)}")
    torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/e4b"))
    parser.add_argument("--layers", type=int, default=35)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    checkpoint, runs = arguments.folder / "checkpoint", arguments.folder / "runs"
    if not (checkpoint / "model.safetensors.index.json").exists():
        write_checkpoint(checkpoint, arguments.layers)
    model = loading(checkpoint)
    for part in (estimates, functools.partial(running_out, folder=runs), update, syncs):
        try:
            part(model)
        except Exception:  # the other parts are worth having
            traceback.print_exc()
        torch.cuda.set_per_process_memory_fraction(1.0)
    del model
    mixed(checkpoint)


if __name__ == "__main__":
    main()
