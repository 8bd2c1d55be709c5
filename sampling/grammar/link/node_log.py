"""The times of single host nodes, in memory that a host link writes to while it is requested, also from C.

Layout: the number of recorded nodes, then three numbers per node: whether it was the first of its round, its begin and its end on the
monotonic clock, in nanoseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FIELDS = 3


class NodeTime(NamedTuple):
    first: bool  # of its round
    start_ns: int
    end_ns: int


class NodeLog:
    """Room for a number of nodes; later ones are dropped."""

    def __init__(self, room: int) -> None:
        assert room > 0
        self.room = room
        self._memory = np.zeros(1 + FIELDS * room, np.int64)

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)

    def add(self, first: bool, start_ns: int, end_ns: int) -> None:
        index = 1 + FIELDS * int(self._memory[0])
        if index < len(self._memory):
            self._memory[index : index + FIELDS] = first, start_ns, end_ns
            self._memory[0] += 1

    @property
    def times(self) -> list[NodeTime]:
        """Read while no node is running."""
        entries = self._memory[1 : 1 + FIELDS * int(self._memory[0])].reshape(-1, FIELDS).tolist()
        return [NodeTime(bool(first), start, end) for first, start, end in entries]
