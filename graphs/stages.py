"""The stages of a round: functions over static buffers. The same bodies run eagerly, on the tape and in a CUDA graph.

Device code: nothing here asks the host for a value, and every shape follows from the key. What one stage hands to the
next on the same stream is an ordinary tensor; what crosses to the other stream goes through a static buffer, because
the allocator may give an intermediate's memory away on the stream where it was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.buffers import Column, StaticBuffers
from stepgraph.graphs.model import DraftModel, ModelInput, TargetModel, check_shape
from stepgraph.graphs.shapes import Limits
from stepgraph.sampling import acceptance, kernels, processors, rng, sampler
from stepgraph.sampling.acceptance import Emission, FinishCode
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import Ruling


class Batch(NamedTuple):
    """The rows of this round, as they were when it began. B slots; padding slots hold the dummy row, which is inert."""

    rows: Tensor  # [B] int64
    state: Tensor  # [B, columns] int64
    drafts: Tensor  # [B, K] int64, -1 where there is none
    block_tables: Tensor  # [B, pages_per_row] int64

    def column(self, column: Column) -> Tensor:
        return self.state[:, column]

    @property
    def live(self) -> Tensor:
        return self.state[:, Column.FINISH] == FinishCode.RUNNING


def read_batch(buffers: StaticBuffers, size: int) -> Batch:
    rows = buffers.batch_rows[:size]
    return Batch(rows, buffers.row_state[rows], buffers.row_drafts[rows], buffers.row_block_tables[rows])


def target_verify(buffers: StaticBuffers, batch: Batch, model: TargetModel, limits: Limits) -> tuple[Tensor, Tensor]:
    """Run the target over each row's last token and drafts. Returns logits [B, K + 1, num_tokens] and features [B, K + 1, F]."""
    tokens = torch.cat([batch.column(Column.LAST_TOKEN)[:, None], batch.drafts], 1)
    first = batch.column(Column.LENGTH)[:, None] - 1
    wanted = batch.live[:, None] & (tokens >= 0)
    output = model.forward(_model_input(batch, limits, tokens, first, wanted), buffers)
    check_shape("target features", output.features, len(batch.rows), limits.positions, limits.feature_size)
    return _logits("target", model, output.hidden, limits), output.features


def accept(
    buffers: StaticBuffers,
    batch: Batch,
    logits: Tensor,
    constrained: bool,
    sampled: bool = False,
    forced: Sequence[float] | None = None,
) -> tuple[Emission, Batch]:
    """Mask, choose, accept, finish: what the round emits, and the batch as it stands afterwards.

    `forced` is for benchmarks: draft j holds with that probability if the grammar allows it, whatever the models say.
    """
    ruling = None
    if constrained:
        owner, generated = batch.column(Column.OWNER), batch.column(Column.GENERATED)
        ruled = batch.column(Column.CONSTRAINED) != 0
        status = kernels.mask_status(buffers.row_tags, owner, generated, ruled, rows=batch.rows)
        ruling = Ruling(buffers.row_masks, batch.rows, ruled, status)
    choose = _choose_sampled if sampled else _choose_greedy
    tokens, finite, accepted, status = choose(buffers, batch, logits, ruling, forced)
    room = batch.column(Column.MAX_LENGTH) - batch.column(Column.LENGTH)
    drafts, draft_count, stop_ids = batch.drafts, batch.column(Column.DRAFT_COUNT), buffers.row_stop_ids[batch.rows]
    emission = kernels.chain_accept(tokens, finite, drafts, draft_count, status, stop_ids, room, accepted)
    emission = emission._replace(
        emitted=torch.where(batch.live, emission.emitted, 0), finish=torch.where(batch.live, emission.finish, batch.column(Column.FINISH))
    )
    if sampled:
        _count_output(buffers, batch.rows, emission)
    after = _advance(batch, emission)
    buffers.row_state.index_copy_(0, batch.rows, after.state)
    results = torch.cat([emission.emitted[:, None], emission.finish[:, None], emission.accepted[:, None], tokens], 1)
    buffers.results[: len(batch.rows)].copy_(results)
    return emission, after


class Choice(NamedTuple):
    """What the target says of every place of a row."""

    tokens: Tensor  # [B, K + 1] int64
    finite: Tensor  # [B, K + 1] bool: some legal logit is a number
    accepted: Tensor | None  # [B] int64: leading drafts that hold; None: those that equal the tokens
    status: Tensor  # [B, K + 1] int64 MaskStatus


def _choose_greedy(buffers: StaticBuffers, batch: Batch, logits: Tensor, ruling: Ruling | None, forced: Sequence[float] | None) -> Choice:
    """The likeliest legal token of every place; a draft holds where it is that token."""
    if ruling is None:
        best, tokens = logits.max(-1)
        status = torch.full_like(tokens, int(MaskStatus.OK))
    else:
        status = ruling.status
        best, tokens = kernels.masked_argmax(logits, ruling.masks, ruling.rows, ruling.ruled, status=status)
    finite, accepted = torch.isfinite(best), None
    if forced is not None:
        accepted = _forced(batch, finite, status, forced)
        tokens = _behind_drafts(batch, accepted, tokens)
    return Choice(tokens, finite, accepted, status)


def _choose_sampled(buffers: StaticBuffers, batch: Batch, logits: Tensor, ruling: Ruling | None, forced: Sequence[float] | None) -> Choice:
    """Masks, then everything that a request may ask for; drafts are judged by exact rejection."""
    masked, finite, status = kernels.process(logits, _settings(buffers, batch), batch.rows, batch.drafts, ruling=ruling)
    params = buffers.row_params[batch.rows]
    probs = kernels.distribution(masked, params)
    certain = params[:, sampler.Param.TEMPERATURE] <= 0  # drafted greedily, maybe in a round without distributions
    draft_count, seed, length = (batch.column(column) for column in (Column.DRAFT_COUNT, Column.SEED, Column.LENGTH))
    tokens, accepted = kernels.reject_sample(
        probs, buffers.row_draft_probs, batch.rows, certain, finite, batch.drafts, draft_count, status, seed, length
    )
    if forced is not None:
        accepted = _forced(batch, finite, status, forced)
        place = accepted[:, None, None].expand(-1, 1, probs.shape[2])
        drawn = kernels.race(probs.gather(1, place).squeeze(1), seed, length + accepted, rng.Purpose.TARGET)
        tokens = _behind_drafts(batch, accepted, drawn[:, None].expand_as(tokens))
    buffers.results_logprobs[: len(batch.rows)].copy_(processors.log_probabilities(logits, probs, tokens))
    return Choice(tokens, finite, accepted, status)


def _forced(batch: Batch, finite: Tensor, status: Tensor, shares: Sequence[float]) -> Tensor:
    owner, length = batch.column(Column.OWNER), batch.column(Column.LENGTH)
    return acceptance.force_accepted(shares, finite, batch.column(Column.DRAFT_COUNT), status, owner, length)


def _behind_drafts(batch: Batch, accepted: Tensor, tokens: Tensor) -> Tensor:
    """The drafts that hold, then `tokens`, both at their places."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(index < accepted[:, None], torch.cat([batch.drafts, tokens[:, -1:]], 1), tokens)


def draft_prefill(
    buffers: StaticBuffers, before: Batch, emission: Emission, features: Tensor, model: DraftModel, limits: Limits
) -> tuple[Tensor, Tensor]:
    """Run the draft over the tokens just emitted. Returns logits [B, num_tokens] and features [B, 1, F] at each row's last one."""
    index = torch.arange(limits.positions, device=before.rows.device)
    wanted = index < emission.emitted[:, None]
    inputs = _model_input(before, limits, emission.tokens, before.column(Column.LENGTH)[:, None], wanted, features)
    output = model.forward(inputs, buffers)
    last = (emission.emitted - 1).clamp(min=0)[:, None, None]
    hidden = output.hidden.gather(1, last.expand(-1, 1, output.hidden.shape[2]))
    features = output.features.gather(1, last.expand(-1, 1, output.features.shape[2]))
    return _logits("draft", model, hidden[:, 0], limits), features


def draft_decode(
    buffers: StaticBuffers, after: Batch, step: int, tokens: Tensor, features: Tensor, model: DraftModel, limits: Limits
) -> tuple[Tensor, Tensor]:
    """Run the draft over its own draft `step` (from 1). tokens [B], -1 where a row drafts no more; returns as draft_prefill."""
    first = after.column(Column.LENGTH)[:, None] + (step - 1)
    inputs = _model_input(after, limits, tokens[:, None], first, tokens[:, None] >= 0, features)
    output = model.forward(inputs, buffers)
    return _logits("draft", model, output.hidden[:, 0], limits), output.features


def choose_draft(
    buffers: StaticBuffers,
    after: Batch,
    step: int,
    logits: Tensor,
    alive: Tensor,
    masked: bool,
    sampled: bool = False,
    d2t: Tensor | None = None,
) -> Tensor:
    """Draft `step` (from 1) of every row that still drafts, -1 elsewhere. Mask row step - 1 guides it, and verifies it later.

    With `d2t` the draft has a vocabulary of its own: its logits stand for the target's tokens that d2t names, and the rest
    of the target's tokens are not proposed.
    """
    ruling = None
    if masked:
        ruled, size = after.column(Column.CONSTRAINED) != 0, len(after.rows)
        tags, masks = (each[step - 1, :size, None] for each in (buffers.batch_tags, buffers.batch_masks))
        status = kernels.mask_status(tags, after.column(Column.OWNER), after.column(Column.GENERATED), ruled, step - 1)
        ruling = Ruling(masks, None, ruled, status)
    choose = _draft_sampled if sampled else _draft_greedy
    finite, tokens = choose(buffers, after, step, logits, ruling, d2t)
    return torch.where(alive & finite & (after.column(Column.DRAFT_LIMIT) >= step), tokens, -1)


def _draft_greedy(
    buffers: StaticBuffers, after: Batch, step: int, logits: Tensor, ruling: Ruling | None, d2t: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Whether the best legal logit of every row is a number, and the target's id of its token."""
    if ruling is None:
        best, places = logits.max(-1)
    else:
        masks, rows, ruled, status = ruling
        best, places = (each.squeeze(1) for each in kernels.masked_argmax(logits[:, None], masks, rows, ruled, d2t, status))
    return torch.isfinite(best), places if d2t is None else d2t[places]


def _draft_sampled(
    buffers: StaticBuffers, after: Batch, step: int, logits: Tensor, ruling: Ruling | None, d2t: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A token drawn from what the request asks for of the draft's logits; the distribution is kept for its judgement."""
    size = len(after.rows)
    before = buffers.batch_drafts[: step - 1, :size].T
    masked, finite, _ = kernels.process(logits[:, None], _settings(buffers, after), after.rows, before, step - 1, ruling, d2t)
    params, seed, position = buffers.row_params[after.rows], after.column(Column.SEED), after.column(Column.LENGTH) + (step - 1)
    width = None if d2t is None else buffers.row_draft_probs.shape[2]
    probs, tokens = kernels.draw(masked[:, 0], params, seed, position, rng.Purpose.DRAFT, d2t, width)
    buffers.row_draft_probs[:, step - 1].index_copy_(0, after.rows, probs)
    return finite[:, 0], tokens


def drafting(after: Batch) -> Tensor:
    """[B] bool: rows that go on after this round."""
    return after.live & (after.column(Column.DRAFT_LIMIT) > 0)


def keep_drafts(buffers: StaticBuffers, after: Batch, drafts: list[Tensor]) -> None:
    """Leave the drafts in their rows for the next target_verify."""
    chain = torch.stack(drafts, 1)
    buffers.row_drafts.index_copy_(0, after.rows, chain)
    state = torch.cat(
        [after.state[:, : Column.DRAFT_COUNT], (chain >= 0).sum(1, keepdim=True), after.state[:, Column.DRAFT_COUNT + 1 :]], 1
    )
    buffers.row_state.index_copy_(0, after.rows, state)


def place_masks(buffers: StaticBuffers, size: int, stage: int) -> None:
    """Move one stage of uploaded mask rows into their rows; the tag says which of a row's K + 1 places is meant."""
    rows = buffers.batch_rows[:size]
    tags = buffers.batch_tags[stage, :size]
    buffers.row_masks.index_put_((rows, tags[:, 2]), buffers.batch_masks[stage, :size])
    buffers.row_tags.index_put_((rows, tags[:, 2]), tags)


def cache_slots(block_tables: Tensor, positions: Tensor, limits: Limits) -> Tensor:
    """[B, Q] cache slot of every position."""
    pages = block_tables.gather(1, positions // limits.page_size)
    return pages * limits.page_size + positions % limits.page_size


def _settings(buffers: StaticBuffers, batch: Batch) -> processors.RowSettings:
    """The settings of all rows, to be read at batch.rows."""
    return processors.RowSettings(
        params=buffers.row_params,
        bias_ids=buffers.row_bias_ids,
        biases=buffers.row_biases,
        stop_ids=buffers.row_stop_ids,
        prompt_seen=buffers.row_prompt_seen,
        output_counts=buffers.row_output_counts,
        generated=batch.column(Column.GENERATED),
    )


def _count_output(buffers: StaticBuffers, rows: Tensor, emission: Emission) -> None:
    """What was emitted joins what the penalties count."""
    index = torch.arange(emission.tokens.shape[1], device=rows.device)
    emitted = (index < emission.emitted[:, None]).to(buffers.row_output_counts.dtype)
    places = rows[:, None] * buffers.row_output_counts.shape[1] + emission.tokens
    buffers.row_output_counts.view(-1).scatter_add_(0, places.flatten(), emitted.flatten())


def _model_input(batch: Batch, limits: Limits, tokens: Tensor, first: Tensor, wanted: Tensor, features: Tensor | None = None) -> ModelInput:
    """Consecutive positions from `first` [B, 1] on; what is not wanted or lies beyond the row's end writes to the scratch page."""
    positions = first + torch.arange(tokens.shape[1], device=tokens.device)
    wanted = wanted & (positions >= 0) & (positions < batch.column(Column.MAX_LENGTH)[:, None])
    positions = positions.clamp(0, limits.max_length - 1)
    slots = torch.where(wanted, cache_slots(batch.block_tables, positions, limits), positions % limits.page_size)
    return ModelInput(tokens.clamp(min=0), positions, slots, batch.block_tables, limits.page_size, features)


def _logits(name: str, model: TargetModel | DraftModel, hidden: Tensor, limits: Limits) -> Tensor:
    """The model's logits without their padding, which no row may choose, constrained or not."""
    logits = model.logits(hidden)
    check_shape(f"{name} logits", logits, *hidden.shape[:-1], model.vocab_size)
    return logits[..., : limits.num_tokens]


def _advance(batch: Batch, emission: Emission) -> Batch:
    """The batch after its rows took what was emitted. Inert rows keep their state."""
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
