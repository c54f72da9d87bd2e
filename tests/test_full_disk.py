"""A run whose disk fills up, turns read-only or drops out, and comes back: training goes on, nothing half-written stays.

First on real file systems, where the system lets a person mount some (Linux with user namespaces), then with each error
at each call. Saves may be done by another thread, so that a run tells of one some time after its step: nothing here
asks that it be told at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_disk import (
    BREAK,
    EVERY,
    EVERYTHING,
    NUM_STEPS,
    PLACES,
    REPAIR,
    SECONDS,
    HeavyTask,
    Outage,
    Story,
    check,
    disturbed,
    losses,
    start,
)
from helpers import events

import colabtrain
from colabtrain.dashboard.text import follow
from colabtrain.runtime.diary import Tail
from colabtrain.runtime.run import RunFailed

pytestmark = pytest.mark.colab


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    torch.manual_seed(5)
    assert start(HeavyTask(NUM_STEPS), folder).wait(SECONDS) == "finished"
    return losses(folder)


# Real file systems

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
DISK_BYTES, LEFT_BYTES = 3 * 2**20, 50_000  # left: room for lines of the diary, not for a checkpoint
KEEP_REAL = 4


def system(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def fill(folder: Path, left_bytes: int) -> None:
    """Leave no more than `left_bytes` on the disk of `folder`."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while (free := shutil.disk_usage(folder).free) > left_bytes or not left_bytes:
            file.write(bytes(min(4096, max(1, free - left_bytes))))


def cover(folder: Path) -> None:
    """Mount the folder over itself, read-only. (The disk itself cannot be made so: the run has its lock open for writing.)"""
    system("mount", "--bind", folder, folder)
    system("mount", "-o", "remount,bind,ro", folder)


REAL: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {  # break, repair, words
    "nearly full": (lambda run: fill(run, LEFT_BYTES), lambda run: (run / "filler").unlink(), "No space left|too full"),
    "full to the last byte": (lambda run: fill(run, 0), lambda run: (run / "filler").unlink(), "No space left|too full"),
    "read-only": (cover, lambda run: system("umount", "--lazy", run), "Read-only file system"),
}


def main(results: Path) -> None:
    """In a process with mounts of its own: run on each disk, and copy what is there at the end."""
    for name, (break_disk, repair, _) in REAL.items():
        run = results / "mounted"
        run.mkdir(exist_ok=True)
        system("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", run)
        with pytest.MonkeyPatch.context() as patch:
            disturbed(run, Story(patch, partial(break_disk, run), partial(repair, run)), keep_local=KEEP_REAL)
        shutil.copytree(run, results / name)
        system("umount", "--lazy", run)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each kind of disk, with what the run left on it."""
    folder = tmp_path_factory.mktemp("disks")
    try:
        probe = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no disks can be mounted here: {error}")
    if probe.returncode:
        pytest.skip(f"no disks can be mounted here: {probe.stderr.strip()}")
    environment = {**os.environ, "PYTHONPATH": str(Path(colabtrain.__file__).parents[1])}
    command = [*UNSHARE, sys.executable, __file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=4 * SECONDS)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("disk", REAL)
def test_a_real_disk_that_breaks_and_is_repaired(disk: str, results: Path, undisturbed: dict[int, float]) -> None:
    check(results / disk, undisturbed, REAL[disk][2], KEEP_REAL)


# Each error at each call

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what an open file is called is read from /proc")


@needs_proc
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ENOTCONN, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_an_error_at_one_call(
    number: int, place: str, tmp_path: Path, undisturbed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tmp_path / "checkpoints"
    outage = Outage(
        monkeypatch, PLACES[place], number, lambda path: path.is_relative_to(checkpoints) and not (place == "open" and path.is_dir())
    )
    disturbed(tmp_path, Story(monkeypatch, outage.begin, outage.end), keep_local=NUM_STEPS)
    assert outage.num_failed
    check(tmp_path, undisturbed, os.strerror(number), NUM_STEPS)


@needs_proc
@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EIO], ids=errno.errorcode.get)
def test_a_run_folder_that_drops_out_altogether(
    number: int, tmp_path: Path, undisturbed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch, EVERYTHING, number, lambda path: path.is_relative_to(tmp_path))
    disturbed(tmp_path, Story(monkeypatch, outage.begin, outage.end), keep_local=NUM_STEPS)
    assert outage.num_failed > REPAIR - BREAK, "the diary was tried at each step"
    check(tmp_path, undisturbed, os.strerror(number), NUM_STEPS)
    assert all(line.endswith(b"}") for line in (tmp_path / "diary.jsonl").read_bytes().splitlines()), "a line is torn"


@needs_proc
@pytest.mark.parametrize("first", [("fsync",), ("replace", "rename")], ids=str)
def test_a_run_folder_that_drops_out_in_the_middle_of_a_save(
    first: tuple[str, ...], tmp_path: Path, undisturbed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is half-written cannot be removed then, but when the folder is back."""
    outage = Outage(monkeypatch, EVERYTHING, errno.ENOTCONN, lambda path: path.is_relative_to(tmp_path), first)
    disturbed(tmp_path, Story(monkeypatch, outage.begin, outage.end), keep_local=NUM_STEPS)
    check(tmp_path, undisturbed, os.strerror(errno.ENOTCONN), NUM_STEPS)


@needs_proc
def test_a_disk_on_which_nothing_can_be_opened_nor_removed(
    tmp_path: Path, undisturbed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch, PLACES["open"], errno.EIO, lambda path: path.is_relative_to(tmp_path / "checkpoints"))
    disturbed(tmp_path, Story(monkeypatch, outage.begin, outage.end), keep_local=NUM_STEPS)
    check(tmp_path, undisturbed, os.strerror(errno.EIO), NUM_STEPS)


@needs_proc
def test_what_is_told_of_a_checkpoint_is_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sync, of the folder into which a checkpoint was renamed, may fail when the checkpoint is in place."""
    outage = Outage(monkeypatch, PLACES["fsync"], errno.EIO, lambda path: path == tmp_path / "checkpoints")
    run = start(HeavyTask(NUM_STEPS, lambda i: outage.begin() if i == BREAK else None), tmp_path, keep_local=NUM_STEPS)
    with contextlib.suppress(RunFailed):
        run.wait(SECONDS)
    assert outage.num_failed
    saved = [f"step-{event['step']:08d}" for event in events(tmp_path, "checkpoint_saved")]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == saved


@needs_proc
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_file_system_that_cannot_sync_folders_is_saved_on(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some mounted ones cannot; fsync(2) says EINVAL then. There is nothing to be done about it, and nothing wrong."""
    outage = Outage(monkeypatch, PLACES["fsync"], number, lambda path: path.is_dir())
    outage.begin()
    run = start(HeavyTask(2 * EVERY), tmp_path)
    assert run.wait(SECONDS) == "finished" and run.saved_step == 2 * EVERY and outage.num_failed


# The diary on a broken disk


def test_a_full_disk_leaves_no_torn_line(results: Path) -> None:
    """It takes a part of a line. That part is to go when there is room again: no reader of ours minds, others do."""
    for line in (results / "full to the last byte" / "diary.jsonl").read_bytes().splitlines():
        json.loads(line)


def test_a_line_that_was_taken_and_called_refused_is_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounted folders may say only when a file is closed that something went wrong, after all of it was written."""
    real, failing = io.open, [False]

    class Grudging(io.BufferedWriter):
        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open and failing[0]:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def grudging_open(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = real(path, mode, *args, **options)
        return Grudging(file.detach()) if mode == "ab" and Path(path).name == "diary.jsonl" else file

    def fail_at_some_steps(i: int) -> None:
        failing[0] = 3 <= i < 6

    monkeypatch.setattr(io, "open", grudging_open)
    assert start(HeavyTask(9, fail_at_some_steps), tmp_path).wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path, "step")] == list(range(1, 10))


@needs_proc
def test_who_reads_along_outlives_an_outage(tmp_path: Path, undisturbed: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line the one who reads is the process that trains."""
    tail, said, looked = Tail(tmp_path / "diary.jsonl"), list[str](), threading.Event()
    outage = Outage(monkeypatch, EVERYTHING, errno.ENOTCONN, lambda path: path.is_relative_to(tmp_path))

    def break_disk() -> None:
        looked.clear()
        outage.begin()

    def look() -> list[dict[str, Any]]:
        try:
            return real_new()
        finally:
            looked.set()

    def repair() -> None:
        assert looked.wait(SECONDS), "nobody reads along"
        outage.end()

    real_new = tail.new
    tail.new = look
    story = Story(monkeypatch, break_disk, repair)
    torch.manual_seed(5)
    run = start(HeavyTask(NUM_STEPS, story), tmp_path)
    try:
        assert follow(run, tail, said.append) == "finished"
    finally:
        outage.end()
        run.stop()  # it must not draw from the next test's random numbers
    assert said == [event["text"] for event in events(tmp_path) if "text" in event]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
