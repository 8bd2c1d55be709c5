"""Runs steps without recording them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, RecordedReport, Step, StreamEvent, host_call, use_context
from stepgraph.graphs.errors import HostNodeError
from stepgraph.graphs.spans import MakeRange

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()  # shared, so that a stage without a range creates no object


class EagerContext:
    """Runs a step without recording: one stream, and a host node is a call."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None, ranges: MakeRange | None = None) -> None:
        self._synchronize = synchronize
        self._ranges = ranges

    def stream(self, name: str) -> AbstractContextManager[None]:
        return _NOTHING

    def stage(self, name: str) -> AbstractContextManager[None]:
        return _NOTHING if self._ranges is None else self._ranges(name)

    def record(self) -> StreamEvent:
        return self

    def wait(self, event: StreamEvent) -> None:
        pass

    def host_node(self, name: str, function: Callable[[], object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        self._synchronize()  # device copies may still be writing the pinned memory that the node reads
        try:
            with self.stage(name):
                host_call(name, function)()
        except Exception as error:
            raise HostNodeError(name, error) from error


@torch.no_grad()
def run_eager(step: Step, buffers: StaticBuffers, ranges: MakeRange | None = None) -> None:
    """Run a step once without recording it. Every replay must equal this bit for bit."""
    synchronize = torch.cuda.synchronize if buffers.device.type == "cuda" else lambda: None
    with use_context(EagerContext(synchronize, ranges)):
        step(buffers)


class EagerStep:
    """Takes the place of a recording: `replay` runs the step eagerly."""

    report = RecordedReport(nodes={}, host_nodes=(), nbytes=0, seconds=0.0)

    def __init__(self, backend: Backend, step: Step, buffers: StaticBuffers) -> None:
        self._backend, self._step, self._buffers = backend, step, buffers

    def replay(self) -> None:
        self._backend.run(lambda: run_eager(self._step, self._buffers, self._backend.ranges))
