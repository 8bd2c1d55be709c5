"""What an engine tells of itself: causes against plain judges, sums that must hold at every moment, clocks that are only held to order."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepgraph.graphs import BufferSpec, StaticBuffers, TapeBackend
from stepgraph.graphs.buffers import REFUSED, Column
from stepgraph.graphs.capture import BackendStats, current_flow
from stepgraph.graphs.tape_run import Await
from stepgraph.runtime import Constraint, Engine, EngineStats, FinishReason, SamplingParams
from stepgraph.runtime.ledger import Ledger
from stepgraph.runtime.rows import Seat
from stepgraph.runtime.stats import Histogram, Loss, loss_of
from stepgraph.sampling.grammar.host_link import NODE_BOUNDS_NS, HostLink
from stepgraph.sampling.grammar.matcher import Matcher
from stepgraph.sampling.grammar.native import load
from stepgraph.sampling.grammar.native.layout import layout_of
from stepgraph.sampling.grammar.python_link import PythonLink
from stepgraph.sampling.grammar.status import MaskStatus
from tests.link_bench import WALK, Foreign, Memory, native_link, running
from tests.planted import break_fill
from tests.toy_engines import CONSTRAINTS, CONTROL, STOP, Setup, compiled, make_engine, needs_native, shared_engine

OK, ILLEGAL, NONE = int(MaskStatus.OK), int(MaskStatus.ILLEGAL), int(MaskStatus.NONE)
PERFECT = Setup(4, drafter="perfect", eager=True)
TERMINATED, COMPLETE = int(MaskStatus.TERMINATED), int(MaskStatus.COMPLETE)


def holds(stats: EngineStats) -> None:
    """What is true of every snapshot, whenever it was taken."""
    drafting = stats.drafting
    assert drafting.full + drafting.illegal + drafting.improbable + drafting.ended + drafting.undrafted == drafting.rounds
    assert sum(drafting.accepted) == stats.accepted_drafts <= drafting.tokens <= min(stats.tokens, stats.accepted_drafts + drafting.rounds)
    for places in (drafting.offered, drafting.accepted):
        assert list(places) == sorted(places, reverse=True) and all(count <= drafting.rounds for count in places)
    assert all(accepted <= offered for accepted, offered in zip(drafting.accepted, drafting.offered, strict=True))
    assert stats.accepted_forced_drafts <= stats.forced_drafts <= sum(drafting.offered)
    assert sum(graph.rounds for graph in stats.graphs) == stats.rounds >= stats.eager_rounds
    assert all(graph.padded_rounds <= min(graph.rounds, graph.padded_rows) for graph in stats.graphs)
    ended = sum(count for _, count in stats.finished)
    assert stats.running + stats.waiting + ended <= stats.submitted and stats.most_waiting >= stats.waiting
    assert ended <= stats.submitted and stats.first_token_seconds.count <= stats.queue_seconds.count <= stats.submitted
    assert 0 <= stats.free_pages <= stats.pages and stats.pages - stats.free_pages <= stats.most_used_pages <= stats.pages
    for histogram in (stats.host_nodes, stats.queue_seconds, stats.first_token_seconds):
        assert histogram.total >= 0 and len(histogram.counts) == len(histogram.bounds) + 1


def run(engine: Engine, constraints: Any = CONSTRAINTS, tokens: int = 20, **options: Any) -> int:
    """Submit, step to the end, and return the tokens of all events."""
    for place, constraint in enumerate(constraints):
        engine.submit([1 + place, 2, 3], constraint=constraint, max_new_tokens=tokens, **options)
    return sum(len(event.tokens) for event in engine.stream())


# why chains end


@pytest.mark.parametrize(
    ("told", "loss"),
    [
        ((3, 4, 3, 3, [OK] * 4, [5, 6, 7]), None),
        ((2, 3, 2, 3, [OK] * 4, [5, 6, 7]), None),  # the request wants two, and both held
        ((3, 3, 3, 3, [OK, OK, OK, TERMINATED], [5, 6, STOP]), None),  # the last draft ended the text
        ((3, 1, 1, 3, [OK] * 4, [5, 6, 7]), Loss.ENDED),  # a limit between two drafts that held
        ((3, 1, 1, 1, [OK, COMPLETE, NONE, NONE], [5, -1, -1]), Loss.ENDED),
        ((3, 0, 0, 0, [NONE] * 4, [-1, -1, -1]), Loss.ENDED),  # a mask failed, and the text with it
        ((3, 2, 1, 3, [OK] * 4, [5, 6, 7]), Loss.IMPROBABLE),
        ((3, 2, 1, 3, [OK, OK, TERMINATED, NONE], [5, STOP, 7]), Loss.IMPROBABLE),  # a stop was drafted, and not chosen
        ((3, 2, 1, 3, [OK, OK, ILLEGAL, NONE], [5, 6, 7]), Loss.ILLEGAL),
        ((3, 1, 0, 3, [OK, NONE, NONE, NONE], [5, 6, 7]), Loss.ILLEGAL),  # nobody vouches for it
        ((3, 2, 1, 1, [OK] * 4, [5, REFUSED, -1]), Loss.ILLEGAL),
        ((3, 2, 1, 1, [OK] * 4, [5, -1, -1]), Loss.UNDRAFTED),
        ((3, 1, 0, 0, [OK] * 4, [-1, -1, -1]), Loss.UNDRAFTED),
    ],
)
def test_what_a_round_says_has_one_cause(told: Any, loss: Loss | None) -> None:
    assert loss_of(*told) == loss


class Judge:
    """Sees what is on offer before each round, and asks a matcher of its own why it was lost."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seen, self.judged = engine, dict[int, tuple[int, list[int]]](), list[Loss | None]()
        self.real_launch, self.real_record = engine._flights.launch, engine._desk.record
        vars(engine._flights)["launch"], vars(engine._desk)["record"] = self.launch, self.record

    def launch(self, seats: tuple[Seat, ...]) -> None:
        buffers = self.engine.buffers
        for seat in seats:
            self.seen[seat.job.id] = int(buffers.row_state[seat.row, Column.DRAFT_COUNT]), buffers.row_drafts[seat.row].tolist()
        self.real_launch(seats)

    def record(self, seat: Seat, tokens: list[int], accepted: int, *rest: Any) -> Any:
        job, (offered, drafts) = seat.job, self.seen[seat.job.id]
        history, first = [*job.tokens, *tokens[:accepted]], not job.rounds
        event = self.real_record(seat, tokens, accepted, *rest)
        if (first and not offered) or not job.num_speculative_tokens:
            return event
        expected: Loss | None = None
        if accepted < job.num_speculative_tokens:
            if job.finished and len(tokens) == accepted:
                expected = Loss.ENDED
            elif accepted < offered:
                legal = self.legal(job.constraint, history, drafts[accepted])
                expected = Loss.IMPROBABLE if legal else Loss.ILLEGAL
                assert drafts[accepted] != tokens[accepted], "a draft that is the target's own choice holds"
            else:
                expected = self.undrafted(job.constraint, offered)
        assert rest[-1] == expected, f"{offered} of {drafts}, {accepted} held, then {tokens}"
        self.judged.append(expected)
        return event

    def undrafted(self, constraint: Constraint | None, offered: int) -> Loss:
        """Of the drafters here, only the one that always says the control token says anything where nothing is on offer."""
        refused = "batch_forced" in self.engine.buffers and constraint is not None and not offered
        return Loss.ILLEGAL if refused else Loss.UNDRAFTED

    @staticmethod
    def legal(constraint: Constraint | None, history: list[int], draft: int) -> bool:
        if constraint is None:
            return True
        grammar = compiled(constraint)
        assert grammar is not None
        matcher = grammar.matcher()
        assert all(matcher.accept_token(token) for token in history)
        return matcher.accept_token(draft)


@pytest.mark.parametrize(
    ("drafter", "draft_masks", "forced", "causes"),
    [
        ("fair", True, False, {Loss.IMPROBABLE, Loss.ENDED, None}),
        ("illegal", False, False, {Loss.ILLEGAL, Loss.IMPROBABLE, Loss.ENDED}),
        ("half", True, False, {Loss.IMPROBABLE, Loss.UNDRAFTED, Loss.ENDED}),
        ("control", True, False, {Loss.ILLEGAL, Loss.IMPROBABLE, Loss.ENDED}),
        ("control", True, True, set(Loss) | {None}),
        ("ngram", True, False, {Loss.ILLEGAL, Loss.IMPROBABLE, Loss.UNDRAFTED, Loss.ENDED}),
    ],
)
def test_causes_are_what_a_matcher_of_ones_own_says(drafter: str, draft_masks: bool, forced: bool, causes: set[Loss | None]) -> None:
    setup = Setup(3, draft_masks, drafter, rounds_in_flight=1, asynchronous=False, forced_drafts=forced, eager=True)
    with make_engine(setup) as engine:
        judge = Judge(engine)
        tokens = run(engine)
        drafting = engine.stats().drafting
        counted = {loss: getattr(drafting, loss.value) for loss in Loss}
        assert (drafting.full, drafting.rounds) == (judge.judged.count(None), len(judge.judged))
        assert counted == {loss: judge.judged.count(loss) for loss in Loss}
        assert set(judge.judged) == causes, "a case that never comes up proves nothing"
        assert engine.stats().tokens == tokens
        holds(engine.stats())


def test_places_lengths_and_tokens_of_a_known_run() -> None:
    """A perfect draft of four: one token of its own, then five, then what is left of the limit."""
    engine = shared_engine(PERFECT)
    before = engine.stats()
    assert run(engine, [None], tokens=9, sampling=SamplingParams(temperature=0, ignore_eos=True)) == 9
    after = engine.stats()
    drafting = after.drafting
    change = [now - then for now, then in zip(drafting.accepted, before.drafting.accepted, strict=True)]
    assert change == [2, 2, 2, 1] and after.drafting.rounds - before.drafting.rounds == 2
    assert (drafting.full - before.drafting.full, drafting.ended - before.drafting.ended) == (1, 1)
    assert drafting.tokens - before.drafting.tokens == 8, "the first token was nobody's draft"
    assert drafting.accepted_length == drafting.tokens / drafting.rounds
    holds(after)


def test_who_wants_no_drafts_or_fewer_is_counted_by_what_they_want() -> None:
    engine = shared_engine(PERFECT)
    before = engine.stats().drafting
    run(engine, [None, CONSTRAINTS[1]], tokens=12, num_speculative_tokens=0)
    assert engine.stats().drafting == before
    run(engine, [None], tokens=7, num_speculative_tokens=2, sampling=SamplingParams(temperature=0, ignore_eos=True))
    after = engine.stats().drafting
    assert (after.rounds - before.rounds, after.full - before.full) == (2, 2), "two drafts and the target's own, twice"
    assert after.offered[2:] == before.offered[2:]


# sums at every moment


def churn(engine: Engine, jobs: int = 24) -> Iterator[EngineStats]:
    """Requests of all kinds, cancels in the queue, in the prompt and in the text; a snapshot behind every step."""
    handed = []
    for place in range(jobs):
        constraint = CONSTRAINTS[place % len(CONSTRAINTS)]
        handed.append(engine.submit(range(1, 3 + place % 17), constraint=constraint, max_new_tokens=1 + place % 19))
        if place % 3 == 2:
            engine.step()
            yield engine.stats()
        if place % 5 == 4:
            engine.cancel(handed[place - place % 4])
    while engine.has_work:
        engine.step()
        yield engine.stats()


@pytest.mark.parametrize("setup", [Setup(3), Setup(3, drafter="ngram", eager=True), Setup(2, False, "illegal", eager=True)])
def test_sums_hold_behind_every_step_and_counts_never_fall(setup: Setup) -> None:
    engine = shared_engine(setup)
    begun = engine.stats()
    told = [begun, *churn(engine)]
    for earlier, later in itertools.pairwise(told):
        holds(later)
        assert all(now >= then for now, then in zip(counted(later), counted(earlier), strict=True))
    last = told[-1]
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


def test_every_figure_is_written_and_read_under_one_lock() -> None:
    """Else another thread's snapshot could be torn: a round lost that was not counted, a page neither free nor used."""
    engine = make_engine(Setup(3, asynchronous=False, eager=True))
    desk, touched = engine._desk, set[str]()

    def guarded(name: str, call: Any) -> Any:
        def checked(*arguments: Any) -> Any:
            assert desk.lock.locked(), f"{name} without the lock"
            touched.add(name)
            return call(*arguments)

        return checked

    class Guarded(Ledger):
        def __setattr__(self, name: str, value: object) -> None:
            guarded(name, super().__setattr__)(name, value)

        @property
        def drafting(self) -> Any:
            return guarded("drafting", lambda: super(Guarded, self).drafting)()

    desk.ledger.__class__ = Guarded
    for owner, names in ((desk.rows, ("take", "begin", "share", "release")), (desk.ledger, ("drafted",))):
        for name in names:
            vars(owner)[name] = guarded(name, getattr(owner, name))
    for stats in churn(engine):
        holds(stats)
    engine.close()
    assert touched >= {
        "take",
        "begin",
        "share",
        "release",
        "drafted",
        "drafting",
        "tokens",
        "accepted_drafts",
        "prompt_tokens",
        "submitted",
    }


def test_snapshots_of_another_thread_are_whole_while_the_engine_steps() -> None:
    engine = shared_engine(Setup(3))
    done, seen, broken = threading.Event(), [0], list[BaseException]()

    def watch() -> None:
        try:
            earlier = engine.stats()
            while not done.is_set():
                stats = engine.stats()
                holds(stats)
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


def test_sums_hold_behind_faults_failures_and_the_end() -> None:
    def explode(name: str) -> None:
        if armed.is_set() and name == "commit":
            raise OSError("the host is on fire")

    armed = threading.Event()
    engine = make_engine(Setup(2, asynchronous=False, max_rows=2), TapeBackend(delay=explode))
    jobs = [engine.submit([place], constraint=CONSTRAINTS[1], max_new_tokens=30) for place in range(5)]
    engine.step()
    victim = next(seat for seat in engine._desk.rows)
    assert victim.matcher is not None
    break_fill(victim.matcher, "out of fuel")
    while not victim.job.finished:
        engine.step()
    holds(engine.stats())
    assert dict(engine.stats().finished)["error"] == 1
    engine.step()
    armed.set()
    with pytest.raises(Exception, match="the host is on fire"):  # noqa: PT012
        while True:
            engine.step()
    stats = engine.stats()
    holds(stats)
    assert stats.tokens == sum(len(job.tokens) for job in jobs) and (stats.running, stats.waiting) == (0, 0)
    assert dict(stats.finished) == {**dict.fromkeys(map(str, FinishReason), 0), "error": 5}
    engine.close()
    assert engine.stats() == stats, "it stays as it ended"


# graphs, pages, queue, compiles


def test_graphs_are_counted_with_the_rows_that_they_had_too_many() -> None:
    engine = shared_engine(Setup(3))
    before, launched = {graph.key: graph for graph in engine.stats().graphs}, list[tuple[int, bool]]()
    real = engine._flights.launch

    def launch(seats: tuple[Seat, ...]) -> None:
        launched.append((len(seats), any(seat.matcher for seat in seats)))
        real(seats)

    vars(engine._flights)["launch"] = launch
    try:
        run(engine, [None] * 3, tokens=6)
        run(engine, CONSTRAINTS[:3], tokens=12)
    finally:
        del vars(engine._flights)["launch"]
    for graph in engine.stats().graphs:
        size = graph.key.rows
        served = [rows for rows, constrained in launched if constrained == graph.key.constrained and size // 2 < rows <= size]
        then = before.get(graph.key)
        rounds, padded, rows = (then.rounds, then.padded_rounds, then.padded_rows) if then else (0, 0, 0)
        assert graph.rounds - rounds == len(served)
        assert graph.padded_rounds - padded == sum(each < size for each in served)
        assert graph.padded_rows - rows == sum(size - each for each in served)
    assert {3} < {rows for rows, _ in launched}, "three rows are served by the graph of four"
    stats = engine.stats()
    assert (stats.eager_rounds, stats.eager_reason) == (0, "") and stats.replays == stats.rounds


def test_eager_rounds_say_why_and_hide_nothing() -> None:
    with make_engine(Setup(2, eager=True, asynchronous=False)) as engine:
        run(engine, CONSTRAINTS[:2], tokens=6)
        stats = engine.stats()
    assert stats.eager_rounds == stats.rounds > 0 and (stats.replays, stats.eager_reason) == (0, "EngineConfig.eager")
    assert stats.exposed_wait_seconds == stats.host_nodes.total > 0


def test_pages_queue_and_first_tokens_of_a_known_crowd() -> None:
    """Pages of eight, 36 of them; each of six requests takes five, and four sit at once."""
    with make_engine(Setup(2, asynchronous=False, eager=True), prefix_reuse=False) as engine:
        jobs = [
            engine.submit([1, 2, place], max_new_tokens=33, sampling=SamplingParams(temperature=0, ignore_eos=True)) for place in range(6)
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


def test_compiles_are_counted_and_timed() -> None:
    with make_engine(Setup(0)) as engine:
        before = engine.stats().grammars
        assert before.compiles == before.misses == len(CONSTRAINTS) - 1
        assert before.compile_seconds >= before.longest_compile_seconds > 0
        engine.compile(Constraint.regex("[a-f]{1,3}"))
        with pytest.raises(ValueError, match="regex"):
            engine.compile(Constraint.regex("(?<=a)b"))
        after = engine.stats().grammars
    assert (after.compiles, after.failures) == (before.compiles + 1, before.failures + (after.misses - before.misses - 1))
    assert after.compile_seconds > before.compile_seconds


# clocks


def test_a_histogram_adds_up() -> None:
    histogram = Histogram((0.1, 1.0), (2, 1, 3), 12.0)
    assert (histogram.count, histogram.cumulative, histogram.mean) == (6, (2, 3, 6), 2.0)
    assert Histogram((1.0,), (0, 0), 0.0).mean == 0.0


def test_time_that_the_main_stream_stood_waiting_is_noted_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host node begins once the main stream has found its mark missing, by a clock that says 7 microseconds for it."""
    missed, main, ticks = threading.Event(), threading.current_thread(), iter([100, 7_100])

    def clock() -> int:
        if threading.current_thread() is not main:
            return 0
        missed.set()
        return next(ticks)

    def step(buffers: StaticBuffers) -> None:
        flow = current_flow()
        begun = flow.record()
        with flow.stream("side"):
            flow.wait(begun)
            flow.host_node("think", lambda: buffers.answer_host.fill_(1), writes=[buffers.answer_host])
            done = flow.record()
        flow.wait(done)
        buffers.answer.copy_(buffers.answer_host, non_blocking=True)

    specs = [BufferSpec("answer", (1,), torch.float32), BufferSpec("answer_host", (1,), torch.float32, "pinned")]
    backend = TapeBackend(delay=lambda name: missed.wait(30) if name == "think" else None)
    recorded = backend.capture(step, StaticBuffers(specs))
    monkeypatch.setattr("stepgraph.graphs.tape_run.time", SimpleNamespace(perf_counter_ns=clock))
    recorded.replay()
    assert backend.stats.wait_ns == 7_000
    backend.close()


def test_a_mark_that_is_there_already_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, reached = BackendStats(wait_ns=0), threading.Lock()
    monkeypatch.setattr("stepgraph.graphs.tape_run.time", SimpleNamespace())  # no clock to ask
    Await(reached, "think", noted)(False)
    assert reached.locked() and noted.wait_ns == 0


def test_what_has_no_grammar_waits_for_none() -> None:
    engine = shared_engine(Setup(3))
    engine.step()  # reads what may still be on its way
    before = engine.stats()
    run(engine, [None] * 2, tokens=8)
    engine.step()
    after = engine.stats()
    assert after.rounds > before.rounds
    assert (after.exposed_wait_seconds, after.host_nodes) == (before.exposed_wait_seconds, before.host_nodes)
    run(engine, CONSTRAINTS[1:3], tokens=8)
    engine.step()
    assert engine.stats().host_nodes.count == engine.backend.stats.host_nodes > before.host_nodes.count


class Slow(Foreign):
    """Takes two milliseconds for a mask, whatever the machine does besides."""

    def fill_next_token_bitmask(self, masks: torch.Tensor, index: int) -> MaskStatus:
        time.sleep(0.002)
        return super().fill_next_token_bitmask(masks, index)


@pytest.mark.parametrize("which", ["python", pytest.param("native", marks=needs_native)])
def test_every_node_is_timed_once_and_a_slow_one_is_not_among_the_quick(which: str) -> None:
    memory = Memory.make(1, 3)
    link: HostLink = native_link(memory) if which == "native" else PythonLink(*memory.all)
    grammar = compiled(Constraint.regex("[ab]*"))
    assert grammar is not None and link.stats.nodes == (0,) * (len(NODE_BOUNDS_NS) + 1)
    matcher: Matcher = Slow(grammar.matcher())
    memory.drafts[:] = CONTROL  # never legal: one mask a node
    for turn in range(3):
        row = link.row(turn + 1, matcher if turn == 1 else grammar.matcher())
        running(memory, row)
        link.announce([row])
        link.node(WALK)()
    stats, slow = link.stats, NODE_BOUNDS_NS.index(1_000_000) + 1
    assert sum(stats.nodes) == 3 and sum(stats.nodes[slow:]) >= 1 <= stats.longest_node_ns // 2_000_000
    assert stats.longest_node_ns <= stats.node_ns
    link.close()
    assert link.stats == stats and link.stats.nodes == stats.nodes, "it is known behind the end"


@needs_native
def test_both_links_sort_times_by_the_same_bounds() -> None:
    assert layout_of(load().quick)[-len(NODE_BOUNDS_NS) :] == NODE_BOUNDS_NS
