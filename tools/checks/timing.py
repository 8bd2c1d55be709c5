"""Figures: what a launch, a host node and a round cost here. Never a verdict: times depend on the machine and its company."""

from __future__ import annotations

import threading
import time

import torch

from stepgraph.graphs import BufferSpec, GraphKey, StaticBuffers, current_flow, run_eager
from stepgraph.graphs.capture import Backend, Recorded
from tools.checks.context import Context, Figures, microseconds, summary
from tools.checks.states import ROWS, RoundBench


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
            current_flow().host_node(f"node {place}", lambda: times.append(time.perf_counter()))

    return backend.capture(plain, buffers), backend.capture(with_nodes, buffers), times


def gil_hold(context: Context) -> Figures:
    """Launch to host node, in microseconds, alone and while another thread runs Python bytecode: what a native node avoids."""
    repeats, figures = context.count(300, 40), dict[str, object]()
    with context.backend(asynchronous=True) as backend:
        _, recorded, times = _host_node_graphs(backend, 1)
        for busy in (False, True):
            stop = threading.Event()
            burner = threading.Thread(target=_burn, args=(stop,), daemon=True)
            if busy:
                burner.start()
            waits = []
            for _ in range(repeats):
                times.clear()
                start = time.perf_counter()
                _finished(backend, recorded)
                assert len(times) == 1
                waits.append((times[0] - start) * 1e6)
            stop.set()
            if busy:
                burner.join()
            figures["us_busy" if busy else "us_alone"] = summary(waits)
    return figures


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
            bench.announce(ROWS)

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
