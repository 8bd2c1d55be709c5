"""Checks of the capture API with user steps, without models or requests."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from stepgraph.graphs import BufferSpec, CaptureError, HostNodeError, StaticBuffers, capture, current_context
from stepgraph.graphs.capture import Backend, Recorded
from tools.gpu.checks.context import Context, Figures


def _make_buffers(backend: Backend) -> StaticBuffers:
    device = [BufferSpec(name, (4,), torch.float32) for name in ("x", "y", "z")]
    pinned = [BufferSpec(name, (4,), torch.float32, "pinned") for name in ("x_host", "y_host")]
    return StaticBuffers([*device, *pinned], backend.device)


def capture_user_step(context: Context) -> Figures:
    """The example of the README: capture a function, change an input in place, replay, read the output."""
    buffers = StaticBuffers([BufferSpec("x", (4,), torch.float32), BufferSpec("y", (4,), torch.float32)], context.device)

    def step(buffers: StaticBuffers) -> None:
        buffers.y.copy_(torch.softmax(buffers.x * 2, 0))

    recorded = capture(step, buffers, backend="tape" if context.on_tape else "cuda", check="twice")
    for shift in range(5):
        buffers.x.copy_(torch.arange(4.0) + shift * shift)
        recorded.replay()
        expected = torch.softmax((torch.arange(4.0) + shift * shift).to(context.device) * 2, 0)
        assert torch.equal(buffers.y, expected), f"got {buffers.y.tolist()}, expected {expected.tolist()}"
    return {"nodes": dict(recorded.report.nodes), "nbytes": recorded.report.nbytes, "seconds": round(recorded.report.seconds, 4)}


def capture_leaves_buffers_untouched(context: Context) -> Figures:
    """A capture changes no buffer, calls no host node and advances no generator."""
    calls = [0]

    def node() -> None:
        calls[0] += 1

    def step(b: StaticBuffers) -> None:
        b.y.add_(b.x).mul_(3)
        b.y_host.copy_(b.y, non_blocking=True)
        current_context().host_node("count", node, reads=[b.y_host], writes=[b.x_host])
        b.x.copy_(b.x_host, non_blocking=True)
        b.z.fill_(7)

    with context.backend() as backend:
        buffers = _make_buffers(backend)
        for index, name in enumerate(buffers):
            buffers[name].copy_(torch.arange(4.0) + 10 * index)
        before, pointers = {name: buffers[name].clone() for name in buffers}, buffers.fingerprint()
        generator = torch.Generator(device=backend.device).manual_seed(5)
        state = generator.get_state()
        recorded = backend.capture(step, buffers, check="twice", generators=[generator])
        backend.synchronize()
        changed = [name for name in buffers if not torch.equal(buffers[name], before[name])]
        assert not changed, f"capture changed {changed}"
        assert calls == [0], "capture called a host node"
        assert buffers.fingerprint() == pointers, "capture moved a buffer"
        assert torch.equal(generator.get_state(), state), "capture moved a generator"
        recorded.replay()
        backend.synchronize()
        assert calls == [1]
        return {"host_nodes": list(recorded.report.host_nodes), "nodes": dict(recorded.report.nodes)}


def host_nodes(context: Context) -> Figures:
    """Host nodes run in order and survive garbage collection; an error is raised once, with the node's name, and later replays work."""
    log: list[str] = []
    count, fail = [0], [False]

    def counting() -> None:
        count[0] += 1

    def failing() -> None:
        if fail[0]:
            raise ValueError("on purpose")

    def step(b: StaticBuffers) -> None:
        context = current_context()
        for name in ("first", "second", "third"):
            context.host_node(name, lambda name=name: log.append(name))  # type: ignore[misc]
        context.host_node("failing", failing)
        b.y.copy_(b.x)

    with context.backend() as backend:
        buffers = _make_buffers(backend)
        recorded = backend.capture(step, buffers)
        gc.collect()
        for _ in range(20):
            recorded.replay()
        backend.synchronize()
        assert log == ["first", "second", "third"] * 20, f"got {log[:6]}..."
        _expect_host_error(backend, recorded, fail)
        buffers.x.fill_(3)
        recorded.replay()
        backend.synchronize()
        assert buffers.y.tolist() == [3.0] * 4
        only = backend.capture(lambda b: current_context().host_node("count", counting), buffers)
        replays = context.count(10_000, 2_000)
        start = time.perf_counter()
        for _ in range(replays):
            only.replay()
        backend.synchronize()
        seconds = time.perf_counter() - start
        assert count == [replays], f"{count[0]} calls in {replays} replays"
        return {"replays": replays, "us_per_replay": round(seconds / replays * 1e6, 2), "host_nodes_counted": backend.stats.host_nodes}


def _expect_host_error(backend: Backend, recorded: Recorded, fail: list[bool]) -> None:
    fail[0] = True
    try:
        recorded.replay()  # the tape raises here, CUDA at the next synchronisation
        backend.synchronize()
    except HostNodeError as error:
        assert error.node == "failing" and isinstance(error.__cause__, ValueError), repr(error)
    else:
        raise AssertionError("the error of a host node did not surface")
    finally:
        fail[0] = False
    backend.synchronize()  # does not raise again


def streams_overlap_correct(context: Context) -> Figures:
    """A slow host node on a side stream: work that waits for it sees its values, other work may overlap."""
    delay = [0.0]

    def slow() -> None:
        time.sleep(delay[0])
        buffers.y_host.copy_(buffers.x_host * 2)

    def step(b: StaticBuffers) -> None:
        context = current_context()
        begun = context.record()
        with context.stream("side"):
            context.wait(begun)
            b.x_host.copy_(b.x, non_blocking=True)
            context.host_node("slow", slow, reads=[b.x_host], writes=[b.y_host])
            b.y.copy_(b.y_host, non_blocking=True)
            done = context.record()
        work = b.x + 1
        for _ in range(10):
            work = work * 1.0
        context.wait(done)
        b.z.copy_(b.y + work)

    with context.backend() as backend:
        buffers = _make_buffers(backend)
        recorded = backend.capture(step, buffers)
        for trial in range(context.count(50, 12)):
            delay[0] = 0.004 if trial % 3 else 0.0
            buffers.x.fill_(trial)
            recorded.replay()
            backend.synchronize()
            assert buffers.z.tolist() == [3.0 * trial + 1] * 4, f"trial {trial}: got {buffers.z.tolist()}"
        return {"nodes": dict(recorded.report.nodes)}


def illegal_step_raises(context: Context) -> Figures:
    """Steps that a graph cannot hold are refused with the offending line, and the backend works afterwards."""

    def reads_value(b: StaticBuffers) -> None:
        b.y.copy_(b.x * 2)
        if b.x.sum().item() > 0:  # a host sync
            b.y.add_(1)

    def fork_without_join(b: StaticBuffers) -> None:
        context = current_context()
        begun = context.record()
        with context.stream("side"):
            context.wait(begun)
            b.z.copy_(b.x)

    def stream_outside(b: StaticBuffers) -> None:
        with current_context().stream("side"):
            current_context().record()

    def raises(b: StaticBuffers) -> None:
        raise KeyError("the user's own error")

    figures: Figures = {}
    with context.backend() as backend:
        buffers = _make_buffers(backend)
        kept = backend.capture(_add_one, buffers)
        for step, source in ((reads_value, ".item()"), (fork_without_join, ""), (stream_outside, ".record()")):
            figures[step.__name__] = _refused(backend, step, buffers, source)
        try:
            backend.capture(raises, buffers)
        except KeyError as error:
            assert "the user's own error" in str(error)
        else:
            raise AssertionError("the step's own error was not raised")
        _check_still_works(backend, buffers, kept)
    return figures


def _add_one(b: StaticBuffers) -> None:
    b.y.copy_(b.x + 1)


def _refused(backend: Backend, step: Callable[[StaticBuffers], None], buffers: StaticBuffers, source: str) -> str:
    before = {name: buffers[name].clone() for name in buffers}
    try:
        backend.capture(step, buffers)
    except CaptureError as error:
        assert source in error.source, f"{step.__name__}: got {error.source!r} at {error.file}:{error.line}, expected the line of {source}"
        assert not source or error.file == __file__, f"{step.__name__}: got a line of {error.file}, expected one of this file"
        for name, tensor in before.items():
            assert torch.equal(buffers[name], tensor), f"{step.__name__}: the refused capture changed {name}"
        return f"[{error.rule}] line {error.line}"
    raise AssertionError(f"{step.__name__} was captured")


def _check_still_works(backend: Backend, buffers: StaticBuffers, kept: Recorded) -> None:
    fresh = backend.capture(_add_one, buffers)
    for index, recorded in enumerate((kept, fresh)):
        buffers.x.fill_(10 * index)
        recorded.replay()
        backend.synchronize()
        assert buffers.y.tolist() == [10.0 * index + 1] * 4, "a graph gives other values after a refused capture"
    torch.rand(3, device=backend.device)  # torch's generator has left capture mode
    backend.run(lambda: torch.rand(3, device=backend.device))
    backend.synchronize()
