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

# the fields of a result that begin at the same column for every number of drafts
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
    status_column,  # of a result, as the next three: the first column of the field
    draft_column,
    forced_column,
    looked_up_column,
    COLUMNS: tl.constexpr,  # rounded up
    POSITIONS: tl.constexpr,  # Q, rounded up
):
    batch_row = tl.program_id(0).to(tl.int64)
    column, index = tl.arange(0, COLUMNS), tl.arange(0, POSITIONS)
    row_state_before, row_results = state + batch_row * columns, results + batch_row * width
    before = tl.load(row_state_before + column, mask=column < columns, other=0)
    live = tl.load(row_state_before + _FINISH) == _RUNNING
    count = tl.where(live, tl.load(emitted + batch_row), 0)
    finish_code = tl.where(live, tl.load(finish + batch_row), tl.load(row_state_before + _FINISH))
    num_accepted = tl.load(accepted + batch_row)
    token = tl.load(tokens + batch_row * positions + index, mask=index < positions, other=0)
    last = tl.sum(tl.where(index == count - 1, token, 0), 0)

    after = tl.where((column == _GENERATED) | (column == _LENGTH), before + count, before)
    after = tl.where((column == _LAST_TOKEN) & (count > 0), last, after)
    after = tl.where(column == _ACCEPTED, num_accepted, after)
    after = tl.where(column == _FINISH, finish_code, after)
    after = tl.where(column == _DRAFT_COUNT, 0, after)
    after = tl.where(live, after, before)
    tl.store(row_state + tl.load(rows + batch_row) * columns + column, after, mask=column < columns)
    tl.store(state_after + batch_row * columns + column, after, mask=column < columns)
    tl.store(emitted_after + batch_row, count)
    tl.store(finish_after + batch_row, finish_code)

    tl.store(row_results + _RESULT_EMITTED, count)
    tl.store(row_results + _RESULT_FINISH, finish_code)
    tl.store(row_results + _RESULT_ACCEPTED, num_accepted)
    tl.store(row_results + _RESULT_DRAFT_COUNT, tl.load(row_state_before + _DRAFT_COUNT))
    tl.store(row_results + _RESULT_TOKENS + index, token, mask=index < positions)
    valid = tl.load(status + batch_row * positions + index, mask=index < positions, other=0)
    tl.store(row_results + status_column + index, valid, mask=index < positions)
    draft = tl.load(drafts + batch_row * (positions - 1) + index, mask=index < positions - 1, other=0)
    tl.store(row_results + draft_column + index, draft, mask=index < positions - 1)
    verified = tl.minimum(tl.load(row_state_before + _DRAFT_COUNT), positions - 1)
    flag = tl.load(rows + batch_row) * most + index
    if row_forced is not None:
        constrained = tl.where(tl.load(row_state_before + _CONSTRAINED) != 0, verified, 0)
        bits = tl.sum(tl.load(row_forced + flag, mask=index < constrained, other=0).to(tl.int64) << index, 0)
        tl.store(row_results + forced_column, bits)
    if row_looked_up is not None:
        bits = tl.sum(tl.load(row_looked_up + flag, mask=index < verified, other=0).to(tl.int64) << index, 0)
        tl.store(row_results + looked_up_column, bits)


def write_emission(*tensors: Any) -> None:
    """The arguments and outputs of stages.write_emission, in the order of the program."""
    _, state, tokens, _, drafts, _, _, _, _, results, row_forced, row_looked_up, _, _, _ = tensors
    positions, columns, layout = tokens.shape[1], state.shape[1], ResultLayout(drafts.shape[1]).columns
    most = max((each.shape[1] for each in (row_forced, row_looked_up) if each is not None), default=0)
    begins = [layout[name].start for name in ("statuses", "drafts", "forced", "looked_up")]
    constants = {"COLUMNS": triton.next_power_of_2(columns), "POSITIONS": triton.next_power_of_2(positions)}
    write_row[(len(state),)](*tensors, positions, columns, results.stride(0), most, *begins, **constants, num_warps=1)
