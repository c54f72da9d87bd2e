"""AdamW over two groups (LoRA; heads with latents), its learning rate as a pure function of the step, clip and scaler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colabtrain.config import TrainConfig

MAX_WARMUP_STEPS, WARMUP_SHARE = 50, 0.05


def rate_factor(i: int, num_steps: int, warmup_steps: int | None) -> float:
    """Linear warm-up times cosine to 0 over the run; i counts from 0. No state: a resume needs only the step."""
    if warmup_steps is None:
        warmup_steps = max(1, min(MAX_WARMUP_STEPS, round(WARMUP_SHARE * num_steps)))
    warmup = min(1.0, (i + 1) / warmup_steps) if warmup_steps else 1.0
    return warmup * 0.5 * (1.0 + math.cos(math.pi * min(i, num_steps) / num_steps))


class Optimizer:
    """Update of the trainable parameters (name -> parameter); names with `lora_` form the group lora, others heads."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig, fp16: bool) -> None:
        assert config.lr_lora is not None and config.lr_heads is not None
        self.config, self.parameters = config, dict(parameters)
        members: dict[str, list[nn.Parameter]] = {"lora": [], "heads": []}
        for name, parameter in parameters.items():
            members["lora" if "lora_" in name else "heads"].append(parameter)
        self.members = {group: params for group, params in members.items() if params}
        self.rates = {"lora": config.lr_lora, "heads": config.lr_heads}
        groups = [{"params": params, "lr": self.rates[group]} for group, params in self.members.items()]
        device = next(iter(parameters.values())).device
        self.adamw = torch.optim.AdamW(groups, weight_decay=0.0, fused=device.type == "cuda")
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)

    def rates_at(self, i: int, num_steps: int) -> dict[str, float]:
        factor = rate_factor(i, num_steps, self.config.warmup_steps)
        return {group: self.rates[group] * factor for group in self.members}

    def step(self, rates: Mapping[str, float]) -> dict[str, Tensor]:
        """Clip and update at `rates`; clears the gradients. Returns the gradient norm of each group before the clip."""
        for group, settings in zip(self.members, self.adamw.param_groups, strict=True):
            settings["lr"] = rates[group]
        self.scaler.unscale_(self.adamw)
        norms = self._clip()
        self.scaler.step(self.adamw)
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        return norms

    def _clip(self) -> dict[str, Tensor]:
        if self.config.clip == "joint":
            everything = [parameter for params in self.members.values() for parameter in params]
            return {"all": nn.utils.clip_grad_norm_(everything, self.config.clip_norm)}
        return {group: nn.utils.clip_grad_norm_(params, self.config.clip_norm) for group, params in self.members.items()}

    def tensors(self) -> dict[str, Tensor]:
        """AdamW's state by parameter name and field; a parameter that never had a gradient has none."""
        return {
            f"{name}.{field}": value
            for name, parameter in self.parameters.items()
            for field, value in self.adamw.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor], scaler: Mapping[str, Any]) -> None:
        """Take over tensors() of an equal optimizer. Raises ValueError naming a tensor of no parameter or wrong shape."""
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, field = key.rpartition(".")
            parameter = self.parameters.get(name)
            if parameter is None or (field != "step" and value.shape != parameter.shape):
                raise ValueError(f"optimizer tensor {key!r} of shape {tuple(value.shape)} fits no parameter of this run")
            state.setdefault(name, {})[field] = value
        for name, fields in state.items():
            if set(fields) != {"step", "exp_avg", "exp_avg_sq"}:
                raise ValueError(f"optimizer state of {name!r} is incomplete: found only {sorted(fields)}")
        self.adamw.state.clear()
        fused = bool(self.adamw.defaults.get("fused"))
        for name, fields in state.items():
            parameter = self.parameters[name]
            self.adamw.state[parameter] = {
                field: value.to(parameter.device if fused or field != "step" else "cpu", copy=True) for field, value in fields.items()
            }
        if scaler:
            self.scaler.load_state_dict(dict(scaler))
