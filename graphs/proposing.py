"""Drafts without a model: the text that the device keeps for them, the call of a proposer inside a round, and n-gram look-up."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from stepgraph.graphs.batch import Batch
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model_call import check_shape
from stepgraph.graphs.proposer import History, Proposer
from stepgraph.graphs.row_layout import REFUSED, Column
from stepgraph.sampling import bitmask
from stepgraph.sampling.grammar.status import FinishCode, MaskStatus
from stepgraph.sampling.kernels import Emission
from stepgraph.sampling.kernels.c_kernel import CKernel
from stepgraph.sampling.kernels.operation import Dense, Flags, Ints, Longs, StridedLongs, empty_as, operation

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


def append_emission(buffers: StaticBuffers, batch: Batch, emission: Emission) -> None:
    """Append the emitted tokens to their rows' histories. `batch`: at the start of the round."""
    append_tokens(batch.rows, emission.tokens, emission.emitted, batch.column(Column.LENGTH), buffers.row_text)


@operation(lambda *_: None, writes=("row_text",), triton=True, c=CKernel("append_tokens"))
def append_tokens(rows: Longs, tokens: Longs, emitted: Longs, length: StridedLongs, row_text: Ints) -> None:
    """Write the first `emitted` [B] of the tokens [B, Q] into row_text [R, width], from column length [B] on."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    inside, columns = index < emitted[:, None], (length[:, None] + index).clamp(max=row_text.shape[1] - 1)
    kept = row_text[rows[:, None], columns]
    row_text.index_put_((rows[:, None], columns), torch.where(inside, tokens.to(torch.int32), kept))


def propose(buffers: StaticBuffers, after: Batch, proposer: Proposer, limits: Limits) -> Tensor:
    """[B, K] a chain of unmasked drafts for every row that continues, -1 after its last draft."""
    count, generated = limits.num_speculative_tokens, after.column(Column.GENERATED)
    length = after.column(Column.LENGTH).clamp(min=1)  # 0 for padding rows, whose last token would be outside the text
    drafts = proposer.propose(History(buffers.row_text[after.rows], length, generated, given_from(limits), count), buffers)
    check_drafts(drafts, len(after.rows), count)
    return choose_chain(drafts, after.column(Column.FINISH), after.column(Column.DRAFT_LIMIT), limits.num_tokens, after.rows)


def mark_looked_up(buffers: StaticBuffers, after: Batch, sampled: bool) -> None:
    """Mark all drafts of a round in which the draft model does not run: looked up, unless a grammar forces them, and certain."""
    buffers.row_looked_up.index_fill_(0, after.rows, True)
    if sampled:
        buffers.row_certain.index_fill_(0, after.rows, True)


@operation(empty_as, writes=("row_forced",), triton=True, c=CKernel("choose_chain"))
def choose_chain(
    proposed: Longs,
    finish: StridedLongs,
    limit: StridedLongs,
    num_tokens: int,
    rows: Longs,
    masks: Dense | None = None,
    constrained: Flags | None = None,
    status: StridedLongs | None = None,
    forced: Dense | None = None,
    row_forced: Tensor | None = None,
) -> Tensor:
    """[B, K] the drafts of proposed chains: each the token that the grammar forces, else the proposed token if it is legal.

    Drafts are -1 in rows that do not run, from the limit of a row on, and after a token that is none, or another one than proposed: then
    only forced tokens go on. REFUSED, where the proposed token is not legal, ends a chain as well: statistics count the two separately.
    proposed [B, K]; finish, limit [B]; rows [B]. With a grammar: masks [R, >= K, words] int32; constrained [B]; status [B, K] of these
    masks. With forced tokens: forced [K, B] int64, -1 where the grammar leaves a choice; row_forced [R, >= K] bool: gets whether each
    draft is forced.
    """
    alive = follows = finish == FinishCode.RUNNING
    chosen = list[Tensor]()
    for index, found in enumerate(proposed.unbind(1)):
        token = torch.where(follows & (found >= 0) & (found < num_tokens), found, -1)
        if masks is not None and constrained is not None and status is not None:
            legal = bitmask.allowed(token, masks[:, index], constrained, status[:, index], rows)
            token = torch.where(legal | (token < 0), token, REFUSED)
            if forced is not None and row_forced is not None:
                taken = (forced[index] >= 0) & constrained & (status[:, index] == MaskStatus.OK)
                token = torch.where(taken, forced[index], token)
                row_forced[:, index].index_copy_(0, rows, taken)
        token = torch.where(alive & (limit > index), token, -1)
        alive, follows = token >= 0, follows & (token == found)
        chosen.append(token)
    return torch.stack(chosen, 1)


def check_drafts(drafts: Tensor, rows: int, count: int) -> None:
    """ValueError if a proposer returned another shape or dtype. Costs nothing in a replay, which runs no Python."""
    check_shape("drafts of the proposer", drafts, rows, count)
    if drafts.dtype != torch.int64:
        raise ValueError(f"drafts of the proposer: got {drafts.dtype}, expected torch.int64")


def _outputs(text: Tensor, length: Tensor, generated: Tensor, given_from: int, count: int, *_: int) -> Tensor:
    return length.new_empty(len(text), count)


@operation(_outputs, triton=True, c=CKernel("look_up"))
def look_up(text: Ints, length: StridedLongs, generated: StridedLongs, given_from: int, count: int, longest: int, shortest: int) -> Tensor:
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
