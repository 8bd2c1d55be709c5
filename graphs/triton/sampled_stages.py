"""The Triton program of count_output: one instance per row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def count_row(rows, tokens, emitted, output_counts, positions, vocabulary, POSITIONS: tl.constexpr):
    """Count the emitted tokens of one row. tokens [B, positions]; POSITIONS is a power of two >= positions."""
    batch_row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, POSITIONS)
    counted = index < tl.minimum(tl.load(emitted + batch_row), positions)
    token = tl.load(tokens + batch_row * positions + index, mask=counted, other=0)
    tl.atomic_add(output_counts + tl.load(rows + batch_row) * vocabulary + token, 1, mask=counted, sem="relaxed")


def count_output(rows: Tensor, tokens: Tensor, emitted: Tensor, output_counts: Tensor) -> None:
    (batch, positions), vocabulary = tokens.shape, output_counts.shape[1]
    padded = triton.next_power_of_2(positions)
    count_row[(batch,)](rows, tokens, emitted, output_counts, positions, vocabulary, POSITIONS=padded, num_warps=1)
