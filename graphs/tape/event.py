"""Points in the launch order of a tape backend, and what its streams are at while somebody waits for one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepgraph.graphs.tape.player import Await, HostCall, Item, Segment
from stepgraph.graphs.tape.trace import Timed

if TYPE_CHECKING:
    from stepgraph.graphs.tape.backend import TapeBackend


class TapeEvent:
    """A point in the launch order of a TapeBackend."""

    def __init__(self, backend: TapeBackend) -> None:
        self._backend = backend
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        self._backend.refuse_while_recording("Event.wait()")
        self._backend.stats.event_waits += 1
        tracer = self._backend.tracer
        if tracer is None:
            reached = self.reached.wait(seconds)
        else:
            with tracer.waiting():
                reached = self.reached.wait(seconds)
        if reached:
            self._backend.raise_pending()
        return reached


def told(at: Mapping[str, Item]) -> tuple[str, ...]:
    """What each stream is at, in words."""
    return tuple(f"stream {stream}: {_named(item)}" for stream, item in sorted(at.items()))


def _named(item: Item) -> str:
    if isinstance(item, Timed):
        item = item.item
    if isinstance(item, HostCall):
        return f"host node {item.name}"
    if isinstance(item, Await):
        return f"waits for {item.name}"
    stages = list(dict.fromkeys(node.stage for node in item.nodes)) if isinstance(item, Segment) else []
    return f"stage {stages[0]}" + (f" to {stages[-1]}" if len(stages) > 1 else "") if stages else "between two items"
