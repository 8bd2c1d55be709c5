"""Paged attention without a plan: device lengths and block tables in, nothing from the host, any number of positions a row.

A model's cache is two static buffers, keys and values of all layers by cache slot. Each query sees the entries of its row up
to its own position; entries that this round does not vouch for, in the scratch page or left by an earlier owner of a page,
are not even multiplied by zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.graphs.buffers import BufferSpec
from stepgraph.graphs.layers import cpu as cpu_kernels
from stepgraph.graphs.layers.cpu import calls
from stepgraph.graphs.model import ModelInput
from stepgraph.graphs.shapes import Limits
from stepgraph.sampling.kernels import operation

HEAD_SIZES = (64, 96, 128, 192, 256)  # that the compiled kernel was checked for; the reference takes any
PART = 128  # keys that the reference weighs at a time
LEAST_ROWS = 4  # of a matrix product on the CPU: with fewer rows, MKL and oneDNN add up in another order


class AttentionShape(NamedTuple):
    """What one model asks of `attention`."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    windows: tuple[int | None, ...] = (None,)


def cache_specs(name: str, layers: int, limits: Limits, heads: int, size: int, dtype: torch.dtype) -> tuple[BufferSpec, BufferSpec]:
    """The spec table of one model's cache: `name`_keys and `name`_values, [layers, slots, heads, size] each."""
    shape = (layers, limits.cache_slots, heads, size)
    return BufferSpec(f"{name}_keys", shape, dtype), BufferSpec(f"{name}_values", shape, dtype)


def write_cache(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Put each token's entry into its slot. keys, values [slots, heads, size]; key, value [B, Q, heads, size]; slots [B, Q]."""
    keys.index_put_((slots,), key)
    values.index_put_((slots,), value)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int | None = None, scale: float | None = None
) -> Tensor:
    """What each query takes from its row's cache, [B, Q, heads, size] as `query`.

    query [B, Q, heads, size]; keys, values [slots, kv_heads, size] of one layer, written already; query head h reads cache
    head h // (heads // kv_heads). window: how many positions back a query sees, its own included; None: all.
    """
    batch, count, heads, size = query.shape
    assert keys.shape == values.shape and keys.shape[2] == size and heads % keys.shape[1] == 0, f"query {query.shape}, keys {keys.shape}"
    assert inputs.positions.shape == inputs.slots.shape == (batch, count), f"query {query.shape}, positions {inputs.positions.shape}"
    assert query.dtype is keys.dtype is values.dtype, f"query {query.dtype}, keys {keys.dtype}"
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    scale = size**-0.5 if scale is None else scale
    if inputs.attend is not None:
        inputs.attend(query.contiguous(), keys, values, inputs, window or 0, scale, output)
        return output
    attention_operation(
        query.contiguous(),
        keys,
        values,
        inputs.positions.contiguous(),
        inputs.slots.contiguous(),
        inputs.block_tables.contiguous(),
        inputs.page_size,
        window or 0,
        scale,
        output,
    )
    return output


def attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    page_size: int,
    window: int,
    scale: float,
    output: Tensor,
) -> None:
    """In float32 and plain torch. A query's result has the same bits whatever rows, queries and longer tables come with it."""
    batch, count, heads, size = query.shape
    kv_heads, device = keys.shape[1], query.device
    last = torch.where(slots >= page_size, positions, -1).amax(1, keepdim=True)  # inert positions vouch for nothing
    if device.type == "cpu":  # only here may lengths be asked for: a table is mostly unused
        needed = -(-(int(last.max()) + 1) // PART) * PART
        block_tables = block_tables[:, : max(1, -(-needed // page_size))]
    entries = (block_tables[:, :, None] * page_size + torch.arange(page_size, device=device)).flatten(1)
    places = torch.arange(entries.shape[1], device=device)
    held = places <= last
    visible = held[:, None] & (places <= positions[..., None])
    if window:
        visible = visible & (places > positions[..., None] - window)
    key = keys[entries].transpose(1, 2).float()
    value = torch.where(held[..., None, None], values[entries].float(), 0.0).transpose(1, 2)

    groups = heads // kv_heads
    rows = max(groups * count, LEAST_ROWS)
    packed = query.view(batch, count, kv_heads, groups, size).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, groups * count, size)
    packed = functional.pad(packed.float() * scale, (0, 0, 0, rows - groups * count))
    scores = (packed @ key.transpose(2, 3))[:, :, : groups * count].view(batch, kv_heads, groups, count, -1)
    hidden = torch.finfo(torch.float32).min  # finite: a query that sees nothing gives no NaN
    weights = scores.masked_fill(~visible[:, None, None], hidden).softmax(-1).flatten(2, 3)
    weights = functional.pad(weights, (0, 0, 0, rows - groups * count))
    total = torch.zeros(batch, kv_heads, rows, size, device=device)
    for start in range(0, len(places), PART):  # one long product would add up in an order that depends on its length
        total = total + weights[..., start : start + PART] @ value[:, :, start : start + PART]
    result = total[:, :, : groups * count].view(batch, kv_heads, groups, count, size)
    output.copy_(result.permute(0, 3, 1, 2, 4).reshape(output.shape))


def by_reference(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int, scale: float, output: Tensor) -> None:
    """To be the `attend` of a call: plain torch everywhere. On the CPU it is an operation, which a tape records as one."""
    run = reference_operation if query.device.type == "cpu" else attention_reference
    run(query, keys, values, inputs.positions, inputs.slots, inputs.block_tables, inputs.page_size, window, scale, output)


_SCHEMA = (
    "(Tensor query, Tensor keys, Tensor values, Tensor positions, Tensor slots, Tensor block_tables, int page_size, int window,"
    " float scale, Tensor(a!) output) -> ()"
)
attention_operation = operation.operation(
    "stepgraph.graphs.attention.paged_triton", "attention", _SCHEMA, attention_reference, cpu_kernels.prepared(calls.attention)
)
reference_operation = operation.operation("", "attention_reference", _SCHEMA, attention_reference)
