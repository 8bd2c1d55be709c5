"""Pairs of test parameters: a subset in every run, all pairs in `make soak`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def pairs(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All pairs. Each value occurs in at least one unmarked pair; the other pairs are marked `soak`."""
    count = max(len(first), len(second))
    always = {(index % len(first), index % len(second)) for index in range(count)}
    return [
        pytest.param(one, other, marks=[] if (row, column) in always else [pytest.mark.soak])
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]
