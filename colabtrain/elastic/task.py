"""ElasticTask: records and a model as a training job for the runtime. Glue; the work is done in the modules beside."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colabtrain.config import HEADS_LR, LORA_LR, RunConfig, SubnetConfig, TrainConfig, settings
from colabtrain.device import forget, free_bytes, is_dead
from colabtrain.elastic import evaluate, report
from colabtrain.elastic.batches import Schedule, capped, estimated_length, plan_record, planned_length
from colabtrain.elastic.calibrate import calibrate
from colabtrain.elastic.diagnose import first_bad_module
from colabtrain.elastic.optimizer import Optimizer
from colabtrain.elastic.own_model import OwnPlan
from colabtrain.elastic.step import Part, accumulate, split
from colabtrain.mmjev.adapter import save_adapter
from colabtrain.mmjev.backbone import layers_to_checkpoint, num_wide_layers
from colabtrain.mmjev.model import MMJev
from colabtrain.mmjev.pretrained import Pretrained
from colabtrain.records.caps import cap_record
from colabtrain.records.schema import Record, content_digest
from colabtrain.records.selection import Selection
from colabtrain.task import StepReport


class ElasticTask:
    """Self-distillation of a model's sub-networks over a selection of records."""

    def __init__(
        self, model: Any, selection: Selection, train: TrainConfig, run: RunConfig, start_from: Callable[[Any], object] | None = None
    ) -> None:
        """model: an MMJev, an OwnModel, or a Pretrained whose weights are loaded in prepare(). start_from(model) may set
        the trained parts before the first step; a checkpoint overrides it."""
        rates: Mapping[str, float] = getattr(model, "rates", {})
        self.config = dataclasses.replace(
            train,
            lr_lora=rates.get("lr_lora", LORA_LR) if train.lr_lora is None else train.lr_lora,
            lr_heads=rates.get("lr_heads", HEADS_LR) if train.lr_heads is None else train.lr_heads,
        )
        self.model, self.selection, self.run, self._start_from = model, selection, run, start_from
        self.say: Callable[[str], None] = lambda line: None
        self.subnets: dict[str, SubnetConfig] = dict(train.subnets or model.default_subnets())
        self.records = selection.train
        self._baselines: dict[str, Any] | None = None
        self._held_out = selection.held_out[: run.max_eval_records]
        self._aside: set[tuple[int, int]] = set()  # (step, slot) of records that do not fit
        self._current: Part | None = None
        self._adapters_checked = False
        self._given = model  # a Pretrained has no weights, so it may stay
        self._adapter_dir = Path(run.adapter_dir).absolute() if run.adapter_dir else None  # a cell may change the working directory
        self._identity: dict[str, Any] | None = None
        self._fingerprint: dict[str, Any] | None = None
        self._content: str | None = None

    def check(self) -> None:
        """Raise ValueError naming the first sub-network the model cannot run, or record it cannot read.

        Changes nothing, so that it may be called before any thread starts.
        """
        self.model.validate(self.subnets)
        if not hasattr(self.model, "check_state"):
            return
        for record in (*self.records, *self.selection.calibration, *self._held_out):
            try:
                self.model.check_state(record.state)
            except ValueError as error:
                raise ValueError(f"record {record.id!r} of task {record.task!r}: {error}") from None

    @property
    def num_steps(self) -> int:
        return self.run.steps or self.schedule.num_steps(self.run.epochs or 1)

    def prepare(self) -> None:
        config = self.config
        if isinstance(self.model, Pretrained):
            self.model = self.model.load(self.say)
        self.model.configure(self.subnets, config.lora_r, config.lora_alpha)
        self.model.reset_trainable(config.seed)
        if self._start_from is not None:
            self._start_from(self.model)
        self.model.train()
        if isinstance(self.model, MMJev):
            self._layers_by_memory = layers_to_checkpoint(self.model.lm, config.token_budget, free_bytes(self.model.device))
        self.optimizer = Optimizer(self.model.trainable(), config, fp16=self.model.matmul_dtype is torch.float16)
        lengths = [self._length(record) for record in self.records]
        self.schedule = Schedule(lengths, config.batch_size, config.token_budget, config.seed)

    def _choose_checkpoint_layers(self, splits: int) -> None:
        """What memory needs or the person says; a retry recomputes all layers, which changes no gradient."""
        if isinstance(self.model, MMJev):
            if splits > 1:
                chosen = num_wide_layers(self.model.lm.config)
            elif (chosen := self.run.checkpoint_layers) is None:
                chosen = self._layers_by_memory
            self.model.checkpoint_layers = frozenset(range(chosen))

    def _length(self, record: Record) -> int:
        record = cap_record(record, self.config.max_state_chars)
        plan = plan_record(self.model, record, self.subnets)
        if isinstance(plan, OwnPlan):
            return plan.num_tokens or estimated_length(record)
        return planned_length(plan, record.qs, self.config.max_options)

    # A step

    def step(self, i: int, splits: int = 1) -> StepReport:
        try:
            return self._step(i, splits)
        except BaseException as error:
            if not is_dead(error):
                self.optimizer.abandon()
            raise

    def _step(self, i: int, splits: int) -> StepReport:
        self._current = None  # or an earlier attempt's record would be blamed
        self.model.train()  # a cell may have called eval()
        self._choose_checkpoint_layers(splits)
        self.optimizer.adamw.zero_grad(set_to_none=True)  # a cell may have called backward()
        rates = self.optimizer.rates_at(i, self.num_steps)
        epoch, indices = self.schedule.locate(i)
        parts = [part for part in split(self._records(epoch, indices), splits) if (i, part[0]) not in self._aside]
        if not parts:
            return StepReport(loss={}, lr=rates, epoch=epoch)
        records = [record for _, members in parts for record in members]
        num_questions = sum(len(record.qs) for record in records)
        losses, num_tokens = accumulate(self.model, self.optimizer, self._in_turn(parts), num_questions, self.subnets, self.config, i)
        self._check_adapters()
        scale = self.optimizer.scale()
        norms, skipped = self.optimizer.step(rates)
        return StepReport(
            loss={name: parts["total"] for name, parts in losses.items()},
            parts={name: {part: v for part, v in parts.items() if part != "total"} for name, parts in losses.items()},
            lr=rates,
            grad_norm=norms,
            epoch=epoch,
            tokens=num_tokens or sum(self.schedule.lengths[index] for index in indices),
            questions=num_questions,
            scale=scale,
            skipped=skipped,
        )

    def _records(self, epoch: int, indices: Sequence[int]) -> list[Record]:
        return [capped(self.records[index], self.config, epoch) for index in indices]

    def _in_turn(self, parts: Sequence[Part]) -> Iterator[Part]:
        """`parts`, noting which one is worked on: where memory ran out."""
        for self._current in parts:
            yield self._current
        self._current = None

    def _check_adapters(self) -> None:
        if self._adapters_checked:
            return
        gradients = [parameter.grad is not None for name, parameter in self.model.trainable().items() if "lora_" in name]
        if gradients and not any(gradients):
            raise ValueError(
                f"no adapter of {self.model.name} got a gradient: its forward does not call the modules that hold them; give lora_r=0"
            )
        self._adapters_checked = True

    def contents(self, i: int) -> list[dict[str, Any]]:
        _, indices = self.schedule.locate(i)
        records = ((self.records[index], self.schedule.lengths[index]) for index in indices)
        return [{"id": record.id, "task": record.task, "tokens": tokens} for record, tokens in records]

    def set_aside(self, i: int) -> dict[str, Any] | None:
        """Only for this step: what does not fit on this machine today is no state, and is tried again in the next epoch."""
        if self._current is None:
            return None
        slot, self._current = self._current[0], None
        self._aside = {key for key in self._aside if key[0] == i} | {(i, slot)}
        return self.contents(i)[slot]

    def first_bad_module(self, i: int) -> str:
        epoch, indices = self.schedule.locate(i)
        return first_bad_module(self.model, self._records(epoch, indices), self.subnets, self.config, i)

    # What is saved

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        trainable = {name: parameter.detach() for name, parameter in self.model.trainable().items()}
        return {"trainable": trainable, "optimizer": self.optimizer.tensors()}, self.optimizer.meta()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
        parameters, saved = self.model.trainable(), tensors["trainable"]
        wrong = sorted(set(parameters) ^ set(saved))
        wrong += [name for name in parameters if name in saved and saved[name].shape != parameters[name].shape]
        if wrong:
            raise ValueError(f"the checkpoint's trainable tensors do not fit this model; missing, extra or misshapen: {wrong[:8]}")
        self.optimizer.load(tensors["optimizer"], meta)
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])

    def fingerprint(self) -> dict[str, Any]:
        if self._fingerprint is None:
            shapes = sorted((name, list(parameter.shape)) for name, parameter in self.model.trainable().items())
            self._fingerprint = {**self._learned(self.model), "trainable": hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]}
        return self._fingerprint

    def before_it_was_recorded(self) -> dict[str, Any]:
        """A field that TrainConfig did not have yet was as its default is."""
        return {f"config.{name}": value for name, value in settings(TrainConfig()).items()}

    def identity(self) -> dict[str, Any]:
        """What is learned from what, as far as it is known before prepare(): the same before and after."""
        if self._identity is None:
            self._identity = self._learned(self._given)
        return self._identity

    def _learned(self, model: Any) -> dict[str, Any]:
        if self._content is None:
            data = hashlib.sha256()
            for record in self.records:
                data.update(f"{record.id}/{content_digest(record.state, record.qs, record.targets)}\n".encode())
            self._content = f"{len(self.records)} records, sha256 {data.hexdigest()[:12]}"
        config = settings(dataclasses.replace(self.config, subnets=self.subnets))
        return {
            **{f"model.{name}": value for name, value in model.fingerprint().items()},
            "data": self._content,
            **{f"config.{name}": value for name, value in config.items()},
        }

    # Between steps

    def borrow(self) -> AbstractContextManager[Any]:
        return self.model.lent()

    def evaluate(self) -> dict[str, Any]:
        if not self._held_out:
            return {}
        results = evaluate.evaluate(self.model, self._held_out, self.subnets, self.config)
        if self._baselines is None:
            self._baselines = evaluate.baselines(self._held_out, evaluate.priors(self.records))
        split = self.selection.held_out_name
        nll = ", ".join(f"{name} {result['overall']['nll']:.4f}" for name, result in results.items())
        text = f"nll on {split} {nll} (class prior {self._baselines['prior']['overall']['nll']:.4f})"
        return {"text": text, "split": split, "results": results, "baselines": self._baselines}

    def ending(self, folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Eval mode; temperatures from the calibration records; the adapter on disk."""
        self.model.eval()
        reports: dict[str, Any] = {}
        try:
            reports = dict(calibrate(self.model, self.selection.calibration, self.subnets, self.config))
            n = f"{len(self.selection.calibration):,}"
            yield (
                "calibration",
                f"calibrated on {n} records: {'; '.join(map(report.change, reports, reports.values()))}",
                {"results": reports},
            )
        except Exception as error:  # it must not cost the adapter
            if is_dead(error):
                raise
            forget(error)
            yield "calibration_failed", f"no temperatures: {type(error).__name__}: {error}", {}
        if isinstance(self.model, MMJev) and self.model.adapters:
            path = save_adapter(self.model, self._adapter_dir or folder / "adapter", reports, self.subnets)
            yield "adapter_saved", f"adapter saved in {path}", {"path": str(path)}
        else:
            why = "it has no LoRA" if isinstance(self.model, MMJev) else "it is not an MMJev"
            yield "adapter_not_saved", f"no adapter folder is made of {self.model.name}, for {why}; the checkpoint has what it learned", {}

    def describe(self) -> list[str]:
        model = f"model {self.model.name}: {sum(p.numel() for p in self.model.trainable().values()):,} trainable parameters, "
        return [
            model + f"sub-networks {', '.join(self.subnets)}",
            *report.of_data(self.selection, self._held_out, self.config, self.num_steps),
        ]
