"""start(): the only place that knows every room. Wiring only."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colabtrain.config import RunConfig, TrainConfig, split_options
from colabtrain.elastic.own_model import OwnModel
from colabtrain.elastic.task import ElasticTask
from colabtrain.records import load_records, select
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
    on_checkpoint: Hook | None = None,
    **options: Any,
) -> Run:
    """Train in the background; returns at once.

    jev: the model, e.g. MMJev.tiny(). data: path(s) of JSONL records, a list of records, or a mapping name -> either.
    task: a Task of your own instead of jev and data. run_dir: folder of this run, default runs/<model>-<data>; a
    checkpoint in it is resumed from (resume=False wants none). display: show the live view in a notebook.
    on_checkpoint(path, step) is called after each save. options: any field of TrainConfig or RunConfig.

    A second start() of the same thing while it runs returns the live run. Raises AlreadyRunning if a live run has the
    folder or the model with other settings (replace=True stops that one first); ValueError, before anything is trained,
    for a wrong option, record or model.
    """
    train, run_config = split_options(options, config)
    identity = None
    if task is None:
        task = elastic = _elastic_task(jev, data, train, run_config)
        identity = elastic.identity
    else:
        _check_own_task(task, jev, data, options)
    folder = Path(run_dir or default_folder(jev, data))
    run = launch(Run(task, folder, run_config, resume, jev, identity, on_checkpoint), replace)
    if display and _in_notebook():
        from colabtrain.dashboard.widgets import show

        if live := show(run):
            run.when_ended.append(live.refresh)
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
    if ignored := sorted(not_ours & set(options)):
        raise ValueError(f"{ignored[0]}={options[ignored[0]]!r} is given together with task=; a Task decides that itself")


def _elastic_task(jev: Any, data: Any, train: TrainConfig, run: RunConfig) -> ElasticTask:
    if jev is None or data is None:
        missing = "jev (a model; MMJev.tiny() to try)" if jev is None else "data (records, or the path of a JSONL file)"
        raise ValueError(f"start() needs {missing}")
    model = jev if all(hasattr(jev, name) for name in TRAINER_MEMBERS) else OwnModel(jev)
    task = ElasticTask(model, select(load_records(data), train), train, run)
    task.check()
    return task


def default_folder(jev: Any, data: Any) -> Path:
    """runs/<model>-<data>: the same cell finds the same folder again."""
    first = data[0] if isinstance(data, (list, tuple)) and data else data
    name = Path(first).name.split(".")[0] if isinstance(first, (str, Path)) else "data"
    return Path("runs") / f"{getattr(jev, 'name', 'task')}-{name}".replace("/", "-")


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None
