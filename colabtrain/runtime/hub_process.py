"""The parent's end of the Hub's child process: one job at a time, and no way for a job to hang for ever.

A child that makes no progress is killed, and the next one does without Xet, whose transfers can hang where nothing but a kill
helps. The token goes through the pipe: the environment and the command line of a process can be read by others.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from colabtrain.hub_errors import hidden
from colabtrain.runtime.hub_access import HubAccess
from colabtrain.runtime.socket_bytes import SocketBytes

WAITING_SECONDS = 600.0  # instead, after the client said that it waits: the Hub's limits last for up to five minutes
PROGRESS_BYTES = 4096  # less is a connection that is kept alive
MAX_STDERR_CHARS = 2000
WORKER = "colabtrain.runtime.hub_worker"


class HubFailure(Exception):
    """A job that failed. kind: fenced, changed, not ours, refused, local, conflict or retry. wait: seconds that the Hub asks for."""

    def __init__(self, text: str, kind: str = "retry", status: int | None = None, wait: float | None = None, traceback: str = "") -> None:
        super().__init__(text)
        self.kind, self.status, self.wait, self.traceback = kind, status, wait, traceback


class HubProcess:
    """writer: names this session to the Hub. cache: a folder for what is downloaded."""

    def __init__(self, access: HubAccess, writer: str, cache: Path) -> None:
        self.access, self.writer, self.cache = access, writer, cache
        self.with_xet = SocketBytes.is_known()  # else nobody could see a transfer that hangs
        self._turn = threading.Lock()
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.process.pid

    def ask(self, job: str, quiet_seconds: float | None = None, hear: Callable[[int], object] | None = None, **given: Any) -> Any:
        """The answer to a job of hub_worker.py. hear(bytes): bytes that went over the network since the child began. Raises
        HubFailure."""
        with self._turn:
            try:
                child = self._child = self._child or _Child(self)
                child.send({"job": job, **given})
                return self._await(child, quiet_seconds or self.access.quiet_seconds, hear)
            except HubFailure:
                raise
            except (OSError, RuntimeError) as error:  # no more processes or threads; the child is gone
                self.kill()
                raise HubFailure(f"the Hub's process cannot be used: {type(error).__name__}: {error}") from None
            except BaseException:  # an interrupt: the answer to come is not that to the next job
                self.kill()
                raise

    def _await(self, child: _Child, quiet_seconds: float, hear: Callable[[int], object] | None) -> Any:
        patience, seen = quiet_seconds, 0
        while True:
            try:
                answer = child.answers.get(timeout=patience)
            except queue.Empty:
                self.kill()
                raise HubFailure(f"no byte went over the network for {patience:,.0f} s{self._without_xet()}") from None
            if answer is None:
                words = child.last_words()
                self.kill()
                raise HubFailure(f"the Hub's process has ended ({words})")
            if "done" in answer:
                return answer["done"]
            if "failed" in answer:
                raise self._failure(**answer["failed"])
            if "wait" in answer:
                patience = max(quiet_seconds, WAITING_SECONDS)
            elif answer["bytes"] - seen >= PROGRESS_BYTES:
                patience, seen = quiet_seconds, answer["bytes"]
                if hear is not None:
                    hear(seen)

    def _failure(self, by_xet: bool, **told: Any) -> HubFailure:
        if by_xet and self.with_xet and told["status"] not in (401, 403):
            self.kill()
            told |= {"kind": "retry", "text": told["text"] + self._without_xet()}
        return HubFailure(**told)

    def _without_xet(self) -> str:
        """For the next child: the other way to the same Hub is slower and simpler."""
        told, self.with_xet = "; the next try does without Xet" if self.with_xet else "", False
        return told

    def kill(self) -> None:
        """End the child, whatever it does; a job that waits for it fails, the next one starts another child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()


class _Child:
    def __init__(self, hub: HubProcess) -> None:
        access, self.answers = hub.access, queue.SimpleQueue[dict[str, Any] | None]()
        self._token = access.token
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment(access.token, hub.with_xet),
                start_new_session=True,  # an interrupt of the kernel goes to its whole process group
            )
        except BaseException:
            self._errors.close()
            raise
        try:
            threading.Thread(target=self._read, name="colabtrain-hub-reader", daemon=True).start()
            settings = {"repo": access.repo, "token": access.token, "writer": hub.writer, "cache": str(hub.cache)}
            self.send({**settings, "endpoint": access.endpoint, "timeout": access.timeout_seconds})
        except BaseException:
            self.kill()
            raise

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # a line cut off by a kill
                    self.answers.put(json.loads(hidden(line.decode(), self._token)))
        self.answers.put(None)

    def last_words(self) -> str:
        status = self.process.wait()
        self._errors.seek(0)
        said = hidden(self._errors.read().decode(errors="replace"), self._token)[-MAX_STDERR_CHARS:].strip().splitlines()
        return f"status {status}{': ' + said[-1] if said else ''}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # what could not be sent any more
            self.process.stdin.close()
        self._errors.close()


def environment(token: str, with_xet: bool) -> dict[str, str]:
    """The child's: without the token, and with the modules that this process has."""
    kept = {name: value for name, value in os.environ.items() if token not in value and name != "HF_DEBUG"}
    kept |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}
    kept |= {} if with_xet else {"HF_HUB_DISABLE_XET": "1"}
    root = str(Path(__file__).parents[2])
    return kept | {"PYTHONPATH": os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))}
