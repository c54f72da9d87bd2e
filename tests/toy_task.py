"""A Task of a few lines (a linear fit with Adam and noise from the global generator), for tests of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from colabtrain.task import StepReport, inference


class ToyTask:
    """before_step(i) runs at the start of each step; it may wait, raise, or press a control."""

    def __init__(self, num_steps: int = 20, before_step: Callable[[int], None] = lambda i: None, mark: str = "a") -> None:
        self.num_steps, self.before_step, self.mark = num_steps, before_step, mark
        self.grad_enabled: bool | None = None

    def prepare(self) -> None:
        self.weight = torch.zeros(3, requires_grad=True)
        self.adam = torch.optim.Adam([self.weight], lr=0.1)

    def step(self, i: int, splits: int = 1) -> StepReport:
        self.before_step(i)
        self.grad_enabled = torch.is_grad_enabled()
        loss = (self.weight - torch.tensor([1.0, 2.0, 3.0]) - torch.randn(3)).square().sum()
        loss.backward()
        self.adam.step()
        self.adam.zero_grad()
        return StepReport(loss={"toy": loss}, lr={"all": 0.1}, tokens=3, questions=1)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        return {"trainable": {"weight": self.weight}, "optimizer": dict(self.adam.state.get(self.weight, {}))}, {"mark": self.mark}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
        assert meta["mark"] == self.mark
        if set(tensors["trainable"]) != {"weight"}:
            raise ValueError(f"unknown tensors {sorted(tensors['trainable'])}")
        with torch.no_grad():
            self.weight.copy_(tensors["trainable"]["weight"])
        self.adam.state[self.weight] = {name: tensor.clone() for name, tensor in tensors["optimizer"].items()}

    def fingerprint(self) -> dict[str, Any]:
        return {"mark": self.mark}


class LentTask(ToyTask):
    """One with a model to lend. Its dropout draws from the global generator, and `modes` has what mode each step ran in."""

    def prepare(self) -> None:
        self.modes: list[bool] = []
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(0.1)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, i: int, splits: int = 1) -> StepReport:
        self.before_step(i)
        self.modes.append(self.model.train().training)
        self.sgd.zero_grad()
        loss = (self.model(torch.randn(4, 3)) - 1).square().mean()
        loss.backward()
        self.sgd.step()
        return StepReport(loss={"toy": loss})

    def borrow(self) -> AbstractContextManager[nn.Module]:
        return inference(self.model)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        return {"trainable": dict(self.model.named_parameters()), "optimizer": {}}, {"mark": self.mark}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
        self.model.load_state_dict(dict(tensors["trainable"]))
