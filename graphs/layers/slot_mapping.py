"""Positions, cache slots and rotary angles of the tokens of a call, and the write into these slots: queries and keys are rotated, keys and
values written.

In torch each of these is many small operations; here each is one kernel: in C on the CPU, a Triton program on a GPU.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.attention.float8 import ENTRIES, MAX_C_HEAD_SIZE, c_supports_cache, to_entries
from stepgraph.sampling.kernels.c_kernel import FLOATS
from stepgraph.sampling.kernels.operation import Contiguous, Flags, Float32s, Longs, StridedLongs, empty_as, operation


class SlotMapping(NamedTuple):
    """[B, Q] int64 each."""

    tokens: Tensor  # 0 at inert positions
    positions: Tensor
    slots: Tensor


@operation(lambda tokens, *_: SlotMapping(empty_as(tokens), empty_as(tokens), empty_as(tokens)), triton=True, c=True)
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
) -> SlotMapping:
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
    slots = torch.where(used, slots_of_positions(tables, positions, page_size), positions % page_size)
    return SlotMapping(tokens.clamp(min=0), positions, slots)


@operation(lambda positions, *_: (empty_as(positions), empty_as(positions)), triton=True, c=True)
def shift_entries(positions: Longs, slots: Longs, tables: Longs, page_size: int, by: int) -> tuple[Tensor, Tensor]:
    """Positions `by` earlier, and their slots, [B, Q] each. Entries of positions below `by` are inert."""
    used = (slots >= page_size) & (positions >= by)
    earlier = (positions - by).clamp(min=0)
    return earlier, torch.where(used, slots_of_positions(tables, earlier, page_size), earlier % page_size)


def _angles_outputs(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float) -> tuple[Tensor, Tensor]:
    cosines, sines = (torch.empty(len(positions), 1, 2 * len(frequencies), dtype=dtype, device=positions.device) for _ in range(2))
    return cosines, sines


@operation(_angles_outputs, triton=True, c=True, supports=lambda dtype: dtype in FLOATS)
def rope_angles(positions: Longs, frequencies: Float32s, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines, times `factor`, for `rotate`: positions [N] -> two of [N, 1, size]; frequencies [size / 2] float32."""
    angles = positions[:, None, None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def slots_of_positions(tables: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[B, Q] cache slot of every position."""
    return tables.gather(1, positions // page_size) * page_size + positions % page_size


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (i, i + rotated / 2) of [N, heads, size] by its angle. cosines, sines [N, 1, rotated]; others are copied."""
    states, others = states.split([cosines.shape[2], states.shape[2] - cosines.shape[2]], -1)
    first, second = states.chunk(2, -1)
    return torch.cat([states * cosines + torch.cat([-second, first], -1) * sines, others], -1)


def pack_heads(states: Tensor) -> Tensor:
    """The heads of a token adjacent; tokens may have any stride."""
    return states if states.stride()[1:] == (states.shape[2], 1) else states.contiguous()


Packed = Annotated[Tensor, pack_heads, FLOATS]


def _rope_outputs(
    query: Tensor, key: Tensor, value: Tensor, cosines: Tensor, sines: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    tokens, _, size = query.shape
    assert key.shape == value.shape and keys.shape[1:] == key.shape[1:], f"key {key.shape}, value {value.shape}, keys {keys.shape}"
    assert keys.shape == values.shape, f"keys {keys.shape}, values {values.shape}"
    assert cosines.shape == sines.shape and cosines.shape[:2] == (tokens, 1) and cosines.shape[2] <= size, f"cosines {cosines.shape}"
    assert slots.shape == (tokens,), f"query {query.shape}, slots {slots.shape}"
    assert query.dtype is key.dtype is value.dtype is cosines.dtype and keys.dtype in (key.dtype, ENTRIES), f"{cosines.dtype}, {keys.dtype}"
    return empty_as(query)


def _fits_c(query: Tensor, cosines: Tensor, sines: Tensor, keys: Tensor, values: Tensor) -> bool:
    return query.shape[2] <= MAX_C_HEAD_SIZE and c_supports_cache(query, cosines, sines, keys=keys, values=values)


@operation(_rope_outputs, writes=("keys", "values"), triton=True, c=True, supports=_fits_c)
def rope_and_write_kv(
    query: Packed, key: Packed, value: Packed, cosines: Contiguous, sines: Contiguous, slots: Longs, keys: Contiguous, values: Contiguous
) -> Tensor:
    """The rotated queries, [N, heads, size]; writes the rotated keys and the values of N tokens into their slots.

    query [N, heads, size]; key, value [N, kv_heads, size]; cosines, sines [N, 1, rotated] as in `rotate`; slots [N] int64; keys,
    values [slots, kv_heads, size] of one layer.
    """
    keys.index_put_((slots,), to_entries(rotate(key, cosines, sines), keys))
    values.index_put_((slots,), to_entries(value, values))
    return rotate(query, cosines, sines)
