"""Random numbers as a function: of a request's seed, a position in its history, a purpose, and an index. Nothing is kept.

The same on every device, at any row, in any batch, at any replay. Draws for different purposes never share a number:
a draft that was chosen with the noise that later replaces it would bias what comes out.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


def signed(value: int) -> int:
    """The int64 with the same 64 bits: tensor arithmetic wraps around, Python's does not."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN = signed(0x9E3779B97F4A7C15)
MIX_1 = signed(0xBF58476D1CE4E5B9)
MIX_2 = signed(0x94D049BB133111EB)
BELOW_ONE = 1 - 2.0**-24


class Purpose(IntEnum):
    """What a number decides."""

    DRAFT = 1  # which token the draft proposes
    ACCEPT = 2  # whether the proposal holds
    TARGET = 3  # which token the target emits where no proposal held


def uniform(seed: Tensor, position: Tensor, purpose: Purpose, index: Tensor | None = None) -> Tensor:
    """Numbers in (0, 1), float32, of the broadcast shape of seed, position and index (all int64).

    Small numbers keep 24 significant bits, down to 2**-63: a race among hundreds of thousands of tokens is decided by them.
    """
    key = _mix(_mix(seed + signed(int(purpose) * GOLDEN)) + position * GOLDEN)
    if index is not None:
        key = _mix(key + index * GOLDEN)
    bits = _shift(key, 1)
    return ((bits.to(torch.float32) + 0.5) * 2.0**-63).clamp(max=BELOW_ONE)


def exponential(seed: Tensor, position: Tensor, purpose: Purpose, index: Tensor) -> Tensor:
    """Standard exponential numbers, float32: of tokens that race with rates p, token t comes in first with probability p[t]."""
    return -torch.log1p(-uniform(seed, position, purpose, index))


def _mix(value: Tensor) -> Tensor:
    """A bijection of 64 bits in which every input bit reaches every output bit (the finaliser of SplitMix64)."""
    value = (value ^ _shift(value, 30)) * MIX_1
    value = (value ^ _shift(value, 27)) * MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, count: int) -> Tensor:
    """Shift right with zeros coming in; int64's own shift would bring in the sign."""
    return (value >> count) & ((1 << (64 - count)) - 1)
