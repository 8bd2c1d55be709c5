"""Times from a launch to a host node, and whether native host nodes need the GIL."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref

import numpy as np
import torch

from stepgraph.graphs import BufferSpec, GraphKey, StaticBuffers, current_context
from stepgraph.graphs.capture import Backend, Recorded
from stepgraph.graphs.context import FirstError
from stepgraph.graphs.cuda.context import HostCallback
from stepgraph.sampling.grammar.link.native import NativeLink, load
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, advance
from stepgraph.sampling.grammar.status import TAG_FIELDS, HostColumn
from stepgraph.sampling.kernels.c_kernel import PackedCall, join_calls
from stepgraph.sampling.native import ARGUMENT, Unavailable, kernel
from tools.gpu.checks.context import Context, Figures, Skipped, summary
from tools.gpu.checks.states import ROWS, RoundBench


def _run_graph(backend: Backend, recorded: Recorded) -> None:
    recorded.replay()
    backend.synchronize()


MAX_STAMPS = 10_000


class Stamp:
    """A native host node without rows, and when it last ran, in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        state, drafts = torch.zeros(1, len(HostColumn), dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64)
        masks, tags = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, TAG_FIELDS, dtype=torch.int64)
        self._link, self._log = NativeLink(load(), state, drafts, masks, tags, depth=1), np.zeros((1 + MAX_STAMPS, 3), np.int64)
        self._link.log_nodes(self._log)
        self.node = self._link.node([COMMIT])

    @property
    def finished(self) -> float:
        return float(self._log[self._log[0, 0], 2]) / 1e9


def gil_hold(context: Context) -> Figures:
    """Microseconds from launch to host node, Python and native, alone and beside a busy Python thread."""
    repeats, figures = context.count(300, 40), dict[str, object]()
    with context.backend(asynchronous=True) as backend:
        times: list[float] = []
        recorded = _with_host_node(backend, lambda: times.append(time.monotonic()))

        def in_python() -> float:
            times.clear()
            _run_graph(backend, recorded)
            assert len(times) == 1
            return times[0]

        nodes = {"": in_python}
        with contextlib.suppress(Unavailable):
            stamp = Stamp()
            stamped = _with_host_node(backend, stamp.node)

            def natively() -> float:
                _run_graph(backend, stamped)
                return stamp.finished

            nodes["native_"] = natively
        for busy, (name, ran_at) in itertools.product((False, True), nodes.items()):
            with _busy_thread() if busy else contextlib.nullcontext():
                waits = []
                for _ in range(repeats):
                    start = time.monotonic()
                    waits.append((ran_at() - start) * 1e6)
            figures[f"{name}us_busy" if busy else f"{name}us_alone"] = summary(waits)
    return figures


def _with_host_node(backend: Backend, node: Callable[[], object]) -> Recorded:
    buffers = StaticBuffers([BufferSpec("x", (32,), torch.float32)], backend.device)

    def step(b: StaticBuffers) -> None:
        b.x.add_(1)
        current_context().host_node("node", node)

    return backend.capture(step, buffers)


@contextlib.contextmanager
def _busy_thread() -> Iterator[None]:
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


HOLD_SECONDS = 0.2


def native_nodes_need_no_gil(context: Context) -> Figures:
    """A round with native host nodes ends while another thread holds the GIL; with Python host nodes it does not."""
    try:
        load()
    except Unavailable as missing:
        raise Skipped(f"no native link: {missing}") from None
    ended = {link: _ends_under_the_gil(context, link) for link in ("native", "python")}
    assert ended["native"], "a native host node waited for the GIL"
    assert not ended["python"], "the control: a Python host node ended without the GIL"
    return {"seconds_held": HOLD_SECONDS, **ended}


def _ends_under_the_gil(context: Context, link: str) -> bool:
    with context.backend(asynchronous=True) as backend:
        bench = RoundBench(backend, 3, host_link=link)
        bench.randomise(1)
        bench.push_batch(ROWS)
        if context.on_tape:
            return _nodes_end(bench.host)
        stamp, step = Stamp(), bench.round.step(GraphKey(ROWS, True))

        def stamped(buffers: StaticBuffers) -> None:
            step(buffers)
            current_context().host_node("stamp", stamp.node)

        recorded = backend.capture(stamped, bench.buffers)
        recorded.replay()
        backend.synchronize()
        bench.push_batch(ROWS)
        gil_library = ctypes.PyDLL(None)  # PyDLL keeps the GIL during calls
        recorded.replay()
        held_until = time.monotonic() + HOLD_SECONDS
        gil_library.usleep(int(HOLD_SECONDS * 1e6))
        backend.synchronize()
        return stamp.finished < held_until


def _nodes_end(host: HostLink) -> bool:
    """Whether the host nodes alone end under the GIL, in a native thread, since the tape uses Python threads."""
    node = HostCallback("round", host.node([BEGIN_ROUND, COMMIT, *(advance(index) for index in range(1, 4)), END_ROUND]), FirstError())
    log = np.zeros((2, 3), np.int64)
    host.log_nodes(log)
    _, held_until = call_under_the_gil(node, 1, HOLD_SECONDS)
    return bool(log[1, 2] < held_until)


def call_under_the_gil(node: HostCallback, times: int, seconds: float) -> tuple[int, int]:
    """Call a host node on a native thread, from a tenth of the time on in which this thread holds the GIL. Returns the begin and the end
    of that time on the clock of `HostLink.log_nodes`."""
    gil_library, library, thread = ctypes.PyDLL(None), ctypes.CDLL(None), ctypes.c_ulong()  # PyDLL keeps the GIL during calls
    wait = PackedCall(library.usleep, int(seconds * 1e5))
    function = kernel("call_host")
    assert function is not None
    packed = [ARGUMENT.pack(address, *[0] * 10, 0.0) for address in (node.address, node.data)]
    calls = join_calls([wait, *[PackedCall.of(function, b"".join(packed), (node,))] * times])
    assert gil_library.pthread_create(byref(thread), None, calls.func, calls.args[0]) == 0
    start = time.perf_counter_ns()
    gil_library.usleep(int(seconds * 1e6))
    assert library.pthread_join(thread, None) == 0
    return start, start + int(seconds * 1e9)
