"""Everything a person can give wrong, and what they are told. `python tests/test_wrong_inputs.py` prints the table.

Each case is refused in the calling cell (or, where it can only be seen there, by the run before it has trained) in words
that name the thing, the value and the remedy; no file changes, no thread is left, and a live run beside it goes on.
Single fields of records and configs have their own tables in test_records and test_config; here is one of each kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy
import pytest
import torch
from toy_task import ToyTask

import colabtrain
from colabtrain.__main__ import main as command_line
from colabtrain.config import RunConfig, SubnetConfig, TrainConfig
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev
from colabtrain.runtime.lock import AlreadyRunning
from colabtrain.runtime.run import Run, RunFailed
from colabtrain.task import StepReport, inference

SECONDS = 60.0
RECORDS = help_desk(12)
WRONG, AS_TEXT = cast(Any, 5), cast(Any, "0")  # where a type checker would say so first
ZERO_LATENTS = torch.nn.Parameter(torch.zeros(8, 128))
VOTES = ("noul", 2, [1.0, 2.0], [5, 5])
SOFT = {"whole": torch.ones(2, 128, dtype=torch.long), "zero": torch.zeros(2, 128)}
QUICK: dict[str, Any] = {"display": False, "steps": 1, "lora_r": 2, "max_eval_records": 1, "calibration_share": 0.0}


class Refused(Exception):
    """The command line ended with 2; the text is the last line on stderr."""


class Lends(ToyTask):
    def borrow(self) -> Any:
        return inference(torch.nn.Linear(1, 1))


class Place:
    """A folder with wrong and right things in it, a model, and a run that is held in its second step."""

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.model = tmp, MMJev.tiny(0)
        for name, content in FILES.items():
            (tmp / name).parent.mkdir(exist_ok=True)
            (tmp / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        torch.save([torch.zeros(1)], tmp / "list.pt")
        colabtrain.add_lora(self.model, 4)
        colabtrain.save_adapter(self.model, tmp / "rank-4")
        self.start(run_dir=tmp / "used").wait(SECONDS)
        self.held, self.go = threading.Event(), threading.Event()
        self.live = colabtrain.start(task=Lends(3, self._hold), run_dir=tmp / "live", display=False)
        assert self.held.wait(SECONDS)

    def _hold(self, i: int) -> None:
        if i == 1:
            self.held.set()
            assert self.go.wait(10 * SECONDS)

    def end(self) -> None:
        self.go.set()
        assert self.live.wait(SECONDS) == "finished"

    def start(self, **options: Any) -> Run:
        given = {"jev": self.model, "data": RECORDS, "run_dir": self.tmp / "new", **QUICK, **options}
        return colabtrain.start(**given)

    def train_task(self, task: Any, **options: Any) -> None:
        colabtrain.start(task=task, **{"run_dir": self.tmp / "failed", "display": False, **options}).wait(SECONDS)

    def files(self, worker: bool) -> dict[str, tuple[int, int]]:
        """Size and time of everything; with `worker`, but for the run folder of what only a worker can refuse."""
        found = (path for path in self.tmp.rglob("*") if not (worker and path.is_relative_to(self.tmp / "failed")))
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found if "__pycache__" not in path.parts}


GEMMA = {"model_type": "gemma3n", "text_config": {}}
FILES: dict[str, str | bytes] = {
    "a-file": "x",
    "empty.jsonl": "",
    "table.csv": "text,label\nhello,1\n",
    "list.json": "[{}]",
    "packed.jsonl.gz": b"\x1f\x8b\x08\x00\xff",
    "evil.pt": pickle.dumps(os.system, protocol=2),
    "no-model/readme.md": "x",
    "other-model/config.json": json.dumps({"model_type": "llama"}),
    "quantised/config.json": json.dumps({**GEMMA, "quantization_config": {"quant_method": "gptq"}}),
    "notes/notes.txt": "x",
    "wrong_maker.py": "def fails():\n    return 1 / 0\n\n\ndef nothing():\n    pass\n",
    "broken.toml": "batch_size = ",
}


class Case(NamedTuple):
    """given: for people; give(place) must raise `error` with all of `words`. TMP stands for the folder."""

    given: str
    give: Callable[[Place], Any]
    words: str
    error: type[BaseException] = ValueError


def option(words: str, error: type[BaseException] = ValueError, **options: Any) -> Case:
    """start() with one more option, or two."""
    return Case(", ".join(f"{name}={short(value)}" for name, value in options.items()), lambda place: place.start(**options), words, error)


def short(value: Any) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def record(**changes: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(RECORDS[0]), **changes}


def data(words: str, given: str, **changes: Any) -> Case:
    """start() with one record that is changed, among good ones."""
    return Case(f"data: a record with {given}", lambda place: place.start(data=[*RECORDS[1:], record(**changes)]), words)


def subnets(words: str, **named: Any) -> Case:
    return option(words, subnets=named)


def own_model(place: Place, **changes: Any) -> Run:
    members: dict[str, Any] = dict.fromkeys(("encode_state", "plan", "pack", "run", "train", "eval"), print)
    members |= {name: getattr(place.model, name) for name in ("base", "lm", "heads", "latents", "yes_id", "no_id")}
    given = {name: value for name, value in {**members, **changes}.items() if value is not ...}
    return place.start(jev=SimpleNamespace(**given))


def own(words: str, given: str, **changes: Any) -> Case:
    return Case(f"jev: an own model, {given}", lambda place: own_model(place, **changes), words)


def task(words: str, given: str, made: Any, error: type[BaseException] = ValueError, **options: Any) -> Case:
    return Case(f"task {given}", lambda place: place.train_task(made, **options), words, error)


def helper(words: str, given: str, call: Callable[[MMJev], Any], error: type[BaseException] = ValueError) -> Case:
    """A public function, called with the model."""
    return Case(given, lambda place: call(place.model), words, error)


def in_tmp(name: str, key: str, words: str, error: type[BaseException] = ValueError, **more: Any) -> Case:
    """start() with the path of something in the folder."""
    return Case(f"{key}={name!r}", lambda place: place.start(**{key: place.tmp / name}, **more), words, error)


def lines(*arguments: str, words: str) -> Case:
    """The command line, with what it needs besides."""

    def give(place: Place) -> None:
        train = ["--model", "tiny", "--data", "none.jsonl", "--run", str(place.tmp / "new")] if "--model" not in arguments else []
        stderr = io.StringIO()
        with contextlib.chdir(place.tmp), mock.patch.object(sys, "path", [*sys.path]), contextlib.redirect_stderr(stderr):
            try:
                code = command_line(["train", *train, *arguments])
            except SystemExit as error:
                code = error.code
        assert code == 2, code
        raise Refused(stderr.getvalue().strip().splitlines()[-1])

    return Case(f"$ colabtrain train {' '.join(arguments)}", give, words, Refused)


def environment(value: str, words: str) -> Case:
    def give(place: Place) -> None:
        with mock.patch.dict(os.environ, MMJEV_TOKEN_BUDGET=value):
            place.start()

    return Case(f"MMJEV_TOKEN_BUDGET={value!r} in the environment", give, words)


def raises(record: Any) -> bool:
    raise KeyError("label")


class WrongStep(ToyTask):
    def step(self, i: int, splits: int = 1) -> Any:
        return {"loss": 1.0}


class NoSplits(ToyTask):
    def step(self, i: int) -> StepReport:  # type: ignore[override]
        return super().step(i)


class WrongFingerprint(ToyTask):
    def fingerprint(self) -> Any:
        return {"made": object()}


class WrongState(ToyTask):
    def state(self) -> Any:
        return {"weight": self.weight}


def borrow_in_the_worker(place: Place) -> None:
    ready, runs = threading.Event(), list[Run]()

    def borrow(i: int) -> None:
        assert ready.wait(SECONDS)
        with runs[0].borrow():
            raise AssertionError("a step has the model to itself already")

    runs.append(colabtrain.start(task=Lends(1, borrow), run_dir=place.tmp / "failed" / "borrows", display=False))
    ready.set()
    runs[0].wait(SECONDS)


MODELS = [
    option("start() needs jev (a model; MMJev.tiny() to try)", jev=None),
    option("jev is a int without base, lm, heads, latents, yes_id, no_id, encode_state, plan, pack, run, train, eval; give a model", jev=5),
    option("jev is the class MMJev; give a model made from it, such as MMJev.tiny()", jev=MMJev),
    option("jev is a ndarray without lm, heads", jev=numpy.zeros(2)),
    Case("jev and data the wrong way round", lambda place: place.start(jev=RECORDS, data=place.model), "jev is a list without base, lm"),
    option("jev='' is no folder here and no name on the Hub; give 'tiny', a folder, or owner/name of a Gemma 3n", jev=""),
    option("jev='gemma-3n' is no folder here and no name on the Hub; give 'tiny', a folder, or owner/name", jev="gemma-3n"),
    option("'/no/such/folder' is no folder here and no name on the Hub; give one such as google/gemma-3n-E4B-it", jev="/no/such/folder"),
    in_tmp("no-model", "jev", "TMP/no-model has no file config.json; a checkpoint has config.json, tokenizer.json, tokenizer_config.json"),
    in_tmp("other-model", "jev", "is a model of type 'llama', not a Gemma 3n; use google/gemma-3n-E4B-it"),
    in_tmp("quantised", "jev", "is quantised (gptq): the fast sub-network is a slice"),
    own("jev is a SimpleNamespace without heads, plan; give a model such as", "without plan and heads", plan=..., heads=...),
    own("jev.heads of the SimpleNamespace is {}; it must be a torch Module", "heads a dict", heads={}),
    own("jev.run of the SimpleNamespace is 5; it must be a method", "run a number", run=5),
    own("jev.lm of the SimpleNamespace is without layers, embed_tokens; it must be the text model", "lm a layer", lm=torch.nn.Linear(1, 1)),
    own("have a row of exact zeros, whose gradient in a norm is not a number; start them near", "latents zero", latents=ZERO_LATENTS),
    helper(
        "the name of the model is 5; give a folder, or one on the Hub", "MMJev.from_pretrained(5)", lambda _: MMJev.from_pretrained(WRONG)
    ),
    helper("seed='0' is of type str; it must be int", "MMJev.tiny('0')", lambda _: MMJev.tiny(AS_TEXT)),
]

DATA = [
    option("start() needs data (records, or the path of a JSONL file)", data=None),
    option("data file 'none.jsonl' does not exist (the working directory is", FileNotFoundError, data="none.jsonl"),
    option("data file '' has no name (the working directory is", FileNotFoundError, data=""),
    option("data['desk'] file 'none.jsonl' does not exist", FileNotFoundError, data={"desk": "none.jsonl"}),
    option("cannot be opened: File name too long", FileNotFoundError, data='{"id": 1}\n' * 500),
    in_tmp("empty.jsonl", "data", "empty.jsonl') holds no records; give at least one"),
    in_tmp("table.csv", "data", "table.csv line 1 is not JSON (Expecting value at column 1); one record a line is wanted"),
    in_tmp("list.json", "data", "list.json line 1 is a JSON list; a record is a JSON object, one a line"),
    in_tmp(
        "packed.jsonl.gz",
        "data",
        "packed.jsonl.gz line 1 is not UTF-8 text (invalid start byte at its byte 1); give JSONL saved as UTF-8, not",
    ),
    in_tmp("notes", "data", "is a folder (the working directory is", FileNotFoundError),
    option("data=[] holds no records; give at least one", data=[]),
    option("data is a bytes; give a path, a list of records, or a mapping name -> either", data=b"x"),
    option("data is a ndarray; give a path, a list of records", data=numpy.zeros(3)),
    option("data is a Tensor; give a path", data=torch.zeros(3)),
    option("data is a Record that is one record; give a list of them, such as data=[record]", data=RECORDS[0]),
    option("data['a'] is a int; give a path, a list of records, or a mapping", data={"a": 5}),
    option("data[0] is a NoneType; give a record (mapping or Record) or a path", data=[None]),
    Case(
        "data: a mapping whose names are splits",
        lambda place: place.start(data={"train": RECORDS[:8], "test": [record(split="train")]}),
        "data['test'] holds record 'help_desk-0' of split 'train' (what a record is that does not say); the names of a mapping are tasks",
    ),
    Case(
        "data: only split test",
        lambda place: place.start(data=RECORDS[-2:]),
        "no record is left to train on (splits found: {'test': 2}; dropped: none; set aside for calibration: 0); give more records of",
    ),
    Case(
        "data: only excluded tasks",
        lambda place: place.start(data=[record(task="snake_syn")]),
        "dropped: 1 of task 'snake_syn': excluded task",
    ),
    data("data[11] (id 'help_desk-0'): qs is empty; a record needs at least one question, or leave the record out", "no questions", qs=[]),
    data("data[11] (id 'help_desk-0'): state is 'hello'; it must be a list of segments", "a text as state", state="hello"),
    data(
        "question 'team': targets sum to 2; they must sum to 1 (divide them by their sum)",
        "raw votes",
        targets=[[1, 1, 0, 0], [1, 0, 0, 0], [1, 0]],
    ),
    data("question 'team': ys is 7; it must be the index of the answer, 0 to 3", "an answer out of range", ys=[7, 0, 0]),
    data("unknown field 'target'; did you mean 'targets'?", "`target`", targets=None, target=[[1, 0, 0, 0]]),
    data(
        "record 'help_desk-0' of task 'help_desk': tiny-0 cannot read a segment of kind 'image' from 'photo.png'; give a float tensor",
        "a picture's path",
        state=[{"kind": "image", "data": "photo.png"}],
    ),
    data(
        "cannot read a segment of kind 'image' from 'tensor([[1, 1",
        "whole numbers",
        state=[{"kind": "image", "data": SOFT["whole"]}],
    ),
    data(
        "row 0 of 2 is exactly zero, which makes NaN gradients; leave such rows out",
        "padding",
        state=[{"kind": "audio", "data": SOFT["zero"]}],
    ),
    Case("load_records({'a': 5})", lambda place: colabtrain.load_records({"a": 5}), "data['a'] is a int; give a path"),
]

TASKS = [
    task("task is a int without prepare, num_steps, step, state, load, fingerprint; colabtrain.Task says what each is for", "5", 5),
    task("task is the class ToyTask; give an object made from it, such as task=ToyTask()", "ToyTask, the class", ToyTask),
    task("NoSplits.step does not take (i, splits); define it as step(self, i, splits=1)", "whose step has no splits", NoSplits(1)),
    task("task= is given together with jev or data; a Task brings its own model and data", "with data", ToyTask(1), data=RECORDS),
    task("steps=3 is given together with task=; a Task decides that itself", "with steps", ToyTask(1), steps=3),
    task("config= has a TrainConfig and is given together with task=", "with a TrainConfig", ToyTask(1), config=TrainConfig()),
    task("adapter_dir='x' is given together with task=; a Task decides that itself", "with adapter_dir", ToyTask(1), adapter_dir="x"),
    task("ToyTask.num_steps is '0' after prepare(); it must be an int", "with num_steps '0'", ToyTask(AS_TEXT), RunFailed),
    task("ToyTask.num_steps is 0 after prepare(); it must be an int of at least 1", "with num_steps 0", ToyTask(0), RunFailed),
    task("; it must give a mapping that JSON can hold", "whose fingerprint is no JSON", WrongFingerprint(1), RunFailed),
    task("WrongStep.step() gave a dict; it must give a StepReport", "whose step gives a dict", WrongStep(1), RunFailed),
    task(
        "ValueError: WrongState.state() gave a dict; it must give ({'trainable': {...}, 'optimizer': {...}}, meta)",
        "whose state gives a dict",
        WrongState(1),
        RunFailed,
    ),
    helper("StepReport(loss=5) is a int; give a mapping such as {'loss': value}", "StepReport(5)", lambda _: StepReport(WRONG)),
]

FOLDERS = [
    in_tmp("a-file", "run_dir", "run_dir: the folder 'TMP/a-file' cannot be used (TMP/a-file is a file); give another one"),
    in_tmp("a-file/sub", "run_dir", "run_dir: the folder 'TMP/a-file/sub' cannot be used (TMP/a-file is a file)"),
    option("run_dir='' is empty; name a folder, or leave it out for 'runs/tiny-0-data'", run_dir=""),
    option("run_dir=5 is a int, which is no path; name a folder, or leave it out", run_dir=5),
    option("run_dir: the folder '/proc/nothing/here' cannot be used", run_dir="/proc/nothing/here"),
    option("cannot be used (File name too long); give another one", run_dir="/" + "x" * 300),
    in_tmp(
        "used",
        "run_dir",
        "resume=False, but TMP/used/checkpoints has checkpoints; give an empty run folder, or leave resume out",
        resume=False,
    ),
    in_tmp(
        "used", "run_dir", "step-00000001 belongs to another experiment (config.seed: checkpoint 0, now 5); use the same data and", seed=5
    ),
    in_tmp("used", "run_dir", "belongs to another experiment (data: checkpoint '10 records", data=RECORDS[1:]),
    in_tmp("live", "run_dir", "live': running, step 1 of 3> trains something else in this folder (", AlreadyRunning),
    in_tmp("live", "run_dir", "trains something else in this folder (", AlreadyRunning, replace=True),
    Case(
        "the live run's model, replace=True, and a wrong folder",
        lambda place: place.train_task(place.live.owned, run_dir=place.tmp / "a-file", replace=True),
        "run_dir: the folder 'TMP/a-file' cannot be used",
    ),
    Case(
        "the live run again, replace=True and resume=False",
        lambda place: place.train_task(place.live.owned, run_dir=place.tmp / "live", replace=True, resume=False),
        "saves in this folder when it is replaced; give another run_dir",
    ),
    Case(
        "the live run again, with other settings",
        lambda place: place.train_task(place.live.owned, run_dir=place.tmp / "live", log_every=3),
        "is alive with other settings (log_every: the live run has 50, now 3); stop it first (run.stop()), or give replace=True",
        AlreadyRunning,
    ),
    in_tmp("used/checkpoints/step-00000001", "run_dir", "is part of the run in TMP/used; give that folder to go on, or another one"),
    in_tmp("used/checkpoints", "run_dir", "run_dir: TMP/used/checkpoints is part of the run in TMP/used; give that folder to go on"),
    Case(
        "adapter_dir, the run's own folder",
        lambda place: place.start(adapter_dir=place.tmp / "new"),
        "adapter_dir='TMP/new' is the run's own folder; give another one, or leave it out for <run>/adapter",
    ),
    option("adapter_dir='' is empty; name a folder, or leave it out for <run>/adapter", adapter_dir=""),
    in_tmp("a-file", "adapter_dir", "TMP/a-file is a file; give a folder"),
    in_tmp("notes", "adapter_dir", "TMP/notes holds ['notes.txt'], which a new adapter would replace; give a folder of its own"),
    in_tmp("none", "init", "TMP/none' does not exist; give an adapter folder, a checkpoint or a .pt file"),
    option("init='' is empty; give the path of an adapter folder, a checkpoint or a .pt file", init=""),
    option("init={'latents': 5} is a dict, which is no path; give the path of an adapter folder", init={"latents": 5}),
    in_tmp("evil.pt", "init", "TMP/evil.pt is refused: not a file of plain tensors (it asks for "),
    in_tmp("list.pt", "init", "TMP/list.pt is refused: it holds a list, not a mapping name -> tensor"),
    in_tmp("notes", "init", "TMP/notes holds neither adapter_model.safetensors nor trainable.safetensors"),
    in_tmp("rank-4", "init", "TMP/rank-4: its LoRA is of rank 4, but lora_r=2; give lora_r=4"),
    in_tmp("rank-4", "init", "TMP/rank-4: lora_alpha=32, but here it is 8; give lora_alpha=32", lora_r=4, lora_alpha=8.0),
    in_tmp(
        "rank-4",
        "init",
        "its heads are for exits after layers ['3', '6'], the sub-networks exit after [6]",
        lora_r=4,
        subnets={"full": {"exit_layer": 6}},
    ),
]

OPTIONS = [
    option("exclude=('chess',) is unknown; it must be one of snake_game", exclude=("chess",)),
    option("exclude='snake_game' is of type str; it must be tuple[str, ...], such as ('snake_game',)", exclude="snake_game"),
    option(
        "record 'help_desk-0' of task 'help_desk': the predicate raises raised KeyError: 'label'; it must say of any record", exclude=raises
    ),
    option("on_checkpoint='print' is of type str; give a function that takes (path, step)", on_checkpoint="print"),
    option("does not take (path, step); give a function that does", on_checkpoint=lambda path: None),
    option("config={'seed': 1} is a dict; give a TrainConfig, a RunConfig or both in a tuple", config={"seed": 1}),
    option("is the class TrainConfig; give a TrainConfig, a RunConfig or both in a tuple", config=TrainConfig),
    option("config has two of type RunConfig; give one TrainConfig, one RunConfig or one of each", config=(RunConfig(), RunConfig())),
    option("steps=1 and epochs=2 contradict each other; give one of them", epochs=2),
    option("steps=0 is too small; it must be at least 1", steps=0),
    option("steps=-3 is too small; it must be at least 1", steps=-3),
    option("steps=10.0 is of type float; it must be int | None (the default)", steps=10.0),
    option("steps='10' is of type str; it must be int", steps="10"),
    option("steps=True is of type bool; it must be int", steps=True),
    option("lr_lora=nan is not a number; it must be float", lr_lora=math.nan),
    option("lr_heads=inf is too large; it must be at most 1", lr_heads=math.inf),
    option("lr_heads=tensor(0.1000) is of type Tensor; it must be float", lr_heads=torch.tensor(0.1)),
    option("kl_weight=inf is too large; it must be at most 1000", kl_weight=math.inf),
    option("lora_r=1000000 is too large; it must be at most 4096", lora_r=10**6),
    option("teacher='full' is unknown; it must be one of train, eval, none", teacher="full"),
    option("clip='global' is unknown; it must be one of group, joint", clip="global"),
    option("kl_temperature=0 is too small; it must be at least 0.01", kl_temperature=0),
    option("unknown option batchsize=8; did you mean batch_size?", batchsize=8),
    option("unknown option rundir='x'; did you mean run_dir?", rundir="x"),
    option("unknown option lr=0.1; did you mean lr_heads or lr_lora?", lr=0.1),
    option("unknown option device='cuda'; known options: adapter_dir, allow_mismatch, batch_size", device="cuda"),
    option("replace='no' is of type str; it must be True or False", replace="no"),
    option("resume=None is of type NoneType; it must be True or False", resume=None),
    option("bs=2 and batch_size=3 are the same option; give batch_size alone", bs=2, batch_size=3),
    option("lora_r='yes' is of type str; it must be int", lora_r=None, lora="yes"),
    option("adapter_dir=5 is of type int; it must be str", save_path=5),
    option("recs=5 is a int; it must be two lists: (train, calibration)", recs=5),
    option("recs: the train records are 5; they must be a list of records", recs=(5, [])),
    option("recs: the calibration records hold 5; a record is a mapping or a Record", recs=(RECORDS, [5])),
    environment("many", "the environment variable MMJEV_TOKEN_BUDGET='many' is no number of tokens; give one, or unset it"),
    environment("0", "token_budget=0 is too small; it must be at least 1"),
]

SUBNETS = [
    option("subnets is empty; name at least one SubnetConfig, or leave it out for full and fast", subnets={}),
    option("subnets=[] is of type list; it must be Mapping[str, SubnetConfig]", subnets=[]),
    option("has the name 1; a name must be a string that is not empty", subnets={1: SubnetConfig()}),
    subnets("sub-network 'full': exit_layer=35, but the model has 6; give at most that", full=SubnetConfig()),
    subnets("sub-network 'full': ffn_width=999, but the model has 256; give at most that", full={"exit_layer": 6, "ffn_width": 999}),
    subnets("sub-network 'full': n_latents=9, but the model has 8; give at most that", full=(9, 6)),
    subnets("subnets['fast']: media_exit=5 is beyond exit_layer=3; media must leave by the last layer that is run", fast=(8, 3, 5)),
    subnets("subnets['fast']: exit_layer='6' is of type str; it must be int", fast={"exit_layer": "6"}),
    subnets("has an unknown field 'exit'; a sub-network has n_latents, exit_layer, media_exit, sibling_from, ffn_width", fast={"exit": 3}),
    subnets("subnets['fast']=b'fast' is of type bytes; it must be a SubnetConfig", fast=b"fast"),
    subnets("is of type type; it must be a SubnetConfig, a mapping of its fields", fast=SubnetConfig),
]

RUNS = [
    Case("run.wait('x')", lambda place: place.live.wait("x"), "wait(timeout='x') is no time; give seconds of at least 0, or None"),  # type: ignore[arg-type]
    Case("run.wait(-1)", lambda place: place.live.wait(-1), "wait(timeout=-1) is no time; give seconds of at least 0"),
    Case(
        "run.stop(30)", lambda place: place.live.stop(30), "stop(wait=30) is of type int; it must be True or False (seconds go by timeout=)"
    ),  # type: ignore[arg-type]
    Case("run.stop(timeout=nan)", lambda place: place.live.stop(timeout=math.nan), "stop(timeout=nan) is no time; give seconds"),
    Case("run.checkpoint(wait=5)", lambda place: place.live.checkpoint(5), "checkpoint(wait=5) is of type int; it must be True or False"),  # type: ignore[arg-type]
    Case(
        "run.free() while it is live",
        lambda place: place.live.free(),
        "the run is running at step 1; stop it first: run.stop()",
        RuntimeError,
    ),
    Case(
        "run.borrow() in the worker",
        borrow_in_the_worker,
        "borrow() is for other threads; a step already has the model to itself",
        RunFailed,
    ),
]

add_lora, fit, save = colabtrain.add_lora, colabtrain.fit_temperatures, colabtrain.save_adapter
load, load_trainable = colabtrain.load_adapter, colabtrain.load_trainable
HELPERS = [
    helper("jev is None; give an MMJev, such as MMJev.tiny()", "add_lora(None)", lambda _: add_lora(None)),
    helper("lora_r='0' is of type str; it must be int", "add_lora(jev, '0')", lambda jev: add_lora(jev, AS_TEXT)),
    helper("seed='0' is of type str; it must be int", "reset_trainable(jev, '0')", lambda jev: colabtrain.reset_trainable(jev, AS_TEXT)),
    helper("give an MMJev, such as MMJev.tiny()", "trainable_state(MMJev)", lambda _: colabtrain.trainable_state(MMJev)),
    helper("no plain numbers 1: latents", "load_trainable(jev, {'latents': 5})", lambda jev: load_trainable(jev, {"latents": 5})),
    helper("path=5 is a int, which is no path; give the folder of an adapter", "load_adapter(jev, 5)", lambda jev: load(jev, WRONG)),
    helper("adapter 'none' does not exist; give", "load_adapter(jev, 'none')", lambda jev: load(jev, "none"), FileNotFoundError),
    helper("the model is 5; give an MMJev, such as MMJev.tiny()", "load_adapter(5, 'rank-4')", lambda _: load(WRONG, "rank-4")),
    helper("folder='' is empty; name the folder of the adapter", "save_adapter(jev, '')", lambda jev: save(jev, "")),
    helper("TMP/a-file is a file; give a folder", "save_adapter(jev, 'a-file')", lambda jev: save(jev, "a-file")),
    helper("item 0 is 1; it must be (type, number of options, logits, target)", "fit_temperatures([1])", lambda _: fit([1])),
    helper("items is 5; give a list of (type, number of options, logits, target)", "fit_temperatures(5)", lambda _: fit(WRONG)),
    helper(
        "has target [5, 5]; it must be probabilities that sum to 1",
        "fit_temperatures of votes",
        lambda _: fit([("noul", 2, [1, 2], [5, 5])]),
    ),
    helper("by='kind' is unknown; it must be one of type, bucket", "fit_temperatures(by='kind')", lambda _: fit([], by="kind")),
]

COMMANDS = [
    lines(words="data file 'none.jsonl' does not exist"),
    lines("--model", "large", "--data", "x", "--run", "new", words="--model 'large' is unknown; give `tiny`, owner/name of a Gemma 3n"),
    lines(
        "--model",
        "wrong_maker:fails",
        "--data",
        "x",
        "--run",
        "new",
        words="fails() raised ZeroDivisionError: division by zero (wrong_maker.py line 2)",
    ),
    lines("--model", "wrong_maker:nothing", "--data", "x", "--run", "new", words="nothing() returned None; it must return a model"),
    lines(
        "--model", ":fails", "--data", "x", "--run", "new", words="--model ':fails' lacks the module or the function; write module:function"
    ),
    lines("--model", "tiny", "--data", "x", "--run", "", words="argument --run: the folder's name is empty"),
    lines("--steps", "many", words="argument --steps: invalid int value: 'many'"),
    lines("--config", "broken.toml", words="--config 'broken.toml' cannot be read: "),
    lines("--set", "=5", words="--set '=5' has no name or no value; write --set name=value"),
    lines("--set", "batchsize=3", words="unknown option batchsize=3; did you mean batch_size?"),
]

CASES = [*MODELS, *DATA, *TASKS, *FOLDERS, *OPTIONS, *SUBNETS, *RUNS, *HELPERS, *COMMANDS]


def said(case: Case, place: Place) -> str:
    """What giving it raises; of a failed run the last line. Anything else is no answer."""
    with pytest.raises(case.error) as caught:
        case.give(place)
    assert type(caught.value) is case.error, repr(caught.value)
    return str(caught.value).strip().splitlines()[-1].replace(str(place.tmp), "TMP")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("wrong"))
    yield place
    place.end()


@pytest.mark.colab
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.given[:40]}" for i, case in enumerate(CASES)])
def test_wrong_input_is_named_and_costs_nothing(case: Case, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.tmp)
    before, threads = place.files(case.error is RunFailed), set(threading.enumerate())
    message = said(case, place)
    assert case.words in message
    assert place.files(case.error is RunFailed) == before
    started = [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("colabtrain")]
    for thread in started:
        thread.join(SECONDS)
    assert not [thread for thread in started if thread.is_alive()]
    assert place.live.state == "running", "the run beside it goes on"


def test_numbers_and_arrays_of_numpy_are_taken() -> None:
    arrays = {"targets": [numpy.array(target, numpy.float32) for target in RECORDS[0].targets], "ys": numpy.array(RECORDS[0].ys)}
    assert colabtrain.load_records([record(**arrays)]) == colabtrain.load_records([record()])
    config = TrainConfig(lr_lora=numpy.float32(0.5), seed=numpy.int8(3))  # type: ignore[arg-type]
    assert (config, type(config.lr_lora), type(config.seed)) == (TrainConfig(lr_lora=0.5, seed=3), float, int)


def test_what_may_be_meant_but_is_seldom_right_is_said(place: Place) -> None:
    """A record that is trained on and held out, a task to leave out and a modality that nothing has."""
    data = [*RECORDS, record(split="test")]
    run = place.start(data=data, run_dir=place.tmp / "failed" / "said", exclude_tasks=("help_dsk",), modalities=("text", "vidio"))
    assert run.wait(SECONDS) == "finished"
    log = (run.folder / "train.log").read_text()
    assert "take care: exclude_tasks names 'help_dsk', which no record has" in log
    assert "take care: modalities names 'vidio', which no record has" in log
    assert "have the id of a record" not in log, "of the held-out records only the first is asked"
    again = place.start(data=data, run_dir=place.tmp / "failed" / "shared", max_eval_records=3)
    assert again.wait(SECONDS) == "finished"
    assert "take care: 1 records held out have the id of a record that is trained on" in (again.folder / "train.log").read_text()


def show() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder).resolve())
        try:
            with contextlib.chdir(folder):
                for case in CASES:
                    print(f"{case.given}\n    -> {case.error.__name__}: {said(case, place)}")
        finally:
            place.end()


if __name__ == "__main__":
    show()
