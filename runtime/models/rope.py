"""Rotary positions: how fast each pair of a head's numbers turns, Llama 3.1's and linear scaling included."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """Angles per position. `factor` 1 leaves them as they are; with `original_length` only the slow ones are stretched."""

    theta: float = 10_000.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int | None = None  # None: every angle is divided by `factor`

    def frequencies(self, size: int) -> Tensor:
        """[size / 2] float32 radians per position."""
        powers = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
        found = 1.0 / (self.theta**powers)
        if self.original_length is None:
            return found / self.factor
        # Waves that fit often into the original length stay, those that do not fit are stretched, in between it is mixed.
        turns = self.original_length * found / (2 * math.pi)
        kept = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * found / self.factor + kept * found
