"""Single faults: the n-th operation at a fault point fails, for every n until a run has no fault. Unaffected requests keep their output.

`make test` runs a fixed sample, `make soak` all of them.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from stepgraph import Constraint, Engine, EngineConfig, FinishReason, Job, SamplingParams
from stepgraph.graphs import TapeBackend
from stepgraph.runtime.request import EngineClosedError
from stepgraph.sampling.grammar.link.native import HostLinkName
from tests.helpers.fault_points import (
    CALLS,
    CAUSE,
    DRAFT_NONSENSE,
    Fault,
    FaultyDraft,
    FaultyTarget,
    Point,
    between_rounds_raises,
    compile_fails,
    draft_not_finite,
    function_raises,
    host_node_raises,
    matcher_call,
    pages_empty,
    push_batch_raises,
    replay_raises,
    ring_full,
    target_not_finite,
)
from tests.helpers.toy_engines import SCHEMA, STOP, VOCABULARY, finish, needs_native

Ending = tuple[tuple[int, ...], FinishReason | None, str]
REQUESTS: tuple[tuple[list[int], Constraint | None, SamplingParams | None], ...] = (
    ([1, 2], None, None),
    ([3], Constraint.json_schema(SCHEMA, backend="xgrammar"), None),
    ([4, 5], Constraint.regex(r"\d{3}-\d{4}", backend="llguidance"), None),
    ([6, 7, 8, 9, 10, 11, 12], None, SamplingParams(temperature=0.8, seed=5)),
    ([8], Constraint.regex("[a-c]{2,9}x?", backend="xgrammar"), None),
    ([9, 9], Constraint.json_schema(SCHEMA, backend="llguidance"), SamplingParams(temperature=0.7, seed=11)),
)
SAMPLED = [index for index, (_, _, sampling) in enumerate(REQUESTS) if sampling]
LINKS = ["python", pytest.param("native", marks=needs_native)]
MOST_STEPS = 20_000  # limit of a run; an engine that waits for a grammar makes one step per millisecond

AFFECTS_ONE: dict[str, Point] = {
    **{f"{library} {operation}": matcher_call(library, operation) for library in ("xgrammar", "llguidance") for operation in CALLS},
    "compile": compile_fails,
    "target": target_not_finite,
}
AFFECTS_NONE: dict[str, Point] = {
    "ring": ring_full,
    "pages": pages_empty,
    **{f"draft {value}": draft_not_finite(value) for value in DRAFT_NONSENSE},
}
CLOSES: dict[str, Point] = {
    "host node": host_node_raises,
    "replay": replay_raises,
    "between rounds": between_rounds_raises,
    "push_batch": push_batch_raises,
}
ENGINES: list[Engine] = []  # shared by the test cases, closed by `closed`
# The operation number that fails in the sample, by fault point; 1 for the others
SAMPLE = {"xgrammar accept": 2, "xgrammar fill": 8, "llguidance accept": 5, "llguidance fill": 3, "target": 9}


def make(host_link: HostLinkName = "python", draft: Any = None, **overrides: Any) -> Engine:
    target = FaultyTarget(VOCABULARY.logits_width, seed=3, biases={STOP: 2.0})
    sizes = {"max_rows": 3, "buckets": (3,), "num_speculative_tokens": 2, "draft_length": 2}
    options: dict[str, Any] = {**sizes, "compile_isolation": "none", **overrides}
    config = EngineConfig(
        max_length=48,
        page_size=8,
        prefill_chunk=5,
        grammar_lane="host",
        host_link=host_link,
        max_compiles=1,
        backend="tape",
        **options,
    )
    draft = draft or FaultyDraft(target, 0.8)
    engine = Engine(target, draft, vocabulary=VOCABULARY, config=config, backend=TapeBackend(asynchronous=True))
    engine.capture()
    compile_all(engine)
    return engine


def compile_all(engine: Engine) -> None:
    """Compile all grammars first, so that requests are admitted in submission order and matchers are created at admission."""
    for _, constraint, _ in REQUESTS:
        if constraint is not None:
            engine.compile(constraint)


def submit(engine: Engine, indices: Sequence[int] = range(len(REQUESTS))) -> list[Job]:
    requests = [REQUESTS[index] for index in indices]
    return [engine.submit(ids, constraint=grammar, sampling=sampling, max_new_tokens=14) for ids, grammar, sampling in requests]


def run(engine: Engine, indices: Sequence[int] = range(len(REQUESTS))) -> list[Ending]:
    jobs = submit(engine, indices)
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            assert engine.step() == [], "the last round has no active request"
            return [ending(job) for job in jobs]
        engine.step()
    raise AssertionError(f"{[job.id for job in jobs if not job.finished]} did not finish")


def ending(job: Job) -> Ending:
    return tuple(job.tokens), job.finish_reason, job.error


@functools.cache
def shared(host_link: HostLinkName) -> tuple[Engine, list[Ending]]:
    """A shared engine, and the result of each request without a fault."""
    engine = make(host_link)
    ENGINES.append(engine)
    found = run(engine)
    assert not any(error for _, _, error in found) and all(tokens for tokens, _, _ in found)
    return engine, found


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    for engine in ENGINES:
        engine.close()


def run_with_fault(host_link: HostLinkName, point: Point, number: int, affected: int) -> Fault:
    """Run once with one fault: at most `affected` requests end with its cause, the others as usual; nothing leaks."""
    engine, expected = shared(host_link)
    rows, fault = list[weakref.ref[Any]](), Fault(number)
    with point(engine, fault), pytest.MonkeyPatch.context() as patch:
        create = engine._parts.host_link.row
        patch.setattr(engine._parts.host_link, "row", lambda *arguments: _recorded(rows, create(*arguments)))
        found = run(engine)
    if point is compile_fails:
        compile_all(engine)
    _check_affected(point, fault, found, expected, affected)
    _check_nothing_is_held(engine, rows)
    assert run(engine, [2, 4]) == [expected[2], expected[4]], "requests after the fault"
    return fault


def _recorded(rows: list[weakref.ref[Any]], row: Any) -> Any:
    rows.append(weakref.ref(row))
    return row


def _check_affected(point: Point, fault: Fault, found: list[Ending], expected: list[Ending], affected: int) -> None:
    changed = [index for index, ended in enumerate(found) if ended != expected[index]]
    if affected == 0:  # other drafts change the random numbers of a sampled text, but never a greedy text
        assert set(changed) <= (set(SAMPLED) if point not in (ring_full, pages_empty) else set())
        assert not any(error for _, _, error in found)
        return
    assert len(changed) <= (affected if fault.struck else 0), f"{changed} of {found}"
    for index in changed:
        tokens, reason, error = found[index]
        assert (reason, tokens) == (FinishReason.ERROR, expected[index][0][: len(tokens)])
        assert CAUSE in error or "not finite" in error


def _check_nothing_is_held(engine: Engine, rows: Sequence[weakref.ref[Any]] = ()) -> None:
    compiler = engine._parts.compiler
    assert compiler is not None
    held = engine._scheduler.active, engine._in_flight.pending, engine.queue.waiting, engine.queue.unfinished
    assert not any(map(len, held))
    assert engine._scheduler.rows.page_cache.num_free == engine.limits.num_pages
    assert not any(entry.claims for entry in compiler._cache._entries.values())
    if any(row() for row in rows):
        gc.collect()  # tracebacks form reference cycles
    assert not any(row() for row in rows), "matchers of finished requests are still alive"


def sweep(strike_at: Callable[[int], Fault]) -> int:
    """Call `strike_at` with 1, 2, ... until a run has no fault; return the number of faults."""
    for number in range(1, 2000):
        if not strike_at(number).struck:
            return number - 1
    raise AssertionError("every run had a fault")


@pytest.mark.parametrize("host_link", LINKS)
def test_a_sample_of_single_faults(host_link: HostLinkName) -> None:
    struck = 0
    for name, point in AFFECTS_ONE.items():
        struck += run_with_fault(host_link, point, SAMPLE.get(name, 1), 1).struck
    assert struck == len(AFFECTS_ONE)
    for name in ("ring", "pages", "draft nan"):
        assert run_with_fault(host_link, AFFECTS_NONE[name], 3, 0).struck, name


@pytest.mark.soak
@pytest.mark.parametrize("host_link", LINKS)
@pytest.mark.parametrize("name", [*AFFECTS_ONE, *AFFECTS_NONE])
def test_every_single_fault(name: str, host_link: HostLinkName) -> None:
    point = (AFFECTS_ONE | AFFECTS_NONE)[name]
    assert sweep(lambda number: run_with_fault(host_link, point, number, int(name in AFFECTS_ONE))) > 0


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("stepgraph")}


def close_by(host_link: HostLinkName, point: Point, number: int, **overrides: Any) -> Fault:
    """Run until an engine-wide fault: it closes the engine and ends every active job with its cause; finished jobs keep their result."""
    expected, before, fault = shared(host_link)[1], threads(), Fault(number)
    engine = make(host_link, greedy_only=True, **overrides)
    greedy = [index for index in range(len(REQUESTS)) if index not in SAMPLED]
    with point(engine, fault):
        jobs = submit(engine, greedy)
        raised = ""
        try:
            finish(engine)
            engine.step()  # the last round, which has no active request, may be the one that fails
        except Exception as error:
            raised = str(error)
    for job, index in zip(jobs, greedy, strict=True):
        if not fault.struck or job.finish_reason != FinishReason.ERROR:
            assert ending(job) == expected[index]
        else:
            assert CAUSE in job.error and tuple(job.tokens) == expected[index][0][: len(job.tokens)]
    assert (CAUSE in raised) == fault.struck
    if fault.struck:
        with pytest.raises(EngineClosedError, match=CAUSE):
            engine.submit([1])
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.free_pages, engine.has_work) == (0, 0, stats.pages, False)
    engine.close()
    for thread in threads() - before:
        thread.join(30)
    assert threads() <= before
    return fault


def test_engine_fault_closes_the_engine_and_is_raised() -> None:
    assert close_by("python", host_node_raises, 7).struck


@pytest.mark.soak
@pytest.mark.parametrize("host_link", LINKS)
@pytest.mark.parametrize("name", CLOSES)
def test_every_engine_fault(name: str, host_link: HostLinkName) -> None:
    allocation = "grow" if name == "between rounds" else "reserve"
    assert sweep(lambda number: close_by(host_link, CLOSES[name], number, page_allocation=allocation)) > 0


def check_draft_function(engine: Engine, fault: Fault, expected: list[Ending]) -> Fault:
    greedy = [index for index in range(len(REQUESTS)) if index not in SAMPLED]
    found = run(engine, greedy)
    changed = [index for index, ended in zip(greedy, found, strict=True) if ended != expected[index]]
    assert len(changed) == fault.struck
    for index, (tokens, reason, error) in zip(greedy, found, strict=True):
        if index in changed:
            assert (reason, tokens) == (FinishReason.ERROR, expected[index][0][: len(tokens)])
            assert error == f"the draft function failed: RuntimeError: {CAUSE} {fault.number}"
    _check_nothing_is_held(engine)
    return fault


@pytest.mark.parametrize("most", [9, pytest.param(1000, marks=pytest.mark.soak)])
def test_failing_draft_function_ends_only_its_request(most: int) -> None:
    fault, (_, expected) = Fault(0), shared("python")
    with make(draft=function_raises(fault), rounds_in_flight=1, greedy_only=True, eager=True) as engine:

        def strike_at(number: int) -> Fault:
            fault.number, fault.seen = number, 0
            return check_draft_function(engine, fault, expected)

        if most == 1000:
            assert sweep(strike_at) > 20
        else:
            assert strike_at(1).struck and strike_at(most).struck
