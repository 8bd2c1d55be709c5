"""Parameters in pairs: some of them for every run, all of them for the long ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def pairs(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Every value of each at least once, in turn; the other pairs are run by `make soak`."""
    count = max(len(first), len(second))
    always = {(place % len(first), place % len(second)) for place in range(count)}
    return [
        pytest.param(one, other, marks=[] if (row, column) in always else [pytest.mark.soak])
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]
