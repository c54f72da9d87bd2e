"""A run whose disk breaks for a while: the task, the story, the faults, and what must be there in the end."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import events
from torch import Tensor
from toy_task import ToyTask

import colabtrain
from colabtrain.runtime.diary import Diary
from colabtrain.runtime.run import Run, RunFailed

SECONDS = 60.0  # far more than anything here takes; a wait that long is a failure
PATIENCE = 0.2  # seconds that one step waits for what the run is to tell; it goes on all the same, and the next one waits
NUM_STEPS, EVERY = 60, 5
BREAK, REPAIR, DONE = 12, 22, 32  # steps before which that happens, or later where the run has not yet told of a save


class HeavyTask(ToyTask):
    """One whose checkpoints have 100 kB, of which nothing is trained."""

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        tensors, meta = super().state()
        tensors["optimizer"]["ballast"] = torch.arange(25_000.0)
        return tensors, meta


class Story:
    """A before_step hook: one save is made, the disk breaks, a save fails, the disk is repaired, a save is made.

    It listens to what the run writes into its diary. Where that is not told yet, steps go on: the worker is not held up,
    which may be what the telling waits for.
    """

    def __init__(self, patch: pytest.MonkeyPatch, break_disk: Callable[[], object], repair: Callable[[], object]) -> None:
        self.chapters: list[tuple[int, str, Callable[[], object]]] = [
            (BREAK, "checkpoint_saved", break_disk),
            (REPAIR, "checkpoint_failed", repair),
            (DONE, "checkpoint_saved", lambda: None),
        ]
        self._told: set[str] = set()  # since the last chapter
        self._changed = threading.Condition()
        real = Diary.write

        def write(diary: Diary, event: str, text: str | None = None, **fields: Any) -> None:
            real(diary, event, text, **fields)
            with self._changed:
                self._told.add(event)
                self._changed.notify_all()

        patch.setattr(Diary, "write", write)

    def __call__(self, i: int) -> None:
        if not self.chapters or i < self.chapters[0][0]:
            return
        _, awaited, act = self.chapters[0]
        with self._changed:
            if not self._changed.wait_for(lambda: awaited in self._told, PATIENCE):
                return
            self._told.clear()
            del self.chapters[0]
            act()


def start(task: ToyTask, folder: Path, **options: Any) -> Run:
    return colabtrain.start(task=task, run_dir=folder, display=False, checkpoint_every=EVERY, **options)


def disturbed(folder: Path, story: Story, **options: Any) -> None:
    torch.manual_seed(5)
    run = start(HeavyTask(NUM_STEPS, story), folder, **options)
    with contextlib.suppress(RunFailed):  # the diary has it
        run.wait(SECONDS)
    assert not story.chapters, f"still to come: {story.chapters}; {run!r}"


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"]["toy"] for event in events(folder, "step")}


def is_whole(path: Path) -> bool:
    """Whether the files of a checkpoint are those that its manifest lists, by size and hash."""
    listed = {entry["name"]: (entry["size"], entry["sha256"]) for entry in json.loads((path / "manifest.json").read_text())["files"]}
    found = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}
    return listed == {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in found.items()}


def check(folder: Path, wanted: dict[int, float], words: str, keep: int) -> None:
    """What a run leaves whose disk was broken for a while, and said so by `words`."""
    told = events(folder)
    assert told[-1]["event"] == "finished"
    assert [event["step"] for event in told if event["event"] == "step"] == list(range(1, NUM_STEPS + 1)), "a line is lost"
    assert losses(folder) == wanted, "training did not go on unchanged"
    saves = [event for event in told if event["event"] in ("checkpoint_saved", "checkpoint_failed")]
    names = " ".join(event["event"].removeprefix("checkpoint_") for event in saves)
    assert re.fullmatch(r"(saved )+(failed )+(saved ?)+", names), names
    for event in saves:
        if event["event"] == "checkpoint_failed":
            assert re.search(words, event["text"]) and f"step {event['step']}" in event["text"], event
            assert event["text"] in (folder / "train.log").read_text()
    saved = [event["step"] for event in saves if event["event"] == "checkpoint_saved"]
    last_failed = max(event["step"] for event in saves if event["event"] == "checkpoint_failed")
    assert any(last_failed < step < NUM_STEPS for step in saved), "saved again in the middle, not only at the end"
    kept = [f"step-{step:08d}" for step in saved[-keep:]]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == kept and kept[-1] == f"step-{NUM_STEPS:08d}"
    assert [path.name for path in (folder / "checkpoints").iterdir() if not is_whole(path)] == []


Call = tuple[Any, str]  # module and name
OPENS: list[Call] = [(builtins, "open"), (io, "open"), (os, "open")]
PLACES: dict[str, list[Call]] = {
    "fsync": [(os, "fsync"), (os, "fdatasync")],
    "replace": [(os, "replace"), (os, "rename")],
    "mkdir": [(os, "mkdir")],
    "open": OPENS,
}
TWO_PATHS = ("replace", "rename", "link")
LOOKS = ("access", "listdir", "lstat", "readlink", "scandir", "stat", "statvfs")
CHANGES = ("chmod", "mkdir", "remove", "rmdir", "truncate", "unlink")
OF_OPEN_FILES = ("fsync", "fdatasync", "fstat", "ftruncate")
EVERYTHING: list[Call] = [*OPENS, *((os, name) for name in (*TWO_PATHS, *LOOKS, *CHANGES, *OF_OPEN_FILES))]


class Outage:
    """From begin() to end() the `calls` fail with the error `number` where they are to touch a path that `hits`.

    first: the names of calls at one of which it begins, once begin() was called: in the middle of something.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, calls: list[Call], number: int, hits: Callable[[Path], bool], first: tuple[str, ...] = ()
    ) -> None:
        self.number, self.hits, self.first, self.num_failed = number, hits, first, 0
        self._allowed = self.on = False
        self._readlink = os.readlink
        for module, name in calls:
            patch.setattr(module, name, self._failing(getattr(module, name), name))

    def begin(self) -> None:
        self._allowed, self.on = True, not self.first

    def end(self) -> None:
        self._allowed = self.on = False

    def _failing(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        num_paths = 2 if name in TWO_PATHS else 1

        def call(*args: Any, **options: Any) -> Any:
            self.on = self.on or (self._allowed and name in self.first)
            if self.on and any(self.hits(self._path(where, options.get("dir_fd"))) for where in args[:num_paths]):
                self.num_failed += 1
                raise OSError(self.number, os.strerror(self.number), str(args[0]))
            return real(*args, **options)

        return call

    def _path(self, where: Any, folder: int | None) -> Path:
        """A path, which may be relative to an open folder, or what an open file is called."""
        if isinstance(where, int):
            return Path(self._readlink(f"/proc/self/fd/{where}"))
        return Path(*(() if folder is None else (self._path(folder, None),)), os.fsdecode(where))
