"""What the native link borrows is there for as long as a node may touch it, and not longer."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest

from stepgraph.graphs import TapeBackend
from stepgraph.sampling.grammar.xgrammar_lib.matcher import XGrammarMatcher
from tests.helpers.link_bench import WALK, Memory, native_link, resident
from tests.helpers.toy_engines import CONSTRAINTS, CONTROL, Setup, make_engine, needs_native, plain

pytestmark = needs_native


def test_a_matcher_outlives_every_round_that_was_announced_with_it() -> None:
    """Cancelled with rounds on their way: the matcher is there until they have ended, and not a step longer."""
    hold = threading.Event()
    backend = TapeBackend(asynchronous=True, delay=lambda name: (hold.wait(), None)[1])
    engine = make_engine(Setup(k=2, rounds_in_flight=3, host_link="native"), backend)
    job, other = engine.submit([1], constraint=CONSTRAINTS[1], max_new_tokens=40), engine.submit([2], max_new_tokens=30)
    engine.step()
    (matcher,) = [weakref.ref(seat.matcher.matcher) for seat in engine._desk.rows if seat.matcher]
    engine.cancel(job)
    engine.step()
    gc.collect()
    assert job.finished and matcher() is not None
    hold.set()
    for _ in engine.stream():
        pass
    engine.step()
    assert matcher() is None
    assert other.tokens == plain([2], 30).tokens
    engine.close()


def test_a_link_is_freed_with_its_last_node_and_may_be_closed_before() -> None:
    memory = Memory.make(2, 3)
    link = native_link(memory, threads=2)
    threads = len(os.listdir("/proc/self/task"))
    node, alive = link.node(WALK), weakref.ref(link)
    del link
    assert alive() is not None, "a node that may still be called keeps it"
    del node
    assert alive() is None
    assert len(os.listdir("/proc/self/task")) == threads - 1
    closed = native_link(memory)
    closed.close()
    closed.close()
    assert closed.stats.fills == 0
    for call in (lambda: closed.push_batch([]), closed.release_finished, lambda: closed.node(WALK)):
        with pytest.raises(RuntimeError, match="it is closed"):
            call()


def test_hundreds_of_requests_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real_init = weakref.WeakSet[XGrammarMatcher](), XGrammarMatcher.__init__

    def counted(matcher: XGrammarMatcher, *arguments: Any) -> None:
        real_init(matcher, *arguments)
        made.add(matcher)

    monkeypatch.setattr(XGrammarMatcher, "__init__", counted)
    engine = make_engine(Setup(k=2, max_rows=8, host_link="native"), check_masks=True)
    constraints = [constraint for one in CONSTRAINTS[1:4] if one for constraint in (one, one.after("a"), one.after([CONTROL]))]
    assert all(engine.compile(constraint) for constraint in constraints)
    grown = []
    for batch in range(5):
        for place in range(120):
            engine.submit([place % 90], constraint=constraints[place % len(constraints)], max_new_tokens=1 + place % 2)
        for _ in engine.stream():
            pass
        engine.step()
        assert len(made) == 0, "behind a marker and under a check as well"
        if batch:
            grown.append(resident())
    assert grown[-1] - grown[0] < 3 << 20
    engine.close()
