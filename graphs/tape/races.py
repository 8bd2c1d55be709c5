"""Finds unordered accesses to one piece of memory: vector clocks over streams and events, exact to the element.

Accesses are reported in an order in which a single thread could run them, so only the earlier of two accesses can happen before
the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.graphs.errors import Site

Clock = Mapping[str, int]  # per stream: number of its nodes that have happened


Region = npt.NDArray[Any]  # the elements that a tensor covers


def region_of(tensor: Tensor) -> Region | None:
    """An array at the address of `tensor`, which may be on a device: numpy compares addresses and reads nothing. None without elements."""
    if tensor.numel() == 0:
        return None
    size = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(stride * size for stride in tensor.stride())
    interface = {"version": 3, "data": (tensor.data_ptr(), True), "shape": shape, "strides": strides, "typestr": f"|V{size}"}
    array: Region = np.asarray(SimpleNamespace(__array_interface__=interface))
    return array


class Actor(Protocol):
    """A node, whose text names its operation, stream and line."""

    site: Site


class Access(NamedTuple):
    """One node's access to a tensor, with the clock of its stream."""

    actor: Actor
    stream: str
    clock: Clock
    tensor: Tensor | None  # None: state without a tensor, such as a generator's
    write: bool

    def happens_before(self, clock: Clock) -> bool:
        return self.clock[self.stream] <= clock.get(self.stream, 0)

    def overlaps(self, other: Access) -> bool:
        if self.tensor is None or other.tensor is None:
            return True
        own, others = region_of(self.tensor), region_of(other.tensor)
        return own is not None and others is not None and np.shares_memory(own, others)


class RaceChecker:
    """The clocks of one capture and every access so far."""

    def __init__(self, main: str) -> None:
        self._main = main
        self._clocks: dict[str, dict[str, int]] = {main: {main: 0}}
        self._accesses: dict[int, dict[str, list[Access]]] = {}
        self._last: dict[str, tuple[Actor, Clock]] = {}

    def joined(self, stream: str) -> bool:
        """Whether a stream belongs to the capture: the main stream, and a side stream after its first wait."""
        return stream in self._clocks

    def record(self, stream: str) -> Clock:
        return dict(self._clocks[stream])

    def wait(self, stream: str, clock: Clock) -> None:
        own = self._clocks.setdefault(stream, {stream: 0})
        for other, count in clock.items():
            own[other] = max(own.get(other, 0), count)

    def begin(self, actor: Actor, stream: str) -> Clock:
        """Count a new node of `stream`; its accesses carry the returned clock."""
        own = self._clocks[stream]
        own[stream] += 1
        clock = dict(own)
        self._last[stream] = (actor, clock)
        return clock

    def access(self, key: int, access: Access) -> Access | None:
        """Add an access to the storage `key`; returns an earlier access that races with it."""
        streams = self._accesses.setdefault(key, {})
        for stream, earlier in streams.items():
            if stream == access.stream:
                continue
            for other in reversed(earlier):
                if other.happens_before(access.clock):
                    break  # all earlier ones of this stream happen before, too
                if (other.write or access.write) and other.overlaps(access):
                    return other
        streams.setdefault(access.stream, []).append(access)
        return None

    def is_shared(self, key: int) -> bool:
        """Whether several streams access the storage `key`."""
        return len(self._accesses.get(key, ())) > 1

    def concurrent_writes(self, key: int, stream: str, clock: Clock) -> bool:
        """Whether another stream may write `key` while the node of `stream` with this clock runs."""
        return any(
            access.write and not access.happens_before(clock) and clock[stream] > access.clock.get(stream, 0)
            for other, accesses in self._accesses.get(key, {}).items()
            if other != stream
            for access in accesses
        )

    def unjoined(self) -> Actor | None:
        """The last node of a side stream that the end of the main stream does not wait for."""
        end = self._clocks[self._main]
        for stream, (actor, clock) in self._last.items():
            if clock[stream] > end.get(stream, 0):
                return actor
        return None
