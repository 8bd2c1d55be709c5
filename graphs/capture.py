"""The contract between a step and whatever records it: streams, events, host nodes, capture, replay, statistics.

A step is a plain function over static buffers. The same body runs eagerly, on the tape (CPU) and inside a CUDA graph;
where it needs more than one stream it asks `current_context()`, which is whatever runs or records the step just now.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.spans import MakeRange, Span, StageRun

Step = Callable[[StaticBuffers], None]
Check = Literal["once", "twice"]
MAIN = "main"


class CaptureError(RuntimeError):
    """A step did what a graph cannot replay. Names the rule, and the line of the step that broke it."""

    def __init__(self, rule: str, message: str, file: str = "", line: int = 0, source: str = "") -> None:
        self.rule, self.file, self.line, self.source = rule, file, line, source
        where = f"\n  {file}:{line}\n    {source}" if file else ""
        super().__init__(f"[{rule}] {message}{where}")


class HostNodeError(RuntimeError):
    """A host node raised during a replay; the cause is chained."""

    def __init__(self, node: str, cause: BaseException) -> None:
        self.node = node
        super().__init__(f"host node {node!r} failed: {type(cause).__name__}: {cause}")


class StreamEvent(Protocol):
    """A point in one stream that another stream can wait for."""


class CaptureContext(Protocol):
    """What a step may ask for besides tensor operations. Order within a stream is the order of the calls."""

    def stream(self, name: str) -> AbstractContextManager[None]:
        """Issue what follows on the named stream. A side stream joins the step with its first `wait`."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Name what follows, for profiles and timelines. Where stages nest, a node belongs to the innermost."""

    def record(self) -> StreamEvent:
        """Mark the present point of the current stream."""

    def wait(self, event: StreamEvent) -> None:
        """Hold the current stream until `event` is reached."""

    def host_node(self, name: str, function: Callable[[], object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Call `function` on the host, in the order of the current stream, at every replay.

        It may touch pinned memory only, and all that it touches is declared in `reads` and `writes`. A function with the
        attributes `native_address`, of a C function `void (*)(void *)`, and `native_data`, its argument, is called without
        the interpreter: no GIL, no Python. It keeps alive what the data points to.
        """


class Event(Protocol):
    """A point in the main stream that the host can ask about."""

    def query(self) -> bool:
        """True once everything launched before the event has finished."""

    def wait(self, seconds: float | None = None) -> bool:
        """Block the calling thread until then, or for so long; whether it is reached."""


@dataclass
class BackendStats:
    """Counts since the backend was made. `syncs` are waits for everything; `event_waits` are waits for one event."""

    replays: int = 0
    syncs: int = 0
    event_waits: int = 0
    host_nodes: int = 0
    wait_ns: int | None = None  # that replays' main streams stood waiting for another; None where that is not known


@dataclass(frozen=True)
class RecordedReport:
    """What one recording holds."""

    nodes: Mapping[str, int]  # by kind: kernel, copy, fill, host, ...
    host_nodes: tuple[str, ...]
    nbytes: int  # memory of the intermediates
    seconds: float  # that the capture took
    stages: tuple[StageRun, ...] = ()  # whose nodes are whose, in the order of the capture


class Recorded(Protocol):
    """A step that was recorded once and can be replayed."""

    @property
    def report(self) -> RecordedReport: ...

    def replay(self) -> None:
        """Run the recorded step once, over the present contents of the buffers. Asynchronous where the backend is."""


class Backend(Protocol):
    """A device that records steps. One per engine; not thread-safe: one thread captures and launches."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def stats(self) -> BackendStats: ...

    @property
    def ranges(self) -> MakeRange | None:
        """Shows a profiler what is launched and captured; None where nobody asked for that."""

    def capture(
        self,
        step: Step,
        buffers: StaticBuffers,
        *,
        check: Check = "once",
        between: Callable[[], None] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> Recorded:
        """Record `step` without any lasting effect on the buffers; CaptureError where it cannot be replayed."""

    def measure(self, step: Step, buffers: StaticBuffers) -> int:
        """Bytes that a recording of `step` takes where it shares memory with no other. Nothing stays of it."""

    def run(self, function: Callable[[], object]) -> None:
        """Issue the operations of `function` on the main stream, after all that was launched before; does not block.

        `function` may run later and on another thread: bind what it needs by value.
        """

    def event(self) -> Event:
        """An event at the present end of the main stream."""

    def start_trace(self, first_round: int, rounds: int) -> None:
        """Note when the stages, host nodes and waits of the next `rounds` replays run; the first of them is number `first_round`."""

    def stop_trace(self) -> tuple[Span, ...]:
        """Wait until everything launched has finished, and tell what was noted since `start_trace`."""

    def synchronize(self) -> None:
        """Wait until everything launched has finished; raises what a host node or an operation raised."""

    def active_work(self) -> tuple[str, ...]:
        """What runs just now, as far as that is known. From any thread, for who waits too long."""

    def close(self) -> None:
        """Wait, then free graphs, threads and memory. Idempotent."""

    def close_without_waiting(self) -> None:
        """Close without waiting, where something never ends: what it may still touch is not freed."""


_local = threading.local()
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()  # one for all, so that a stage without a range makes no object
C_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def native_entry(name: str, function: Callable[[], object]) -> tuple[int, int] | None:
    """Address and data of a host node that is a C function; None for one in Python."""
    address, data = getattr(function, "native_address", None), getattr(function, "native_data", None)
    if (address is None) != (data is None):
        raise ValueError(f"host node {name!r}: got one of native_address and native_data, want both or neither")
    return None if address is None or data is None else (int(address), int(data))


def host_call(name: str, function: Callable[[], object]) -> Callable[[], object]:
    """How to call a host node from Python. A native one runs without the GIL, and no bytecode lies between; hold `function` meanwhile."""
    entry = native_entry(name, function)
    return function if entry is None else functools.partial(C_HOST_FUNCTION(entry[0]), entry[1])


def current_context() -> CaptureContext:
    """The context of the step that this thread is running or recording just now."""
    context: CaptureContext | None = getattr(_local, "context", None)
    if context is None:
        raise RuntimeError("current_context(): no step is running on this thread; call it inside a step given to capture() or run_eager()")
    return context


@contextlib.contextmanager
def use_context(context: CaptureContext) -> Iterator[None]:
    """Make `context` the current one of this thread; for backends."""
    previous = getattr(_local, "context", None)
    _local.context = context
    try:
        yield
    finally:
        _local.context = previous


class EagerContext:
    """Runs everything at once, in the order of the calls: one stream, and a host node is a call."""

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
        self._synchronize()  # the node reads pinned memory that device copies may still be filling
        try:
            with self.stage(name):
                host_call(name, function)()
        except Exception as error:
            raise HostNodeError(name, error) from error


@torch.no_grad()
def run_eager(step: Step, buffers: StaticBuffers, ranges: MakeRange | None = None) -> None:
    """Run a step once without recording it: the reference that every replay must equal bit for bit."""
    synchronize = torch.cuda.synchronize if buffers.device.type == "cuda" else lambda: None
    with use_context(EagerContext(synchronize, ranges)):
        step(buffers)
