"""OwnModel: a person's own decision model behind the interface that the trainer uses.

It needs MEMBERS. Its forward is its own, so what is ours stays outside it: LoRA sits on the attention projections alone
(how it slices its feed-forward cannot be known), without dropout. A model that has its feed-forward width as a state
(`set_ffn_width`) is driven under a lock: forward and backward of one sub-network, then full width again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colabtrain.config import SubnetConfig, check_subnets, default_subnets
from colabtrain.mmjev.fingerprint import base_fingerprint
from colabtrain.mmjev.lora import LoRALinear, add_lora
from colabtrain.records.schema import Question, Seg, option_names
from colabtrain.task import inference

METHODS = ("encode_state", "plan", "pack", "run", "train", "eval")
MEMBERS = ("base", "lm", "heads", "latents", "yes_id", "no_id", *METHODS)


@dataclass(frozen=True)
class OwnPlan:
    """A plan of the model's own. num_options: of each question; num_tokens: 0 where the plan does not say."""

    plan: Any
    num_options: list[int]
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens


@dataclass(frozen=True)
class OwnPacked:
    """Packed plans of the model's own. segments: (number of logits, False) of each question of each record."""

    packed: Any
    segments: list[list[tuple[int, bool]]]
    num_tokens: int
    device: torch.device


class OwnModel:
    """The trainer's view of `jev`. Raises ValueError for a model without the members, naming them."""

    def __init__(self, jev: Any) -> None:
        if absent := [name for name in MEMBERS if not hasattr(jev, name)]:
            raise ValueError(f"jev is a {type(jev).__name__} without {', '.join(absent)}; give a model such as MMJev.tiny()")
        _check_members(jev)
        self.jev, self.lm, self.heads = jev, jev.lm, jev.heads
        self.name = str(getattr(jev, "name", type(jev).__name__))
        self.rates: Mapping[str, float] = getattr(jev, "rates", {})
        self._width_lock = threading.RLock()
        self._adapters: dict[str, LoRALinear] = {}
        self._start: dict[str, Tensor] = _first_seen(jev)

    @property
    def full_width(self) -> int | None:
        widths = getattr(getattr(self.lm, "config", None), "intermediate_size", None)
        return max(widths) if isinstance(widths, Sequence) else widths

    @property
    def device(self) -> torch.device:
        return self.jev.latents.device

    @property
    def matmul_dtype(self) -> torch.dtype:
        return next(self.jev.base.parameters()).dtype

    def default_subnets(self) -> dict[str, SubnetConfig]:
        return default_subnets(len(self.lm.layers), self.full_width)

    def validate(self, subnets: Mapping[str, SubnetConfig]) -> None:
        check_subnets(subnets, exit_layer=len(self.lm.layers), ffn_width=self.full_width)
        latents = self.jev.latents.detach()
        if latents.numel() and not bool(latents.abs().amax(dim=-1).gt(0).all()):
            raise ValueError(
                "latents have a row of exact zeros, whose gradient in a norm is not a number; start them near a mean embedding"
            )

    # What is trained

    def configure(self, subnets: Mapping[str, SubnetConfig], lora_r: int | None = None, lora_alpha: float = 32.0) -> None:
        """Freeze the base; add adapters to the attention, unless the model has some of its own."""
        self.validate(subnets)
        # by name: after a reload of modules the class is another one
        ours = {id(p) for module in self.jev.base.modules() if str(type(module)) == str(LoRALinear) for p in module.parameters()}
        own = any("lora_" in name and id(p) not in ours for name, p in self.jev.base.named_parameters())
        if lora_r is not None and not own:
            self._adapters = add_lora(self.lm, lora_r, lora_alpha, mlp_from=len(self.lm.layers))
        self.jev.base.requires_grad_(False)
        for parameter in self.trainable().values():
            parameter.requires_grad_(True)

    def trainable(self) -> dict[str, nn.Parameter]:
        return _trainable(self.jev)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.jev.base.named_parameters()
        yield from self.trainable().items()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self.jev.base.named_modules()
        yield from self.heads.named_modules(prefix="heads")

    @torch.no_grad()
    def reset_trainable(self, seed: int) -> None:
        """Its own reset_trainable(seed) if it has one; else everything as it was when it was first seen, LoRA from `seed`."""
        if hasattr(self.jev, "reset_trainable"):
            self.jev.reset_trainable(seed)
        else:
            parameters = self.trainable()
            for name, value in self._start.items():
                parameters[name].copy_(value)
        generator = torch.Generator().manual_seed(seed)
        for adapter in self._adapters.values():
            adapter.reset(generator)

    def fingerprint(self) -> dict[str, Any]:
        return {"name": self.name, **base_fingerprint(self.lm)}

    def train(self) -> None:
        self.jev.train()
        self.jev.base.eval()

    def eval(self) -> None:
        self.jev.eval()

    @contextlib.contextmanager
    def lent(self) -> Generator[Any]:
        with self._width_lock, inference(self.jev.base), inference(self.heads):
            yield self.jev

    @contextlib.contextmanager
    def width(self, fc: SubnetConfig) -> Generator[None]:
        """The feed-forward as wide as `fc` says, for a model that has this as a state; full again afterwards."""
        if not hasattr(self.jev, "set_ffn_width"):
            yield
            return
        with self._width_lock:
            self.jev.set_ffn_width(fc.ffn_width or self.full_width)
            try:
                yield
            finally:
                self.jev.set_ffn_width(self.full_width)

    # From a record to logits

    def encode_state(self, state: Sequence[Seg], fc: SubnetConfig) -> Any:
        return self.jev.encode_state(state, fc.given or fc)

    def plan(self, encoded: Any, questions: Sequence[Question], fc: SubnetConfig) -> OwnPlan:
        plan = self.jev.plan(encoded, questions, fc.given or fc)
        return OwnPlan(plan, [len(option_names(question)) for question in questions], _num_tokens(plan))

    def pack(self, plans: Sequence[OwnPlan], first_slot: int = 0) -> OwnPacked:
        packed = self.jev.pack([plan.plan for plan in plans])
        segments = [[(n, False) for n in plan.num_options] for plan in plans]
        return OwnPacked(packed, segments, sum(plan.num_tokens for plan in plans), self.device)

    def scores(self, packed: OwnPacked, fc: SubnetConfig, dropout: tuple[float, int, int] | None = None) -> Tensor:
        """All logits one after another. Raises ValueError where run() gives another shape than the contract's."""
        rows = [row for record in self.jev.run(packed.packed, fc.given or fc) for row in record]
        found = [tuple(row.shape) for row in rows]
        wanted = [(n,) for record in packed.segments for n, _ in record]
        if found != wanted:
            raise ValueError(f"{self.name}.run() gave logits of shapes {found[:8]}, not {wanted[:8]}: 1-D, one per option, a list a record")
        return torch.cat(rows)


def _check_members(jev: Any) -> None:
    kinds: dict[str, type] = {"base": nn.Module, "lm": nn.Module, "heads": nn.Module, "latents": Tensor}
    wanted = {name: (isinstance(getattr(jev, name), kind), f"a torch {kind.__name__}") for name, kind in kinds.items()}
    wanted |= {name: (callable(getattr(jev, name)), "a method") for name in METHODS}
    for name, (good, what) in wanted.items():
        if not good:
            raise ValueError(f"jev.{name} of the {type(jev).__name__} is {repr(getattr(jev, name))[:80]}; it must be {what}")
    if absent := [name for name in ("layers", "embed_tokens") if not hasattr(jev.lm, name)]:
        raise ValueError(f"jev.lm of the {type(jev).__name__} is without {', '.join(absent)}; it must be the text model")


def _first_seen(jev: Any) -> dict[str, Tensor]:
    """Heads, latents and adapters of its own as they were when the model was first trained here."""
    known: dict[str, Tensor] | None = getattr(jev, "_colabtrain_start", None)
    if known is None:
        known = jev._colabtrain_start = {name: tensor.detach().clone() for name, tensor in _trainable(jev).items()}
    return known


def _trainable(jev: Any) -> dict[str, nn.Parameter]:
    """Every LoRA parameter, ours and its own, by its name in `lm`, or in `base` where it is outside; heads; latents."""
    named: dict[str, nn.Parameter] = dict(jev.lm.named_parameters())
    inside = {id(parameter) for parameter in named.values()}
    named |= {f"base.{name}": parameter for name, parameter in jev.base.named_parameters() if id(parameter) not in inside}
    adapters = {name: parameter for name, parameter in named.items() if "lora_" in name}
    heads = {f"heads.{name}": parameter for name, parameter in jev.heads.named_parameters()}
    return {**adapters, **heads, "latents": jev.latents}


def _num_tokens(plan: Any) -> int:
    for name in ("num_tokens", "length"):
        if isinstance(value := getattr(plan, name, None), int):
            return value
    ids = plan.get("ids") if isinstance(plan, Mapping) else getattr(plan, "ids", None)
    return len(ids) if isinstance(ids, Sized) else 0
