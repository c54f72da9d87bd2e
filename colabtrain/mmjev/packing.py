"""Plans of records -> one packed row: token ids, positions, who may read whom, and where to read the answers.

A record is a tree: the state, a branch per question, a branch of that per option. Every option of a question starts
at the same position, so the order of options cannot matter. All records of a batch lie in one row without padding;
attention runs record by record over slices of it, so no work is spent between records.

Everything here is computed on the CPU from lists; a row is moved to its device once.

Shapes: T tokens of the row, n tokens of one record, R read-outs (one a branch), Q questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

NO_TOKEN = 0  # media and latent tokens read this row of the per-layer embeddings


@dataclass(frozen=True)
class Piece:
    """A run of tokens of a state. kind: `text` (ids), `media` (soft [n, hidden]) or `latent` (num_latents)."""

    kind: str
    ids: Sequence[int] = ()
    soft: Tensor | None = None
    num_latents: int = 0

    def __len__(self) -> int:
        return len(self.ids) or self.num_latents or (0 if self.soft is None else self.soft.shape[0])


@dataclass
class Plan:
    """One record laid out; one entry a token. question, option: -1 where the token is in none."""

    ids: list[int] = field(default_factory=list[int])
    question: list[int] = field(default_factory=list[int])
    option: list[int] = field(default_factory=list[int])
    position: list[int] = field(default_factory=list[int])
    latent_slot: list[int] = field(default_factory=list[int])  # -1: not a latent
    media: list[bool] = field(default_factory=list[bool])
    soft: list[Tensor] = field(default_factory=list[Tensor])
    reads: list[int] = field(default_factory=list[int])  # the last token of each branch
    branches: list[int] = field(default_factory=list[int])  # number of branches of each question
    is_noul: list[bool] = field(default_factory=list[bool])

    def __len__(self) -> int:
        return len(self.ids)

    def put(self, piece: Piece, position: int, question: int = -1, option: int = -1) -> int:
        """Append `piece` from `position` on; returns the position after it."""
        n = len(piece)
        self.ids.extend(piece.ids or [NO_TOKEN] * n)
        self.question.extend([question] * n)
        self.option.extend([option] * n)
        self.position.extend(range(position, position + n))
        self.latent_slot.extend(range(n) if piece.kind == "latent" else [-1] * n)
        self.media.extend([piece.kind == "media"] * n)
        if piece.soft is not None:
            self.soft.append(piece.soft)
        return position + n


@dataclass
class Layout:
    """Token metadata of a row (or of what a media drop left of it), all [T]; reads [R] index the row."""

    record: Tensor  # slot in the logical batch
    token: Tensor  # index in the record's own plan
    question: Tensor
    option: Tensor
    position: Tensor
    reads: Tensor
    lengths: list[int]  # tokens of each record in the row, on the host
    read_counts: list[int]  # read-outs of each record, on the host
    spans: list[int]  # highest position of each record, plus 1, on the host
    masks: dict[tuple[bool, int | None, bool], list[Tensor]] = field(default_factory=dict[tuple[bool, "int | None", bool], list[Tensor]])

    def to(self, device: torch.device) -> Layout:
        names = ("record", "token", "question", "option", "position", "reads")
        return replace(self, **{name: getattr(self, name).to(device) for name in names}, masks={})

    def attention_masks(self, siblings: bool, window: int | None, dtype: torch.dtype, reads_only: bool = False) -> list[Tensor]:
        """One additive mask [n, n] a record (reads_only: only the rows of its read-outs), made at first use.

        The window is ignored where no record reaches it.
        """
        if window is not None and max(self.spans) <= window:
            window = None
        key = (siblings, window, reads_only)
        if key not in self.masks:
            self.masks[key] = self._read_rows(*key[:2], dtype) if reads_only else self._all_rows(*key[:2], dtype)
        return self.masks[key]

    def _all_rows(self, siblings: bool, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        records = zip(*(t.split(self.lengths) for t in (self.question, self.option, self.position)), strict=True)
        readable = [may_read(q, o, p, siblings, window) for q, o, p in records]
        return [torch.zeros(r.shape, dtype=dtype, device=r.device).masked_fill_(~r, -torch.inf) for r in readable]

    def _read_rows(self, siblings: bool, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        starts = accumulate(self.lengths, initial=0)
        records = zip(self.attention_masks(siblings, window, dtype), self.reads.split(self.read_counts), starts, strict=False)
        return [mask.index_select(0, reads - start) for mask, reads, start in records]


def may_read(question: Tensor, option: Tensor, position: Tensor, siblings: bool, window: int | None) -> Tensor:
    """[n, n] bool: may token i (row) read token j (column) of the same record? The one rule for all tokens.

    A token reads what is before it on its own path (state, its question, its option). With `siblings` an option also
    reads all tokens of the other options of its question. `window`: nothing that many or more positions away.
    """
    q_i, q_j, o_i, o_j = question[:, None], question[None, :], option[:, None], option[None, :]
    p_i, p_j = position[:, None], position[None, :]
    readable = ((q_j < 0) | (q_j == q_i)) & ((o_j < 0) | (o_j == o_i)) & (p_j <= p_i)
    if siblings:
        readable |= (q_j == q_i) & (o_j >= 0) & (o_i >= 0) & (o_j != o_i)
    if window is not None:
        readable &= (p_i - p_j).abs() < window
    return readable


@dataclass
class Packed:
    """A batch as one row. layout: with all tokens; kept, text_layout: after the media tokens left (the same if none).

    ids [T], host_ids the same on the CPU; soft [num_media, hidden] goes to soft_at; latent_slots go to latent_at.
    segments: for each record the number of branches of each question and whether it is a noul.
    """

    ids: Tensor
    host_ids: Tensor
    soft: Tensor | None
    soft_at: Tensor
    latent_slots: Tensor
    latent_at: Tensor
    layout: Layout
    kept: Tensor | None
    text_layout: Layout
    segments: list[list[tuple[int, bool]]]

    @property
    def num_tokens(self) -> int:
        return int(self.ids.shape[0])

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def to(self, device: torch.device) -> Packed:
        names = ("ids", "soft", "soft_at", "latent_slots", "latent_at", "kept")
        tensors = {name: tensor.to(device) for name in names if (tensor := getattr(self, name)) is not None}
        layout = self.layout.to(device)
        text_layout = layout if self.kept is None else self.text_layout.to(device)
        return replace(self, **tensors, layout=layout, text_layout=text_layout)


def pack(plans: Sequence[Plan], first_slot: int = 0) -> Packed:
    """Join plans into one row. first_slot: slot of the first record in the logical batch (parts of a batch)."""
    ids = torch.tensor([t for plan in plans for t in plan.ids])
    media = torch.tensor([m for plan in plans for m in plan.media])
    slots = torch.tensor([s for plan in plans for s in plan.latent_slot])
    layout = _layout(plans, first_slot)
    soft = [s for plan in plans for s in plan.soft]
    kept = text_layout = None
    if soft:
        kept = (~media).nonzero()[:, 0]
        text_layout = _without_media(layout, media, kept)
    latent_at = (slots >= 0).nonzero()[:, 0]
    return Packed(
        ids=ids,
        host_ids=ids,
        soft=torch.cat(soft) if soft else None,
        soft_at=media.nonzero()[:, 0],
        latent_slots=slots[latent_at],
        latent_at=latent_at,
        layout=layout,
        kept=kept,
        text_layout=text_layout or layout,
        segments=[list(zip(plan.branches, plan.is_noul, strict=True)) for plan in plans],
    )


def _layout(plans: Sequence[Plan], first_slot: int) -> Layout:
    lengths = [len(plan) for plan in plans]
    starts = list(accumulate(lengths, initial=0))[:-1]
    return Layout(
        record=torch.repeat_interleave(torch.arange(first_slot, first_slot + len(plans)), torch.tensor(lengths)),
        token=torch.cat([torch.arange(n) for n in lengths]),
        question=torch.tensor([q for plan in plans for q in plan.question]),
        option=torch.tensor([o for plan in plans for o in plan.option]),
        position=torch.tensor([p for plan in plans for p in plan.position]),
        reads=torch.tensor([start + r for start, plan in zip(starts, plans, strict=True) for r in plan.reads]),
        lengths=lengths,
        read_counts=[len(plan.reads) for plan in plans],
        spans=[max(plan.position) + 1 for plan in plans],
    )


def _without_media(layout: Layout, media: Tensor, kept: Tensor) -> Layout:
    new_index = (~media).long().cumsum(0) - 1
    return Layout(
        *(t[kept] for t in (layout.record, layout.token, layout.question, layout.option, layout.position)),
        reads=new_index[layout.reads],
        lengths=[int((~part).sum()) for part in media.split(layout.lengths)],
        read_counts=layout.read_counts,
        spans=layout.spans,
    )
