"""A Task of one's own: a small CNN on scikit-learn's digits gets the background, pause, resume and checkpoints for free."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colabtrain
from colabtrain.runtime.diary import Tail
from colabtrain.task import StepReport, inference

datasets = pytest.importorskip("sklearn.datasets")
pytestmark = pytest.mark.colab
SECONDS = 120.0


class Digits:
    """A CNN with Adam; each step draws its batch, and a shift of the pictures, from the global generators."""

    num_steps = 240

    def prepare(self) -> None:
        digits = datasets.load_digits()
        images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
        self.train, self.test = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])
        torch.manual_seed(0)
        numpy.random.seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
        self.adam = torch.optim.Adam(self.net.parameters(), lr=5e-3)

    def step(self, i: int, splits: int = 1) -> StepReport:
        chosen = torch.randint(len(self.train[0]), (64,))
        images = torch.roll(self.train[0][chosen], int(numpy.random.randint(-1, 2)), dims=3)
        labels, total = self.train[1][chosen], torch.zeros(())
        for a, b in pairwise(round(k * 64 / splits) for k in range(splits + 1)):
            loss = F.cross_entropy(self.net(images[a:b]), labels[a:b], reduction="sum") / 64
            loss.backward()
            total += loss.detach()
        self.adam.step()
        self.adam.zero_grad()
        return StepReport(loss={"digits": total})

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        moments = {f"{i}.{name}": value for i, state in self.adam.state_dict()["state"].items() for name, value in state.items()}
        return {"trainable": dict(self.net.state_dict()), "optimizer": moments}, {}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
        self.net.load_state_dict(tensors["trainable"])
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors["optimizer"].items():
            index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
        self.adam.load_state_dict({"state": state, "param_groups": self.adam.state_dict()["param_groups"]})

    def fingerprint(self) -> dict[str, Any]:
        return {"data": "digits", "net": str(self.net)}

    # Not asked for, but understood

    def evaluate(self) -> dict[str, Any]:
        with torch.no_grad():
            right = (self.net(self.test[0]).argmax(1) == self.test[1]).float().mean()
        return {"split": "test", "accuracy": right, "text": f"accuracy {right:.3f}"}

    def borrow(self) -> AbstractContextManager[nn.Module]:
        return inference(self.net)


def start(folder: Path, task: Any = None, **options: Any) -> colabtrain.Run:
    return colabtrain.start(task=task or Digits(), run_dir=folder, display=False, **options)


def losses(folder: Path) -> dict[int, float]:
    return {e["step"]: e["loss"]["digits"] for e in Tail(folder / "diary.jsonl").new() if e["event"] == "step"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder).wait(SECONDS) == "finished"
    return folder


def test_it_learns_in_the_background(undisturbed: Path) -> None:
    (evaluation,) = [e for e in Tail(undisturbed / "diary.jsonl").new() if e["event"] == "evaluation"]
    assert evaluation["accuracy"] > 0.9
    assert list(losses(undisturbed)) == list(range(1, 241))


class Held(Digits):
    """Waits before step `at` until the test has pressed what it wants to press."""

    def __init__(self, at: int) -> None:
        self.at, self.reached, self.go = at, threading.Event(), threading.Event()

    def step(self, i: int, splits: int = 1) -> StepReport:
        if i == self.at:
            self.reached.set()
            assert self.go.wait(SECONDS)
        return super().step(i, splits)


def test_stopped_borrowed_from_and_resumed_it_is_the_same_run(undisturbed: Path, tmp_path: Path) -> None:
    task = Held(30)
    run = start(tmp_path, task)
    assert task.reached.wait(SECONDS)
    run.stop(wait=False)
    task.go.set()
    assert run.wait(SECONDS) == "stopped" and run.step == 31

    task = Held(70)  # as on a new machine
    run = start(tmp_path, task)
    assert task.reached.wait(SECONDS)
    borrower = threading.Thread(target=use, args=(run,))
    borrower.start()
    run.pause()
    task.go.set()
    borrower.join(SECONDS)
    run.resume()
    assert run.wait(SECONDS) == "finished"
    assert losses(tmp_path) == losses(undisturbed)
    log = (tmp_path / "train.log").read_text()
    assert "resumed from step 31" in log


def use(run: colabtrain.Run) -> None:
    with run.borrow() as net:
        assert not net.training and not torch.is_grad_enabled()
        net(torch.randn(5, 1, 8, 8))
        numpy.random.rand(3)
        with torch.enable_grad():
            net(torch.randn(5, 1, 8, 8)).sum().backward()
        net.requires_grad_(False)


def test_a_step_that_runs_out_of_memory_is_taken_in_parts(tmp_path: Path) -> None:
    class Hungry(Digits):
        num_steps = 5

        def step(self, i: int, splits: int = 1) -> StepReport:
            if i == 3 and splits < 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().step(i, splits)

    assert start(tmp_path, Hungry()).wait(SECONDS) == "finished"
    assert [e["splits"] for e in Tail(tmp_path / "diary.jsonl").new() if e["event"] == "oom"] == [1, 2]


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_parts_have_the_gradient_of_the_whole(splits: int) -> None:
    tasks = []
    for n in (1, splits):
        tasks.append(task := Digits())
        task.prepare()
        task.adam.zero_grad = lambda: None  # type: ignore[method-assign]
        task.step(0, n)
    for a, b in zip(tasks[0].net.parameters(), tasks[1].net.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)
