"""Finds unordered accesses to one piece of memory: vector clocks over streams and events, exact to the element.

Accesses are reported in an order in which a single thread could run them, so only the earlier of two accesses can happen before
the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stepgraph.graphs.errors import Site

Clock = Mapping[str, int]  # per stream: number of its nodes that have happened


class Region(NamedTuple):
    """The bytes of one storage that a tensor covers."""

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    itemsize: int

    @property
    def end(self) -> int:
        return self.start + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)) + self.itemsize

    @property
    def dense(self) -> bool:
        expected = self.itemsize
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if stride != expected:
                return False
            expected *= size
        return True


WHOLE = Region(0, (), (), 1)  # for state without a tensor, such as a generator's


def region_of(tensor: Tensor) -> Region | None:
    """The bytes of `tensor`; None if it is empty. Dimensions of stride 0 or size 1 are dropped."""
    if tensor.numel() == 0:
        return None
    itemsize = tensor.element_size()
    if tensor.is_contiguous():
        return Region(int(tensor.storage_offset()) * itemsize, (tensor.numel(),), (itemsize,), itemsize)
    dims = [(int(size), stride * itemsize) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and stride != 0]
    return Region(int(tensor.storage_offset()) * itemsize, tuple(size for size, _ in dims), tuple(stride for _, stride in dims), itemsize)


def overlap(a: Region, b: Region) -> bool:
    if a == b:
        return True
    if a.end <= b.start or b.end <= a.start:
        return False
    if a.dense and b.dense:
        return True
    base = min(a.start, b.start)
    unit = math.gcd(a.start - base, b.start - base, a.itemsize, b.itemsize, *a.strides, *b.strides)
    touched = torch.zeros((max(a.end, b.end) - base) // unit, dtype=torch.bool)
    _elements(touched, a, base, unit).fill_(True)
    return bool(_elements(touched, b, base, unit).any())


def _elements(touched: Tensor, region: Region, base: int, unit: int) -> Tensor:
    sizes, strides = (*region.sizes, region.itemsize // unit), (*(stride // unit for stride in region.strides), 1)
    return touched.as_strided(sizes, strides, (region.start - base) // unit)


class Actor(Protocol):
    """A node, whose text names its operation, stream and line."""

    site: Site


class Access(NamedTuple):
    """One node's access to one region, with the clock of its stream."""

    actor: Actor
    stream: str
    clock: Clock
    region: Region
    write: bool

    def happens_before(self, clock: Clock) -> bool:
        return self.clock[self.stream] <= clock.get(self.stream, 0)


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
                if (other.write or access.write) and overlap(other.region, access.region):
                    return other
        streams.setdefault(access.stream, []).append(access)
        return None

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
