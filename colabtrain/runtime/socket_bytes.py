"""How many bytes this process has exchanged over TCP, by whatever library: the kernel counts them (Linux alone)."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

FDS = Path("/proc/self/fd")
COUNTERS = struct.Struct("@QQ")  # tcp_info's bytes_acked and bytes_received, from RFC 4898
COUNTERS_AT = 120  # their place in the kernel's struct


class SocketBytes:
    """Counts what goes over the sockets that are open at two looks or more, or at one."""

    def __init__(self) -> None:
        self._gone = 0  # bytes of sockets that were closed
        self._open = dict[str, int]()  # socket -> bytes at the last look

    @staticmethod
    def is_known() -> bool:
        return FDS.exists() and hasattr(socket, "TCP_INFO")

    def total(self) -> int:
        now = dict(filter(None, map(_counted, os.listdir(FDS)))) if self.is_known() else {}
        self._gone += sum(size for name, size in self._open.items() if name not in now)
        self._open = now
        return self._gone + sum(now.values())


def _counted(fd: str) -> tuple[str, int] | None:
    """(name of the socket, its bytes); None where it is no TCP socket, or is closed by now."""
    try:
        name = os.readlink(FDS / fd)
        if not name.startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(int(fd))) as twin:
            info = twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, COUNTERS_AT + COUNTERS.size)
        acked, received = COUNTERS.unpack_from(info, COUNTERS_AT)
    except (OSError, struct.error):
        return None
    return name, acked + received
