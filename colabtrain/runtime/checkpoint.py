"""Checkpoints: capture at a step boundary, write to disk, read back. Nothing pickled is written or read.

The training thread only copies its tensors into buffers that are made once (the snapshot of CheckFreq, Mohan et al.
2021); staging, hashing and renaming are for another thread, which sees nothing but the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from colabtrain.device import sync_to_disk
from colabtrain.runtime import disk, manifest
from colabtrain.runtime.diary import DIARY_FILE
from colabtrain.runtime.manifest import FORMAT, MANIFEST, PREFIX, REPLACED, STAGING, STATE, TENSOR_GROUPS, CheckpointError
from colabtrain.runtime.rng import rng_state

Groups = Mapping[str, Mapping[str, Tensor]]
COPY_BYTES = 2**20


class Buffers:
    """Host memory for one copy of a run's tensors, used again for each checkpoint; pinned where they lie on a GPU."""

    def __init__(self) -> None:
        self._layout: list[Any] = []
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self._copied: list[torch.cuda.Event] = []

    def fill(self, groups: Groups) -> None:
        """Copy `groups`. Copies from a GPU are under way on return, in the order of its stream: later steps cannot touch them."""
        named = {group: dict(groups[group]) for group in TENSOR_GROUPS}
        layout = [(group, name, t.dtype, t.shape, t.device) for group, tensors in named.items() for name, t in tensors.items()]
        if layout != self._layout:
            self._layout, self.tensors = [], {}  # the old ones go before the new ones come
            self.tensors = {group: _allocated(tensors) for group, tensors in named.items()}
            self._layout = layout
        _copy([(self.tensors[group][name], tensor) for group, tensors in named.items() for name, tensor in tensors.items()])
        self._copied = []
        for device in {device for *_, device in layout if device.type == "cuda"}:
            with torch.cuda.device(device):
                self._copied.append(event := torch.cuda.Event())
                event.record()

    def wait(self) -> None:
        """Return when the copies are complete."""
        for event in self._copied:
            event.synchronize()


def _allocated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of one piece of memory, those of the largest elements first, so that all are aligned."""
    pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
    memory = torch.empty(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8, pin_memory=pinned)
    views, at = dict[str, Tensor](), 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        views[name] = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        at += tensor.nbytes
    return views


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Fill the first of each pair from the second.

    On the host by two threads, each taking the next one. copy_() shares each tensor among all of torch's threads and waits
    for the last: with hundreds of tensors, and other work on the machine's few cores, most of it is waiting.
    """
    moves = list[tuple[int, int, int]]()
    for target, source in pairs:
        if _is_plain(source):
            moves.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            target.copy_(source.detach(), non_blocking=True)
    helper = threading.Thread(target=_move, args=(moves,))
    helper.start()
    _move(moves)
    helper.join()


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is its bytes, on the host and in order."""
    in_order = tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter) and in_order


def _move(moves: list[tuple[int, int, int]]) -> None:
    """Take (target, source, bytes) from `moves` until there is none."""
    with contextlib.suppress(IndexError):
        while True:
            ctypes.memmove(*moves.pop())  # lets go of the interpreter


@dataclass(frozen=True)
class Snapshot:
    """One step boundary, out of reach of training. state: JSON text. diary_bytes: of the diary up to this step."""

    step: int
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
    text = json.dumps({"format": FORMAT, "step": step, **state, "rng": rng_state()})
    buffers.fill(tensors)
    return Snapshot(step, buffers, text, diary_bytes)


def write(folder: Path, snapshot: Snapshot, diary: Path) -> Path:
    """Put `snapshot` on disk as folder/step-XXXXXXXX. Raises CheckpointError if a weight is not finite, OSError if the disk
    fails; then nothing of it is left behind."""
    final = folder / f"{PREFIX}{snapshot.step:08d}"
    staging, replaced = folder / f"{STAGING}{final.name}", folder / f"{REPLACED}{final.name}"
    snapshot.buffers.wait()
    tensors = snapshot.buffers.tensors
    _check_finite(tensors["trainable"])
    disk.check_room(folder, sum(t.nbytes for named in tensors.values() for t in named.values()) + snapshot.diary_bytes)
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for group in TENSOR_GROUPS:
            save_file(tensors[group], staging / f"{group}.safetensors")
        (staging / STATE).write_text(snapshot.state)
        _copy_start(diary, staging / DIARY_FILE, snapshot.diary_bytes)
        for path in staging.iterdir():
            sync_to_disk(path)
        manifest.write(staging)
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


def _copy_start(source: Path, target: Path, num_bytes: int) -> None:
    """The first `num_bytes` of `source`, which may be growing."""
    with source.open("rb") as read_from, target.open("wb") as write_to:
        while num_bytes and (data := read_from.read(min(num_bytes, COPY_BYTES))):
            write_to.write(data)
            num_bytes -= len(data)


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every file checked against the manifest. Raises CheckpointError with the reason."""
    state, tensors, name = manifest.check(path), dict[str, dict[str, Tensor]](), ""
    try:
        for group in TENSOR_GROUPS:
            name = f"{group}.safetensors"
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
