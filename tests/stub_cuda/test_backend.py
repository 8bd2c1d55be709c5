"""The CUDA back end on the real torch: capture, replay, drop, capture again; host nodes; what a capture refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from stepgraph.graphs import HostNodeError
from tests.stub_cuda import counters
from tests.stub_cuda.subject import Backend, BufferSpec, CaptureError, StaticBuffers, current_context, make_backend

Step = Callable[[StaticBuffers], None]


def buffers_of(backend: Backend) -> StaticBuffers:
    return StaticBuffers([BufferSpec(name, (4,), torch.float32) for name in "xyz"], backend.device)


def add(b: StaticBuffers) -> None:
    b.y.copy_(torch.softmax(b.x + 1, 0))


def test_step_is_captured_replayed_dropped_and_captured_again(backend: Backend) -> None:
    buffers = buffers_of(backend)
    for _ in range(3):
        graph = backend.capture(add, buffers)
        assert graph.report.nodes == {"kernel": 2, "copy": 1}
        with counters.counted() as counts:
            for _ in range(5):
                graph.replay()
        assert counts["graph_launches"] == 5
        assert not counts.of(counters.ALLOCATIONS)
        backend.synchronize()
        del graph
        gc.collect()
        backend.synchronize()


def test_closed_backends_leave_no_graph_stream_event_or_memory() -> None:
    def one() -> None:
        backend = make_backend("cuda")
        buffers = buffers_of(backend)
        graph = backend.capture(add, buffers)
        graph.replay()
        backend.close()

    def settle() -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    one()  # objects that torch creates once
    settle()
    with counters.counted() as counts:
        for _ in range(4):
            one()
            settle()
    assert not counts.of(counters.LIVE)


def test_host_nodes_run_in_order_and_between_their_neighbours(backend: Backend) -> None:
    buffers, order = buffers_of(backend), list[str]()

    def step(b: StaticBuffers) -> None:
        context = current_context()
        begun = context.record()
        with context.stream("side"):
            context.wait(begun)
            context.host_node("first", lambda: order.append("first"))
            b.z.copy_(b.x)
            context.host_node("second", lambda: order.append("second"))
            done = context.record()
        b.y.copy_(b.x + 1)
        context.wait(done)
        context.host_node("third", lambda: order.append("third"))

    graph = backend.capture(step, buffers)
    (handle,) = [handle for handle in counters.live_graphs() if any(node.type == "host" for node in counters.graph_nodes(handle))]
    nodes = counters.graph_nodes(handle)
    assert [node.type for node in nodes] == ["host", "copy", "host", "kernel", "copy", "host"]
    assert counters.graph_edges(handle) == {(0, 1), (1, 2), (3, 4), (2, 5), (4, 5)}
    for _ in range(3):
        graph.replay()
    backend.synchronize()
    assert order == ["first", "second", "third"] * 3


def host_sync(b: StaticBuffers) -> None:
    b.y.copy_(b.x * 2)
    if b.x.sum().item() > 0:
        b.y.add_(1)


def unjoined_fork(b: StaticBuffers) -> None:
    context = current_context()
    begun = context.record()
    with context.stream("side"):
        context.wait(begun)
        b.z.copy_(b.x)


def stream_outside(b: StaticBuffers) -> None:
    with current_context().stream("side"):
        current_context().record()


def pageable_copy(b: StaticBuffers) -> None:
    b.y.copy_(torch.ones(4))


def pageable_result(b: StaticBuffers) -> None:
    b.x.cpu()


def device_sync(b: StaticBuffers) -> None:
    b.y.copy_(b.x)
    torch.cuda.synchronize()


def default_generator(b: StaticBuffers) -> None:
    """Legal draws. The tape, which names the line of the fork, must accept them too."""
    b.y.copy_(torch.rand(4, device=b.x.device, generator=torch.cuda.default_generators[0]))
    unjoined_fork(b)


FOREIGN = "generator"


@pytest.mark.parametrize(
    ("step", "rule", "line"),
    [
        (host_sync, "host-sync", "if b.x.sum().item() > 0:"),
        (unjoined_fork, "unjoined-fork", "b.z.copy_(b.x)"),
        (default_generator, "unjoined-fork", "b.z.copy_(b.x)"),
        (stream_outside, "stream-outside-capture", "current_context().record()"),
        (pageable_copy, "missing-device", "b.y.copy_(torch.ones(4))"),
        (pageable_result, "host-sync", "b.x.cpu()"),
        (device_sync, "cuda", "torch.cuda.synchronize()"),
        (FOREIGN, "generator", "b.y.copy_(torch.rand(4, device=b.x.device, generator=generator))"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_illegal_step_is_refused_with_its_line_and_the_backend_remains(backend: Backend, step: Step | str, rule: str, line: str) -> None:
    if step == FOREIGN and torch.__version__ >= "2.14":
        pytest.skip("this torch registers the generators that a capture uses")
    generator = torch.Generator("cuda").manual_seed(3)

    def foreign_generator(b: StaticBuffers) -> None:
        b.y.copy_(torch.rand(4, device=b.x.device, generator=generator))

    buffers = buffers_of(backend)
    with pytest.raises(CaptureError) as caught:
        backend.capture(foreign_generator if step == FOREIGN else step, buffers)  # type: ignore[arg-type]
    assert caught.value.rule == rule
    assert line in str(caught.value)
    graph = backend.capture(add, buffers)
    graph.replay()
    backend.synchronize()


def test_wrong_arguments_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"CudaBackend\.capture\.generators: got one on cpu"):
        backend.capture(add, buffers_of(backend), generators=(torch.Generator(),))
    with pytest.raises(ValueError, match=r"CudaBackend\.capture\.check: got 'Twice'"):
        backend.capture(add, buffers_of(backend), check="Twice")  # type: ignore[arg-type]


def test_work_of_a_run_that_raised_is_ordered_before_that_of_the_caller(backend: Backend) -> None:
    x, source = torch.zeros(4, device=backend.device), torch.ones(4).pin_memory()

    def copies() -> None:
        x.copy_(source, non_blocking=True)
        raise ValueError("late")

    counters.take_issued(more=True)
    with pytest.raises(ValueError, match="late"):
        backend.run(copies)
    x.copy_(source, non_blocking=True)
    issued = counters.take_issued(more=False)
    first, last = (index for index, each in enumerate(issued) if each.kind == "eager_copies")
    assert first in counters.before(issued)[last]


def test_a_trace_ends_with_an_error_of_a_host_node(backend: Backend) -> None:
    graph = backend.capture(lambda b: current_context().host_node("bad", lambda: 1 // 0), buffers_of(backend))
    backend.start_trace(0, 3)
    graph.replay()
    with pytest.raises(HostNodeError, match="bad"):
        backend.stop_trace()
    assert not torch._C._autograd._profiler_enabled()


def test_generator_that_is_declared_may_be_used(backend: Backend) -> None:
    generator, buffers = torch.Generator("cuda").manual_seed(3), buffers_of(backend)

    def draw(b: StaticBuffers) -> None:
        b.y.copy_(torch.rand(4, device=b.x.device, generator=generator))

    graph = backend.capture(draw, buffers, generators=(generator,))
    graph.replay()
    backend.synchronize()
