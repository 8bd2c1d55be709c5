"""The Triton programs of products with packed weights: each weight is read once for up to `MAX_ROWS` states.

Numbers are multiplied as stored: integers or float8, which bfloat16 and float16 represent exactly. The scales of a group are applied
to its sums in float32, and its minimums to the sums of its states. Where `choose_products` found it faster, torch multiplies many states
by dequantised weights instead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.graphs.layers.quantised import TILE, QuantKind, kind_of

_TILE = tl.constexpr(TILE)
_STAGES = tl.constexpr(3)  # iterations of a loop whose loads are in flight
MAX_ROWS = 16  # states per instance; one with 32 takes longer than two with 16
MIN_ROWS = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6) else 16  # before Triton 3.6, tl.dot needs 16
WARPS, ROW_WARPS = 4, {1: 1, TILE: 4}  # of products; of `packed_rows`, by ROWS
REGISTERS = 224  # per thread; without a bound, ptxas of Triton 3.6 takes fewer for some kinds and spills
MIN_TILES = {4: 1024, 2: 256, 1: 1}  # tiles of a matrix from which an instance takes 4, 2 or 1: enough instances for a large GPU remain
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
DEQUANTISED_BYTES = 1 << 26  # at a time
library_min_rows: dict[tuple[object, ...], int] = {}  # by `product_key`: from so many states on, torch multiplies


def _twice(bits: int) -> tl.constexpr:
    """A 16-bit number in both halves of an int32."""
    return tl.constexpr((bits * 0x10001 ^ 1 << 31) - (1 << 31))


# Numbers in float16 and bfloat16. An OR of a number into the last bits of a negative one subtracts it.
_HALF_1, _HALF_256, _HALF_1024, _HALF_LESS_1024 = map(_twice, (0x3C00, 0x5C00, 0x6400, 0xE400))
_BRAIN_1, _BRAIN_128, _BRAIN_LESS_128, _BRAIN_LESS_256, _BRAIN_2_120 = map(_twice, (0x3F80, 0x4300, 0xC300, 0xC380, 0x7B80))


@triton.jit
def numbers_of(
    words,  # [.., n] int32, packed weights
    PAIR: tl.constexpr,  # which two fields of each word
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT8: tl.constexpr,
    dtype: tl.constexpr,
):
    """Numbers without their scales, [.., n, 2]; exact. In 16-bit types: two at a time, without a conversion between types.

    There, a field becomes the low bits of a constant whose last bit has the value 1, and the constant is subtracted. A float8 gets the
    wider exponent field of the other type, and is multiplied by a power of two for the difference of their biases.
    """
    fields = words >> (PAIR * BITS)
    if dtype == tl.float32:
        numbers = tl.join(fields, fields >> 16) & ((1 << BITS) - 1)
        numbers = _float8(numbers) if FLOAT8 else (numbers - ZERO).to(tl.float32)
    elif FLOAT8:
        exponents = (fields & 0x007F007F) << (7 if dtype == tl.float16 else 4)
        pairs = _multiply_add(((fields & 0x00800080) << 8) | exponents, _HALF_256 if dtype == tl.float16 else _BRAIN_2_120, 0, dtype)
        numbers = _halves(pairs, dtype)
    elif dtype == tl.float16:
        pairs = (fields & (((1 << BITS) - 1) * 0x10001)) | _HALF_1024
        numbers = _halves(_multiply_add(pairs, _HALF_1, _HALF_LESS_1024 + ZERO * 0x10001, dtype), dtype)
    elif BITS == 4:
        pairs = (fields & 0x000F000F) | _BRAIN_128
        numbers = _halves(_multiply_add(pairs, _BRAIN_1, _BRAIN_LESS_128 + ZERO * 0x10001, dtype), dtype)
    else:  # seven bits fit; the eighth decides what is subtracted
        tl.static_assert(ZERO == 128)
        pairs, added = (fields & 0x007F007F) | _BRAIN_128, (fields & 0x00800080) ^ _BRAIN_LESS_256
        numbers = _halves(_multiply_add(pairs, _BRAIN_1, added, dtype), dtype)
    return numbers


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    return tl.join(pairs.to(tl.int16).to(dtype, bitcast=True), (pairs >> 16).to(tl.int16).to(dtype, bitcast=True))


@triton.jit
def _float8(fields):
    """As float16: its exponent has one more bit, and its bias is larger by 8."""
    half = ((fields & 128) << 8) | ((fields & 127) << 7)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _multiply_add(pairs, factors, added, dtype: tl.constexpr):
    """A fused multiply-add of the two 16-bit numbers in each int32."""
    CODE: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;" if dtype == tl.float16 else "fma.rn.bf16x2 $0, $1, $2, $3;"
    return tl.inline_asm_elementwise(CODE, "=r,r,r,r", [pairs, factors, added], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def tile_sums(
    states,
    offsets,  # [ROWS]: where each row of states begins; all are loaded, as a mask would take registers
    words,
    scales,
    first,  # the first tile
    inner,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT8: tl.constexpr,
    RANGED: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,  # per iteration: each is a separate product, so that the warps share them
    dtype: tl.constexpr,  # of the product: float32 in Triton's interpreter, which treats bfloat16 as integers
):
    """[TILES * TILE, ROWS] float32: adjacent tiles of packed weights by rows of states.

    A product takes two fields of each word, so that each thread makes the operand from the words that it holds.
    """
    WORDS: tl.constexpr = BITS * GROUP // 32
    PER_WORD: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = TILES * _TILE
    PAIRS: tl.constexpr = 2 if WORDS < 8 else 1  # per product, which needs at least 16 numbers
    BLOCK: tl.constexpr = (BITS * GROUP + (2 if RANGED else 1) * (32 if WIDE else 16)) * _TILE // 32  # words
    SCALES: tl.constexpr = 1 if WIDE else 2  # per word
    blocks, number = inner // GROUP, tl.arange(0, 2 * WORDS * PAIRS)
    words, scales = words + first * blocks * BLOCK, scales + (first * blocks * BLOCK + WORDS * _TILE) * SCALES
    tile, column = tl.arange(0, TILES) * blocks, tl.arange(0, COLUMNS)
    tile_of_column, within = column // _TILE * blocks, column % _TILE
    state_pointers = states + offsets[None, :, None] + number // (2 * PAIRS) * PER_WORD + number % (2 * PAIRS)
    totals = tl.zeros([BLOCKS, COLUMNS, ROWS], tl.float32)
    if dtype == tl.float32:
        ones = tl.full([BLOCKS, COLUMNS, 2 * WORDS * PAIRS], 1.0, tl.float32)
    else:  # by an instruction that the compiler does not fold, so that the operand has the layout of the others
        ones = _multiply_add(tl.zeros([BLOCKS, COLUMNS, WORDS * PAIRS], tl.int32), 0, _HALF_1 if dtype == tl.float16 else _BRAIN_1, dtype)
        ones = tl.reshape(_halves(ones, dtype), [BLOCKS, COLUMNS, 2 * WORDS * PAIRS])
    for start in tl.range(0, blocks, BLOCKS, num_stages=_STAGES):
        block = start + tl.arange(0, BLOCKS)
        is_block, block = (block < blocks)[:, None], tl.minimum(block, blocks - 1)
        block_start = (tile + block[:, None]) * BLOCK
        packed = tl.reshape(tl.load(words + block_start[:, :, None] + tl.arange(0, WORDS * _TILE)), [BLOCKS, TILES, WORDS, _TILE])
        packed = tl.reshape(tl.permute(packed, 0, 1, 3, 2), [BLOCKS, COLUMNS, WORDS])
        sums = tl.zeros([BLOCKS, COLUMNS, ROWS], tl.float32)
        state_sums = tl.zeros([BLOCKS, COLUMNS, ROWS], tl.float32)
        for pair in tl.static_range(0, PER_WORD // 2, PAIRS):
            numbers = numbers_of(packed, pair, BITS, ZERO, FLOAT8, dtype)
            if PAIRS == 2:
                numbers = tl.permute(tl.join(numbers, numbers_of(packed, pair + 1, BITS, ZERO, FLOAT8, dtype)), 0, 1, 2, 4, 3)
            numbers = tl.reshape(numbers, [BLOCKS, COLUMNS, 2 * WORDS * PAIRS])
            state = tl.load(state_pointers + (block * GROUP + 2 * pair)[:, None, None])
            state = tl.permute(state, 0, 2, 1).to(dtype)
            sums = tl.dot(numbers, state, sums, input_precision="ieee")
            if RANGED:  # in every column, because the sums are needed there
                state_sums = tl.dot(ones, state, state_sums, input_precision="ieee")
        scale = scales + (tile_of_column + block[:, None]) * (BLOCK * SCALES) + within
        totals += sums * tl.load(scale, mask=is_block, other=0.0).to(tl.float32)[:, :, None]
        if RANGED:
            totals += state_sums * tl.load(scale + _TILE, mask=is_block, other=0.0).to(tl.float32)[:, :, None]
    return tl.sum(totals, 0)


@triton.jit
def packed_product(
    states,  # [N, inner], the last dimension adjacent
    words,  # [outer / TILE, blocks, BLOCK] int32: the packed weights
    scales,  # the same memory in the type of the scales
    bias,  # [outer], or None
    output,  # [N, outer], written
    count,  # N
    inner,
    outer,
    state_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT8: tl.constexpr,
    RANGED: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    dtype: tl.constexpr,
):
    """TILES tiles of columns of up to ROWS states. The order of the sums does not depend on the other states, nor on TILES and ROWS."""
    row, first = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0).to(tl.int64) * TILES
    sums = tile_sums(
        states, tl.minimum(row, count - 1).to(tl.int64) * state_stride, words, scales, first, inner,
        BITS, GROUP, ZERO, FLOAT8, RANGED, WIDE, TILES, ROWS, BLOCKS, dtype,
    )  # fmt: skip
    columns = first * _TILE + tl.arange(0, TILES * _TILE)
    if bias is not None:
        sums += tl.load(bias + columns).to(tl.float32)[:, None]
    place = output + row.to(tl.int64)[None, :] * outer + columns[:, None]
    tl.store(place, sums.to(output.dtype.element_ty), mask=(row < count)[None, :])


def layout_of(kind: QuantKind) -> dict[str, Any]:
    """The constants that describe a block."""
    return {name.upper(): value for name, value in kind._asdict().items() if name != "together"}


def plan_of(kind: QuantKind, number: torch.dtype, tiles: int, max_tiles: int, rows: int, interpreted: bool) -> dict[str, Any]:
    """The constants of a product: what one instance does. BLOCKS, which decides the order of sums, depends on the kind only."""
    return {
        **layout_of(kind),
        "TILES": next(each for each, least in MIN_TILES.items() if each <= max_tiles and tiles % each == 0 and tiles >= least),
        "ROWS": max(MIN_ROWS, min(MAX_ROWS, triton.next_power_of_2(rows))),
        "BLOCKS": max(WARPS, (256 if kind.ranged else 512) // max(kind.group, 32)),  # more would spill
        "dtype": tl.float32 if interpreted else TYPES[number],
    }


def max_tiles_of(kind: QuantKind) -> int:
    """The most tiles per instance; more would spill."""
    return {128: 4, 32: 2, 16: 1}[kind.group]


def product_key(states: Tensor, weight: Tensor) -> tuple[object, ...]:
    """All that the time of a product depends on, but for the number of states."""
    return states.device, states.dtype, weight.shape


def quantised_product(states: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
    least = library_min_rows.get(product_key(states, weight)) if len(states) > MAX_ROWS else None
    multiply = multiply_packed if least is None or len(states) < least else multiply_dequantised
    multiply(states, weight, bias, output)


def multiply_packed(states: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
    kind, (count, inner), tiles = kind_of(weight), states.shape, len(weight)
    plan = plan_of(kind, states.dtype, tiles, max_tiles_of(kind), count, states.device.type == "cpu")
    grid, sizes = (tiles // plan["TILES"], triton.cdiv(count, plan["ROWS"])), (count, inner, output.shape[1], states.stride(0))
    arguments = states, weight.view(torch.int32), weight.view(kind.scale_type), bias, output, *sizes
    packed_product[grid](*arguments, **plan, num_warps=WARPS, maxnreg=REGISTERS)


def multiply_dequantised(states: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
    """Weights are rounded to the type of the states."""
    inner = states.shape[1]
    tiles = max(1, DEQUANTISED_BYTES // (TILE * inner * states.element_size()))
    for first in range(0, len(weight), tiles):
        part = weight[first : first + tiles]
        dequantised, columns = states.new_empty(len(part) * TILE, inner), slice(first * TILE, (first + len(part)) * TILE)
        _unpack_rows(None, part, dequantised, TILE)
        if bias is None:
            torch.mm(states, dequantised.t(), out=output[:, columns])
        else:
            torch.addmm(bias[columns], states, dequantised.t(), out=output[:, columns])


@triton.jit
def packed_rows(
    indices,  # [N], or None: all rows
    words,  # as in packed_product
    scales,
    output,  # [N, inner], written
    inner,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT8: tl.constexpr,
    RANGED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,  # per instance, all in one tile
):
    """One block of each row."""
    WORDS: tl.constexpr = BITS * GROUP // 32
    PER_WORD: tl.constexpr = 32 // BITS
    BLOCK: tl.constexpr = (BITS * GROUP + (2 if RANGED else 1) * (32 if WIDE else 16)) * _TILE // 32  # words
    SCALES: tl.constexpr = 1 if WIDE else 2  # per word
    row, block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    index = row if indices is None else tl.load(indices + row)
    at = index // _TILE * (inner // GROUP) + block
    found = tl.load(words + (at * BLOCK + index % _TILE)[:, None] + tl.arange(0, WORDS) * _TILE)
    scale = scales + (at * BLOCK + WORDS * _TILE) * SCALES + index % _TILE
    numbers = tl.join(
        numbers_of(found, 0, BITS, ZERO, FLOAT8, tl.float32), numbers_of(found, 1, BITS, ZERO, FLOAT8, tl.float32)
    )  # [ROWS, WORDS, field, pair]
    if PER_WORD == 8:
        others = tl.join(numbers_of(found, 2, BITS, ZERO, FLOAT8, tl.float32), numbers_of(found, 3, BITS, ZERO, FLOAT8, tl.float32))
        numbers = tl.permute(tl.join(numbers, others), 0, 1, 4, 3, 2)
    else:
        numbers = tl.permute(numbers, 0, 1, 3, 2)
    values = tl.reshape(numbers, [ROWS, GROUP]) * tl.load(scale).to(tl.float32)[:, None]
    if RANGED:
        values += tl.load(scale + _TILE).to(tl.float32)[:, None]
    tl.store(output + (row * inner + block * GROUP)[:, None] + tl.arange(0, GROUP), values.to(output.dtype.element_ty))


def quantised_rows(indices: Tensor, weight: Tensor, dtype: torch.dtype, output: Tensor) -> None:
    _unpack_rows(indices, weight, output, 1)


def _unpack_rows(indices: Tensor | None, weight: Tensor, output: Tensor, rows: int) -> None:
    kind, (count, inner) = kind_of(weight), output.shape
    arguments = indices, weight.view(torch.int32), weight.view(kind.scale_type), output, inner
    options = {"num_warps": ROW_WARPS[rows], "enable_fp_fusion": False}
    packed_rows[(count // rows, inner // kind.group)](*arguments, **layout_of(kind), ROWS=rows, **options)
