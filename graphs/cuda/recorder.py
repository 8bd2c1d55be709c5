"""Recording a step into a CUDA graph: warm-up, capture, and recovery from a failed capture."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import NamedTuple

import torch

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Between, Generators, Step, refusing_threads, run_step
from stepgraph.graphs.context import MAIN, FirstError, use_context
from stepgraph.graphs.cuda.context import CudaCaptureContext, HostCallback
from stepgraph.graphs.cuda.driver import Driver, KernelParams
from stepgraph.graphs.cuda.loop import LoopGraphs
from stepgraph.graphs.errors import CaptureError, Site, fail, site_of_error
from stepgraph.graphs.memory import Backup
from stepgraph.graphs.spans import GraphNode, RangeFactory, RecordedReport, stage_runs
from stepgraph.graphs.tape.recorder import Recorder, first_difference
from stepgraph.graphs.tape.reuse import check_second_run
from stepgraph.sampling.cuda_graphs import GraphPool, Streams, capturing, empty_cache, gc_paused, hold_workspaces

_NODE_KINDS = (  # in the order of CUgraphNodeType; shared kinds have the names that the tape uses
    *("kernel", "copy", "fill", "host", "graph", "empty", "wait", "record", "semaphore-signal", "semaphore-wait"),
    *("alloc", "free", "memory-operations", "conditional"),
)


class Recording(NamedTuple):
    """A captured step. The callbacks must live until the graph is freed and the device idle."""

    graph: torch.cuda.CUDAGraph
    callbacks: list[HostCallback]
    report: RecordedReport
    host_node: tuple[str, Site] | None  # the first one
    uses_generator: bool  # from a generator
    loops: LoopGraphs
    buffers: StaticBuffers  # which it may still use when nothing else refers to them

    def free(self) -> None:
        """The device must be idle."""
        self.loops.free()
        self.graph.reset()
        self.callbacks.clear()


class CudaRecorder:
    """Captures steps on one device into one memory pool. `streams` are those of the warm-up, `capture_streams` have the same names."""

    def __init__(
        self,
        driver: Driver,
        streams: Streams,
        capture_streams: Streams,
        pool: GraphPool,
        errors: FirstError,
        ranges: RangeFactory | None = None,
    ) -> None:
        self._driver, self._streams, self._pool, self._errors, self._ranges = driver, streams, pool, errors, ranges
        self._capture_streams = capture_streams
        self._device = pool.stream.device

    def warm_up(self, step: Step, buffers: StaticBuffers, generators: Generators) -> bool:
        """Run the step once, then restore the buffers. Returns whether it draws from a generator.

        Libraries create handles and load kernels in their first call, which a capture does not allow.
        """
        used = [*generators, torch.cuda.default_generators[self._device.index]]
        with torch.cuda.stream(self._streams[MAIN]), torch.no_grad():
            backups, states = (
                [Backup(buffers[spec.name], spec.fill) for spec in buffers.specs],
                [generator.get_state() for generator in used],
            )
            self.synchronize()
            context = CudaCaptureContext(self._driver, self._streams, buffers, self._errors, launch_host=False)
            try:
                with gc_paused:  # otherwise a kept tensor may get the memory of garbage, and its address is not new
                    before = allocated_blocks()
                    with use_context(context):
                        step(buffers)
                    torch.clear_autocast_cache()
                    kept = allocated_blocks() - before
                if kept:  # also by other threads, as workspaces of libraries, and in cycles, which are freed here
                    gc.collect()
                    kept &= allocated_blocks()
                if kept:
                    is_kept = lambda tensor: tensor.untyped_storage().data_ptr() in kept  # noqa: E731
                    check_second_run(tape_recorder(buffers, generators), step, is_kept)
                for name in context.joined:
                    self._capture_streams[name]  # takes the stream from the pool, which a capture cannot
                pairs = zip(used, states, strict=True)
                return not all(torch.equal(generator.get_state(), state) for generator, state in pairs)
            finally:
                self.synchronize()
                for backup in backups:
                    backup.restore()
                for generator, state in zip(used, states, strict=True):
                    generator.set_state(state)
                self.synchronize()
                context.close()

    def record_twice(self, step: Step, buffers: StaticBuffers, between: Between, generators: Generators, uses_generator: bool) -> Recording:
        """Record and compare. CaptureError if the two differ.

        Arguments are compared by recordings of the tape: those of a kernel have bytes that are not initialised.
        """
        recording, tape = self.record(step, buffers, generators, uses_generator), self._record_on_tape(step, buffers, generators)
        if between is not None:
            between()
        # The tape first: it names a line, and a capture cannot take streams that the first run of the step did not use.
        error = first_difference(tape.nodes, self._record_on_tape(step, buffers, generators).nodes)
        if error is None:
            second = self.record(step, buffers, generators, uses_generator)
            error = first_node_difference(recording.report.graph_nodes, second.report.graph_nodes)
            second.free()
        if error is not None:
            recording.free()
            raise error
        return recording

    def _record_on_tape(self, step: Step, buffers: StaticBuffers, generators: Generators) -> Recorder:
        """The operations of a step and their arguments, under the rules of the tape."""
        recorder = tape_recorder(buffers, generators, records_leaves=True)
        with torch.cuda.stream(self._streams[MAIN]):
            recorder.record_step(step)
            if recorder.shares_intermediates:
                check_second_run(recorder, step, lambda tensor: False)
        self.synchronize()
        return recorder

    def record(self, step: Step, buffers: StaticBuffers, generators: Generators, uses_generator: bool) -> Recording:
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if cached > torch.cuda.mem_get_info(self._device)[0]:
            empty_cache()  # holds what the warm-up used, and a capture cannot free it
        hold_workspaces(self._capture_streams.values())
        begin, reserved = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        graph, context = self._capture(step, buffers, generators)
        graph.instantiate()
        nodes = graph_nodes(self._driver, graph.raw_cuda_graph())
        report = RecordedReport(
            nodes=dict(Counter(node.kind for node in nodes)),
            host_nodes=tuple(callback.name for callback in context.callbacks),
            nbytes=max(0, torch.cuda.memory_reserved(self._device) - reserved),  # growth of the pool
            seconds=time.perf_counter() - begin,
            stages=stage_runs(context.labels),
            graph_nodes=nodes,
        )
        return Recording(graph, context.callbacks, report, context.first_host_node, uses_generator, LoopGraphs(), buffers)

    def measure(self, step: Step, buffers: StaticBuffers) -> RecordedReport:
        """The report of a capture in its own pool, which is then freed."""
        pool = GraphPool(self._pool.stream)
        recorder = CudaRecorder(self._driver, self._streams, self._capture_streams, pool, self._errors)
        recording = recorder.record(step, buffers, (), recorder.warm_up(step, buffers, ()))
        recording.free()
        pool.release()
        empty_cache()
        return recording.report

    def synchronize(self) -> None:
        for stream in self._streams.values():
            self._driver.cuStreamSynchronize(stream.cuda_stream)

    def _capture(self, step: Step, buffers: StaticBuffers, generators: Generators) -> tuple[torch.cuda.CUDAGraph, CudaCaptureContext]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        context = CudaCaptureContext(self._driver, self._capture_streams, buffers, self._errors, launch_host=True, ranges=self._ranges)
        try:
            with capturing(graph, self._pool, generators):
                try:
                    with use_context(context), refusing_threads():
                        run_step(step, buffers)
                    context.label_nodes()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # an invalidated capture accepts no more work
                        context.join_all()
                    raise
        except (CaptureError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise as_capture_error(error) from error
        finally:
            context.close()
        return graph, context


def allocated_blocks() -> set[int]:
    """The addresses of memory that torch has allocated on its devices."""
    blocks = (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"])
    return {block["address"] for block in blocks if block["state"] == "active_allocated"}


def graph_nodes(driver: Driver, graph: int) -> tuple[GraphNode, ...]:
    """The nodes of a cudaGraph_t, in capture order."""
    count = c_size_t()
    driver.cuGraphGetNodes(graph, None, byref(count))
    handles = (c_void_p * max(count.value, 1))()
    driver.cuGraphGetNodes(graph, handles, byref(count))
    return tuple(_node(driver, handle or 0) for handle in handles[: count.value])


def _node(driver: Driver, handle: int) -> GraphNode:
    number = c_int()
    driver.cuGraphNodeGetType(handle, byref(number))
    kind = _NODE_KINDS[number.value] if number.value < len(_NODE_KINDS) else f"type-{number.value}"
    params = KernelParams()
    if kind == "kernel":
        with contextlib.suppress(RuntimeError):  # not available for some kernels
            driver.cuGraphKernelNodeGetParams_v2(handle, byref(params))
            return GraphNode(kind, (params.func or params.kern or 0, *params.shape))
    return GraphNode(kind)


def first_node_difference(first: Sequence[GraphNode], second: Sequence[GraphNode]) -> CaptureError | None:
    """The first difference between two captures: the kind of a node, or identity and launch shape of a kernel."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return CaptureError("baked-branch", f"node {index} is {a} in one capture and {b} in the other: it depends on host state")
    if len(first) != len(second):
        return CaptureError("baked-branch", f"one capture has {len(first)} nodes and the other {len(second)}: they depend on host state")
    return None


def as_capture_error(error: Exception) -> CaptureError:
    """An error in the capture itself. The warm-up succeeded, so the step fails only while it is captured."""
    text, site = str(error).split("\n", 1)[0], site_of_error(error)
    if not isinstance(error, RuntimeError):
        return fail("exception", f"{type(error).__name__}: {text}", site)
    return fail("unjoined-fork" if "unjoined" in text else "cuda", text, site)


def broken_rule(error: Exception, step: Step, buffers: StaticBuffers, generators: Generators) -> CaptureError | None:
    """The rule of the tape that the line of a failed capture breaks, or None. CUDA reports neither a rule nor the line of a fork."""
    rule = error.rule if isinstance(error, CaptureError) else ""
    if rule not in ("", "cuda", "exception", "unjoined-fork", "stream-outside-capture"):
        return None
    site = Site(error.file, error.line) if isinstance(error, CaptureError) else site_of_error(error)
    try:
        tape_recorder(buffers, generators).record_step(step)
    except CaptureError as found:
        unknown = not site.file and not isinstance(error, torch.OutOfMemoryError)
        if unknown or found.rule == rule or site == (found.file, found.line):
            return found
    except Exception:  # the error of the capture is reported anyway
        return None
    return None


def tape_recorder(buffers: StaticBuffers, generators: Generators, records_leaves: bool = False) -> Recorder:
    def wait_for_device() -> None:
        torch.cuda.current_stream(buffers.device).synchronize()

    default = torch.cuda.default_generators[torch.empty(0, device=buffers.device).device.index]
    return Recorder(buffers, [*generators, default], lambda key: False, None, records_leaves, wait_for_device)
