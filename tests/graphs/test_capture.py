"""Eager runs, ownership of memory in a step, descriptions of active work."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepgraph.graphs import BufferSpec, CaptureError, HostNodeError, StaticBuffers, TapeBackend, capture, current_context, run_eager
from stepgraph.graphs.tape.replay_ops import same_bits

_reached, _released = threading.Event(), threading.Event()


@torch.library.custom_op("stepgraph_tests::held", mutates_args=("x",))
def held(x: torch.Tensor) -> None:
    _reached.set()
    assert _released.wait(60)
    x.add_(1)


def one_buffer() -> StaticBuffers:
    return StaticBuffers([BufferSpec("x", (2,), torch.float32), BufferSpec("count_host", (2,), torch.float32, memory="pinned")])


def adds_one(buffers: StaticBuffers) -> None:
    buffers.x.add_(1)


def test_failing_host_node_in_an_eager_run_is_named() -> None:
    def step(buffers: StaticBuffers) -> None:
        buffers.x.add_(1)
        current_context().host_node("count", lambda: 1 // 0, writes=[buffers.count_host])

    buffers = one_buffer()
    with pytest.raises(HostNodeError, match="host node 'count' failed: ZeroDivisionError") as caught:
        run_eager(step, buffers)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and buffers.x.tolist() == [1.0, 1.0]


def _reads_on_the_host(buffers: StaticBuffers) -> None:
    buffers.x.fill_(buffers.x.max().item())


def _fails_on_the_host(buffers: StaticBuffers) -> None:
    current_context().host_node("divide", lambda: 1 // 0)


@pytest.mark.parametrize(("step", "kind"), [(_reads_on_the_host, CaptureError), (_fails_on_the_host, HostNodeError)])
def test_errors_are_pickled_as_between_processes(step: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        capture(step, StaticBuffers([BufferSpec("x", (1,), torch.float32)]), backend="tape").replay()
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied), vars(copied)) == (kind, str(caught.value), vars(caught.value))


def test_owner_of_is_allowed_in_a_step_and_data_ptr_is_not() -> None:
    owners = []

    def step(buffers: StaticBuffers) -> None:
        owners.append(buffers.owner_of(buffers.x))
        buffers.x.add_(1)

    capture(step, one_buffer(), backend="tape").replay()
    assert set(owners) == {("x", "device")}
    with pytest.raises(CaptureError, match="raw-pointer"):
        capture(lambda buffers: print(buffers.x.data_ptr()), one_buffer(), backend="tape")


@pytest.fixture
def running() -> Iterator[None]:
    _reached.clear()
    _released.clear()
    yield
    _released.set()


@pytest.mark.parametrize("function", [capture, run_eager])
@pytest.mark.parametrize("step", [lambda: None, lambda buffers, more: None, 3])
def test_a_step_takes_the_buffers(function: Any, step: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{function.__name__}.step: got .*, expected a function of one argument, the buffers$"):
        function(step, one_buffer())


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.usefixtures("running")
def test_active_work_names_the_current_stages(traced: bool) -> None:
    def step(buffers: StaticBuffers) -> None:
        with current_context().stage("first"):
            held(buffers.x)
        with current_context().stage("second"):
            buffers.x.mul_(2)

    _released.set()
    backend, buffers = TapeBackend(asynchronous=True), one_buffer()
    tape = backend.capture(step, buffers)
    _reached.clear()
    _released.clear()
    if traced:
        backend.start_trace(0, 1)
    tape.replay()
    assert _reached.wait(60)
    (description,) = backend.active_work()
    assert description == ("stream main: stage first" if traced else "stream main: stage first to second")
    _released.set()
    backend.synchronize()
    assert backend.active_work() == () and buffers.x.tolist() == [2.0, 2.0]
    backend.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_replay_after_close_without_waiting_raises(asynchronous: bool) -> None:
    backend, buffers = TapeBackend(asynchronous=asynchronous), one_buffer()
    tape = backend.capture(adds_one, buffers)
    backend.close_without_waiting()
    backend.close_without_waiting()
    with pytest.raises(RuntimeError, match="closed"):
        tape.replay()


@pytest.mark.slow  # imports the compiler
def test_a_compiled_function_is_recorded_as_it_is() -> None:
    compiled, buffers = torch.compile(lambda x: x.copy_((x * 2 + 1).sin()), backend="eager"), one_buffer()
    recorded = capture(lambda buffers: compiled(buffers.x), buffers, backend="tape")
    recorded.replay()
    assert torch.equal(buffers.x, torch.ones(2).sin()) and recorded.report.nodes["kernel"] == 3


def test_same_bits_compares_shape_and_dtype() -> None:
    zero = torch.zeros(2)
    assert same_bits(zero, zero.clone()) and not same_bits(zero, -zero)
    assert not same_bits(zero, zero[None]) and not same_bits(zero, zero.int()), "equal bytes, other shape or dtype"
    for wide in (torch.zeros(2, dtype=torch.complex64), torch.zeros(3, 2, dtype=torch.complex128).mT):
        assert same_bits(wide, wide.clone()) and not same_bits(wide, -wide)
