"""The Triton programs of experts: which ones a token uses, one grouped product for all of them, and the sum of their results.

Packed weights are read once for 16 rows that chose their expert.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs.attention.triton.paged import product as matrix_product
from stepgraph.graphs.layers.quantised import TILE, kind_of
from stepgraph.graphs.layers.triton.quantised import REGISTERS, WARPS, plan_of, tile_sums

_TILE = tl.constexpr(TILE)
OUTER_TILE, COMBINED_TILE = 32, 1024
SCANNED_CHOICES = 128


def tiles_of(number_bytes: int) -> dict[str, int]:
    """The tiles of a product; larger ones in float32 would spill."""
    return {"ROWS": 64 // number_bytes, "OUTER": OUTER_TILE, "INNER": 128 // number_bytes, "SCANNED": SCANNED_CHOICES}


@triton.jit
def first_largest(numbers, index, last):
    """The index of the largest number, the first of equal ones; at most `last`, even if all numbers are NaN."""
    return tl.minimum(tl.min(tl.where(numbers == tl.max(numbers, 0), index, last), 0), last)


@triton.jit
def choose_row(
    logits,  # [N, experts]
    correction,  # [experts] float32, or None
    shares,  # [N, count] float32, written
    chosen,  # [N, count] int64, written
    count,
    groups,
    groups_taken,
    experts,
    factor,
    EXPERTS: tl.constexpr,  # rounded up
    COUNT: tl.constexpr,  # rounded up
    GROUPS: tl.constexpr,  # rounded up
    NORMALISED: tl.constexpr,
):
    row, excluded = tl.program_id(0).to(tl.int64), float("-inf")
    expert, choice_index, group = tl.arange(0, EXPERTS), tl.arange(0, COUNT), tl.arange(0, GROUPS)
    is_expert, size = expert < experts, experts // groups
    logit = tl.load(logits + row * experts + expert, mask=is_expert, other=excluded).to(tl.float32)
    if correction is None:
        score = tl.exp(logit - tl.max(logit, 0))
        candidates, divisor = tl.where(is_expert, score, excluded), tl.sum(tl.where(is_expert, score, 0.0), 0)
    else:
        score, divisor = 1.0 / (1.0 + tl.exp(-logit)), 1.0
        candidates = tl.where(is_expert, score + tl.load(correction + expert, mask=is_expert, other=0.0), excluded)
    if GROUPS > 1:
        compared, top_two_sums = candidates, tl.full([GROUPS], excluded, tl.float32)
        for index in range(0, groups):
            group_scores = tl.where(expert // size == index, compared, excluded)
            best = first_largest(group_scores, expert, experts - 1)
            top_two_sum = tl.max(group_scores, 0) + tl.max(tl.where(expert == best, excluded, group_scores), 0)
            top_two_sums = tl.where(group == index, top_two_sum, top_two_sums)
        candidates = tl.full([EXPERTS], excluded, tl.float32)
        for _ in range(0, groups_taken):
            taken = first_largest(top_two_sums, group, groups - 1)
            candidates = tl.where(expert // size == taken, compared, candidates)
            top_two_sums = tl.where(group == taken, excluded, top_two_sums)
    best_experts, best_scores = tl.zeros([COUNT], tl.int64), tl.zeros([COUNT], tl.float32)
    for index in range(0, count):
        best = first_largest(candidates, expert, experts - 1)
        best_experts = tl.where(choice_index == index, best.to(tl.int64), best_experts)
        best_scores = tl.where(choice_index == index, tl.sum(tl.where(expert == best, score, 0.0), 0), best_scores)
        candidates = tl.where(expert == best, excluded, candidates)
    if NORMALISED:
        divisor = tl.sum(best_scores, 0) + 1e-20
    tl.store(shares + row * count + choice_index, best_scores / divisor * factor, mask=choice_index < count)
    tl.store(chosen + row * count + choice_index, best_experts, mask=choice_index < count)


def choose_experts(logits: Tensor, count: int, normalised: bool, correction: Tensor | None, *others: Any) -> None:
    groups, groups_taken, factor, shares, chosen = others
    rows, experts = logits.shape
    widths = {name: triton.next_power_of_2(each) for name, each in (("EXPERTS", experts), ("COUNT", count), ("GROUPS", groups))}
    arguments = logits, correction, shares, chosen, count, groups, groups_taken, experts, factor
    warps = max(1, widths["EXPERTS"] // (256 if correction is None else 128))
    choose_row[(rows,)](*arguments, **widths, NORMALISED=bool(normalised), num_warps=warps, enable_fp_fusion=False)


@triton.jit
def matches_of(chosen, expert, choices, SCANNED: tl.constexpr):
    """How many of the choices select an expert."""
    scanned, matches = tl.arange(0, SCANNED), 0
    for start in range(0, choices, SCANNED):
        is_match = tl.load(chosen + start + scanned, mask=start + scanned < choices, other=-1) == expert
        matches += tl.sum(is_match.to(tl.int32), 0)
    return matches


@triton.jit
def choices_of(chosen, expert, wanted, choices, ROWS: tl.constexpr, SCANNED: tl.constexpr):
    """[ROWS] int32: of the choices that select an expert, those at the indices `wanted`; 0 at indices beyond their number."""
    scanned, rows, seen = tl.arange(0, SCANNED), tl.zeros([ROWS], tl.int32), 0
    for start in range(0, choices, SCANNED):
        is_match = tl.load(chosen + start + scanned, mask=start + scanned < choices, other=-1) == expert
        number = tl.where(is_match, seen + tl.cumsum(is_match.to(tl.int32), 0) - 1, -1)
        rows += tl.sum(tl.where(number[None, :] == wanted[:, None], start + scanned[None, :], 0), 1)
        seen += tl.sum(is_match.to(tl.int32), 0)
    return rows


@triton.jit
def multiply_by_expert(
    states,  # [N or N * count, inner], the last dimension adjacent
    chosen,  # [N * count] int64
    weights,  # [experts * outer, inner]
    biases,  # [experts * outer], or None
    output,  # [N * count, outer], written
    choices,  # N * count
    per_state,  # choices of one row of states
    inner,
    outer,
    state_stride,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    SCANNED: tl.constexpr,  # choices read at a time
    WIDE: tl.constexpr,  # multiply in float32: Triton's interpreter treats bfloat16 as integers
):
    """A tile of columns of one expert, for all rows that chose it. The order of a row's sums does not depend on the others."""
    expert = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    is_column = column < outer
    matches = matches_of(chosen, expert, choices, SCANNED)
    for first in range(0, matches, ROWS):
        wanted = first + tl.arange(0, ROWS)
        rows = choices_of(chosen, expert, wanted, choices, ROWS, SCANNED)
        live = (wanted < matches)[:, None]
        total = tl.zeros([ROWS, OUTER], tl.float32)
        for start in range(0, inner, INNER):
            inner_index = start + tl.arange(0, INNER)
            at = (rows // per_state).to(tl.int64)[:, None] * state_stride + inner_index
            state = tl.load(states + at, mask=live & (inner_index < inner), other=0.0)
            at = (expert * outer + column[:, None]) * inner + inner_index
            weight = tl.load(weights + at, mask=is_column[:, None] & (inner_index < inner), other=0.0)
            total += matrix_product(state, tl.trans(weight), WIDE)
        if biases is not None:
            total += tl.load(biases + expert * outer + column, mask=is_column, other=0.0).to(tl.float32)
        tl.store(output + rows.to(tl.int64)[:, None] * outer + column, total.to(output.dtype.element_ty), mask=live & is_column)


def expert_product(states: Tensor, chosen: Tensor, weights: Tensor, num_experts: int, biases: Tensor | None, output: Tensor) -> None:
    if weights.dtype is torch.uint8:
        return _packed_product(states, chosen, weights, num_experts, biases, output)
    tiles, grid = tiles_of(states.element_size()), (triton.cdiv(output.shape[1], OUTER_TILE), num_experts)
    sizes, wide = _sizes(states, output), states.device.type == "cpu"
    multiply_by_expert[grid](states, chosen, weights, biases, output, *sizes, **tiles, WIDE=wide, num_warps=4)


def _sizes(states: Tensor, output: Tensor) -> tuple[int, ...]:
    """Arguments of both products besides tensors and constants."""
    choices, outer = output.shape
    return choices, choices // len(states), states.shape[1], outer, states.stride(0)


@triton.jit
def packed_expert_product(
    states,  # [N or N * count, inner], the last dimension adjacent
    chosen,  # [N * count] int64
    words,  # as in packed_product, of all experts
    scales,
    biases,  # [experts * outer], or None
    output,  # [N * count, outer], written
    choices,  # N * count
    per_state,  # choices of one row of states
    inner,
    outer,
    state_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT8: tl.constexpr,
    RANGED: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    dtype: tl.constexpr,
    SCANNED: tl.constexpr,  # choices read at a time
):
    """Tiles of columns of one expert, for all rows that chose it. The order of a row's sums does not depend on the others."""
    expert = tl.program_id(1).to(tl.int64)
    column, tile = tl.program_id(0) * TILES * _TILE + tl.arange(0, TILES * _TILE), expert * (outer // _TILE) + tl.program_id(0) * TILES
    matches = matches_of(chosen, expert, choices, SCANNED)
    for first in range(0, matches, ROWS):
        wanted = first + tl.arange(0, ROWS)
        rows = choices_of(chosen, expert, wanted, choices, ROWS, SCANNED)
        sums = tile_sums(
            states, (rows // per_state).to(tl.int64) * state_stride, words, scales, tile, inner,
            BITS, GROUP, ZERO, FLOAT8, RANGED, WIDE, TILES, ROWS, BLOCKS, dtype,
        )  # fmt: skip
        if biases is not None:
            sums += tl.load(biases + expert * outer + column).to(tl.float32)[:, None]
        place = output + rows.to(tl.int64)[None, :] * outer + column[:, None]
        tl.store(place, sums.to(output.dtype.element_ty), mask=(wanted < matches)[None, :])


def _packed_product(states: Tensor, chosen: Tensor, weights: Tensor, num_experts: int, biases: Tensor | None, output: Tensor) -> None:
    kind, (choices, outer) = kind_of(weights), output.shape
    plan = plan_of(kind, states.dtype, outer // TILE, 1, choices, states.device.type == "cpu")
    arguments = states, chosen, weights.view(torch.int32), weights.view(kind.scale_type), biases, output, *_sizes(states, output)
    options = {"SCANNED": SCANNED_CHOICES, "num_warps": WARPS, "maxnreg": REGISTERS}
    packed_expert_product[(outer // TILE // plan["TILES"], num_experts)](*arguments, **plan, **options)


@triton.jit
def combine_tile(parts, shares, output, count, size, TILE: tl.constexpr):
    """A part of one token. parts [N, count, size]; shares [N, count] float32; output [N, size]."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for index in range(0, count):
        part = tl.load(parts + (row * count + index) * size + column, mask=column < size, other=0.0).to(tl.float32)
        total += part * tl.load(shares + row * count + index)
    tl.store(output + row * size + column, total.to(output.dtype.element_ty), mask=column < size)


def combine_experts(parts: Tensor, shares: Tensor, output: Tensor) -> None:
    rows, size = output.shape
    grid = (rows, triton.cdiv(size, COMBINED_TILE))
    combine_tile[grid](parts, shares, output, shares.shape[1], size, TILE=COMBINED_TILE, num_warps=4, enable_fp_fusion=False)
