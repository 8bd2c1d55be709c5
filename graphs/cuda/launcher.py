"""What a CUDA backend launches: recorded steps and copies on its streams, and events that the host waits for.

Host nodes are host functions of the driver, and run on a thread of the driver. A Python host node needs the GIL there, so no
thread may wait inside the driver with the GIL held, and a host node must not call CUDA, not even by printing or freeing a device
tensor. Native host nodes (HostCallback) do not need the GIL.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import BackendStats, Event, checked_loop_args
from stepgraph.graphs.context import COPY_STREAM, MAIN, FirstError
from stepgraph.graphs.cuda.loop import why_no_loops
from stepgraph.graphs.cuda.recorder import Recording
from stepgraph.graphs.cuda.resources import DeviceResources
from stepgraph.graphs.cuda.trace import CudaTracer
from stepgraph.graphs.errors import fail
from stepgraph.graphs.spans import RangeFactory
from stepgraph.sampling.lifetimes import call_after_fork

POLL_SECONDS = 50e-6


class CudaEvent:
    """A point in a stream of a CudaLauncher. Its CUDA event is reused after this object is freed."""

    def __init__(self, launcher: CudaLauncher, stream: torch.cuda.Stream) -> None:
        self._launcher, self._pool = launcher, launcher.resources.events
        self.handle = self._pool.take()
        launcher.driver.cuEventRecord(self.handle, stream.cuda_stream)

    def query(self) -> bool:
        self._launcher.bind()
        return bool(self._launcher.driver.cuEventQuery(self.handle))

    def wait(self, seconds: float | None = None) -> bool:
        self._launcher.refuse_while_capturing("Event.wait()")
        self._launcher.bind()
        self._launcher.stats.event_waits += 1
        if seconds is None:
            self._launcher.driver.cuEventSynchronize(self.handle)
        until = time.monotonic() + (seconds or 0)
        while not self.query():  # the driver has no wait with a time-out
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        self._launcher.errors.raise_first()
        return True

    def __del__(self) -> None:
        self._pool.give(self.handle)


class CudaGraph:
    def __init__(self, launcher: CudaLauncher, recording: Recording, buffers: StaticBuffers) -> None:
        self._launcher, self._recording, self._buffers, self.report = launcher, recording, buffers, recording.report
        # The graph may be running when the last reference is dropped; its callbacks must outlive the run.
        self.retire = weakref.finalize(self, launcher.resources.retired.append, recording)
        self.retire.atexit = False

    def replay(self, *, until: Tensor | None = None, limit: int | None = None, is_round: bool = True) -> None:
        """Launch the captured step on the current contents of the buffers: once, or until a flag is set. Does not wait."""
        recording, launcher = self._recording, self._launcher
        loop = None
        if until is not None or limit is not None:
            loop = checked_loop_args(self._buffers, until, limit, recording.host_node, recording.uses_generator)
            if reason := launcher.why_no_loops or ("a trace is running" if launcher.tracer else ""):
                raise RuntimeError(f"replay(until=...): {reason}")
        with launcher.on_main("replay()") as main:
            if loop is None:
                recording.graph.replay()
            else:
                recording.loops.launch(launcher.driver, recording.graph.raw_cuda_graph(), *loop, main)
        if launcher.tracer is not None:
            launcher.tracer.replayed(self.report if is_round else None)
        launcher.stats.replays += is_round
        launcher.stats.host_nodes += len(self.report.host_nodes)

    @property
    def rounds(self) -> int:
        latest = self._recording.loops.latest
        return latest.rounds if latest else 0


class CudaLauncher:
    """The streams of a CudaBackend, and what is launched on them."""

    def __init__(self, device: torch.device, ordered: bool, ranges: RangeFactory | None) -> None:
        self.device, self.ranges, self._ordered = device, ranges, ordered
        self.stats, self.errors = BackendStats(), FirstError()
        self.tracer: CudaTracer | None = None
        self._capturing = False
        with torch.cuda.device(device):
            torch.cuda.mem_get_info()  # creates a context for this thread; driver calls need one
            self.resources = resources = DeviceResources(device)
            self.driver, self._main, self._order_event = resources.driver, resources.streams[MAIN], resources.order_event
        self._local = threading.local()  # .bound: this thread uses the context
        self._launch_lock = threading.RLock()  # for `_order_event`; and a graph may be launched by one thread at a time
        self._finalizer = weakref.finalize(self, self.resources.release)
        call_after_fork(self._detach)

    def _detach(self) -> None:
        self._finalizer.detach()  # the device belongs to the parent

    @property
    def why_no_loops(self) -> str:
        return why_no_loops(self.driver)

    def run(self, function: Callable[[], object]) -> None:
        with self.on_main("run()"), torch.no_grad():
            function()

    def copy_aside(self, function: Callable[[], object], *, after_launched: bool) -> CudaEvent:
        self._check_usable("copy_aside()")
        launched, copies = self.event() if after_launched else None, self.resources.streams[COPY_STREAM]
        if launched is not None:
            self.driver.cuStreamWaitEvent(copies.cuda_stream, launched.handle, 0)
        with torch.cuda.stream(copies), torch.no_grad():
            function()
        return CudaEvent(self, copies)

    def wait_for(self, copied: Event) -> None:
        assert isinstance(copied, CudaEvent)
        self._check_usable("wait_for()")
        self.driver.cuStreamWaitEvent(self._main.cuda_stream, copied.handle, 0)

    def event(self) -> CudaEvent:
        self._check_usable("event()")
        return CudaEvent(self, self._main)

    def synchronize(self) -> None:
        self._check_usable("synchronize()")
        self.stats.syncs += 1
        self._drain()
        self.errors.raise_first()

    @contextlib.contextmanager
    def on_main(self, call: str) -> Iterator[int]:
        """Issue the block on the main stream, whose handle it gets, ordered after the caller's earlier work."""
        self._check_usable(call)
        self.errors.raise_first()
        caller, main = torch.cuda.current_stream(self.device).cuda_stream, self._main.cuda_stream
        with self._launch_lock:
            if caller != main and not self.driver.cuStreamQuery(caller):
                self.driver.cuEventRecord(self._order_event, caller)
                self.driver.cuStreamWaitEvent(main, self._order_event, 0)
            try:
                with torch.cuda.stream(self._main):
                    yield main
            finally:
                if self._ordered and caller != main:
                    self.driver.cuEventRecord(self._order_event, main)
                    self.driver.cuStreamWaitEvent(caller, self._order_event, 0)

    def refuse_while_capturing(self, call: str) -> None:
        if self._capturing:
            raise fail("nested-capture" if call == "capture()" else "host-sync", f"{call} inside a step that is being captured")

    def _drain(self) -> None:
        """Wait until everything launched has finished."""
        self.driver.cuStreamSynchronize(self._main.cuda_stream)
        if COPY_STREAM in self.resources.streams:
            self.driver.cuStreamSynchronize(self.resources.streams[COPY_STREAM].cuda_stream)
        self.resources.free_retired()

    def _check_usable(self, call: str) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(f"CudaBackend.{call}: the backend is closed")
        self.refuse_while_capturing(call)
        self.bind()

    def bind(self) -> None:
        if not getattr(self._local, "bound", False):  # a new thread has no context before its first torch call
            self.driver.cuCtxSetCurrent(self.resources.context)
            self._local.bound = True
