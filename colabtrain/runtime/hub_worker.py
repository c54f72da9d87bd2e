"""The Hub's child process: all traffic with the Hub, so that nothing of it can hold up or end the training.

Started by hub_process.py. The first line on stdin has the settings, the token among them; each further line is a job. Answers are
JSON lines on stdout: {"bytes": n} as bytes go over the network, {"wait": text} when the client waits by itself, {"done": ...} or
{"failed": ...} for each job. The process ends when its parent is gone, however that ended.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import huggingface_hub

from colabtrain import hub_errors
from colabtrain.runtime import manifest
from colabtrain.runtime.hub import Changed, Fenced, Hub, NotOurs
from colabtrain.runtime.hub_card import extra_files
from colabtrain.runtime.socket_bytes import SocketBytes

CONNECT_SECONDS = 10.0
BEAT_SECONDS = 1.0
KINDS: dict[type[Exception], str] = {Fenced: "fenced", Changed: "changed", NotOurs: "not ours"}
Send = Callable[[Mapping[str, Any]], None]


def main() -> None:
    send = _sender()
    parent = os.getppid()
    settings = json.loads(sys.stdin.readline())
    progress = Progress(send)
    _set_up_client(float(settings["timeout"]), progress, send)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    threading.Thread(target=progress.beat, args=(parent,), daemon=True).start()
    hub = Hub(settings["repo"], settings["token"], settings["writer"], Path(settings["cache"]), settings["endpoint"])
    while True:
        send(_answer(hub, jobs.get()))


def _sender() -> Send:
    """A way to the parent that no library's print() can get into."""
    out: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(message: Mapping[str, Any]) -> None:
        with lock:
            try:
                out.write(json.dumps(message) + "\n")
                out.flush()
            except OSError:
                os._exit(0)  # the parent is gone

    return send


def _read(jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)  # the parent is gone: whatever is under way, another session may have taken over


class Progress:
    """Tells the parent how many bytes went over the network."""

    def __init__(self, send: Send) -> None:
        self._send, self._counter, self._told, self._lock = send, SocketBytes(), 0, threading.Lock()

    def tell(self) -> None:
        with self._lock:
            if (total := self._counter.total()) != self._told:
                self._told = total
                self._send({"bytes": total})

    def beat(self, parent: int) -> None:
        """As long as there is a parent: a forked relative of it may hold the pipe open, then its end is seen here."""
        pause = threading.Event()
        while not pause.wait(BEAT_SECONDS):
            if os.getppid() != parent:
                os._exit(0)
            self.tell()


def _set_up_client(timeout_seconds: float, progress: Progress, send: Send) -> None:
    http: Any = importlib.import_module(hub_errors.HTTP_ERROR.__module__.partition(".")[0])

    def client() -> Any:
        """The client's own has no timeout: a socket that is dead would hang for ever."""
        return http.Client(follow_redirects=True, timeout=http.Timeout(timeout_seconds, connect=min(CONNECT_SECONDS, timeout_seconds)))

    huggingface_hub.set_client_factory(client)

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            progress.tell()  # what went before is not taken for the end of the wait
            send({"wait": record.getMessage()})

    logging.getLogger("huggingface_hub").addHandler(Forward(logging.WARNING))


def _answer(hub: Hub, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"done": _do(hub, **job)}
    except Exception as error:
        kind = KINDS.get(type(error)) or hub_errors.kind(error)
        told = str(error) if type(error) in KINDS else hub_errors.explain(error)
        where = traceback.format_exc()
        failure = {"kind": kind, "text": told, "status": hub_errors.status(error), "wait": hub_errors.wait_seconds(error)}
        return {"failed": {**failure, "traceback": where, "by_xet": "xet" in where}}


def _do(hub: Hub, job: str, **given: Any) -> Any:
    if job == "open":
        return hub.open(given["private"])
    if job == "fetch":
        return hub.fetch(given["sha"], Path(given["folder"]))
    if job == "claim":
        return hub.claim(given["seen"], given["fallback"])
    if job == "squash":
        return hub.squash()
    assert job == "publish", job
    return _publish(hub, Path(given["path"]), given)


def _publish(hub: Hub, checkpoint: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    extra, complaint = extra_files(given["card"], checkpoint, given["facts"])
    what = (checkpoint, int(given["step"]), str(given["nonce"]), int(given["keep"]))
    try:
        pointer = hub.publish(*what, extra)
    except ValueError as error:  # the client, or the Hub through it, finds fault with the card's metadata
        if not extra:
            raise
        complaint = f"the card is left out: {error}"
        pointer = hub.publish(*what, {})
    return {"pointer": pointer, "bytes": manifest.num_bytes(checkpoint), "complaint": complaint}


if __name__ == "__main__":
    main()
