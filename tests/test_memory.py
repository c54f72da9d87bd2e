"""Running out of memory, at any point of a step and in any shape: nothing is lost, nothing is half done, and it is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import events

import colabtrain
from colabtrain import device
from colabtrain.config import RunConfig, TrainConfig
from colabtrain.elastic.optimizer import Optimizer
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev
from colabtrain.records.selection import select
from colabtrain.runtime.retry import MAX_SPLITS

SECONDS = 120.0
OPTIONS: dict[str, Any] = {"batch_size": 4, "lora_dropout": 0.2}

SHAPES: dict[str, Callable[[], Exception]] = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "driver": lambda: RuntimeError("CUDA error: out of memory"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cublas handle": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cudnn": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    ),
    "windows": lambda: RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 137438953472 bytes."),
    "python": MemoryError,
    "mps": lambda: RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
}


@pytest.mark.colab
@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_each_shape_is_known(make: Callable[[], Exception]) -> None:
    assert device.is_out_of_memory(make()) and not device.is_dead(make())
    wrapped = KeyError("in a hook")
    wrapped.__cause__ = make()
    assert device.is_out_of_memory(wrapped)


@pytest.mark.colab
@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory is not what a ValueError means"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        KeyError("x"),
    ],
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not device.is_out_of_memory(error)
    assert device.is_dead(error) is ("device-side assert" in str(error))


def test_the_allocator_s_own_refusal_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert device.is_out_of_memory(caught.value)


# One step


def prepared(fp16: bool = False) -> ElasticTask:
    train = TrainConfig(seed=1, **OPTIONS)
    task = ElasticTask(MMJev.tiny(0), select(help_desk(24), train), train, RunConfig(steps=8))
    task.prepare()
    if fp16:  # the scaler of a card without bf16, over fp32 weights
        task.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for i in range(2):
        task.step(i)
    return task


def everything(task: ElasticTask) -> dict[str, Any]:
    tensors, meta = task.state()
    return {**{f"{group}/{name}": tensor.clone() for group in tensors for name, tensor in tensors[group].items()}, "meta": meta}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a if name != "meta") and a["meta"] == b["meta"]


class Fault:
    """Raises on the n-th call of what it wraps, before or after the real thing, once."""

    def __init__(self, real: Callable[..., Any], make: Callable[[], Exception], call: int = 1, after: bool = False) -> None:
        self.real, self.make, self.left, self.after, self.fired = real, make, call, after, False

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        due = self.left == 0
        result = self.real(*arguments, **named) if not due or self.after else None
        if due:
            self.fired = True
            raise self.make()
        return result


PLACES: dict[str, tuple[Any, str, int, bool]] = {  # owner, name, which call, after the real one
    "after the first forward": (MMJev, "scores", 1, True),
    "after the second forward": (MMJev, "scores", 2, True),
    "after the first backward": (torch.Tensor, "backward", 1, True),
    "after the last backward": (torch.Tensor, "backward", 2, True),
    "between unscale and update": (Optimizer, "_clip", 1, False),
    "before the first group's kernel": (torch, "_fused_adamw_", 1, False),
    "after the first group's kernel": (torch, "_fused_adamw_", 1, True),
    "after the second group's kernel": (torch, "_fused_adamw_", 2, True),
    "after the optimizer": (torch.optim.AdamW, "step", 1, True),
    "in the scaler's update": (torch.amp.GradScaler, "update", 1, False),
}


@pytest.mark.parametrize("fp16", [False, True], ids=["fp32", "scaler"])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_anywhere_leaves_nothing_half_done(place: str, fp16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, call, after = PLACES[place]
    task, undisturbed = prepared(fp16), prepared(fp16)
    before = everything(task)
    fault = Fault(getattr(owner, name), SHAPES["torch"], call, after)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lambda *arguments, **named: fault(*arguments, **named))
        with pytest.raises(torch.OutOfMemoryError):
            task.step(2)
    assert fault.fired
    assert same(before, everything(task))
    assert all(parameter.grad is None for parameter in task.model.trainable().values())
    for i, splits in ((2, 2), (3, 1)):  # the retry, and the step after it
        reports = [each.step(i, splits) for each in (task, undisturbed)]
        assert reports[0].loss == reports[1].loss and reports[0].grad_norm == reports[1].grad_norm
    assert same(everything(task), everything(undisturbed))


# A run


def start(folder: Path, model: MMJev | None = None, **options: Any) -> colabtrain.Run:
    options = {**OPTIONS, "steps": 5, "run_dir": folder, "display": False, "log_every": 1, **options}
    return colabtrain.start(model or MMJev.tiny(0), help_desk(24), **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder).wait(SECONDS) == "finished"
    return folder


class Scarce(MMJev):
    """fits(record slots of the row, number of the call) says whether a forward finds memory; False: it does not."""

    fits: Callable[[list[int], int], bool]
    calls = 0
    shape = "torch"

    def scores(self, packed: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        self.calls += 1
        result = super().scores(packed, *arguments, **named)
        if torch.is_grad_enabled() and not self.fits(packed.layout.record.unique().tolist(), self.calls):
            raise SHAPES[self.shape]()
        return result


def scarce(fits: Callable[[list[int], int], bool], shape: str = "torch") -> Scarce:
    model = MMJev.tiny(0)
    model.__class__ = Scarce
    assert isinstance(model, Scarce)
    model.fits, model.shape = fits, shape
    return model


@pytest.mark.colab
@pytest.mark.parametrize("shape", ["torch", "cublas", "cpu"])
def test_a_batch_that_does_not_fit_is_trained_in_halves(shape: str, undisturbed: Path, tmp_path: Path) -> None:
    """At most two records fit at once: every step is retried, none is left out, and the numbers are the same: the first loss to
    1e-5, later ones to what AdamW, which divides a gradient by its size, makes of the last bits of tiny ones."""
    run = start(tmp_path, scarce(lambda slots, call: len(slots) <= 2, shape))
    assert run.wait(SECONDS) == "finished"
    steps = events(tmp_path, "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5]
    for mine, theirs in zip(steps, events(undisturbed, "step"), strict=True):
        assert mine["lr"] == theirs["lr"] and mine["questions"] == theirs["questions"] and mine["tokens"] == theirs["tokens"]
        for name, loss in theirs["loss"].items():
            assert mine["loss"][name] == pytest.approx(loss, rel=1e-5 if mine["step"] == 1 else 2e-4), mine["step"]
    ooms = events(tmp_path, "oom")
    assert [event["step"] for event in ooms] == [1, 2, 3, 4, 5] and {event["splits"] for event in ooms} == {1}
    for event in ooms:
        assert 3 <= len(event["items"]) <= 4 and {item["task"] for item in event["items"]} == {"help_desk"}
        assert all(item["tokens"] > 0 and item["id"] for item in event["items"])
        assert str(SHAPES[shape]()).strip()[:20] in event["error"]
    assert "step 1: out of memory in 1 part (4 items of help_desk" in ooms[0]["text"] and "trying again in 2 parts" in ooms[0]["text"]
    assert "5 times out of memory" in (tmp_path / "train.log").read_text()
    assert not events(tmp_path, "set_aside")


def test_many_retries_do_not_flood_the_log(tmp_path: Path) -> None:
    assert start(tmp_path, scarce(lambda slots, call: len(slots) <= 2), steps=52, max_eval_records=1).wait(SECONDS) == "finished"
    ooms = events(tmp_path, "oom")
    assert len(ooms) == 52 and [i + 1 for i, event in enumerate(ooms) if "text" in event] == [1, 2, 3, 4, 5, 50]
    assert "That is 5 times: a smaller batch_size or token_budget would save the failed tries" in ooms[4]["text"]


def test_a_due_checkpoint_is_not_skipped(tmp_path: Path) -> None:
    run = start(tmp_path, scarce(lambda slots, call: len(slots) <= 2), checkpoint_every=1)
    assert run.wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path, "checkpoint_saved")] == [1, 2, 3, 4, 5]


def test_a_record_that_does_not_fit_alone_is_set_aside_and_named(tmp_path: Path) -> None:
    """The third record of each batch never fits: the others are trained with the mean over their own questions."""
    run = start(tmp_path, scarce(lambda slots, call: 2 not in slots), steps=2)
    assert run.wait(SECONDS) == "finished"
    aside = events(tmp_path, "set_aside")
    assert [event["step"] for event in aside] == [1, 2]
    for event, oom in zip(aside, [e for e in events(tmp_path, "oom") if e["splits"] == 4], strict=True):
        assert event["item"] == oom["items"][2]
        assert event["item"]["id"] in event["text"] and "does not fit into memory alone" in event["text"]
    assert [event["questions"] for event in events(tmp_path, "step")] == [9, 9]
    assert [event["splits"] for event in events(tmp_path, "oom")] == [1, 2, 4] * 2
    assert "2 items set aside" in (tmp_path / "train.log").read_text()

    task = prepared()  # the same gradient as the three others alone
    task._aside = {(2, 2)}
    report = task.step(2, 4)
    assert report.questions == 9 and all(torch.isfinite(value) for value in report.loss.values())


def test_a_lone_record_is_tried_with_all_layers_recomputed_before_it_is_set_aside(tmp_path: Path) -> None:
    """The longest records get a batch of their own, which has no halves; there is memory to save in it all the same."""
    model = scarce(lambda slots, call: len(model.checkpoint_layers) == 4)
    assert start(tmp_path, model, batch_size=1, steps=2).wait(SECONDS) == "finished"
    assert not events(tmp_path, "set_aside") and [event["questions"] for event in events(tmp_path, "step")] == [3, 3]
    assert [event["splits"] for event in events(tmp_path, "oom")] == [1, 1]
    assert "(1 item of help_desk" in (text := events(tmp_path, "oom")[0]["text"]) and text.endswith("trying again, sparing memory")

    never = scarce(lambda slots, call: call > 2 * 5)  # long records may come one after another, and stop nothing
    assert start(tmp_path / "never", never, batch_size=1, steps=7).wait(SECONDS) == "finished"
    assert len(events(tmp_path / "never", "set_aside")) == 5


def test_memory_that_runs_out_before_the_first_part_blames_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier attempt worked on is not what the last one failed at."""
    task = prepared()
    for owner, name, splits in ((MMJev, "scores", 2), (Optimizer, "rates_at", 4)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, Fault(getattr(owner, name), SHAPES["torch"]))
            with pytest.raises(torch.OutOfMemoryError):
                task.step(2, splits)
    assert task.set_aside(2) is None


def test_a_record_is_set_aside_for_its_step_alone(tmp_path: Path) -> None:
    """What does not fit today is no state: the next step tries everything again."""
    model = scarce(lambda slots, call: not (2 in slots and model.step_number == 1))
    model.step_number = 0

    real = ElasticTask.step

    def step(self: ElasticTask, i: int, splits: int = 1) -> Any:
        model.step_number = i
        return real(self, i, splits)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ElasticTask, "step", step)
        run = start(tmp_path, model, steps=4)
        assert run.wait(SECONDS) == "finished"
    assert [event["questions"] for event in events(tmp_path, "step")] == [12, 9, 12, 12]


def test_a_machine_on_which_nothing_fits_is_an_end_not_a_loop(tmp_path: Path) -> None:
    model = scarce(lambda slots, call: False)
    with pytest.raises(colabtrain.RunFailed, match=r"no item of the last 20 steps .* fits into memory, even alone; lower max_state_chars"):
        start(tmp_path, model, steps=30, batch_size=2).wait(SECONDS)
    assert model.calls <= 20 * (1 + 2)  # at once, in two parts, and then once for each of two records
    assert 20 < len(events(tmp_path, "set_aside")) <= 40


def test_memory_that_runs_out_in_the_optimizer_blames_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(*_: Any) -> None:
        raise SHAPES["torch"]()

    monkeypatch.setattr(Optimizer, "_update", update)
    with pytest.raises(colabtrain.RunFailed, match="MemoryError: step 1 does not fit into memory in 4 parts either"):
        start(tmp_path).wait(SECONDS)
    assert not events(tmp_path, "set_aside") and len(events(tmp_path, "oom")) == 3


def test_a_task_that_cannot_name_its_items_is_split_up_to_a_bound(tmp_path: Path) -> None:
    from toy_task import ToyTask

    tried: list[int] = []

    class Hungry(ToyTask):
        def step(self, i: int, splits: int = 1) -> Any:
            tried.append(splits)
            raise SHAPES["torch"]()

    run = colabtrain.start(task=Hungry(3), run_dir=tmp_path, display=False)
    with pytest.raises(colabtrain.RunFailed, match="does not fit into memory in 64 parts either"):
        run.wait(SECONDS)
    assert tried == [1, 2, 4, 8, 16, 32, MAX_SPLITS]
    assert [event["splits"] for event in events(tmp_path, "oom")] == tried


def test_counts_survive_a_resume(tmp_path: Path) -> None:
    assert start(tmp_path, scarce(lambda slots, call: len(slots) <= 2), steps=3).wait(SECONDS) == "finished"
    assert start(tmp_path, steps=5).wait(SECONDS) == "finished"
    assert "step 5/5" in (last := (tmp_path / "train.log").read_text()) and "3 times out of memory" in last.split("step 5/5")[1]


def test_an_evaluation_that_runs_out_of_memory_costs_no_training(tmp_path: Path) -> None:
    class Small(MMJev):
        def scores(self, *arguments: Any, **named: Any) -> torch.Tensor:
            if not torch.is_grad_enabled():
                raise SHAPES["cudnn"]()
            return super().scores(*arguments, **named)

    model = MMJev.tiny(0)
    model.__class__ = Small
    assert start(tmp_path, model, eval_every=2).wait(SECONDS) == "finished"
    assert [event["step"] for event in events(tmp_path, "evaluation_failed")] == [2, 4, 5]


# How many layers to recompute


def test_layers_are_recomputed_as_memory_needs_and_all_of_them_in_a_retry() -> None:
    from colabtrain.mmjev.backbone import layers_to_checkpoint, num_wide_layers

    lm = MMJev.tiny(0).lm
    assert num_wide_layers(lm.config) == 4  # of six; the last two read the keys of others
    chosen = [layers_to_checkpoint(lm, 6000, free) for free in (None, 2**40, 2**29, 2**28, 2**27, 0)]
    assert chosen[:2] == [0, 0] and chosen[-1] == 4
    assert chosen[1:] == sorted(chosen[1:]) and len(set(chosen)) > 2

    task = prepared()
    task.step(2)
    assert task.model.checkpoint_layers == frozenset()  # on the CPU none, unless a person says so
    task.step(3, 2)
    assert task.model.checkpoint_layers == frozenset(range(4))
    task.run = RunConfig(steps=8, checkpoint_layers=2)
    task.step(4)
    assert task.model.checkpoint_layers == frozenset(range(2))
