"""Drafts without a model: the text that the device keeps for them, the call of a proposer inside a round, and n-gram look-up."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from stepgraph.graphs.batch import Batch
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.drafting import continuing, rule_of, select_draft
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model_call import check_shape
from stepgraph.graphs.proposer import History, Proposer
from stepgraph.graphs.row_layout import REFUSED, Column
from stepgraph.sampling import bitmask
from stepgraph.sampling.kernels import Emission, GrammarMask
from stepgraph.sampling.kernels.c_kernel import CKernel
from stepgraph.sampling.kernels.operation import Contiguous, operation

ANCHOR = 8  # prompt tokens copied before a given text, so that the start of the output is found after the end of the prompt


def given_from(limits: Limits) -> int:
    return limits.max_length + 1 + ANCHOR


def text_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`, for proposers: per row its history, a column of -1, the given text, and a column of -1."""
    width = given_from(limits) + limits.max_length + 1
    return (
        BufferSpec("row_text", (limits.rows, width), torch.int32, fill=-1),
        BufferSpec("text_ring_host", (limits.admission_ring_depth, width), torch.int32, "pinned"),
    )


def append_emission(buffers: StaticBuffers, batch: Batch, emission: Emission, limits: Limits) -> None:
    """Append the emitted tokens to their rows' histories. `batch`: at the start of the round."""
    index = torch.arange(limits.positions, device=batch.rows.device)
    emitted = index < emission.emitted[:, None]
    # Positions that emit nothing all write -1 to the column between the texts, which holds -1.
    columns = torch.where(emitted, batch.column(Column.LENGTH)[:, None] + index, limits.max_length)
    tokens = torch.where(emitted, emission.tokens, -1).to(torch.int32)
    buffers.row_text.index_put_((batch.rows[:, None], columns), tokens)


def propose(buffers: StaticBuffers, after: Batch, proposer: Proposer, limits: Limits) -> Tensor:
    """[B, K] a chain of unmasked drafts for every row that continues, -1 after its last draft."""
    count, generated = limits.num_speculative_tokens, after.column(Column.GENERATED)
    length = after.column(Column.LENGTH).clamp(min=1)  # 0 for padding rows, whose last token would be outside the text
    drafts = proposer.propose(History(buffers.row_text[after.rows], length, generated, given_from(limits), count), buffers)
    check_drafts(drafts, len(after.rows), count)
    valid = torch.arange(count, device=drafts.device) < after.column(Column.DRAFT_LIMIT)[:, None]
    valid = valid & continuing(after)[:, None] & (drafts >= 0) & (drafts < limits.num_tokens)
    return torch.where(valid.to(torch.int64).cumprod(1) != 0, drafts, -1)


def mark_looked_up(buffers: StaticBuffers, after: Batch, sampled: bool) -> None:
    """Mark all drafts of a round in which the draft model does not run: looked up, unless a grammar forces them, and certain."""
    buffers.row_looked_up.index_fill_(0, after.rows, True)
    if sampled:
        buffers.row_certain.index_fill_(0, after.rows, True)


def choose_proposed(buffers: StaticBuffers, after: Batch, step: int, proposed: Tensor, alive: Tensor, mask: GrammarMask) -> Tensor:
    """Draft `step` (from 1) of every row that still drafts: the token that the grammar forces, else the proposed token if it is legal.

    -1 ends a chain. REFUSED, where the proposed token is not legal, ends it as well; statistics count the two separately.
    """
    rule, forced = rule_of(mask), buffers.batch_forced[step - 1, : len(after.rows)] if "batch_forced" in buffers else None
    unforced = torch.where(bitmask.allowed(proposed, *rule), proposed, torch.where(proposed < 0, -1, REFUSED))
    draft = select_draft(unforced, torch.ones_like(alive), alive, after.column(Column.DRAFT_LIMIT), step, None, forced, *rule)
    if forced is not None and draft.forced is not None:
        buffers.row_forced[:, step - 1].index_copy_(0, after.rows, draft.forced)
    return draft.tokens


def check_drafts(drafts: Tensor, rows: int, count: int) -> None:
    """ValueError if a proposer returned another shape or dtype. Costs nothing in a replay, which runs no Python."""
    check_shape("drafts of the proposer", drafts, rows, count)
    if drafts.dtype != torch.int64:
        raise ValueError(f"drafts of the proposer: got {drafts.dtype}, expected torch.int64")


def _outputs(text: Tensor, length: Tensor, generated: Tensor, given_from: int, count: int, *_: int) -> Tensor:
    return length.new_empty(len(text), count)


def _in_c(text: Tensor, length: Tensor, generated: Tensor, *_: int) -> bool:
    return text.dtype is torch.int32 and length.dtype is generated.dtype is torch.int64


@operation(_outputs, c=CKernel("look_up", _in_c))
def look_up(text: Contiguous, length: Tensor, generated: Tensor, given_from: int, count: int, longest: int, shortest: int) -> Tensor:
    """[B, count] int64: chains of drafts as NgramLookup describes them, -1 without a match. text [B, T], length [B], generated [B] and
    given_from as in History; longest and shortest match."""
    start, width = given_from, text.shape[1]
    length, generated = (column[:, None].to(torch.int32) for column in (length, generated))
    columns = torch.arange(width, dtype=torch.int32, device=text.device)
    # Unique in a row: the column in the history, or a larger number that falls with the distance to the expected column.
    distance = columns - start - generated
    preference = torch.where(columns < start, columns, 3 * width - 2 * distance.abs() - (distance < 0).to(torch.int32))
    matched = _match_lengths(text, length, longest).to(torch.int32)
    usable = (matched >= shortest) & ((columns < length) | ((columns >= start) & (text >= 0)))
    best, column = torch.where(usable, matched * 4 * width + preference, -1).max(1, keepdim=True)
    drafts = torch.arange(count, device=text.device)
    copied = column + torch.where(column < start, drafts % (length - column).clamp(min=1), drafts)
    chain = text.gather(1, copied.clamp(max=width - 1)).to(torch.int64)
    return torch.where(best >= 0, chain, -1)


def _match_lengths(text: Tensor, length: Tensor, count: int) -> Tensor:
    """[B, T] int8: how many tokens before each column equal the last tokens of the history."""
    device = text.device
    last = length - torch.arange(count, 0, -1, device=device)  # [B, count] int64
    suffix = torch.where(last >= 0, text.gather(1, last.clamp(min=0)), -2)  # -2 equals no token and no padding
    windows = pad(text, (count, 0), value=-1).unfold(1, count, 1)[:, : text.shape[1]]  # [B, T, count], the tokens before a column
    after = torch.arange(count - 1, -1, -1, dtype=torch.int8, device=device)  # match length if this is the last unequal token
    return torch.where(windows == suffix[:, None], count, after).amin(2)
