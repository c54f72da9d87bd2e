"""Where a step that is not finite went wrong, as one sentence for people.

Runs when a run is about to end because too many steps in a row were skipped, so it may be slow, but it changes nothing:
weights, gradients, modes, hooks and the random state are as before. It looks, in this order, for a parameter that is
not finite; for the first module, in the order of execution, whose output is not finite, record by record and
sub-network by sub-network; and for the first gradient, in the order of the backward pass, that is not finite.

The backbone reads the weights of attention and feed-forward projections itself, so these have no output that could be
seen; what they break is seen at the next norm, and the sentence says that the cause lies before it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from colabtrain.config import SubnetConfig, TrainConfig
from colabtrain.elastic.batches import build
from colabtrain.elastic.optimizer import Optimizer
from colabtrain.elastic.step import accumulate, split
from colabtrain.records.schema import Record


def first_bad_module(model: Any, records: Sequence[Record], subnets: Mapping[str, SubnetConfig], config: TrainConfig, i: int) -> str:
    """Say what is the first thing of step i (from 0) over `records`, as trained on, that is not finite.

    Returns "not reproduced: ..." where weights, outputs and gradients are all finite.
    """
    with model.lent():
        return (
            _bad_parameter(model)
            or _bad_output(model, records, subnets, config, i)
            or _bad_gradient(model, records, subnets, config, i)
            or "not reproduced: the weights, and all outputs and gradients of this batch, are finite"
        )


def _bad_parameter(model: Any) -> str | None:
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            bad = int((~torch.isfinite(parameter)).sum())
            what = "trained" if parameter.requires_grad else "frozen"
            return f"the {what} parameter {name} is not finite ({bad:,} of {parameter.numel():,} values)"
    return None


@torch.no_grad()
def _bad_output(model: Any, records: Sequence[Record], subnets: Mapping[str, SubnetConfig], config: TrainConfig, i: int) -> str | None:
    dropout = (config.lora_dropout, config.seed, i) if config.lora_dropout else None
    found = list[str]()

    def see(name: str, inputs: Any, output: Any) -> None:
        if not found and not all(map(_is_finite, _tensors(output))):
            before = "" if all(map(_is_finite, _tensors(inputs))) else ", and so is its input: the cause is the projection just before it"
            found.append(f"the output of module {name} is the first that is not finite{before}")

    for slot, record in enumerate(records):
        batch = build(model, [record], subnets, slot)
        for name, fc in subnets.items():
            with model.width(fc), _after_each_module(model, see):
                model.scores(batch.packed[fc.n_latents], fc, dropout)
            if found:
                return f"{found[0]} (sub-network {name!r}, record {record.id!r}, number {slot + 1} of the batch's {len(records)})"
    return None


def _bad_gradient(model: Any, records: Sequence[Record], subnets: Mapping[str, SubnetConfig], config: TrainConfig, i: int) -> str | None:
    """Go through the step's own backward pass, one record at a time, with gradients of its own."""
    parameters, bad, bad_outputs = model.trainable(), list[str](), list[str]()

    def watch(name: str, into: list[str]) -> Callable[[Tensor], None]:
        return lambda gradient: None if into or _is_finite(gradient) else into.append(name)

    def watch_outputs(name: str, _: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(watch(name, bad_outputs))

    kept = {name: parameter.grad for name, parameter in parameters.items()}
    hooks = [parameter.register_hook(watch(name, bad)) for name, parameter in parameters.items()]
    unscaled = cast(Optimizer, SimpleNamespace(scaler=torch.amp.GradScaler(enabled=False)))
    try:
        for parameter in parameters.values():
            parameter.grad = None
        with torch.enable_grad(), _after_each_module(model, watch_outputs):
            num_questions = sum(len(record.qs) for record in records)
            accumulate(model, unscaled, split(records, len(records)), num_questions, subnets, config, i)
    finally:
        for hook in hooks:
            hook.remove()
        for name, parameter in parameters.items():
            parameter.grad = kept[name]
    if not bad:
        return None
    origin = f", and comes from behind module {bad_outputs[0]}" if bad_outputs else ""
    return f"all outputs are finite, but not all gradients; backwards from the loss the first bad one is that of {bad[0]}{origin}"


@contextmanager
def _after_each_module(model: Any, see: Callable[[str, Any, Any], None]) -> Generator[None]:
    """Call `see` with the name, inputs and output of each module of `model` that is called."""

    def hook_for(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda _, inputs, output: see(name, inputs, output)

    hooks = [module.register_forward_hook(hook_for(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _is_finite(tensor: Tensor) -> bool:
    """Without a copy of the tensor, which may be most of the memory: NaN and infinities show in its extremes."""
    return not tensor.is_floating_point() or tensor.numel() == 0 or bool(torch.isfinite(torch.stack(tensor.detach().aminmax())).all())
