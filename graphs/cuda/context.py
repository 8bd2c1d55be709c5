"""The capture context on CUDA: streams, events, stages and host nodes of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from ctypes import c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import C_HOST_FUNCTION, check_pinned, native_entry
from stepgraph.graphs.context import MAIN, NULL_CONTEXT, FirstError, StreamEvent, temporarily_set
from stepgraph.graphs.cuda.driver import Driver
from stepgraph.graphs.errors import HostNodeError, Site, call_site, fail
from stepgraph.graphs.spans import DEFAULT_STAGE, RangeFactory, StageRun
from stepgraph.sampling.cuda_graphs import Streams, gc_paused


class HostCallback:
    """The C function and user data of a host node. Must outlive every graph that contains them.

    A native function (`CaptureContext.host_node`) is called directly. A Python function is wrapped in a callback that takes the GIL and
    stores exceptions in `errors`.
    """

    def __init__(self, name: str, function: Callable[[], object], errors: FirstError) -> None:
        self.name = name
        self._function = function  # owns the data of a native function
        entry = native_entry(name, function)
        if entry is None:

            def enter(_: int | None) -> None:
                try:
                    with gc_paused:  # a host node must not call CUDA
                        function()
                except BaseException as error:
                    errors.store(HostNodeError(name, error))

            self._entry = C_HOST_FUNCTION(enter)
            entry = int(c_void_p.from_buffer(self._entry).value or 0), 0  # ctypes.cast would make a reference cycle
        self.address, self.data = entry


class CudaStreamEvent(NamedTuple):
    handle: int
    context: CudaCaptureContext


class CudaCaptureContext:
    """Streams, events and host nodes of one run of a step. The warm-up runs with launch_host=False and calls no host node."""

    def __init__(
        self,
        driver: Driver,
        streams: Streams,
        buffers: StaticBuffers,
        errors: FirstError,
        launch_host: bool,
        ranges: RangeFactory | None = None,
    ) -> None:
        self._driver, self._streams, self._buffers = driver, streams, buffers
        self._errors, self._launch_host, self._ranges = errors, launch_host, ranges
        self._current, self._stage = MAIN, DEFAULT_STAGE
        self.joined = {MAIN}
        self._events: list[int] = []
        self.callbacks: list[HostCallback] = []
        self.first_host_node: tuple[str, Site] | None = None
        self.labels: list[StageRun] = []  # one per captured node

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        if self._launch_host and name not in self._streams:  # creating a stream would nest another capture
            raise fail("baked-branch", f"stream {name!r} was not used in the run before the capture: its name depends on host state")
        self.label_nodes()
        with temporarily_set(self, "_current", name):
            with torch.cuda.stream(self._streams[name]):
                yield
                self._require_joined("the block")
            self.label_nodes()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.label_nodes()
        with temporarily_set(self, "_stage", name):
            with self._range(name):
                yield
            self.label_nodes()

    def record(self) -> StreamEvent:
        self._require_joined("record()")
        event = self._driver.event_create()
        self._events.append(event)
        self._driver.cuEventRecord(event, self._handle)
        return CudaStreamEvent(event, self)

    def wait(self, event: StreamEvent) -> None:
        if not isinstance(event, CudaStreamEvent) or event.context is not self:
            raise fail("foreign-event", "wait() for an event that was not recorded in this run of the step")
        self._driver.cuStreamWaitEvent(self._handle, event.handle, 0)
        self.joined.add(self._current)

    def host_node(self, name: str, function: Callable[[], object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        self._require_joined(f"host node {name!r}")
        check_pinned(name, (*reads, *writes), self._buffers)
        if self._launch_host:
            callback = HostCallback(name, function, self._errors)
            self.callbacks.append(callback)
            self.first_host_node = self.first_host_node or (name, call_site())
            self.label_nodes()
            with self._range(name):
                self._driver.cuLaunchHostFunc(self._handle, callback.address, callback.data)
            self.label_nodes(StageRun(self._current, name, "host"))

    def label_nodes(self, label: StageRun | None = None) -> None:
        """Label the nodes captured since the last call with the current stage, or with `label`."""
        if self._launch_host:
            new = self._driver.captured_nodes(self._streams[MAIN].cuda_stream) - len(self.labels)
            self.labels += [label or StageRun(self._current, self._stage)] * new

    def join_all(self) -> None:
        """Join every side stream to the main stream, so that an interrupted capture can end."""
        main = self._streams[MAIN].cuda_stream
        for name in self.joined - {MAIN}:
            event = self._driver.event_create()
            self._events.append(event)
            self._driver.cuEventRecord(event, self._streams[name].cuda_stream)
            self._driver.cuStreamWaitEvent(main, event, 0)

    def close(self) -> None:
        for event in self._events:
            self._driver.cuEventDestroy_v2(event)
        self._events.clear()

    def _range(self, name: str) -> AbstractContextManager[None]:
        return NULL_CONTEXT if self._ranges is None else self._ranges(name)

    @property
    def _handle(self) -> int:
        return self._streams[self._current].cuda_stream

    def _require_joined(self, operation: str) -> None:
        if self._current not in self.joined:
            message = f"{operation} on stream {self._current!r}, which has not waited for an event of this step, so it is not in the graph"
            raise fail("stream-outside-capture", message)
