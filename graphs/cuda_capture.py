"""Recording a step into a CUDA graph: the flow that the step sees, the warm-up, the capture, and the way back from a failed one."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import MAIN, CaptureError, Mark, RecordedReport, Step, use_flow
from stepgraph.graphs.driver import Driver, GraphNode, HostCallback, HostErrors
from stepgraph.graphs.snapshot import Snapshot

# "thread_local": a capture fails for unsafe calls of its own thread only. Under "global" a cudaMalloc or an event query of
# any thread of the process would break it, and an embedding server has such threads.
_CAPTURE_MODE = "thread_local"
_HERE = os.path.dirname(os.path.abspath(__file__))
_MACHINERY = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, os.path.dirname(contextlib.__file__) + os.sep + "contextlib.py")
_OWN_FILES = tuple(os.path.join(_HERE, name) for name in ("cuda.py", "cuda_capture.py", "driver.py", "capture.py"))

_taken_streams: set[int] = set()  # torch hands its streams out in turn; two backends on one stream would capture each other's work
_failed: list[torch.cuda.CUDAGraph] = []  # torch's allocators keep a filter that points into the graph of a failed capture
_one_at_a_time = threading.Lock()  # torch allows one capture in a process


class Recording(NamedTuple):
    """A captured step. The callbacks must live until the graph is gone and the device idle."""

    graph: torch.cuda.CUDAGraph
    callbacks: list[HostCallback]
    nodes: list[GraphNode]
    report: RecordedReport

    def free(self) -> None:
        """For a device that is idle."""
        self.graph.reset()
        self.callbacks.clear()


class Streams:
    """The streams of one backend, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def __getitem__(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            for _ in range(32):
                stream = torch.cuda.Stream(self._device)
                if stream.cuda_stream not in _taken_streams:
                    break
            _taken_streams.add(stream.cuda_stream)
            self._streams[name] = stream
        return self._streams[name]

    def __iter__(self) -> Iterator[torch.cuda.Stream]:
        return iter(tuple(self._streams.values()))

    def release(self) -> None:
        _taken_streams.difference_update(stream.cuda_stream for stream in self._streams.values())
        self._streams.clear()


class CudaMark(NamedTuple):
    event: int
    flow: CudaFlow


class CudaFlow:
    """Streams, marks and host nodes of one run of a step. `launch_host` is off in the warm-up, which calls no host node."""

    def __init__(self, driver: Driver, streams: Streams, buffers: StaticBuffers, errors: HostErrors, launch_host: bool) -> None:
        self._driver, self._streams, self._buffers = driver, streams, buffers
        self._errors, self._launch_host = errors, launch_host
        self._current = MAIN
        self._joined = {MAIN}
        self._events: list[int] = []
        self.callbacks: list[HostCallback] = []

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self._current = self._current, name
        try:
            with torch.cuda.stream(self._streams[name]):
                yield
                self._require_joined("the block")
        finally:
            self._current = before

    def record(self) -> Mark:
        self._require_joined("record()")
        event = self._driver.event_create()
        self._events.append(event)
        self._driver.event_record(event, self._handle)
        return CudaMark(event, self)

    def wait(self, mark: Mark) -> None:
        if not isinstance(mark, CudaMark) or mark.flow is not self:
            raise fail("foreign-mark", "wait() for a mark that this run of the step did not record")
        self._driver.stream_wait(self._handle, mark.event)
        self._joined.add(self._current)

    def host_node(self, name: str, function: Callable[[], object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        self._require_joined(f"host node {name!r}")
        for tensor in (*reads, *writes):
            owner = self._buffers.owner_of(tensor)
            if owner is None or owner[1] != "pinned":
                what = f"{owner[0]!r}" if owner else "an unregistered tensor"
                raise fail("host-node-memory", f"host node {name!r} declares {what}, which is no pinned buffer")
        if self._launch_host:
            callback = HostCallback(name, function, self._errors)
            self.callbacks.append(callback)
            self._driver.launch_host(self._handle, callback)

    def join_all(self) -> None:
        """Lead every side stream back to the main one, so that an interrupted capture can end in order."""
        main = self._streams[MAIN].cuda_stream
        for name in self._joined - {MAIN}:
            event = self._driver.event_create()
            self._events.append(event)
            self._driver.event_record(event, self._streams[name].cuda_stream)
            self._driver.stream_wait(main, event)

    def close(self) -> None:
        for event in self._events:
            self._driver.event_destroy(event)
        self._events.clear()

    @property
    def _handle(self) -> int:
        return self._streams[self._current].cuda_stream

    def _require_joined(self, what: str) -> None:
        if self._current not in self._joined:
            message = f"{what} on stream {self._current!r}, which has not waited for a mark of this step: its work stays outside the graph"
            raise fail("stream-outside-capture", message)


class CudaRecorder:
    """Captures steps on one device into one memory pool."""

    def __init__(self, device: torch.device, driver: Driver, streams: Streams, errors: HostErrors) -> None:
        self._device, self._driver, self._streams, self._errors = device, driver, streams, errors
        self._pool = torch.cuda.graph_pool_handle()
        self._scratch = torch.zeros(1, device=device)

    def warm_up(self, step: Step, buffers: StaticBuffers, generators: Sequence[torch.Generator]) -> None:
        """Run the step once, on the streams that the capture will use, and undo what it did.

        Libraries create handles and workspaces, and load kernels, in the first call on a stream; a capture may not.
        """
        drawn = [*generators, torch.cuda.default_generators[self._device.index]]
        with torch.cuda.stream(self._streams[MAIN]), torch.no_grad():
            snapshot, states = Snapshot(buffers), [generator.get_state() for generator in drawn]
            self.synchronize()
            flow = CudaFlow(self._driver, self._streams, buffers, self._errors, launch_host=False)
            try:
                with use_flow(flow):
                    step(buffers)
            finally:
                self.synchronize()
                snapshot.restore()
                for generator, state in zip(drawn, states, strict=True):
                    generator.set_state(state)
                self.synchronize()
                flow.close()

    def record(self, step: Step, buffers: StaticBuffers, generators: Sequence[torch.Generator]) -> Recording:
        begin, reserved = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        with _one_at_a_time, _no_collection():
            graph, callbacks = self._capture(step, buffers, generators)
        nodes = self._driver.graph_nodes(graph.raw_cuda_graph())
        report = RecordedReport(
            nodes=dict(Counter(node.kind for node in nodes)),
            host_nodes=tuple(callback.name for callback in callbacks),
            nbytes=max(0, torch.cuda.memory_reserved(self._device) - reserved),  # what the pool had to grow by
            seconds=time.perf_counter() - begin,
        )
        return Recording(graph, callbacks, nodes, report)

    def synchronize(self) -> None:
        for stream in self._streams:
            self._driver.stream_synchronize(stream.cuda_stream)

    def _capture(
        self, step: Step, buffers: StaticBuffers, generators: Sequence[torch.Generator]
    ) -> tuple[torch.cuda.CUDAGraph, list[HostCallback]]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in generators:
            graph.register_generator_state(generator)
        flow = CudaFlow(self._driver, self._streams, buffers, self._errors, launch_host=True)
        with torch.cuda.stream(self._streams[MAIN]), torch.no_grad():
            failure: BaseException | None = None
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode=_CAPTURE_MODE)
                with use_flow(flow):
                    step(buffers)
            except BaseException as error:
                failure = error
                with contextlib.suppress(RuntimeError):  # a capture that CUDA has given up takes no more work
                    flow.join_all()
            failure = self._end(graph, generators, failure)
            flow.close()
            if failure is None:
                graph.instantiate()
                return graph, flow.callbacks
        _raise(failure)

    def _end(
        self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator], failure: BaseException | None
    ) -> BaseException | None:
        try:
            graph.capture_end()
        except RuntimeError as error:
            self._recover(graph, generators)
            return failure or error
        if failure is not None:
            graph.reset()
        return failure

    def _recover(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
        """Undo what torch leaves behind when CUDA gives a capture up: an allocator that still records into the pool, and
        random generators that still believe in a capture (a capture that succeeds puts these right)."""
        _failed.append(graph)
        with contextlib.suppress(RuntimeError):  # torch itself got this far
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_releasePool(self._device.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        cure = torch.cuda.CUDAGraph()
        for generator in generators:
            cure.register_generator_state(generator)
        cure.capture_begin(capture_error_mode=_CAPTURE_MODE)
        self._scratch.zero_()
        cure.capture_end()
        cure.reset()


def difference(first: Sequence[GraphNode], second: Sequence[GraphNode]) -> CaptureError | None:
    """Where two captures of one step differ in the kind of a node, or in a kernel's identity and launch shape."""
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return CaptureError("baked-branch", f"node {place} is {a} in one capture and {b} in the other: host state chose it")
    if len(first) != len(second):
        return CaptureError("baked-branch", f"one capture has {len(first)} nodes and the other {len(second)}: host state chose them")
    return None


def blame(innermost_first: Iterable[tuple[FrameType, int]]) -> tuple[str, int, str]:
    """File, line and source text of the innermost frame that belongs to neither torch nor the capture."""
    for frame, line in innermost_first:
        file = frame.f_code.co_filename
        if not file.startswith(_MACHINERY) and file not in _OWN_FILES:
            return file, line, linecache.getline(file, line).strip()
    return "", 0, ""


def as_capture_error(error: RuntimeError) -> CaptureError:
    """The warm-up ran, so what torch or CUDA raises in the capture itself is about capturing."""
    text, frames = str(error).split("\n", 1)[0], list(traceback.walk_tb(error.__traceback__))
    return CaptureError("unjoined-fork" if "unjoined" in text else "cuda", text, *blame(reversed(frames)))


def fail(rule: str, message: str) -> CaptureError:
    return CaptureError(rule, message, *blame(traceback.walk_stack(sys._getframe(1))))


def _raise(failure: BaseException) -> NoReturn:
    if isinstance(failure, RuntimeError) and not isinstance(failure, CaptureError):
        raise as_capture_error(failure) from failure
    raise failure


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A collection during a capture could free graphs and events in the midst of it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
