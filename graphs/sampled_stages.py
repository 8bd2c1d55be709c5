"""What sampled rounds do in place of greedy ones: the choices of target and draft model, and counts of tokens for penalties.

On request, drafts are accepted with given probabilities, for benchmarks; and in sampled rounds there are bad words of several tokens and
relaxed acceptance, each only if the engine has the table of its settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.batch import Batch
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.vocabulary_shard import SamplingOps, VocabularyShard
from stepgraph.graphs.logits_processors import LogitsProcessor, apply_processors
from stepgraph.graphs.round_specs import Counter
from stepgraph.graphs.row_layout import Column, ResultLayout
from stepgraph.sampling import kernels, rng, sampler
from stepgraph.sampling.acceptance import may_accept
from stepgraph.sampling.kernels import GrammarMask, processors
from stepgraph.sampling.kernels.operation import Contiguous, operation
from stepgraph.sampling.kernels.processors import Processed, mark_dead_ends
from stepgraph.sampling.sampler import VocabColumns, from_units, portable_exp, to_units


@dataclass(frozen=True)
class AcceptOptions:
    """Options of acceptance besides the settings of the rows."""

    forced_acceptance: tuple[float, ...] | None = None  # for benchmarks: the probability that draft j is accepted, whatever the models
    processors: tuple[LogitsProcessor, ...] = ()
    shard: VocabularyShard | None = None  # the tokens of the target's logits, where ranks divide them


DEFAULT_ACCEPT = AcceptOptions()


def force_accepted(batch: Batch, finite: Tensor, status: Tensor, rates: Sequence[float]) -> Tensor:
    """For benchmarks: accept a legal draft j with probability rates[j]. Returns the number of leading accepted drafts, [B]."""
    owner, length = batch.column(Column.OWNER), batch.column(Column.LENGTH)
    noise = rng.uniform(owner[:, None], length[:, None] + torch.arange(len(rates), device=length.device), rng.Purpose.ACCEPT)
    equal_rates = len(set(rates)) == 1
    passes = noise < rates[0] if equal_rates else torch.stack([each < rate for each, rate in zip(noise.unbind(1), rates, strict=True)], 1)
    is_accepted = passes & finite[:, :-1] & may_accept(status, batch.column(Column.DRAFT_COUNT))
    return is_accepted.to(torch.int64).cumprod(1).sum(1)


def after_accepted(batch: Batch, accepted: Tensor, tokens: Tensor) -> Tensor:
    """[B, K + 1] the accepted drafts, then `tokens` from that position on."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(index < accepted[:, None], torch.cat([batch.drafts, tokens[:, -1:]], 1), tokens)


def ban_words(buffers: StaticBuffers, batch: Batch, processed: Processed, columns: VocabColumns) -> Processed:
    """Minus infinity for each token that would complete a bad word of its row: output and earlier drafts end with its other tokens."""
    words, recent = buffers.row_bad_words[batch.rows], buffers.row_recent[batch.rows]  # [B, N, L] -1 before a shorter word, [B, L - 1]
    preceding = torch.cat([recent, batch.drafts], 1).unfold(1, recent.shape[1], 1)  # [B, Q, L - 1], the tokens before each position
    prefix, last = words[:, None, :, :-1], words[..., -1]
    completes = ((prefix == preceding[:, :, None]) | (prefix < 0)).all(-1) & (last >= 0)[:, None]  # [B, Q, N]
    index, is_local = columns.local(last.clamp(min=0)[:, None].expand(-1, preceding.shape[1], -1))
    banned = processed.logits.scatter_add(2, index, torch.where(completes & is_local, float("-inf"), 0.0))
    return mark_dead_ends(processed.status, processed.finite, banned, columns)


def relax(
    buffers: StaticBuffers, batch: Batch, processed: Processed, probs: Tensor, tokens: Tensor, accepted: Tensor, columns: VocabColumns
) -> tuple[Tensor, Tensor]:
    """tokens [B, K + 1] and accepted [B] of rows with relaxed acceptance: a draft holds if it is one of the `relaxed_top_n` most probable
    legal tokens and at most `relaxed_delta` less probable than the first. Greedy rows only. Writes which drafts are not the target's."""
    count = batch.drafts.shape[1]
    top_n, delta = buffers.row_relaxed[batch.rows][..., None].unbind(1)  # [B, 1] each, 0: exact acceptance
    logits, best = processed.logits[:, :-1], columns.best(probs)[1][..., 0]
    weights = portable_exp(logits - columns.best(logits)[0])  # 1 for the most probable
    of_draft = columns.pick(weights, batch.drafts.clamp(min=0)[..., None])
    above, total = columns.total(torch.stack([(weights > of_draft).to(torch.int64), to_units(weights)], -2).sum(-1)).unbind(-1)  # [B, K]
    is_close = (above < top_n) & ((1 - of_draft[..., 0]) / from_units(total) <= delta) & (of_draft[..., 0] > 0)
    is_accepted = is_close & processed.finite[:, :-1] & may_accept(processed.status, batch.column(Column.DRAFT_COUNT))
    relaxed, leading = top_n > 0, is_accepted.to(torch.int64).cumprod(1)
    relaxed_drafts = (leading * (batch.drafts != best[:, :-1]) * relaxed) << torch.arange(count, device=leading.device)
    ResultLayout(count).write(buffers.results[: len(batch.rows)], relaxed=relaxed_drafts.sum(1))
    num_accepted = torch.where(relaxed[:, 0], leading.sum(1), accepted)
    chosen = after_accepted(batch, num_accepted, best.gather(1, num_accepted[:, None]).expand_as(tokens))
    return torch.where(relaxed, chosen, tokens), num_accepted


class TargetChoice(NamedTuple):
    """The target's tokens for every position of a row."""

    tokens: Tensor  # [B, K + 1] int64
    finite: Tensor  # [B, K + 1] bool: some legal logit is finite
    accepted: Tensor | None  # [B] int64: leading drafts that are accepted; None: those that equal the tokens
    status: Tensor  # [B, K + 1] int64 MaskStatus


def choose_sampled(buffers: StaticBuffers, batch: Batch, logits: Tensor, mask: GrammarMask | None, options: AcceptOptions) -> TargetChoice:
    """Masks and logit processors, then acceptance of the drafts."""
    adjusted, forced, ops, columns = logits, options.forced_acceptance, options.shard or kernels, options.shard or sampler.ALL_COLUMNS
    if options.processors:
        adjusted = apply_processors(buffers, batch, logits, options.processors, columns)
    processed = ops.process(adjusted, row_settings(buffers, batch), batch.rows, batch.drafts, mask=mask)
    if "row_bad_words" in buffers:
        processed = ban_words(buffers, batch, processed, columns)
    masked, finite, status = processed
    params = params_of(buffers, batch)
    probs = ops.distribution(masked, params)
    draft_count, seed, length = (batch.column(column) for column in (Column.DRAFT_COUNT, Column.SEED, Column.LENGTH))
    drafts = batch.drafts.shape[1]
    # A seed that is not negative, as of greedy rows: drafts are drawn by the target's numbers, in rounds that may keep no probabilities.
    certain = buffers.row_certain[:, :drafts][batch.rows] | (seed >= 0)[:, None]
    tokens, accepted = ops.reject_sample(
        probs, buffers.row_draft_probs[:, :drafts], batch.rows, certain, finite, batch.drafts, draft_count, status, seed, length
    )
    if "row_relaxed" in buffers and drafts:
        tokens, accepted = relax(buffers, batch, processed, probs, tokens, accepted, columns)
    if forced is not None:
        accepted = force_accepted(batch, finite, status, forced)
        index, no_drafts = accepted[:, None], batch.drafts[:, :0]
        its_probs = probs.gather(1, index[..., None].expand(-1, 1, probs.shape[2]))
        its_finite, its_status = finite.gather(1, index), status.gather(1, index)
        fixed = no_drafts, draft_count, its_status, seed, length + accepted
        drawn, _ = ops.reject_sample(its_probs, buffers.row_draft_probs[:, :0], batch.rows, certain[:, :0], its_finite, *fixed)
        tokens = after_accepted(batch, accepted, drawn.expand_as(tokens))
    ops.log_probabilities(logits, probs, tokens, buffers.results_logprobs[: len(batch.rows), : drafts + 1])
    if "top_ids_ring_host" in buffers:
        rings = buffers.top_ids_ring_host, buffers.top_logprobs_ring_host
        ops.top_logprobs(logits, probs, batch.rows, buffers.row_params, buffers.round_counters[Counter.PUBLISHED :], *rings)
    return TargetChoice(tokens, finite, accepted, status)


def record_output(buffers: StaticBuffers, rows: Tensor, tokens: Tensor, emitted: Tensor) -> None:
    """What later rounds need of the emitted tokens."""
    count_output(rows, tokens, emitted, buffers.row_output_counts)
    if "row_recent" in buffers:  # the last tokens of each row, [R, L - 1]
        recent = buffers.row_recent
        index = emitted[:, None] + torch.arange(recent.shape[1], device=rows.device)
        recent.index_copy_(0, rows, torch.cat([recent[rows], tokens], 1).gather(1, index))


@operation(lambda *_: None, writes=("output_counts",), triton=True)
def count_output(rows: Contiguous, tokens: Contiguous, emitted: Contiguous, output_counts: Contiguous) -> None:
    """Add the emitted tokens to output_counts [R, V] int32, which penalties use. rows, emitted [B], tokens [B, Q] int64."""
    index = torch.arange(tokens.shape[1], device=rows.device)
    flat_index = rows[:, None] * output_counts.shape[1] + tokens
    counted = (index < emitted[:, None]).to(output_counts.dtype)
    output_counts.view(-1).scatter_add_(0, flat_index.flatten(), counted.flatten())


def draft_sampled(
    buffers: StaticBuffers, after: Batch, step: int, logits: Tensor, mask: GrammarMask | None, d2t: Tensor | None, ops: SamplingOps
) -> tuple[Tensor, Tensor]:
    """A token drawn from the draft's processed logits; the distribution is kept for rejection sampling in the next round."""
    size = len(after.rows)
    before = buffers.batch_drafts[: step - 1, :size].T
    masked, finite, _ = ops.process(logits[:, None], row_settings(buffers, after), after.rows, before, step - 1, mask, d2t)
    length, seed = after.column(Column.LENGTH), after.column(Column.DRAFT_SEED)
    params = params_of(buffers, after)
    position = length + (step - 1) if step > 1 else length
    tokens = ops.draw(masked[:, 0], params, seed, position, rng.Purpose.DRAFT, after.rows, buffers.row_draft_probs[:, step - 1], d2t)
    return finite[:, 0], tokens


def params_of(buffers: StaticBuffers, batch: Batch) -> Tensor:
    """[B, Param] float32, gathered once in a round."""
    return buffers.row_params[batch.rows] if batch.params is None else batch.params


def row_settings(buffers: StaticBuffers, batch: Batch) -> processors.RowSettings:
    """The sampling settings of all rows; indexed with batch.rows."""
    tables = {name: buffers[f"row_{name}"] for name in processors.RowSettings._fields[:-1]}
    return processors.RowSettings(**tables, generated=batch.column(Column.GENERATED))
