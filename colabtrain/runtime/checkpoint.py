"""Checkpoints: capture at a step boundary, write to disk, read back. Nothing pickled is written or read.

The training thread only copies its tensors into buffers that are made once (the snapshot of CheckFreq, Mohan et al.
2021); staging, hashing and renaming are for another thread, which sees nothing but the copy.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from colabtrain.device import sync_to_disk
from colabtrain.runtime import disk, manifest
from colabtrain.runtime.buffers import Buffers, Groups, num_bytes
from colabtrain.runtime.diary import DIARY_FILE
from colabtrain.runtime.manifest import FORMAT, MANIFEST, PREFIX, REPLACED, STAGING, STATE, TENSOR_FILES, TENSOR_GROUPS, CheckpointError
from colabtrain.runtime.rng import rng_state

COPY_BYTES = 2**20


@dataclass(frozen=True)
class Snapshot:
    """One step boundary, out of reach of training. time: epoch seconds. state: JSON text. diary_bytes: of the diary up to this step."""

    step: int
    time: float
    buffers: Buffers
    state: str
    diary_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory."""

    path: Path
    step: int
    tensors: Groups
    state: Mapping[str, Any]


def capture(step: int, tensors: Groups, state: Mapping[str, Any], diary_bytes: int, buffers: Buffers) -> Snapshot:
    """Copy `tensors`, `state` and the random state at a step boundary. `buffers` may be filled again once it is written.

    Raises TypeError or ValueError where JSON cannot hold `state`.
    """
    taken_at = time.time()
    text = json.dumps({"format": FORMAT, "step": step, **state, "rng": rng_state()})
    buffers.fill(tensors)
    return Snapshot(step, taken_at, buffers, text, diary_bytes)


def write(folder: Path, snapshot: Snapshot, diary: Path) -> Path:
    """Put `snapshot` on disk as folder/step-XXXXXXXX, all but the sync of its name. Raises CheckpointError if a weight is not
    finite, OSError if the disk fails; then nothing of it is left behind."""
    final = folder / f"{PREFIX}{snapshot.step:08d}"
    staging, replaced = folder / f"{STAGING}{final.name}", folder / f"{REPLACED}{final.name}"
    snapshot.buffers.wait()
    tensors = snapshot.buffers.tensors
    _check_finite(tensors["trainable"])
    disk.check_room(folder, num_bytes(tensors) + snapshot.diary_bytes)
    try:
        manifest.clear_staging(folder)  # what a disk that failed did not let go of
        staging.mkdir(parents=True)
        for group, name in zip(TENSOR_GROUPS, TENSOR_FILES, strict=True):
            save_file(tensors[group], staging / name)
        (staging / STATE).write_text(snapshot.state)
        _copy_start(diary, staging / DIARY_FILE, snapshot.diary_bytes)
        for path in staging.iterdir():
            sync_to_disk(path)
        manifest.write(staging)
        sync_to_disk(staging / MANIFEST)
        sync_to_disk(staging)
        if final.exists():  # an older one of the same step, which a resume found unusable or went behind
            os.rename(final, replaced)
        os.replace(staging, final)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if replaced.exists() and not final.exists():
            os.replace(replaced, final)
        if isinstance(error, SafetensorError):  # safetensors says so when the disk is full
            raise OSError(f"{final.name}: {error}") from None
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _copy_start(source: Path, target: Path, num_bytes: int) -> None:
    """The first `num_bytes` of `source`, which may be growing."""
    with source.open("rb") as read_from, target.open("wb") as write_to:
        while num_bytes and (data := read_from.read(min(num_bytes, COPY_BYTES))):
            write_to.write(data)
            num_bytes -= len(data)


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every file checked against the manifest. Raises CheckpointError with the reason."""
    state, tensors = manifest.check(path), dict[str, dict[str, Tensor]]()
    for group, name in zip(TENSOR_GROUPS, TENSOR_FILES, strict=True):
        try:
            # pread: memory of our own; a mapped file kills the process if a mounted folder drops out under it
            tensors[group] = load_file(path / name, backend="pread")
        except (*manifest.BROKEN, SafetensorError) as error:
            raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from None
    _check_finite(tensors["trainable"])
    return Checkpoint(path, int(state["step"]), tensors, state)


def _check_finite(trainable: Mapping[str, Tensor]) -> None:
    for name, tensor in trainable.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} is not finite")
