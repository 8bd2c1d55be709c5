"""Cache entries in float8_e4m3fn as bytes, in Triton. sm_80 has no instructions for the type, so its bits are shifted."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_read(entries, like):
    """Entries as numbers of the type of `like`."""
    if entries.dtype == tl.uint8:  # as float16: its exponent has one more bit, and its bias is larger by 8
        bits = entries.to(tl.int32)
        half = tl.where((bits & 127) == 127, 0x7FFF, ((bits & 128) << 8) | ((bits & 127) << 7))
        entries = (half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(like.dtype)
    return entries


@triton.jit
def as_written(states, target):
    """States as the memory at `target` holds them, rounded to the nearest, ties to even."""
    if target.dtype.element_ty == tl.uint8:
        bits = states.to(tl.float32).to(tl.int32, bitcast=True)
        sign, size = (bits >> 24) & 128, bits & 0x7FFFFFFF
        normal = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
        # The last bits of value + 2 ** 14 are the float8 of a value below 2 ** -6.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
        found = tl.minimum(tl.where(size < (121 << 23), small, normal), 126)
        states = (tl.where(size > 0x7F800000, 127, found) | sign).to(tl.uint8)
    return states
