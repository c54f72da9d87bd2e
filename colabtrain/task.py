"""Leaf: what the runtime needs to know of a training job. Ours (elastic decisions) is one case; any PyTorch loop fits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class StepReport:
    """What one step did. Tensors are read later, several steps at once, so that a step needs no host sync.

    loss: total by sub-network (or any name); parts: its unweighted parts; lr: by parameter group; epoch counts from 0;
    skipped: the update was not made because the loss or gradient was not finite.
    """

    loss: Mapping[str, float | Tensor]
    parts: Mapping[str, Mapping[str, float | Tensor]] = field(default_factory=dict[str, Mapping[str, "float | Tensor"]])
    lr: Mapping[str, float] = field(default_factory=dict[str, float])
    grad_norm: Mapping[str, float | Tensor] = field(default_factory=dict[str, "float | Tensor"])
    epoch: int = 0
    tokens: int = 0
    questions: int = 0
    scale: float | Tensor | None = None
    skipped: bool | Tensor = False

    def __post_init__(self) -> None:
        for name in ("loss", "parts", "lr", "grad_norm"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise ValueError(f"StepReport({name}={value!r}) is a {type(value).__name__}; give a mapping such as {{'loss': value}}")


class Task(Protocol):
    """A training job. All methods but fingerprint() run on the worker thread."""

    # What else a Task may offer: borrow() (Borrows), evaluate() (Evaluates), describe() (Describes), ending() (Ends), say
    # (Says), contents() and set_aside() (Divides), first_bad_module() (Diagnoses), before_it_was_recorded() (Grows). A Task
    # without them trains all the same.

    @property
    def num_steps(self) -> int:
        """Number of logical steps of the whole run; valid after prepare()."""
        ...

    def prepare(self) -> None:
        """Get ready from scratch: weights at their start, data planned. Called once, before load() and step()."""
        ...

    def step(self, i: int, splits: int = 1) -> StepReport:
        """Forward, backward and update of logical step i (from 0), in `splits` parts with the same gradient.

        If it raises (out of memory, say), weights and optimizer must be as before the step: the loop then calls it
        again with more splits, or saves them. More splits than there are items is as many as there are items.
        """
        ...

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """({"trainable": {name: tensor}, "optimizer": {name: tensor}}, meta); meta is JSON. Tensors may be live."""
        ...

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
        """Take over what state() gave. Strict: a missing, extra or misshapen tensor raises ValueError naming it."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What must match for a resume to mean anything (JSON); valid after prepare()."""
        ...


@runtime_checkable
class Evaluates(Protocol):
    """A Task that can also measure itself; called every eval_every steps and at the end."""

    def evaluate(self) -> dict[str, Any]:
        """The fields of an `evaluation` event (JSON): split, results, baselines, and `text` for people; {}: nothing to say."""
        ...


@runtime_checkable
class Describes(Protocol):
    """A Task that has something to say once it is prepared."""

    def describe(self) -> list[str]:
        """Lines for the log: what is trained on what, and what was left out."""
        ...


@runtime_checkable
class Says(Protocol):
    """A Task with something to say while it gets ready: the loop sets `say`, which takes lines for the log."""

    say: Callable[[str], None]


@runtime_checkable
class Ends(Protocol):
    """A Task that has something to do when the last step is done."""

    def ending(self, folder: Path) -> Iterable[tuple[str, str, dict[str, Any]]]:
        """Leave the model ready for use, and in the run's folder what people keep. Gives (event, text, fields) for the diary."""
        ...


@runtime_checkable
class Grows(Protocol):
    """A Task whose fingerprint has more entries than that of its earlier versions."""

    def before_it_was_recorded(self) -> Mapping[str, Any]:
        """Entries that an old checkpoint's fingerprint may lack -> what held then (JSON)."""
        ...


@runtime_checkable
class Borrows(Protocol):
    """A Task whose model other threads may use between two steps; run.borrow() is the way to it."""

    def borrow(self) -> AbstractContextManager[Any]:
        """The model ready for inference; exactly as it was afterwards. Called between two steps, on the borrower's thread."""
        ...


@runtime_checkable
class Divides(Protocol):
    """A Task that can say what a step is made of, and leave out an item that alone does not fit into memory."""

    def contents(self, i: int) -> list[dict[str, Any]]:
        """The items of logical step i (JSON), such as {"id": ..., "task": ..., "tokens": ...}."""
        ...

    def set_aside(self, i: int) -> dict[str, Any] | None:
        """After a failed step(i, splits) with one item a part: leave the item that failed out of step i and return its
        contents() entry; None if the memory ran out elsewhere."""
        ...


@runtime_checkable
class Diagnoses(Protocol):
    """A Task that can find out why a step's loss or gradient is not finite."""

    def first_bad_module(self, i: int) -> str:
        """A sentence that names the first module of logical step i that is not finite. Changes nothing."""
        ...


@contextlib.contextmanager
def inference(module: nn.Module) -> Generator[nn.Module]:
    """`module` in eval mode; each submodule's mode, each parameter's requires_grad and gradient come back exactly."""
    modes = [(part, part.training) for part in module.modules()]
    learning = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    module.eval()
    for parameter, _, _ in learning:
        parameter.grad = None  # what a cell's backward() adds must not be added to a step's
    try:
        yield module
    finally:
        for part, mode in modes:
            part.training = mode
        for parameter, requires_grad, gradient in learning:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
