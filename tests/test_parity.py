"""The elastic forward against transformers' own Gemma3nTextModel, on whatever release the lane has."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from colabtrain.config import SubnetConfig
from colabtrain.mmjev import backbone, tiny
from colabtrain.mmjev.model import MMJev, Prompt
from colabtrain.mmjev.packing import Packed, Piece, Plan, pack
from colabtrain.records.schema import Question, Seg

pytestmark = pytest.mark.colab

LAYERS = 6
WINDOW = 8  # shorter than every sequence here, so that sliding layers differ from full ones


@functools.cache
def language_model(dtype: torch.dtype = torch.float32) -> Any:
    return built(dtype)


def built(dtype: torch.dtype, **overrides: Any) -> Any:
    return tiny.language_model(3, sliding_window=WINDOW, **overrides).to(dtype)


def plain_row(ids: Tensor) -> Packed:
    """`ids` as one plain causal sequence, every token read."""
    plan = Plan(reads=list(range(len(ids))), branches=[len(ids)], is_noul=[False])
    plan.put(Piece("text", ids.tolist()), 0)
    return pack([plan])


def ours(lm: Any, ids: Tensor, fc: SubnetConfig) -> Tensor:
    row = plain_row(ids)
    return backbone.forward(lm, lm.embed_tokens(row.ids)[None], row, fc)


def some_ids(n: int = 40) -> Tensor:
    return torch.randint(1, tiny.VOCABULARY, (n,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ffn_width", [None, 256])
def test_full_width_and_depth_is_bit_identical(dtype: torch.dtype, ffn_width: int | None) -> None:
    lm, ids = language_model(dtype), some_ids()
    theirs = lm(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    mine = ours(lm, ids, SubnetConfig(exit_layer=LAYERS, sibling_from=None, ffn_width=ffn_width))
    assert torch.equal(mine, theirs)


def truncated(lm: Any, num_layers: int, ffn_width: int) -> Any:
    """An ordinary transformers model of the first layers and channels: weights cut, nothing of our forward used."""
    config = lm.config
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    small = built(
        lm.dtype,
        num_hidden_layers=num_layers,
        layer_types=config.layer_types[:num_layers],
        num_kv_shared_layers=max(0, num_layers - first_shared),
        activation_sparsity_pattern=config.activation_sparsity_pattern[:num_layers],
        intermediate_size=ffn_width,
    )
    weights = {}
    for name, shape in ((name, tensor.shape) for name, tensor in small.state_dict().items()):
        tensor = lm.state_dict()[name]
        if name in ("per_layer_model_projection.weight", "embed_tokens_per_layer.weight"):  # one block of rows or columns a layer
            blocks = tensor if name.startswith("per_layer") else tensor.T
            tensor = blocks[: num_layers * config.hidden_size_per_layer_input]
            tensor = tensor if name.startswith("per_layer") else tensor.T
        weights[name] = tensor[tuple(slice(n) for n in shape)]
    small.load_state_dict(weights)
    return small


@torch.no_grad()
@pytest.mark.parametrize("num_layers", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("ffn_width", [256, 128, 96])
def test_an_early_exit_equals_the_truncated_model(num_layers: int, ffn_width: int) -> None:
    lm, ids = language_model(torch.float64), some_ids()
    theirs = truncated(lm, num_layers, ffn_width)(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    mine = ours(lm, ids, SubnetConfig(exit_layer=num_layers, sibling_from=None, ffn_width=ffn_width))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_kv_roles_follow_the_layer_types() -> None:
    lm = language_model()
    assert backbone.kv_roles(lm.config) == ["own", "own", "store", "store", "reuse", "reuse"]
    assert [hasattr(layer.self_attn, "k_proj") for layer in lm.layers] == [True] * 4 + [False] * 2


# Packing

QUESTIONS = [
    Question(type="choice", instructions="which colour is it", criteria={"red": None, "dark green": "as grass", "blue": None}),
    Question(type="noul", instructions="is it large", criteria={"true": "more than a metre"}),
    Question(type="score", instructions="how loud", criteria=["silent", "a whisper", "very loud indeed"]),
]
STATES = ["a short state", "a much longer state with many more words than the window of a sliding layer can see at once", "third"]


def model(dtype: torch.dtype = torch.float64) -> MMJev:
    lm = language_model(dtype)
    words = tiny.HashedWords()
    return MMJev(lm, lm, words, 5, 6, "parity", Prompt("\n{text}", "\n{text} ?")).eval()


def states_of(jev: MMJev, plans: list[Plan], fc: SubnetConfig) -> Tensor:
    row = jev.pack(plans)
    return backbone.forward(jev.lm, jev.lm.embed_tokens(row.ids)[None], row, fc)


def plans_of(jev: MMJev, fc: SubnetConfig, questions: list[Question] = QUESTIONS) -> list[Plan]:
    return [jev.plan(jev.encode_state([Seg("text", state)], fc), questions, fc) for state in STATES]


def path_ids(plan: Plan, read: int) -> Tensor:
    """The token ids that the branch ending at `read` sees: state, its question, its own tokens."""
    q, o = plan.question[read], plan.option[read]
    path = [i for i in range(read + 1) if plan.question[i] in (-1, q) and plan.option[i] in (-1, o)]
    return torch.tensor([plan.ids[i] for i in path])


@torch.no_grad()
@pytest.mark.parametrize(
    "fc", [SubnetConfig(exit_layer=6, sibling_from=None), SubnetConfig(exit_layer=3, sibling_from=None, ffn_width=128)]
)
def test_packed_equals_one_sequence_per_option(fc: SubnetConfig) -> None:
    jev = model()
    plans = plans_of(jev, fc)
    packed = states_of(jev, plans, fc)
    reference = truncated(jev.lm, fc.exit_layer, fc.ffn_width or 256)
    alone = [reference(input_ids=path_ids(p, r)[None], use_cache=False).last_hidden_state[0, -1] for p in plans for r in p.reads]
    assert len(alone) == len(STATES) * 7
    torch.testing.assert_close(packed, torch.stack(alone), rtol=0, atol=1e-10)


@torch.no_grad()
def test_records_of_a_row_do_not_see_each_other() -> None:
    jev, fc = model(), SubnetConfig(exit_layer=6, sibling_from=2)
    plans = plans_of(jev, fc)
    apart = torch.cat([states_of(jev, [plan], fc) for plan in plans])
    torch.testing.assert_close(states_of(jev, plans, fc), apart, rtol=0, atol=1e-10)


@torch.no_grad()
def test_order_of_options_and_questions_cannot_matter() -> None:
    jev, fc = model(), SubnetConfig(exit_layer=6, sibling_from=2)
    options = dict(reversed(QUESTIONS[0]["criteria"].items()))
    turned: list[Question] = [QUESTIONS[2], Question(type="choice", instructions="which colour is it", criteria=options), QUESTIONS[1]]
    plain = jev.run(jev.pack(plans_of(jev, fc)), fc)
    other = jev.run(jev.pack(plans_of(jev, fc, turned)), fc)
    for before, after in zip(plain, other, strict=True):
        for mine, theirs in ((before[0].flip(0), after[1]), (before[1], after[2]), (before[2], after[0])):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)  # heads work in fp32


@torch.no_grad()
def test_siblings_are_seen_from_their_layer_on_and_only_by_options() -> None:
    jev = model()
    blind, seeing = (SubnetConfig(exit_layer=6, sibling_from=layer) for layer in (None, 2))
    difference = (states_of(jev, plans_of(jev, blind), blind) - states_of(jev, plans_of(jev, seeing), seeing)).abs().amax(-1)
    by_branch = difference.view(len(STATES), 7)
    assert by_branch[:, 3].max() == 0.0  # the noul question's only branch has no sibling
    assert by_branch[:, [0, 1, 2, 4, 5, 6]].min() > 1e-6


@torch.no_grad()
def test_noul_logits_are_zero_and_the_score() -> None:
    jev, fc = model(torch.float32), SubnetConfig(exit_layer=6, sibling_from=2)
    logits = jev.run(jev.pack(plans_of(jev, fc)), fc)
    assert [[len(question) for question in record] for record in logits] == [[3, 2, 3]] * 3
    assert all(float(record[1][0]) == 0.0 and float(record[1][1]) != 0.0 for record in logits)


@torch.no_grad()
def test_heads_start_as_yes_minus_no() -> None:
    jev = model(torch.float32)
    hidden = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    embedding = jev.lm.embed_tokens.weight  # the language model's head is tied to it
    torch.testing.assert_close(jev.heads["6"](hidden)[:, 0], hidden @ embedding[jev.yes_id] - hidden @ embedding[jev.no_id])


# Media and latents

MEDIA = SubnetConfig(exit_layer=6, media_exit=None, sibling_from=2)
NO_MEDIA_FROM = 3


def media_plans(jev: MMJev, fc: SubnetConfig) -> list[Plan]:
    soft = 3 * torch.randn(9, 128, generator=torch.Generator().manual_seed(2), dtype=jev.lm.dtype)
    states = [[Seg("text", STATES[1]), Seg("image", soft), Seg("text", "and then")], [Seg("text", STATES[0])]]
    return [jev.plan(jev.encode_state(state, fc), QUESTIONS, fc) for state in states]


@torch.no_grad()
def test_dropping_media_equals_masking_them_from_that_layer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    jev = model()
    for media_exit in (1, NO_MEDIA_FROM, 5):
        fc = SubnetConfig(exit_layer=6, media_exit=media_exit, sibling_from=2)
        dropped = jev.scores(jev.pack(media_plans(jev, fc)), fc)
        with monkeypatch.context() as patch:
            masked = masked_reference(jev, fc, media_exit, patch)
        torch.testing.assert_close(dropped, masked, rtol=0, atol=1e-5)
        kept = jev.scores(jev.pack(media_plans(jev, MEDIA)), MEDIA)
        assert (dropped[:7] - kept[:7]).abs().max() > 1e-4  # the record with media changed
        torch.testing.assert_close(dropped[7:], kept[7:], rtol=0, atol=1e-5)  # the one without did not


def masked_reference(jev: MMJev, fc: SubnetConfig, media_exit: int, patch: pytest.MonkeyPatch) -> Tensor:
    """All tokens stay; from layer `media_exit` on no token may read a media token."""
    row = jev.pack(media_plans(jev, fc))
    media = torch.zeros(row.num_tokens, dtype=torch.bool)
    media[row.soft_at] = True
    real, calls = backbone.layer_forward, [0]

    def layer_forward(layer: Any, *arguments: Any) -> Any:
        masks = arguments[4]
        if calls[0] >= media_exit:
            parts = media.split(row.layout.lengths)
            masks = [hidden_from(mask, part) for mask, part in zip(masks, parts, strict=True)]
        calls[0] += 1
        return real(layer, *arguments[:4], masks, *arguments[5:])

    patch.setattr(backbone, "layer_forward", layer_forward)
    kept = SubnetConfig(exit_layer=fc.exit_layer, sibling_from=fc.sibling_from)
    return jev.scores(row, kept)


def hidden_from(mask: Tensor, media: Tensor) -> Tensor:
    """`mask` with the media columns closed; a media token still reads itself, so that no row is empty."""
    closed = media[None, :].expand_as(mask)
    if mask.shape[0] == mask.shape[1]:
        closed = closed & ~torch.eye(len(media), dtype=torch.bool)
    return mask.masked_fill(closed, -torch.inf)


def test_latents_follow_media_and_get_gradients() -> None:
    jev = model(torch.float32)
    fc = SubnetConfig(exit_layer=6, media_exit=2, sibling_from=2)
    row = jev.pack(media_plans(jev, fc))
    assert row.latent_slots.tolist() == list(range(8)) and row.latent_at.tolist() == [int(row.soft_at[-1]) + 1 + k for k in range(8)]
    jev.scores(row, fc).sum().backward()
    assert jev.latents.grad is not None and bool((jev.latents.grad.abs().sum(-1) > 0).all())
    assert len({tuple(latent.tolist()) for latent in jev.latents}) == 8  # distinct from the start
