"""Counter-based random numbers: a function of a request's seed, a position in its history, a purpose, and an index. No state.

The numbers are the same on every device, in any row, batch and replay. Different purposes share no number: if the noise that chose a draft
also decided its acceptance or chose its replacement, the result would be biased. With `draft_seed`, drafts are drawn by the numbers of the
target. Such drafts are certain: they are accepted where the target draws the same token.
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
    DRAFT = 1  # which token the draft proposes
    ACCEPT = 2  # whether the proposal is accepted
    TARGET = 3  # which token the target emits after the accepted proposals


def draft_seed(seed: int) -> int:
    """The seed whose numbers for drafts are the target's numbers of `seed`, if that is not negative."""
    return signed(seed + (Purpose.TARGET - Purpose.DRAFT) * GOLDEN) if seed >= 0 else seed


def uniform(seed: Tensor, position: Tensor, purpose: Purpose, index: Tensor | None = None) -> Tensor:
    """Numbers in (0, 1), float32, of the broadcast shape of seed, position and index (all int64).

    Small numbers keep 24 significant bits, down to 2**-63: they decide a race among hundreds of thousands of tokens.
    """
    key = _mix(_mix(seed + signed(int(purpose) * GOLDEN)) + position * GOLDEN)
    if index is not None:
        key = _mix(key + index * GOLDEN)
    bits = _shift(key, 1)
    return ((bits.to(torch.float32) + 0.5) * 2.0**-63).clamp(max=BELOW_ONE)


def exponential(seed: Tensor, position: Tensor, purpose: Purpose, index: Tensor) -> Tensor:
    """Standard exponential numbers, float32: in a race with rates p, token t wins with probability p[t]."""
    return -torch.log1p(-uniform(seed, position, purpose, index))


def _mix(value: Tensor) -> Tensor:
    """A bijection of 64 bits in which every input bit reaches every output bit (the finaliser of SplitMix64)."""
    value = (value ^ _shift(value, 30)) * MIX_1
    value = (value ^ _shift(value, 27)) * MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, count: int) -> Tensor:
    """Logical shift right; the shift of int64 is arithmetic."""
    return (value >> count) & ((1 << (64 - count)) - 1)
