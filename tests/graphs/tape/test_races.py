"""The race checker: exact to the element, covers everything in the schemas, no report for accesses that events order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepgraph.graphs.backends import run_eager
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.context import CaptureContext, StreamEvent, current_context
from stepgraph.graphs.errors import CaptureError
from stepgraph.graphs.tape.backend import TapeBackend
from stepgraph.graphs.tape.races import region_of

SPECS = [
    BufferSpec("a", (6, 8), torch.float32),
    BufferSpec("b", (6, 8), torch.float32),
    BufferSpec("index", (6,), torch.int64),
    BufferSpec("a_host", (6, 8), torch.float32, memory="pinned"),
    BufferSpec("b_host", (6, 8), torch.float32, memory="pinned"),
]
GENERATOR = torch.Generator()
Work = Callable[[StaticBuffers], object]


def forked(main: Work, side: Work, *, joined_first: bool = False, after: Work = lambda b: None) -> Callable[[StaticBuffers], None]:
    """A step with `main` and `side` on two streams: unordered, or `side` ordered before `main`."""

    def step(b: StaticBuffers) -> None:
        context = current_context()
        fork = context.record()
        with context.stream("side"):
            context.wait(fork)
            side(b)
            join = context.record()
        if joined_first:
            context.wait(join)
        main(b)
        context.wait(join)
        after(b)

    return step


def host(name: str, **access: list[Tensor]) -> None:
    current_context().host_node(name, lambda: None, **access)


# each pair conflicts, and is legal once an event orders it

PAIRS: dict[str, tuple[str, Work, Work]] = {
    "write after read": ("'a'", lambda b: b.a.add_(1), lambda b: b.b.copy_(b.a)),
    "read of a write": ("'a'", lambda b: b.b.copy_(b.a), lambda b: b.a.fill_(3)),
    "two writes": ("'a'", lambda b: b.a[2:4].fill_(1), lambda b: b.a[3:5].fill_(2)),
    "functional read": ("'a'", lambda b: b.a + 1, lambda b: b.a.mul_(2)),
    "crossing views": ("'a'", lambda b: b.a[:, 3].fill_(1), lambda b: b.b.copy_(b.a[2:3])),
    "list argument": ("'a'", lambda b: torch.cat([b.b, b.a]), lambda b: b.a[5].zero_()),
    "index write": ("'a'", lambda b: b.a.index_put_((b.index,), b.b[0]), lambda b: b.a[0] + 1),
    "out argument": ("'a'", lambda b: torch.add(b.b, 1, out=b.a), lambda b: b.a.sum()),
    "index itself": ("'index'", lambda b: b.a[b.index], lambda b: b.index.add_(0)),
    "host node reads what is copied": (
        "'a_host'",
        lambda b: b.a_host.copy_(b.a, non_blocking=True),
        lambda b: host("reader", reads=[b.a_host], writes=[b.b_host]),
    ),
    "host node writes what is copied": (
        "'b_host'",
        lambda b: b.b.copy_(b.b_host, non_blocking=True),
        lambda b: host("writer", writes=[b.b_host]),
    ),
    "two host nodes": ("'a_host'", lambda b: host("one", writes=[b.a_host[1:3]]), lambda b: host("two", reads=[b.a_host[2]])),
    "one generator": ("generator", lambda b: b.a.uniform_(generator=GENERATOR), lambda b: b.b.uniform_(generator=GENERATOR)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_planted_race(name: str) -> None:
    memory, main, side = PAIRS[name]
    buffers = StaticBuffers(SPECS)
    backend = TapeBackend()
    with pytest.raises(CaptureError) as caught:
        backend.capture(forked(main, side), buffers, generators=[GENERATOR])
    error, text = caught.value, str(caught.value)
    assert error.rule == "race" and memory in text
    assert "'main'" in text and "'side'" in text and text.count(__file__) >= 3, text
    assert "lambda" in error.source
    backend.capture(forked(main, side, joined_first=True), buffers, generators=[GENERATOR]).replay()
    backend.close()


def test_message_names_both_sides() -> None:
    def step(b: StaticBuffers) -> None:
        context = current_context()
        b.a_host.copy_(b.a, non_blocking=True)
        fork = context.record()
        with context.stream("grammar"):
            context.wait(fork)
            context.host_node("fill row 0", lambda: None, reads=[b.a_host], writes=[b.b_host])
            join = context.record()
        b.b.copy_(b.b_host, non_blocking=True)  # too early
        context.wait(join)

    with pytest.raises(CaptureError) as caught:
        TapeBackend().capture(step, StaticBuffers(SPECS))
    text = str(caught.value)
    assert "host node 'fill row 0' on stream 'grammar'" in text and "copy_ on stream 'main'" in text
    assert "writes 'b_host'" in text and "reads it" in text and "too early" in caught.value.source


# each pair is unordered and shares a buffer, but no written element

DISJOINT: dict[str, tuple[Work, Work]] = {
    "two reads": (lambda b: b.a + 1, lambda b: b.b.copy_(b.a)),
    "rows": (lambda b: b.a[:3].fill_(1), lambda b: b.a[3:].fill_(2)),
    "columns": (lambda b: b.a[:, :4].fill_(1), lambda b: b.a[:, 4:].fill_(2)),
    "interleaved columns": (lambda b: b.a[:, ::2].fill_(1), lambda b: b.b[:, 1::2].copy_(b.a[:, 1::2])),
    "one column each": (lambda b: b.a[:, 2].fill_(1), lambda b: b.a[:, 3].fill_(2)),
    "empty view": (lambda b: b.a[:0].fill_(1), lambda b: b.a.fill_(2)),
    "expanded read": (lambda b: b.a[1:].fill_(1), lambda b: b.a[:1].expand(6, 8) + b.b),
    "views only": (lambda b: b.a.view(48)[3:7].unsqueeze(0), lambda b: b.a.fill_(2)),
    "host rows": (lambda b: host("one", writes=[b.a_host[:2]]), lambda b: host("two", writes=[b.a_host[2:]])),
}


@pytest.mark.parametrize("name", DISJOINT)
def test_disjoint_accesses_are_no_race(name: str) -> None:
    main, side = DISJOINT[name]
    TapeBackend().capture(forked(main, side), StaticBuffers(SPECS)).replay()


def test_order_passes_through_a_third_stream() -> None:
    def step(b: StaticBuffers, last_wait: bool) -> None:
        context = current_context()
        b.a.fill_(1)
        start = context.record()
        with context.stream("one"):
            context.wait(start)
            b.a.mul_(3)
            first = context.record()
        with context.stream("two"):
            context.wait(first if last_wait else start)
            b.a.add_(2)
            second = context.record()
        context.wait(first)
        context.wait(second)
        b.b.copy_(b.a)

    buffers = StaticBuffers(SPECS)
    backend = TapeBackend(delay=lambda name: time.sleep(random.random() * 1e-3))
    recorded = backend.capture(lambda b: step(b, True), buffers)
    for _ in range(5):
        recorded.replay()
        assert bool((buffers.b == 5).all())
    with pytest.raises(CaptureError, match=r"\[race\]"):
        backend.capture(lambda b: step(b, False), buffers)


# exactness of the overlap test, against sets of bytes


BASE = torch.zeros(96, dtype=torch.float32)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.int16, torch.int64]))
    typed = BASE.view(dtype)
    sizes = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    strides = draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    reach = sum(max(size - 1, 0) * stride for size, stride in zip(sizes, strides, strict=True))
    offset = draw(st.integers(0, max(typed.numel() - reach - 1, 0)))
    return typed.as_strided(sizes, strides, offset) if reach < typed.numel() else typed


def bytes_of(view: Tensor) -> set[int]:
    offsets = {view.storage_offset()} if view.numel() else set()
    for size, stride in zip(view.shape, view.stride(), strict=True):
        offsets = {offset + step * stride for offset in offsets for step in range(size)}
    item = view.element_size()
    return {int(offset) * item + byte for offset in offsets for byte in range(item)}


@given(views(), views())
@settings(max_examples=400)
def test_overlap_is_exact(a: Tensor, b: Tensor) -> None:
    assert np.shares_memory(region_of(a), region_of(b)) == bool(bytes_of(a) & bytes_of(b))


# random programs: without a reported race, replays equal eager runs under any delays of the streams

STREAMS = ("main", "one", "two")
_row = st.integers(0, 2)
_operation = st.one_of(
    st.tuples(st.sampled_from(["add", "mul", "fill", "mix", "neg"]), st.sampled_from(STREAMS), _row, _row),
    st.tuples(st.sampled_from(["record"]), st.sampled_from(STREAMS), _row, _row),
    st.tuples(st.sampled_from(["wait"]), st.sampled_from(STREAMS), st.integers(0, 40), _row),
    st.tuples(st.sampled_from(["host"]), st.sampled_from(STREAMS), _row, _row),
)


def random_step(program: list[tuple[str, str, int, int]]) -> Callable[[StaticBuffers], None]:
    def step(b: StaticBuffers) -> None:
        context = current_context()
        events = [context.record()]
        members = {"main"}
        for number, (kind, stream, i, j) in enumerate(program):
            with context.stream(stream):
                if stream not in members:
                    context.wait(events[0])
                    members.add(stream)
                issue(b, context, events, kind, i, j, number)
        for stream in sorted(members - {"main"}):
            with context.stream(stream):
                end = context.record()
            context.wait(end)

    return step


def issue(b: StaticBuffers, context: CaptureContext, events: list[StreamEvent], kind: str, i: int, j: int, number: int) -> None:
    if kind == "record":
        events.append(context.record())
    elif kind == "wait":
        context.wait(events[i % len(events)])
    elif kind == "host":
        b.a_host[j].copy_(b.a[j], non_blocking=True)
        context.host_node(f"host {number}", halve(b.b_host[i], b.a_host[j]), reads=[b.a_host[j]], writes=[b.b_host[i]])
        b.b[i].copy_(b.b_host[i], non_blocking=True)
    else:
        OPERATIONS[kind](b, i, j, (number + 1) / 16)


def halve(target: Tensor, source: Tensor) -> Callable[[], None]:
    def work() -> None:
        target.copy_(source).mul_(0.5)

    return work


OPERATIONS: dict[str, Callable[[StaticBuffers, int, int, float], object]] = {
    "add": lambda b, i, j, scale: b.a[2 * i : 2 * i + 2].add_(b.b[j], alpha=scale),
    "mul": lambda b, i, j, scale: b.b[:, 3 * j : 3 * j + 2].mul_(1 + scale),
    "fill": lambda b, i, j, scale: b.a[:, i::3].fill_(scale),
    "mix": lambda b, i, j, scale: b.a[i].copy_((b.a[j] * scale + b.b[i]).tanh()),
    "neg": lambda b, i, j, scale: b.b[i].copy_(-b.b[i] + b.a[j, :1]),
}


class Shaken:
    """Short random sleeps before host nodes and stream segments."""

    def __init__(self, seed: int) -> None:
        self._random, self._lock = random.Random(seed), threading.Lock()

    def __call__(self, name: str) -> None:
        with self._lock:
            pause = self._random.choice((0, 0, 2e-4, 8e-4))
        time.sleep(pause)


VERDICTS = {"race": 0, "replayed": 0}


@given(st.lists(_operation, min_size=2, max_size=14), st.integers(0, 1000))
@settings(max_examples=200)
def test_random_programs(program: list[tuple[str, str, int, int]], seed: int) -> None:
    buffers, step = StaticBuffers(SPECS), random_step(program)
    backend = TapeBackend(delay=Shaken(seed), poison="every")
    start = {name: torch.randn(buffers[name].shape, generator=torch.Generator().manual_seed(seed)) for name in ("a", "b")}

    def outcome(repeat: Callable[[], None]) -> list[Tensor]:
        buffers.reset()
        for name, tensor in start.items():
            buffers[name].copy_(tensor)
        repeat()
        repeat()
        return [buffers[name].clone() for name in buffers]

    try:
        recorded = backend.capture(step, buffers)
    except CaptureError as error:
        if error.rule != "race":
            raise
        VERDICTS["race"] += 1
        return
    expected = outcome(lambda: run_eager(step, buffers))
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(expected, outcome(recorded.replay), strict=True))
    VERDICTS["replayed"] += 1
    backend.close()


def test_random_programs_included_legal_and_racing_ones() -> None:
    if sum(VERDICTS.values()):  # the test above ran in this process
        assert min(VERDICTS.values()) >= 20, VERDICTS
