"""The tape backend: captures without side effects, replays in place, baked host state, errors, events, threads."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph.graphs.backends import capture, make_backend, run_eager
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.context import COPY_STREAM, MAIN, current_context
from stepgraph.graphs.errors import CaptureError, HostNodeError
from stepgraph.graphs.tape import backend as tape
from stepgraph.graphs.tape.backend import TapeBackend
from stepgraph.graphs.tape.player import Segment
from tests.helpers.c_library import needs_c

SPECS = [
    BufferSpec("x", (4, 8), torch.float32, fill=1),
    BufferSpec("y", (4, 8), torch.float32),
    BufferSpec("index", (4,), torch.int64),
    BufferSpec("counts", (2, 1), torch.int64),
    BufferSpec("x_host", (4, 8), torch.float32, memory="pinned"),
    BufferSpec("ring_host", (4, 8), torch.float32, memory="pinned"),
]


@pytest.fixture
def buffers() -> StaticBuffers:
    return StaticBuffers(SPECS)


def snapshot(b: StaticBuffers) -> dict[str, Tensor]:
    return {name: b[name].clone() for name in b}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def through_host(function: Callable[[], None], name: str = "double", stream: str = "side") -> Callable[[StaticBuffers], None]:
    """x -> pinned -> host node on a side stream -> y, while the main stream continues."""

    def step(b: StaticBuffers) -> None:
        context = current_context()
        b.x_host.copy_(b.x, non_blocking=True)
        fork = context.record()
        with context.stream(stream):
            context.wait(fork)
            context.host_node(name, function, reads=[b.x_host], writes=[b.ring_host])
            join = context.record()
        b.x.add_(1)
        context.wait(join)
        b.y.copy_(b.ring_host, non_blocking=True)

    return step


def doubling(b: StaticBuffers) -> Callable[[], None]:
    def double() -> None:
        torch.mul(b.x_host, 2, out=b.ring_host)

    return double


def add_one(b: StaticBuffers) -> None:
    b.x.add_(1)


# side effects of a capture


def test_capture_changes_nothing(buffers: StaticBuffers) -> None:
    called = []

    def step(b: StaticBuffers) -> None:
        b.x[1:].mul_(3).add_(b.y[:3])
        b.index.view(2, 2)[0].add_(7)
        through_host(lambda: called.append(1))(b)

    buffers.x.copy_(torch.randn(4, 8))
    before, fingerprint = snapshot(buffers), buffers.fingerprint()
    TapeBackend().capture(step, buffers, check="twice")
    assert same(before, snapshot(buffers)) and buffers.fingerprint() == fingerprint
    assert called == []


@pytest.mark.parametrize("failure", [ValueError("mine"), KeyboardInterrupt(), None])
def test_capture_changes_nothing_when_the_step_raises(buffers: StaticBuffers, failure: BaseException | None) -> None:
    def step(b: StaticBuffers) -> None:
        b.x.mul_(3)
        current_context().host_node("write", lambda: None, writes=[b.x_host])
        if failure is not None:
            raise failure
        b.x @ b.x  # shapes that do not fit

    before = snapshot(buffers)
    backend = TapeBackend()
    with pytest.raises(RuntimeError if failure is None else type(failure)):
        backend.capture(step, buffers)
    assert same(before, snapshot(buffers))
    with pytest.raises(RuntimeError, match="no step is running"):
        current_context()
    backend.capture(lambda b: None, buffers).replay()


def test_capture_restores_generators(buffers: StaticBuffers) -> None:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()

    def step(b: StaticBuffers) -> None:
        b.x.uniform_(generator=generator)

    recorded = TapeBackend().capture(step, buffers, generators=[generator])
    assert torch.equal(generator.get_state(), state)
    recorded.replay()
    assert torch.equal(buffers.x, torch.empty(4, 8).uniform_(generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("draws_again", [True, False])
def test_a_step_that_sets_the_state_of_a_generator_is_refused(buffers: StaticBuffers, draws_again: bool) -> None:
    generator = torch.Generator()

    def step(b: StaticBuffers) -> None:
        b.x.uniform_(generator=generator)
        generator.manual_seed(5)
        if draws_again:
            b.y.uniform_(generator=generator)

    with pytest.raises(CaptureError, match=r"\[generator\] the step seeds a generator or sets its state"):
        TapeBackend().capture(step, buffers, generators=[generator])


# host state frozen into a recording


class Host:
    """Host state that changes between the two recordings."""

    def __init__(self) -> None:
        self.number, self.flag, self.rows, self.name, self.column = 2.0, True, 2, "y", 1

    def change(self) -> None:
        self.number, self.flag, self.rows, self.name, self.column = 3.0, False, 3, "x", 2


HOST = Host()
PEEK: dict[str, Any] = {}


def baked_store(b: StaticBuffers) -> None:
    b.x[0] = HOST.number  # baked


def baked_extra(b: StaticBuffers) -> None:
    b.y.zero_()
    if HOST.flag:
        b.x.add_(1)  # baked


def baked_stream(b: StaticBuffers) -> None:
    context = current_context()
    event = context.record()
    with context.stream("one" if HOST.flag else "two"):
        context.wait(event)  # baked
        b.x.add_(1)
        end = context.record()
    context.wait(end)


def baked_device_value(b: StaticBuffers) -> None:
    b.y.add_(float(PEEK["array"][0]))  # baked


BAKED: dict[str, tuple[str, tuple[str, ...], Callable[[StaticBuffers], Any]]] = {
    "scalar": ("baked-scalar", ("2.0", "3.0"), lambda b: b.x.mul_(HOST.number)),  # baked
    "store": ("baked-scalar", ("2.0", "3.0"), baked_store),
    "slice": ("baked-scalar", ("2", "3"), lambda b: b.x[: HOST.rows].add_(1)),  # baked
    "index": ("baked-scalar", ("1", "2"), lambda b: b.x[:, HOST.column].add_(1)),  # baked
    "fill": ("baked-scalar", ("2.0", "3.0"), lambda b: b.y.copy_(torch.full((4, 8), HOST.number, device=b.device))),  # baked
    "operation": ("baked-branch", ("add_", "neg_"), lambda b: b.x.add_(1) if HOST.flag else b.x.neg_()),  # baked
    "extra": ("baked-branch", ("add_",), baked_extra),
    "buffer": ("baked-branch", ("'y'", "'x'"), lambda b: b[HOST.name].add_(1)),  # baked
    "stream": ("baked-branch", ("'one'", "'two'"), baked_stream),
    "host node": ("baked-branch", ("fill 2", "fill 3"), lambda b: current_context().host_node(f"fill {HOST.rows}", print)),  # baked
}


@pytest.mark.parametrize("name", BAKED)
def test_baked_values(buffers: StaticBuffers, name: str) -> None:
    rule, values, step = BAKED[name]
    HOST.__init__()  # type: ignore[misc]
    before = snapshot(buffers)
    TapeBackend().capture(step, buffers, check="twice")  # unchanged host state: no error
    with pytest.raises(CaptureError) as caught:
        TapeBackend().capture(step, buffers, check="twice", between=HOST.change)
    error = caught.value
    assert error.rule == rule and "# baked" in error.source and all(value in str(error) for value in values), str(error)
    assert same(before, snapshot(buffers))


def test_check_twice_finds_an_unrecorded_buffer_read(buffers: StaticBuffers) -> None:
    PEEK["array"] = buffers.index.numpy()  # shares the memory
    with pytest.raises(CaptureError) as caught:
        TapeBackend().capture(baked_device_value, buffers, check="twice")
    assert caught.value.rule == "baked-scalar" and "# baked" in caught.value.source
    assert buffers.index.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("fill", [0.5, float("inf"), float("nan")])
def test_check_twice_changes_every_number(fill: float) -> None:
    b = StaticBuffers([BufferSpec("y", (1,), torch.float32, fill=fill)])
    PEEK["array"] = b.y.numpy()
    with pytest.raises(CaptureError, match="baked-scalar"):
        TapeBackend().capture(baked_device_value, b, check="twice")


def test_check_twice_with_contents_that_an_operation_rejects() -> None:
    def step(b: StaticBuffers) -> None:
        b.one.copy_(b.one[b.index])

    b = StaticBuffers([BufferSpec("index", (1,), torch.int64), BufferSpec("one", (1,), torch.float32)])
    TapeBackend().capture(step, b, check="twice").replay()


def test_check_twice_with_a_buffer_of_float8() -> None:
    b = StaticBuffers([BufferSpec("x", (4,), torch.float8_e4m3fn, fill=2), BufferSpec("y", (4,), torch.float32)])

    def step(b: StaticBuffers) -> None:
        b.y.copy_(b.x)

    capture(step, b, backend="tape", check="twice").replay()
    assert b.y.tolist() == [2.0] * 4


def test_an_operation_may_return_a_conjugated_tensor() -> None:
    shapes = {"x": (1, 2), "factors": (2, 2)}
    b = StaticBuffers(
        [*(BufferSpec(name, shape, torch.complex64) for name, shape in shapes.items()), BufferSpec("pivots", (2,), torch.int32)]
    )
    b.x.fill_(1)
    b.factors.copy_((1 + 1j) * torch.eye(2))
    b.pivots.copy_(torch.tensor([1, 2]))

    def step(b: StaticBuffers) -> None:
        b.x.copy_(torch.linalg.lu_solve(b.factors, b.pivots, b.x, left=False))

    capture(step, b, backend="tape").replay()
    assert b.x.tolist() == [[0.5 - 0.5j] * 2]


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = torch.nn.Linear(3, 3)
    b = StaticBuffers([BufferSpec("x", (4, 3), torch.float32, fill=2)], constants={"model": model})

    def step(b: StaticBuffers) -> None:
        b.x.copy_(b.x.bfloat16() @ model.weight.to(torch.bfloat16).T)

    capture(step, b, backend="tape").replay()
    assert torch.equal(b.x, (torch.full((4, 3), 2.0).bfloat16() @ model.weight.bfloat16().T).float())


def test_replays_read_the_memory_of_the_capture_after_a_parameter_got_other_memory() -> None:
    model = torch.nn.Linear(8, 8)
    b = StaticBuffers([BufferSpec("x", (4, 8), torch.float32, fill=1), BufferSpec("y", (4, 8), torch.float32)], constants={"model": model})

    def step(b: StaticBuffers) -> None:
        b.y.copy_(model(b.x))

    recorded = capture(step, b, backend="tape")
    recorded.replay()
    before, addresses = b.y.clone(), {parameter.data_ptr() for parameter in model.parameters()}
    model.to(torch.float64)
    assert addresses.isdisjoint(torch.empty(n).data_ptr() for n in (64, 8) for _ in range(100))  # the memory is not given to others
    recorded.replay()
    assert torch.equal(b.y, before)


# replay


def test_replays_in_place(buffers: StaticBuffers) -> None:
    def step(b: StaticBuffers) -> None:
        hidden = torch.relu(b.x @ b.x.T) @ b.x
        values, where = hidden.max(dim=1)
        b.index.copy_(where)
        b.x.copy_(hidden.softmax(-1) + values[:, None])

    recorded = TapeBackend().capture(step, buffers)
    intermediates, fingerprint = [t.data_ptr() for t in recorded._memory], buffers.fingerprint()
    assert recorded.report.nbytes == sum(-(-t.untyped_storage().nbytes() // 64) * 64 for t in recorded._memory) > 0
    for _ in range(100):
        recorded.replay()
    assert [t.data_ptr() for t in recorded._memory] == intermediates and buffers.fingerprint() == fingerprint


def test_replay_keeps_no_memory(buffers: StaticBuffers) -> None:
    b = StaticBuffers([BufferSpec("x", (256, 256), torch.float32, fill=1)])

    def step(b: StaticBuffers) -> None:
        b.x.copy_((b.x @ b.x).softmax(-1).cumsum(1).sort(dim=1)[0])

    recorded = TapeBackend().capture(step, b)
    recorded.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(20):
            recorded.replay()
    kept = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    assert kept == 0


def test_new_recording_is_poisoned(buffers: StaticBuffers) -> None:
    def step(b: StaticBuffers) -> None:
        b.x.copy_(torch.empty(4, 8, device=b.device))
        b.index.copy_(torch.empty(4, dtype=torch.int64, device=b.device))

    TapeBackend().capture(step, buffers).replay()
    assert bool(buffers.x.isnan().all()) and int(buffers.index.min()) > 2**60


def test_poison_every_finds_reads_of_the_previous_replay(buffers: StaticBuffers) -> None:
    def step(b: StaticBuffers) -> None:
        scratch = torch.empty(4, 8, device=b.device)
        scratch[:2].copy_(b.x[:2])
        b.y.copy_(scratch)
        scratch.fill_(1)

    for poison, stale in (("first", False), ("every", True)):
        recorded = TapeBackend(poison=poison).capture(step, buffers)  # type: ignore[arg-type]
        recorded.replay()
        recorded.replay()
        assert bool(buffers.y[2:].isnan().any()) == stale


def test_tapes_share_buffers(buffers: StaticBuffers) -> None:
    backend = TapeBackend()

    def plus_one(b: StaticBuffers) -> None:
        b.x.copy_(b.x + 1)

    def twice(b: StaticBuffers) -> None:
        b.x.copy_(b.x * 2)

    add, double = backend.capture(plus_one, buffers), backend.capture(twice, buffers)
    assert add.report.nbytes > 0 == double.report.nbytes, "intermediates of later tapes are in the memory of earlier ones"
    assert backend.measure(twice, buffers).nbytes > 0
    for recorded in (add, double, add):
        recorded.replay()
    assert bool((buffers.x == 5).all()) and backend.stats.replays == 3


def test_report(buffers: StaticBuffers) -> None:
    def step(b: StaticBuffers) -> None:
        b.y.fill_(1)
        b.y.add_(b.x.exp())
        through_host(lambda: None, "walk")(b)

    report = TapeBackend().capture(step, buffers).report
    assert dict(report.nodes) == {"fill": 1, "kernel": 3, "copy": 2, "host": 1, "wait": 2}
    assert report.host_nodes == ("walk",) and report.nbytes == 4 * 8 * 4 and report.seconds > 0


def test_replay_ignores_the_grad_mode_and_autocast(buffers: StaticBuffers) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    b = StaticBuffers(SPECS, constants={"weight": weight})

    def step(b: StaticBuffers) -> None:
        b.x.copy_(b.x @ weight)

    recorded = TapeBackend().capture(step, b)
    run_eager(step, b)
    expected = b.x.clone()
    for context in (torch.enable_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        b.reset()
        with context:
            recorded.replay()
        assert torch.equal(b.x, expected) and not b.x.requires_grad


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x / y,
        lambda x, y: x * 1.3,
        lambda x, y: torch.atan2(x, y),
        lambda x, y: torch.clamp(x, min=1.5),
        lambda x, y: (x + 16777216 > 16777216.5) * 1.1,
        lambda x, y: torch.div(x, y, out=x.new_empty(x.shape, dtype=torch.float64)),
        lambda x, y: torch.where(x > 2, x, 0.7),
        lambda x, y: torch.full((4,), 0.1, device=x.device) + y,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_replay_ignores_the_default_dtype(operation: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    b = StaticBuffers([*(BufferSpec(name, (4,), torch.int64) for name in "xy"), BufferSpec("result", (4,), torch.float64)])

    def step(b: StaticBuffers) -> None:
        b.result.copy_(operation(b.x, b.y))

    recorded = TapeBackend().capture(step, b)
    b.x.copy_(torch.tensor([1, 2, 3, 1001]))
    b.y.copy_(torch.tensor([3, 7, 11, 13]))
    run_eager(step, b)
    expected = b.result.clone()
    b.result.zero_()
    torch.set_default_dtype(dtype)
    try:
        recorded.replay()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(b.result, expected)


@pytest.mark.parametrize("within_step", [False, True])
@pytest.mark.parametrize("context", [torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_capture_and_steps_inside_other_modes(context: Callable[[], Any], within_step: bool) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 8)).requires_grad_(False)
    b = StaticBuffers(SPECS, constants={"layer": layer})

    def step(b: StaticBuffers) -> None:
        with context() if within_step else contextlib.nullcontext():
            q = layer(b.x).reshape(1, 2, 4, 4)
            b.y.copy_(torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(4, 8) @ b.x.T @ b.x)

    with contextlib.nullcontext() if within_step else context():
        run_eager(step, b)  # autocast caches its casts of the weights
        recorded = TapeBackend().capture(step, b, check="twice")
        run_eager(step, b)
    expected = b.y.clone()
    b.y.zero_()
    recorded.replay()
    assert torch.equal(b.y, expected)


def test_public_capture_function(buffers: StaticBuffers) -> None:
    recorded = capture(through_host(doubling(buffers)), buffers, backend="tape")
    recorded.replay()
    assert bool((buffers.y == 2).all())
    assert make_backend("tape").name == "tape"


def test_arguments_are_checked(buffers: StaticBuffers) -> None:
    with pytest.raises(ValueError, match=r"poison: got 'never', expected one of 'first', 'every'"):
        TapeBackend(poison="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"check: got 'thrice', expected one of 'once', 'twice'"):
        TapeBackend().capture(lambda b: None, buffers, check="thrice")  # type: ignore[arg-type]
    for arguments, message in (
        ({"function": None}, "host_node.function of 'h': got None, expected a function"),
        ({"function": print, "reads": "x"}, "host_node.reads and writes of 'h': got 'x', expected tensors of pinned buffers"),
    ):
        with pytest.raises(ValueError, match=message):
            TapeBackend().capture(lambda b: current_context().host_node("h", **arguments), buffers)  # noqa: B023


_library = torch.library.Library("stepgraph_test_tape", "DEF")  # .out overloads that do not give the functional result
for _name in ("idle", "other", "broken"):
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.define(f"{_name}.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    _library.impl(_name, lambda x: x * 2, "CPU")
_library.impl("idle.out", lambda x, *, out: out, "CPU")
_library.impl("other.out", lambda x, *, out: out.copy_(x * 2).add_(2**-20), "CPU")
_library.impl("broken.out", lambda x, *, out: torch.mm(x, x, out=out), "CPU")


@pytest.mark.parametrize("name", ["idle", "other", "broken"])
def test_out_overload_is_tried_before_it_is_used(buffers: StaticBuffers, name: str) -> None:
    operation = getattr(torch.ops.stepgraph_test_tape, name)

    def step(b: StaticBuffers) -> None:
        b.y.copy_(operation(b.x))

    recorded = TapeBackend(poison="every").capture(step, buffers)
    recorded.replay()
    assert bool((buffers.y == 2).all()) and recorded.report.nodes["copied"] == 1


# host nodes


@pytest.mark.parametrize("asynchronous", [False, True])
def test_host_node_error_names_the_node_and_the_next_replay_works(buffers: StaticBuffers, asynchronous: bool) -> None:
    faults = [ZeroDivisionError("boom")]

    def work() -> None:
        if faults:
            raise faults.pop()
        doubling(buffers)()

    backend = TapeBackend(asynchronous=asynchronous)
    recorded = backend.capture(through_host(work, "fill row 3"), buffers)

    def replay() -> None:
        recorded.replay()
        backend.synchronize()

    with pytest.raises(HostNodeError, match="'fill row 3' failed: ZeroDivisionError: boom") as caught:
        replay()
    assert caught.value.node == "fill row 3" and isinstance(caught.value.__cause__, ZeroDivisionError)
    buffers.reset()
    replay()
    assert bool((buffers.y == 2).all()) and backend.stats.host_nodes == 2
    backend.close()


def test_an_interrupt_has_no_effect_on_later_replays(buffers: StaticBuffers) -> None:
    backend, interrupted = TapeBackend(), [threading.main_thread().ident or 0]

    def work() -> None:
        deadline = time.monotonic() + 10
        while not any(text.startswith("stream main: waits") for text in backend.active_work()) and time.monotonic() < deadline:
            time.sleep(1e-3)
        if interrupted:
            signal.pthread_kill(interrupted.pop(), signal.SIGINT)
        doubling(buffers)()

    recorded = backend.capture(through_host(work), buffers)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background with SIGINT ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            recorded.replay()
    finally:
        signal.signal(signal.SIGINT, before)
    for value in (3, 4):
        buffers.x.fill_(value)
        recorded.replay()
        assert bool((buffers.y == 2 * value).all())
    backend.close()


def test_error_on_any_stream_skips_the_rest_of_the_replay(buffers: StaticBuffers) -> None:
    """The streams wait for each other. If one fails, the replay raises its error, and the next replay works."""
    broken: set[str] = set()

    def node(name: str) -> Callable[[], None]:
        def work() -> None:
            if name in broken:
                raise ValueError(name)

        return work

    def step(b: StaticBuffers) -> None:
        context, streams = current_context(), ("one", "two", "three")
        for turn in range(2):
            events = [context.record()]
            for stream in streams:
                with context.stream(stream):
                    for event in events:
                        context.wait(event)
                    context.host_node(f"{stream} {turn}", node(f"{stream} {turn}"))
                    events.append(context.record())
            for event in events:
                context.wait(event)
        b.x.add_(1)

    backend = TapeBackend()
    recorded = backend.capture(step, buffers)
    for name in ("one 0", "two 0", "three 0", "one 1", "three 1"):
        broken.add(name)
        with pytest.raises(HostNodeError, match=name):
            recorded.replay()
        broken.clear()
        buffers.reset()
        recorded.replay()
        assert bool((buffers.x == 2).all())
    backend.close()


def test_operation_that_fails_in_a_replay_names_its_line(buffers: StaticBuffers) -> None:
    def step(b: StaticBuffers) -> None:
        b.x.copy_(b.y[b.index])  # out of range later

    recorded = TapeBackend().capture(step, buffers)
    buffers.index.fill_(99)
    with pytest.raises(RuntimeError, match=r"index, recorded at .*test_backend.py:\d+, failed in a replay: .*out(side)? of") as caught:
        recorded.replay()
    assert isinstance(caught.value.__cause__, IndexError)
    buffers.index.fill_(3)
    recorded.replay()


@needs_c
def test_consecutive_kernels_in_c_are_one_call_from_python(buffers: StaticBuffers) -> None:
    """A kernel that fails names its own line, and the kernels before it have run."""

    def step(b: StaticBuffers) -> None:
        b.counts[0].copy_(b.index[:1] + 1)
        b.x.copy_(b.y[b.index])  # out of range later
        b.counts[1].copy_(b.index[:1] + 2)

    recorded = TapeBackend().capture(step, buffers)
    (segment,) = recorded._programs[MAIN]
    recorded.replay()
    assert buffers.counts[:, 0].tolist() == [1, 2]
    buffers.index.fill_(99)
    line = step.__code__.co_firstlineno + 2
    with pytest.raises(RuntimeError, match=rf"index, recorded at .*test_backend.py:{line}, failed in a replay: .*outside of its table"):
        recorded.replay()
    assert buffers.counts[:, 0].tolist() == [100, 2]
    assert isinstance(segment, Segment) and len(segment.nodes) > len(segment._calls) == 1


def test_undeclared_write_of_a_host_node(buffers: StaticBuffers) -> None:
    def work() -> None:
        doubling(buffers)()
        buffers.x_host[2, 3] = 9

    TapeBackend().capture(through_host(work), buffers).replay()
    backend = TapeBackend(verify_host_nodes=True)
    with pytest.raises(HostNodeError, match="'double' failed: RuntimeError: undeclared write to 'x_host'"):
        backend.capture(through_host(work), buffers).replay()
    with pytest.raises(HostNodeError, match="undeclared write"):
        TapeBackend(poison="every").capture(through_host(work), buffers).replay()


def test_concurrent_copy_is_not_an_undeclared_write(buffers: StaticBuffers) -> None:
    started = threading.Event()

    def work() -> None:  # ends after the concurrent copy
        started.set()
        deadline = time.monotonic() + 10
        while buffers.x_host[3, 7] == 0 and time.monotonic() < deadline:
            time.sleep(1e-3)

    def step(b: StaticBuffers) -> None:
        context = current_context()
        fork = context.record()
        with context.stream("side"):
            context.wait(fork)
            context.host_node("slow", work, writes=[b.ring_host])
            join = context.record()
        b.x_host.copy_(b.x, non_blocking=True)
        context.wait(join)

    backend = TapeBackend(verify_host_nodes=True, delay=lambda name: started.wait(10) and None if name == "main" else None)
    backend.capture(step, buffers).replay()
    assert started.is_set() and bool((buffers.x_host == 1).all())
    backend.close()


def test_streams_run_concurrently(buffers: StaticBuffers) -> None:
    """The main stream continues while the host node runs; checked by a handshake, not by time."""
    seen, arrived = threading.Event(), threading.Event()

    def work() -> None:
        arrived.set()
        assert seen.wait(10)

    def delay(name: str) -> None:
        if name == "main" and arrived.wait(10):
            seen.set()

    def step(b: StaticBuffers) -> None:
        context = current_context()
        fork = context.record()
        with context.stream("side"):
            context.wait(fork)
            context.host_node("waits for main", work)
            join = context.record()
        b.x.add_(1)
        context.wait(join)

    backend = TapeBackend(delay=delay)
    backend.capture(step, buffers).replay()
    assert seen.is_set()
    backend.close()


def test_threads_are_reused_and_end(buffers: StaticBuffers) -> None:
    before = {*threading.enumerate()}  # other threads may end meanwhile
    backend = TapeBackend(asynchronous=True)
    recorded = [backend.capture(through_host(doubling(buffers)), buffers) for _ in range(3)]
    for _ in range(10):
        for one in recorded:
            one.replay()
    backend.synchronize()
    assert len({*threading.enumerate()} - before) == 3
    backend.close()
    assert {*threading.enumerate()} <= before


def test_replays_of_several_threads_run_one_after_the_other(buffers: StaticBuffers) -> None:
    backend = TapeBackend()
    recordings = [backend.capture(through_host(doubling(buffers)), buffers), backend.capture(add_one, buffers)]

    def replay_all() -> None:
        for each in recordings * 50:
            each.replay()

    threads = [threading.Thread(target=replay_all, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert bool((buffers.x == 401).all()) and backend.stats.host_nodes == 200
    backend.close()


def test_a_stream_may_have_the_name_of_the_device_thread(buffers: StaticBuffers) -> None:
    backend = TapeBackend(asynchronous=True)
    backend.capture(through_host(doubling(buffers), stream="device"), buffers).replay()
    assert backend.event().wait(10) and bool((buffers.y == 2).all())
    backend.close()


def test_another_thread_may_capture_during_a_look_at_all_tapes(buffers: StaticBuffers, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, captured, unknown = threading.Event(), threading.Event(), torch.ones(4, 8)
    tapes = [TapeBackend().capture(add_one, buffers)]

    def capture_when_wanted() -> None:
        assert wanted.wait(10)
        tapes.append(TapeBackend().capture(add_one, StaticBuffers(SPECS)))
        captured.set()

    def owns(_: object, key: int) -> bool:
        wanted.set()
        return not captured.wait(10)

    thread = threading.Thread(target=capture_when_wanted)
    thread.start()
    monkeypatch.setattr(tape.Tape, "owns", owns)
    with pytest.raises(CaptureError, match="unregistered-input"):
        TapeBackend().capture(lambda b: b.x.add_(unknown), buffers)  # type: ignore[arg-type]
    thread.join()


def test_close_without_waiting_ends_the_threads(buffers: StaticBuffers) -> None:
    threads, tapes = threading.active_count(), len(tape._tapes)
    recorded = capture(through_host(doubling(buffers)), buffers, backend=TapeBackend(asynchronous=True))
    recorded.replay()
    dead = weakref.ref(recorded)
    deadline = time.monotonic() + 10
    del recorded
    while (dead() is not None or threading.active_count() > threads) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert dead() is None and threading.active_count() <= threads and len(tape._tapes) <= tapes


def test_process_exits_cleanly_without_close() -> None:
    """A process may exit with replays in flight and an open backend."""
    program = """
import time, torch
from stepgraph.graphs import BufferSpec, StaticBuffers
from stepgraph.graphs.context import COPY_STREAM, MAIN, current_context
from stepgraph.graphs.tape.backend import TapeBackend
def step(b):
    context = current_context()
    fork = context.record()
    with context.stream("side"):
        context.wait(fork)
        b.y.copy_(b.y @ b.y)
        join = context.record()
    b.x.copy_(b.x @ b.x)
    context.wait(join)
buffers = StaticBuffers([BufferSpec(name, (64, 64), torch.float32) for name in "xy"])
backend = TapeBackend(asynchronous=True)
recorded = backend.capture(step, buffers)
for _ in range(50):
    recorded.replay()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# asynchronous launches


def test_asynchronous_order(buffers: StaticBuffers) -> None:
    gate, order = threading.Event(), []
    backend = TapeBackend(asynchronous=True)
    recorded = backend.capture(through_host(doubling(buffers)), buffers)
    backend.run(lambda: gate.wait(10))
    backend.run(lambda: order.append(float(buffers.y.sum())))
    recorded.replay()
    first = backend.event()
    recorded.replay()
    backend.run(lambda: order.append(float(buffers.y.sum())))
    last = backend.event()
    assert not first.query() and not last.query() and order == [] and backend.stats.event_waits == 0
    gate.set()
    first.wait()
    assert first.query()
    last.wait()
    assert order == [0.0, 4.0 * 32] and bool((buffers.x == 3).all())
    assert (backend.stats.replays, backend.stats.event_waits, backend.stats.syncs, backend.stats.host_nodes) == (2, 2, 0, 2)
    backend.synchronize()
    assert backend.stats.syncs == 1
    backend.close()


def test_asynchronous_rounds_stay_in_order_under_delays(buffers: StaticBuffers) -> None:
    seen: list[float] = []

    def work() -> None:
        doubling(buffers)()
        seen.append(float(buffers.x_host[0, 0]))

    backend = TapeBackend(asynchronous=True, delay=lambda name: time.sleep(1e-3 if name == "double" else 0))
    recorded = backend.capture(through_host(work), buffers)
    for _ in range(20):
        recorded.replay()
    backend.synchronize()
    assert seen == [float(number) for number in range(1, 21)]
    backend.close()


def test_error_of_the_delay_of_a_copy_is_raised_and_later_copies_run() -> None:
    delays, copied = iter([True, False]), list[int]()
    backend = TapeBackend(asynchronous=True, delay=lambda name: name == COPY_STREAM and 1 // (not next(delays)))
    with pytest.raises(ZeroDivisionError):
        assert backend.copy_aside(lambda: copied.append(1), after_launched=True).wait(10)
    assert backend.copy_aside(lambda: copied.append(2), after_launched=True).wait(10)
    assert copied[-1] == 2
    backend.close()


@pytest.mark.parametrize("deliver", ["replay", "run", "event", "synchronize"])
def test_asynchronous_error_is_raised_once(buffers: StaticBuffers, deliver: str) -> None:
    backend = TapeBackend(asynchronous=True)
    ran: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError("late")

    recorded = backend.capture(add_one, buffers)
    gate = threading.Event()
    backend.run(lambda: gate.wait(10))
    backend.run(fail)
    backend.run(lambda: ran.append(1))
    event = backend.event()
    gate.set()
    while not event.query():
        time.sleep(1e-3)
    calls: dict[str, Callable[[], object]] = {
        "replay": recorded.replay,
        "run": lambda: backend.run(lambda: None),
        "event": event.wait,
        "synchronize": backend.synchronize,
    }
    with pytest.raises(ZeroDivisionError, match="late"):
        calls[deliver]()
    assert ran == [1]  # the queue continued
    recorded.replay()
    backend.synchronize()
    assert bool((buffers.x == 2).all())
    backend.close()


def test_synchronous_calls_raise_at_once(buffers: StaticBuffers) -> None:
    backend = TapeBackend()
    with pytest.raises(ZeroDivisionError):
        backend.run(lambda: 1 / 0)
    event = backend.event()
    assert event.query()
    event.wait()
    assert backend.stats.event_waits == 1


def test_run_disables_gradients(buffers: StaticBuffers) -> None:
    modes: list[bool] = []
    for asynchronous in (False, True):
        backend = TapeBackend(asynchronous=asynchronous)
        backend.run(lambda: modes.append(torch.is_grad_enabled()))
        backend.synchronize()
        backend.close()
    assert modes == [False, False]


# close


@pytest.mark.parametrize("asynchronous", [False, True])
def test_close(buffers: StaticBuffers, asynchronous: bool) -> None:
    backend = TapeBackend(asynchronous=asynchronous)
    recorded = backend.capture(through_host(doubling(buffers)), buffers)
    recorded.replay()
    backend.close()
    assert bool((buffers.y == 2).all())
    backend.close()
    calls = (
        recorded.replay,
        backend.synchronize,
        backend.event,
        lambda: backend.run(lambda: None),
        lambda: backend.capture(print, buffers),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="the backend is closed"):
            call()


def test_close_warns_about_an_error_that_was_not_raised() -> None:
    backend = TapeBackend(asynchronous=True)
    backend.run(lambda: 1 / 0)
    with pytest.warns(RuntimeWarning, match="never raised: division by zero"):
        backend.close()


def test_an_error_in_the_work_launched_after_a_failed_replay_is_raised_once(buffers: StaticBuffers) -> None:
    backend = TapeBackend(asynchronous=True)
    launched = threading.Event()
    backend.run(lambda: launched.wait(10))
    for divisor in (0, 0, 1, 0):
        backend.run(lambda divisor=divisor: 1 / divisor)  # type: ignore[misc]
    launched.set()
    with pytest.raises(ZeroDivisionError):
        backend.synchronize()
    backend.synchronize()
    backend.close()


def test_replay_inside_a_capture_is_refused(buffers: StaticBuffers) -> None:
    backend = TapeBackend()
    recorded = backend.capture(lambda b: None, buffers)
    for call in (recorded.replay, lambda: backend.run(lambda: None), backend.event().wait):
        with pytest.raises(CaptureError, match="inside a step that is being captured"):
            backend.capture(lambda b, call=call: call(), buffers)  # type: ignore[misc]
