"""replay(until=...): rounds of one launch, their end, and the steps and arguments that it refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from stepgraph.graphs.backends import EagerStep, capture
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.context import current_context
from stepgraph.graphs.errors import CaptureError
from stepgraph.graphs.tape.backend import TapeBackend

SPECS = [
    BufferSpec("count", (1,), torch.int64),
    BufferSpec("last", (1,), torch.int64, fill=5),
    BufferSpec("flags", (2,), torch.int32),
    BufferSpec("noise", (3,), torch.float32),
    BufferSpec("flag_host", (1,), torch.int32, "pinned"),
]


@pytest.fixture
def buffers() -> StaticBuffers:
    return StaticBuffers(SPECS)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def backend(request: pytest.FixtureRequest) -> Iterator[TapeBackend]:
    made = TapeBackend(asynchronous=request.param, poison="every")
    yield made
    made.close()


def count_up(b: StaticBuffers) -> None:
    b.count.add_(1)
    b.flags[1:].copy_(b.count >= b.last)


def test_runs_until_the_flag_is_set_with_one_launch(buffers: StaticBuffers, backend: TapeBackend) -> None:
    recorded = capture(count_up, buffers, backend)
    recorded.replay(until=buffers.flags[1:], limit=100)
    backend.synchronize()
    assert (int(buffers.count), recorded.rounds, backend.stats.replays) == (5, 5, 1)


def test_runs_at_least_once_and_at_most_limit_times(buffers: StaticBuffers, backend: TapeBackend) -> None:
    recorded = capture(count_up, buffers, backend)
    buffers.flags.fill_(1)  # set before the launch: only the step's own value counts
    recorded.replay(until=buffers.flags[1:], limit=3)
    backend.synchronize()
    assert (int(buffers.count), recorded.rounds) == (3, 3)
    buffers.count.fill_(9)
    recorded.replay(until=buffers.flags[1:], limit=3)
    backend.synchronize()
    assert (int(buffers.count), recorded.rounds) == (10, 1)


def test_a_loop_equals_single_replays(buffers: StaticBuffers, backend: TapeBackend) -> None:
    def step(b: StaticBuffers) -> None:
        context = current_context()
        fork = context.record()
        with context.stream("side"):
            context.wait(fork)
            b.noise.copy_((b.noise * 1.7 + b.count).sin())
            join = context.record()
        b.last.add_(2)
        context.wait(join)
        b.count.add_(1)

    recorded, other = capture(step, buffers, backend), StaticBuffers(SPECS)
    recorded.replay(until=buffers.flags[:1], limit=7)
    backend.synchronize()
    single = capture(step, other, backend)
    for _ in range(7):
        single.replay()
    backend.synchronize()
    assert all(torch.equal(buffers[name], other[name]) for name in buffers)


def test_rounds_continue_while_the_launching_thread_is_stalled(buffers: StaticBuffers) -> None:
    backend = TapeBackend(asynchronous=True)
    recorded, b = capture(count_up, buffers, backend), buffers
    b.last.fill_(1 << 40)
    recorded.replay(until=b.flags[1:], limit=1 << 40)
    deadline = time.monotonic() + 30
    while recorded.rounds < 50 and time.monotonic() < deadline:
        time.sleep(0.05)  # no call into the backend
    assert recorded.rounds >= 50
    b.last.fill_(0)
    assert backend.event().wait(30)
    assert int(b.count) == recorded.rounds
    backend.close()


def test_an_error_ends_the_loop(buffers: StaticBuffers) -> None:
    failing = threading.Event()

    def fail_once(name: str) -> None:
        if failing.is_set():
            raise ArithmeticError("in round 1")

    backend = TapeBackend(asynchronous=True, delay=fail_once)
    recorded = capture(count_up, buffers, backend)
    failing.set()
    recorded.replay(until=buffers.flags[1:], limit=100)
    with pytest.raises(ArithmeticError, match="in round 1"):
        backend.synchronize()
    assert recorded.rounds == 0
    backend.close()


def test_a_host_node_is_refused_with_its_line(buffers: StaticBuffers, backend: TapeBackend) -> None:
    def step(b: StaticBuffers) -> None:
        b.flag_host.copy_(b.flags[:1], non_blocking=True)
        current_context().host_node("look", lambda: None, reads=[b.flag_host])

    recorded = capture(step, buffers, backend)
    with pytest.raises(CaptureError, match=r"(?s)host-node-in-loop\] host node 'look'.*host_node\(\"look\"") as error:
        recorded.replay(until=buffers.flags[:1], limit=2)
    assert (error.value.file, error.value.line) == (__file__, step.__code__.co_firstlineno + 2)
    recorded.replay()
    backend.synchronize()


def test_a_generator_is_refused(buffers: StaticBuffers, backend: TapeBackend) -> None:
    def step(b: StaticBuffers) -> None:
        b.noise.normal_()

    recorded = capture(step, buffers, backend)
    with pytest.raises(CaptureError, match="generator-in-loop"):
        recorded.replay(until=buffers.flags[:1], limit=2)


@pytest.mark.parametrize("names", [["until", "limit"], ["limit"]])
def test_an_eager_step_is_refused(buffers: StaticBuffers, backend: TapeBackend, names: list[str]) -> None:
    arguments: dict[str, Any] = {"until": buffers.flags[:1], "limit": 2}
    with pytest.raises(CaptureError, match="eager-in-loop"):
        EagerStep(backend, count_up, buffers).replay(**{name: arguments[name] for name in names})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda b: {"until": b.flags[:1]}, "replay: got until alone, expected both until and limit, or neither"),
        (lambda b: {"limit": 2}, "replay: got limit alone, expected both"),
        (lambda b: {"until": b.flags, "limit": 2}, r"replay.until: got \(2,\) torch.int32 of 'flags', expected one int32"),
        (lambda b: {"until": b.count, "limit": 2}, r"replay.until: got \(1,\) torch.int64 of 'count'"),
        (lambda b: {"until": b.flag_host, "limit": 2}, r"replay.until: got \(1,\) torch.int32 of 'flag_host'"),
        (lambda b: {"until": torch.zeros(1, dtype=torch.int32), "limit": 2}, "replay.until: got an unregistered tensor"),
        (lambda b: {"until": torch.zeros(1, dtype=torch.int32).to_sparse(), "limit": 2}, "replay.until: got an unregistered tensor"),
        (lambda b: {"until": 3, "limit": 2}, "replay.until: got 3, expected one int32 of a device buffer"),
        (lambda b: {"until": b.flags[:1], "limit": 0}, "replay.limit: got 0, expected a whole number >= 1"),
    ],
)
def test_wrong_arguments_are_refused(
    buffers: StaticBuffers, backend: TapeBackend, arguments: Callable[[StaticBuffers], dict[str, object]], message: str
) -> None:
    recorded = capture(count_up, buffers, backend)
    with pytest.raises(ValueError, match=message):
        recorded.replay(**arguments(buffers))  # type: ignore[arg-type]
    backend.synchronize()
    assert int(buffers.count) == 0
