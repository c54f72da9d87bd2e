"""LFS objects on disk, written and read in pieces: an upload of hundreds of MB takes no memory."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from minihub.repos import HubError

PIECE_BYTES = 1 << 20


def pieces_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


class Store:
    def __init__(self, folder: Path) -> None:
        self.objects, self.parts = folder / "objects", folder / "parts"
        self.objects.mkdir(parents=True, exist_ok=True)
        self.parts.mkdir(exist_ok=True)

    def path(self, sha256: str) -> Path:
        return self.objects / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).exists()

    def size(self, sha256: str) -> int:
        try:
            return self.path(sha256).stat().st_size
        except FileNotFoundError:
            return 0

    def put(self, sha256: str, pieces: Iterable[bytes]) -> str:
        """Store an object under its hash, or refuse it; returns its md5."""
        return self._write(pieces, self.path(sha256), sha256)

    def put_part(self, sha256: str, number: int, pieces: Iterable[bytes]) -> str:
        return self._write(pieces, self._part(sha256, number), None)

    def join_parts(self, sha256: str, numbers: list[int]) -> None:
        paths = [self._part(sha256, number) for number in numbers]
        if not all(path.exists() for path in paths):
            raise HubError(400, "a part is missing")
        self.put(sha256, (piece for path in paths for piece in pieces_of(path)))
        for path in paths:
            path.unlink(missing_ok=True)

    def adopt(self, sha256: str, path: Path) -> None:
        """Take a file written by someone else as an object."""
        self.put(sha256, pieces_of(path))
        path.unlink()

    def delete(self, sha256: str) -> None:
        self.path(sha256).unlink(missing_ok=True)

    def _write(self, pieces: Iterable[bytes], target: Path, wanted: str | None) -> str:
        """Half an upload leaves nothing behind."""
        digest, md5 = hashlib.sha256(), hashlib.md5()
        descriptor, name = tempfile.mkstemp(dir=self.parts)
        try:
            with os.fdopen(descriptor, "wb") as file:
                for piece in pieces:
                    digest.update(piece)
                    md5.update(piece)
                    file.write(piece)
            if wanted not in (None, digest.hexdigest()):
                raise HubError(400, "sha256 mismatch")
            os.replace(name, target)
        finally:
            Path(name).unlink(missing_ok=True)
        return md5.hexdigest()

    def _part(self, sha256: str, number: int) -> Path:
        assert re.fullmatch(r"[0-9a-f]{64}", sha256)
        return self.parts / f"{sha256}.{number}"
