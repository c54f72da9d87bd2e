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
        # fused: one kernel a group, which makes no temporary tensors and can skip itself without a host sync
        self.adamw = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)

    def rates_at(self, i: int, num_steps: int) -> dict[str, float]:
        factor = rate_factor(i, num_steps, self.config.warmup_steps)
        return {group: self.rates[group] * factor for group in self.members}

    def step(self, rates: Mapping[str, float]) -> tuple[dict[str, Tensor], Tensor]:
        """Clip and update at `rates`, unless a gradient is not finite; clears the gradients.

        Returns the gradient norm of each group before the clip, and whether the update was skipped (0 or 1, a tensor).
        """
        for group, settings in zip(self.members, self.adamw.param_groups, strict=True):
            settings["lr"] = rates[group]
        self.scaler.unscale_(self.adamw)
        norms = self._clip()
        skipped = (~torch.isfinite(torch.stack(list(norms.values()))).all()).float()
        if self.scaler.is_enabled():
            self.scaler.step(self.adamw)
        else:
            # The same switch that GradScaler uses: the kernel leaves weights and state alone where it is 1.
            self.adamw.found_inf = skipped  # pyright: ignore[reportAttributeAccessIssue]
            self.adamw.step()
            del self.adamw.found_inf  # pyright: ignore[reportAttributeAccessIssue]
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        return norms, skipped

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

    def meta(self) -> dict[str, Any]:
        """The rest of the state, as JSON: the scaler, and which parameters have tensors."""
        with_state = [name for name, parameter in self.parameters.items() if parameter in self.adamw.state]
        return {"scaler": self.scaler.state_dict(), "with_state": with_state}

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take over tensors() and meta() of an equal optimizer. Raises ValueError naming what is missing or does not fit."""
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
        if missing := sorted(set(meta["with_state"]) ^ set(state)):
            raise ValueError(f"optimizer state is missing, or too much, for {missing[:8]}")
        self.adamw.state.clear()
        for name, fields in state.items():
            parameter = self.parameters[name]
            self.adamw.state[parameter] = {field: value.to(parameter.device, copy=True) for field, value in fields.items()}
        if meta["scaler"]:
            self.scaler.load_state_dict(dict(meta["scaler"]))
