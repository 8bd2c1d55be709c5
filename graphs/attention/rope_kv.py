"""Rotary positions and the write into the cache in one operation: queries and keys are rotated, keys and values written."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from stepgraph.graphs.attention.float8 import C_HEAD_SIZE, ENTRIES, in_c, to_entries
from stepgraph.sampling.kernels.c_kernel import FLOATS
from stepgraph.sampling.kernels.operation import Contiguous, Longs, empty_as, operation


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (i, i + rotated / 2) of [N, heads, size] by its angle. cosines, sines [N, 1, rotated]: other numbers stay."""
    states, others = states.split([cosines.shape[2], states.shape[2] - cosines.shape[2]], -1)
    first, second = states.chunk(2, -1)
    return torch.cat([states * cosines + torch.cat([-second, first], -1) * sines, others], -1)


def packed(states: Tensor) -> Tensor:
    """The heads of a token next to each other; tokens may lie any distance apart."""
    return states if states.stride()[1:] == (states.shape[2], 1) else states.contiguous()


Packed = Annotated[Tensor, packed, FLOATS]


def _outputs(
    query: Tensor, key: Tensor, value: Tensor, cosines: Tensor, sines: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    tokens, _, size = query.shape
    assert key.shape == value.shape and keys.shape[1:] == key.shape[1:], f"key {key.shape}, value {value.shape}, keys {keys.shape}"
    assert cosines.shape == sines.shape and cosines.shape[:2] == (tokens, 1) and cosines.shape[2] <= size, f"cosines {cosines.shape}"
    assert slots.shape == (tokens,), f"query {query.shape}, slots {slots.shape}"
    assert query.dtype is key.dtype is value.dtype is cosines.dtype and keys.dtype in (key.dtype, ENTRIES), f"{cosines.dtype}, {keys.dtype}"
    return empty_as(query)


def _in_c(query: Tensor, key: Tensor, value: Tensor, cosines: Tensor, sines: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> bool:
    return query.shape[2] <= C_HEAD_SIZE and in_c(query, cosines, sines, keys=keys, values=values)


@operation(_outputs, writes=("keys", "values"), triton=True, c=True, takes=_in_c)
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
