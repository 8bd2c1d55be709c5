"""When host nodes ran: the links of both kinds write the same lines, in their order, and no further than there is room."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from stepgraph.sampling.grammar.link.node_log import NodeLog
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, advance
from stepgraph.sampling.grammar.link.python import PythonLink
from tests.helpers.link_bench import Memory, native_link
from tests.helpers.toy_engines import needs_native

NODES = ((BEGIN_ROUND, advance(1)), (COMMIT,), (advance(1), END_ROUND))
LINKS: dict[str, Callable[[Memory], HostLink]] = {"native": native_link, "python": lambda memory: PythonLink(*memory.all)}


@pytest.mark.parametrize("kind", [pytest.param("native", marks=needs_native), "python"])
def test_nodes_are_noted_one_by_one_while_that_is_asked_for(kind: str) -> None:
    link = LINKS[kind](Memory.make(2, 1))
    nodes = [link.node(steps) for steps in NODES]

    def play() -> None:
        link.push_batch([None, None])
        for node in nodes:
            node()

    log = NodeLog(4)
    play()
    link.note_nodes(log)
    before = time.perf_counter_ns()
    play()
    play()
    after = time.perf_counter_ns()
    link.note_nodes(None)
    play()
    assert [one.first for one in log.times] == [True, False, False, True], "four of six nodes: there is no more room"
    ends = [moment for one in log.times for moment in (one.start_ns, one.end_ns)]
    assert ends == sorted(ends) and before <= ends[0] and ends[-1] <= after, "by the clock of time.perf_counter_ns"
    assert log._memory.shape == (13,) and log._memory[0] == 4
    link.close()
