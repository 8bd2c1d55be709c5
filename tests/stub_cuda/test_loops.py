"""Steps as bodies of WHILE nodes: the graph that is built, launches by count, refusals, memory; engines whose launches run many rounds."""

from __future__ import annotations

import gc
import platform

import pytest
import torch

from tests.stub_cuda import counters
from tests.stub_cuda.counters import Node
from tests.stub_cuda.subject import (
    Backend,
    BufferSpec,
    CaptureError,
    StaticBuffers,
    cuda_loop,
    current_context,
    greedy_engine,
    make_backend,
)

WHILE = 1


def buffers_of(backend: Backend) -> StaticBuffers:
    return StaticBuffers([BufferSpec("x", (4,), torch.float32), BufferSpec("done", (1,), torch.int32)], backend.device)


def halve(b: StaticBuffers) -> None:
    b.x.mul_(0.5)
    b.done.copy_(b.x.sum() < 1)


def loops() -> list[list[Node]]:
    """The graphs with a conditional node."""
    graphs = map(counters.graph_nodes, counters.live_graphs())
    return [nodes for nodes in graphs if any(node.type == "conditional" for node in nodes)]


def test_captured_step_is_a_child_in_the_body_before_the_condition_kernel(backend: Backend) -> None:
    buffers, before = buffers_of(backend), counters.live_graphs()
    counters.take_messages()
    graph = backend.capture(halve, buffers)
    (handle,) = {*counters.live_graphs()} - {*before}
    captured = counters.graph_nodes(handle)
    graph.replay(until=buffers.done, limit=9)
    backend.synchronize()
    ((reset, loop),) = loops()
    child, kernel = loop.fields["body"]
    assert (reset.type, loop.type, child.type, kernel.type) == ("fill", "conditional", "graph", "kernel")
    assert (loop.dependencies, kernel.dependencies, loop.fields["condition_type"]) == ((0,), (0,), WHILE)
    assert [(node.type, node.name) for node in child.fields["body"]] == [(node.type, node.name) for node in captured]
    assert (kernel.name, kernel.grid, kernel.block) == ("set_condition", (1, 1, 1), (1, 1, 1))
    assert kernel.arguments is not None
    assert [kernel.pointer(index) for index in range(3)] == [loop.fields["condition"], buffers.done.data_ptr(), reset.fields["destination"]]
    assert int.from_bytes(kernel.arguments[4], "little") == 9 and (reset.fields["value"], reset.fields["nbytes"]) == (0, 4)
    assert not counters.take_messages()


def test_each_replay_is_one_launch_and_only_the_first_builds_the_loop(backend: Backend) -> None:
    buffers = buffers_of(backend)
    graph = backend.capture(halve, buffers)
    graph.replay(until=buffers.done, limit=9)
    with counters.counted() as counts:
        for _ in range(3):
            graph.replay(until=buffers.done, limit=9)
    assert counts["graph_launches"] == 3 and counts["cuGraphLaunch"] == 3
    assert not counts.of(counters.ALLOCATIONS) and not counts["live_graph_execs"]
    graph.replay(until=buffers.done, limit=4)
    assert len(loops()) == 2, "another limit needs another loop"


def test_dropped_graphs_and_closed_backends_free_their_loops() -> None:
    def one() -> None:
        backend = make_backend("cuda")
        buffers = buffers_of(backend)
        backend.capture(halve, buffers).replay(until=buffers.done, limit=9)
        gc.collect()
        backend.synchronize()
        assert not loops(), "the graph was dropped"
        graph = backend.capture(halve, buffers)
        graph.replay(until=buffers.done, limit=9)
        backend.close()

    def settle() -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    one()
    settle()
    with counters.counted() as counts:
        for _ in range(3):
            one()
            settle()
    assert not {name: count for name, count in counts.of(counters.LIVE).items() if name != "live_pinned_bytes"}


def test_host_node_is_refused_with_its_line(backend: Backend) -> None:
    def step(b: StaticBuffers) -> None:
        halve(b)
        current_context().host_node("look", lambda: None)

    buffers = buffers_of(backend)
    graph = backend.capture(step, buffers)
    with pytest.raises(CaptureError, match="host-node-in-loop") as error:
        graph.replay(until=buffers.done, limit=9)
    assert (error.value.file, error.value.line) == (__file__, step.__code__.co_firstlineno + 2)


def test_loop_that_cannot_be_instantiated_leaves_no_graph(backend: Backend) -> None:
    event = torch.cuda.Event(external=True)

    def step(b: StaticBuffers) -> None:
        halve(b)
        event.record()

    buffers = buffers_of(backend)
    graph = backend.capture(step, buffers)
    with counters.counted() as counts, pytest.raises(RuntimeError, match="cuGraphInstantiateWithFlags"):
        graph.replay(until=buffers.done, limit=9)
    assert not counts["live_graphs"]


def test_step_that_draws_is_refused(backend: Backend) -> None:
    def step(b: StaticBuffers) -> None:
        b.x.normal_()

    buffers = buffers_of(backend)
    graph = backend.capture(step, buffers)
    with pytest.raises(CaptureError, match="generator-in-loop"):
        graph.replay(until=buffers.done, limit=9)


def test_loop_is_refused_while_a_trace_is_running(backend: Backend) -> None:
    buffers = buffers_of(backend)
    graph = backend.capture(halve, buffers)
    backend.start_trace(0, 5)
    with pytest.raises(RuntimeError, match=r"replay\(until=...\): a trace is running"):
        graph.replay(until=buffers.done, limit=9)
    backend.stop_trace()


def test_older_driver_is_refused(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_loop, "MIN_DRIVER_VERSION", 99_990)  # the stub is a driver for CUDA 13.0
    buffers = buffers_of(backend)
    graph = backend.capture(halve, buffers)
    reason = "the driver supports CUDA 13.0, expected 12.4 or newer for WHILE nodes"
    with pytest.raises(RuntimeError, match=rf"replay\(until=...\): {reason}"):
        graph.replay(until=buffers.done, limit=9)
    with pytest.raises(ValueError, match=f"EngineConfig.rounds_per_launch: got 'until_event', expected 1: {reason}"):
        greedy_engine(rounds_per_launch="until_event")


def test_a_host_that_reorders_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ValueError, match="got 'until_event', expected 1: aarch64 may reorder the host's reads"):
        greedy_engine(rounds_per_launch="until_event")
    greedy_engine().close()


def test_engine_publishes_within_its_loops_and_launches_one_at_a_time() -> None:
    with greedy_engine(rounds_per_launch="until_event") as engine:
        report = engine.capture()
        free = [key for key, recorded in report.keys if not recorded.host_nodes]
        found = loops()
        assert len(found) == len(free) > 0
        for _, loop in found:
            child, _ = loop.fields["body"]
            assert sum(node.name == "publish_round" for node in child.fields["body"]) == 1
        job = engine.submit([1, 2, 3], max_new_tokens=8)
        with counters.counted() as counts:
            assert engine.step() == []  # a chunk of the prompt, and a launch of many rounds; kernels write nothing
        assert counts["graph_launches"] == 2 and not counts.of(counters.ALLOCATIONS)
        engine.cancel(job)
        engine.step()
        assert job.finish_reason == "cancelled"
