"""HTTP: connections, threads, answers, and what the faults do to them. Nothing is printed; bugs are kept for the hub's end."""

from __future__ import annotations

import io
import re
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple
from urllib.parse import parse_qs, urlsplit

from minihub import routes_download, routes_repo, routes_upload  # noqa: F401  they register themselves
from minihub.body import Body, ClientGone
from minihub.faults import Fault
from minihub.repos import HubError
from minihub.routing import Answer, Request, as_error, as_json, dispatch

if TYPE_CHECKING:
    from minihub.hub import MiniHub

JOIN_SECONDS = 10.0  # far more than a thread needs once its socket is shut; only a "call" that blocks takes longer


class Seen(NamedTuple):
    """A line of the log. `status` is what the client was sent (None: nothing), `note` names the fault that it met."""

    method: str
    path: str
    query: str
    size_bytes: int
    status: int | None
    note: str


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # clients beyond that try again after a second

    def __init__(self, hub: MiniHub, port: int) -> None:
        self.hub = hub
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, socket.socket] = {}
        super().__init__(("127.0.0.1", port), Handler)
        self._accepting = threading.Thread(target=self.serve_forever, args=(0.05,), name="minihub", daemon=True)

    def start(self) -> None:
        self._accepting.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), name="minihub", daemon=True)
        with self._lock:
            self._open = {other: used for other, used in self._open.items() if other.is_alive()}
            thread.start()
            self._open[thread] = request

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError):
            self.hub.errors.append(error)

    def close(self) -> None:
        """End all connections, those in the middle of something too."""
        self.shutdown()
        self._accepting.join()
        self.server_close()
        with self._lock:
            still_open = dict(self._open)
        for used in still_open.values():
            try:
                used.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed by its client or by its thread
        for thread in still_open:
            thread.join(JOIN_SECONDS)
            if thread.is_alive():
                self.hub.errors.append(RuntimeError("a request did not end with the hub"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        hub, address = self.server.hub, urlsplit(self.path)
        query = parse_qs(address.query, keep_blank_values=True)
        self.body = Body(self.rfile, self.headers, hub.pace)
        self.fault = hub.faults.take(self.command, address.path)
        try:
            if self._answers_first():
                return
            request = Request(hub, self.command, address.path, query, self.headers, self.body)
            self._send(self._override(self._work(request)))
        except ConnectionError as error:
            if isinstance(error, ClientGone):
                self._note(None, str(error))
            self._reset()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _answers_first(self) -> bool:
        """What a fault does before the work; true if there will be no work."""
        fault, hub = self.fault, self.server.hub
        if fault is None:
            return False
        if fault.name == "status":
            self._send(injected(fault))
            return True
        if fault.name == "drop":
            self.body.drain(*fault.action[1:])
            self._note(None)
            self._reset()
            return True
        if fault.name == "hang":
            hub.hold(*fault.action[1:])
        elif fault.name == "call":
            fault.action[1](hub)
        return False

    def _work(self, request: Request) -> Answer:
        try:
            return dispatch(request)
        except HubError as error:
            return as_error(error)
        except ConnectionError:
            raise
        except Exception as error:
            self.server.hub.errors.append(error)
            return as_json({"error": f"a bug of the test server: {error!r}"}, 500)

    def _override(self, answer: Answer) -> Answer | None:
        """What a fault makes of the answer; None if it gets lost."""
        if self.fault is not None and self.fault.name == "apply_then_drop":
            return None
        if self.fault is not None and self.fault.name == "apply_then_status":
            return injected(self.fault)
        return answer

    def _send(self, answer: Answer | None) -> None:
        self.body.drain()  # what is left of it would be taken for the next request
        if answer is None:
            self._note(None)
            return self._reset()
        file, size = opened(answer.content)
        with file:
            status, start, count = answer.status, 0, size
            if answer.is_file:
                status, start, count = self._range(size, answer.headers)
            self._note(status)
            self.send_response(status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(count))
            self.send_header("X-Request-Id", "Root=1-minihub")
            self.end_headers()
            if self.command == "HEAD":
                return
            if self.fault is not None and self.fault.name == "truncate":
                count, self.close_connection = min(count, self.fault.action[1]), True
            if count:
                self.connection.sendfile(file, start, count)

    def _range(self, size: int, headers: dict[str, str]) -> tuple[int, int, int]:
        """Status, first byte and number of bytes of what was asked for."""
        headers["Accept-Ranges"] = "bytes"
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if asked is None or not any(asked.groups()) or not size:
            return 200, 0, size
        first, last = asked.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(int(last), size - 1) if first and last else size - 1
        if start >= size or end < start:
            headers["Content-Range"] = f"bytes */{size}"
            return 416, 0, 0
        headers["Content-Range"] = f"bytes {start}-{end}/{size}"
        return 206, start, end - start + 1

    def _note(self, status: int | None, why: str = "") -> None:
        """Before anything is sent, so that whoever has the answer finds it in the log."""
        address = urlsplit(self.path)
        notes = [str(self.fault)] if self.fault is not None else []
        seen = Seen(self.command, address.path, address.query, self.body.size_bytes, status, "; ".join([*notes, why] if why else notes))
        self.server.hub.note(seen)

    def _reset(self) -> None:
        """RST rather than FIN: what a machine that is gone or a box on the way does."""
        self.close_connection = True
        try:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            return  # it is closed
        self.connection.close()


def injected(fault: Fault) -> Answer:
    status, headers, body = fault.answer()
    return as_json(body, status, headers)


def opened(content: bytes | Path) -> tuple[BinaryIO, int]:
    if isinstance(content, Path):
        return content.open("rb"), content.stat().st_size
    return io.BytesIO(content), len(content)


class Hold:
    """Requests that hang, and letting them go."""

    def __init__(self, closing: threading.Event) -> None:
        self._closing = closing
        self._lock = threading.Condition()
        self._releases = 0

    def wait(self, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            seen = self._releases
            while self._releases == seen and not self._closing.is_set():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._lock.wait(left)
        if self._closing.is_set():
            raise ClientGone("the hub closes")

    def release(self) -> None:
        with self._lock:
            self._releases += 1
            self._lock.notify_all()
