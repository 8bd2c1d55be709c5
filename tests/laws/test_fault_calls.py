"""Exceptions in user code, killed compile workers and exhausted pages: requests that are not affected keep their output.

Models and proposers run during capture, in prompts and in eager rounds; a replay runs no Python.
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
from stepgraph.runtime.hidden_states import StatesWriter
from tests.graphs.test_graph_set import KEYS, Refusing, serve
from tests.graphs.test_graph_set import make as make_refusing
from tests.helpers.aio_runs import check_events
from tests.helpers.call_points import call_raises, worker_dies
from tests.helpers.fault_points import CAUSE, Fault, Point
from tests.helpers.proposers import parrot
from tests.helpers.toy_engines import VOCABULARY, finish
from tests.laws.test_fault_sweep import REQUESTS, SAMPLED, Ending, _check_nothing_is_held, close_by, ending, run, submit, sweep
from tests.laws.test_fault_sweep import make as make_faulty
from tools.train.saved_states import SavedStates

CALLS: dict[str, tuple[Point, bool]] = {  # the fault point, and whether the drafter is a proposer
    "target forward": (call_raises("target", "forward"), False),
    "target logits": (call_raises("target", "logits"), False),
    "draft forward": (call_raises("draft", "forward"), False),
    "draft logits": (call_raises("draft", "logits"), False),
    "proposer": (call_raises("proposer", "propose"), True),
}
SAMPLE = {"target forward": 7, "draft forward": 4, "proposer": 3}
ALL = list(range(len(REQUESTS)))
GREEDY = [index for index in ALL if index not in SAMPLED]


def make(**overrides: Any) -> Engine:
    return make_faulty(eager=True, **overrides)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make() as created:
        yield created


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[Ending]:
    """The result of each request without a fault."""
    return run(engine)


def drafter(proposes: bool) -> Any:
    return parrot() if proposes else None


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.soak) for name in CALLS])
def test_capture_succeeds_after_a_model_raised_in_it(name: str, expected: list[Ending]) -> None:
    point, proposes = CALLS[name]
    template = make(greedy_only=True, draft=drafter(proposes))
    with Engine(
        template._parts.models.target, template._parts.models.drafter, vocabulary=VOCABULARY, config=replace(template.config, eager=False)
    ) as fresh:

        def strike_at(number: int) -> Fault:
            fault = Fault(number)
            with point(fresh, fault), contextlib.suppress(RuntimeError):
                fresh.capture()
            assert fresh.captured != fault.struck
            return fault

        assert sweep(strike_at) >= 2
        assert run(fresh, GREEDY) == [expected[index] for index in GREEDY]
    template.close()


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
    assert struck > 0 or (not eager and name in ("proposer", "draft logits", "target logits")), "prompts call all other methods"


@pytest.fixture(scope="module")
def isolated() -> Iterator[Engine]:
    with make(compile_isolation="process") as created:
        yield created


def kill(isolated: Engine, expected: list[Ending], after_exchange: bool, number: int) -> Fault:
    """Run once with the worker killed once: at most one request fails, none if the worker was idle (after an exchange)."""
    fault = Fault(number)
    with worker_dies(after_exchange)(isolated, fault):
        found = run(isolated)
    changed = [index for index in ALL if found[index] != expected[index]]
    assert len(changed) == (fault.struck and not after_exchange)
    for index in changed:
        tokens, reason, error = found[index]
        assert (tokens, reason) == ((), FinishReason.ERROR) and f"the compile worker died of {signal.SIGKILL.name}" in error
    _check_nothing_is_held(isolated)
    return fault


@pytest.mark.parametrize(("after_exchange", "number"), [(False, 3), (True, 2)])
def test_killed_worker_fails_at_most_one_request(isolated: Engine, expected: list[Ending], after_exchange: bool, number: int) -> None:
    assert kill(isolated, expected, after_exchange, number).struck


@pytest.mark.soak
@pytest.mark.parametrize("after_exchange", [False, True])
def test_worker_killed_at_every_point(isolated: Engine, expected: list[Ending], after_exchange: bool) -> None:
    assert sweep(lambda number: kill(isolated, expected, after_exchange, number)) >= 8


def consume_with_error(engine: Engine, expected: list[Ending], number: int) -> Fault:
    fault, jobs = Fault(number), submit(engine)
    with pytest.raises(RuntimeError, match=CAUSE) if number < 1000 else warnings.catch_warnings():
        for _ in engine.stream():
            fault.strike()
    assert engine.has_work or all(job.finished for job in jobs)
    finish(engine)
    engine.step()
    assert [ending(job) for job in jobs] == expected
    return fault


def test_exception_in_an_event_consumer_does_not_affect_other_jobs(engine: Engine, expected: list[Ending]) -> None:
    for number in (1, 9):
        assert consume_with_error(engine, expected, number).struck
    _check_nothing_is_held(engine)


def test_failing_task_cancels_only_its_own_stream(engine: Engine, expected: list[Ending]) -> None:
    async def read(serving: AsyncEngine, index: int, fault: Fault) -> Job:
        prompt, constraint, sampling = REQUESTS[index]
        async with serving.generate(prompt, constraint=constraint, sampling=sampling, max_new_tokens=14) as stream:
            events = []
            async for event in stream:
                events.append(event)
                if index == 3:
                    fault.strike()
            check_events(events, stream.job)
        return stream.job

    async def serve_all() -> None:
        async with AsyncEngine(engine) as serving:
            readers = [read(serving, index, Fault(1)) for index in ALL]
            results = await asyncio.gather(*readers, return_exceptions=True)
        for index, job in enumerate(results):
            if index == 3:
                assert isinstance(job, RuntimeError) and CAUSE in str(job)
            else:
                assert isinstance(job, Job) and ending(job) == expected[index]
        ended = dict(engine.stats().finished)
        assert ended.get(FinishReason.CANCELLED, 0) - before.get(FinishReason.CANCELLED, 0) <= 1

    before = dict(engine.stats().finished)
    asyncio.run(serve_all())
    engine.step()  # completes the last round, which has no active request
    _check_nothing_is_held(engine)


def test_requests_wait_while_no_page_is_free(engine: Engine, expected: list[Ending]) -> None:
    """A request holds the pages of its maximum length from admission on."""
    first = submit(engine, [0, 4])
    engine.step()
    engine.step()
    prefixes, before = engine._scheduler.rows.page_cache, engine.stats().waiting
    taken = prefixes.allocate(prefixes.num_free)
    assert taken and before == 0 and not any(job.finished for job in first)
    (late,) = submit(engine, [3])
    while not all(job.finished for job in first):
        engine.step()
    assert [ending(job) for job in first] == [expected[0], expected[4]]
    released = prefixes.allocate(prefixes.num_free)  # pages of the finished requests
    for _ in range(3):
        assert engine.step() == [] and not late.tokens
    prefixes.free([*taken, *released])
    finish(engine)
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
        for index in (0, 2, 4):  # one at a time: each text is dropped or written before the next one ends
            jobs += submit(engine, [index])
            finish(engine)
            while engine._parts.hidden_states.writer._buffered_bytes:  # type: ignore[union-attr]
                pass
        assert [ending(job) for job in jobs] == [expected[0], expected[2], expected[4]]
        assert CAUSE in engine.stats().saving_error
    assert len(SavedStates(tmp_path)) == 1


@pytest.mark.parametrize("name", ["step", "close", "capture"])
def test_reentrant_call_from_a_draft_function_is_refused(name: str) -> None:
    engines: list[Engine] = []

    def draft(job: Job) -> list[int]:
        getattr(engines[0], name)()
        return []

    with make_faulty(draft=draft, rounds_in_flight=1, greedy_only=True, eager=True) as engine:
        engines.append(engine)
        job, other = engine.submit([1], max_new_tokens=5), engine.submit([2], max_new_tokens=5, num_speculative_tokens=0)
        finish(engine)
        message = "RuntimeError: Engine: re-entrant step(), capture() or close(); call it after the current one returns"
        assert (job.finish_reason, job.error) == (FinishReason.ERROR, f"the draft function failed: {message}")
        assert len(other.tokens) > 0 and not other.error


def test_cancel_ignores_a_job_of_another_engine(engine: Engine, expected: list[Ending]) -> None:
    """Job ids start at one in every engine, so two engines have jobs of equal id."""
    (job,) = submit(engine, [0])
    other = Job(**{**{field.name: getattr(job, field.name) for field in fields(job) if field.init}, "max_new_tokens": 1})
    assert other.id == job.id and not engine.cancel(other)
    finish(engine)
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
