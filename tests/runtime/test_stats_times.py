"""Times in the statistics: what is measured, and with which clock."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from stepgraph import Constraint, SamplingParams
from stepgraph.graphs import BufferSpec, StaticBuffers, TapeBackend
from stepgraph.graphs.capture import BackendStats
from stepgraph.graphs.context import current_context
from stepgraph.graphs.tape.player import Await
from stepgraph.sampling.grammar.link.protocol import NODE_BOUNDS_NS, HostLink
from stepgraph.sampling.grammar.link.python import PythonLink
from tests.helpers.link_bench import ROUND_STEPS, Memory, native_link, set_running
from tests.helpers.planted import slow_fill
from tests.helpers.stat_checks import run
from tests.helpers.toy_engines import CONSTRAINTS, CONTROL, Setup, compiled, needs_native, shared_engine


def test_time_per_token_is_that_from_the_first_to_the_last_token_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is a second after the one before."""
    engine, before = shared_engine(Setup(0)), shared_engine(Setup(0)).stats().token_seconds
    monkeypatch.setattr("stepgraph.runtime.scheduler.time", SimpleNamespace(perf_counter=itertools.count(2.0**40).__next__))
    engine.generate([1], max_new_tokens=1, sampling=SamplingParams(ignore_eos=True))
    assert engine.stats().token_seconds == before, "a single token has no time per token"
    engine.generate([1], max_new_tokens=5, sampling=SamplingParams(ignore_eos=True))
    after = engine.stats().token_seconds
    assert after.count - before.count == 1 and after.total - before.total == pytest.approx(0.25)


def test_wait_of_the_main_stream_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host node starts once the main stream waits for its event; the clock then reports a wait of 7 microseconds."""
    missed, main, ticks = threading.Event(), threading.current_thread(), iter([100, 7_100])

    def clock() -> int:
        if threading.current_thread() is not main:
            return 0
        missed.set()
        return next(ticks)

    def step(buffers: StaticBuffers) -> None:
        context = current_context()
        begun = context.record()
        with context.stream("side"):
            context.wait(begun)
            context.host_node("think", lambda: buffers.answer_host.fill_(1), writes=[buffers.answer_host])
            done = context.record()
        context.wait(done)
        buffers.answer.copy_(buffers.answer_host, non_blocking=True)

    specs = [BufferSpec("answer", (1,), torch.float32), BufferSpec("answer_host", (1,), torch.float32, "pinned")]
    backend = TapeBackend(delay=lambda name: missed.wait(30) if name == "think" else None)
    recorded = backend.capture(step, StaticBuffers(specs))
    monkeypatch.setattr("stepgraph.graphs.tape.player.time", SimpleNamespace(perf_counter_ns=clock))
    recorded.replay()
    assert backend.stats.wait_ns == 7_000
    backend.close()


def test_await_of_a_set_event_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, reached = BackendStats(wait_ns=0), threading.Lock()
    monkeypatch.setattr("stepgraph.graphs.tape.player.time", SimpleNamespace())  # without a clock
    Await(reached, "think", noted)(False)
    assert reached.locked() and noted.wait_ns == 0


def test_unconstrained_rounds_have_no_host_nodes_and_no_wait() -> None:
    engine = shared_engine(Setup(3, grammar_lane="host"))
    engine.step()  # reads the rounds still in flight
    before = engine.stats()
    run(engine, [None] * 2, tokens=8)
    engine.step()
    after = engine.stats()
    assert after.rounds > before.rounds
    assert (after.exposed_wait_seconds, after.host_nodes) == (before.exposed_wait_seconds, before.host_nodes)
    run(engine, CONSTRAINTS[1:3], tokens=8)
    engine.step()
    assert engine.stats().host_nodes.count == engine.backend.stats.host_nodes > before.host_nodes.count


@pytest.mark.parametrize("which", ["python", pytest.param("native", marks=needs_native)])
def test_slow_host_nodes_are_in_the_upper_buckets(which: str) -> None:
    memory = Memory.make(1, 3)
    link: HostLink = native_link(memory) if which == "native" else PythonLink(*memory.all)
    grammar = compiled(Constraint.regex("[ab]*"))
    assert grammar is not None and link.stats.nodes == (0,) * (len(NODE_BOUNDS_NS) + 1)
    memory.drafts[:] = CONTROL  # never legal: one mask a node
    for turn in range(3):
        row = link.row(turn + 1, grammar.matcher())
        if turn == 1:
            slow_fill(row, 0.002)
        set_running(memory, row)
        link.push_batch([row])
        link.node(ROUND_STEPS)()
    stats, slow = link.stats, NODE_BOUNDS_NS.index(1_000_000) + 1
    assert sum(stats.nodes) == 3 and sum(stats.nodes[slow:]) >= 1 <= stats.longest_node_ns // 2_000_000
    assert stats.longest_node_ns <= stats.node_ns
    link.close()
    assert link.stats == stats and link.stats.nodes == stats.nodes, "available after close()"
