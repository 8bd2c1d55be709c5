"""Threads and lifetimes of the native link: rows are shared among threads, and borrowed objects live as long as nodes need them."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest

from stepgraph.graphs import TapeBackend
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarMatcher
from tests.helpers.link_bench import ROUND_STEPS, A, Memory, letters_row, native_link, resident_bytes, run_round
from tests.helpers.planted import plant
from tests.helpers.toy_engines import CONSTRAINTS, CONTROL, Setup, finish, make_engine, needs_native, plain

pytestmark = needs_native


def test_a_slow_row_does_not_block_the_others() -> None:
    """The first row's fill waits for the last one's. With one thread, or in order, it would wait for ever."""
    memory, reached = Memory.make(6, 3), threading.Event()
    link = native_link(memory, threads=2)
    rows = [letters_row(link, owner) for owner in range(1, 7)]
    waited: list[bool] = []

    def wait(real: Any, *arguments: Any) -> int:
        waited.append(reached.wait(10))
        return int(real(*arguments))

    def signal(real: Any, *arguments: Any) -> int:
        reached.set()
        return int(real(*arguments))

    plant(rows[0], "fill", wait)
    plant(rows[-1], "fill", signal)
    run_round(memory, link, rows, steps=(BEGIN_ROUND, COMMIT, END_ROUND))
    assert waited == [True]
    assert memory.tags[0, :, 3].tolist() == [MaskStatus.OK] * 6


def test_many_rounds_on_many_threads_process_every_row() -> None:
    memory = Memory.make(16, 3)
    link = native_link(memory, threads=5)
    rows = [letters_row(link, owner) for owner in range(1, 17)]
    run_round(memory, link, rows, [A] * 3)
    node = link.node(ROUND_STEPS)
    for _ in range(1999):
        link.push_batch(rows)
        node()
    assert link.stats.fills == 2000 * 16 * 4
    assert [row.fault for row in rows] == [""] * 16


def test_a_forked_process_processes_its_rows_alone() -> None:
    """Some helpers sleep since the start, others since a round: with glibc 2.36 a signal to the latter would wait for the former."""
    memory = Memory.make(4, 3)
    link = native_link(memory, threads=4)
    rows = [letters_row(link, owner) for owner in (1, 2)]

    def run_rounds(count: int) -> None:
        for _ in range(count):
            run_round(memory, link, rows)

    run_rounds(2)
    gc.collect()  # meanwhile the helpers fall asleep
    memory.tags.zero_()
    child = os.fork()
    if child == 0:
        run_rounds(5)
        done = memory.tags[0, :2, 3].tolist() == [MaskStatus.OK] * 2
        link.close()
        os._exit(0 if done else 1)
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended and status == 0


def test_a_matcher_lives_until_the_rounds_that_use_it_have_ended() -> None:
    """Its request is cancelled while rounds are in flight."""
    hold = threading.Event()
    backend = TapeBackend(asynchronous=True, delay=lambda name: hold.wait(10))
    engine = make_engine(Setup(k=2, rounds_in_flight=3, host_link="native", grammar_lane="host"), backend, all_graphs=True)
    job, other = engine.submit([1], constraint=CONSTRAINTS[1], max_new_tokens=40), engine.submit([2], max_new_tokens=30)
    engine.step()
    (matcher,) = [weakref.ref(active.matcher.matcher) for active in engine._scheduler.active if active.matcher]
    engine.cancel(job)
    engine.step()
    gc.collect()
    assert job.finished and matcher() is not None
    hold.set()
    finish(engine)
    engine.step()
    assert matcher() is None
    assert other.tokens == plain([2], 30).tokens
    engine.close()


def test_a_link_is_freed_with_its_last_node_or_by_close() -> None:
    memory = Memory.make(2, 3)
    link = native_link(memory, threads=2)
    threads = len(os.listdir("/proc/self/task"))
    node, alive = link.node(ROUND_STEPS), weakref.ref(link)
    del link
    assert alive() is not None, "a node keeps it"
    del node
    assert alive() is None
    assert len(os.listdir("/proc/self/task")) == threads - 1
    closed = native_link(memory)
    closed.close()
    closed.close()
    assert closed.stats.fills == 0
    for call in (lambda: closed.push_batch([]), closed.release_finished, lambda: closed.node(ROUND_STEPS)):
        with pytest.raises(RuntimeError, match="it is closed"):
            call()


def test_hundreds_of_requests_leak_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real_init = weakref.WeakSet[XGrammarMatcher](), XGrammarMatcher.__init__

    def counted(matcher: XGrammarMatcher, *arguments: Any) -> None:
        real_init(matcher, *arguments)
        made.add(matcher)

    monkeypatch.setattr(XGrammarMatcher, "__init__", counted)
    engine = make_engine(Setup(k=2, max_rows=8, host_link="native"), all_graphs=True)
    constraints = [constraint for one in CONSTRAINTS[1:4] if one for constraint in (one, one.after("a"), one.after([CONTROL]))]
    assert all(engine.compile(constraint) for constraint in constraints)
    grown = []
    for batch in range(5):
        for index in range(120):
            engine.submit([index % 90], constraint=constraints[index % len(constraints)], max_new_tokens=1 + index % 2)
        finish(engine)
        engine.step()
        assert len(made) == 0, "matchers of finished requests are alive"
        if batch:
            grown.append(resident_bytes())
    assert grown[-1] - grown[0] < 3 << 20
    engine.close()
