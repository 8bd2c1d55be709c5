"""Requests with a limit of seconds end with `timeout` at the next step, wherever they are, and free what they hold."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stepgraph import AsyncEngine, Constraint, Engine, EngineConfig, FinishReason, Job, SamplingParams
from stepgraph.runtime import request_queue, scheduler
from stepgraph.runtime.replay import read_recording, replay
from tests.helpers.toy_engines import TARGET, VOCABULARY, finish
from tests.laws.test_interrupts import interrupted

CONFIG = EngineConfig(
    max_rows=1, num_speculative_tokens=0, max_length=64, page_size=4, buckets=(1,), greedy_only=True, compile_isolation="none"
)
HOUR = 3600.0
ENDLESS = SamplingParams(ignore_eos=True)


class Clock:
    """The clock that deadlines are compared with; `submitted_at` is the real time."""

    late = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (request_queue, scheduler):
        monkeypatch.setattr(module, "time", clock)
    return clock


def engine_with(**changes: object) -> Engine:
    return Engine(TARGET, vocabulary=VOCABULARY, config=replace(CONFIG, **changes))  # type: ignore[arg-type]


def is_idle(engine: Engine) -> bool:
    stats = engine.stats()
    return not engine.has_work and stats.free_pages == stats.pages and not engine.queue.active


def decode(engine: Engine, job: Job) -> None:
    for _ in range(100):
        if len(job.tokens) < 5:
            engine.step()
    assert len(job.tokens) >= 5 and not job.finished


def ends(engine: Engine, job: Job) -> bool:
    """Whether the next step ends it, with an event that says so."""
    events = [event for event in engine.step() if event.job_id == job.id and event.finish_reason]
    return [event.finish_reason for event in events] == [FinishReason.TIMEOUT] == [job.finish_reason] and not job.error


def test_a_decoding_request_ends_and_keeps_its_tokens(clock: Clock) -> None:
    with engine_with() as engine:
        expected = engine.generate([1, 2], max_new_tokens=40, sampling=ENDLESS).tokens
        job = engine.submit([1, 2], max_new_tokens=40, sampling=ENDLESS, timeout_seconds=HOUR)
        other = engine.submit([1, 2], max_new_tokens=40, sampling=ENDLESS, timeout_seconds=2 * HOUR)
        decode(engine, job)
        clock.late = HOUR
        assert ends(engine, job) and job.tokens == expected[: len(job.tokens)] and len(job.tokens) < 10
        assert [each.job.id for each in engine.queue.active.values()] == [other.id], "its row is free in the same step"
        with pytest.raises(ValueError, match=r"Job\.parsed: .* finish_reason is timeout"):
            _ = job.parsed
        finish(engine)
        assert other.tokens == expected and is_idle(engine)
        assert dict(engine.stats().finished)["timeout"] == 1


def test_a_request_within_its_prompt_ends(clock: Clock) -> None:
    with engine_with(prefill_chunk=4) as engine:
        job = engine.submit([7] * 50, timeout_seconds=HOUR)
        engine.step()
        clock.late = HOUR
        assert ends(engine, job) and not job.tokens and is_idle(engine)


def test_requests_that_wait_for_a_row_or_pages_end(clock: Clock) -> None:
    for changes in ({}, {"max_rows": 2, "num_pages": 16, "buckets": (2,)}):
        clock.late = 0
        with engine_with(**changes) as engine:
            first = engine.submit([1, 2], max_new_tokens=60, sampling=ENDLESS)
            engine.step()
            job = engine.submit([3, 4], max_new_tokens=60, sampling=ENDLESS, timeout_seconds=HOUR)
            engine.step()
            assert list(engine.queue.active) == [first.id]
            clock.late = HOUR
            assert ends(engine, job) and list(engine.queue.active) == [first.id] and not engine.queue.waiting


def test_a_request_that_waits_for_its_grammar_wakes_the_stepping_thread() -> None:
    """The compile never ends. `wait` returns at the deadline, and not before."""
    with engine_with() as engine:
        engine.queue.prepare = lambda *_: None  # type: ignore[method-assign]
        job = engine.submit([1], constraint=Constraint.regex("[a-c]{3}"), timeout_seconds=0.05)
        calls = [engine.wait() for _ in range(2)]  # the first returns as the request has arrived
        assert calls == [False, True] and time.perf_counter() >= job.submitted_at + 0.05
        assert ends(engine, job) and is_idle(engine)
        assert engine.compile(Constraint.regex("[a-c]{3}")), "its claim is released"


def test_a_cancelled_request_keeps_its_reason(clock: Clock) -> None:
    with engine_with() as engine:
        job = engine.submit([1], timeout_seconds=HOUR)
        engine.cancel(job)
        clock.late = HOUR
        finish(engine)
        assert job.finish_reason == FinishReason.CANCELLED


def test_expired_requests_end_after_an_interrupt(clock: Clock) -> None:
    clock.late, index, was_interrupted = HOUR, 0, True
    with engine_with() as engine:
        while was_interrupted:
            job = engine.submit([1], timeout_seconds=HOUR)
            was_interrupted = interrupted(index := index + 1, engine.queue.expire)
            engine.step()
            assert job.finish_reason == FinishReason.TIMEOUT, index
    assert index > 5


def test_deadlines_of_ended_requests_are_forgotten(clock: Clock) -> None:
    with engine_with() as engine:
        engine.generate([1], max_new_tokens=2, timeout_seconds=HOUR)
        clock.late = HOUR
        engine.step()
        assert engine.queue.next_deadline == float("inf") and not engine.wait(0)


def test_an_async_engine_ends_requests_without_steps() -> None:
    """Its thread sleeps, since the grammar of the only request is never compiled."""

    async def run(engine: Engine) -> Job:
        async with AsyncEngine(engine) as serving:
            engine.queue.prepare = lambda *_: None  # type: ignore[method-assign]
            return await asyncio.wait_for(serving.generate([1], constraint=Constraint.regex("a{3}"), timeout_seconds=0.05).result(), 30)

    with engine_with() as engine:
        assert asyncio.run(run(engine)).finish_reason == FinishReason.TIMEOUT and is_idle(engine)


def test_a_launch_of_many_rounds_ends(clock: Clock) -> None:
    with engine_with(rounds_per_launch="until_event", draft_length=0, max_length=2048) as engine:
        job = engine.submit([1, 2], sampling=ENDLESS, timeout_seconds=HOUR)
        decode(engine, job)
        clock.late = HOUR
        assert ends(engine, job) and is_idle(engine)


def test_a_recorded_timeout_is_replayed(clock: Clock, tmp_path: Path) -> None:
    with Engine(TARGET, vocabulary=VOCABULARY, config=CONFIG, record=(path := tmp_path / "run.jsonl")) as engine:
        job = engine.submit([1, 2], max_new_tokens=40, sampling=ENDLESS, timeout_seconds=HOUR)
        decode(engine, job)
        clock.late = HOUR
        finish(engine)
        assert job.finish_reason == FinishReason.TIMEOUT
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    late = [line | {"step": line["step"] + 2} if line["kind"] == "end" else line for line in lines]  # the replay decodes more tokens
    path.write_text("".join(json.dumps(line) + "\n" for line in late))
    report = replay(read_recording(path), TARGET, None, VOCABULARY)
    assert report.equal and report.recorded_tokens == len(job.tokens), report.differences


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "1", True, 1e30])
def test_wrong_limits_are_refused(seconds: object) -> None:
    with engine_with() as engine:
        with pytest.raises(ValueError, match=r"timeout_seconds: got .*, expected a number above 0 and at most"):
            engine.submit([1], timeout_seconds=seconds)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="got the keyword 'timeout', expected timeout_seconds"):
            engine.submit([1], timeout=3)  # type: ignore[call-overload]
        assert not engine.has_work
