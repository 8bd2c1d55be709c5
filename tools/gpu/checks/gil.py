"""The check that host nodes of the native link need no GIL: a round ends while another thread holds it."""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_void_p

from stepgraph.graphs import GraphKey, StaticBuffers, current_context
from stepgraph.graphs.cuda.driver import HostCallback, HostErrors
from stepgraph.sampling.grammar.link.layout import CallListStruct, CallStruct
from stepgraph.sampling.grammar.link.library import Unavailable, load
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, advance
from tools.gpu.checks.context import Context, Figures, Skipped
from tools.gpu.checks.states import ROWS, RoundBench
from tools.gpu.checks.timing import Stamp

HOLD_SECONDS = 0.2


def native_nodes_need_no_gil(context: Context) -> Figures:
    """A launched round ends while another thread holds the GIL; one with Python host nodes does not. In a rehearsal: host nodes only."""
    try:
        load()
    except Unavailable as missing:
        raise Skipped(f"no native link: {missing}") from None
    ended = {link: _ends_under_the_gil(context, link) for link in ("native", "python")}
    assert ended["native"], "a native host node waited for the GIL"
    assert not ended["python"], "the control: a Python host node needs the GIL"
    return {"seconds_held": HOLD_SECONDS, **ended}


def _ends_under_the_gil(context: Context, link: str) -> bool:
    with context.backend(asynchronous=True) as backend:
        bench = RoundBench(backend, 3, host_link=link)
        bench.randomise(1)
        bench.push_batch(ROWS)
        if context.rehearsal:
            return _nodes_end(bench.host)
        stamp, step = Stamp(), bench.round.step(GraphKey(ROWS, True))

        def stamped(buffers: StaticBuffers) -> None:
            step(buffers)
            current_context().host_node("stamp", stamp)

        recorded = backend.capture(stamped, bench.buffers)
        recorded.replay()
        backend.synchronize()
        bench.push_batch(ROWS)
        c_library = ctypes.PyDLL(None)  # does not release the GIL in its calls
        recorded.replay()
        held_until = time.monotonic() + HOLD_SECONDS
        c_library.usleep(int(HOLD_SECONDS * 1e6))
        backend.synchronize()
        return stamp.finished < held_until


def _nodes_end(host: HostLink) -> bool:
    """The same for the host nodes of a round on a C thread, because the tape's threads are Python threads."""
    node = HostCallback("round", host.node([BEGIN_ROUND, COMMIT, *(advance(index) for index in range(1, 4)), END_ROUND]), HostErrors())
    calls, thread = (CallStruct * 2)(), ctypes.c_ulong()
    calls[0].function, calls[0].data = ctypes.cast(ctypes.CDLL(None).usleep, c_void_p).value, 20_000
    calls[1].function, calls[1].data = node.address, node.data
    listed = CallListStruct(calls, 2)
    c_library = ctypes.PyDLL(None)
    assert c_library.pthread_create(byref(thread), None, c_void_p(load().run_calls_address), byref(listed)) == 0
    held_until = time.monotonic() + HOLD_SECONDS
    c_library.usleep(int(HOLD_SECONDS * 1e6))
    assert ctypes.CDLL(None).pthread_join(thread, None) == 0
    return bool(calls[1].finished < held_until)
