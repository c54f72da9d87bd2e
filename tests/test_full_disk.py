"""A run whose disk fills up, turns read-only or drops out, and comes back: training goes on, nothing half-written stays.

First on real file systems, where the system lets a person mount some (Linux with user namespaces), then with each error
at each call. Saves may be done by another thread, so that a run tells of one some time after its step: nothing here
asks that it be told at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from broken_disk import BREAK, EVERYTHING, NUM_STEPS, PLACES, REPAIR, SECONDS, HeavyTask, Outage, Story, check, disturbed, losses, start

import colabtrain

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


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
