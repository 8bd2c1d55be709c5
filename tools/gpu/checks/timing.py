"""Figures: what a launch, a host node and a round cost here. Never a verdict: times depend on the machine and its company."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from ctypes import addressof

import torch

from stepgraph.graphs import BufferSpec, GraphKey, StaticBuffers, current_context, run_eager
from stepgraph.graphs.capture import Backend, Recorded
from stepgraph.sampling.grammar.link.layout import CallListStruct, CallStruct
from stepgraph.sampling.grammar.link.library import Unavailable, load
from tools.gpu.checks.context import Context, Figures, microseconds, summary
from tools.gpu.checks.states import ROWS, RoundBench


def _finished(backend: Backend, recorded: Recorded) -> None:
    recorded.replay()
    backend.synchronize()


def _host_node_graphs(backend: Backend, nodes: int) -> tuple[Recorded, Recorded, list[float]]:
    """A graph of one kernel, the same with host nodes behind it, and the times at which these ran."""
    buffers = StaticBuffers([BufferSpec("x", (32,), torch.float32)], backend.device)
    times: list[float] = []

    def plain(b: StaticBuffers) -> None:
        b.x.add_(1)

    def with_nodes(b: StaticBuffers) -> None:
        b.x.add_(1)
        for place in range(nodes):
            current_context().host_node(f"node {place}", lambda: times.append(time.monotonic()))

    return backend.capture(plain, buffers), backend.capture(with_nodes, buffers), times


class Stamp:
    """A native host node that notes when it has run, in seconds of `time.monotonic`; without the interpreter."""

    def __init__(self) -> None:
        library = load()
        self._nothing = CallListStruct(None, 0)
        self._calls = (CallStruct * 1)(CallStruct(library.run_calls_address, addressof(self._nothing)))
        self._list = CallListStruct(self._calls, 1)
        self.native_address, self.native_data = library.run_calls_address, addressof(self._list)

    @property
    def finished(self) -> float:
        return float(self._calls[0].finished)

    def __call__(self) -> None:
        raise AssertionError("a native node is not called from Python")


def gil_hold(context: Context) -> Figures:
    """Launch to host node, in microseconds, alone and beside a thread that runs Python: a node in Python, and a native one."""
    repeats, figures = context.count(300, 40), dict[str, object]()
    with context.backend(asynchronous=True) as backend:
        _, recorded, times = _host_node_graphs(backend, 1)

        def in_python() -> float:
            times.clear()
            _finished(backend, recorded)
            assert len(times) == 1
            return times[0]

        nodes = {"": in_python}
        with contextlib.suppress(Unavailable):
            stamp = Stamp()
            stamped = _stamped(backend, stamp)

            def natively() -> float:
                _finished(backend, stamped)
                return stamp.finished

            nodes["native_"] = natively
        for busy, (name, ran_at) in itertools.product((False, True), nodes.items()):
            with _burning() if busy else contextlib.nullcontext():
                waits = []
                for _ in range(repeats):
                    start = time.monotonic()
                    waits.append((ran_at() - start) * 1e6)
            figures[f"{name}us_busy" if busy else f"{name}us_alone"] = summary(waits)
    return figures


def _stamped(backend: Backend, stamp: Stamp) -> Recorded:
    buffers = StaticBuffers([BufferSpec("x", (32,), torch.float32)], backend.device)

    def step(b: StaticBuffers) -> None:
        b.x.add_(1)
        current_context().host_node("stamp", stamp)

    return backend.capture(step, buffers)


@contextlib.contextmanager
def _burning() -> Iterator[None]:
    stop = threading.Event()
    burner = threading.Thread(target=_burn, args=(stop,), daemon=True)
    burner.start()
    try:
        yield
    finally:
        stop.set()
        burner.join()


def _burn(stop: threading.Event) -> None:
    total = 0
    while not stop.is_set():
        for number in range(1000):
            total += number


def figures(context: Context) -> Figures:
    """Medians: launch and host-node cost, and a round's replay against the same round run eagerly, interleaved."""
    repeats = context.count(200, 20)
    found: Figures = {}
    with context.backend(asynchronous=True) as backend:
        nodes = 8
        plain, with_nodes, _ = _host_node_graphs(backend, nodes)
        alone, loaded, launch = [], [], []
        for _ in range(repeats):
            alone += microseconds(lambda: _finished(backend, plain), 1)
            loaded += microseconds(lambda: _finished(backend, with_nodes), 1)
            launch += microseconds(plain.replay, 1)
            backend.synchronize()
        found["launch_us"], found["launch_and_wait_us"] = summary(launch), summary(alone)
        found["host_node_us"] = round((summary(loaded)["median"] - summary(alone)["median"]) / nodes, 2)
    for k, constrained in ((0, False), (4, False), (4, True)):
        with context.backend(asynchronous=True) as backend:
            found[f"round K={k} {'constrained' if constrained else 'free'}"] = _round_times(context, backend, k, constrained)
    return found


def _round_times(context: Context, backend: Backend, k: int, constrained: bool) -> Figures:
    bench = RoundBench(backend, k)
    step = bench.round.step(GraphKey(ROWS, constrained))
    recorded = backend.capture(step, bench.buffers)
    bench.randomise(1)
    start = bench.contents()
    eager, replay = [], []

    def prepare() -> None:
        backend.run(lambda: bench.put(start))
        backend.synchronize()
        if constrained:
            bench.push_batch(ROWS)

    def eagerly() -> None:
        backend.run(lambda: run_eager(step, bench.buffers))
        backend.synchronize()

    for _ in range(context.count(60, 6)):
        prepare()
        eager += microseconds(eagerly, 1)
        prepare()
        replay += microseconds(lambda: _finished(backend, recorded), 1)
    ratio = round(summary(eager)["median"] / summary(replay)["median"], 2)
    return {
        "eager_us": summary(eager),
        "replay_us": summary(replay),
        "eager_over_replay": ratio,
        "nodes": sum(recorded.report.nodes.values()),
    }
