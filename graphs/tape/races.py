"""The nodes of a recording, and unordered accesses of theirs to one piece of memory: vector clocks over streams and events, exact to the
element.

Accesses are reported in an order in which a single thread could run them, so only the earlier of two accesses can happen before
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.graphs.errors import Site
from stepgraph.graphs.spans import DEFAULT_STAGE

Clock = Mapping[str, int]  # per stream: number of its nodes that have happened
Leaf = tuple[str, str]  # ("scalar" | "tensor", description)


@dataclass
class TapeStreamEvent:
    """A point in one stream of one capture."""

    number: int
    stream: str
    clock: Clock
    capture: object


@dataclass(slots=True)
class Node:
    kind: str  # kernel, copy, fill, copied, host; view (runs once); record, wait
    name: str
    stream: str
    site: Site
    leaves: tuple[Leaf, ...] = ()
    call: Callable[[], object] | None = None
    event: TapeStreamEvent | None = None
    writes: tuple[Tensor, ...] = ()  # declared, of a host node
    clock: Clock = field(default_factory=dict)  # of its stream, this node included
    stage: str = DEFAULT_STAGE

    def __str__(self) -> str:
        what = f"host node {self.name!r}" if self.kind == "host" else self.name
        return f"{what} on stream {self.stream!r} at {self.site}"

    def happens_before(self, clock: Clock) -> bool:
        return self.clock[self.stream] <= clock.get(self.stream, 0)


Region = npt.NDArray[Any]  # the elements that a tensor covers


def region_of(tensor: Tensor) -> Region:
    """An array at the address of `tensor`, which may be on a device: numpy compares addresses and reads nothing."""
    size = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(stride * size for stride in tensor.stride())
    interface = {"version": 3, "data": (tensor.data_ptr(), True), "shape": shape, "strides": strides, "typestr": f"|V{size}"}
    array: Region = np.asarray(SimpleNamespace(__array_interface__=interface))
    return array


class Access(NamedTuple):
    """One node's access to a tensor."""

    node: Node
    tensor: Tensor | None  # None: state without a tensor, such as a generator's
    write: bool

    def overlaps(self, other: Access) -> bool:
        if self.tensor is None or other.tensor is None:
            return True
        return np.shares_memory(region_of(self.tensor), region_of(other.tensor))


class RaceChecker:
    """The clocks of one capture and every access so far."""

    def __init__(self, main: str) -> None:
        self._main = main
        self._clocks: dict[str, dict[str, int]] = {main: {main: 0}}
        self._accesses: dict[int, dict[str, list[Access]]] = {}
        self._last: dict[str, Node] = {}  # of each stream

    def joined(self, stream: str) -> bool:
        """Whether a stream belongs to the capture: the main stream, and a side stream after its first wait."""
        return stream in self._clocks

    def record(self, stream: str) -> Clock:
        return dict(self._clocks[stream])

    def wait(self, stream: str, clock: Clock) -> None:
        own = self._clocks.setdefault(stream, {stream: 0})
        for other, count in clock.items():
            own[other] = max(own.get(other, 0), count)

    def begin(self, node: Node) -> None:
        """Count a new node of its stream, and set its clock."""
        self._clocks[node.stream][node.stream] += 1
        node.clock = self.record(node.stream)
        self._last[node.stream] = node

    def access(self, key: int, access: Access) -> Access | None:
        """Add an access to the storage `key`; returns an earlier access that races with it."""
        streams = self._accesses.setdefault(key, {})
        for stream, earlier in streams.items():
            if stream == access.node.stream:
                continue
            for other in reversed(earlier):
                if other.node.happens_before(access.node.clock):
                    break  # all earlier ones of this stream happen before, too
                if (other.write or access.write) and other.overlaps(access):
                    return other
        streams.setdefault(access.node.stream, []).append(access)
        return None

    def is_shared(self, key: int) -> bool:
        """Whether several streams access the storage `key`."""
        return len(self._accesses.get(key, ())) > 1

    def concurrent_writes(self, key: int, node: Node) -> bool:
        """Whether another stream may write `key` while `node` runs."""
        return any(
            write and not other.happens_before(node.clock) and not node.happens_before(other.clock)
            for accesses in self._accesses.get(key, {}).values()
            for other, _, write in accesses
        )

    def unjoined(self) -> Node | None:
        """The last node of a side stream that the end of the main stream does not wait for."""
        end = self._clocks[self._main]
        return next((node for node in self._last.values() if not node.happens_before(end)), None)
