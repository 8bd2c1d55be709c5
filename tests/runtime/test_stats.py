"""EngineStats: consistent at every moment, from other threads, after faults and after close; figures of known workloads."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stepgraph import Constraint, Engine, EngineConfig, EngineStats, FinishReason, SamplingParams
from stepgraph.graphs import TapeBackend
from stepgraph.runtime.models.toy import ToyDraft
from stepgraph.runtime.request import ActiveRequest
from stepgraph.runtime.request_queue import RequestQueue
from stepgraph.runtime.scheduler import Counters
from tests.graphs.test_graph_set import Refusing, serve
from tests.graphs.test_graph_set import make as make_partly_captured
from tests.helpers.planted import break_fill
from tests.helpers.stat_checks import check_invariants, run
from tests.helpers.toy_engines import CONSTRAINTS, TARGET, VOCABULARY, Setup, make_engine, shared_engine


def churn(engine: Engine, jobs: int = 24) -> Iterator[EngineStats]:
    """Requests of all kinds with stop strings, cancelled in the queue, in the prompt and while decoding; a snapshot after every step."""
    handed, sampling = [], SamplingParams(stop=("-", ":", "e"))
    for index in range(jobs):
        constraint = CONSTRAINTS[index % len(CONSTRAINTS)]
        handed.append(engine.submit(range(1, 3 + index % 17), constraint=constraint, max_new_tokens=1 + index % 19, sampling=sampling))
        if index % 3 == 2:
            engine.step()
            yield engine.stats()
        if index % 5 == 4:
            engine.cancel(handed[index - index % 4])
    while engine.has_work:
        engine.step()
        yield engine.stats()


@pytest.mark.parametrize("setup", [Setup(3), Setup(3, drafter="ngram", eager=True), Setup(2, False, "illegal", eager=True)])
def test_stats_are_consistent_after_every_step(setup: Setup) -> None:
    engine = shared_engine(setup)
    begun = engine.stats()
    snapshots = [begun, *churn(engine)]
    for earlier, later in itertools.pairwise(snapshots):
        check_invariants(later)
        assert all(now >= then for now, then in zip(counted(later), counted(earlier), strict=True))
    last = snapshots[-1]
    assert (last.running, last.waiting, last.free_pages) == (0, 0, last.pages)
    assert sum(count for _, count in last.finished) == last.submitted == begun.submitted + 24
    assert dict(last.finished)["cancelled"] > dict(begun.finished)["cancelled"]


def counted(stats: EngineStats) -> list[float]:
    drafting, grammars = stats.drafting, stats.grammars
    return [
        *(stats.rounds, stats.replays, stats.event_waits, stats.tokens, stats.prompt_tokens, stats.reused_tokens, stats.submitted),
        *(stats.mask_fills, stats.matcher_accepts, stats.most_waiting, stats.most_used_pages, stats.longest_host_node_seconds),
        *(drafting.rounds, drafting.full, drafting.illegal, drafting.improbable, drafting.ended, drafting.undrafted, drafting.tokens),
        *(*drafting.offered, *drafting.accepted, *stats.host_nodes.counts, stats.host_nodes.total, *stats.queue_seconds.counts),
        *(stats.exposed_wait_seconds or 0, grammars.compiles, grammars.compile_seconds, *(count for _, count in stats.finished)),
    ]


def test_counters_are_accessed_under_the_lock_of_the_queue() -> None:
    """Otherwise a snapshot of another thread could be inconsistent, such as a page that is neither free nor used."""
    engine = make_engine(Setup(3, asynchronous=False, eager=True))
    scheduler, touched = engine._scheduler, set[str]()

    def guarded(name: str, call: Any) -> Any:
        def checked(*arguments: Any) -> Any:
            assert engine.queue.lock._is_owned(), f"{name} without the lock"  # type: ignore[attr-defined]
            touched.add(name)
            return call(*arguments)

        return checked

    class GuardedCounters(Counters):
        def __getattribute__(self, name: str) -> Any:
            read = super().__getattribute__
            return read(name) if name.startswith("__") else guarded(name, read)(name)

        def __setattr__(self, name: str, value: object) -> None:
            guarded(name, super().__setattr__)(name, value)

    class GuardedQueue(RequestQueue):
        def __setattr__(self, name: str, value: object) -> None:
            guarded(name, super().__setattr__)(name, value)

    scheduler.counters.__class__, engine.queue.__class__ = GuardedCounters, GuardedQueue
    for name in ("allocate", "start_prefill", "publish_prompt", "release"):
        vars(scheduler.rows)[name] = guarded(name, getattr(scheduler.rows, name))
    for stats in churn(engine):
        check_invariants(stats)
    engine.close()
    assert touched >= {
        "allocate",
        "start_prefill",
        "publish_prompt",
        "release",
        "add_round",
        "losses",
        "finished",
        "tokens",
        "drafts",
        "prompt_tokens",
        "submitted",
        "most_waiting",
    }


def test_snapshots_from_another_thread_are_consistent() -> None:
    engine = shared_engine(Setup(3))
    done, seen, broken = threading.Event(), [0], list[BaseException]()

    def watch() -> None:
        try:
            earlier = engine.stats()
            while not done.is_set():
                stats = engine.stats()
                check_invariants(stats)
                assert all(now >= then for now, then in zip(counted(stats), counted(earlier), strict=True))
                earlier, seen[0] = stats, seen[0] + 1
        except BaseException as error:
            broken.append(error)

    watcher, interval = threading.Thread(target=watch), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    watcher.start()
    try:
        for _ in churn(engine):
            pass
    finally:
        sys.setswitchinterval(interval)
        done.set()
        watcher.join()
    assert not broken and seen[0] > 0


def test_stats_are_consistent_after_faults_and_close() -> None:
    def explode(name: str) -> None:
        if armed.is_set() and name == "commit":
            raise OSError("the host is on fire")

    armed = threading.Event()
    engine = make_engine(Setup(2, asynchronous=False, max_rows=2, grammar_lane="host"), TapeBackend(delay=explode))
    jobs = [engine.submit([index], constraint=CONSTRAINTS[1], max_new_tokens=30) for index in range(5)]
    engine.step()
    victim = next(request for request in engine._scheduler.active)
    assert victim.matcher is not None
    break_fill(victim.matcher, "out of fuel")
    while not victim.job.finished:
        engine.step()
    check_invariants(engine.stats())
    assert dict(engine.stats().finished)["error"] == 1
    engine.step()
    armed.set()
    with pytest.raises(Exception, match="the host is on fire"):  # noqa: PT012
        while True:
            engine.step()
    stats = engine.stats()
    check_invariants(stats)
    assert stats.tokens == sum(len(job.tokens) for job in jobs) and (stats.running, stats.waiting) == (0, 0)
    assert dict(stats.finished) == {**dict.fromkeys(map(str, FinishReason), 0), "error": 5, "refused": 0}
    engine.close()
    assert engine.stats() == stats, "unchanged by close()"


def test_graph_stats_count_rounds_and_padded_rows() -> None:
    engine = shared_engine(Setup(3))
    before, launched = {graph.key: graph for graph in engine.stats().graphs}, list[tuple[int, bool, bool]]()
    real = engine._in_flight.launch

    def launch(requests: tuple[ActiveRequest, ...]) -> None:
        constrained = any(request.constrained for request in requests)
        launched.append((len(requests), constrained, constrained and not any(request.matcher for request in requests)))
        real(requests)

    vars(engine._in_flight)["launch"] = launch
    try:
        run(engine, [None] * 3, tokens=6)
        run(engine, CONSTRAINTS[:3], tokens=12)
    finally:
        del vars(engine._in_flight)["launch"]
    for graph in engine.stats().graphs:
        size, kind = graph.key.rows, [graph.key.constrained, graph.key.device]
        served = [rows for rows, *launch in launched if launch == kind and size // 2 < rows <= size]
        then = before.get(graph.key)
        rounds, padded, rows = (then.rounds, then.padded_rounds, then.padded_rows) if then else (0, 0, 0)
        assert graph.rounds - rounds == len(served)
        assert graph.padded_rounds - padded == sum(each < size for each in served)
        assert graph.padded_rows - rows == sum(size - each for each in served)
    assert {3} < {rows for rows, *_ in launched}, "some rounds have three rows, which no graph has"
    stats = engine.stats()
    assert (stats.eager_rounds, stats.eager_reason) == (0, "") and stats.replays == stats.rounds


def test_eager_rounds_have_a_reason_and_expose_all_host_time() -> None:
    with make_engine(Setup(2, eager=True, asynchronous=False, grammar_lane="host")) as engine:
        run(engine, CONSTRAINTS[:2], tokens=6)
        stats = engine.stats()
    assert stats.eager_rounds == stats.rounds > 0 and (stats.replays, stats.eager_reason) == (0, "EngineConfig.eager")
    assert stats.exposed_wait_seconds == stats.host_nodes.total > 0


def test_exposed_wait_does_not_decrease_after_rounds_that_could_not_be_captured() -> None:
    with make_partly_captured(Refusing(1), on_capture_failure="eager") as engine:
        engine.capture()
        for rows, grammar, is_eager in ((4, 1, True), (1, 0, False)):
            serve(engine, rows, grammar)
            stats = engine.stats()
            assert (stats.eager_rounds == stats.rounds, stats.exposed_wait_seconds) == (is_eager, 0), "of the recorded rounds only"


def test_page_queue_and_first_token_stats_of_six_requests() -> None:
    """36 pages of 8; each of six requests takes five, and four run at once."""
    with make_engine(Setup(2, asynchronous=False, eager=True), prefix_reuse=False) as engine:
        jobs = [
            engine.submit([1, 2, index], max_new_tokens=33, sampling=SamplingParams(temperature=0, ignore_eos=True)) for index in range(6)
        ]
        waiting = engine.stats()
        assert (waiting.waiting, waiting.most_waiting, waiting.queue_seconds.count) == (6, 6, 0)
        engine.step()
        seated = engine.stats()
        assert (seated.waiting, seated.running, seated.queue_seconds.count) == (2, 4, 4)
        assert (seated.pages - seated.free_pages, seated.most_used_pages) == (20, 20)
        run(engine, [])
        stats = engine.stats()
    assert (stats.most_waiting, stats.most_used_pages, stats.free_pages) == (6, 20, 36)
    assert stats.queue_seconds.count == stats.first_token_seconds.count == 6 and stats.prompt_tokens == 6 * 2
    waits = [(job.queue_seconds, job.first_token_seconds) for job in jobs]
    assert all(queue is not None and first is not None and 0 <= queue <= first for queue, first in waits)
    assert stats.first_token_seconds.total == pytest.approx(sum(first or 0 for _, first in waits))
    decoding = [(job.seconds or 0) - (job.first_token_seconds or 0) for job in jobs]
    assert min(decoding) >= 0 and stats.token_seconds.total == pytest.approx(sum(seconds / 32 for seconds in decoding))


def test_compiles_are_counted_and_timed() -> None:
    with make_engine(Setup(0, eager=True)) as engine:
        before = engine.stats().grammars
        assert before.compiles == before.misses == len(CONSTRAINTS) - 1
        assert before.compile_seconds >= before.longest_compile_seconds > 0
        engine.compile(Constraint.regex("[a-f]{1,3}"))
        with pytest.raises(ValueError, match="regex"):
            engine.compile(Constraint.regex("(?<=a)b"))
        after = engine.stats().grammars
    assert (after.compiles, after.failures) == (before.compiles + 1, before.failures + (after.misses - before.misses - 1))
    assert after.compile_seconds > before.compile_seconds


def test_counters_do_not_decrease_after_rounds_are_measured() -> None:
    """A counter that decreases looks like a restart to Prometheus."""
    config, seen = EngineConfig(max_rows=1, num_speculative_tokens=2, max_length=48), list[int]()
    with Engine(TARGET, ToyDraft(TARGET), vocabulary=VOCABULARY, config=config) as engine:

        def clock() -> float:
            seen.append(engine.stats().event_waits)
            return time.perf_counter()

        lengths = engine._parts.draft_lengths
        assert lengths
        lengths.clock = clock
        engine.generate([1, 2], max_new_tokens=6)
    assert len({*seen}) > 3 and seen == sorted(seen)
