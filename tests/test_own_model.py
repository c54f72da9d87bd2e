"""A decision model of one's own trains too: with the shared members alone, with a sticky FFN width, with own sub-networks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import Halt
from torch import Tensor, nn

import colabtrain
from colabtrain.config import SubnetConfig
from colabtrain.elastic import own_model
from colabtrain.elastic.own_model import OwnModel
from colabtrain.mmjev import backbone, lora, tiny
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.model import MMJev
from colabtrain.mmjev.packing import pack
from colabtrain.runtime.diary import Tail

SECONDS = 120.0
OPTIONS: dict[str, Any] = {"steps": 6, "batch_size": 3, "display": False, "lora_dropout": 0.0}


class FastConfig(NamedTuple):
    n_latents: int
    exit_layer: int
    media_exit: int | None
    sibling_from: int | None


class Sticky:
    """As people wrote them: not a Module, the FFN width is a state, sub-networks are positional tuples of four."""

    def __init__(self) -> None:
        made = MMJev.tiny(0)
        self._made = made
        self.base = self.lm = made.lm
        self.heads = nn.ModuleDict({str(exit_layer): nn.Linear(128, 1) for exit_layer in (3, 6)})
        for head in self.heads.values():
            nn.init.normal_(head.weight, std=0.05, generator=torch.Generator().manual_seed(1))
            nn.init.zeros_(head.bias)
        self.latents = made.latents
        self.yes_id, self.no_id = made.yes_id, made.no_id
        self.ffn_width: int = 256
        self.widths: list[tuple[int, bool]] = []

    def set_ffn_width(self, width: int) -> None:
        self.ffn_width = width

    def train(self, mode: bool = True) -> None:
        self.heads.train(mode)
        self.base.train(mode)

    def eval(self) -> None:
        self.train(False)

    def encode_state(self, state: Any, fc: FastConfig) -> Any:
        n_latents, _, _, _ = fc
        return self._made.encode_state(state, SubnetConfig(n_latents))

    def plan(self, encoded: Any, questions: Any, fc: FastConfig) -> Any:
        return self._made.plan(encoded, questions, SubnetConfig(*fc))

    def pack(self, plans: Sequence[Any]) -> Any:
        return pack(plans)

    def run(self, packed: Any, fc: FastConfig) -> list[list[Tensor]]:
        self.widths.append((self.ffn_width, self.base.training))
        embeds = self._made._embed(packed)[None]
        states = backbone.forward(self.lm, embeds, packed, SubnetConfig(*fc, ffn_width=self.ffn_width))
        scores = iter(self.heads[str(fc.exit_layer)](states)[:, 0])
        return [
            [torch.stack([s.new_zeros(()), s]) if is_noul else torch.stack(s) for s, is_noul in record]
            for record in [[(next(scores) if noul else [next(scores) for _ in range(n)], noul) for n, noul in r] for r in packed.segments]
        ]


SUBNETS = {"full": FastConfig(8, 6, None, 2), "fast": FastConfig(8, 3, 1, 2)}


def start(jev: Any, folder: Path, **options: Any) -> colabtrain.Run:
    return colabtrain.start(jev, help_desk(24), run_dir=folder, **{**OPTIONS, **options})


def losses(folder: Path) -> list[dict[str, float]]:
    return [event["loss"] for event in Tail(folder / "diary.jsonl").new() if event["event"] == "step"]


@pytest.mark.colab
def test_a_model_with_a_sticky_width_trains_at_both_widths_and_is_full_after(tmp_path: Path) -> None:
    jev = Sticky()
    subnets = {"full": SUBNETS["full"], "fast": SubnetConfig(8, 3, 1, 2, ffn_width=128)}
    jev.plan = lambda encoded, questions, fc: jev._made.plan(encoded, questions, fc)  # type: ignore[method-assign,assignment,misc]
    jev.encode_state = lambda state, fc: jev._made.encode_state(state, fc)  # type: ignore[method-assign,assignment,misc]
    real = jev.run
    jev.run = lambda packed, fc: real(packed, FastConfig(fc.n_latents, fc.exit_layer, fc.media_exit, fc.sibling_from))  # type: ignore[method-assign]
    run = start(jev, tmp_path, subnets=subnets)
    assert run.wait(SECONDS) == "finished"
    assert jev.ffn_width == 256
    assert jev.widths[:4] == [(256, False), (128, False)] * 2  # and the base stays in eval mode
    assert all(step["full"] == step["full"] and step["fast"] == step["fast"] for step in losses(tmp_path))


@pytest.mark.colab
class Halted(Sticky):
    """One that may be held before a step."""

    def __init__(self, halt: Halt) -> None:
        super().__init__()
        self.halt, self.steps = halt, -1  # the first call is to get ready

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        if mode:
            self.halt(self.steps)
            self.steps += 1


def test_positional_objects_reach_the_model_as_they_are_and_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    assert start(Sticky(), tmp_path / "whole", subnets=SUBNETS).wait(SECONDS) == "finished"
    whole = losses(tmp_path / "whole")
    jev = Sticky()
    for folder in ("again", "used"):  # a used model starts from scratch
        assert start(jev, tmp_path / folder, subnets=SUBNETS).wait(SECONDS) == "finished"
        assert losses(tmp_path / folder) == whole
    assert len({step["full"] for step in whole}) == 6

    halt = Halt(2)
    run = start(Halted(halt), tmp_path / "parts", subnets=SUBNETS)
    assert halt.reached.wait(SECONDS)
    run.stop(wait=False)
    halt.go.set()
    assert run.wait(SECONDS) == "stopped" and run.step == 3
    assert start(Halted(Halt(99)), tmp_path / "parts", subnets=SUBNETS).wait(SECONDS) == "finished"
    assert losses(tmp_path / "parts") == whole


def test_an_exception_in_the_forward_leaves_the_width_full(tmp_path: Path) -> None:
    jev = Sticky()
    real, calls = jev.run, [0]

    def run(packed: Any, fc: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("in the middle of fast")
        return real(packed, fc)

    jev.run = run  # type: ignore[method-assign]
    subnets = {
        "full": SUBNETS["full"],
        "fast": type("Fc", (), {**SUBNETS["fast"]._asdict(), "ffn_width": 64, "__iter__": lambda s: iter(SUBNETS["fast"])})(),
    }
    with pytest.raises(colabtrain.RunFailed, match="in the middle of fast"):
        start(jev, tmp_path, subnets=subnets).wait(SECONDS)
    assert jev.ffn_width == 256


def test_only_adapters_heads_and_latents_train(tmp_path: Path) -> None:
    jev = Sticky()
    before = {name: p.detach().clone() for name, p in jev.base.named_parameters()}
    assert all(p.requires_grad for p in tiny.language_model(1).parameters())  # what a loaded base comes with
    jev.base.requires_grad_(True)
    assert start(jev, tmp_path, subnets=SUBNETS).wait(SECONDS) == "finished"
    after = dict(jev.base.named_parameters())
    changed = {name for name in after if "lora_" in name}
    assert changed and all(".self_attn." in name for name in changed)
    for name, value in before.items():
        now = after.get(name, after.get(name.replace("_proj.weight", "_proj.base_layer.weight")))
        assert now is not None and torch.equal(now, value) and now.grad is None and not now.requires_grad, name


def test_borrow_gives_the_model_in_eval_mode(tmp_path: Path) -> None:
    jev = Sticky()
    run = start(jev, tmp_path, subnets=SUBNETS)
    with run.borrow() as model:
        assert model is jev and jev.ffn_width == 256 and not jev.heads.training and not torch.is_grad_enabled()
    assert run.wait(SECONDS) == "finished"


class Bag(nn.Module):
    """Another architecture altogether: no attention, no config; a plan is a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base = nn.Module()
        self.base.embed_tokens = nn.Embedding(4096, 32)
        self.base.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        for parameter in self.base.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        self.lm = self.base
        self.heads = nn.ModuleDict({"only": nn.Linear(32, 1)})
        nn.init.normal_(self.heads["only"].weight, generator=generator)
        self.latents = nn.Parameter(torch.randn(8, 32, generator=generator))
        self.words = tiny.HashedWords()
        self.yes_id, self.no_id = 1, 2

    def encode_state(self, state: Any, fc: Any) -> list[int]:
        return [token for seg in state for token in self.words.encode(str(seg.data))]

    def plan(self, encoded: list[int], questions: Any, fc: Any) -> dict[str, Any]:
        from colabtrain.records.schema import option_names

        return {"ids": encoded, "options": [[self.words.encode(f"{q['instructions']} {o}") for o in option_names(q)] for q in questions]}

    def pack(self, plans: Any) -> Any:
        return plans

    def run(self, packed: Any, fc: Any) -> list[list[Tensor]]:
        def score(ids: list[int]) -> Tensor:
            x = self.lm.embed_tokens(torch.tensor(ids)).mean(0) + self.latents.mean(0)
            for layer in self.lm.layers[: fc.exit_layer]:
                x = x + torch.tanh(layer(x))
            return self.heads["only"](x)[0]

        return [[torch.stack([score([*plan["ids"], *option]) for option in options]) for options in plan["options"]] for plan in packed]


@pytest.mark.colab
def test_another_architecture_trains_with_what_it_has(tmp_path: Path) -> None:
    run = start(Bag(), tmp_path, subnets={"full": (0, 2), "fast": (0, 1)}, steps=20, lr_heads=0.02)
    assert run.wait(SECONDS) == "finished"
    found = losses(tmp_path)
    assert sum(step["full"] for step in found[-5:]) < sum(step["full"] for step in found[:5])
    assert run.history()["tokens"][0] > 0


def test_a_model_whose_forward_passes_by_its_adapters_is_refused(tmp_path: Path) -> None:
    """An adapter that nothing calls would train nothing, in silence."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(32, 32)

    jev = Bag()
    jev.lm.layers[0].self_attn = Attention()
    with pytest.raises(colabtrain.RunFailed, match=r"no adapter of Bag got a gradient.*give lora_r=0"):
        start(jev, tmp_path, subnets={"full": (0, 2)}).wait(SECONDS)
    assert start(jev, tmp_path / "without", subnets={"full": (0, 2)}, lora_r=0).wait(SECONDS) == "finished"


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    jev = Bag()
    del jev.heads
    with pytest.raises(ValueError, match=r"jev is a Bag without heads; give a model such as MMJev.tiny\(\)"):
        start(jev, tmp_path)
    with pytest.raises(ValueError, match="sub-network 'deep': exit_layer=3, but the model has 2"):
        start(Bag(), tmp_path, subnets={"deep": (0, 3)})
    jev = Bag()
    with torch.no_grad():
        jev.latents[3] = 0.0
    with pytest.raises(ValueError, match="latents have a row of exact zeros"):
        start(jev, tmp_path, subnets={"full": (0, 2)})
    jev = Bag()
    jev.run = lambda packed, fc: [[torch.zeros(2, 2)] for _ in packed]  # type: ignore[method-assign,assignment]
    with pytest.raises(colabtrain.RunFailed, match=r"Bag.run\(\) gave logits of shapes \[\(2, 2\)"):
        start(jev, tmp_path, subnets={"full": (0, 2)}).wait(SECONDS)


def test_an_adapted_model_sees_the_same_gradient_as_ours() -> None:
    """The same weights behind the person's interface and behind ours: the same logits."""
    jev = Sticky()
    own = OwnModel(jev)
    records = help_desk(3)
    fc = SubnetConfig(*SUBNETS["full"], given=SUBNETS["full"])
    plans = [own.plan(own.encode_state(record.state, fc), record.qs, fc) for record in records]
    packed = own.pack(plans)
    mine = own.scores(packed, fc)
    direct = torch.cat([row for record in jev.run(pack([plan.plan for plan in plans]), SUBNETS["full"]) for row in record])
    assert torch.equal(mine, direct)
    assert packed.num_tokens == sum(len(plan.plan) for plan in plans)


def test_our_adapters_in_a_persons_model_are_known_after_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for the person's own, they would keep what an earlier run learned."""
    jev = Sticky()
    own_model.OwnModel(jev).configure({}, 4)
    anew = type("LoRALinear", (lora.LoRALinear,), {"__module__": lora.LoRALinear.__module__, "__qualname__": "LoRALinear"})
    monkeypatch.setattr(own_model, "LoRALinear", anew)
    monkeypatch.setattr(lora, "LoRALinear", anew)
    model = own_model.OwnModel(jev)
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if "lora_B" in name:
                parameter.fill_(1.0)
    model.configure({}, 4)
    model.reset_trainable(0)
    adapters = [parameter for name, parameter in model.trainable().items() if "lora_B" in name]
    assert adapters and not any(parameter.any() for parameter in adapters)


def test_adapters_outside_the_language_model_are_reset_too() -> None:
    jev: Any = Sticky()
    tower = torch.nn.Module()
    tower.lora_A = torch.nn.Parameter(torch.ones(2, 2))
    jev.base = torch.nn.ModuleDict({"language": jev.lm, "tower": tower})
    model = own_model.OwnModel(jev)
    with torch.no_grad():
        model.trainable()["base.tower.lora_A"].fill_(5.0)
    model.configure({}, 4)
    model.reset_trainable(0)
    assert torch.equal(tower.lora_A, torch.ones(2, 2))
