"""Drives sessions of hub_session.py: starts them, hears them, kills them or their Hub's process, looks for the token on them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

SESSION = Path(__file__).parent / "hub_session.py"


class Server:
    """The process that forks the sessions, between `__enter__` and `__exit__`."""

    def __enter__(self) -> Server:
        root = os.pathsep.join([str(SESSION.parents[1]), str(SESSION.parent)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        self._process = subprocess.Popen(
            [sys.executable, str(SESSION)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port))


class Session:
    """One session. heard: what it told, in order; lines that are no JSON (a traceback) are in `noise`."""

    def __init__(self, server: Server, job: dict[str, Any]) -> None:
        self.job, self.name, self.folder, self.token = job, str(job["name"]), Path(job["folder"]), str(job["token"])
        self.heard: list[dict[str, Any]] = []
        self.noise: list[str] = []
        self.seen_with_token: list[str] = []
        self.pid: int | None = None
        self.writer = ""
        self._workers: list[int] = []  # descriptors of the Hub's processes that were seen
        self.killed = False
        self._connection = server.connect()
        self._connection.sendall(json.dumps(job).encode() + b"\n")
        self._hearing = threading.Thread(target=self._hear, name=f"session {self.name}", daemon=True)
        self._hearing.start()

    def _hear(self) -> None:
        with self._connection, self._connection.makefile(encoding="utf-8", errors="replace") as lines:
            try:
                for line in lines:
                    self._take(line)
            except ConnectionResetError:  # killed with a line of ours unread
                return

    def _take(self, line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            self.noise.append(line.rstrip())
            return
        if event["event"] == "begun":
            self.pid, self.writer = int(event["pid"]), event["writer"]
        self.heard.append(event)
        if event["event"] in ("hub_claimed", "offered"):
            self._look_for_token()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in list(self.heard) if event["event"] == name]

    def join(self, seconds: float) -> bool:
        """True when it has ended; one that has not is killed."""
        self._hearing.join(seconds)
        ended = not self._hearing.is_alive()
        if not ended:
            self.kill()
            self._hearing.join()
        return ended

    def acked(self) -> list[tuple[str, int, int]]:
        """(writer, step, seq) of what it said to be published."""
        return [(self.writer, event["step"], event["seq"]) for event in self.events("checkpoint_published")]

    # Faults

    def kill(self) -> bool:
        if not self._hearing.is_alive() or self.pid is None:
            return False
        self.killed = True
        return _kill(self.pid)

    def kill_worker(self) -> bool:
        return any([_kill(pid) for pid in self.children()])

    def children(self) -> list[int]:
        if self.pid is None or not self._hearing.is_alive():
            return []
        return [int(pid) for task in _listed(Path(f"/proc/{self.pid}/task")) for pid in _read(task / "children").split()]

    def _look_for_token(self) -> None:
        children = self.children()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                self._workers.append(os.pidfd_open(pid))
        for pid in [self.pid, *children]:
            for name in ("environ", "cmdline"):
                if self.token.encode() in _read(Path(f"/proc/{pid}/{name}")):
                    self.seen_with_token.append(f"/proc/PID/{name} of {'the session' if pid == self.pid else 'its child'}")

    def leaves_worker(self, seconds: float) -> bool:
        """Whether a Hub's process is still there so long after the session's end."""
        deadline, stays = time.monotonic() + seconds, False
        for descriptor in self._workers:
            ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            stays = stays or not ended
            os.close(descriptor)
        self._workers = []
        return stays

    def shows_token(self) -> list[str]:
        """(6): where the token can be seen, in what it said and in its folder."""
        found = list(self.seen_with_token)
        if self.token in json.dumps(self.heard) + "\n".join(self.noise):
            found.append("its output")
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return found + [str(path) for path in files if self.token.encode() in path.read_bytes()]

    def __str__(self) -> str:
        lines = [json.dumps({name: value for name, value in event.items() if name != "traceback"}) for event in self.heard]
        return "\n".join([f"== session {self.name}, writer {self.writer}: {self.job}", *lines, *self.noise])


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
