"""Xet through hf_xet's own `local://` storage: what the client put there becomes an LFS object of the hub."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

from minihub.store import Store

HEADER_BYTES = RECORD_BYTES = 48  # a shard's header and each of its records
HAS_VERIFICATION, HAS_SHA256 = 1 << 31, 1 << 30


def hash_text(raw: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def files_of_shard(shard: bytes) -> dict[str, tuple[str, int]]:
    """sha256 -> (Xet hash, bytes) of the files that a shard describes."""
    found: dict[str, tuple[str, int]] = {}
    at = HEADER_BYTES
    while at + RECORD_BYTES <= len(shard) and shard[at : at + 32] != b"\xff" * 32:
        xet_hash = shard[at : at + 32]
        flags, segments = struct.unpack_from("<II", shard, at + 32)
        at += RECORD_BYTES
        size = sum(struct.unpack_from("<I", shard, at + RECORD_BYTES * i + 36)[0] for i in range(segments))
        at += RECORD_BYTES * segments * (2 if flags & HAS_VERIFICATION else 1)
        if flags & HAS_SHA256:
            found[hash_text(shard[at : at + 32])] = (hash_text(xet_hash), size)
            at += RECORD_BYTES
    return found


class XetObjects:
    def __init__(self, store: Store, cas: str | None) -> None:
        self.cas, self.hashes = cas, dict[str, str]()  # sha256 -> Xet hash
        self._store, self._lock = store, threading.Lock()

    def fetch(self, sha256: str) -> bool:
        """Have the object in the store, if it is in Xet's storage."""
        if self.cas is None:
            return False
        with self._lock:
            if self._store.has(sha256) and sha256 in self.hashes:
                return True
            hit = self._scan().get(sha256)
            if hit is None:
                return False
            if not self._store.has(sha256):
                self._download(sha256, *hit)
            self.hashes[sha256] = hit[0]
        return True

    def _download(self, sha256: str, xet_hash: str, size: int) -> None:
        import hf_xet  # only where a test uses Xet

        path = self._store.parts / f"{sha256}.xet"
        with hf_xet.XetSession().new_file_download_group(endpoint=self.cas) as group:
            group.start_download_file(hf_xet.XetFileInfo(xet_hash, size), str(path))
        self._store.adopt(sha256, path)

    def _scan(self) -> dict[str, tuple[str, int]]:
        assert self.cas is not None
        folder = Path(self.cas.removeprefix("local://"), "xet", "xorbs", "shards")
        found: dict[str, tuple[str, int]] = {}
        for path in folder.glob("*.mdb"):
            found |= files_of_shard(path.read_bytes())
        return found
