"""Damage done to the files of a checkpoint, by a disk or by a hand that means harm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = ("trainable.safetensors", "optimizer.safetensors", "state.json", "diary.jsonl", "manifest.json")  # of a checkpoint


def damaged(data: bytes, how: str) -> bytes:
    middle = len(data) // 2
    return {
        "0 bytes": b"",
        "half": data[:middle],
        "one byte less": data[:-1],
        "one byte more": data + b"\0",
        "first bit": bytes([data[0] ^ 1]) + data[1:],
        "middle bit": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
        "last bit": data[:-1] + bytes([data[-1] ^ 128]),
    }[how]


class Trap:
    """Unpickling one calls open(path, "w")."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (str(self.path), "w")


def rehash(path: Path) -> None:
    """Make the manifest agree with the files, as one who plants a checkpoint would."""
    manifest = json.loads((path / "manifest.json").read_text())
    for entry in manifest["files"]:
        data = (path / entry["name"]).read_bytes()
        entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (path / "manifest.json").write_text(json.dumps(manifest))
