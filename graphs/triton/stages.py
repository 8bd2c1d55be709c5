"""The Triton program of write_emission: one instance per row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from stepgraph.graphs.row_layout import Column, ResultLayout
from stepgraph.sampling.grammar.status import FinishCode

_RUNNING = tl.constexpr(int(FinishCode.RUNNING))
_GENERATED, _LAST_TOKEN, _ACCEPTED, _FINISH, _DRAFT_COUNT, _LENGTH, _CONSTRAINED = (
    tl.constexpr(int(Column[name])) for name in ("GENERATED", "LAST_TOKEN", "ACCEPTED", "FINISH", "DRAFT_COUNT", "LENGTH", "CONSTRAINED")
)

# columns of a result, whatever the number of drafts; the tokens are followed by the statuses and the drafts
_RESULT = ResultLayout(num_drafts=0).columns
_RESULT_EMITTED, _RESULT_FINISH, _RESULT_ACCEPTED, _RESULT_DRAFT_COUNT, _RESULT_TOKENS = (
    tl.constexpr(_RESULT[name].start) for name in ("emitted", "finish", "accepted", "draft_count", "tokens")
)


@triton.jit
def write_row(
    rows,  # [B] int64, as all of these
    state,  # [B, columns]
    tokens,  # [B, Q]
    status,  # [B, Q]
    drafts,  # [B, Q - 1]
    emitted,  # [B]
    accepted,  # [B]
    finish,  # [B]
    row_state,  # [R, columns], written
    results,  # [B, width], written
    row_forced,  # [R, most] bool, or None, as the next one
    row_looked_up,  # [R, most] bool
    emitted_after,  # [B], written, as the next two
    finish_after,  # [B]
    state_after,  # [B, columns]
    positions,  # Q
    columns,
    width,
    most,
    COLUMNS: tl.constexpr,  # rounded up
    POSITIONS: tl.constexpr,  # Q, rounded up
):
    slot = tl.program_id(0).to(tl.int64)
    column, index = tl.arange(0, COLUMNS), tl.arange(0, POSITIONS)
    row_state_before, row_results = state + slot * columns, results + slot * width
    before = tl.load(row_state_before + column, mask=column < columns, other=0)
    live = tl.load(row_state_before + _FINISH) == _RUNNING
    count = tl.where(live, tl.load(emitted + slot), 0)
    finish_code = tl.where(live, tl.load(finish + slot), tl.load(row_state_before + _FINISH))
    num_accepted = tl.load(accepted + slot)
    token = tl.load(tokens + slot * positions + index, mask=index < positions, other=0)
    last = tl.sum(tl.where(index == count - 1, token, 0), 0)

    after = tl.where((column == _GENERATED) | (column == _LENGTH), before + count, before)
    after = tl.where((column == _LAST_TOKEN) & (count > 0), last, after)
    after = tl.where(column == _ACCEPTED, num_accepted, after)
    after = tl.where(column == _FINISH, finish_code, after)
    after = tl.where(column == _DRAFT_COUNT, 0, after)
    after = tl.where(live, after, before)
    tl.store(row_state + tl.load(rows + slot) * columns + column, after, mask=column < columns)
    tl.store(state_after + slot * columns + column, after, mask=column < columns)
    tl.store(emitted_after + slot, count)
    tl.store(finish_after + slot, finish_code)

    tl.store(row_results + _RESULT_EMITTED, count)
    tl.store(row_results + _RESULT_FINISH, finish_code)
    tl.store(row_results + _RESULT_ACCEPTED, num_accepted)
    tl.store(row_results + _RESULT_DRAFT_COUNT, tl.load(row_state_before + _DRAFT_COUNT))
    written = row_results + _RESULT_TOKENS + index
    tl.store(written, token, mask=index < positions)
    valid = tl.load(status + slot * positions + index, mask=index < positions, other=0)
    tl.store(written + positions, valid, mask=index < positions)
    draft = tl.load(drafts + slot * (positions - 1) + index, mask=index < positions - 1, other=0)
    tl.store(written + 2 * positions, draft, mask=index < positions - 1)
    verified = tl.minimum(tl.load(row_state_before + _DRAFT_COUNT), positions - 1)
    flag, bits = tl.load(rows + slot) * most + index, row_results + _RESULT_TOKENS + 3 * positions - 1
    if row_forced is not None:
        constrained = tl.where(tl.load(row_state_before + _CONSTRAINED) != 0, verified, 0)
        tl.store(bits, tl.sum(tl.load(row_forced + flag, mask=index < constrained, other=0).to(tl.int64) << index, 0))
    if row_looked_up is not None:
        tl.store(bits + 1, tl.sum(tl.load(row_looked_up + flag, mask=index < verified, other=0).to(tl.int64) << index, 0))


def write_emission(*tensors: Any) -> None:
    """The arguments and outputs of stages.write_emission, in the order of the program."""
    _, state, tokens, *_ = tensors
    results, positions, columns = tensors[9], tokens.shape[1], state.shape[1]
    most = max((each.shape[1] for each in tensors[10:12] if each is not None), default=0)
    constants = {"COLUMNS": triton.next_power_of_2(columns), "POSITIONS": triton.next_power_of_2(positions)}
    write_row[(len(state),)](*tensors, positions, columns, results.stride(0), most, **constants, num_warps=1)
