"""Weights that stay quantised in memory: their packed form.

A weight [out, in] is packed as uint8 [out / 16, blocks, bytes]: tiles of 16 columns, each a run of blocks. graphs/layers/c/quantised.h
describes a block; its number of bytes determines the kind. Files are converted to one of these kinds when they are loaded: `pack`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.layers.huge_pages import empty_in_huge_pages
from stepgraph.sampling.kernels.c_kernel import FLOATS
from stepgraph.sampling.kernels.operation import Contiguous, Longs, operation

TILE = 16  # columns
_MAX_BLOCKS = 1024  # as in quantised.h
MAX_INNER = 1 << 16  # float32 numbers in STATE_BYTES of kernels.h


class QuantKind(NamedTuple):
    """A weight is scale * (field - zero) + minimum, or scale * the number in float8_e4m3fn. As in quantised.h."""

    bits: int
    zero: int = 0
    ranged: bool = False  # has minimums
    wide: bool = False  # scales and minimums in float32, not float16
    group: int = 32  # inner indices with one scale
    together: int = 1  # blocks counted as one in the shape
    float8: bool = False

    @property
    def block_size(self) -> int:
        """Inner indices."""
        return self.group * self.together

    @property
    def field_bytes(self) -> int:
        return self.bits * self.group * TILE // 8

    @property
    def scale_type(self) -> torch.dtype:
        return torch.float32 if self.wide else torch.float16

    @property
    def block_bytes(self) -> int:
        return self.together * (self.field_bytes + (1 + self.ranged) * TILE * self.scale_type.itemsize)


MIXED = QuantKind(8, 128, ranged=True, wide=True, group=16, together=4)  # represents all integer kinds of groups of 16 or more
KINDS = {  # by the name of the type in a file
    "Q4_0": QuantKind(4, 8),
    "Q4_1": QuantKind(4, ranged=True),
    "Q5_0": QuantKind(8, 128),
    "Q5_1": QuantKind(8, 128, ranged=True, wide=True),
    "Q8_0": QuantKind(8, 128),
    "Q4_K": QuantKind(4, ranged=True, wide=True),
    "Q5_K": QuantKind(8, 128, ranged=True, wide=True),
    "Q6_K": QuantKind(8, 128, wide=True, group=16, together=4),
    "INT4": QuantKind(4, ranged=True, wide=True),
    "INT4_128": QuantKind(4, ranged=True, wide=True, group=128),
    "INT8": QuantKind(8, 128),  # without minimums, scales in float16
    "INT8_RANGED": QuantKind(8, 128, ranged=True, wide=True),
    "FP8": QuantKind(8, wide=True, group=128, float8=True),
}
_KIND_OF = {kind.block_bytes: kind for kind in (*KINDS.values(), MIXED)}


class Grouped(NamedTuple):
    """A quantised weight as read from a file of any format: scale * number + minimum."""

    numbers: Tensor  # [out, in], at least -zero of its kind; modulo 256 in uint8; float8 as its bytes
    scales: Tensor  # [out, groups]; in float16 if the kind stores float16
    minimums: Tensor | None = None


def common_kind(kinds: set[QuantKind | None]) -> QuantKind | None:
    """A kind that represents weights of all of these; None if there is none."""
    if len(kinds) == 1:
        return next(iter(kinds))
    return None if None in kinds or any(kind is not None and kind.float8 for kind in kinds) else MIXED


def pack(kind: QuantKind, weight: Grouped) -> Tensor:
    rows, inner = weight.numbers.shape
    tiles, count = rows // TILE, inner // kind.group
    packed = torch.empty(tiles, count, kind.block_bytes // kind.together, dtype=torch.uint8, device=weight.numbers.device)
    words = _pack_words(kind, weight.numbers.to(torch.uint8).contiguous()).view(tiles, TILE, count, -1)
    packed[:, :, : kind.field_bytes].view(torch.int32).view(tiles, count, -1, TILE).copy_(words.permute(0, 2, 3, 1))
    minimums = torch.zeros_like(weight.scales) if weight.minimums is None else weight.minimums
    numbers = packed[:, :, kind.field_bytes :].view(kind.scale_type).view(tiles, count, -1, TILE)
    for index, each in enumerate((weight.scales, minimums)[: numbers.shape[2]]):
        repeated = each.repeat_interleave(count // each.shape[1], 1)
        numbers[:, :, index].copy_(repeated.view(tiles, TILE, count).transpose(1, 2))
    return packed.view(tiles, -1, kind.block_bytes)


def _pack_words(kind: QuantKind, numbers: Tensor) -> Tensor:
    """int32 words of fields, from numbers [out, in] modulo 256. Eight at a time, as little-endian int64."""
    mask, zero = (int.from_bytes(bytes([byte]) * 8, "little", signed=True) for byte in ((1 << kind.bits) - 1, kind.zero))
    eight = numbers.view(torch.int64) & mask ^ zero  # adds the zero, which is half of the range or 0
    if kind.bits == 8:  # swap the two middle bytes of each four
        middle = 0x0000FF000000FF00
        return (eight & ~(middle | middle << 8) | eight >> 8 & middle | (eight & middle) << 8).view(torch.int32)
    pairs = eight | eight >> 12  # byte n: field n, and above it field n + 2; the order in a word is 0, 2, 4, 6, 1, 3, 5, 7
    words = pairs & 0xFF | pairs >> 24 & 0xFF00 | pairs << 8 & 0xFF0000 | pairs >> 16 & 0xFF000000
    return words.to(torch.int32)


def empty_packed(kind: QuantKind, like: Tensor) -> Tensor:
    """Uninitialised memory for a weight of the shape [out, in] of `like`, on its device."""
    rows, inner = like.shape
    return empty_in_huge_pages(like, (rows // TILE, inner // kind.block_size, kind.block_bytes), torch.uint8)


def has_packed_form(tensor: Tensor) -> bool:
    return tensor.dtype is torch.uint8 and tensor.dim() == 3 and tensor.shape[2] in _KIND_OF


def kind_of(packed: Tensor) -> QuantKind:
    return _KIND_OF[packed.shape[2]]


def inner_size(packed: Tensor) -> int:
    return packed.shape[1] * kind_of(packed).block_size


def count_weights(parameter: Tensor) -> int:
    """How many weights a parameter has, packed or not."""
    return parameter.shape[0] * TILE * inner_size(parameter) if parameter.dtype is torch.uint8 else parameter.numel()


def kind_name(parameter: Tensor) -> str:
    """The kind or type of a parameter's weights, packed or not."""
    if parameter.dtype is not torch.uint8:
        return str(parameter.dtype).removeprefix("torch.")
    kind = kind_of(parameter)
    name = "float8" if kind.float8 else f"{kind.bits} bits"
    return f"{name} in groups of {kind.group}"


def unpack(packed: Tensor) -> Tensor:
    """The weights, [out, in] float32, with the bits of the format's reference."""
    kind = kind_of(packed)
    blocks = packed.reshape(len(packed), -1, kind.block_bytes // kind.together)
    tiles, count = blocks.shape[:2]
    words, scales = blocks.split([kind.field_bytes, blocks.shape[2] - kind.field_bytes], 2)
    words = words.reshape(tiles, count, -1, TILE, 2, 2)  # tile, block, vector, column, odd, byte
    mask = (1 << kind.bits) - 1
    fields = torch.stack([words >> shift & mask for shift in range(0, 8, kind.bits)], -1)
    fields = fields.permute(0, 3, 1, 2, 5, 6, 4).reshape(tiles, TILE, count, kind.group)
    values: Tensor = fields.view(torch.float8_e4m3fn).float() if kind.float8 else fields.float() - kind.zero
    scale, *minimum = scales.contiguous().view(kind.scale_type).float().view(tiles, count, -1, TILE, 1).transpose(1, 3).unbind(2)
    values = values * scale
    values = values + minimum[0] if minimum else values
    return values.reshape(tiles * TILE, -1)


def _c_supports_packed(weight: Tensor) -> bool:
    fits = weight.dtype is torch.uint8 and weight.is_contiguous()
    return fits and weight.shape[1] * kind_of(weight).together <= _MAX_BLOCKS and inner_size(weight) <= MAX_INNER


def c_supports_product(states: Tensor, weight: Tensor) -> bool:
    """Whether C has products of these states and this weight, packed or not."""
    if weight.dtype is torch.uint8:
        return _c_supports_packed(weight) and states.shape[1:] == (inner_size(weight),)
    fits = states.dim() == 2 and states.shape[1:] == weight.shape[1:] and weight.is_contiguous()
    return fits and weight.dtype is states.dtype and states.shape[1] <= MAX_INNER


def _rows_outputs(indices: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(len(indices), inner_size(weight), dtype=dtype, device=indices.device)


@operation(_rows_outputs, triton=True, c=True, supports=lambda weight, dtype: _c_supports_packed(weight) and dtype in FLOATS)
def quantised_rows(indices: Longs, weight: Contiguous, dtype: torch.dtype) -> Tensor:
    """Rows [N, in] of packed weights: an embedding."""
    tiles = weight[indices // TILE]
    rows = torch.arange(len(indices), device=indices.device) * TILE + indices % TILE
    return unpack(tiles)[rows].to(dtype)
