"""ElasticTask: records and a model as a training job for the runtime. Glue; the work is done in the modules beside."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from colabtrain.config import HEADS_LR, LORA_LR, RunConfig, SubnetConfig, TrainConfig
from colabtrain.elastic import evaluate
from colabtrain.elastic.batches import Schedule, capped, plan_record, planned_length
from colabtrain.elastic.optimizer import Optimizer
from colabtrain.elastic.step import accumulate
from colabtrain.records.caps import cap_record
from colabtrain.records.schema import Record, content_digest
from colabtrain.records.selection import Selection
from colabtrain.task import StepReport


class ElasticTask:
    """Self-distillation of a model's sub-networks over a selection of records."""

    def __init__(self, model: Any, selection: Selection, train: TrainConfig, run: RunConfig) -> None:
        rates: Mapping[str, float] = getattr(model, "rates", {})
        self.config = dataclasses.replace(
            train,
            lr_lora=rates.get("lr_lora", LORA_LR) if train.lr_lora is None else train.lr_lora,
            lr_heads=rates.get("lr_heads", HEADS_LR) if train.lr_heads is None else train.lr_heads,
        )
        self.model, self.selection, self.run = model, selection, run
        self.subnets: dict[str, SubnetConfig] = dict(train.subnets or model.default_subnets())
        self.records = selection.train
        self._baselines: dict[str, Any] | None = None
        self._held_out = selection.held_out[: run.max_eval_records]

    def check(self) -> None:
        """Raise ValueError naming the first sub-network the model cannot run, or record it cannot read.

        Changes nothing, so that it may be called before any thread starts.
        """
        self.model.validate(self.subnets)
        fc = next(iter(self.subnets.values()))
        for record in (*self.records, *self.selection.calibration, *self._held_out):
            if any(seg.kind != "text" for seg in record.state):
                try:
                    self.model.encode_state(record.state, fc)
                except ValueError as error:
                    raise ValueError(f"record {record.id!r} of task {record.task!r}: {error}") from None

    @property
    def num_steps(self) -> int:
        return self.run.steps or self.schedule.num_steps(self.run.epochs or 1)

    def prepare(self) -> None:
        config = self.config
        self.model.configure(self.subnets, config.lora_r, config.lora_alpha)
        self.model.reset_trainable(config.seed)
        self.model.train()
        parameters = self.model.trainable()
        fp16 = next(self.model.lm.parameters()).dtype is torch.float16
        self.optimizer = Optimizer(parameters, config, fp16)
        self.optimizer.adamw.zero_grad(set_to_none=True)  # an earlier run may have failed between backward and update
        lengths = [self._length(record) for record in self.records]
        self.schedule = Schedule(lengths, config.batch_size, config.token_budget, config.seed)
        self._fingerprint = self._make_fingerprint()

    def _length(self, record: Record) -> int:
        record = cap_record(record, self.config.max_state_chars)
        return planned_length(plan_record(self.model, record, self.subnets), record.qs, self.config.max_options)

    def step(self, i: int, splits: int = 1) -> StepReport:
        self.model.train()  # a cell may have called eval()
        epoch, indices = self.schedule.locate(i)
        records = [capped(self.records[index], self.config, epoch) for index in indices]
        losses, num_tokens = accumulate(self.model, self.optimizer, records, self.subnets, self.config, i, splits)
        rates = self.optimizer.rates_at(i, self.num_steps)
        norms, skipped = self.optimizer.step(rates)
        scaler = self.optimizer.scaler
        return StepReport(
            loss={name: parts["total"] for name, parts in losses.items()},
            parts={name: {part: v for part, v in parts.items() if part != "total"} for name, parts in losses.items()},
            lr=rates,
            grad_norm=norms,
            epoch=epoch,
            tokens=num_tokens,
            questions=sum(len(record.qs) for record in records),
            scale=scaler.get_scale() if scaler.is_enabled() else None,
            skipped=skipped,
        )

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
        return self._fingerprint

    def _make_fingerprint(self) -> dict[str, Any]:
        data = hashlib.sha256()
        for record in self.records:
            data.update(f"{record.id}/{content_digest(record.state, record.qs, record.targets)}\n".encode())
        config = dataclasses.asdict(self.config)
        config["subnets"] = {name: dataclasses.asdict(fc) for name, fc in self.subnets.items()}
        shapes = {name: list(parameter.shape) for name, parameter in self.model.trainable().items()}
        return {
            **{f"model.{name}": value for name, value in self.model.fingerprint().items()},
            "trainable": hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:12],
            "data": f"{len(self.records)} records, sha256 {data.hexdigest()[:12]}",
            **{f"config.{name}": value for name, value in config.items()},
        }

    def evaluate(self) -> dict[str, Any]:
        if not self._held_out:
            return {}
        self.model.eval()
        try:
            results = evaluate.evaluate(self.model, self._held_out, self.subnets, self.config)
        finally:
            self.model.train()
        if self._baselines is None:
            self._baselines = evaluate.baselines(self._held_out, evaluate.priors(self.records))
        split = self.selection.held_out_name
        nll = ", ".join(f"{name} {result['overall']['nll']:.4f}" for name, result in results.items())
        text = f"nll on {split} {nll} (class prior {self._baselines['prior']['overall']['nll']:.4f})"
        return {"text": text, "split": split, "results": results, "baselines": self._baselines}

    def describe(self) -> list[str]:
        questions = sum(len(record.qs) for record in self.records)
        lines = [
            f"model {self.model.name}: {sum(p.numel() for p in self.model.trainable().values()):,} trainable parameters, "
            f"sub-networks {', '.join(self.subnets)}",
            f"data: {len(self.records):,} records with {questions:,} questions to train on, {len(self._held_out):,} held out "
            f"({self.selection.held_out_name}), {len(self.selection.calibration):,} set aside for calibration",
        ]
        if unused := len(self.selection.held_out) - len(self._held_out):
            lines.append(f"left out: {unused:,} held-out records beyond max_eval_records={self.run.max_eval_records}")
        return lines + [f"left out: {n:,} of task {task!r}: {why}" for (why, task), n in self.selection.dropped.items()]
