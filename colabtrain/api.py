"""start(): the only place that knows every room. Wiring only."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colabtrain.compat import translate
from colabtrain.config import RunConfig, TrainConfig, split_options
from colabtrain.elastic.own_model import OwnModel
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev.adapter import load_adapter
from colabtrain.mmjev.model import MMJev
from colabtrain.mmjev.pretrained import Pretrained
from colabtrain.records import load_records, select
from colabtrain.records.selection import Predicate
from colabtrain.runtime.keeper import Hook
from colabtrain.runtime.registry import launch
from colabtrain.runtime.run import Run
from colabtrain.task import Task

TASK_MEMBERS = ("prepare", "num_steps", "step", "state", "load", "fingerprint")
TRAINER_MEMBERS = ("scores", "trainable", "configure", "validate", "reset_trainable", "fingerprint", "lent", "width")


def start(
    jev: Any = None,
    data: Any = None,
    *,
    task: Task | None = None,
    run_dir: str | Path | None = None,
    config: TrainConfig | RunConfig | tuple[TrainConfig | RunConfig, ...] | None = None,
    replace: bool = False,
    resume: bool = True,
    display: bool = True,
    init: str | Path | None = None,
    exclude: Predicate | tuple[str, ...] | None = None,
    on_checkpoint: Hook | None = None,
    **options: Any,
) -> Run:
    """Train in the background; returns at once.

    jev: the model: MMJev.tiny(), the name or folder of a Gemma 3n ("google/gemma-3n-E4B-it"; its weights are loaded in
    the background), or your own. data: path(s) of JSONL records, a list of records, or a mapping name -> either.
    task: a Task of your own instead of jev and data. run_dir: folder of this run, default runs/<model>-<data>; a
    checkpoint in it is resumed from (resume=False wants none). display: show the live view in a notebook.
    init: an adapter to start from; a checkpoint overrides it. exclude(record): records to leave out.
    on_checkpoint(path, step) is called after each save. options: any field of TrainConfig or RunConfig.

    A second start() of the same thing while it runs returns the live run. Raises AlreadyRunning if a live run has the
    folder or the model with other settings (replace=True stops that one first); ValueError, before anything is trained,
    for a wrong option, record or model.
    """
    named = {"data": data, "run_dir": run_dir, "on_checkpoint": on_checkpoint, **options}
    decided = task is not None or any(isinstance(each, TrainConfig) for each in (config if isinstance(config, tuple) else (config,)))
    options, translated = translate(named, {} if decided else os.environ)  # the environment overrules nobody
    data, run_dir, on_checkpoint = (options.pop(name) for name in ("data", "run_dir", "on_checkpoint"))
    if not (on_checkpoint is None or callable(on_checkpoint)):
        raise ValueError(f"on_checkpoint={on_checkpoint!r} is a {type(on_checkpoint).__name__}; give a function of (path, step)")
    predicate = exclude if callable(exclude) else None
    options |= {} if exclude is None or callable(exclude) else {"exclude": exclude}
    train_config, run_config = split_options(options, config)
    identity = None
    if task is None:
        task = elastic = _elastic_task(jev, data, train_config, run_config, init, predicate)
        identity = elastic.identity
    else:
        _check_own_task(task, jev, data, {**options, "init": init, "exclude": exclude})
    folder = Path(run_dir or default_folder(jev, data))
    owned = None if isinstance(jev, (str, Path)) else jev
    run = launch(made := Run(task, folder, run_config, resume, owned, identity, on_checkpoint), replace)
    for line in translated if run is made else ():
        run.diary.log(line)
    if display and _in_notebook():
        from colabtrain.dashboard.widgets import show

        if live := show(run):
            run.when_ended.append(live.refresh)
    return run


def train(jev: Any = None, data: Any = None, **options: Any) -> Run:
    """start() in the foreground: returns when the run has ended. An interrupt stops the run, which saves.

    Raises RunFailed as Run.wait() does, and what start() raises.
    """
    run = start(jev, data, **options)
    try:
        run.wait()
    except KeyboardInterrupt:
        run.stop()
        raise
    return run


def _check_own_task(task: Task, jev: Any, data: Any, options: Mapping[str, Any]) -> None:
    if jev is not None or data is not None:
        raise ValueError("task= is given together with jev or data; a Task brings its own model and data")
    # not hasattr: a property may need what prepare() makes
    absent = [name for name in TASK_MEMBERS if name not in vars(task) and not hasattr(type(task), name)]
    if absent:
        raise ValueError(f"task is a {type(task).__name__} without {', '.join(absent)}; colabtrain.Task says what each is for")
    try:
        inspect.signature(task.step).bind(0, 2)
    except TypeError:
        raise ValueError(f"{type(task).__name__}.step does not take (i, splits); define it as step(self, i, splits=1)") from None
    not_ours = {item.name for item in dataclasses.fields(TrainConfig)} | {"steps", "epochs", "max_eval_records"}
    not_ours |= {"init", "exclude"}
    if ignored := sorted(name for name in not_ours & set(options) if options[name] is not None):
        raise ValueError(f"{ignored[0]}={options[ignored[0]]!r} is given together with task=; a Task decides that itself")


def _elastic_task(
    jev: Any, data: Any, train: TrainConfig, run: RunConfig, init: str | Path | None, exclude: Predicate | None
) -> ElasticTask:
    if jev is None or data is None:
        missing = "jev (a model; MMJev.tiny() to try)" if jev is None else "data (records, or the path of a JSONL file)"
        raise ValueError(f"start() needs {missing}")
    model = _model(jev)
    if init is not None and (isinstance(model, OwnModel) or not Path(init).exists()):
        why = "is for an MMJev" if isinstance(model, OwnModel) else "does not exist; give an adapter folder, a checkpoint or a .pt file"
        raise ValueError(f"init={str(init)!r} {why}")
    start_from = None if init is None else functools.partial(load_adapter, path=Path(init).absolute())  # a cell may chdir
    task = ElasticTask(model, select(load_records(data), train, exclude), train, run, start_from)
    task.check()
    return task


def _model(jev: Any) -> Any:
    if jev == "tiny":
        return MMJev.tiny(0)
    if isinstance(jev, (str, Path)):
        return Pretrained.open(str(jev))
    return jev if isinstance(jev, Pretrained) or all(hasattr(jev, name) for name in TRAINER_MEMBERS) else OwnModel(jev)


def default_folder(jev: Any, data: Any) -> Path:
    """runs/<model>-<data>: the same cell finds the same folder again."""
    first = data[0] if isinstance(data, (list, tuple)) and data else data
    name = Path(first).name.split(".")[0] if isinstance(first, (str, Path)) else "data"
    model = Path(jev).name if isinstance(jev, (str, Path)) else getattr(jev, "name", "task")
    return Path("runs") / f"{model}-{name}".replace("/", "-")


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None
