"""Products with weights that stay quantised in memory, and their packed form.

A weight [out, in] is packed as uint8 [out / 16, in / 32, bytes]: tiles of 16 columns, each a run of blocks. graphs/layers/c/quantised.h
describes a block; its number of bytes determines the kind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.graphs.layers.dense import LEAST_ROWS, product
from stepgraph.sampling.kernels.c_kernel import CKernel, is_contiguous, same_float_type
from stepgraph.sampling.kernels.operation import operation

GROUP, TILE = 32, 16  # inner indices with one scale; columns
_MOST_BLOCKS = 1024  # as in quantised.h


class Kind(NamedTuple):
    """A weight is scale * (field - zero) + minimum; the kinds with a zero have no minimum."""

    bits: int
    zero: int

    @property
    def scales(self) -> int:
        return 1 if self.zero else 2

    @property
    def field_bytes(self) -> int:
        return self.bits * GROUP * TILE // 8

    @property
    def block_bytes(self) -> int:
        return self.field_bytes + 2 * TILE * self.scales


KINDS = {"Q4_0": Kind(4, 8), "Q4_1": Kind(4, 0), "Q8_0": Kind(8, 128)}  # by the name of the GGUF type
_KIND_OF = {kind.block_bytes: kind for kind in KINDS.values()}


def pack(kind: Kind, blocks: Tensor) -> Tensor:
    """blocks: [out, in / 32, bytes] uint8 as in GGUF: scale, minimum, fields; of four bits, the high ones are those of indices 16 to 31."""
    rows, count = blocks.shape[:2]
    scales, fields = blocks.split([2 * kind.scales, blocks.shape[2] - 2 * kind.scales], 2)
    # Eight bits: from signed numbers to an offset of 128.
    fields = torch.cat([fields & 15, fields >> 4], 2) if kind.bits == 4 else fields ^ 128
    fields = fields.view(rows // TILE, TILE, count, -1, 2, 8 // kind.bits, 2)  # tile, column, block, vector, byte, field, odd
    packed = sum(fields[:, :, :, :, :, index] << index * kind.bits for index in range(8 // kind.bits))
    assert isinstance(packed, Tensor)
    packed = packed.permute(0, 2, 3, 1, 5, 4).reshape(rows // TILE, count, kind.field_bytes)
    ranged = scales.reshape(rows // TILE, TILE, count, kind.scales, 2).permute(0, 2, 3, 1, 4)
    return torch.cat([packed, ranged.reshape(rows // TILE, count, -1)], 2)


def empty_packed(kind: Kind, like: Tensor) -> Tensor:
    """Uninitialised memory for a weight of the shape [out, in] of `like`, on its device."""
    rows, inner = like.shape
    return like.new_empty(rows // TILE, inner // GROUP, kind.block_bytes, dtype=torch.uint8)


def count_weights(parameter: Tensor) -> int:
    """Numbers in a parameter, packed or not."""
    return parameter.shape[0] * parameter.shape[1] * TILE * GROUP if parameter.dtype is torch.uint8 else parameter.numel()


def unpack(packed: Tensor) -> Tensor:
    """The weights, [out, in] float32, with the bits of the format's reference."""
    kind = _KIND_OF[packed.shape[2]]
    tiles, count = packed.shape[:2]
    words, scales = packed.split([kind.field_bytes, packed.shape[2] - kind.field_bytes], 2)
    words = words.reshape(tiles, count, -1, TILE, 2, 2)  # tile, block, vector, column, odd, byte
    mask = (1 << kind.bits) - 1
    fields = torch.stack([words >> shift & mask for shift in range(0, 8, kind.bits)], -1)
    values: Tensor = fields.permute(0, 3, 1, 2, 5, 6, 4).reshape(tiles, TILE, count, GROUP).float() - kind.zero
    scale, *minimum = scales.contiguous().view(torch.float16).float().view(tiles, count, kind.scales, TILE, 1).transpose(1, 3).unbind(2)
    values = values * scale
    values = values + minimum[0] if minimum else values
    return values.reshape(tiles * TILE, -1)


def _is_packed(weight: Tensor) -> bool:
    return is_contiguous(torch.uint8, weight) and weight.shape[1] <= _MOST_BLOCKS


def _product_in_c(states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    others = [] if bias is None else [bias]
    dense = states.dim() == 2 and states.stride(-1) == 1 and all(each.is_contiguous() for each in others)
    return dense and _is_packed(weight) and same_float_type(states, *others)


def _product_outputs(states: Tensor, weight: Tensor, *_: object) -> Tensor:
    return states.new_empty(len(states), len(weight) * TILE)


@operation(_product_outputs, c=CKernel("quantised_product", _product_in_c))
def quantised_product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product` with packed weights, in float32. On the CPU a row has the same bits in any batch."""
    rows = len(states)
    states_padded = functional.pad(states, (0, 0, 0, max(0, LEAST_ROWS - rows)))
    found = functional.linear(states_padded.float(), unpack(weight), None if bias is None else bias.float())
    return found[:rows].to(states.dtype)


def _rows_outputs(indices: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(len(indices), weight.shape[1] * GROUP, dtype=dtype, device=indices.device)


def _rows_in_c(indices: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    return is_contiguous(torch.int64, indices) and _is_packed(weight) and dtype in (torch.float32, torch.bfloat16)


@operation(_rows_outputs, c=CKernel("quantised_rows", _rows_in_c))
def quantised_rows(indices: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [N, in] of packed weights: an embedding."""
    tiles = weight[indices // TILE]
    rows = torch.arange(len(indices), device=indices.device) * TILE + indices % TILE
    return unpack(tiles)[rows].to(dtype)


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product`, or `quantised_product` with packed weights."""
    return (quantised_product if weight.dtype is torch.uint8 else product)(states, weight, bias)


def lookup(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding, [N, in]; `dtype` if it is packed."""
    return quantised_rows(tokens, weight, dtype) if weight.dtype is torch.uint8 else functional.embedding(tokens, weight)
