"""What sampled rounds do in place of greedy ones: the choices of target and draft model, and counts of tokens for penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs import accept_options
from stepgraph.graphs.accept_options import AcceptOptions, after_accepted, force_accepted
from stepgraph.graphs.batch import Batch, Choice
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.vocabulary_shard import Operations
from stepgraph.graphs.round_specs import Counter
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling import kernels, rng, sampler
from stepgraph.sampling.kernels import GrammarMask, processors
from stepgraph.sampling.kernels.operation import Contiguous, operation


def choose_sampled(buffers: StaticBuffers, batch: Batch, logits: Tensor, mask: GrammarMask | None, options: AcceptOptions) -> Choice:
    """Masks and logit processors, then rejection sampling against the distributions of the drafts."""
    own, forced, ops, columns = logits, options.forced, options.shard or kernels, options.shard or sampler.ALL
    if options.processors:
        own = accept_options.apply_processors(buffers, batch, logits, options.processors, columns)
    processed = ops.process(own, row_settings(buffers, batch), batch.rows, batch.drafts, mask=mask)
    if "row_bad_words" in buffers:
        processed = accept_options.ban_words(buffers, batch, processed, columns)
    masked, finite, status = processed
    params = params_of(buffers, batch)
    probs = ops.distribution(masked, params)
    greedy = params[:, sampler.Param.TEMPERATURE] <= 0  # their drafts are greedy too, perhaps from a round that keeps no distributions
    drafts = batch.drafts.shape[1]
    certain = buffers.row_certain[:, :drafts][batch.rows] | greedy[:, None]
    draft_count, seed, length = (batch.column(column) for column in (Column.DRAFT_COUNT, Column.SEED, Column.LENGTH))
    tokens, accepted = ops.reject_sample(
        probs, buffers.row_draft_probs[:, :drafts], batch.rows, certain, finite, batch.drafts, draft_count, status, seed, length
    )
    if "row_relaxed" in buffers and drafts:
        tokens, accepted = accept_options.relax(buffers, batch, processed, probs, tokens, accepted, columns)
    if forced is not None:
        accepted = force_accepted(batch, finite, status, forced)
        index = accepted[:, None, None].expand(-1, 1, probs.shape[2])
        drawn = ops.race(probs.gather(1, index).squeeze(1), seed, length + accepted, rng.Purpose.TARGET)
        tokens = after_accepted(batch, accepted, drawn[:, None].expand_as(tokens))
    ops.log_probabilities(logits, probs, tokens, buffers.results_logprobs[: len(batch.rows), : drafts + 1])
    if "top_ids_ring_host" in buffers:
        rings = buffers.top_ids_ring_host, buffers.top_logprobs_ring_host
        ops.top_logprobs(logits, probs, batch.rows, buffers.row_params, buffers.round_counters[Counter.PUBLISHED :], *rings)
    return Choice(tokens, finite, accepted, status)


def record_output(buffers: StaticBuffers, rows: Tensor, tokens: Tensor, emitted: Tensor) -> None:
    """What later rounds need of the emitted tokens."""
    count_output(rows, tokens, emitted, buffers.row_output_counts)
    if "row_recent" in buffers:
        accept_options.remember_output(rows, tokens, emitted, buffers.row_recent)


@operation(lambda *_: None, writes=("output_counts",), triton=True)
def count_output(rows: Contiguous, tokens: Contiguous, emitted: Contiguous, output_counts: Contiguous) -> None:
    """Add the emitted tokens to output_counts [R, V] int32, which penalties use. rows, emitted [B], tokens [B, Q] int64."""
    index = torch.arange(tokens.shape[1], device=rows.device)
    flat_index = rows[:, None] * output_counts.shape[1] + tokens
    counted = (index < emitted[:, None]).to(output_counts.dtype)
    output_counts.view(-1).scatter_add_(0, flat_index.flatten(), counted.flatten())


def draft_sampled(
    buffers: StaticBuffers, after: Batch, step: int, logits: Tensor, mask: GrammarMask | None, d2t: Tensor | None, ops: Operations
) -> tuple[Tensor, Tensor]:
    """A token drawn from the draft's processed logits; the distribution is kept for rejection sampling in the next round."""
    size = len(after.rows)
    before = buffers.batch_drafts[: step - 1, :size].T
    masked, finite, _ = ops.process(logits[:, None], row_settings(buffers, after), after.rows, before, step - 1, mask, d2t)
    length = after.column(Column.LENGTH)
    params, seed, position = params_of(buffers, after), after.column(Column.SEED), length + (step - 1) if step > 1 else length
    tokens = ops.draw(masked[:, 0], params, seed, position, rng.Purpose.DRAFT, after.rows, buffers.row_draft_probs[:, step - 1], d2t)
    return finite[:, 0], tokens


def params_of(buffers: StaticBuffers, batch: Batch) -> Tensor:
    """[B, Param] float32, gathered once in a round."""
    return buffers.row_params[batch.rows] if batch.params is None else batch.params


def row_settings(buffers: StaticBuffers, batch: Batch) -> processors.RowSettings:
    """The sampling settings of all rows; indexed with batch.rows."""
    tables = {name: buffers[f"row_{name}"] for name in processors.RowSettings._fields[:-1]}
    return processors.RowSettings(**tables, generated=batch.column(Column.GENERATED))
