"""The stages of a round: functions over static buffers. The same code runs eagerly, on the tape and in a CUDA graph.

Device code: no value is copied to the host, and all shapes follow from the key. Stages on one stream pass ordinary tensors;
data for the other stream goes through a static buffer, because the allocator may reuse an intermediate's memory on the stream
that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.batch import Batch, model_input, model_logits, row_settings
from stepgraph.graphs.buffers import Column, ResultLayout, StaticBuffers
from stepgraph.graphs.layers import slot_mapping
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import TargetModel, check_shape
from stepgraph.sampling import kernels, processors, rejection, rng, sampler
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import Emission, GrammarMask


def target_verify(buffers: StaticBuffers, batch: Batch, model: TargetModel, limits: Limits) -> tuple[Tensor, Tensor]:
    """Run the target over each row's last token and drafts. Returns logits [B, K + 1, num_tokens] and features [B, K + 1, F]."""
    tokens = torch.cat([batch.column(Column.LAST_TOKEN)[:, None], batch.drafts], 1)
    valid = batch.live[:, None] & (tokens >= 0)
    output = model.forward(model_input(batch, limits, tokens, -1, valid), buffers)
    check_shape("target features", output.features, len(batch.rows), limits.positions, limits.feature_size)
    if "results_states" in buffers:
        states = buffers.results_states[: len(batch.rows)]
        states.copy_(output.saved_states(states.shape[-1]))
    return model_logits("target", model, output.hidden, limits), output.features


def accept(
    buffers: StaticBuffers,
    batch: Batch,
    logits: Tensor,
    constrained: bool,
    sampled: bool = False,
    forced: Sequence[float] | None = None,
) -> tuple[Emission, Batch]:
    """Mask the logits, choose tokens, accept drafts, check for the end. Returns the emission and the batch after it.

    forced: for benchmarks, the probability that draft j is accepted where the grammar allows it, independent of the models.
    """
    mask = None
    if constrained:
        owner, generated = batch.column(Column.OWNER), batch.column(Column.GENERATED)
        has_grammar = batch.column(Column.CONSTRAINED) != 0
        status = kernels.mask_status(buffers.row_tags, owner, generated, has_grammar, rows=batch.rows)
        mask = GrammarMask(buffers.row_masks, batch.rows, has_grammar, status)
    choose = _choose_sampled if sampled else _choose_greedy
    tokens, finite, accepted, status = choose(buffers, batch, logits, mask, forced)
    room = batch.column(Column.MAX_LENGTH) - batch.column(Column.LENGTH)
    drafts, draft_count, stop_ids = batch.drafts, batch.column(Column.DRAFT_COUNT), buffers.row_stop_ids[batch.rows]
    emission = Emission(tokens, *kernels.chain_accept(tokens, finite, drafts, draft_count, status, stop_ids, room, accepted))
    emission = emission._replace(
        emitted=torch.where(batch.live, emission.emitted, 0), finish=torch.where(batch.live, emission.finish, batch.column(Column.FINISH))
    )
    if sampled:
        _count_output(buffers, batch.rows, emission)
    after = _advance(batch, emission)
    buffers.row_state.index_copy_(0, batch.rows, after.state)
    layout, lines = ResultLayout(drafts.shape[1]), buffers.results[: len(batch.rows)]
    layout.write(
        lines,
        emitted=emission.emitted,
        finish=emission.finish,
        accepted=emission.accepted,
        draft_count=draft_count,
        tokens=tokens,
        statuses=status,
        drafts=drafts,
    )
    if constrained and "row_forced" in buffers:
        # an unconstrained row may have flags of the request that had the row before
        layout.write(lines, forced=_draft_bits(buffers.row_forced, batch) * batch.column(Column.CONSTRAINED))
    if "row_looked_up" in buffers:
        layout.write(lines, looked_up=_draft_bits(buffers.row_looked_up, batch))
    return emission, after


class Choice(NamedTuple):
    """The target's tokens for every position of a row."""

    tokens: Tensor  # [B, K + 1] int64
    finite: Tensor  # [B, K + 1] bool: some legal logit is finite
    accepted: Tensor | None  # [B] int64: leading drafts that are accepted; None: those that equal the tokens
    status: Tensor  # [B, K + 1] int64 MaskStatus


def _choose_greedy(
    buffers: StaticBuffers, batch: Batch, logits: Tensor, mask: GrammarMask | None, forced: Sequence[float] | None
) -> Choice:
    """The legal token with the largest logit at every position; a draft is accepted if it is that token."""
    if mask is None:
        best, tokens = logits.max(-1)
        status = torch.full_like(tokens, int(MaskStatus.OK))
    else:
        status = mask.status
        best, tokens = kernels.masked_argmax(logits, mask.masks, mask.rows, mask.constrained, status=status)
    finite, accepted = torch.isfinite(best), None
    if forced is not None:
        accepted = _force_accepted(batch, finite, status, forced)
        tokens = _after_accepted(batch, accepted, tokens)
    return Choice(tokens, finite, accepted, status)


def _choose_sampled(
    buffers: StaticBuffers, batch: Batch, logits: Tensor, mask: GrammarMask | None, forced: Sequence[float] | None
) -> Choice:
    """Masks and logit processors, then rejection sampling against the distributions of the drafts."""
    masked, finite, status = kernels.process(logits, row_settings(buffers, batch), batch.rows, batch.drafts, mask=mask)
    params = buffers.row_params[batch.rows]
    probs = kernels.distribution(masked, params)
    greedy = params[:, sampler.Param.TEMPERATURE] <= 0  # their drafts are greedy too, perhaps from a round that keeps no distributions
    certain = buffers.row_certain[batch.rows] | greedy[:, None]
    draft_count, seed, length = (batch.column(column) for column in (Column.DRAFT_COUNT, Column.SEED, Column.LENGTH))
    tokens, accepted = kernels.reject_sample(
        probs, buffers.row_draft_probs, batch.rows, certain, finite, batch.drafts, draft_count, status, seed, length
    )
    if forced is not None:
        accepted = _force_accepted(batch, finite, status, forced)
        index = accepted[:, None, None].expand(-1, 1, probs.shape[2])
        drawn = kernels.race(probs.gather(1, index).squeeze(1), seed, length + accepted, rng.Purpose.TARGET)
        tokens = _after_accepted(batch, accepted, drawn[:, None].expand_as(tokens))
    buffers.results_logprobs[: len(batch.rows)].copy_(processors.log_probabilities(logits, probs, tokens))
    return Choice(tokens, finite, accepted, status)


def _draft_bits(flags: Tensor, batch: Batch) -> Tensor:
    """[B] int64, one bit per draft: set if the draft was verified and its flag in `flags` [R, K] is set."""
    index = torch.arange(batch.drafts.shape[1], device=batch.rows.device)
    set_flags = flags[batch.rows] & (index < batch.column(Column.DRAFT_COUNT)[:, None])
    return (set_flags.to(torch.int64) << index).sum(1)


def _force_accepted(batch: Batch, finite: Tensor, status: Tensor, shares: Sequence[float]) -> Tensor:
    owner, length = batch.column(Column.OWNER), batch.column(Column.LENGTH)
    return rejection.force_accepted(shares, finite, batch.column(Column.DRAFT_COUNT), status, owner, length)


def _after_accepted(batch: Batch, accepted: Tensor, tokens: Tensor) -> Tensor:
    """[B, K + 1] the accepted drafts, then `tokens` from that position on."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(index < accepted[:, None], torch.cat([batch.drafts, tokens[:, -1:]], 1), tokens)


def place_masks(buffers: StaticBuffers, size: int, stage: int) -> None:
    """Copy one stage of uploaded masks into the rows' masks; each tag holds the index among the row's K + 1 masks."""
    tags, masks = buffers.batch_tags[stage, :size], buffers.batch_masks[stage, :size]
    slot_mapping.scatter_masks(buffers.batch_rows[:size], tags, masks, buffers.row_tags, buffers.row_masks)


def _count_output(buffers: StaticBuffers, rows: Tensor, emission: Emission) -> None:
    """Add the emitted tokens to the counts that penalties use."""
    index = torch.arange(emission.tokens.shape[1], device=rows.device)
    emitted = (index < emission.emitted[:, None]).to(buffers.row_output_counts.dtype)
    flat_index = rows[:, None] * buffers.row_output_counts.shape[1] + emission.tokens
    buffers.row_output_counts.view(-1).scatter_add_(0, flat_index.flatten(), emitted.flatten())


def _advance(batch: Batch, emission: Emission) -> Batch:
    """The batch after the emission. Inert rows keep their state."""
    last = emission.tokens.gather(1, (emission.emitted - 1).clamp(min=0)[:, None]).squeeze(1)
    changed = {
        Column.GENERATED: batch.column(Column.GENERATED) + emission.emitted,
        Column.LAST_TOKEN: torch.where(emission.emitted > 0, last, batch.column(Column.LAST_TOKEN)),
        Column.ACCEPTED: emission.accepted,
        Column.FINISH: emission.finish,
        Column.DRAFT_COUNT: torch.zeros_like(emission.emitted),
        Column.LENGTH: batch.column(Column.LENGTH) + emission.emitted,
    }
    state = torch.stack([changed.get(column, batch.column(column)) for column in Column], 1)
    return batch._replace(state=torch.where(batch.live[:, None], state, batch.state))
