"""When host nodes ran, one by one: memory that a link writes into while it is asked to, from C as well.

A number before anything else: how many nodes were noted. Then three per node: whether it was the first of its round, its begin
and its end by the monotonic clock, in nanoseconds.
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
    """Room for so many nodes; what comes later is lost, and nothing waits."""

    def __init__(self, room: int) -> None:
        assert room > 0
        self.room = room
        self._memory = np.zeros(1 + FIELDS * room, np.int64)

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)

    def add(self, first: bool, start_ns: int, end_ns: int) -> None:
        at = 1 + FIELDS * int(self._memory[0])
        if at < len(self._memory):
            self._memory[at : at + FIELDS] = first, start_ns, end_ns
            self._memory[0] += 1

    @property
    def times(self) -> list[NodeTime]:
        """For a device that is idle."""
        lines = self._memory[1 : 1 + FIELDS * int(self._memory[0])].reshape(-1, FIELDS).tolist()
        return [NodeTime(bool(first), start, end) for first, start, end in lines]
