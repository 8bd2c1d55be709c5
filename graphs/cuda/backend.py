"""Records a step into a CUDA graph and replays it with one launch.

Host nodes are host functions of the driver. A Python one takes the GIL, in a thread of the driver's: whoever launches
must not hold the GIL while it waits inside the driver (nothing here does), and a host node must never call CUDA, not
even by printing or freeing a device tensor. A native one (see driver.HostCallback) needs neither.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import MAIN, BackendStats, Check, Step
from stepgraph.graphs.cuda.context import Streams, fail
from stepgraph.graphs.cuda.driver import Driver, HostErrors, open_driver
from stepgraph.graphs.cuda.recorder import CudaRecorder, Recording, difference
from stepgraph.graphs.cuda.trace import CudaTracer
from stepgraph.graphs.spans import MakeRange, Span
from stepgraph.sampling.cuda_graphs import GraphPool

POLL_SECONDS = 50e-6


class _DeviceResources:
    """What a backend owns on the device; outlives the backend until nothing runs any more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.driver: Driver = open_driver()
        self.streams = Streams(device)
        self.pool = GraphPool(self.streams[MAIN])
        self.retired: list[Recording] = []  # recordings that nobody can replay any more, but that may still be running
        self._spare_events: list[int] = []
        self._released = False
        self.order_event = self.take_event()

    def take_event(self) -> int:
        if self._spare_events:
            return self._spare_events.pop()
        with torch.cuda.device(self._device):
            return self.driver.event_create()

    def give_event(self, event: int) -> None:
        """From any thread, at any time."""
        if self._released:
            with contextlib.suppress(RuntimeError):
                self.driver.event_destroy(event)
        else:
            self._spare_events.append(event)

    def free_retired(self) -> None:
        """Free the retired; the device must be idle."""
        while self.retired:
            self.retired.pop().free()

    def release(self) -> None:
        with contextlib.suppress(RuntimeError):  # a device that failed runs nothing any more either
            for stream in self.streams.values():
                self.driver.stream_synchronize(stream.cuda_stream)
        self.free_retired()
        self.pool.release()
        self._released = True
        for event in (self.order_event, *self._spare_events):
            self.give_event(event)
        self._spare_events.clear()
        self.streams.release()


class CudaEvent:
    """A point in the main stream of a CudaBackend. Its CUDA event is used again once nobody holds this object."""

    def __init__(self, backend: CudaBackend, resources: _DeviceResources) -> None:
        self._backend, self._resources = backend, resources
        self.handle = resources.take_event()

    def query(self) -> bool:
        return self._backend.driver.event_reached(self.handle)

    def wait(self, seconds: float | None = None) -> bool:
        self._backend.refuse_while_capturing("Event.wait()")
        self._backend.stats.event_waits += 1
        if seconds is None:
            self._backend.driver.event_synchronize(self.handle)
        elif not self._polled(time.monotonic() + seconds):
            return False
        self._backend.errors.raise_first()
        return True

    def _polled(self, deadline: float) -> bool:
        """The driver has no wait that ends by itself."""
        while not self.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def __del__(self) -> None:
        self._resources.give_event(self.handle)


class CudaGraph:
    """A captured step."""

    def __init__(self, backend: CudaBackend, recording: Recording, retired: list[Recording]) -> None:
        self._backend, self._graph = backend, recording.graph
        self.report = recording.report
        # It may be running when the last reference goes; the callbacks it points to have to outlive that.
        self.retire = weakref.finalize(self, retired.append, recording)
        self.retire.atexit = False

    def replay(self) -> None:
        """Run the captured step once over the present contents of the buffers. Does not wait for it."""
        with self._backend.on_main("replay()"):
            self._graph.replay()
        if self._backend.tracer is not None:
            self._backend.tracer.replayed(self.report.stages)
        self._backend.stats.replays += 1
        self._backend.stats.host_nodes += len(self.report.host_nodes)


class CudaBackend:
    """Captures and replays on one CUDA device, on a stream of its own.

    Work waits for what the calling thread issued on its current stream before. With `ordered`, that stream also waits
    for the work, as for any torch operation; without, use events, `run` and `synchronize`. An error in a host node is
    raised once, by the next call that launches or waits; what follows the node in its replay still runs.

    `check="twice"` compares the nodes of two captures, with each kernel's identity and launch shape but not its
    arguments. To find baked numbers record the step on the tape, which compares every argument. torch's default
    generator may be used in a capture whether or not it is among `generators`; every other one must be.
    """

    name = "cuda"

    def __init__(self, device: str | torch.device | int | None = None, *, ordered: bool = True, ranges: MakeRange | None = None) -> None:
        self.device = _checked_device(device)
        self.stats, self.ranges = BackendStats(), ranges
        self.tracer: CudaTracer | None = None
        self.errors = HostErrors()
        self._ordered, self._capturing = ordered, False
        with torch.cuda.device(self.device):
            torch.cuda.mem_get_info()  # gives this thread a context, which the driver's calls need
            self._resources = held = _DeviceResources(self.device)
            self.driver, self._main, self._order_event = held.driver, held.pool.stream, held.order_event
            self._recorder = CudaRecorder(held.driver, held.streams, held.pool, self.errors, ranges)
            self._context = self.driver.context()
        self._local = threading.local()  # .bound: this thread has the context
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, self._resources.release)

    def capture(
        self,
        step: Step,
        buffers: StaticBuffers,
        *,
        check: Check = "once",
        between: Callable[[], None] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> CudaGraph:
        if not _same_device(buffers.device, self.device):
            raise ValueError(f"CudaBackend.capture: got buffers on {buffers.device}, want them on {self.device}")
        with self._recording("capture()"):
            self._recorder.warm_up(step, buffers, generators)
            recording = self._recorder.record(step, buffers, generators)
            if check == "twice":
                if between is not None:
                    between()
                self._compare(recording, self._recorder.record(step, buffers, generators))
        graph = CudaGraph(self, recording, self._resources.retired)
        self._graphs.add(graph)
        if hasattr(recording.graph, "raw_cuda_graph_exec"):  # not in torch 2.8
            self.driver.graph_upload(recording.graph.raw_cuda_graph_exec(), self._main.cuda_stream)
        return graph

    def measure(self, step: Step, buffers: StaticBuffers) -> int:
        with self._recording("measure()"):
            return self._recorder.measure(step, buffers)

    def run(self, function: Callable[[], object]) -> None:
        with self.on_main("run()"), torch.no_grad():
            function()

    def event(self) -> CudaEvent:
        self._enter("event()")
        event = CudaEvent(self, self._resources)
        self.driver.event_record(event.handle, self._main.cuda_stream)
        return event

    def synchronize(self) -> None:
        self._enter("synchronize()")
        self.stats.syncs += 1
        self._drain()
        self.errors.raise_first()

    def start_trace(self, first_round: int, rounds: int) -> None:
        if self.tracer is not None:
            raise RuntimeError("CudaBackend.start_trace(): a trace is under way")
        self.synchronize()
        self.tracer = CudaTracer(first_round, rounds)

    def stop_trace(self) -> tuple[Span, ...]:
        tracer, self.tracer = self.tracer, None
        if self._finalizer.alive:  # else close() has waited
            self.synchronize()
        return () if tracer is None else tracer.stop()

    def close(self) -> None:
        """Wait, then free everything. torch keeps the memory for itself until torch.cuda.empty_cache()."""
        if not self._finalizer.alive:
            return
        self.refuse_while_capturing("close()")
        for graph in tuple(self._graphs):
            graph.retire()
        self._finalizer()
        error = self.errors.take()
        if error is not None:
            warnings.warn(f"CudaBackend.close(): an error was never raised: {error}", RuntimeWarning, stacklevel=2)

    def active_work(self) -> tuple[str, ...]:
        return (f"stream {MAIN}: {'idle' if self.driver.stream_idle(self._main.cuda_stream) else 'busy'}",)

    def close_without_waiting(self) -> None:
        self._finalizer.detach()

    # for graphs and events of this backend

    @contextlib.contextmanager
    def on_main(self, what: str) -> Iterator[None]:
        """Issue what follows on the main stream, in its place among what the caller issues."""
        self._enter(what)
        self.errors.raise_first()
        caller, main = torch.cuda.current_stream(self.device).cuda_stream, self._main.cuda_stream
        if caller != main and not self.driver.stream_idle(caller):
            self.driver.event_record(self._order_event, caller)
            self.driver.stream_wait(main, self._order_event)
        with torch.cuda.stream(self._main):
            yield
        if self._ordered and caller != main:
            self.driver.event_record(self._order_event, main)
            self.driver.stream_wait(caller, self._order_event)

    def refuse_while_capturing(self, what: str) -> None:
        if self._capturing:
            raise fail("nested-capture" if what == "capture()" else "host-sync", f"{what} inside a step that is being captured")

    @contextlib.contextmanager
    def _recording(self, what: str) -> Iterator[None]:
        with torch.cuda.device(self.device), self.on_main(what):
            self._drain()
            self.errors.raise_first()
            self._capturing = True
            try:
                yield
            finally:
                self._capturing = False

    def _compare(self, recording: Recording, again: Recording) -> None:
        found = difference(recording.nodes, again.nodes)
        again.free()
        if found is not None:
            recording.free()
            raise found

    def _drain(self) -> None:
        self.driver.stream_synchronize(self._main.cuda_stream)
        self._resources.free_retired()

    def _enter(self, what: str) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(f"CudaBackend.{what}: the backend is closed")
        self.refuse_while_capturing(what)
        if not getattr(self._local, "bound", False):  # a new thread has no context before torch's first call there
            self.driver.use_context(self._context)
            self._local.bound = True


def _checked_device(device: str | torch.device | int | None) -> torch.device:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise RuntimeError(
            f"backend 'cuda': torch {torch.__version__}, {built}, sees no CUDA device; backend 'tape' records the same steps on the CPU"
        )
    torch.cuda.init()
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda" or (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"CudaBackend.device: got {device!r}, want one of {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)


def _same_device(given: torch.device, own: torch.device) -> bool:
    return given.type == own.type and (torch.cuda.current_device() if given.index is None else given.index) == own.index
