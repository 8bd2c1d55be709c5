"""How processor time grows with the size of the work: a ratio, which does not depend on the speed of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(work: Callable[[int], object], small: int, large: int) -> float:
    """The time of `large` over that of `small`, each the least of three runs. Sizes differ by run, so that no cache knows the text."""
    return min(_seconds(work, large - run) for run in range(3)) / min(_seconds(work, small - run) for run in range(3))


def _seconds(work: Callable[[int], object], size: int) -> float:
    start = time.process_time()
    work(size)
    return time.process_time() - start
