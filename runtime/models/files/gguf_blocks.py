"""The block layouts of GGUF whose weights can stay quantised. `gguf.quants.dequantize` is the reference for their values.

That function returns float32 values only: reading the integers is faster than quantising these values again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from stepgraph.graphs.layers.quantised import Grouped

Bytes = npt.NDArray[np.uint8]  # [blocks, bytes]
Floats = npt.NDArray[np.float32]  # [blocks, scales]
Parts = tuple[Bytes, Floats, Floats | None]  # integers [blocks, values], modulo 256; scales and minimums


def read_blocks(kind: str, rows: Bytes) -> Grouped:
    """rows: [out, bytes], all blocks of each."""
    block_bytes, read = BLOCK_LAYOUTS[kind]
    parts = read(rows.reshape(-1, block_bytes))
    numbers, scales, minimums = (None if part is None else torch.from_numpy(part).view(len(rows), -1) for part in parts)
    assert numbers is not None and scales is not None
    return Grouped(numbers, scales, minimums)


def _floats(halves: Bytes) -> Floats:
    found: Floats = halves.copy().view(np.float16).astype(np.float32)
    return found


def _nibbles(stored: Bytes, width: int = 16) -> Bytes:
    """The low halves of each `width` bytes, then their high halves."""
    whole = np.ascontiguousarray(stored)
    parts = [each.reshape(len(stored), -1, 1, width) for each in (whole & 15, whole >> 4)]
    return np.concatenate(parts, 2).reshape(len(stored), -1)


def _unpack(stored: Bytes, bits: int) -> Bytes:
    """The fields of `bits` bits in each 32 bytes, lowest bits first, each shifted to bit 4."""
    whole = np.ascontiguousarray(stored)
    parts = [(whole >> shift & (1 << bits) - 1) << 4 for shift in range(0, 8, bits)]
    return np.stack([part.reshape(len(stored), -1, 32) for part in parts], 2).reshape(len(stored), -1)


def _bits(stored: Bytes) -> Bytes:
    """One bit for each value, shifted to bit 4."""
    found: Bytes = np.unpackbits(stored, axis=1, bitorder="little") * np.uint8(16)
    return found


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight minimums of six bits. The last four of each have their two high bits in the bytes of the first four."""
    scales, minimums, ends = (blocks[:, start : start + 4] for start in (4, 8, 12))
    six_bits = [scales & 63, ends & 15 | scales >> 2 & 48], [minimums & 63, ends >> 4 | minimums >> 2 & 48]
    whole, whole_minimum = (np.concatenate(each, 1).astype(np.float32) for each in six_bits)
    return _floats(blocks[:, :2]) * whole, -(_floats(blocks[:, 2:4]) * whole_minimum)


def _one_scale_blocks(blocks: Bytes, *, fifth_bits: bool, subtracted: int = 0) -> Parts:
    """Blocks with one scale, and with a minimum if nothing is subtracted from the integers."""
    start = 2 if subtracted else 4
    numbers = _nibbles(blocks[:, start + 4 * fifth_bits :])
    if fifth_bits:
        numbers |= _bits(blocks[:, start : start + 4])
    return numbers - np.uint8(subtracted), _floats(blocks[:, :2]), None if subtracted else _floats(blocks[:, 2:4])


def _q6_k(blocks: Bytes) -> Parts:
    numbers = _nibbles(blocks[:, :128], 64) | _unpack(blocks[:, 128:192], 2)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return numbers - np.uint8(32), _floats(blocks[:, 208:]) * scales, None


BLOCK_LAYOUTS: dict[str, tuple[int, Callable[[Bytes], Parts]]] = {  # by type: bytes of a block, and what reads [blocks, bytes]
    "Q4_0": (18, functools.partial(_one_scale_blocks, fifth_bits=False, subtracted=8)),
    "Q4_1": (20, functools.partial(_one_scale_blocks, fifth_bits=False)),
    "Q5_0": (22, functools.partial(_one_scale_blocks, fifth_bits=True, subtracted=16)),
    "Q5_1": (24, functools.partial(_one_scale_blocks, fifth_bits=True)),
    "Q8_0": (34, lambda blocks: (np.ascontiguousarray(blocks[:, 2:]), _floats(blocks[:, :2]), None)),
    "Q4_K": (144, lambda blocks: (_nibbles(blocks[:, 16:], 32), *_k_scales(blocks))),
    "Q5_K": (176, lambda blocks: (_nibbles(blocks[:, 48:], 32) | _unpack(blocks[:, 16:48], 1), *_k_scales(blocks))),
    "Q6_K": (210, _q6_k),
}
