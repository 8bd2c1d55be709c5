"""Attention in plain torch: the reference of `paged_attention`. It runs where no kernel can, or on request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.graphs.attention.float8 import from_entries
from stepgraph.graphs.layers.reference import PRODUCT_ROWS
from stepgraph.graphs.model_call import ModelInput
from stepgraph.sampling.kernels.operation import Contiguous, Longs, empty_as, operation

PART = 128  # keys weighed at a time


@operation(empty_as)
def reference_attention(
    query: Contiguous,
    keys: Tensor,
    values: Tensor,
    positions: Longs,
    slots: Longs,
    block_tables: Longs,
    page_size: int,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Contiguous | None = None,
) -> Tensor:
    """`attention` in float32 and plain torch. A query's result has the same bits in any batch and with any length of the tables."""
    batch, count, heads, size = query.shape
    if not query.numel():  # no length has a maximum
        return query.clone()
    kv_heads, device = keys.shape[1], query.device
    last = torch.where(slots >= page_size, positions, -1).amax(1, keepdim=True)  # inert positions do not count
    if device.type == "cpu":  # the only device where reading a length is free: a table is mostly unused
        needed = -(-(int(last.max()) + 1) // PART) * PART
        block_tables = block_tables[:, : max(1, -(-needed // page_size))]
    entries = (block_tables[:, :, None] * page_size + torch.arange(page_size, device=device)).flatten(1)
    index = torch.arange(entries.shape[1], device=device)
    is_entry = index <= last
    visible = is_entry[:, None] & (index <= positions[..., None])
    if window:
        visible = visible & (index > positions[..., None] - window)
    key = from_entries(keys[entries]).transpose(1, 2)
    value = torch.where(is_entry[..., None, None], from_entries(values[entries]), 0.0).transpose(1, 2)

    groups = heads // kv_heads
    rows = max(groups * count, PRODUCT_ROWS)
    packed = query.view(batch, count, kv_heads, groups, size).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, groups * count, size)
    packed = functional.pad(packed.float() * scale, (0, 0, 0, rows - groups * count))
    scores = (packed @ key.transpose(2, 3))[:, :, : groups * count].view(batch, kv_heads, groups, count, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    masked_score = torch.finfo(torch.float32).min  # finite: a query that sees nothing gives no NaN
    scores = scores.masked_fill(~visible[:, None, None], masked_score)
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, groups, 1, 1).expand(batch, -1, -1, count, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : len(index)].flatten(2, 3)
    weights = functional.pad(weights, (0, 0, 0, rows - groups * count))
    total = torch.zeros(batch, kv_heads, rows, size, device=device)
    for start in range(0, len(index), PART):  # one long product would sum in an order that depends on its length
        total = total + weights[..., start : start + PART] @ value[:, :, start : start + PART]
    result = total[:, :, : groups * count].view(batch, kv_heads, groups, count, size)
    return result.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)


def by_reference(
    query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int, scale: float, output: Tensor, *more: Any
) -> None:
    """For ModelInput.attend: plain torch on every device. On the CPU it is an operation, which the tape records as one node."""
    run = reference_attention.out if query.device.type == "cpu" else reference_attention.run_reference
    places = (inputs.positions, inputs.slots, inputs.block_tables, inputs.page_size)
    run(query, keys, values, *places, window, scale, *(more or (0.0, None)), output)
