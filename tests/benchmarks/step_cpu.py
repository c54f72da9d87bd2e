"""Step time of colabtrain's training step against a plain step of the same tiny model, in one process on the CPU.

The plain step is what one writes first: a padded row a record, dense masks of four kinds (full or sliding, with or
without siblings), every decoder layer checkpointed, the state encoded and planned once a sub-network, a Python loop
over questions for the loss, `.item()` of the losses. It computes the same function with the same dropout masks, which
is checked (loss and every gradient) before anything is timed. It is spared what a first version need not do: it, too,
reads the answers before the last projections, and its optimizer and clip are ours.

Timed: encode, plan, pack, forward, backward, clip, update; on two equal models that train side by side, in pairs of
steps on the same batch whose order alternates. Not timed: reading data, drawing batches, checkpoints, logs. Says
nothing of a GPU, of records with media, or of memory, for which checkpointing is meant.

Run it with colabtrain installed:
    python tests/benchmarks/step_cpu.py [--pairs 50] [--threads 2] [--data vader_tweets.records.jsonl]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from colabtrain.config import RunConfig, SubnetConfig, TrainConfig
from colabtrain.elastic.batches import capped
from colabtrain.elastic.step import accumulate
from colabtrain.elastic.task import ElasticTask
from colabtrain.mmjev.backbone import collapse_altup, expand_altup, feed_forward, kv_roles
from colabtrain.mmjev.demo_data import help_desk
from colabtrain.mmjev.lora import Dropout, elastic_linear
from colabtrain.mmjev.model import MMJev
from colabtrain.records.reader import load_records
from colabtrain.records.schema import Record
from colabtrain.records.selection import Selection, select

WARM_UP, CHECKED = 5, 2  # batches
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3
NO_QUESTION, PADDING = -1, -2

Step = Callable[[ElasticTask, Sequence[Record], int], dict[str, float]]


class PaddedDropout(Dropout):
    """The same masks for rows [B * T] of a padded batch x [B, T, C]."""

    def __call__(self, x: Tensor, columns: Tensor) -> Tensor:
        return super().__call__(x.flatten(0, 1), columns).view_as(x)


@dataclass
class Padded:
    """A batch of B records padded to T tokens; all [B, T]. reads: (record, token) of each branch."""

    ids: Tensor
    position: Tensor
    question: Tensor
    option: Tensor
    reads: tuple[Tensor, Tensor]
    masks: dict[tuple[bool, bool], Tensor]  # (sliding, siblings) -> additive [B, 1, T, T]
    branches: list[tuple[int, bool]]  # of each question: how many, and whether it is a noul


def pad(model: MMJev, records: Sequence[Record], fc: SubnetConfig) -> Padded:
    plans = [model.plan(model.encode_state(record.state, fc), record.qs, fc) for record in records]
    longest = max(len(plan) for plan in plans)

    def column(name: str, filler: int) -> Tensor:
        return torch.tensor([getattr(plan, name) + [filler] * (longest - len(plan)) for plan in plans])

    position, question, option = column("position", 0), column("question", PADDING), column("option", NO_QUESTION)
    reads = [(row, read) for row, plan in enumerate(plans) for read in plan.reads]
    return Padded(
        ids=column("ids", 0),  # an ordinary embedding: rows of zeros would make AltUp's gradients NaN
        position=position,
        question=question,
        option=option,
        reads=(torch.tensor([row for row, _ in reads]), torch.tensor([read for _, read in reads])),
        masks=dense_masks(question, option, position, model.lm.config.sliding_window),
        branches=[branch for plan in plans for branch in zip(plan.branches, plan.is_noul, strict=True)],
    )


def dense_masks(question: Tensor, option: Tensor, position: Tensor, window: int) -> dict[tuple[bool, bool], Tensor]:
    """The rule of packing.may_read over a padded batch. Padding reads all tokens of a state, itself, and is read by none."""
    q_i, q_j, o_i, o_j = question[:, :, None], question[:, None, :], option[:, :, None], option[:, None, :]
    p_i, p_j = position[:, :, None], position[:, None, :]
    own_path = ((q_j == NO_QUESTION) | (q_j == q_i)) & ((o_j < 0) | (o_j == o_i)) & (p_j <= p_i)
    siblings = own_path | ((q_j == q_i) & (o_j >= 0) & (o_i >= 0) & (o_j != o_i))
    near = (p_i - p_j).abs() < window
    kinds = {(False, False): own_path, (False, True): siblings, (True, False): own_path & near, (True, True): siblings & near}
    return {kind: torch.zeros(readable.shape).masked_fill_(~readable, -torch.inf)[:, None] for kind, readable in kinds.items()}


def plain_attention(
    module: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, key: Tensor | None, value: Tensor | None, dropout: Dropout | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, T, H], mask [B, 1, T, T]."""
    heads = (*x.shape[:2], -1, module.head_dim)
    query = rotate(module.q_norm(elastic_linear(module.q_proj, x, dropout).view(heads)), cos, sin).transpose(1, 2)
    if key is None or value is None:
        key = rotate(module.k_norm(elastic_linear(module.k_proj, x, dropout).view(heads)), cos, sin).transpose(1, 2)
        value = module.v_norm(elastic_linear(module.v_proj, x, dropout).view(heads)).transpose(1, 2)
    assert key is not None and value is not None
    every_key, every_value = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (key, value))
    output = F.scaled_dot_product_attention(query, every_key, every_value, attn_mask=mask, scale=module.scaling)
    return elastic_linear(module.o_proj, output.transpose(1, 2).reshape(*x.shape[:2], -1), dropout), key, value


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat((-second, first), dim=-1) * sin[:, :, None]


def plain_layer(
    layer: Any,
    hidden: Tensor,
    per_layer: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    ffn_width: int | None,
    key: Tensor | None,
    value: Tensor | None,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoder layer; hidden [A, B, T, H], per_layer [B, T, P]."""
    active = layer.config.altup_active_idx
    predicted = layer.altup.predict(hidden)
    normed = layer.input_layernorm(predicted[active])
    attended, key, value = plain_attention(layer.self_attn, normed, cos, sin, mask, key, value, dropout)
    x = (predicted[active] + layer.post_attention_layernorm(attended) + layer.laurel(normed)) / math.sqrt(2)
    x = x + layer.post_feedforward_layernorm(feed_forward(layer.mlp, layer.pre_feedforward_layernorm(x), ffn_width, dropout))
    corrected = layer.altup.correct(predicted, x)
    first = corrected[active].clone()
    if layer.config.altup_correct_scale:
        first = layer.altup.scale_corrected_output(first)
    first = layer.act_fn(layer.per_layer_input_gate(first)) * per_layer
    corrected[1:] += layer.post_per_layer_input_norm(layer.per_layer_projection(first))
    return corrected, key, value


def plain_scores(model: MMJev, padded: Padded, fc: SubnetConfig, dropout: tuple[float, int, int] | None) -> Tensor:
    """One score a branch [R]."""
    lm = model.lm
    masks = None
    if dropout is not None:
        num_records, longest = padded.ids.shape
        record, token = torch.arange(num_records).repeat_interleave(longest), torch.arange(longest).repeat(num_records)
        masks = Dropout.for_step(*dropout, record, token)
        masks = masks and PaddedDropout(masks.p, masks.rows)
    embeds = lm.embed_tokens(padded.ids)
    per_layer = lm.project_per_layer_inputs(embeds, lm.get_per_layer_inputs(padded.ids))
    rope = {kind: lm.rotary_emb(embeds, padded.position, kind) for kind in set(lm.config.layer_types)}
    hidden, roles, shared = expand_altup(lm, embeds), kv_roles(lm.config), dict[str, tuple[Tensor, Tensor]]()
    for i in range(fc.exit_layer):
        kind = lm.config.layer_types[i]
        mask = padded.masks[kind == "sliding_attention", fc.sibling_from is not None and i >= fc.sibling_from]
        key, value = shared[kind] if roles[i] == "reuse" else (None, None)
        arguments = (lm.layers[i], hidden, per_layer[:, :, i], *rope[kind], mask, fc.ffn_width, key, value, masks)
        hidden, key, value = checkpoint(plain_layer, *arguments, use_reentrant=False)
        if roles[i] == "store":
            shared[kind] = (key, value)
    states = collapse_altup(lm, hidden[:, padded.reads[0], padded.reads[1]][:, None])[0]
    return model.heads[str(fc.exit_layer)](states.float())[:, 0]


def plain_logits(scores: Tensor, branches: Sequence[tuple[int, bool]]) -> list[Tensor]:
    logits, read = list[Tensor](), 0
    for n, is_noul in branches:
        question = scores[read : read + n]
        logits.append(torch.cat([torch.zeros(1), question]) if is_noul else question)
        read += n
    return logits


def plain_gradients(task: ElasticTask, records: Sequence[Record], i: int) -> dict[str, float]:
    """Add the gradient of step i to the parameters, and return the losses as numbers."""
    config, model = task.config, task.model
    dropout = (config.lora_dropout, config.seed, i) if config.lora_dropout else None
    targets = [torch.tensor(target) for record in records for target in record.targets]
    teacher: list[Tensor] | None = None
    losses: dict[str, Tensor] = {}
    for name, fc in task.subnets.items():
        padded = pad(model, records, fc)
        logits = plain_logits(plain_scores(model, padded, fc, dropout), padded.branches)
        terms = list[Tensor]()
        for q, (logit, target) in enumerate(zip(logits, targets, strict=True)):
            log_p = torch.log_softmax(logit, dim=-1)
            loss = -(target * log_p).sum() + config.brier_weight * ((log_p.exp() - target) ** 2).sum()
            if teacher is not None:
                teacher_log_p = torch.log_softmax(teacher[q], dim=-1)
                loss = loss + config.kl_weight * F.kl_div(log_p, teacher_log_p, reduction="sum", log_target=True)
            terms.append(loss)
        losses[name] = torch.stack(terms).mean()
        teacher = teacher or [logit.detach() for logit in logits]
    torch.stack(list(losses.values())).sum().backward()
    return {name: loss.item() for name, loss in losses.items()}


def our_gradients(task: ElasticTask, records: Sequence[Record], i: int) -> dict[str, Tensor]:
    num_questions = sum(len(record.qs) for record in records)
    losses, _ = accumulate(task.model, task.optimizer, [(0, records)], num_questions, task.subnets, task.config, i)
    return {name: parts["total"] for name, parts in losses.items()}


def prepared(selection: Selection, config: TrainConfig) -> ElasticTask:
    task = ElasticTask(MMJev.tiny(0), selection, config, RunConfig())
    task.prepare()
    return task


def batch_at(task: ElasticTask, i: int) -> list[Record]:
    epoch, indices = task.schedule.locate(i)
    return [capped(task.records[index], task.config, epoch) for index in indices]


def disagreement(selection: Selection, config: TrainConfig) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a gradient to its tensor's maximum, away from LoRA's start at 0."""
    plain, ours = prepared(selection, config), prepared(selection, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p, o in zip(plain.model.trainable().values(), ours.model.trainable().values(), strict=True):
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
            o.copy_(p)
    worst_loss = worst_gradient = 0.0
    for i in range(CHECKED):
        records = ours.records[i * config.batch_size : (i + 1) * config.batch_size]  # of unequal lengths, unlike a batch
        expected, found = plain_gradients(plain, records, i), our_gradients(ours, records, i)
        worst_loss = max(worst_loss, *(abs(float(found[name]) / loss - 1.0) for name, loss in expected.items()))
        for p, o in zip(plain.model.trainable().values(), ours.model.trainable().values(), strict=True):
            if (p.grad is None) != (o.grad is None):
                return worst_loss, math.inf
            if p.grad is not None and o.grad is not None:
                worst_gradient = max(worst_gradient, float((p.grad - o.grad).abs().max() / p.grad.abs().max().clamp(min=1e-12)))
        for task in (plain, ours):
            task.optimizer.adamw.zero_grad()
    return worst_loss, worst_gradient


def agree(selection: Selection) -> bool:
    """Whether both steps compute the same; prints what was found."""
    same = True
    for probability in (0.0, TrainConfig().lora_dropout):
        loss, gradient = disagreement(selection, TrainConfig(lora_dropout=probability))
        ok = loss <= LOSS_TOLERANCE and gradient <= GRADIENT_TOLERANCE
        print(
            f"check, {CHECKED} batches, lora_dropout={probability:g}: losses differ by {loss:.1e} (at most {LOSS_TOLERANCE:.0e}), "
            f"gradients by {gradient:.1e} of their largest entry (at most {GRADIENT_TOLERANCE:.0e}): {'same' if ok else 'NOT THE SAME'}"
        )
        same = same and ok
    return same


def timed(gradients: Callable[..., Any], task: ElasticTask, records: Sequence[Record], i: int) -> float:
    """Milliseconds of one whole step."""
    rates = task.optimizer.rates_at(i, task.num_steps)
    begin = time.perf_counter()
    gradients(task, records, i)
    task.optimizer.step(rates)
    return 1e3 * (time.perf_counter() - begin)


def measure(selection: Selection, pairs: int) -> None:
    config = TrainConfig()
    sides = {"plain": (plain_gradients, prepared(selection, config)), "ours": (our_gradients, prepared(selection, config))}
    for name, (gradients, task) in sides.items():
        for i in range(pairs, pairs + WARM_UP):
            timed(gradients, task, batch_at(task, i), i)
        sides[name] = (gradients, prepared(selection, config))  # trained by the warm-up: start again
    times: dict[str, list[float]] = {name: [] for name in sides}
    real, padded = list[int](), list[int]()
    fc = next(iter(sides["ours"][1].subnets.values()))
    for i in range(pairs):
        records = batch_at(sides["ours"][1], i)
        for name in ("plain", "ours") if i % 2 == 0 else ("ours", "plain"):
            gradients, task = sides[name]
            times[name].append(timed(gradients, task, records, i))
        model = sides["ours"][1].model
        lengths = [len(model.plan(model.encode_state(record.state, fc), record.qs, fc)) for record in records]
        real.append(sum(lengths))
        padded.append(len(lengths) * max(lengths))
    report(times, real, padded)


def report(times: dict[str, list[float]], real: Sequence[int], padded: Sequence[int]) -> None:
    print(f"{len(real)} batches of {TrainConfig().batch_size} records")
    print(f"{'step':8}{'median ms':>12}{'fastest ms':>12}{'slowest ms':>12}{'tokens a batch':>18}")
    for name, tokens in (("plain", padded), ("ours", real)):
        t = times[name]
        print(f"{name:8}{statistics.median(t):12.1f}{min(t):12.1f}{max(t):12.1f}{statistics.mean(tokens):18.1f}")
    ratios = sorted(p / o for p, o in zip(times["plain"], times["ours"], strict=True))
    quarter = len(ratios) // 4
    print(
        f"plain / ours, median of the pairs' ratios: {statistics.median(ratios):.2f} "
        f"(middle half {ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Step time of colabtrain against a plain step, on the CPU.")
    parser.add_argument("--data", help="records as JSON lines; default: generated messages to a help desk")
    parser.add_argument("--pairs", type=int, default=50, help="pairs of steps, one batch each")
    parser.add_argument("--threads", type=int, help="torch's threads (default: torch's own choice)")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    selection = select(load_records(arguments.data) if arguments.data else help_desk(1000), TrainConfig())
    if not agree(selection):
        return 1
    measure(selection, arguments.pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
