"""What makes a checkpoint folder whole: which files, of which size and sha256. Nothing here loads torch.

`<run>/checkpoints/step-00001200/` holds trainable.safetensors, optimizer.safetensors, state.json, the diary up to that
step and manifest.json. The manifest is written last and the folder is renamed into place after it, so a folder with
this name was whole when it appeared; the hashes say whether it still is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from colabtrain.runtime.diary import DIARY_FILE

MANIFEST, STATE, PREFIX = "manifest.json", "state.json", "step-"
STAGING, REPLACED, REMOVED = ".staging-", ".replaced-", ".removed-"  # before the name of a folder that is no checkpoint yet, or no more
NAME = re.compile(rf"{PREFIX}\d{{8,}}")
TENSOR_GROUPS = ("trainable", "optimizer")
TENSOR_FILES = tuple(f"{group}.safetensors" for group in TENSOR_GROUPS)
FILES = (STATE, DIARY_FILE, *TENSOR_FILES)
FORMAT = 1
BROKEN = (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError, struct.error)  # what a planted file can raise


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the text says which file and why."""


def listed(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first. A copy by another name is the person's. Raises OSError where nobody can see whether there
    are any (glob would say that there are none)."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        if folder.is_symlink():  # to a disk that is not mounted
            raise
        return []
    return sorted((folder / name for name in names if NAME.fullmatch(name)), key=number, reverse=True)


def number(path: Path) -> int:
    """The step that a checkpoint folder is named after."""
    return int(path.name.removeprefix(PREFIX))


def write(path: Path) -> None:
    """Describe the files that are in the folder `path` now. Raises OSError, also where one is not as long as it says."""
    files: list[dict[str, Any]] = []
    for file in sorted(path.iterdir()):
        if file.name in TENSOR_FILES:
            try:
                _check_length(file)
            except BROKEN as error:
                raise OSError(f"{file.name} was written, but cannot be read: {error}") from None
        files.append({"name": file.name, "size": file.stat().st_size, "sha256": _sha256(file)})
    (path / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))


def check(path: Path, names: Collection[str] = FILES) -> dict[str, Any]:
    """What state.json of the checkpoint `path` holds, the files `names` checked against the manifest. Raises CheckpointError."""
    name = MANIFEST
    try:
        manifest = json.loads((path / name).read_text())
        sizes = {str(entry["name"]): (int(entry["size"]), str(entry["sha256"])) for entry in manifest["files"]}
        if manifest["format"] != FORMAT or set(sizes) != set(FILES):
            raise CheckpointError(f"{MANIFEST} is of format {manifest['format']!r} and lists {sorted(sizes)}")
        for name in names:
            size, sha256 = sizes[name]
            found = (path / name).stat().st_size
            if found != size:
                raise CheckpointError(f"{name} has {found} bytes, not the {size} of the manifest")
            if _sha256(path / name) != sha256:
                raise CheckpointError(f"{name} has another sha256 than the manifest")
            if name in TENSOR_FILES:
                _check_length(path / name)
        name = STATE
        state: dict[str, Any] = json.loads((path / name).read_text())
        int(state["step"])
        return state
    except BROKEN as error:
        raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from None


def num_bytes(path: Path) -> int:
    """What the files in the folder `path` take on the disk."""
    return sum(file.stat().st_size for file in path.iterdir())


def _check_length(path: Path) -> None:
    """Raise ValueError unless a safetensors file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: Mapping[str, Any] = json.loads(file.read(min(length, size)))
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if size != 8 + length + end:
        raise ValueError(f"{size} bytes, where its header tells of {8 + length + end}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prune(newest: Path, keep: int, held: Collection[Path] = (), broken: Collection[Path] = ()) -> None:
    """Keep `newest`, just written, and the `keep` - 1 before it; remove what is older, but for those `held`.

    One that is `broken`, or of a later step, is not counted: it could not be read when the run went back behind it, and
    must not push out the good ones. Raises OSError.
    """
    earlier = [path for path in listed(newest.parent) if number(path) <= number(newest)]
    kept = [path for path in earlier if path not in broken][:keep]
    for path in earlier:
        if number(path) < number(kept[-1]) and path not in held:
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint folder; cut off on the way, it is no checkpoint any more under any name. Raises OSError."""
    gone = path.with_name(REMOVED + path.name)
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def clear_staging(folder: Path) -> None:
    """Remove what a write that was cut off left behind."""
    for path in folder.glob(f"{REPLACED}*"):  # cut off between the two renames: the older one is whole
        if not (final := folder / path.name.removeprefix(REPLACED)).exists():
            os.replace(path, final)
    for prefix in (STAGING, REPLACED, REMOVED):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)
