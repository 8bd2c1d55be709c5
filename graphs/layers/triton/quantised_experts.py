"""The Triton program of products with packed weights of experts: each is read once for 16 rows that chose its expert."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs.layers.quantised import TILE as TILE_COLUMNS
from stepgraph.graphs.layers.quantised import Kind, kind_of
from stepgraph.graphs.layers.triton.experts import choices_of
from stepgraph.graphs.layers.triton.quantised import WARPS, blocks_of, layout_of, tile_sums

ROWS_AT_ONCE = 16  # of one expert; 32 would spill for some kinds of weights
SCANNED_CHOICES = 128


def constants_of(kind: Kind) -> dict[str, Any]:
    """Half the blocks of packed_product, for float8 a quarter: with more, sm_90 would spill."""
    return {**layout_of(kind), "ROWS": ROWS_AT_ONCE, "BLOCKS": blocks_of(kind) // (4 if kind.float8 else 2), "SCANNED": SCANNED_CHOICES}


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
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCANNED: tl.constexpr,  # choices read at a time
    WIDE: tl.constexpr,
):
    """A tile of columns of one expert, for all rows that chose it. The order of a row's sums does not depend on the others."""
    expert, column, scanned = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, SCANNED)
    tile = expert * (outer // TILE) + tl.program_id(0)
    matches = 0
    for start in range(0, choices, SCANNED):
        own = tl.load(chosen + start + scanned, mask=start + scanned < choices, other=-1) == expert
        matches += tl.sum(own.to(tl.int32), 0)
    for first in range(0, matches, ROWS):
        wanted = first + tl.arange(0, ROWS)
        rows = choices_of(chosen, expert, wanted, choices, ROWS, SCANNED)
        live = (wanted < matches)[:, None]
        at = (rows // per_state).to(tl.int64)[:, None] * state_stride
        found = tile_sums(
            states, at, live, words, scales, tile, inner,
            BITS, GROUP, ZERO, FLOAT8, RANGED, BLOCK, SCALES, SCALE_BLOCK, TILE, ROWS, BLOCKS, WIDE,
        )  # fmt: skip
        if biases is not None:
            found += tl.load(biases + expert * outer + column).to(tl.float32)
        tl.store(output + rows.to(tl.int64)[:, None] * outer + column, found.to(output.dtype.element_ty), mask=live)


def quantised_expert_product(
    states: Tensor, chosen: Tensor, weights: Tensor, num_experts: int, biases: Tensor | None, output: Tensor
) -> None:
    kind, (choices, outer) = kind_of(weights), output.shape
    packed_expert_product[(outer // TILE_COLUMNS, num_experts)](
        states,
        chosen,
        weights.view(torch.int32),
        weights.view(kind.scale_type),
        biases,
        output,
        choices,
        choices // len(states),
        states.shape[1],
        outer,
        states.stride(0),
        **constants_of(kind),
        WIDE=states.device.type == "cpu",
        num_warps=WARPS,
    )
