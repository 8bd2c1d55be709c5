"""What users' code raises, what becomes of a killed worker, and pages that run out: who is not touched does not notice.

Models and proposers run while a round is captured, in prompts, and in rounds that are run eagerly; a replay calls nobody's Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from stepgraph import AsyncEngine, Engine, FinishReason, Job
from stepgraph.runtime.extras.states_folder import SavedStates, StatesWriter
from tests.graphs.test_graph_set import KEYS, Refusing, serve
from tests.graphs.test_graph_set import make as make_refusing
from tests.helpers.aio_runs import check_events
from tests.helpers.call_points import call_raises, worker_dies
from tests.helpers.fault_points import CAUSE, Fault, Point
from tests.helpers.proposers import parrot
from tests.helpers.toy_engines import VOCABULARY
from tests.laws.test_fault_sweep import ASKS, DRAWN, Ending, _check_nothing_is_held, close_by, ending, run, submit, sweep
from tests.laws.test_fault_sweep import make as make_faulty

CALLS: dict[str, tuple[Point, bool]] = {  # and whether it is a proposer that drafts
    "target forward": (call_raises("target", "forward"), False),
    "target logits": (call_raises("target", "logits"), False),
    "draft forward": (call_raises("draft", "forward"), False),
    "draft logits": (call_raises("draft", "logits"), False),
    "proposer": (call_raises("proposer", "propose"), True),
}
SAMPLE = {"target forward": 7, "draft forward": 4, "proposer": 3}
ALL = list(range(len(ASKS)))
GREEDY = [place for place in ALL if place not in DRAWN]


def make(**others: Any) -> Engine:
    return make_faulty(eager=True, **others)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make() as made:
        yield made


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[Ending]:
    """What each says without a fault."""
    return run(engine)


def drafter(proposes: bool) -> Any:
    return parrot() if proposes else None


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.soak) for name in CALLS])
def test_capture_succeeds_after_a_model_raised_in_it(name: str, expected: list[Ending]) -> None:
    point, proposes = CALLS[name]
    made = make(greedy_only=True, draft=drafter(proposes))
    with Engine(
        made._parts.models.target, made._parts.models.drafter, vocabulary=VOCABULARY, config=replace(made.config, eager=False)
    ) as fresh:

        def strike_at(number: int) -> Fault:
            fault = Fault(number)
            with point(fresh, fault), contextlib.suppress(RuntimeError):
                fresh.capture()
            assert fresh.step_gate.captured != fault.struck
            return fault

        assert sweep(strike_at) >= 2
        assert run(fresh, GREEDY) == [expected[place] for place in GREEDY]
    made.close()


@pytest.mark.parametrize("name", SAMPLE)
def test_model_error_closes_the_engine_and_is_raised(name: str) -> None:
    point, proposes = CALLS[name]
    assert close_by("python", point, SAMPLE[name], eager=True, draft=drafter(proposes)).struck


@pytest.mark.soak
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_a_model(name: str, eager: bool) -> None:
    point, proposes = CALLS[name]
    struck = sweep(lambda number: close_by("python", point, number, eager=eager, draft=drafter(proposes)))
    assert struck > 0 or (not eager and name in ("proposer", "draft logits", "target logits")), "these are in no prompt"


@pytest.fixture(scope="module")
def isolated() -> Iterator[Engine]:
    with make(compile_isolation="process") as made:
        yield made


def kill(isolated: Engine, expected: list[Ending], behind: bool, number: int) -> Fault:
    """One run in which the worker dies once: it is one request's error, or nobody's where the worker had nothing to do."""
    fault = Fault(number)
    with worker_dies(behind)(isolated, fault):
        found = run(isolated)
    changed = [place for place in ALL if found[place] != expected[place]]
    assert len(changed) == (fault.struck and not behind)
    for place in changed:
        tokens, reason, error = found[place]
        assert (tokens, reason) == ((), FinishReason.ERROR) and f"the compile worker died of {signal.SIGKILL.name}" in error
    _check_nothing_is_held(isolated)
    return fault


@pytest.mark.parametrize(("behind", "number"), [(False, 3), (True, 2)])
def test_killed_worker_fails_at_most_one_request(isolated: Engine, expected: list[Ending], behind: bool, number: int) -> None:
    assert kill(isolated, expected, behind, number).struck


@pytest.mark.soak
@pytest.mark.parametrize("behind", [False, True])
def test_worker_killed_at_every_point(isolated: Engine, expected: list[Ending], behind: bool) -> None:
    assert sweep(lambda number: kill(isolated, expected, behind, number)) >= 8


def read_by_one_who_raises(engine: Engine, expected: list[Ending], number: int) -> Fault:
    fault, jobs = Fault(number), submit(engine)
    with pytest.raises(RuntimeError, match=CAUSE) if number < 1000 else warnings.catch_warnings():
        for _ in engine.stream():
            fault.strike()
    assert engine.has_work or all(job.finished for job in jobs)
    for _ in engine.stream():
        pass
    engine.step()
    assert [ending(job) for job in jobs] == expected
    return fault


def test_exception_in_an_event_consumer_does_not_affect_other_jobs(engine: Engine, expected: list[Ending]) -> None:
    for number in (1, 9):
        assert read_by_one_who_raises(engine, expected, number).struck
    _check_nothing_is_held(engine)


def test_failing_task_cancels_only_its_own_stream(engine: Engine, expected: list[Ending]) -> None:
    async def read(serving: AsyncEngine, place: int, fault: Fault) -> Job:
        prompt, constraint, sampling = ASKS[place]
        async with serving.generate(prompt, constraint=constraint, sampling=sampling, max_new_tokens=14) as stream:
            events = []
            async for event in stream:
                events.append(event)
                if place == 3:
                    fault.strike()
            check_events(events, stream.job)
        return stream.job

    async def scene() -> None:
        async with AsyncEngine(engine) as serving:
            readers = [read(serving, place, Fault(1)) for place in ALL]
            told = await asyncio.gather(*readers, return_exceptions=True)
        for place, job in enumerate(told):
            if place == 3:
                assert isinstance(job, RuntimeError) and CAUSE in str(job)
            else:
                assert isinstance(job, Job) and ending(job) == expected[place]
        ended = dict(engine.stats().finished)
        assert ended.get(FinishReason.CANCELLED, 0) - before.get(FinishReason.CANCELLED, 0) <= 1

    before = dict(engine.stats().finished)
    asyncio.run(scene())
    engine.step()  # the last round, in which nobody is left
    _check_nothing_is_held(engine)


def test_requests_wait_while_no_page_is_free(engine: Engine, expected: list[Ending]) -> None:
    """An answer has the pages of its longest end from its beginning on."""
    first = submit(engine, [0, 4])
    engine.step()
    engine.step()
    prefixes, before = engine._scheduler.rows._pages, engine.stats().waiting
    taken = prefixes.allocate(prefixes.num_free)
    assert taken and before == 0 and not any(job.finished for job in first)
    (late,) = submit(engine, [3])
    while not all(job.finished for job in first):
        engine.step()
    assert [ending(job) for job in first] == [expected[0], expected[4]]
    given = prefixes.allocate(prefixes.num_free) or ()  # of those who have ended
    for _ in range(3):
        assert engine.step() == [] and not late.tokens
    prefixes.free([*taken, *given])
    for _ in engine.stream():
        pass
    assert engine.step() == [] and ending(late) == expected[3]
    _check_nothing_is_held(engine)


def test_failed_saving_does_not_affect_jobs_when_warnings_are_errors(
    tmp_path: Path, expected: list[Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, real = Fault(2), StatesWriter._write_shard

    def write(writer: StatesWriter, texts: Any) -> None:
        fault.strike()
        real(writer, texts)

    monkeypatch.setattr(StatesWriter, "_write_shard", write)
    with make(save_hidden_states=tmp_path, states_shard_bytes=1) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        jobs = []
        for place in (0, 2, 4):  # one by one: each is refused, or written, before the next one ends
            jobs += submit(engine, [place])
            for _ in engine.stream():
                pass
            while engine._parts.hidden_states._writer._held:  # type: ignore[union-attr]
                pass
        assert [ending(job) for job in jobs] == [expected[0], expected[2], expected[4]]
        assert CAUSE in engine.stats().saving_error
    assert len(SavedStates(tmp_path)) == 1


@pytest.mark.parametrize("name", ["step", "close", "capture"])
def test_reentrant_call_from_a_draft_function_is_refused(name: str) -> None:
    kept: list[Engine] = []

    def draft(job: Job) -> list[int]:
        getattr(kept[0], name)()
        return []

    with make_faulty(draft=draft, rounds_in_flight=1, greedy_only=True, eager=True) as engine:
        kept.append(engine)
        job, other = engine.submit([1], max_new_tokens=5), engine.submit([2], max_new_tokens=5, num_speculative_tokens=0)
        for _ in engine.stream():
            pass
        told = "RuntimeError: Engine: re-entrant step(), capture() or close(); call it after the current one returns"
        assert (job.finish_reason, job.error) == (FinishReason.ERROR, f"the draft function failed: {told}")
        assert len(other.tokens) > 0 and not other.error


def test_cancel_ignores_a_job_of_another_engine(engine: Engine, expected: list[Ending]) -> None:
    """Every engine counts its jobs from one."""
    (job,) = submit(engine, [0])
    other = Job(**{**{field.name: getattr(job, field.name) for field in fields(job) if field.init}, "max_new_tokens": 1})
    assert other.id == job.id and not engine.cancel(other)
    for _ in engine.stream():
        pass
    assert ending(job) == expected[0]


@pytest.mark.soak
@pytest.mark.parametrize("number", range(1, len(KEYS) + 1))
def test_capture_failure_of_every_key(number: int) -> None:
    with make_refusing(Refusing(number), on_capture_failure="eager") as engine:
        (failed,) = engine.capture().failed
        assert failed.key == KEYS[number - 1]
        for rows in (1, 2, 4):
            for grammar in (0, 1):
                serve(engine, rows, grammar)
