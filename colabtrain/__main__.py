"""The command line: `demo`, `train` and `verify`. Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 a new process is
needed and the checkpoint is safe, 130 interrupted."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FAILED, WRONG_ARGUMENTS, RESTART, INTERRUPTED = 1, 2, 3, 130
DEMO_RECORDS = 2400
DEMO_OPTIONS: dict[str, Any] = {"batch_size": 8, "log_every": 25, "max_eval_records": 300}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        started = _start(arguments)
    except (ValueError, OSError, ImportError) as error:
        return _fail(str(error), WRONG_ARGUMENTS)
    except KeyboardInterrupt:
        return _fail("interrupted before anything was trained", INTERRUPTED)
    return started if isinstance(started, int) else _run_in_foreground(*started)


def _start(arguments: argparse.Namespace) -> tuple[Any, Any] | int:
    """(run, tail of its diary), or an exit code."""
    if arguments.command == "verify":
        return _verify(arguments.run)
    model, data, options = {"demo": _demo, "train": _train}[arguments.command](arguments)

    from colabtrain.api import start
    from colabtrain.hub_token import HubError
    from colabtrain.mmjev.hub_files import ModelAccessError
    from colabtrain.runtime.diary import DIARY_FILE, Tail
    from colabtrain.runtime.lock import AlreadyRunning

    tail = Tail(arguments.run / DIARY_FILE)
    tail.new()  # what earlier calls wrote is in the folder, not news
    try:
        return start(model, data, run_dir=arguments.run, display=False, **options), tail
    except (AlreadyRunning, HubError, ModelAccessError) as error:
        return _fail(str(error), FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="colabtrain", description="Train typed decisions in the background; survive the machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train the tiny model on generated decisions (about two minutes on two CPU cores)")
    demo.add_argument("--steps", type=int, default=300)
    demo.add_argument("--run", type=_folder, default=Path("runs/demo"), metavar="DIR")
    train = commands.add_parser("train", help="train on your records; a run folder with checkpoints is resumed")
    train.add_argument(
        "--model",
        required=True,
        metavar="tiny|NAME|MODULE:FUNCTION",
        help="`tiny`, a Gemma 3n on the Hub or in a folder, or a function that returns a model",
    )
    train.add_argument("--data", required=True, nargs="+", metavar="FILE", help="JSONL records")
    train.add_argument("--run", required=True, type=_folder, metavar="DIR", help="folder of this run")
    train.add_argument("--steps", type=int, help="updates of the whole run; default: one epoch")
    train.add_argument("--epochs", type=int, help="passes over the data, instead of --steps")
    train.add_argument("--seed", type=int, help="of batches, dropout and the trained parts' start; default 0")
    train.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="default 200; also every 5 minutes")
    train.add_argument("--eval-every", type=int, metavar="STEPS", help="default: at the end only")
    train.add_argument("--hub", metavar="OWNER/NAME", help="Hub repo to publish every checkpoint to, and to go on from")
    train.add_argument("--config", type=Path, metavar="FILE.toml", help="options as top-level keys")
    train.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any TrainConfig or RunConfig field")
    verify = commands.add_parser("verify", help="check every checkpoint of a run; status 1 if none is good")
    verify.add_argument("run", type=_folder, metavar="RUN", help="folder of the run")
    return parser


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("the folder's name is empty")
    return Path(text).expanduser()


def _demo(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    from colabtrain.mmjev.demo_data import help_desk, shown
    from colabtrain.mmjev.model import MMJev

    records = help_desk(DEMO_RECORDS)
    _say(f"{len(records):,} generated messages to a help desk, three typed questions on each. One of them:\n\n{shown(records[0])}\n")
    return MMJev.tiny(0), records, {**DEMO_OPTIONS, "steps": arguments.steps}


def _train(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    options: dict[str, Any] = {}
    if arguments.config:
        try:
            options |= tomllib.loads(arguments.config.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--config {str(arguments.config)!r} cannot be read: {error}") from None
    named = ("steps", "epochs", "seed", "checkpoint_every", "eval_every", "hub")
    options |= {name: getattr(arguments, name) for name in named if getattr(arguments, name) is not None}
    options |= dict(_assignment(text) for text in arguments.set)
    if taken := sorted(options.keys() & {"jev", "data", "task", "run_dir", "config", "resume", "display"}):
        raise ValueError(
            f"{taken[0]}={options[taken[0]]!r} is no option of --set or --config; the command line has its own for what it offers"
        )
    return _model(arguments.model), arguments.data, options


def _verify(run: Path) -> int:
    from colabtrain.runtime.verify import verify

    num_good = 0
    for line, good in verify(run):
        _say(line)
        num_good += good
    return 0 if num_good else _fail(f"no good checkpoint in {str(run)!r}", FAILED)


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set {text!r} has no name or no value; write --set name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def _model(name: str) -> Any:
    """What start() takes as a model: a name as it is, what the function made, or an error that says what is possible."""
    module, colon, function = name.partition(":")
    if not colon:
        if name == "tiny" or "/" in name or Path(name).is_dir():
            return name
        raise ValueError(f"--model {name!r} is unknown; give `tiny`, owner/name of a Gemma 3n on the Hub, its folder, or module:function")
    if not module or not function:
        raise ValueError(f"--model {name!r} lacks the module or the function; write module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make: Callable[[], Any] | None = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        raise ValueError(f"--model {name!r}: {_where(error)}; the module must be importable from here") from None
    if not callable(make):
        raise ValueError(f"--model {name!r}: module {module!r} has no function {function!r}")
    try:
        made = make()
    except Exception as error:
        raise ValueError(f"--model {name!r}: {function}() raised {_where(error)}; it is called without arguments") from None
    if made is None or isinstance(made, str):
        raise ValueError(f"--model {name!r}: {function}() returned {made!r}; it must return a model")
    return made


def _where(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name} line {frame.lineno})"


def _run_in_foreground(run: Any, tail: Any) -> int:
    from colabtrain.dashboard.text import follow
    from colabtrain.runtime.run import RunFailed

    try:
        state = follow(run, tail, _say)
    except RunFailed:
        return _failed(run)
    except KeyboardInterrupt:
        _say("interrupted: saving a checkpoint ...")
        return _failed(run) if run.stop() == "failed" else _stopped(run)
    _show_results(run)
    return 0 if state == "finished" else _stopped(run)


def _failed(run: Any) -> int:
    saved = f"the checkpoint of step {run.saved_step:,} is safe" if run.saved_step else "nothing was saved"
    code = RESTART if run.needs_restart and run.saved_step else FAILED
    return _fail(f"failed: {run.error_line}; {saved} (traceback in {run.folder / 'train.log'})", code)


def _stopped(run: Any) -> int:
    state = "stopped" if run.state == "stopped" else "still stopping (a step does not end)"
    saved = f"the checkpoint of step {run.saved_step:,} is safe" if run.saved_step else "nothing was saved yet"
    return _fail(f"{state} at step {run.step:,}; {saved}; run the same line again to go on", INTERRUPTED)


def _show_results(run: Any) -> None:
    from colabtrain.dashboard.pictures import save_loss_picture
    from colabtrain.dashboard.text import evaluation_table
    from colabtrain.runtime.diary import DIARY_FILE, Tail

    evaluations = [event for event in Tail(run.folder / DIARY_FILE).new() if event["event"] == "evaluation"]
    if evaluations:
        _say("\n" + evaluation_table(evaluations[-1]))
        (run.folder / "evaluation.json").write_text(json.dumps(evaluations[-1], indent=1))
    _say(f"\nloss picture: {save_loss_picture(run.history(), run.folder / 'loss.png', run.folder.name)}")


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough; the training goes on
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _fail(text: str, code: int) -> int:
    print(f"colabtrain: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
