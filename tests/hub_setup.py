"""What the tests of a run with a Hub repo share: a Hub in place of the real one, diaries that ring, processes to look at."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from minihub import MiniHub, client

import colabtrain
from colabtrain.runtime import publisher, remote
from colabtrain.runtime.diary import Diary

SECONDS = 120.0  # far more than anything here takes
TOKEN, REPO = "hf_oNlyForTheTestsZ93kQ", "user/run"
SETTINGS = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}  # the Hub of the tests has no Xet, and a try costs seconds
LATEST = "colabtrain/latest.json"
HUB: dict[str, Any] = {"hub": REPO, "publish_every": 0.0}
EVERY = {"display": False, "checkpoint_seconds": 3600.0, "first_checkpoint_seconds": 3600.0}  # only steps decide


@contextmanager
def a_hub(monkeypatch: pytest.MonkeyPatch, home: Path, **options: Any) -> Iterator[MiniHub]:
    """A Hub that start() in this process uses."""
    with MiniHub(tokens={TOKEN: "write"}, **options) as hub:
        use(monkeypatch, home, hub.url)
        yield hub


def use(monkeypatch: pytest.MonkeyPatch, home: Path, url: str) -> None:
    client.isolate(monkeypatch, home)
    client.point_at(monkeypatch, url)
    for name, value in {**SETTINGS, "HF_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(publisher, "FIRST_WAIT_SECONDS", 0.05)


def environment(url: str, home: Path, **more: str) -> dict[str, str]:
    """For a process with the Hub at `url`."""
    root, tests = Path(colabtrain.__file__).parents[1], Path(__file__).parent
    paths = os.pathsep.join([str(root), str(tests)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, **SETTINGS, "HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "PYTHONPATH": paths, **more}


class Bell:
    """Rings at every event of every diary in this process, once it is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[str], object] = lambda event: None) -> None:
        """act(event): called in the thread that writes it, before anything else happens there."""
        self._act = act
        self._rung, self._seen = threading.Condition(), list[tuple[str, str, dict[str, Any]]]()
        ring_diaries(monkeypatch.setattr, self._ring)

    def _ring(self, folder: Path, event: str, fields: dict[str, Any]) -> None:
        with self._rung:
            self._seen.append((folder.name, event, fields))
            self._rung.notify_all()
        self._act(event)

    def wait(self, folder: str, event: str, **wanted: Any) -> None:
        """Until the diary in the folder of that name has such an event."""

        def is_there() -> bool:
            found = (fields for name, kind, fields in self._seen if (name, kind) == (folder, event))
            return any(wanted.items() <= fields.items() for fields in found)

        with self._rung:
            assert self._rung.wait_for(is_there, SECONDS), (
                f"no {event} {wanted} in {folder}: {[(name, kind, fields.get('step')) for name, kind, fields in self._seen]}"
            )


def ring_diaries(patch: Callable[[Any, str, Any], object], ring: Callable[[Path, str, dict[str, Any]], object]) -> None:
    """ring(folder, event, fields) after each event."""
    write = Diary.write

    def written(diary: Diary, event: str, text: str | None = None, **fields: Any) -> None:
        write(diary, event, text, **fields)
        ring(diary.folder, event, {**fields, "text": text})

    patch(Diary, "write", written)


class Told:
    """A process that tells by lines what it does."""

    def __init__(self, arguments: Sequence[object], env: dict[str, str], errors: Path, **options: Any) -> None:
        self._errors = errors.open("w")
        line = [sys.executable, *map(str, arguments)]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=self._errors, env=env, text=True, bufsize=1, **options)
        self.errors, self.lines, self._rung = errors, list[str](), threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._add(line.rstrip("\n"))
        self._add(None)

    def _add(self, line: str | None) -> None:
        with self._rung:
            self._ended = line is None
            self.lines += [] if line is None else [line]
            self._rung.notify_all()

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(SECONDS)
        for file in (self.process.stdin, self._errors):
            if file is not None:
                file.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self, start: str) -> str:
        """The first line that begins so, once it is there."""

        def found() -> list[str]:
            return [line for line in self.lines if line.startswith(start)]

        with self._rung:
            self._rung.wait_for(lambda: found() or self._ended, SECONDS)
            assert found(), f"the process did not say {start!r} but {self.lines[-9:]}\n{self.errors.read_text()}"
            return found()[0]

    def end(self, seconds: float = SECONDS) -> int:
        """Its status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the process has not ended; its last lines: {self.lines[-9:]}\n{self.errors.read_text()}") from None


def children(pid: int) -> list[int]:
    """Processes that `pid` started and that live."""
    found = list[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has ended
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def ends(pid: int, seconds: float) -> bool:
    """Whether the process, which need not be ours, ends in time."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], seconds)[0])
    finally:
        os.close(watched)


def seconds_of(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started
