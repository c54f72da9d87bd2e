"""The body of a request, read in pieces and no faster than the hub wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from email.message import Message
from io import BufferedIOBase

from minihub.store import PIECE_BYTES

PIECE_SECONDS = 0.05  # a throttled piece lasts about this long, so that a change of the throttle is noticed soon


class ClientGone(ConnectionError):
    """The client went away before its request ended, or the hub closes."""


class Throttle:
    """How fast bodies are read, all connections together; it sleeps in between. None: no limit, 0: not at all."""

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._free_at = 0.0

    def next_piece_bytes(self) -> int:
        while self.bytes_per_second == 0:
            if self.closing.wait(PIECE_SECONDS):
                raise ClientGone("the hub closes")
        rate = self.bytes_per_second
        return PIECE_BYTES if rate is None else min(PIECE_BYTES, max(1, int(rate * PIECE_SECONDS)))

    def passed(self, count: int) -> None:
        rate = self.bytes_per_second
        if not rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + count / rate
            wait = self._free_at - now
        if self.closing.wait(wait):
            raise ClientGone("the hub closes")


class Body:
    def __init__(self, stream: BufferedIOBase, headers: Message, throttle: Throttle) -> None:
        self._stream, self._throttle = stream, throttle
        self.size_bytes = 0  # what was read so far
        chunked = headers.get("Transfer-Encoding", "").lower() == "chunked"
        self._pieces = self._chunks() if chunked else self._counted(int(headers.get("Content-Length") or 0))

    def pieces(self) -> Iterator[bytes]:
        """What was not read yet."""
        return self._pieces

    def read(self) -> bytes:
        return b"".join(self._pieces)

    def drain(self, limit_bytes: float = float("inf")) -> None:
        """Read and forget, up to about `limit_bytes` in all."""
        while self.size_bytes < limit_bytes and next(self._pieces, None) is not None:
            pass

    def _counted(self, count: int) -> Iterator[bytes]:
        while count:
            piece = self._stream.read(min(count, self._throttle.next_piece_bytes()))
            if not piece:
                raise ClientGone("the client went away in its body")
            count -= len(piece)
            self.size_bytes += len(piece)
            self._throttle.passed(len(piece))
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while count := int(self._line().split(b";")[0], 16):
            yield from self._counted(count)
            self._line()
        while self._line():  # trailers
            pass

    def _line(self) -> bytes:
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            raise ClientGone("the client went away in its body")
        return line.strip()
