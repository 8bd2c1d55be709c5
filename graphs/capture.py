"""The contract of backends: capture, replay, events, statistics. What a step may use while it runs: `context`.

A step is a function over static buffers. The same code runs eagerly, on the tape (CPU) and in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.pool import Pool
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.context import temporarily_set
from stepgraph.graphs.errors import CaptureError, Site, fail
from stepgraph.graphs.spans import RangeFactory, RecordedReport, Span
from stepgraph.sampling.fields import FUNCTION, check_value, instance_of, whole

Step = Callable[[StaticBuffers], None]
BackendName = Literal["auto", "tape", "cuda"]
CaptureCheck = Literal["once", "twice"]
Between = Callable[[], None] | None
Generators = Sequence[torch.Generator]


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

    @property
    def rounds(self) -> int:
        """How often the step has run in the latest `replay(until=...)`, once the device has ended it; before, perhaps of an earlier one."""

    def replay(self, *, until: Tensor | None = None, limit: int | None = None, is_round: bool = True) -> None:
        """Run the recorded step once on the current contents of the buffers. Asynchronous if the backend is.

        until: one int32 of a device buffer. In the same launch, without the host, the step runs again while `until` is 0 after it, at
        most `limit` times in total. CaptureError for a step with host nodes, which a loop on the device cannot call, and for one that
        draws from a generator: it would draw the same numbers each time.
        is_round: False for work between rounds. It is not counted in `stats.replays`, and has no number in a trace.
        """


class Backend(Protocol):
    """Records and replays steps on one device. One per engine. Not thread-safe: one thread captures and launches."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def stats(self) -> BackendStats: ...

    @property
    def ranges(self) -> RangeFactory | None:
        """Makes ranges for a profiler; None without profiling."""

    @property
    def why_no_loops(self) -> str:
        """Why `Recorded.replay(until=...)` is not possible; empty if it is."""

    def capture(
        self, step: Step, buffers: StaticBuffers, *, check: CaptureCheck = "once", between: Between = None, generators: Generators = ()
    ) -> Recorded:
        """Record `step` and leave the buffers unchanged. CaptureError if the step cannot be replayed."""

    def measure(self, step: Step, buffers: StaticBuffers) -> RecordedReport:
        """The report of a recording of `step` that shares no memory with others. The recording is discarded."""

    def run(self, function: Callable[[], object]) -> None:
        """Issue the operations of `function` on the main stream, after everything launched before. Does not block.

        `function` may run later and on another thread: it must bind its inputs by value.
        """

    def copy_aside(self, function: Callable[[], object], *, after_launched: bool) -> Event:
        """Issue the copies of `function`, as by `run`, on a stream of their own: beside the main stream, in the order of these calls.

        after_launched: after everything launched before, which may read the memory that is written. Returns an event at their end.
        """

    def wait_for(self, copied: Event) -> None:
        """Make what is launched later wait for an event of `copy_aside`. Does not block the calling thread."""

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


C_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def check_pinned(
    name: str, tensors: Sequence[Tensor], buffers: StaticBuffers, describe: Callable[[Tensor], str] = lambda _: "an unregistered tensor"
) -> None:
    """Check the tensors that a host node declares. describe: what the error calls one that is not in a buffer."""
    for tensor in tensors:
        check_value(f"host_node.reads and writes of {name!r}", tensor, instance_of(Tensor, "tensors of pinned buffers"))
        owner = buffers.owner_of(tensor)
        if owner is None or owner[1] != "pinned":
            declared = repr(owner[0]) if owner else describe(tensor)
            raise fail("host-node-memory", f"host node {name!r} declares {declared}, which is not a pinned buffer")


def native_entry(name: str, function: Callable[[], object]) -> tuple[int, int] | None:
    """Address and data of a host node that is a C function; None for a Python function."""
    check_value(f"host_node.function of {name!r}", function, FUNCTION)
    address, data = getattr(function, "native_address", None), getattr(function, "native_data", None)
    if (address is None) != (data is None):
        raise ValueError(f"host node {name!r}: got one of native_address and native_data, expected both or neither")
    return None if address is None or data is None else (int(address), int(data))


def host_call(name: str, function: Callable[[], object]) -> Callable[[], object]:
    """A callable for a host node. A native one runs without the GIL and without bytecode; the caller must keep `function` alive."""
    entry = native_entry(name, function)
    return function if entry is None else functools.partial(C_HOST_FUNCTION(entry[0]), entry[1])


_thread_state = threading.local()


def _refusing(start_work: Callable[..., Any], what: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread_state, "refuses_threads", False):
            raise fail("other-thread", f"a step that is being captured {what}, whose work would not be recorded")
        return start_work(*args, **kwargs)

    return call


_REFUSING = (
    (threading.Thread, "start", _refusing(threading.Thread.start, "starts a thread")),
    (ThreadPoolExecutor, "submit", _refusing(ThreadPoolExecutor.submit, "submits work to a thread")),
    (Pool, "_check_running", _refusing(Pool._check_running, "submits work to a pool")),  # type: ignore[attr-defined]
)
_captures, _replaced, _lock = 0, contextlib.ExitStack(), threading.RLock()  # captures of several threads overlap


def _count_captures(change: int) -> None:
    global _captures
    with _lock:
        for replacement in _REFUSING if _captures == 0 else ():
            _replaced.enter_context(temporarily_set(*replacement))
        _captures += change
        if _captures == 0:
            _replaced.close()


@contextlib.contextmanager
def refusing_threads() -> Iterator[None]:
    """Within the block, starting a thread from this one and submitting work to a pool are CaptureErrors. For backends."""
    _count_captures(1)
    try:
        with temporarily_set(_thread_state, "refuses_threads", True):
            yield
    finally:
        _count_captures(-1)


def run_step(step: Step, buffers: StaticBuffers) -> None:
    """Run a step that is recorded. CaptureError if it returns a tensor that is not in a buffer, which callers of replay() do not get."""
    for value in tree_leaves(step(buffers)):  # type: ignore[func-returns-value]
        if isinstance(value, Tensor) and buffers.owner_of(value) is None:
            code = getattr(step, "__code__", None)
            site = Site(code.co_filename, code.co_firstlineno) if code else None
            what = f"the step returns a tensor {tuple(value.shape)} {value.dtype}"
            raise fail("returned-tensor", f"{what}, but replay() returns nothing; copy it into a buffer", site)


def checked_loop_args(
    buffers: StaticBuffers, until: Tensor | None, limit: int | None, host_node: tuple[str, Site] | None, uses_generator: bool
) -> tuple[Tensor, int]:
    """The arguments of `Recorded.replay`. `host_node`: the first of the step; `uses_generator`: whether it draws from a generator."""
    if until is None or limit is None:
        raise ValueError(f"replay: got {'limit' if until is None else 'until'} alone, expected both until and limit, or neither")
    check_value("replay.until", until, instance_of(Tensor, "one int32 of a device buffer of the step"))
    owner = buffers.owner_of(until)
    if owner is None or owner[1] != "device" or until.numel() != 1 or until.dtype is not torch.int32:
        which = f"{tuple(until.shape)} {until.dtype} of {owner[0]!r}" if owner else "an unregistered tensor"
        raise ValueError(f"replay.until: got {which}, expected one int32 of a device buffer of the step")
    check_value("replay.limit", limit, whole(1))
    if host_node is not None:
        raise fail("host-node-in-loop", f"host node {host_node[0]!r} in a step that is replayed with until=", host_node[1])
    if uses_generator:
        raise CaptureError("generator-in-loop", "the step draws from a generator, and is replayed with until=")
    return until, limit
