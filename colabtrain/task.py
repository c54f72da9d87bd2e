"""Leaf: what the runtime needs to know of a training job. Ours (elastic decisions) is one case; any PyTorch loop fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


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


class Task(Protocol):
    """A training job. All methods but fingerprint() run on the worker thread."""

    @property
    def num_steps(self) -> int:
        """Number of logical steps of the whole run; valid after prepare()."""
        ...

    def prepare(self) -> None:
        """Get ready from scratch: weights at their start, data planned. Called once, before load() and step()."""
        ...

    def step(self, i: int, splits: int = 1) -> StepReport:
        """Forward, backward and update of logical step i (from 0), in `splits` parts with the same gradient."""
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
