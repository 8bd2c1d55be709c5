"""What it costs to ask the host in the midst of a graph: host nodes, against a thread that spins on pinned memory; conditional nodes."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stepgraph.graphs import BufferSpec, StaticBuffers, current_context
from stepgraph.graphs.capture import Backend, Recorded
from stepgraph.sampling.grammar.link.library import Unavailable
from tools.gpu.checks.context import Context, Figures, Skipped, summary
from tools.gpu.checks.driver_calls import WAIT_EQUAL, DriverCalls, MemsetChain
from tools.gpu.checks.timing import Stamp

INSIDE = 16  # times that a graph asks: what a launch costs is shared by them
Ask = Callable[[StaticBuffers], None]


@contextlib.contextmanager
def answering(flags: Tensor) -> Iterator[None]:
    """A thread that answers every question: sees the first word set, clears it, sets the second."""
    words, stop = flags.numpy(), threading.Event()

    def answer() -> None:
        while not stop.is_set():
            if words[0]:
                words[0] = 0
                words[1] = 1

    thread, interval = threading.Thread(target=answer, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # the launching thread needs the interpreter, too
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def host_node_latency(context: Context) -> Figures:
    """Microseconds that a graph is longer for each question to the host: a native node, a Python one, a wait for a value, a spin kernel."""
    found: Figures = {}
    with context.backend(asynchronous=True) as backend:
        buffers = StaticBuffers(
            [BufferSpec("x", (32,), torch.float32), BufferSpec("flags_host", (2,), torch.int32, "pinned")], backend.device
        )
        graphs = {"nothing": backend.capture(_asking(lambda b: None), buffers)}
        with answering(buffers.flags_host):  # a capture on a GPU runs the step once before
            for name, ask in _ways(context, buffers, found):
                try:
                    graphs[name] = backend.capture(_asking(ask), buffers)
                except RuntimeError as refusal:
                    found[name] = f"not available: {refusal}"
            times: dict[str, list[float]] = {name: [] for name in graphs}
            for turn in context.turns(2 if context.rehearsal else 200, least=2):
                for name, graph in graphs.items():
                    seconds = _seconds(context, backend, graph)
                    if turn:  # the first launch uploads the graph
                        times[name].append(seconds * 1e6 / INSIDE)
    nothing = statistics.median(times.pop("nothing"))
    for name, each in times.items():
        found[name] = {"us": round(statistics.median(each) - nothing, 3), **summary(each)}
    return {"graph_without_us": round(nothing, 3), **found}


def _asking(ask: Ask) -> Ask:
    def step(b: StaticBuffers) -> None:
        for _ in range(INSIDE):
            b.x.add_(1)
            ask(b)

    return step


def _ways(context: Context, buffers: StaticBuffers, found: Figures) -> Iterator[tuple[str, Ask]]:
    yield "python host node", lambda b: current_context().host_node("ask", lambda: None)
    try:
        stamp = Stamp()
        yield "native host node", lambda b: current_context().host_node("ask", stamp)
    except Unavailable as missing:
        found["native host node"] = f"not available: {missing}"
    if context.rehearsal:
        yield "flag wait", lambda b: current_context().host_node("ask", lambda: _wait(buffers.flags_host), writes=[buffers.flags_host])
        return
    try:
        yield "wait value", _wait_value(buffers.flags_host)
    except RuntimeError as missing:
        found["wait value"] = f"not available: {missing}"
    if importlib.util.find_spec("triton") is None:
        found["spin kernel"] = "not available: triton is not installed"
        return
    from tools.gpu.checks.spin import launch

    launch_once = lambda b: launch(b.flags_host)  # noqa: E731
    yield "spin kernel", launch_once


def _wait(flags: Tensor) -> None:
    """The device's side, on the tape."""
    words = flags.numpy()
    words[0] = 1
    while not words[1]:
        time.sleep(0)
    words[1] = 0


def _wait_value(flags: Tensor) -> Ask:
    """Memory operations of the stream: ask, wait until the answer is there, take it away."""
    calls = DriverCalls()
    asked = calls.device_address(flags.data_ptr())

    def ask(b: StaticBuffers) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        calls.do("cuStreamWriteValue32_v2", stream, asked, 1, 0)
        calls.do("cuStreamWaitValue32_v2", stream, asked + 4, 1, WAIT_EQUAL)
        calls.do("cuStreamWriteValue32_v2", stream, asked + 4, 0, 0)

    return ask


def _seconds(context: Context, backend: Backend, graph: Recorded) -> float:
    """Of one replay: on a GPU between two events of its own stream, else by the clock."""
    if context.rehearsal:
        start = time.perf_counter()
        graph.replay()
        backend.synchronize()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def launch() -> None:
        begin.record()
        graph.replay()
        end.record()

    backend.run(launch)
    backend.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def conditional_node_cost(context: Context) -> Figures:
    """Microseconds that an IF node adds to what it holds, and what one costs whose body is skipped; on the tape: what a branch costs."""
    count = 32
    word = torch.zeros(1, dtype=torch.int32, device=context.device)
    chains = _branches(context, word, count)
    times: dict[str, list[float]] = {name: [] for name in chains}
    for turn in context.turns(3 if context.rehearsal else 200, least=3):
        for name, launch in chains.items():
            seconds = launch()
            if turn:
                times[name].append(seconds * 1e6 / count)
    plain, taken, skipped = (statistics.median(times[name]) for name in ("plain", "taken", "skipped"))
    return {"memset_us": round(plain, 3), "taken_adds_us": round(taken - plain, 3), "skipped_us": round(skipped, 3)}


def _branches(context: Context, word: Tensor, count: int) -> dict[str, Callable[[], float]]:
    conditions = {"plain": None, "taken": True, "skipped": False}
    if context.rehearsal:

        def run(taken: bool | None) -> float:
            start = time.perf_counter()
            for _ in range(count):
                if taken is not False:
                    word.fill_(1)
            return time.perf_counter() - start

        return {name: (lambda taken=taken: run(taken)) for name, taken in conditions.items()}  # type: ignore[misc]
    stream = torch.cuda.Stream()
    try:
        calls = DriverCalls()
        chains = {name: MemsetChain(calls, word.data_ptr(), count, taken) for name, taken in conditions.items()}
    except RuntimeError as missing:
        raise Skipped(f"not available: {missing}") from None

    def timed(chain: MemsetChain) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        chain.launch(stream.cuda_stream)
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    return {name: (lambda chain=chain: timed(chain)) for name, chain in chains.items()}  # type: ignore[misc]
