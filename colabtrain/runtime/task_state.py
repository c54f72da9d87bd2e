"""What a Task's state() may give: told before the first step, not when it is to be kept."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from colabtrain.runtime.manifest import TENSOR_GROUPS
from colabtrain.task import Task

RESERVED = "__metadata__"  # no name for a tensor: safetensors writes it and cannot read it


def check_state(task: Task) -> None:
    """Raise ValueError where what state() gives cannot be saved: before the first step, not when it is to be kept."""
    try:
        answer = task.state()
    except Exception:  # it may need a step that was made
        return
    _, meta = checked(task, answer)
    try:
        json.dumps(meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{type(task).__name__}.state() gave a meta that JSON cannot hold: {error}") from None


def checked(task: Task, answer: Any) -> tuple[Mapping[str, Mapping[str, Tensor]], Mapping[str, Any]]:
    """`answer`, of task.state(). Raises ValueError that names what in it cannot be saved."""
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Mapping) and set(answer[0]) == set(TENSOR_GROUPS)):
        shown = f"a {type(answer).__name__}" if not isinstance(answer, tuple) else f"{len(answer)} values, not the tensors by these names"
        raise ValueError(f"{type(task).__name__}.state() gave {shown}; it must give ({{'trainable': {{...}}, 'optimizer': {{...}}}}, meta)")
    for group, named in answer[0].items():
        for name, tensor in named.items():
            if not isinstance(name, str) or name == RESERVED or not _is_plain(tensor):
                what = f"tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
                shown = f"a {what} by the name {name!r} in {group!r}"
                wanted = f"dense tensors of a dtype that safetensors can hold, by names that are strings (and not {RESERVED!r})"
                raise ValueError(f"{type(task).__name__}.state() gave {shown}; it must give {wanted}")
    return answer


def _is_plain(value: object) -> bool:
    """Whether it is a tensor whose numbers lie in memory one after the other, once it is copied, and of a kind that can be kept."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        return False
    return _can_be_kept(value.dtype)


@functools.cache
def _can_be_kept(dtype: torch.dtype) -> bool:
    """Whether safetensors writes and reads such numbers: not complex128, for one."""
    try:
        return load(save({"": torch.zeros(1, device="cpu").to(dtype)}))[""].dtype == dtype
    except (KeyError, ValueError, TypeError, RuntimeError, SafetensorError):
        return False
