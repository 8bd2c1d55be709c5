"""Engines whose launches run many rounds: launches by count, equal tokens, admission, cancellation, time-outs, errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from stepgraph import AsyncEngine, Constraint, Engine, EngineConfig, Job, SamplingParams
from stepgraph.graphs import TapeBackend
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.round_specs import Control, Counter
from stepgraph.runtime.profiled import ROUNDS_VARIABLE
from stepgraph.runtime.watchdog import RoundTimeoutError
from stepgraph.sampling import native
from stepgraph.sampling.params import GREEDY
from tests.helpers.toy_engines import TARGET, VOCABULARY, Setup, make_engine, plain, shared_engine

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

LOOPS = Setup(k=3, grammar_backend="automaton", grammar_lane="device", buckets=(4,), loops=True)
SHAPE = Constraint.regex("[a-c]{20}-[0-9]{9}")
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[Engine]:
    shared = shared_engine(LOOPS)
    yield shared
    finish(shared)


def finish(engine: Engine) -> None:
    while engine.has_work or engine._in_flight.pending:
        engine.step()


def published(engine: Engine) -> int:
    """Rounds that the device has counted. A round counts itself before it decides whether another follows, and then writes its header."""
    return int(engine.buffers.round_counters[Counter.PUBLISHED])


def wait_for(condition: Any) -> None:
    """Waits without a call into the engine."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "the device made no progress"
        time.sleep(0.001)


def start(engine: Engine, prompt: list[int], most: int) -> Job:
    """Submit, and step until its first tokens."""
    job = engine.submit(prompt, max_new_tokens=most, sampling=ENDLESS, num_speculative_tokens=0)
    while not job.tokens:
        engine.step()
    return job


@pytest.mark.parametrize("constraint", [None, SHAPE], ids=["free", "grammar"])
def test_one_launch_per_answer(engine: Engine, constraint: Constraint | None) -> None:
    before = engine.backend.stats.replays
    sampling = GREEDY if constraint else ENDLESS
    job = engine.generate([7, 1], max_new_tokens=80, sampling=sampling, constraint=constraint)
    assert job.tokens == plain([7, 1], 80, constraint, sampling=sampling).tokens
    assert job.rounds > 5 and engine.backend.stats.replays - before == 1


def test_rounds_continue_while_the_python_thread_is_stalled(engine: Engine) -> None:
    job, read = start(engine, [7, 1], 90), engine.stats().rounds
    time.sleep(0.05)
    wait_for(lambda: published(engine) > read + engine.limits.ring_depth)
    assert engine.stats().rounds == read
    finish(engine)
    assert job.tokens == plain([7, 1], 90, sampling=ENDLESS).tokens


def test_results_equal_those_of_single_rounds() -> None:
    runs, sampling = [], SamplingParams(temperature=0.9, top_p=0.9, seed=5, logprobs=True, top_logprobs=2)
    for loops in (True, False):
        one = shared_engine(replace(LOOPS, loops=loops, greedy_only=False, max_top_logprobs=2))
        jobs = [
            one.submit([9, index], max_new_tokens=20 + index, constraint=constraint, sampling=sampling)
            for index, constraint in enumerate((None, SHAPE, None, replace(SHAPE, backend="xgrammar"), SHAPE, None))
        ]
        finish(one)
        runs.append([(job.tokens, job.finish_reason, job.error, job.rounds, job.num_accepted_drafts, job.logprobs) for job in jobs])
    assert runs[0] == runs[1]


def test_stream_receives_events_during_a_launch_and_leaving_it_ends_the_launch() -> None:
    slow = TapeBackend(asynchronous=True, delay=lambda name: time.sleep(pauses[-1]))
    lengths, pauses = list[int](), [0.003]

    async def read(serving: AsyncEngine, leave_after: int) -> Job:
        async with await serving.submit([7, 1], max_new_tokens=90, sampling=ENDLESS, num_speculative_tokens=0) as stream:
            async for event in stream:
                lengths.append(len(event.tokens))
                if len(stream.job.tokens) >= leave_after:
                    break
        return stream.job

    async def serve() -> tuple[Job, Job]:
        with make_engine(replace(LOOPS, k=0, max_rows=1, buckets=None), slow) as engine:
            async with AsyncEngine(engine) as serving:
                before = slow.stats.replays
                whole = await read(serving, 90)
                assert slow.stats.replays - before == 1 and len(lengths) > 2, "one launch, and events while it runs"
                pauses.append(0.03)  # slower rounds, so that a late client leaves before the end
                return whole, await read(serving, 5)

    whole, left = asyncio.run(serve())
    expected = plain([7, 1], 90, sampling=ENDLESS).tokens
    assert whole.tokens == expected and left.tokens == expected[: len(left.tokens)]
    assert left.finish_reason == "cancelled" and len(left.tokens) < 90


def test_late_request_is_admitted_after_at_most_one_round(engine: Engine) -> None:
    first = start(engine, [7, 1], 90)
    second = engine.submit([7, 2], max_new_tokens=60, sampling=ENDLESS)
    launch = engine._in_flight.pending[-1]
    engine._admit()
    engine._prefill([])
    seen = published(engine)
    wait_for(launch.event.query)
    assert published(engine) <= seen + 1
    finish(engine)
    assert [job.tokens for job in (first, second)] == [plain([7, n], most, sampling=ENDLESS).tokens for n, most in ((1, 90), (2, 60))]


def test_launch_ends_when_a_row_finishes_and_a_request_waits(engine: Engine) -> None:
    jobs = [engine.submit([7, index], max_new_tokens=12 if index == 3 else 60, sampling=ENDLESS) for index in range(5)]
    short, waiting = jobs[3:]
    while not (engine._in_flight.pending and len(engine._in_flight.pending[-1].batch.requests) == 4):
        engine.step()
    launch = engine._in_flight.pending[-1]
    wait_for(launch.event.query)
    assert launch.number >= engine.buffers.loop_control_host[Control.STOP_BEFORE], "the host did not interrupt it"
    engine.step()
    assert [job.finished for job in jobs] == [False, False, False, True, False] and not waiting.rounds
    finish(engine)
    assert [job.tokens for job in jobs] == [plain(job.prompt_ids, job.max_new_tokens, sampling=ENDLESS).tokens for job in jobs]
    assert len(short.tokens) == 12


def test_cancelled_job_ends_at_the_next_step_and_the_others_continue(engine: Engine) -> None:
    kept, ended = start(engine, [7, 1], 90), start(engine, [7, 2], 90)
    assert engine.cancel(ended)
    events = engine.step()
    assert any(event.job_id == ended.id and event.finish_reason == "cancelled" for event in events)
    finish(engine)
    assert kept.tokens == plain([7, 1], 90, sampling=ENDLESS).tokens
    assert ended.tokens == plain([7, 2], 90, sampling=ENDLESS).tokens[: len(ended.tokens)]


def test_full_ring_ends_the_launch_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "result_slots", 16)
    with make_engine(replace(LOOPS, k=0, max_rows=1, buckets=None)) as engine:
        job = start(engine, [7, 1], 90)
        while not engine._in_flight.pending:  # the launch of the first step has ended if this thread was slow
            engine.step()
        launch, read = engine._in_flight.pending[-1], engine._in_flight.rounds
        wait_for(launch.event.query)
        assert published(engine) - read == 16 - engine.limits.ring_depth
        finish(engine)
        assert job.tokens == plain([7, 1], 90, sampling=ENDLESS).tokens


def test_grammar_on_the_host_has_one_round_per_launch(engine: Engine) -> None:
    before = engine.backend.stats.replays
    job = engine.generate([7, 1], max_new_tokens=40, constraint=replace(SHAPE, backend="xgrammar"))
    assert job.tokens == plain([7, 1], 40, SHAPE).tokens and job.grammar_lane.startswith("host")
    assert engine.backend.stats.replays - before >= job.rounds


def test_long_prompt_is_prefilled_between_single_rounds(engine: Engine) -> None:
    first, prompt = start(engine, [7, 1], 90), [index % 90 for index in range(30)]
    before = engine.backend.stats.replays
    second = engine.submit(prompt, max_new_tokens=5, sampling=ENDLESS)
    finish(engine)
    assert second.tokens == plain(prompt, 5, sampling=ENDLESS).tokens and first.tokens == plain([7, 1], 90, sampling=ENDLESS).tokens
    assert engine.backend.stats.replays - before >= 30 // LOOPS.prefill_chunk, "each chunk ends a launch"


def test_capture_report_and_statistics(engine: Engine) -> None:
    assert "rounds per launch: until an event; one in graphs with host nodes" in engine.notes
    before = engine.stats()
    job = engine.generate([7, 1], max_new_tokens=30, sampling=ENDLESS)
    after = engine.stats()
    rounds = [sum(graph.rounds for graph in stats.graphs) for stats in (before, after)]
    assert rounds[1] - rounds[0] == after.rounds - before.rounds == job.rounds


def test_device_that_stalls_within_a_loop_times_out() -> None:
    stalled, release = threading.Event(), threading.Event()

    def delay(name: str) -> None:
        if stalled.is_set():
            release.wait(30)

    engine = make_engine(LOOPS, TapeBackend(asynchronous=True, delay=delay), round_timeout_seconds=0.3)
    job = start(engine, [7, 1], 90)
    stalled.set()
    with pytest.raises(RoundTimeoutError, match=r"did not finish within 0\.3 s"):
        finish(engine)
    assert job.finish_reason == "error"
    release.set()


def test_error_within_a_loop_ends_the_engine() -> None:
    failing = threading.Event()

    def delay(name: str) -> None:
        if failing.is_set():
            raise ArithmeticError("planted")

    engine = make_engine(LOOPS, TapeBackend(asynchronous=True, delay=delay))
    job = start(engine, [7, 1], 90)
    failing.set()
    with pytest.raises(ArithmeticError, match="planted"):
        finish(engine)
    assert job.finish_reason == "error" and "planted" in job.error


def test_close_ends_a_running_loop() -> None:
    engine = make_engine(LOOPS)
    job = start(engine, [7, 1], 90)
    engine.close()
    assert job.finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rounds_per_launch": 2}, "rounds_per_launch: got 2, expected 1 or 'until_event'"),
        ({"rounds_per_launch": True}, "rounds_per_launch: got True, expected 1 or 'until_event'"),
        ({"eager": True}, "rounds_per_launch: got 'until_event' with eager=True, expected 1: eager needs the host between two rounds"),
        ({"draft_length": "auto"}, "rounds_per_launch: got 'until_event' with draft_length='auto', expected 1"),
        ({"save_hidden_states": "folder"}, "rounds_per_launch: got 'until_event' with save_hidden_states='folder', expected 1"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"EngineConfig.{message}"):
        EngineConfig(**{"rounds_per_launch": "until_event"} | fields)


def test_engines_that_need_the_host_between_rounds_are_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(rounds_per_launch="until_event", rounds_in_flight=1, backend="tape", draft_length=4)
    with pytest.raises(ValueError, match="rounds_per_launch: got 'until_event', expected 1: a draft function is called"):
        Engine(TARGET, lambda job: [1], vocabulary=VOCABULARY, config=config)
    plain_config = replace(config, num_speculative_tokens=0, draft_length=0)
    with pytest.raises(ValueError, match="None with rounds_per_launch: a recording lists what arrived between two rounds"):
        Engine(TARGET, vocabulary=VOCABULARY, config=plain_config, record=tmp_path / "run.jsonl")
    with Engine(TARGET, vocabulary=VOCABULARY, config=plain_config) as engine, pytest.raises(RuntimeError, match=r"Engine\.trace\(\)"):
        engine.trace()
    monkeypatch.setenv(ROUNDS_VARIABLE, "2-4")
    with pytest.raises(ValueError, match=f"expected 1: {ROUNDS_VARIABLE} profiles single rounds"):
        Engine(TARGET, vocabulary=VOCABULARY, config=plain_config)
