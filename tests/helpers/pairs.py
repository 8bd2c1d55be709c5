"""Pairs of test parameters: a subset in every run, all pairs in `make soak`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def pairs(first: Sequence[Any], second: Sequence[Any], quick: int = 99) -> list[Any]:
    """All pairs. Each value occurs in at least one pair that is not marked `soak`; of those, all but the first `quick` are `slow`."""
    count = max(len(first), len(second))
    always = {(index % len(first), index % len(second)): index for index in range(count)}
    return [
        pytest.param(one, other, marks=[pytest.mark.slow] * (place >= quick) if place is not None else [pytest.mark.soak])
        for row, one in enumerate(first)
        for column, other in enumerate(second)
        for place in [always.get((row, column))]
    ]
