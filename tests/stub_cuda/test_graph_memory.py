"""Memory of graphs: the pool of a backend, estimates before captures, and memory after backends are closed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from stepgraph.graphs import BufferSpec, CaptureError, StaticBuffers, current_context
from stepgraph.graphs.capture import Step
from stepgraph.graphs.cuda.backend import CudaBackend
from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.graph_set import GraphSet
from stepgraph.graphs.memory import available_bytes
from stepgraph.sampling.cuda_graphs import capture_replay

pytestmark = pytest.mark.stub_cuda
DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


def buffers() -> StaticBuffers:
    return StaticBuffers([BufferSpec(name, (4,), torch.float32) for name in "xy"], DEVICE)


def reserved() -> int:
    """Bytes that torch holds and cannot release."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def softmax(buffers: StaticBuffers) -> None:
    buffers.y.copy_(torch.softmax(buffers.x * 2, 0))


def synchronises(buffers: StaticBuffers) -> None:
    buffers.y.copy_(buffers.x * 2)
    buffers.x.sum().item()


def refuses(buffers: StaticBuffers) -> None:
    buffers.y.copy_(buffers.x * 2)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("refused")


def test_a_backend_captures_again_after_all_its_graphs_were_dropped(backend: CudaBackend) -> None:
    static = buffers()
    first, second = backend.capture(softmax, static), backend.capture(softmax, static)
    del first, second
    for _ in range(3):
        graph = backend.capture(softmax, static)
        graph.replay()
        assert graph.report.nodes == {"kernel": 2, "copy": 1}
        del graph


def test_a_backend_captures_after_first_captures_that_failed(backend: CudaBackend) -> None:
    static = buffers()
    for _ in range(2):
        with pytest.raises(CaptureError, match="ValueError: refused"):
            backend.capture(refuses, static)
        with pytest.raises(CaptureError, match="cuda"):
            backend.capture(synchronises, static)
        backend.capture(softmax, static).replay()


def test_memory_of_dropped_graphs_is_used_again_and_freed_with_the_backend() -> None:
    static, before = buffers(), reserved()
    backend = CudaBackend()
    backend.capture(softmax, static)
    held = reserved()
    for _ in range(5):
        backend.capture(softmax, static)
    assert reserved() == held > before
    backend.close()
    assert reserved() == before


def test_memory_of_a_capture_that_failed_is_freed_with_the_backend() -> None:
    """The newest torch releases the pool itself, and aborts if it is released twice; older versions leave the pool recording."""
    static, before = buffers(), reserved()
    backend = CudaBackend()

    def step(buffers: StaticBuffers) -> None:
        buffers.y.copy_(buffers.x * 2)
        buffers.x.sum().item()

    with pytest.raises(CaptureError, match="cuda"):
        backend.capture(step, static)
    backend.capture(softmax, static).replay()
    backend.close()
    assert reserved() == before


@pytest.mark.parametrize("closed", [False, True])
def test_buffers_live_until_graphs_that_may_use_them_have_ended(closed: bool) -> None:
    backend, static = CudaBackend(), buffers()
    alive, graph = weakref.ref(static), backend.capture(softmax, static)
    graph.replay()
    if closed:
        backend.close_without_waiting()
        del backend
    del graph, static
    gc.collect()
    assert alive() is not None
    if not closed:
        backend.close()
        assert alive() is None


def test_a_capture_that_runs_out_of_memory_names_the_memory(backend: CudaBackend) -> None:
    def step(_: StaticBuffers) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)

    with pytest.raises(CaptureError, match=r"\[memory\]"):
        GraphSet(backend, buffers(), lambda key: step, (1,)).capture(greedy_only=True)


def test_a_capture_uses_the_memory_of_its_warm_up_and_its_pool_is_not_available(backend: CudaBackend) -> None:
    def step(b: StaticBuffers) -> None:
        torch.empty(80 << 30, dtype=torch.uint8, device=DEVICE)  # more than half of the memory
        b.x.zero_()

    graph = backend.capture(step, buffers())
    assert graph.report.nbytes == 80 << 30 and 0 < (available_bytes(DEVICE) or 0) < 60 << 30


def test_memory_of_graphs_is_estimated_before_they_are_captured(backend: CudaBackend) -> None:
    static, before, largest = buffers(), reserved(), 8 * 20 * MIB

    def step_of(key: GraphKey) -> Step:
        def step(buffers: StaticBuffers) -> None:
            blocks = [torch.empty(20 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(key.rows)]
            blocks[0][:16].copy_(blocks[-1][16:32])
            buffers.y.copy_(buffers.x)

        return step

    with pytest.raises(CaptureError, match=f"capture_bytes: got {largest:,}, need about {largest + static.nbytes:,}, "):
        GraphSet(backend, static, step_of, (1, 2, 4, 8), capture_bytes=largest).capture(greedy_only=True)
    assert reserved() == before, "memory that the estimate used is released"
    most = largest + 2 * MIB
    report = GraphSet(backend, static, step_of, (1, 2, 4, 8), capture_bytes=most).capture(greedy_only=True)
    assert sum(one.nbytes for _, one in report.keys) == reserved() - before == largest
    assert report.notes == (f"memory: about {largest + static.nbytes:,} of at most {most:,} bytes, static buffers included",)


def test_backends_one_after_the_other_take_the_same_streams_and_workspaces() -> None:
    static = StaticBuffers([BufferSpec(name, (16, 16), torch.float32) for name in "xy"], DEVICE)

    def step(buffers: StaticBuffers) -> None:
        context = current_context()
        event = context.record()
        with context.stream("side"):
            context.wait(event)
            torch.mm(buffers.y, buffers.y)
            event = context.record()
        torch.mm(buffers.x, buffers.x)
        context.wait(event)

    streams, allocated = set[tuple[int, ...]](), set[int]()
    for _ in range(3):
        backend = CudaBackend()
        backend.capture(step, static).replay()
        streams.add(tuple(stream.cuda_stream for stream in backend.resources.streams.values()))
        backend.close()
        del backend
        capture_replay(lambda: static.x.copy_(static.x @ static.x), DEVICE)()
        gc.collect()
        allocated.add(torch.cuda.memory_allocated())
    assert len(streams) == 1 and len(allocated) == 1


def test_backends_side_by_side_share_no_stream() -> None:
    backends = []
    for _ in range(8):
        backends.append(CudaBackend())
        for _ in range(31):  # torch hands out its 32 streams in turn
            torch.cuda.Stream()
    assert len({stream.cuda_stream for backend in backends for stream in backend.resources.streams.values()}) == len(backends)
    for backend in backends:
        backend.close()
