"""Records a step into a CUDA graph that replays with one launch."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import get_args

import torch

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Between, CaptureCheck, Generators, Step
from stepgraph.graphs.context import MAIN, temporarily_set
from stepgraph.graphs.cuda.launcher import CudaGraph, CudaLauncher
from stepgraph.graphs.cuda.recorder import CudaRecorder, broken_rule
from stepgraph.graphs.cuda.resources import current_device
from stepgraph.graphs.cuda.trace import CudaTracer
from stepgraph.graphs.spans import RangeFactory, RecordedReport, Span
from stepgraph.sampling.cuda_graphs import capture_lock
from stepgraph.sampling.fields import check_value, one_of

_abandoned: list[object] = []  # which device work may still use after `close_without_waiting`


class CudaBackend(CudaLauncher):
    """Captures and replays on one CUDA device, on its own streams.

    The main stream waits for the work that the caller issued before on its current stream. With `ordered`, the caller's stream
    also waits for the launched work, as for any torch operation; without, use events, `run` and `synchronize`. The next call that
    launches or waits raises the error of a host node, once; the nodes after it in that replay still run.

    A step that cannot be captured is run once more under the rules of the tape, to name the rule that its line breaks.

    `check="twice"` compares the nodes of two captures, kernels by identity and launch shape, and the operations of two recordings of the
    tape with their arguments: the step is also checked against all rules of the tape. A capture may use torch's default generator;
    other generators must be in `generators`.
    """

    name = "cuda"

    def __init__(self, *, ordered: bool = True, ranges: RangeFactory | None = None) -> None:
        super().__init__(current_device(), ordered, ranges)
        resources = self.resources
        self._recorder = CudaRecorder(self.driver, resources.streams, resources.capture_streams, resources.pool, self.errors, ranges)
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def capture(
        self, step: Step, buffers: StaticBuffers, *, check: CaptureCheck = "once", between: Between = None, generators: Generators = ()
    ) -> CudaGraph:
        check_value("CudaBackend.capture.check", check, one_of(get_args(CaptureCheck)))
        if torch.empty(0, device=buffers.device).device != self.device:
            raise ValueError(f"CudaBackend.capture: got buffers on {buffers.device}, expected {self.device}")
        for generator in generators:
            if generator.device.type != "cuda":  # torch would take it for a generator of CUDA
                raise ValueError(f"CudaBackend.capture.generators: got one on {generator.device}, expected generators on {self.device}")
        with self._recording("capture()"):
            try:
                uses_generator = self._recorder.warm_up(step, buffers, generators)
                if check == "twice":
                    recording = self._recorder.record_twice(step, buffers, between, generators, uses_generator)
                else:
                    recording = self._recorder.record(step, buffers, generators, uses_generator)
            except Exception as error:
                broken = broken_rule(error, step, buffers, generators)
                if broken is None:
                    raise
                raise broken from error
        graph = CudaGraph(self, recording, buffers)
        self._graphs.add(graph)
        if hasattr(recording.graph, "raw_cuda_graph_exec"):  # not in torch 2.8
            self.driver.cuGraphUpload(recording.graph.raw_cuda_graph_exec(), self._main.cuda_stream)
        return graph

    def measure(self, step: Step, buffers: StaticBuffers) -> RecordedReport:
        with self._recording("measure()"):
            return self._recorder.measure(step, buffers)

    @contextlib.contextmanager
    def _recording(self, call: str) -> Iterator[None]:
        # Two threads that launch a Triton program for the first time both compile it, and the second result replaces the first: without
        # the lock, the capture might have to load a program although its warm-up had loaded it, which is not allowed.
        with capture_lock, torch.cuda.device(self.device), self.on_main(call):
            self._drain()
            self.errors.raise_first()
            with temporarily_set(self, "_capturing", True):
                yield

    def start_trace(self, first_round: int, rounds: int) -> None:
        if self.tracer is not None:
            raise RuntimeError("CudaBackend.start_trace(): a trace is already running")
        self.synchronize()
        self.tracer = CudaTracer(first_round, rounds)

    def stop_trace(self) -> tuple[Span, ...]:
        tracer, self.tracer = self.tracer, None
        try:
            if self._finalizer.alive:  # if closed, close() has waited
                self.synchronize()
        finally:
            spans = () if tracer is None else tracer.stop()
        return spans

    def active_work(self) -> tuple[str, ...]:
        self.bind()
        return (f"stream {MAIN}: {'idle' if self.driver.cuStreamQuery(self._main.cuda_stream) else 'busy'}",)

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

    def close_without_waiting(self) -> None:
        if self._finalizer.detach() is not None:
            _abandoned.extend((self.resources, self.tracer, *self._graphs))
            self.tracer = None  # its end would wait
