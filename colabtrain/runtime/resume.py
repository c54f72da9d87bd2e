"""Where a run goes on from. It never starts from scratch in silence while there is a checkpoint: one that cannot be used is
named with the reason, and one of another experiment is refused with the differences.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from colabtrain.config import RunConfig
from colabtrain.device import is_dead, is_out_of_memory, machine
from colabtrain.runtime import checkpoint, disk, manifest
from colabtrain.runtime.checkpoint import Checkpoint
from colabtrain.runtime.diary import DIARY_FILE, Diary
from colabtrain.runtime.manifest import CheckpointError, listed
from colabtrain.runtime.recorder import Recorder
from colabtrain.runtime.rng import set_rng_state
from colabtrain.task import Grows, Task

SHOWN = 6  # differences in an error
PARTS = {"fingerprint": dict, "totals": dict, "rng": dict, "machine": dict, "num_steps": int}  # of state.json, besides the task's


def refuse(folder: Path, resume: bool, identity: Callable[[], Mapping[str, Any]] | None = None, allowed: Collection[str] = ()) -> None:
    """Raise ValueError where a resume from the checkpoints in `folder` will be refused, as far as that is known before the
    task is prepared: with resume=False where there is any, else where identity() differs from what the newest says of it,
    but for what is `allowed`."""
    run = folder.parent
    try:
        paths, in_run = listed(folder), listed(run)
    except OSError as error:
        raise ValueError(f"run_dir: whether there are checkpoints cannot be seen: {disk.explain(error, folder)}") from None
    is_one, has_some = ((path / manifest.MANIFEST).exists() for path in (run, next(iter(in_run), run)))
    if is_one or has_some:  # the diary of a new run would spoil the checkpoint
        owner = run.parent.parent if is_one else run.parent
        raise ValueError(f"run_dir: {run} is part of the run in {owner}; give that folder to go on, or another one")
    if not resume and paths:
        raise ValueError(f"resume=False, but {folder} has checkpoints; give an empty run folder, or leave resume out")
    for path in paths:
        try:
            state = manifest.check(path, [manifest.STATE])
        except CheckpointError:
            continue  # find() says what is wrong with it, and takes an older one
        if refuse_state(state, str(path), identity, allowed):
            return


def refuse_state(
    state: Mapping[str, Any], where: str, identity: Callable[[], Mapping[str, Any]] | None = None, allowed: Collection[str] = ()
) -> bool:
    """As refuse(), of one checkpoint, by its state.json; False where that does not say what was learned."""
    saved: Any = state.get("fingerprint")
    if not isinstance(saved, dict):
        return False
    mine = _through_json(identity()) if identity else {}
    known = saved.keys() & mine.keys()
    if different := [name for name in _differing(saved, mine, allowed) if name in known]:
        raise _another_experiment(where, saved, mine, different)
    return True


def find(folder: Path, diary: Diary) -> list[Path]:
    """The checkpoints to try, newest first, the first one whole; says what is found, and what is not whole and why.

    Before anything is loaded, so that a person need not wait to hear it. Raises ValueError when none is whole.
    """
    paths = listed(folder)
    if not paths:
        # The event has the name of a resume so that readers drop what an earlier, never saved attempt left in the diary.
        diary.write("resumed", f"fresh start: no checkpoint in {folder}", step=0)
    for number, path in enumerate(paths):
        try:
            step = int(manifest.check(path)["step"])
        except CheckpointError as error:
            _reject(diary, path, error)
        else:
            diary.log(f"going on from step {step:,} of checkpoint {path}, once all is loaded")
            return paths[number:]
    if paths:
        raise _none_can_be_used(folder)
    return []


class Found(NamedTuple):
    path: Path
    step: int


def restore(task: Task, paths: Sequence[Path], diary: Diary, recorder: Recorder, config: RunConfig) -> Found | None:
    """Put the prepared `task` where the first of `paths` that can be used left it; None if there are none.

    Raises ValueError when that one is of another experiment, or when none can be used.
    """
    for path in paths:
        try:
            found = checkpoint.read(path)
            _check_parts(found)
            _check(task, found, diary, config.allow_mismatch)
            _take(task, found, diary, recorder)
            return Found(path, found.step)
        except (CheckpointError, LookupError) as error:
            _reject(diary, path, error)
    if paths:
        raise _none_can_be_used(paths[0].parent)
    _check_known(config.allow_mismatch, _through_json(task.fingerprint()))
    return None


def _reject(diary: Diary, path: Path, error: Exception) -> None:
    text = f"checkpoint {path.name} cannot be used: {error}"
    diary.write("checkpoint_rejected", text, name=path.name, reason=str(error))


def _none_can_be_used(folder: Path) -> ValueError:
    return ValueError(f"no checkpoint in {folder} can be used (see the log); move the folder away to start anew")


def _check_parts(found: Checkpoint) -> None:
    for name, kind in PARTS.items():
        if not isinstance(part := found.state.get(name), kind):
            raise CheckpointError(f"{manifest.STATE}: {name} is a {type(part).__name__}, not a {kind.__name__}")
    if found.step != manifest.number(found.path):
        raise CheckpointError(f"{manifest.STATE}: step is {found.step:,}, which is not what the folder is named after")


def _check(task: Task, found: Checkpoint, diary: Diary, allowed: Collection[str]) -> None:
    mine, saved = _through_json(task.fingerprint()), found.state["fingerprint"]
    if isinstance(task, Grows):
        saved = {**_through_json(task.before_it_was_recorded()), **saved}
    _check_known(allowed, {**saved, **mine})
    if different := _differing(saved, mine, allowed):
        raise _another_experiment(str(found.path), saved, mine, different)
    if accepted := differences(saved, mine):
        diary.log(f"going on although the checkpoint differs, as allow_mismatch says: {accepted}")


def _check_known(allowed: Collection[str], fingerprint: Mapping[str, Any]) -> None:
    for name in allowed:
        if not any(_names(name, key) for key in fingerprint):
            near = difflib.get_close_matches(name, fingerprint, n=1)
            known = f"did you mean {near[0]}?" if near else "known: " + ", ".join(fingerprint)
            raise ValueError(f"allow_mismatch={name!r} names nothing that could differ; {known}")


def _names(name: str, key: str) -> bool:
    """`batch_size` names config.batch_size, too."""
    return key == name or key.endswith(f".{name}")


def _take(task: Task, found: Checkpoint, diary: Diary, recorder: Recorder) -> None:
    totals, rng = dict(found.state["totals"]), found.state["rng"]
    try:
        task.load(found.tensors, found.state["task"])
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:  # torch's load_state_dict() raises a RuntimeError
        if is_out_of_memory(error) or is_dead(error):
            raise
        raise CheckpointError(f"{type(task).__name__}.load(): {type(error).__name__}: {error}") from None
    try:
        set_rng_state(rng)
    except (*manifest.BROKEN, RuntimeError) as error:
        raise CheckpointError(f"{manifest.STATE}: rng: {type(error).__name__}: {error}") from None
    recorder.totals |= totals
    diary.write("resumed", f"resumed from step {found.step:,} of checkpoint {found.path}", step=found.step)
    if (before := found.state["num_steps"]) != recorder.num_steps:
        diary.log(f"the run has {recorder.num_steps:,} steps now, {before:,} before: learning rates follow the new number")
    if changes := differences(found.state["machine"], machine()):
        diary.log(f"another machine than the checkpoint's ({changes}): numbers may differ in their last bits from here on")


def _through_json(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """What it is when it is read again: tuples are lists there."""
    return json.loads(json.dumps(fingerprint))


def _another_experiment(where: str, saved: Mapping[str, Any], mine: Mapping[str, Any], different: Sequence[str]) -> ValueError:
    shown = differences({name: saved.get(name) for name in different}, {name: mine.get(name) for name in different})
    return ValueError(
        f"checkpoint {where} belongs to another experiment ({shown}); use the same data and settings, give another run folder, or go on "
        f"all the same with allow_mismatch={list(different)}"
    )


def _differing(saved: Mapping[str, Any], mine: Mapping[str, Any], allowed: Collection[str] = ()) -> list[str]:
    names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
    return [name for name in names if not any(_names(other, name) for other in allowed)]


def differences(saved: Mapping[str, Any], mine: Mapping[str, Any], whose: str = "checkpoint", allowed: Collection[str] = ()) -> str:
    """Where two flat mappings differ, for people, but for what is `allowed`; empty if they are equal."""
    names = _differing(saved, mine, allowed)
    shown = [f"{name}: {whose} {saved.get(name)!r}, now {mine.get(name)!r}" for name in names[:SHOWN]]
    return "; ".join(shown + [f"and {len(names) - SHOWN} more"] * (len(names) > SHOWN))


def adopt_diary(folder: Path) -> None:
    """Where the run folder has checkpoints but no diary (it came from elsewhere), take that of the newest one that is whole."""
    if (folder / DIARY_FILE).exists():
        return
    for path in listed(folder / "checkpoints"):
        with contextlib.suppress(CheckpointError):
            manifest.check(path)
            shutil.copyfile(path / DIARY_FILE, folder / DIARY_FILE)
            return
