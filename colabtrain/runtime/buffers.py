"""Buffers: host memory for one copy of a run's tensors, filled at a step boundary, used again for each checkpoint."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colabtrain.runtime.manifest import TENSOR_GROUPS

Groups = Mapping[str, Mapping[str, Tensor]]


def num_bytes(groups: Groups) -> int:
    """Of all tensors in `groups`."""
    return sum(tensor.nbytes for named in groups.values() for tensor in named.values())


class Buffers:
    """Pinned memory where the tensors lie on a GPU."""

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
        _copy((self.tensors[group][name], tensor) for group, tensors in named.items() for name, tensor in tensors.items())
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
    memory = torch.empty(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    views, at = dict[str, Tensor](), 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        views[name] = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        at += tensor.nbytes
    return views


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Fill the first of each pair from the second.

    What lies on the host is moved as bytes, by two threads. Tensor.copy_() would share each tensor among all of torch's
    threads and wait for the last one: over a thousand times a checkpoint, and on a busy machine for most of a second.
    """
    moves = list[tuple[int, int, int]]()
    for target, source in pairs:
        if _is_its_bytes(source):
            moves.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            target.copy_(source.detach(), non_blocking=source.is_cuda)
    helper = threading.Thread(target=_move, args=(moves,), daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads
        helper.start()
    _move(moves)
    if helper.ident is not None:
        helper.join()


def _is_its_bytes(tensor: Tensor) -> bool:
    """Whether it is no more than its bytes, on the host and in order."""
    in_order = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return in_order and type(tensor) in (Tensor, nn.Parameter)  # a subclass may mean something else by them


def _move(moves: list[tuple[int, int, int]]) -> None:
    """Take (target, source, bytes) from `moves` until there is none."""
    with contextlib.suppress(IndexError):
        while True:
            ctypes.memmove(*moves.pop())  # lets go of the interpreter
