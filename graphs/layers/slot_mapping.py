"""Positions and cache slots of the tokens of a call, and their rotary angles.

In torch each of these is many small operations; here each is one kernel: in C on the CPU, a Triton program on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling.kernels.c_kernel import FLOATS
from stepgraph.sampling.kernels.operation import Flags, Float32s, Longs, StridedLongs, empty_as, operation


class Placed(NamedTuple):
    """[B, Q] int64 each."""

    tokens: Tensor  # 0 where there is none
    positions: Tensor
    slots: Tensor


@operation(lambda tokens, *_: Placed(empty_as(tokens), empty_as(tokens), empty_as(tokens)), triton=True, c=True)
def place_tokens(
    tokens: Longs,
    length: StridedLongs,
    end: StridedLongs,
    tables: Longs,
    offset: int,
    page_size: int,
    max_length: int,
    live: Flags | None = None,
    count: Longs | None = None,
) -> Placed:
    """Consecutive positions from length + offset on. A token that is inert or lies beyond `end` gets a slot of the scratch page.

    tokens [B, Q] int64, inert where negative; length, end [B] int64; tables [B, pages] int64; live [B] bool: rows that are not inert;
    count [B] int64: how many tokens of a row are not inert.
    """
    index = torch.arange(tokens.shape[1], device=tokens.device)
    positions = (length[:, None] + offset) + index
    used = (tokens >= 0) & (positions >= 0) & (positions < end[:, None])
    used = used if live is None else used & live[:, None]
    used = used if count is None else used & (index < count[:, None])
    positions = positions.clamp(0, max_length - 1)
    slots = torch.where(used, cache_slots(tables, positions, page_size), positions % page_size)
    return Placed(tokens.clamp(min=0), positions, slots)


@operation(lambda positions, *_: (empty_as(positions), empty_as(positions)), triton=True, c=True)
def shift_entries(positions: Longs, slots: Longs, tables: Longs, page_size: int, by: int) -> tuple[Tensor, Tensor]:
    """Positions `by` earlier, and their slots, [B, Q] each. The first `by` entries are inert."""
    used = (slots >= page_size) & (positions >= by)
    earlier = (positions - by).clamp(min=0)
    return earlier, torch.where(used, cache_slots(tables, earlier, page_size), earlier % page_size)


def _angles_outputs(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float) -> tuple[Tensor, Tensor]:
    cosines, sines = (torch.empty(len(positions), 1, 2 * len(frequencies), dtype=dtype, device=positions.device) for _ in range(2))
    return cosines, sines


@operation(_angles_outputs, triton=True, c=True, takes=lambda *given: given[2] in FLOATS)
def rope_angles(positions: Longs, frequencies: Float32s, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines, times `factor`, for `rotate`: positions [N] -> two of [N, 1, size]; frequencies [size / 2] float32."""
    angles = positions[:, None, None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def cache_slots(tables: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[B, Q] cache slot of every position."""
    return tables.gather(1, positions // page_size) * page_size + positions % page_size
