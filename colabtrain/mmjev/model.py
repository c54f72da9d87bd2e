"""MMJev: state + typed questions in, one logit per option out, from any of its sub-networks.

The answer to "is this option right?" is read from the last token of the option's branch by one Linear(hidden, 1) per
exit, which starts as the difference of the language model's own Yes and No rows. A noul question has one branch with
score s and the logits [0, s] in the order (false, true).

The base is frozen and always in eval mode; what trains is LoRA, the heads and the latents (memory tokens after each
media segment). Nothing about a call is kept: sub-network and dropout are arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from colabtrain.config import SubnetConfig, TrainConfig, check_subnets, default_subnets
from colabtrain.mmjev import backbone, tiny
from colabtrain.mmjev.fingerprint import base_fingerprint
from colabtrain.mmjev.lora import Dropout, LoRALinear, add_lora, check_projections
from colabtrain.mmjev.packing import Packed, Piece, Plan, pack
from colabtrain.mmjev.wording import Prompt, Tokenizer, proposed_answers
from colabtrain.records.schema import Question, Seg, as_text
from colabtrain.task import inference

LATENT_WORD = " summary"
NUM_LATENTS = 8
MLP_LORA_FROM = 10 / 35  # below, Gemma 3n's feed-forward is 95 % sparse


class MMJev(nn.Module):
    """A decision model over a Gemma3nTextModel.

    base: the whole transformers model; lm: its text model. rates: learning rates that suit this model, by TrainConfig
    field. name: what it is called in fingerprints and run folders. Raises ValueError for a quantised model.
    """

    latents: nn.Parameter

    def __init__(
        self,
        base: Any,
        lm: Any,
        tokenizer: Tokenizer,
        yes_id: int,
        no_id: int,
        name: str,
        prompt: Prompt | None = None,
        rates: Mapping[str, float] | None = None,
        start_ids: Sequence[int] = (),
    ) -> None:
        super().__init__()
        check_projections(lm)
        self.base, self.lm = base, lm
        self.tokenizer, self.prompt, self.start_ids = tokenizer, prompt or Prompt(), list(start_ids)
        self.yes_id, self.no_id, self.name, self.rates = yes_id, no_id, name, dict(rates or {})
        self.checkpoint_layers: frozenset[int] = frozenset()
        base.requires_grad_(False)
        self.adapters: dict[str, LoRALinear] = {}
        self.heads = nn.ModuleDict()
        self.latents = nn.Parameter(torch.zeros(NUM_LATENTS, lm.config.hidden_size, device=self.device, dtype=torch.float32))
        self.configure(self.default_subnets())
        self.reset_trainable(0)
        self.eval()

    @classmethod
    def tiny(cls, seed: int = 0) -> MMJev:
        """A random Gemma 3n small enough for two CPU cores, with a tokenizer of hashed words. Needs no download."""
        TrainConfig(seed=seed)  # checks it
        lm = tiny.language_model(seed)
        words = tiny.HashedWords()
        (yes,), (no,) = words.encode("yes"), words.encode("no")
        prompt = Prompt(question="\n{text}", answer="\n{text} ?")
        return cls(lm, lm, words, yes, no, f"tiny-{seed}", prompt, rates=tiny.RATES)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        device: str | torch.device | None = None,
        token: str | None = None,
        revision: str | None = None,
        ple_device: str | torch.device | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> MMJev:
        """A published Gemma 3n ("google/gemma-3n-E4B-it") or a folder with the same files, text only, as Pretrained says."""
        from colabtrain.mmjev.pretrained import Pretrained  # which builds an MMJev

        return Pretrained.open(name, device=device, token=token, revision=revision, ple_device=ple_device).load(progress)

    @property
    def device(self) -> torch.device:
        return next(self.lm.parameters()).device

    @property
    def matmul_dtype(self) -> torch.dtype:
        """What the projections run in (a GradScaler is needed where it is fp16); the residual stream may be wider."""
        return backbone.matmul_dtype(self.lm)

    def to_mixed_precision(self) -> MMJev:
        """Large matrices of the base in float16, its other weights and the residual stream in float32: for CUDA below 8.0."""
        for name, parameter in self.lm.named_parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(backbone.weight_dtype(name, torch.float16, torch.float32))
        return self

    def default_subnets(self) -> dict[str, SubnetConfig]:
        config = self.lm.config
        return default_subnets(config.num_hidden_layers, max(config.intermediate_size))

    def train(self, mode: bool = True) -> MMJev:
        """Set the mode of the trainable parts; the base stays in eval mode (its train mode changes frozen weights)."""
        super().train(mode)
        self.base.eval()
        return self

    def lent(self) -> AbstractContextManager[Any]:
        """For use between two steps: in eval mode, every part's mode put back afterwards."""
        return inference(self)

    def width(self, fc: SubnetConfig) -> AbstractContextManager[None]:
        """Nothing to hold: the feed-forward's width is an argument here."""
        return nullcontext()

    # What is trained

    def validate(self, subnets: Mapping[str, SubnetConfig]) -> None:
        """Raise ValueError that names the first sub-network, field and value the backbone cannot run."""
        config = self.lm.config
        most = {"exit_layer": config.num_hidden_layers, "ffn_width": max(config.intermediate_size), "n_latents": len(self.latents)}
        check_subnets(subnets, **most)

    def configure(self, subnets: Mapping[str, SubnetConfig], lora_r: int | None = None, lora_alpha: float = 32.0) -> None:
        """Have exactly the heads that `subnets` read from and, with lora_r, adapters of that shape, each at its start.

        Raises ValueError as validate() does.
        """
        self.validate(subnets)
        heads = nn.ModuleDict()
        for exit_layer in sorted({fc.exit_layer for fc in subnets.values()}):  # a set's own order is another in each process
            # skip_init: nn.Linear's own would move the global generator
            head = nn.utils.skip_init(nn.Linear, self.lm.config.hidden_size, 1, device=self.device, dtype=torch.float32)
            self._reset_head(head)
            heads[str(exit_layer)] = head
        self.heads = heads
        if lora_r is not None:
            layers = self.lm.config.num_hidden_layers
            self.adapters = add_lora(self.lm, lora_r, lora_alpha, mlp_from=round(MLP_LORA_FROM * layers))
        self.base.requires_grad_(False)  # a cell may have frozen or unfrozen anything
        for parameter in self.trainable().values():
            parameter.requires_grad_(True)

    def fingerprint(self) -> dict[str, Any]:
        """What the trained parts are only good with: the base and the wording."""
        return {"name": self.name, **base_fingerprint(self.lm), "prompt": dataclasses.asdict(self.prompt), "start_ids": self.start_ids}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Every trained parameter by its full name: LoRA, then heads, then latents."""
        return dict(self._trainable())

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, adapter in self.adapters.items():
            yield f"{name}.lora_A", adapter.lora_A
            yield f"{name}.lora_B", adapter.lora_B
        for name, parameter in self.heads.named_parameters():
            yield f"heads.{name}", parameter
        yield "latents", self.latents

    @torch.no_grad()
    def reset_trainable(self, seed: int) -> None:
        """Set everything trained to its start: LoRA without effect, heads as logit(Yes) - logit(No), distinct latents."""
        generator = torch.Generator().manual_seed(seed)
        for head in self.heads.values():
            self._reset_head(head)
        word = torch.tensor(self.tokenizer.encode(LATENT_WORD), device=self.device)
        mean = backbone.embed(self.lm, word).float().mean(dim=0)
        noise = torch.randn(self.latents.shape, generator=generator).to(mean.device)
        self.latents.copy_(mean + 0.02 * mean.std() * noise)
        for adapter in self.adapters.values():
            adapter.reset(generator)

    @torch.no_grad()
    def _reset_head(self, head: nn.Module) -> None:
        assert isinstance(head, nn.Linear)
        embedding = self.lm.embed_tokens.weight
        head.weight.copy_((embedding[self.yes_id].float() - embedding[self.no_id].float())[None])
        head.bias.zero_()

    # From a record to logits

    def check_state(self, state: Sequence[Seg]) -> None:
        """Raise ValueError for the first segment that encode_state() cannot read, or that would make gradients NaN."""
        check_soft_tokens(state, self.lm.config.hidden_size, self.name)

    def encode_state(self, state: Sequence[Seg], fc: SubnetConfig) -> list[Piece]:
        """Segments -> runs of tokens, with fc.n_latents memory tokens after each media segment, which must be a tensor of
        soft tokens [num_tokens, hidden]; check_state() says whether it is."""
        pieces = [Piece("text", self.start_ids)] if self.start_ids else []
        for seg in state:
            if seg.kind == "text":
                pieces.append(Piece("text", self.tokenizer.encode(as_text(seg.data))))
            else:
                pieces += [Piece("media", soft=seg.data), Piece("latent", num_latents=fc.n_latents)]
        return pieces

    def plan(self, encoded: Sequence[Piece], questions: Sequence[Question], fc: SubnetConfig) -> Plan:
        """Lay out one record: state, a branch per question, a branch of that per option (noul: one)."""
        plan, end_of_state = Plan(), 0
        for piece in encoded:
            end_of_state = plan.put(piece, end_of_state)
        for q, question in enumerate(questions):
            text = self.prompt.question.format(text=as_text(question["instructions"]))
            start = plan.put(Piece("text", self.tokenizer.encode(text)), end_of_state, q)
            answers = proposed_answers(question)
            for o, answer in enumerate(answers):
                plan.put(Piece("text", self.tokenizer.encode(self.prompt.answer.format(text=answer))), start, q, o)
                plan.reads.append(len(plan) - 1)
            plan.branches.append(len(answers))
            plan.is_noul.append(question["type"] == "noul")
        return plan

    def pack(self, plans: Sequence[Plan], first_slot: int = 0) -> Packed:
        """Join plans into one row on the model's device. first_slot: slot of the first one in its logical batch."""
        return pack(plans, first_slot).to(self.device)

    def scores(self, packed: Packed, fc: SubnetConfig, dropout: tuple[float, int, int] | None = None) -> Tensor:
        """One score a branch, [R] in fp32, with gradient. dropout: (probability, seed, step) or None."""
        masks = None
        if dropout is not None:
            masks = Dropout.for_step(*dropout, packed.layout.record, packed.layout.token)
        embeds = self._embed(packed)
        states = backbone.forward(self.lm, embeds[None], packed, fc, masks, self.checkpoint_layers)
        return self.heads[str(fc.exit_layer)](states.to(self.latents.dtype))[:, 0]

    def run(self, packed: Packed, fc: SubnetConfig) -> list[list[Tensor]]:
        """Logits with gradient: list (record) of list (question) of [num_options]."""
        scores = self.scores(packed, fc)
        branches = iter(scores.split([n for record in packed.segments for n, _ in record]))
        return [
            [torch.cat([torch.zeros_like(s), s]) if is_noul else s for (_, is_noul), s in zip(record, branches, strict=False)]
            for record in packed.segments
        ]

    def _embed(self, packed: Packed) -> Tensor:
        embeds = backbone.embed(self.lm, packed.ids)
        if packed.soft is not None:
            embeds = embeds.index_copy(0, packed.soft_at, packed.soft.to(embeds.dtype))
        if len(packed.latent_at):
            latents = self.latents.index_select(0, packed.latent_slots)
            embeds = embeds.index_copy(0, packed.latent_at, latents.to(embeds.dtype))
        return embeds


def check_soft_tokens(state: Sequence[Seg], hidden_size: int, name: str) -> None:
    for seg in state:
        if seg.kind == "text":
            continue
        soft = seg.data if isinstance(seg.data, Tensor) and seg.data.is_floating_point() else torch.zeros(0)
        if soft.dim() != 2 or soft.shape[1] != hidden_size:
            raise ValueError(
                f"{name} cannot read a segment of kind {seg.kind!r} from {str(seg.data)[:60]!r}; give a float tensor of soft tokens "
                f"[num_tokens, {hidden_size}], or train on text alone with modalities=('text',)"
            )
        check_magnitudes(seg.data, f"the soft tokens of a segment of kind {seg.kind!r}")


def check_magnitudes(rows: Tensor, what: str) -> None:
    """Raise ValueError naming the first of `rows` [n, hidden] that AltUp cannot divide by (its gradients would be NaN)."""
    magnitudes = rows.detach().float().square().mean(dim=1).sqrt()
    bad = (~torch.isfinite(magnitudes) | (magnitudes == 0)).nonzero()[:, 0].tolist()
    if bad:
        why = "exactly zero" if not rows[bad[0]].any() else "not finite, or too large or small for fp32"
        raise ValueError(f"{what}: row {bad[0]} of {len(rows)} is {why}, which makes NaN gradients; leave such rows out, padding too")
