"""Where the tokens of a call lie in the cache, how they are turned, and where masks belong: many small operations of plain torch, one
each on a CPU with native kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.layers import cpu as cpu_kernels
from stepgraph.graphs.layers.cpu import calls
from stepgraph.sampling.kernels import operation


class Placed(NamedTuple):
    """[B, Q] int64 each: tokens with 0 for those that there are not, their positions, their cache slots."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor


def place_tokens(
    tokens: Tensor, wanted: Tensor, length: Tensor, end: Tensor, tables: Tensor, offset: int, page_size: int, max_length: int
) -> Placed:
    """Consecutive positions from length + offset on; what is not wanted or lies beyond the row's end goes to the scratch page.

    tokens [B, Q] int64, wanted [B, Q] bool, length, end [B] int64, tables [B, pages] int64.
    """
    settings = (offset, page_size, max_length)
    if not cpu_kernels.on_cpu(tokens):
        return placed(tokens, wanted, length, end, tables, *settings)
    known, positions, slots = (torch.empty_like(tokens, memory_format=torch.contiguous_format) for _ in range(3))
    place_tokens_operation(tokens.contiguous(), wanted.contiguous(), length, end, tables, *settings, known, positions, slots)
    return Placed(known, positions, slots)


def shift_entries(positions: Tensor, slots: Tensor, tables: Tensor, page_size: int, by: int, shared: int) -> tuple[Tensor, Tensor]:
    """The positions `by` earlier, and their slots. Entries of the first `by` tokens, and of those below `shared`, are inert."""
    settings = (page_size, by, shared)
    if not cpu_kernels.on_cpu(positions):
        return shifted_entries(positions, slots, tables, *settings)
    earlier, earlier_slots = (torch.empty_like(positions, memory_format=torch.contiguous_format) for _ in range(2))
    shift_entries_operation(positions.contiguous(), slots.contiguous(), tables.contiguous(), *settings, earlier, earlier_slots)
    return earlier, earlier_slots


def angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `rotate`: positions [N] -> two of [N, 1, size]; frequencies [size / 2] float32."""
    if not cpu_kernels.on_cpu(positions) or cpu_kernels.why_not(dtype):
        return turned(positions, frequencies, dtype)
    cosines, sines = (torch.empty(len(positions), 1, 2 * len(frequencies), dtype=dtype, device=positions.device) for _ in range(2))
    angles_operation(positions.contiguous(), frequencies, cosines, sines)
    return cosines, sines


def place_masks(rows: Tensor, tags: Tensor, masks: Tensor, row_tags: Tensor, row_masks: Tensor) -> None:
    """Move masks [B, words] and tags [B, TAG_FIELDS] into their rows [R, places, ...]; a tag says which of the places is meant."""
    move = place_masks_operation if cpu_kernels.on_cpu(rows) else moved_masks
    move(rows, tags, masks, row_tags, row_masks)


def cache_slots(tables: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[B, Q] cache slot of every position."""
    return tables.gather(1, positions // page_size) * page_size + positions % page_size


def placed(
    tokens: Tensor, wanted: Tensor, length: Tensor, end: Tensor, tables: Tensor, offset: int, page_size: int, max_length: int
) -> Placed:
    positions = (length[:, None] + offset) + torch.arange(tokens.shape[1], device=tokens.device)
    wanted = wanted & (positions >= 0) & (positions < end[:, None])
    positions = positions.clamp(0, max_length - 1)
    slots = torch.where(wanted, cache_slots(tables, positions, page_size), positions % page_size)
    return Placed(tokens.clamp(min=0), positions, slots)


def shifted_entries(positions: Tensor, slots: Tensor, tables: Tensor, page_size: int, by: int, shared: int) -> tuple[Tensor, Tensor]:
    real = (slots >= page_size) & (positions >= by + shared)
    earlier = (positions - by).clamp(min=0)
    return earlier, torch.where(real, cache_slots(tables, earlier, page_size), earlier % page_size)


def turned(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    found = positions[:, None, None].float() * frequencies
    found = torch.cat([found, found], -1)
    return found.cos().to(dtype), found.sin().to(dtype)


def moved_masks(rows: Tensor, tags: Tensor, masks: Tensor, row_tags: Tensor, row_masks: Tensor) -> None:
    row_masks.index_put_((rows, tags[:, 2]), masks)
    row_tags.index_put_((rows, tags[:, 2]), tags)


def place_tokens_reference(
    tokens: Tensor,
    wanted: Tensor,
    length: Tensor,
    end: Tensor,
    tables: Tensor,
    offset: int,
    page_size: int,
    max_length: int,
    known: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    found = placed(tokens, wanted, length, end, tables, offset, page_size, max_length)
    for to, each in zip((known, positions, slots), found, strict=True):
        to.copy_(each)


def shift_entries_reference(
    positions: Tensor, slots: Tensor, tables: Tensor, page_size: int, by: int, shared: int, earlier: Tensor, earlier_slots: Tensor
) -> None:
    found = shifted_entries(positions, slots, tables, page_size, by, shared)
    earlier.copy_(found[0])
    earlier_slots.copy_(found[1])


def angles_reference(positions: Tensor, frequencies: Tensor, cosines: Tensor, sines: Tensor) -> None:
    found = turned(positions, frequencies, cosines.dtype)
    cosines.copy_(found[0])
    sines.copy_(found[1])


place_tokens_operation = operation.operation(
    "",
    "place_tokens",
    "(Tensor tokens, Tensor wanted, Tensor length, Tensor end, Tensor tables, int offset, int page_size, int max_length,"
    " Tensor(a!) known, Tensor(b!) positions, Tensor(c!) slots) -> ()",
    place_tokens_reference,
    cpu_kernels.prepared(calls.place_tokens),
)
shift_entries_operation = operation.operation(
    "",
    "shift_entries",
    "(Tensor positions, Tensor slots, Tensor tables, int page_size, int by, int shared, Tensor(a!) earlier,"
    " Tensor(b!) earlier_slots) -> ()",
    shift_entries_reference,
    cpu_kernels.prepared(calls.shift_entries),
)
angles_operation = operation.operation(
    "",
    "angles",
    "(Tensor positions, Tensor frequencies, Tensor(a!) cosines, Tensor(b!) sines) -> ()",
    angles_reference,
    cpu_kernels.prepared(calls.angles),
)
place_masks_operation = operation.operation(
    "",
    "place_masks",
    "(Tensor rows, Tensor tags, Tensor masks, Tensor(a!) row_tags, Tensor(b!) row_masks) -> ()",
    moved_masks,
    cpu_kernels.prepared(calls.place_masks),
)
