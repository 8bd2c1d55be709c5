"""Graphs and the tape at their edges: host nodes that fail in eager runs, captures without room, backends that are left, and what
a stream is told to be at while an operation runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepgraph.graphs import BufferSpec, CaptureError, HostNodeError, StaticBuffers, TapeBackend, capture, current_context, run_eager
from stepgraph.graphs.graph_set import GraphSet, OnFailure
from stepgraph.graphs.tape.backend import Tape
from stepgraph.graphs.tape.replay_ops import same_bits

_reached, _goes_on = threading.Event(), threading.Event()


@torch.library.custom_op("stepgraph_tests::held", mutates_args=("x",))
def held(x: torch.Tensor) -> None:
    _reached.set()
    assert _goes_on.wait(60)
    x.add_(1)


def one_buffer() -> StaticBuffers:
    return StaticBuffers([BufferSpec("x", (2,), torch.float32), BufferSpec("count_host", (2,), torch.float32, memory="pinned")])


def adds_one(buffers: StaticBuffers) -> None:
    buffers.x.add_(1)


def test_a_host_node_that_fails_in_an_eager_run_is_named() -> None:
    def step(buffers: StaticBuffers) -> None:
        buffers.x.add_(1)
        current_context().host_node("count", lambda: 1 // 0, writes=[buffers.count_host])

    buffers = one_buffer()
    with pytest.raises(HostNodeError, match="host node 'count' failed: ZeroDivisionError") as caught:
        run_eager(step, buffers)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and buffers.x.tolist() == [1.0, 1.0]


def test_a_step_may_ask_its_buffers_whose_memory_it_holds() -> None:
    owners = []

    def step(buffers: StaticBuffers) -> None:
        owners.append(buffers.owner_of(buffers.x))
        buffers.x.add_(1)

    capture(step, one_buffer(), backend="tape").replay()
    assert owners == [("x", "device")]
    with pytest.raises(CaptureError, match="raw-pointer"):
        capture(lambda buffers: print(buffers.x.data_ptr()), one_buffer(), backend="tape")


@pytest.fixture
def running() -> Iterator[None]:
    _reached.clear()
    _goes_on.clear()
    yield
    _goes_on.set()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.usefixtures("running")
def test_what_a_stream_is_at_is_told_by_its_stages(traced: bool) -> None:
    def step(buffers: StaticBuffers) -> None:
        with current_context().stage("first"):
            held(buffers.x)
        with current_context().stage("second"):
            buffers.x.mul_(2)

    _goes_on.set()
    backend, buffers = TapeBackend(asynchronous=True), one_buffer()
    tape = backend.capture(step, buffers)
    _reached.clear()
    _goes_on.clear()
    if traced:
        backend.start_trace(0, 1)
    tape.replay()
    assert _reached.wait(60)
    (told,) = backend.active_work()
    assert told == ("stream main: stage first" if traced else "stream main: stage first to second")
    _goes_on.set()
    backend.synchronize()
    assert backend.active_work() == () and buffers.x.tolist() == [2.0, 2.0]
    backend.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_backend_that_was_left_takes_no_more_work(asynchronous: bool) -> None:
    backend, buffers = TapeBackend(asynchronous=asynchronous), one_buffer()
    tape = backend.capture(adds_one, buffers)
    backend.close_without_waiting()
    backend.close_without_waiting()
    with pytest.raises(RuntimeError, match="closed"):
        tape.replay()


class Full(TapeBackend):
    """There is no room for any graph."""

    def capture(self, *_: Any, **__: Any) -> Tape:
        raise MemoryError("nothing left")


def test_graphs_that_leave_no_room_for_an_estimate_are_run_eagerly_or_refused() -> None:
    def graphs(on_failure: OnFailure) -> GraphSet:
        return GraphSet(Full(), one_buffer(), lambda key: adds_one, (1, 2), on_failure, capture_bytes=1 << 20)

    report = graphs("eager").capture()
    assert "memory of the graphs: no estimate, because the smallest graphs cannot be captured" in report.notes
    assert report.failed and all(
        one.served_by is None and "needs more memory than available (nothing left)" in one.why for one in report.failed
    )
    with pytest.raises(CaptureError, match=r"needs more memory than available \(nothing left\)"):
        graphs("raise").capture()


def test_a_set_is_captured_once() -> None:
    graphs = GraphSet(TapeBackend(), one_buffer(), lambda key: adds_one, (1,))
    graphs.capture(eager=True)
    with pytest.raises(RuntimeError, match=r"GraphSet\.capture\(\): already captured"):
        graphs.capture()


def test_bits_are_compared_in_one_shape_and_type() -> None:
    zero = torch.zeros(2)
    assert same_bits(zero, zero.clone()) and not same_bits(zero, -zero)
    assert not same_bits(zero, zero[None]) and not same_bits(zero, zero.int()), "though the bytes are equal"
    for wide in (torch.zeros(2, dtype=torch.complex64), torch.zeros(3, 2, dtype=torch.complex128).mT):
        assert same_bits(wide, wide.clone()) and not same_bits(wide, -wide)
