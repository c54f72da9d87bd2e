"""<run>/hub.json: whether the checkpoints of a run folder come after what a Hub repo holds, or beside it.

They do where the newest claim on the repo was made for this very folder, or where the folder's checkpoints were downloaded from
what the repo still holds. Everything is written before the claim, so that a process that dies in between leaves no claim that its
own folder does not know.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colabtrain.device import sync_to_disk

FILE = "hub.json"
MAX_WRITERS = 1000


class Lineage:
    """What the checkpoints in `folder`, a run's, come after in `repo`."""

    def __init__(self, folder: Path, repo: str) -> None:
        self._path, self._repo = folder / FILE, repo
        self._writers: list[str] = []  # sessions of this folder, since its checkpoints were last downloaded
        self._base: list[Any] = []  # [writer, seq] of the pointer that they were downloaded by
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            known = json.loads(self._path.read_text())
            if known["repo"] == repo:
                self._writers, self._base = [str(writer) for writer in known["writers"]], list(known["base"])

    def includes(self, pointer: Mapping[str, Any]) -> bool:
        """Whether the local checkpoints come after what `pointer` names."""
        return pointer["writer"] in self._writers or [pointer["writer"], pointer["seq"]] == self._base

    def is_base(self, pointer: Mapping[str, Any]) -> bool:
        """Whether the local checkpoints were downloaded by this very pointer."""
        return [pointer["writer"], pointer["seq"]] == self._base

    def adopt(self, pointer: Mapping[str, Any]) -> None:
        """The local checkpoints are what was downloaded by `pointer`. Raises OSError."""
        self._writers, self._base = [], [pointer["writer"], pointer["seq"]]
        self._write()

    def claiming(self, writer: str) -> None:
        """The session `writer` is about to claim the repo for the local checkpoints. Raises OSError."""
        self._writers = [*self._writers[-MAX_WRITERS:], writer]
        self._write()

    def _write(self) -> None:
        new = self._path.with_name(f".{FILE}")
        new.write_text(json.dumps({"repo": self._repo, "writers": self._writers, "base": self._base}))
        sync_to_disk(new)
        os.replace(new, self._path)
        sync_to_disk(self._path.parent)
