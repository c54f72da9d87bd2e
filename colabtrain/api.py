"""start(): the only place that knows every room. Wiring only."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from colabtrain.compat import translate
from colabtrain.config import RunConfig, TrainConfig, as_path, split_options
from colabtrain.elastic.own_model import OwnModel
from colabtrain.elastic.task import ElasticTask
from colabtrain.hub_token import HubError, find_token
from colabtrain.mmjev import adapter_files
from colabtrain.mmjev.adapter import check_replaceable, load_adapter
from colabtrain.mmjev.model import MMJev
from colabtrain.mmjev.pretrained import Pretrained
from colabtrain.records import load_records, select
from colabtrain.records.selection import Predicate
from colabtrain.runtime.hub_access import HubAccess, check_pace, check_repo
from colabtrain.runtime.keeper import Hook
from colabtrain.runtime.registry import launch
from colabtrain.runtime.remote import Remote
from colabtrain.runtime.run import Run
from colabtrain.task import Task

OPTIONS = ("jev", "data", "task", "run_dir", "config", "replace", "resume", "display", "init", "exclude", "on_checkpoint")  # of start()
CARD = "colabtrain.dashboard.card:files"  # made in the Hub's process
TASK_MEMBERS = ("prepare", "num_steps", "step", "state", "load", "fingerprint")
NOT_OF_A_TASK = {"steps", "epochs", "max_eval_records", "checkpoint_layers", "adapter_dir", "init", "exclude"}
TRAINER_MEMBERS = ("scores", "trainable", "configure", "validate", "reset_trainable", "fingerprint", "lent", "width")


def start(
    jev: Any = None,
    data: Any = None,
    *,
    task: Task | None = None,
    run_dir: str | Path | None = None,
    hub: str | None = None,
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
    checkpoint in it is resumed from (resume=False wants none). hub: "owner/name" of the Hub repo where every checkpoint is
    published, and from where another machine goes on; made, private, if there is none. display: show the live view in a notebook.
    init: an adapter to start from; a checkpoint overrides it. exclude(record): records to leave out.
    on_checkpoint(path, step) is called when a checkpoint is on the disk, on a thread beside the training: it may read the
    files, not the model. options: any field of TrainConfig or RunConfig.

    A second start() of the same thing while it runs returns the live run, as it is. Raises AlreadyRunning if a live run
    has the folder or the model with other settings (replace=True stops that one first); HubError if the Hub cannot be used;
    ValueError, before anything is trained, for a wrong option, record, model or repo.
    """
    _check_switches(replace=replace, resume=resume, display=display)
    named = {"data": data, "run_dir": run_dir, "on_checkpoint": on_checkpoint, **({} if hub is None else {"hub": hub}), **options}
    decided = task is not None or _has_train_config(config)
    options, translated = translate(named, {} if decided else os.environ)  # the environment overrules nobody
    data, run_dir, on_checkpoint = (options.pop(name) for name in ("data", "run_dir", "on_checkpoint"))
    predicate = exclude if callable(exclude) else None
    options |= {} if exclude is None or callable(exclude) else {"exclude": exclude}
    train_config, run_config = split_options(options, config, also=OPTIONS)
    folder = _folder(run_dir, jev, data)
    _check_takes(on_checkpoint, "on_checkpoint", "(path, step)")
    _check_adapter_dir(run_config.adapter_dir, folder)
    identity = None
    if task is None:
        task = elastic = _elastic_task(jev, data, train_config, run_config, init, predicate)
        identity = elastic.identity
    else:
        _check_own_task(task, jev, data, {**options, "init": init, "exclude": exclude}, config)
    owned = None if isinstance(jev, (str, Path)) else jev
    made = Run(task, folder, run_config, resume, owned, identity, on_checkpoint, _remote(run_config, folder, jev, task))
    run = launch(made, replace)
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


def _has_train_config(config: Any) -> bool:
    return any(isinstance(given, TrainConfig) for given in (config if isinstance(config, (tuple, list)) else (config,)))


def _check_switches(**switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is of type {type(value).__name__}; it must be True or False")


def _check_takes(function: Any, name: str, arguments: str) -> None:
    """`arguments`: two names in parentheses."""
    if function is None:
        return
    if not callable(function):
        raise ValueError(f"{name}={function!r} is of type {type(function).__name__}; give a function that takes {arguments}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise ValueError(f"{name}={function!r} does not take {arguments}; give a function that does") from None
    except ValueError:
        return  # some built-in functions do not say what they take


def _check_adapter_dir(given: str | None, folder: Path) -> None:
    if given is None:
        return
    adapter = Path(given)
    if adapter.absolute() in (folder.absolute(), folder.absolute() / "checkpoints"):
        raise ValueError(f"adapter_dir={str(adapter)!r} is the run's own folder; give another one, or leave it out for <run>/adapter")
    check_replaceable(adapter)


def _check_own_task(task: Any, jev: Any, data: Any, options: Mapping[str, Any], config: Any) -> None:
    if isinstance(task, type):
        raise ValueError(f"task is the class {task.__name__}; give an object made from it, such as task={task.__name__}()")
    if jev is not None or data is not None:
        raise ValueError("task= is given together with jev or data; a Task brings its own model and data")
    # not hasattr: a property may need what prepare() makes
    absent = [name for name in TASK_MEMBERS if name not in getattr(task, "__dict__", ()) and not hasattr(type(task), name)]
    if absent:
        raise ValueError(f"task is a {type(task).__name__} without {', '.join(absent)}; colabtrain.Task says what each is for")
    try:
        inspect.signature(task.step).bind(0, 2)
    except TypeError:
        raise ValueError(f"{type(task).__name__}.step does not take (i, splits); define it as step(self, i, splits=1)") from None
    if _has_train_config(config):
        raise ValueError("config= has a TrainConfig and is given together with task=; a Task decides that itself, give a RunConfig")
    not_ours = {item.name for item in dataclasses.fields(TrainConfig)} | NOT_OF_A_TASK
    if ignored := sorted(name for name in not_ours & set(options) if options[name] is not None):
        raise ValueError(f"{ignored[0]}={options[ignored[0]]!r} is given together with task=; a Task decides that itself")


def _elastic_task(
    jev: Any, data: Any, train: TrainConfig, run: RunConfig, init: str | Path | None, exclude: Predicate | None
) -> ElasticTask:
    if jev is None or data is None:
        missing = "jev (a model; MMJev.tiny() to try)" if jev is None else "data (records, or the path of a JSONL file)"
        raise ValueError(f"start() needs {missing}")
    model = _model(jev)
    start_from = None if init is None else _init(init, model, train)
    task = ElasticTask(model, select(load_records(data), train, exclude), train, run, start_from)
    task.check()
    return task


def _remote(config: RunConfig, folder: Path, jev: Any, task: Any) -> Remote | None:
    """The repo of config.hub, with the person's token; the run looks at it when it is launched."""
    if config.hub is None:
        return None
    check_repo(config.hub)
    check_pace(config.publish_every, constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"hub={config.hub!r}: HF_HUB_OFFLINE is set, which keeps the Hub out of reach; unset it and restart")
    model, named = getattr(task, "model", None), isinstance(jev, (str, Path))
    what = f"{str(jev)!r}, data" if named else "model, data" if isinstance(task, ElasticTask) else "task=task"
    on_hub = isinstance(jev, str) and "/" in jev and not Path(jev).expanduser().is_dir()
    facts = {
        "name": getattr(model, "name", type(task).__name__),
        "base_model": jev if on_hub else None,
        "start": f"run = colabtrain.start({what}, hub={config.hub!r})",
    }
    return Remote(HubAccess(config.hub, find_token(), constants.ENDPOINT), folder.absolute(), config, CARD, facts)


def _init(init: Any, model: Any, train: TrainConfig) -> Callable[[Any], object]:
    """What sets a model to the adapter `init`, which is read here once to see whether it will fit."""
    path = as_path(init, "init", "give the path of an adapter folder, a checkpoint or a .pt file")
    if isinstance(model, OwnModel):
        raise ValueError(f"init={str(init)!r} is for an MMJev; set the trained parts of a {model.name} yourself, before start()")
    if not path.exists():
        raise ValueError(f"init={str(init)!r} does not exist; give an adapter folder, a checkpoint or a .pt file")
    subnets = train.subnets or model.default_subnets()
    adapter_files.read(path).check_shape(train.lora_r, train.lora_alpha, {fc.exit_layer for fc in subnets.values()})
    return functools.partial(load_adapter, path=path.absolute())  # a cell may change the working directory


def _model(jev: Any) -> Any:
    if isinstance(jev, (str, Path)):
        return MMJev.tiny(0) if str(jev) == "tiny" else _named(str(jev))
    if isinstance(jev, type):
        raise ValueError(f"jev is the class {jev.__name__}; give a model made from it, such as MMJev.tiny()")
    return jev if isinstance(jev, Pretrained) or all(hasattr(jev, name) for name in TRAINER_MEMBERS) else OwnModel(jev)


def _named(name: str) -> Pretrained:
    if (not Path(name).expanduser().is_dir() and "/" not in name) or not name.strip():
        raise ValueError(f"jev={name!r} is no folder here and no name on the Hub; give 'tiny', a folder, or owner/name of a Gemma 3n")
    return Pretrained.open(name)


def _folder(run_dir: Any, jev: Any, data: Any) -> Path:
    if run_dir is None:
        return default_folder(jev, data)
    return as_path(run_dir, "run_dir", f"name a folder, or leave it out for {str(default_folder(jev, data))!r}")


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
