"""The contract between a step and a backend: streams, events, host nodes, capture, replay, statistics.

A step is a function over static buffers. The same code runs eagerly, on the tape (CPU) and in a CUDA graph. `current_context()`
gives it streams, events and host nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.spans import MakeRange, RecordedReport, Span

Step = Callable[[StaticBuffers], None]
Check = Literal["once", "twice"]
MAIN = "main"


class StreamEvent(Protocol):
    """A point in a stream that another stream can wait for."""


class CaptureContext(Protocol):
    """What a step uses besides tensor operations. Calls on one stream run in the order they are made."""

    def stream(self, name: str) -> AbstractContextManager[None]:
        """Issue the operations of the block on the named stream. A side stream joins the step with its first `wait`."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Name the operations of the block, for profiles. With nested stages, a node belongs to the innermost."""

    def record(self) -> StreamEvent:
        """An event at the current point of the current stream."""

    def wait(self, event: StreamEvent) -> None:
        """Make the current stream wait for `event`."""

    def host_node(self, name: str, function: Callable[[], object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Call `function` on the host, in the order of the current stream, in every replay.

        It may use pinned buffers only, and must declare them in `reads` and `writes`. If it has the attributes `native_address`, the
        address of a C function `void (*)(void *)`, and `native_data`, the argument, that function is called directly, without
        the GIL; `function` must keep the data alive.
        """


class Event(Protocol):
    """A point in the main stream that the host can query."""

    def query(self) -> bool:
        """Whether everything launched before the event has finished."""

    def wait(self, seconds: float | None = None) -> bool:
        """Block the calling thread until then, at most `seconds`; returns whether the event is reached."""


@dataclass
class BackendStats:
    """Counts since the backend was created. `syncs`: calls of synchronize(); `event_waits`: calls of Event.wait()."""

    replays: int = 0
    syncs: int = 0
    event_waits: int = 0
    host_nodes: int = 0
    wait_ns: int | None = None  # time that main streams waited for other streams in replays; None if unknown


class Recorded(Protocol):
    """A recorded step."""

    @property
    def report(self) -> RecordedReport: ...

    def replay(self) -> None:
        """Run the recorded step once on the current contents of the buffers. Asynchronous if the backend is."""


class Backend(Protocol):
    """Records and replays steps on one device. One per engine. Not thread-safe: one thread captures and launches."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def stats(self) -> BackendStats: ...

    @property
    def ranges(self) -> MakeRange | None:
        """Makes ranges for a profiler; None without profiling."""

    def capture(
        self,
        step: Step,
        buffers: StaticBuffers,
        *,
        check: Check = "once",
        between: Callable[[], None] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> Recorded:
        """Record `step` and leave the buffers unchanged. CaptureError if the step cannot be replayed."""

    def measure(self, step: Step, buffers: StaticBuffers) -> int:
        """Bytes of a recording of `step` that shares no memory with others. The recording is discarded."""

    def run(self, function: Callable[[], object]) -> None:
        """Issue the operations of `function` on the main stream, after everything launched before. Does not block.

        `function` may run later and on another thread: it must bind its inputs by value.
        """

    def event(self) -> Event:
        """An event at the current end of the main stream."""

    def start_trace(self, first_round: int, rounds: int) -> None:
        """Record when the stages, host nodes and waits of the next `rounds` replays run. The first replay has number `first_round`."""

    def stop_trace(self) -> tuple[Span, ...]:
        """Wait until everything launched has finished; returns the spans since `start_trace`."""

    def synchronize(self) -> None:
        """Wait until everything launched has finished. Raises the first error of a host node or an operation."""

    def active_work(self) -> tuple[str, ...]:
        """Descriptions of the work that runs now, one per stream, as far as known. From any thread."""

    def close(self) -> None:
        """Wait for all work, then free graphs, threads and memory. Idempotent."""

    def close_without_waiting(self) -> None:
        """Close while work may still run. Memory that this work can access is not freed."""


NOTHING: AbstractContextManager[None] = contextlib.nullcontext()  # shared: a round creates none
_local = threading.local()
C_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def native_entry(name: str, function: Callable[[], object]) -> tuple[int, int] | None:
    """Address and data of a host node that is a C function; None for a Python function."""
    address, data = getattr(function, "native_address", None), getattr(function, "native_data", None)
    if (address is None) != (data is None):
        raise ValueError(f"host node {name!r}: got one of native_address and native_data, expected both or neither")
    return None if address is None or data is None else (int(address), int(data))


def host_call(name: str, function: Callable[[], object]) -> Callable[[], object]:
    """A callable for a host node. A native one runs without the GIL and without bytecode; the caller must keep `function` alive."""
    entry = native_entry(name, function)
    return function if entry is None else functools.partial(C_HOST_FUNCTION(entry[0]), entry[1])


def current_context() -> CaptureContext:
    """The context of the step that this thread runs or records."""
    context: CaptureContext | None = getattr(_local, "context", None)
    if context is None:
        raise RuntimeError("current_context(): no step is running on this thread; call it inside a step given to capture() or run_eager()")
    return context


def use_context(context: CaptureContext) -> AbstractContextManager[None]:
    """Make `context` this thread's current one. For backends."""
    return setting(_local, "context", context)


@contextlib.contextmanager
def setting(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute for the duration of the block."""
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
