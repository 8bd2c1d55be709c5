"""Rotary positions on their way into attention: queries and keys are turned, keys and values put into the cache, in one operation."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs.layers import cpu as cpu_kernels
from stepgraph.graphs.layers.cpu import calls
from stepgraph.sampling.kernels import operation


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (i, i + size / 2) of [N, heads, size] by its angle. cosines, sines [N, 1, size]."""
    first, second = states.chunk(2, -1)
    return states * cosines + torch.cat([-second, first], -1) * sines


def rope_and_write_kv(
    query: Tensor, key: Tensor, value: Tensor, cosines: Tensor, sines: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """The turned queries, [N, heads, size]; the turned keys and the values of N tokens lie in their slots afterwards.

    query [N, heads, size]; key, value [N, kv_heads, size]; heads side by side in each, tokens at any distance. slots [N];
    keys, values [slots, kv_heads, size] of one layer.
    """
    tokens, _, size = query.shape
    assert key.shape == value.shape and keys.shape[1:] == key.shape[1:], f"key {key.shape}, value {value.shape}, keys {keys.shape}"
    assert cosines.shape == sines.shape == (tokens, 1, size) and slots.shape == (tokens,), f"cosines {cosines.shape}, slots {slots.shape}"
    assert query.dtype is key.dtype is value.dtype is cosines.dtype is keys.dtype, f"query {query.dtype}, cosines {cosines.dtype}"
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    rope_and_write_kv_operation(_packed(query), _packed(key), _packed(value), cosines, sines, slots, output, keys, values)
    return output


def _packed(states: Tensor) -> Tensor:
    """With the heads of a token side by side."""
    return states if states.stride()[1:] == (states.shape[2], 1) else states.contiguous()


def rope_and_write_kv_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosines: Tensor,
    sines: Tensor,
    slots: Tensor,
    output: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    output.copy_(rotate(query, cosines, sines))
    keys.index_put_((slots,), rotate(key, cosines, sines))
    values.index_put_((slots,), value)


rope_and_write_kv_operation = operation.operation(
    "stepgraph.graphs.attention.rope_kv_triton",
    "rope_and_write_kv",
    "(Tensor query, Tensor key, Tensor value, Tensor cosines, Tensor sines, Tensor slots, Tensor(a!) output, Tensor(b!) keys,"
    " Tensor(c!) values) -> ()",
    rope_and_write_kv_reference,
    cpu_kernels.prepared(calls.rope_and_write_kv),
)
