"""Checkpoints on disk: capture, stage, manifest, rename; verify, list, prune, restore.

`<run>/checkpoints/step-00001200/` holds trainable.safetensors, optimizer.safetensors, state.json, the diary up to that
step and manifest.json (name, size and sha256 of each). The manifest is written last and the folder is renamed into
place after it, so a folder with this name was whole when it appeared; the hashes say whether it still is. Nothing
pickled is written or read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from colabtrain.device import sync_to_disk
from colabtrain.runtime.diary import DIARY_FILE

MANIFEST, STATE, PREFIX = "manifest.json", "state.json", "step-"
TENSOR_GROUPS = ("trainable", "optimizer")
FORMAT = 1


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the text says which file and why."""


@dataclass(frozen=True)
class Snapshot:
    """One step boundary, out of reach of training: tensors on the CPU that nobody else writes to."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    diary_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory."""

    path: Path
    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


def capture(step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], diary_bytes: int) -> Snapshot:
    """Copy `tensors`, and the random state, at a step boundary. Raises CheckpointError if a weight is not finite."""
    copies = {group: {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors[group].items()} for group in TENSOR_GROUPS}
    _check_finite(copies["trainable"])
    return Snapshot(step, copies, {"format": FORMAT, "step": step, **state, "rng": rng_state()}, diary_bytes)


def write(folder: Path, snapshot: Snapshot, diary: Path) -> Path:
    """Put `snapshot` on disk as folder/step-XXXXXXXX. Raises OSError; then nothing of it is left behind."""
    final = folder / f"{PREFIX}{snapshot.step:08d}"
    staging, replaced = folder / f".staging-{final.name}", folder / f".replaced-{final.name}"
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for group in TENSOR_GROUPS:
            save_file(dict(snapshot.tensors[group]), staging / f"{group}.safetensors")
        (staging / STATE).write_text(json.dumps(snapshot.state))
        with diary.open("rb") as source:
            (staging / DIARY_FILE).write_bytes(source.read(snapshot.diary_bytes))
        names = sorted(path.name for path in staging.iterdir())
        for name in names:
            sync_to_disk(staging / name)
        manifest = [{"name": name, "size": (staging / name).stat().st_size, "sha256": _sha256(staging / name)} for name in names]
        (staging / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": manifest}, indent=1))
        sync_to_disk(staging / MANIFEST)
        sync_to_disk(staging)
        if final.exists():  # an older one of the same step, which a resume found unusable or went behind
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        os.replace(staging, final)
        sync_to_disk(folder)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if replaced.exists() and not final.exists():
            os.replace(replaced, final)
        if isinstance(error, SafetensorError):  # safetensors says so when the disk is full
            raise OSError(f"{final.name}: {error}") from None
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def listed(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted(folder.glob(f"{PREFIX}[0-9]*"), reverse=True) if folder.exists() else []


def prune(newest: Path, keep: int) -> None:
    """Keep `newest`, just written, and the `keep` - 1 before it; remove what is older.

    One with a later step is neither counted nor removed: it could not be read when the run went back behind it, and
    must not push out the good ones.
    """
    for path in [path for path in listed(newest.parent) if path.name <= newest.name][keep:]:
        shutil.rmtree(path, ignore_errors=True)


def clear_staging(folder: Path) -> None:
    """Remove what a write that was cut off left behind."""
    for path in folder.glob(".replaced-*"):  # cut off between the two renames: the older one is whole
        if not (final := folder / path.name.removeprefix(".replaced-")).exists():
            os.replace(path, final)
    for path in (*folder.glob(".staging-*"), *folder.glob(".replaced-*")):
        shutil.rmtree(path, ignore_errors=True)


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every file checked against the manifest. Raises CheckpointError with the reason."""
    name = MANIFEST
    try:
        manifest = json.loads((path / name).read_text())
        sizes = {str(entry["name"]): (int(entry["size"]), str(entry["sha256"])) for entry in manifest["files"]}
        wanted = {STATE, DIARY_FILE, *(f"{group}.safetensors" for group in TENSOR_GROUPS)}
        if manifest["format"] != FORMAT or set(sizes) != wanted:
            raise CheckpointError(f"{MANIFEST} is of format {manifest['format']!r} and lists {sorted(sizes)}")
        for name, (size, sha256) in sizes.items():
            found = (path / name).stat().st_size
            if found != size:
                raise CheckpointError(f"{name} has {found} bytes, not the {size} of the manifest")
            if _sha256(path / name) != sha256:
                raise CheckpointError(f"{name} has another sha256 than the manifest")
        name = STATE
        state = json.loads((path / name).read_text())
        step, tensors = int(state["step"]), dict[str, dict[str, Tensor]]()
        for group in TENSOR_GROUPS:
            name = f"{group}.safetensors"
            tensors[group] = load_file(path / name)
        _check_finite(tensors["trainable"])
        return Checkpoint(path, step, tensors, state)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from None


def _check_finite(trainable: Mapping[str, Tensor]) -> None:
    for name, tensor in trainable.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} is not finite")


def rng_state() -> dict[str, Any]:
    """The state of the global random generators (python, numpy if loaded, torch, CUDA if in use) as JSON."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss], "torch": _encode(torch.get_rng_state())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [_encode(device_state) for device_state in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global generators where rng_state() found them; what was not in use then is left alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_decode(state["torch"]))
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([_decode(device_state) for device_state in state["cuda"]])


def _encode(tensor: Tensor) -> str:
    return base64.b64encode(bytes(tensor.tolist())).decode()


def _decode(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
