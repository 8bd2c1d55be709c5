"""Records a step into a CUDA graph and replays it with one launch.

Host nodes are host functions of the driver, and run on a thread of the driver. A Python host node needs the GIL there, so no
thread may wait inside the driver with the GIL held, and a host node must not call CUDA, not even by printing or freeing a device
tensor. Native host nodes (HostCallback) do not need the GIL.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import BackendStats, Check, Event, Step, checked_loop
from stepgraph.graphs.context import COPIES, MAIN, setting
from stepgraph.graphs.cuda.events import CudaEvent
from stepgraph.graphs.cuda.loop import LoopGraph, why_no_loops
from stepgraph.graphs.cuda.recorder import CudaRecorder, Recording, broken_rule
from stepgraph.graphs.cuda.resources import DeviceResources, checked_device
from stepgraph.graphs.cuda.trace import CudaTracer
from stepgraph.graphs.errors import HostErrors, fail
from stepgraph.graphs.spans import MakeRange, RecordedReport, Span
from stepgraph.sampling.cuda_graphs import one_at_a_time


class CudaGraph:
    """A captured step."""

    def __init__(self, backend: CudaBackend, recording: Recording, buffers: StaticBuffers, retired: list[Recording]) -> None:
        self._backend, self._recording, self._buffers, self.report = backend, recording, buffers, recording.report
        self._loop: LoopGraph | None = None  # the latest
        # The graph may be running when the last reference is dropped; its callbacks must outlive the run.
        self.retire = weakref.finalize(self, retired.append, recording)
        self.retire.atexit = False

    def replay(self, *, until: Tensor | None = None, limit: int | None = None, is_round: bool = True) -> None:
        """Launch the captured step on the current contents of the buffers: once, or until a flag is set. Does not wait."""
        recording, backend = self._recording, self._backend
        loop = None
        if until is not None or limit is not None:
            loop = checked_loop(self._buffers, until, limit, recording.host_node, recording.draws)
            if reason := backend.why_no_loops or ("a trace is running" if backend.tracer else ""):
                raise RuntimeError(f"replay(until=...): {reason}")
        with backend.on_main("replay()") as main:
            if loop is None:
                recording.graph.replay()
            else:
                self._loop = self._loop_of(*loop)
                self._loop.launch(main)
        if self._backend.tracer is not None:
            self._backend.tracer.replayed(self.report.stages if is_round else None)
        self._backend.stats.replays += is_round
        self._backend.stats.host_nodes += len(self.report.host_nodes)

    @property
    def rounds(self) -> int:
        return self._loop.rounds if self._loop else 0

    def _loop_of(self, until: Tensor, limit: int) -> LoopGraph:
        """The first call for a flag and a limit builds the loop."""
        key, recording = (until.data_ptr(), limit), self._recording
        if key not in recording.loops:
            recording.loops[key] = LoopGraph(self._backend.driver, recording.graph.raw_cuda_graph(), until, limit)
        return recording.loops[key]


class CudaBackend:
    """Captures and replays on one CUDA device, on its own streams.

    The main stream waits for the work that the caller issued before on its current stream. With `ordered`, the caller's stream
    also waits for the launched work, as for any torch operation; without, use events, `run` and `synchronize`. The next call that
    launches or waits raises the error of a host node, once; the nodes after it in that replay still run.

    A step that cannot be captured is run once more under the rules of the tape, which name what its line does.

    `check="twice"` compares the nodes of two captures, kernels by identity and launch shape, and the operations of two recordings of the
    tape with their arguments: the step runs under all its rules, too. A capture may use torch's default generator; other generators
    must be in `generators`.
    """

    name = "cuda"

    def __init__(self, device: str | torch.device | int | None = None, *, ordered: bool = True, ranges: MakeRange | None = None) -> None:
        self.device = checked_device(device)
        self.stats, self.ranges = BackendStats(), ranges
        self.tracer: CudaTracer | None = None
        self.errors = HostErrors()
        self._ordered, self._capturing = ordered, False
        with torch.cuda.device(self.device):
            torch.cuda.mem_get_info()  # creates a context for this thread; driver calls need one
            self._resources = held = DeviceResources(self.device)
            self.driver, self._main, self._order_event = held.driver, held.pool.stream, held.order_event
            self._recorder = CudaRecorder(held.driver, held.streams, held.pool, self.errors, ranges)
            self._context = self.driver.context()
        self._local = threading.local()  # .bound: this thread uses the context
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
        if torch.empty(0, device=buffers.device).device != self.device:
            raise ValueError(f"CudaBackend.capture: got buffers on {buffers.device}, expected {self.device}")
        with self._recording("capture()"):
            try:
                draws = self._recorder.warm_up(step, buffers, generators)
                if check == "twice":
                    recording = self._recorder.record_twice(step, buffers, between, generators, draws)
                else:
                    recording = self._recorder.record(step, buffers, generators, draws)
            except Exception as error:
                broken = broken_rule(error, step, buffers, generators)
                if broken is None:
                    raise
                raise broken from error
        graph = CudaGraph(self, recording, buffers, self._resources.retired)
        self._graphs.add(graph)
        if hasattr(recording.graph, "raw_cuda_graph_exec"):  # not in torch 2.8
            self.driver.cuGraphUpload(recording.graph.raw_cuda_graph_exec(), self._main.cuda_stream)
        return graph

    @property
    def why_no_loops(self) -> str:
        return why_no_loops(self.driver)

    def measure(self, step: Step, buffers: StaticBuffers) -> RecordedReport:
        with self._recording("measure()"):
            return self._recorder.measure(step, buffers)

    def run(self, function: Callable[[], object]) -> None:
        with self.on_main("run()"), torch.no_grad():
            function()

    def copy_aside(self, function: Callable[[], object], *, after_launched: bool) -> CudaEvent:
        self._enter("copy_aside()")
        launched, copies = self.event() if after_launched else None, self._resources.streams[COPIES]
        if launched is not None:
            self.driver.cuStreamWaitEvent(copies.cuda_stream, launched.handle, 0)
        with torch.cuda.stream(copies), torch.no_grad():
            function()
        return self._event_of(copies)

    def wait_for(self, copied: Event) -> None:
        assert isinstance(copied, CudaEvent)
        self._enter("wait_for()")
        self.driver.cuStreamWaitEvent(self._main.cuda_stream, copied.handle, 0)

    def event(self) -> CudaEvent:
        return self._event_of(self._main)

    def synchronize(self) -> None:
        self._enter("synchronize()")
        self.stats.syncs += 1
        self._drain()
        self.errors.raise_first()

    def start_trace(self, first_round: int, rounds: int) -> None:
        if self.tracer is not None:
            raise RuntimeError("CudaBackend.start_trace(): a trace is already running")
        self.synchronize()
        self.tracer = CudaTracer(first_round, rounds)

    def stop_trace(self) -> tuple[Span, ...]:
        tracer, self.tracer = self.tracer, None
        if self._finalizer.alive:  # if closed, close() has waited
            self.synchronize()
        return () if tracer is None else tracer.stop()

    def close(self) -> None:
        """Wait, then free everything. torch caches the memory until torch.cuda.empty_cache()."""
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
        return (f"stream {MAIN}: {'idle' if self.driver.cuStreamQuery(self._main.cuda_stream) else 'busy'}",)

    def close_without_waiting(self) -> None:
        self._finalizer.detach()

    # for graphs and events of this backend

    @contextlib.contextmanager
    def on_main(self, call: str) -> Iterator[int]:
        """Issue the block on the main stream, whose handle it gets, ordered after the caller's earlier work."""
        self._enter(call)
        self.errors.raise_first()
        caller, main = torch.cuda.current_stream(self.device).cuda_stream, self._main.cuda_stream
        if caller != main and not self.driver.cuStreamQuery(caller):
            self.driver.cuEventRecord(self._order_event, caller)
            self.driver.cuStreamWaitEvent(main, self._order_event, 0)
        with torch.cuda.stream(self._main):
            yield main
        if self._ordered and caller != main:
            self.driver.cuEventRecord(self._order_event, main)
            self.driver.cuStreamWaitEvent(caller, self._order_event, 0)

    def refuse_while_capturing(self, call: str) -> None:
        if self._capturing:
            raise fail("nested-capture" if call == "capture()" else "host-sync", f"{call} inside a step that is being captured")

    @contextlib.contextmanager
    def _recording(self, call: str) -> Iterator[None]:
        # Two threads that launch a Triton program for the first time both compile it, and the second result replaces the first: without
        # the lock, a program that the warm-up has loaded would be one to load in the capture, which is not allowed.
        with one_at_a_time, torch.cuda.device(self.device), self.on_main(call):
            self._drain()
            self.errors.raise_first()
            with setting(self, "_capturing", True):
                yield

    def _event_of(self, stream: torch.cuda.Stream) -> CudaEvent:
        self._enter("event()")
        event = CudaEvent(self, self._resources.events)
        self.driver.cuEventRecord(event.handle, stream.cuda_stream)
        return event

    def _drain(self) -> None:
        self.driver.cuStreamSynchronize(self._main.cuda_stream)
        if COPIES in self._resources.streams:
            self.driver.cuStreamSynchronize(self._resources.streams[COPIES].cuda_stream)
        self._resources.free_retired()

    def _enter(self, call: str) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(f"CudaBackend.{call}: the backend is closed")
        self.refuse_while_capturing(call)
        if not getattr(self._local, "bound", False):  # a new thread has no context before its first torch call
            self.driver.cuCtxSetCurrent(self._context)
            self._local.bound = True
