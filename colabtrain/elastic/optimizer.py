"""AdamW over two groups (LoRA; heads with latents), its learning rate as a pure function of the step, clip and scaler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colabtrain.config import TrainConfig

MAX_WARMUP_STEPS, WARMUP_SHARE = 50, 0.05
STATE_FIELDS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's, by its own names


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
        self.device_type = next(iter(parameters.values())).device.type
        # fused: one kernel a group, which makes no temporary tensors and can skip itself without a host sync
        self.adamw = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
        for parameter in self.parameters.values():  # AdamW would make it in the first step, where memory is short
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self.adamw.state[parameter] = {"step": step, **{name: torch.zeros_like(parameter) for name in STATE_FIELDS[1:]}}
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=fp16)

    def rates_at(self, i: int, num_steps: int) -> dict[str, float]:
        factor = rate_factor(i, num_steps, self.config.warmup_steps)
        return {group: self.rates[group] * factor for group in self.members}

    def step(self, rates: Mapping[str, float]) -> tuple[dict[str, Tensor], Tensor]:
        """Clip and update at `rates`, unless a gradient is not finite; clears the gradients.

        Returns the gradient norm of each group before the clip, and whether the update was skipped (0 or 1, a tensor).
        If it raises, weights and state are as before; abandon() puts the rest in order.
        """
        for group, settings in zip(self.members, self.adamw.param_groups, strict=True):
            settings["lr"] = rates[group]
        self.scaler.unscale_(self.adamw)
        norms = self._clip()
        skipped = (~torch.isfinite(torch.stack(list(norms.values()))).all()).float()
        self._update(skipped)
        self.adamw.zero_grad(set_to_none=True)
        return norms, skipped

    @torch.no_grad()
    def _update(self, skipped: Tensor) -> None:
        """All groups or none, and the scaler with them. The copy to fall back on is made where the activations were."""
        states = [self.adamw.state[parameter] for parameter in self.parameters.values()]
        live = [list(self.parameters.values()), *([state[name] for state in states] for name in STATE_FIELDS)]
        before = [_joined(tensors) for tensors in live]
        # The switch that GradScaler.step() uses: the kernel leaves weights and state alone where it is 1.
        self.adamw.found_inf = skipped  # pyright: ignore[reportAttributeAccessIssue]
        try:
            self.adamw.step()
            self.scaler.update()
        except BaseException:
            for tensors, values in zip(live, before, strict=True):
                _put_back(tensors, values)
            raise
        finally:
            del self.adamw.found_inf  # pyright: ignore[reportAttributeAccessIssue]

    def abandon(self) -> None:
        """Forget a step that failed on the way: its gradients, and what the scaler noted of it."""
        self.adamw.zero_grad(set_to_none=True)
        if self.scaler.is_enabled():
            state = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler(self.device_type)
            self.scaler.load_state_dict(state)

    def scale(self) -> Tensor | None:
        """The scaler's factor, as a tensor; None where none is used."""
        return self.scaler.scale(torch.ones((), device=self.device_type)) if self.scaler.is_enabled() else None

    def _clip(self) -> dict[str, Tensor]:
        if self.config.clip == "joint":
            everything = [parameter for params in self.members.values() for parameter in params]
            return {"all": nn.utils.clip_grad_norm_(everything, self.config.clip_norm)}
        return {group: nn.utils.clip_grad_norm_(params, self.config.clip_norm) for group, params in self.members.items()}

    def tensors(self) -> dict[str, Tensor]:
        """AdamW's state by parameter name and field."""
        named = self.parameters.items()
        return {f"{name}.{field}": value for name, parameter in named for field, value in self.adamw.state[parameter].items()}

    def meta(self) -> dict[str, Any]:
        """The rest of the state, as JSON."""
        return {"scaler": self.scaler.state_dict()}

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take over tensors() and meta() of an equal optimizer. Raises ValueError naming what is missing or does not fit."""
        mine = self.tensors()
        if wrong := sorted(set(tensors) ^ set(mine)):
            raise ValueError(f"optimizer tensors are missing, or too many: {wrong[:8]}")
        for name, value in tensors.items():
            if value.shape != mine[name].shape:
                raise ValueError(f"optimizer tensor {name!r} has shape {list(value.shape)}, not {list(mine[name].shape)}")
        for name, value in tensors.items():
            mine[name].copy_(value)
        if meta["scaler"]:
            self.scaler.load_state_dict(dict(meta["scaler"]))


def _joined(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], Tensor]:
    """A copy, end to end, of those of each device and dtype: few kernels, whatever the number of tensors."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach().reshape(-1))
    return {kind: torch.cat(members) for kind, members in kinds.items()}


def _put_back(tensors: Sequence[Tensor], joined: Mapping[tuple[torch.device, torch.dtype], Tensor]) -> None:
    at = dict.fromkeys(joined, 0)
    for tensor in tensors:
        kind = (tensor.device, tensor.dtype)
        tensor.copy_(joined[kind][at[kind] : at[kind] + tensor.numel()].view_as(tensor))
        at[kind] += tensor.numel()
