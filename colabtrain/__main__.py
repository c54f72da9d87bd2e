"""The command line: `demo` and `train`. Exit codes: 0 done, 1 failed, 2 wrong arguments, 130 interrupted."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FAILED, WRONG_ARGUMENTS, INTERRUPTED = 1, 2, 130
DEMO_RECORDS = 2400
DEMO_OPTIONS: dict[str, Any] = {"batch_size": 8, "log_every": 25, "max_eval_records": 300}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        model, data, options = {"demo": _demo, "train": _train}[arguments.command](arguments)
        return _run_in_foreground(model, data, arguments.run, options)
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        return _fail(str(error), WRONG_ARGUMENTS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="colabtrain", description="Train typed decisions in the background; survive the machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train the tiny model on generated decisions, about two minutes on two CPU cores")
    demo.add_argument("--steps", type=int, default=300)
    demo.add_argument("--run", type=Path, default=Path("runs/demo"), metavar="DIR")
    train = commands.add_parser("train", help="train on your records; a run folder with checkpoints is resumed")
    train.add_argument("--model", required=True, metavar="tiny|MODULE:FUNCTION", help="`tiny`, or a function that returns a model")
    train.add_argument("--data", required=True, nargs="+", metavar="FILE", help="JSONL records")
    train.add_argument("--run", required=True, type=Path, metavar="DIR", help="folder of this run")
    train.add_argument("--steps", type=int)
    train.add_argument("--epochs", type=int)
    train.add_argument("--seed", type=int)
    train.add_argument("--checkpoint-every", type=int, metavar="STEPS")
    train.add_argument("--eval-every", type=int, metavar="STEPS")
    train.add_argument("--config", type=Path, metavar="FILE.toml", help="options as top-level keys")
    train.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any TrainConfig or RunConfig field")
    return parser


def _demo(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    from colabtrain.mmjev.demo_data import help_desk, shown
    from colabtrain.mmjev.model import MMJev

    records = help_desk(DEMO_RECORDS)
    _say(f"{len(records):,} generated messages to a help desk, three typed questions on each. One of them:\n\n{shown(records[0])}\n")
    return MMJev.tiny(0), records, {**DEMO_OPTIONS, "steps": arguments.steps}


def _train(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    options: dict[str, Any] = {}
    if arguments.config:
        options |= tomllib.loads(arguments.config.read_text())
    named = ("steps", "epochs", "seed", "checkpoint_every", "eval_every")
    options |= {name: getattr(arguments, name) for name in named if getattr(arguments, name) is not None}
    options |= dict(_assignment(text) for text in arguments.set)
    return _model(arguments.model), arguments.data, options


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r} has no value; write --set name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def _model(name: str) -> Any:
    if name == "tiny":
        from colabtrain.mmjev.model import MMJev

        return MMJev.tiny(0)
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"--model {name!r} is unknown; give `tiny`, or module:function for a function that returns a model")
    sys.path.insert(0, str(Path.cwd()))
    make: Callable[[], Any] | None = getattr(importlib.import_module(module), function, None)
    if not callable(make):
        raise ValueError(f"--model {name!r}: module {module!r} has no function {function!r}")
    return make()


def _run_in_foreground(model: Any, data: Any, folder: Path, options: dict[str, Any]) -> int:
    from colabtrain.api import start
    from colabtrain.dashboard.pictures import save_loss_picture
    from colabtrain.dashboard.text import evaluation_table, follow
    from colabtrain.runtime.diary import DIARY_FILE, Tail
    from colabtrain.runtime.run import AlreadyRunning, RunFailed

    tail = Tail(folder / DIARY_FILE)
    tail.new()  # what an earlier session wrote is in the folder, not news
    try:
        run = start(model, data, run_dir=folder, display=False, **options)
    except AlreadyRunning as error:
        return _fail(str(error), FAILED)
    try:
        state = follow(run, tail, _say)
    except RunFailed:
        return _fail(f"failed: {run.error_line} (traceback in {folder / 'train.log'})", FAILED)
    except KeyboardInterrupt:
        _say("interrupted: saving a checkpoint (the same line goes on from it) ...")
        run.stop()
        return _fail(f"interrupted at step {run.step:,}; run the same line again to go on", INTERRUPTED)
    evaluations = [event for event in Tail(folder / DIARY_FILE).new() if event["event"] == "evaluation"]
    if evaluations:
        _say("\n" + evaluation_table(evaluations[-1]))
        (folder / "evaluation.json").write_text(json.dumps(evaluations[-1], indent=1))
    _say(f"\nloss picture: {save_loss_picture(run.history(), folder / 'loss.png', str(folder))}")
    return 0 if state == "finished" else INTERRUPTED


def _say(text: str) -> None:
    print(text, flush=True)


def _fail(text: str, code: int) -> int:
    print(f"colabtrain: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
