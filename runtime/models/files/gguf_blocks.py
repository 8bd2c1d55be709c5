"""The integers, scales and minimums of quantised blocks in a GGUF file.

`gguf.quants.dequantize` is the reference of these layouts. It returns values in float32 only; to compute and divide these takes longer
than to read the integers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from stepgraph.graphs.layers.quantised import Grouped

Bytes = npt.NDArray[np.uint8]  # [blocks, bytes]
Floats = npt.NDArray[np.float32]  # [blocks, scales]
Parts = tuple[Bytes, Floats, Floats | None]  # numbers [blocks, values], modulo 256; scales and minimums


def read_blocks(kind: str, rows: Bytes) -> Grouped:
    """rows: [out, bytes], all blocks of each."""
    block_bytes, read = _LAYOUTS[kind]
    numbers, scales, minimums = (
        None if part is None else torch.from_numpy(part).view(len(rows), -1) for part in read(rows.reshape(-1, block_bytes))
    )
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


def _fields(stored: Bytes, bits: int, width: int = 32) -> Bytes:
    """Of each `width` bytes the fields of `bits` bits, those of the lowest bits first, each shifted to bit 4."""
    whole = np.ascontiguousarray(stored)
    parts = [(whole >> shift & (1 << bits) - 1) << 4 for shift in range(0, 8, bits)]
    return np.stack([part.reshape(len(stored), -1, width) for part in parts], 2).reshape(len(stored), -1)


def _bits(stored: Bytes) -> Bytes:
    """One bit for each value, shifted to bit 4."""
    found: Bytes = np.unpackbits(stored, axis=1, bitorder="little") * np.uint8(16)
    return found


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight minimums of six bits, the high ones of the last four of each in two bits of the first four."""
    scales, minimums, ends = (blocks[:, start : start + 4] for start in (4, 8, 12))
    six_bits = [scales & 63, ends & 15 | scales >> 2 & 48], [minimums & 63, ends >> 4 | minimums >> 2 & 48]
    whole, whole_minimum = (np.concatenate(each, 1).astype(np.float32) for each in six_bits)
    return _floats(blocks[:, :2]) * whole, -(_floats(blocks[:, 2:4]) * whole_minimum)


def _q4_0(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 2:]) - np.uint8(8), _floats(blocks[:, :2]), None


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:]), _floats(blocks[:, :2]), _floats(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Parts:
    return (_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6])) - np.uint8(16), _floats(blocks[:, :2]), None


def _q5_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]), _floats(blocks[:, :2]), _floats(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Parts:
    return np.ascontiguousarray(blocks[:, 2:]), _floats(blocks[:, :2]), None


def _q4_k(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 48:], 32) | _fields(blocks[:, 16:48], 1), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    numbers = _nibbles(blocks[:, :128], 64) | _fields(blocks[:, 128:192], 2)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return numbers - np.uint8(32), _floats(blocks[:, 208:]) * scales, None


_LAYOUTS: dict[str, tuple[int, Callable[[Bytes], Parts]]] = {  # bytes of a block, and what reads it
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
