"""The stages of a round: functions over static buffers. The same code runs eagerly, on the tape and in a CUDA graph.

Device code: no value is copied to the host, and all shapes follow from the key. Stages on one stream pass ordinary tensors;
data for the other stream goes through a static buffer, because the allocator may reuse an intermediate's memory on the stream
that made it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs import sampled_stages
from stepgraph.graphs.batch import Batch, model_input, model_logits
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.drafting import checked_masks
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import TargetModel
from stepgraph.graphs.model_call import check_shape, run_model
from stepgraph.graphs.row_layout import Column, ResultLayout
from stepgraph.graphs.sampled_stages import DEFAULT_ACCEPT, AcceptOptions, TargetChoice
from stepgraph.sampling import kernels
from stepgraph.sampling.grammar.status import FinishCode, MaskStatus
from stepgraph.sampling.kernels import Emission, GrammarMask
from stepgraph.sampling.kernels.operation import Flags, Longs, empty_as, operation


def target_verify(buffers: StaticBuffers, batch: Batch, model: TargetModel, limits: Limits) -> tuple[Tensor, Tensor]:
    """Run the target over each row's last token and drafts. Returns logits [B, K + 1, num_tokens] and features [B, K + 1, F]."""
    tokens = torch.cat([batch.column(Column.LAST_TOKEN)[:, None], batch.drafts], 1)
    inputs = model_input(batch, limits, tokens, -1, live=batch.live)
    if limits.max_loras:
        inputs = inputs._replace(lora_slots=batch.column(Column.LORA))
    output = run_model("target", model.forward, inputs, buffers)
    check_shape("target features", output.next_features, *tokens.shape, limits.feature_size)
    if "results_states" in buffers:
        states = buffers.results_states[: tokens.shape[0], : tokens.shape[1]]
        states.copy_(output.saved_states(states.shape[-1]))
    return model_logits("target", model, output.hidden, limits), output.next_features


def accept(
    buffers: StaticBuffers,
    batch: Batch,
    logits: Tensor,
    constrained: bool,
    sampled: bool = False,
    options: AcceptOptions = DEFAULT_ACCEPT,
) -> tuple[Emission, Batch]:
    """Mask the logits, choose tokens, accept drafts, check for the end. Returns the emission and the batch after it."""
    mask = None
    if constrained:
        mask = checked_masks(buffers, batch.rows, 0, logits.shape[1])
        batch = batch._replace(constrained=mask.constrained)
    if sampled:
        batch = batch._replace(params=buffers.row_params[batch.rows])
    tokens, finite, accepted, status = (sampled_stages.choose_sampled if sampled else _choose_greedy)(buffers, batch, logits, mask, options)
    room = batch.column(Column.MAX_LENGTH) - batch.column(Column.LENGTH)
    drafts, draft_count, stop_ids = batch.drafts, batch.column(Column.DRAFT_COUNT), buffers.row_stop_ids[batch.rows]
    emitted, accepted, finish = kernels.chain_accept(tokens, finite, drafts, draft_count, status, stop_ids, room, accepted)
    forced = buffers.row_forced if constrained and "row_forced" in buffers else None
    looked_up = buffers.row_looked_up if "row_looked_up" in buffers else None
    inputs = batch.rows, batch.state, tokens, status, drafts, emitted, accepted, finish
    emitted, finish, state = write_emission(*inputs, buffers.row_state, buffers.results[: len(batch.rows)], forced, looked_up)
    if sampled:
        sampled_stages.record_output(buffers, batch.rows, tokens, emitted)
    return Emission(tokens, emitted, accepted, finish), batch._replace(state=state)


def _choose_greedy(buffers: StaticBuffers, batch: Batch, logits: Tensor, mask: GrammarMask | None, options: AcceptOptions) -> TargetChoice:
    """The legal token with the largest logit at every position; a draft is accepted if it is that token."""
    finite, tokens = (options.shard or kernels).most_probable(logits, mask)
    status = torch.full_like(tokens, int(MaskStatus.OK)) if mask is None else mask.status
    accepted = None
    if options.forced_acceptance is not None:
        accepted = sampled_stages.force_accepted(batch, finite, status, options.forced_acceptance)
        tokens = sampled_stages.after_accepted(batch, accepted, tokens)
    return TargetChoice(tokens, finite, accepted, status)


@operation(lambda row, state, *_: (empty_as(row), empty_as(row), empty_as(state)), writes=("row_state", "results"), triton=True, c=True)
def write_emission(
    rows: Longs,
    state: Longs,
    tokens: Longs,
    status: Longs,
    drafts: Longs,
    emitted: Longs,
    accepted: Longs,
    finish: Longs,
    row_state: Longs,
    results: Longs,
    row_forced: Flags | None = None,
    row_looked_up: Flags | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance the rows by what they emit, and write the first fields of a ResultRecord. Inert rows keep their state.

    Returns the tokens emitted [B], 0 for inert rows; the FinishCode [B], unchanged for inert rows; and the state after it [B, columns].
    rows [B]; state [B, columns]; tokens, status [B, K + 1]; drafts [B, K]; emitted, accepted, finish [B]: of chain_accept;
    row_state [R, columns]; results [B, columns of a ResultLayout]. row_forced, row_looked_up [R, >= K]: where the drafts
    came from, for a bit of each that was verified. A row without a constraint has no forced drafts: its flags are from another request.
    """
    before = dict(zip(Column, state.unbind(1), strict=True))
    live = before[Column.FINISH] == FinishCode.RUNNING
    emitted, finish = torch.where(live, emitted, 0), torch.where(live, finish, before[Column.FINISH])
    last = tokens.gather(1, (emitted - 1).clamp(min=0)[:, None]).squeeze(1)
    changed = {
        Column.GENERATED: before[Column.GENERATED] + emitted,
        Column.LAST_TOKEN: torch.where(emitted > 0, last, before[Column.LAST_TOKEN]),
        Column.ACCEPTED: accepted,
        Column.FINISH: finish,
        Column.DRAFT_COUNT: torch.zeros_like(emitted),
        Column.LENGTH: before[Column.LENGTH] + emitted,
    }
    after = torch.where(live[:, None], torch.stack(list((before | changed).values()), 1), state)
    row_state.index_copy_(0, rows, after)
    layout, index = ResultLayout(drafts.shape[1]), torch.arange(drafts.shape[1], device=rows.device)
    layout.write(
        results,
        emitted=emitted,
        finish=finish,
        accepted=accepted,
        draft_count=before[Column.DRAFT_COUNT],
        tokens=tokens,
        statuses=status,
        drafts=drafts,
    )
    verified = index < before[Column.DRAFT_COUNT][:, None]
    constrained = verified & (before[Column.CONSTRAINED] != 0)[:, None]
    for name, flags, counted in (("forced", row_forced, constrained), ("looked_up", row_looked_up, verified)):
        if flags is not None:
            layout.write(results, **{name: ((flags[rows, : len(index)] & counted).to(torch.int64) << index).sum(1)})
    return emitted, finish, after
