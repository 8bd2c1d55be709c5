"""Round time-outs: a step on a hanging device raises, logs a report, and leaves nothing waiting."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepgraph import AsyncEngine, Constraint, Engine, EngineConfig, FinishReason, Job
from stepgraph.graphs import TapeBackend, round_specs
from stepgraph.graphs.context import COPY_STREAM
from stepgraph.graphs.round_specs import IMAGE_CHUNKS
from stepgraph.runtime.models.toy import ToyDraft
from stepgraph.runtime.request import EngineClosedError
from stepgraph.runtime.watchdog import RoundTimeoutError
from stepgraph.sampling import native
from tests.helpers.toy_engines import CONSTRAINTS, TARGET, VOCABULARY, Setup, finish, make_engine, plain

LIMIT = 0.2
JOIN_SECONDS = 30


class Hang:
    """Blocks its callers from the `number`-th matching call on, until `let_go`; JOIN_SECONDS at most, which ends a step without a limit."""

    def __init__(self, name: str = "commit", number: int = 1) -> None:
        self._name, self._left = name, number
        self._gone, self.reached = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        if name == self._name and not self._gone.is_set():
            self._left -= 1
            if self._left <= 0:
                self.reached.set()
                self._gone.wait(JOIN_SECONDS)

    def let_go(self) -> None:
        self._gone.set()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("stepgraph")}


@pytest.fixture
def hang() -> Iterator[Hang]:
    before, hang = threads(), Hang(number=3)
    yield hang
    hang.let_go()
    for thread in threads() - before:
        thread.join(JOIN_SECONDS)
    assert threads() <= before, "the hanging thread ends once released"


def make(hang: Callable[[str], object] | None, **others: Any) -> Engine:
    setup = Setup(1, max_rows=2, buckets=(2,), grammar_lane="host", host_link="python")
    return make_engine(setup, TapeBackend(asynchronous=True, delay=hang), **{"round_timeout_seconds": LIMIT, **others})


def submit(engine: Engine) -> list[Job]:
    return [engine.submit([index], constraint=CONSTRAINTS[index], max_new_tokens=20) for index in range(2)]


def test_hanging_host_node_raises_and_logs_a_report(hang: Hang, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(hang)
    jobs = submit(engine)
    doing = "stream main: waits for commit; stream side: host node commit"
    with pytest.raises(RoundTimeoutError, match=rf"did not finish within 0.2 s \(EngineConfig.round_timeout_seconds\): {doing}"):
        finish(engine)
    (record,) = [record for record in caplog.records if record.name == "stepgraph"]
    reason = record.getMessage()
    assert "in flight: round 2 (rows=2 constrained greedy), round 3 (rows=2 constrained greedy)" in reason
    assert "stream side: host node commit" in reason and "host nodes, python, under the GIL: 5 ended" in reason
    assert "thread MainThread:" in reason and "thread stepgraph-side:" in reason and "self._gone.wait(JOIN_SECONDS)" in reason
    for job, index in zip(jobs, range(2), strict=True):
        assert job.finish_reason == FinishReason.ERROR and "RoundTimeoutError: the device did not finish" in job.error
        assert job.tokens == plain([index], 20, CONSTRAINTS[index]).tokens[: len(job.tokens)]
    with pytest.raises(EngineClosedError, match="did not finish within"):
        engine.submit([1])
    assert not engine.has_work and engine.stats().free_pages == engine.stats().pages
    engine.close()


def on_demand(hang: Callable[[str], object] | None, record: Path | None = None, **others: Any) -> Engine:
    """An engine that records each graph at its first use."""
    given: dict[str, Any] = {"max_rows": 2, "draft_length": 1, "max_length": 64, "compile_isolation": "none", "grammar_lane": "host"}
    backend = TapeBackend(asynchronous=True, delay=hang)
    config = EngineConfig(**given | others)
    target = copy.deepcopy(TARGET)  # an update that fails closes all engines of its target
    engine = Engine(target, ToyDraft(target), vocabulary=VOCABULARY, config=config, backend=backend, record=record)
    engine.compile(CONSTRAINTS[1])
    return engine


def test_recording_a_graph_on_demand_times_out_while_a_round_hangs(hang: Hang) -> None:
    engine = on_demand(hang, round_timeout_seconds=LIMIT)
    jobs = [engine.submit([1], constraint=CONSTRAINTS[1], max_new_tokens=20)]
    while engine.stats().rounds < 3:
        engine.step()
    assert hang.reached.wait(JOIN_SECONDS)
    jobs.append(engine.submit([2], max_new_tokens=4))
    with pytest.raises(RoundTimeoutError, match="host node commit"):
        finish(engine)
    assert {job.finish_reason for job in jobs} == {FinishReason.ERROR}


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
def test_copies_of_grammars_time_out_while_a_round_hangs(tmp_path: Path) -> None:
    """With a recording a step waits for room in the ring of copies, and these wait for the rounds before them."""
    hang, count = Hang("main"), IMAGE_CHUNKS + 1
    others = {"max_rows": 1 + count, "rounds_in_flight": 4, "grammar_lane": "device", "grammar_backend": "automaton"}
    engine = on_demand(hang, tmp_path / "run.jsonl", round_timeout_seconds=LIMIT, **others)
    jobs = [engine.submit([1], max_new_tokens=20)]
    engine.step()
    assert hang.reached.wait(JOIN_SECONDS)
    for constraint in [Constraint.regex(f"[a-c]{{{size}}}") for size in range(2, 2 + count)]:
        engine.compile(constraint)
        jobs.append(engine.submit([2], constraint=constraint, max_new_tokens=4))
    with pytest.raises(RoundTimeoutError, match="stream main: stage"):
        engine.step()
    assert {job.finish_reason for job in jobs} == {FinishReason.ERROR}
    hang.let_go()


def test_error_of_a_round_is_not_that_of_the_graph_recorded_next() -> None:
    engine = on_demand(None)
    engine.backend.run(lambda: 1 / 0)
    engine.submit([2], max_new_tokens=4)
    with pytest.raises(ZeroDivisionError):
        finish(engine)


@pytest.mark.parametrize("in_copy", [False, True])
def test_an_update_of_weights_times_out_while_the_device_hangs(in_copy: bool, caplog: pytest.LogCaptureFixture) -> None:
    """In earlier work, or in the copy, which the error then names."""
    engine, hang = on_demand(None, round_timeout_seconds=LIMIT), Hang()
    launch = engine.backend.run

    def run(function: Callable[[], object]) -> None:
        launch(function)
        launch(lambda: hang("commit"))

    if in_copy:
        engine.backend.run = run  # type: ignore[method-assign]
    else:
        launch(lambda: hang("commit"))
    with pytest.raises(RoundTimeoutError, match=r"seconds\)" + ": copy of new weights" * in_copy + "$"):
        engine.update_weights({})
    with pytest.raises(EngineClosedError, match="did not finish within"):
        engine.step()
    assert ("\ncopy of new weights\n" in caplog.text) == in_copy
    hang.let_go()


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@pytest.mark.parametrize("chunk", [8, None])  # with the first, a grammar needs more than one turn of the ring, for which no step waits
def test_a_copy_of_a_grammar_that_hangs_times_out_with_its_name(monkeypatch: pytest.MonkeyPatch, chunk: int | None) -> None:
    monkeypatch.setattr(round_specs, "IMAGE_CHUNK_INTS", chunk or round_specs.IMAGE_CHUNK_INTS)
    hang = Hang(COPY_STREAM)
    engine = on_demand(hang, round_timeout_seconds=LIMIT, grammar_lane="device", grammar_backend="automaton")
    for _ in range(2):
        engine.submit([2], constraint=CONSTRAINTS[1], max_new_tokens=4)

    def step_for(seconds: float) -> None:
        end = time.monotonic() + seconds
        while engine.has_work and time.monotonic() < end:
            engine.step()

    with pytest.raises(RoundTimeoutError, match=r"seconds\): copy of a grammar$"):
        step_for(JOIN_SECONDS)
    hang.let_go()


@pytest.mark.parametrize("raised", [None, KeyError, RoundTimeoutError])  # in the block: nothing, an error of the caller, that of a step
def test_the_end_of_a_trace_times_out_while_a_round_hangs(hang: Hang, raised: type[Exception] | None) -> None:
    engine = make(hang, rounds_in_flight=4)
    jobs, trace = submit(engine), engine.trace()

    def block() -> None:
        with trace:
            for _ in range(3):
                engine.step()
            assert hang.reached.wait(JOIN_SECONDS)
            if raised is RoundTimeoutError:
                finish(engine)
            if raised:
                raise raised

    with pytest.raises(raised or RoundTimeoutError):
        block()
    assert all("RoundTimeoutError: the device did not finish" in job.error and "host node commit" in job.error for job in jobs)
    assert trace.timeline.rounds
    with pytest.raises(EngineClosedError), engine.trace():
        pass


def test_a_report_that_fails_does_not_hide_the_time_out(hang: Hang, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(hang)
    jobs, calls, real = submit(engine), list[bool](), engine.backend.active_work

    def active_work() -> tuple[str, ...]:
        calls.append(True)
        if len(calls) > 1:
            raise RuntimeError("the device is lost")
        return real()

    engine.backend.active_work = active_work  # type: ignore[method-assign]
    with pytest.raises(RoundTimeoutError, match="host node commit"):
        finish(engine)
    assert {job.finish_reason for job in jobs} == {FinishReason.ERROR} and "the device is lost" in caplog.text
    with pytest.raises(RuntimeError, match="the backend is closed"):
        engine.backend.event()


def test_the_begin_of_a_trace_times_out_while_a_round_hangs(hang: Hang) -> None:
    engine = make(hang, rounds_in_flight=4)
    jobs = submit(engine)
    for _ in range(3):
        engine.step()
    with pytest.raises(RoundTimeoutError, match="host node commit"), engine.trace():
        pass
    assert {job.finish_reason for job in jobs} == {FinishReason.ERROR}


@pytest.mark.parametrize("limit", [None, JOIN_SECONDS])
def test_an_error_of_a_round_at_the_end_of_a_trace_closes_the_engine(limit: float | None) -> None:
    engine = make(None, round_timeout_seconds=limit)
    jobs = submit(engine)
    engine.step()
    with pytest.raises(ZeroDivisionError), engine.trace():
        engine.backend.run(lambda: 1 / 0)
    assert all(job.error == "ZeroDivisionError: division by zero" for job in jobs)
    with pytest.raises(EngineClosedError):
        engine.step()


def test_close_times_out_like_a_step(hang: Hang, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(hang, rounds_in_flight=4)
    jobs = submit(engine)
    for _ in range(3):
        engine.step()
    assert hang.reached.wait(JOIN_SECONDS)
    engine.close()
    assert {job.finish_reason for job in jobs} == {FinishReason.CANCELLED}
    assert "host node commit" in caplog.text
    with pytest.raises(RuntimeError, match="the engine was closed"):
        engine.step()


@pytest.mark.parametrize("call", [Engine.close, lambda engine: engine._parts.watchdog.backend.synchronize()])
def test_waits_for_all_work_time_out_while_a_copy_hangs(
    hang: Hang, caplog: pytest.LogCaptureFixture, call: Callable[[Engine], None]
) -> None:
    engine = make(None)
    for _ in range(3):
        engine.backend.copy_aside(lambda: hang("commit"), after_launched=False)
    with contextlib.suppress(RoundTimeoutError):
        call(engine)
    engine.close()
    assert "the device of an engine did not finish within 0.2 s" in caplog.text


def test_errors_of_work_in_flight_do_not_end_close_early_when_warnings_are_errors() -> None:
    engine, go = make(None, round_timeout_seconds=None), threading.Event()
    for work in (lambda: go.wait(JOIN_SECONDS), lambda: 1 / 0, lambda: 1 / 0):
        engine.backend.run(work)
    go.set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.close()
    assert engine._parts.compiler and engine._parts.compiler._closed


def test_hanging_prefill_times_out(monkeypatch: pytest.MonkeyPatch, hang: Hang) -> None:
    engine = make(None, max_rows=1, buckets=(1,), prefill_chunk=1)
    real = TapeBackend.run

    def run(backend: TapeBackend, function: Callable[[], object]) -> None:
        real(backend, lambda: hang("commit"))
        real(backend, function)

    monkeypatch.setattr(TapeBackend, "run", run)
    job = engine.submit(list(range(1, 40)), max_new_tokens=4)
    with pytest.raises(RoundTimeoutError):
        finish(engine)
    assert job.finish_reason == FinishReason.ERROR


def test_idle_engine_and_pending_grammar_do_not_time_out() -> None:
    engine, held, building = make(None), threading.Event(), threading.Event()
    constraint = Constraint.regex("[a-c]{5}")  # not compiled yet
    compiler = engine._parts.compiler
    assert compiler is not None
    real = compiler._backends.build

    def build(*arguments: Any) -> Any:
        building.set()
        held.wait(JOIN_SECONDS)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch, engine:
        patch.setattr(compiler._backends, "build", build)
        job = engine.submit([3], constraint=constraint, max_new_tokens=8)
        assert building.wait(JOIN_SECONDS)
        deadline = time.monotonic() + 1.5 * LIMIT
        while time.monotonic() < deadline:
            assert engine.step() == []
        held.set()
        finish(engine)
        assert job.tokens == plain([3], 8, constraint).tokens
        jobs = submit(engine)
        finish(engine)
        for job, index in zip(jobs, range(2), strict=True):
            assert job.tokens == plain([index], 20, CONSTRAINTS[index]).tokens


def test_streams_raise_the_time_out(hang: Hang) -> None:
    async def scene(engine: Engine) -> None:
        serving = AsyncEngine(engine)
        await serving.open()
        async with serving.generate([1], constraint=CONSTRAINTS[1], max_new_tokens=20) as stream:
            events = [event async for event in stream]
        assert events[-1].finish_reason == FinishReason.ERROR and "host node commit" in events[-1].error
        assert isinstance(serving.failure, RoundTimeoutError)
        with pytest.raises(RoundTimeoutError):
            await serving.close()

    asyncio.run(scene(make(hang)))


@pytest.mark.parametrize("value", [0, -1.0, True, "1", float("nan"), float("inf")])
def test_invalid_round_timeout_raises(value: object) -> None:
    with pytest.raises(
        ValueError, match=r"EngineConfig\.round_timeout_seconds: got .*, expected a number above 0 and at most 86400, or None"
    ):
        EngineConfig(round_timeout_seconds=value)  # type: ignore[arg-type]
