"""An engine behind asyncio: every event once and in order, whoever cancels, drops, lags or fails; nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from stepgraph.runtime import (
    AsyncEngine,
    Constraint,
    Engine,
    EngineClosedError,
    FinishReason,
    Job,
    QueueFullError,
    SamplingParams,
    StepEvent,
)
from stepgraph.runtime.aio import JobStream
from stepgraph.runtime.aio_thread import Reading
from stepgraph.runtime.bell import Bell
from stepgraph.sampling.grammar import GrammarCompiler
from tests.oracles import Answer
from tests.toy_engines import CONSTRAINTS, VOCABULARY, Setup, make_engine, plain

SETUP = Setup(k=2, max_rows=3, eager=True, greedy_only=False)  # eager: the same rounds, and no capture to wait for
LONG = SamplingParams(temperature=0, ignore_eos=True)  # what asks so ends by its length, or is cancelled


class Gate:
    """Lets an engine make so many steps, and then holds whoever steps it."""

    def __init__(self, engine: Engine, steps: int = 0) -> None:
        self._permits, self._step, self._engine = threading.Semaphore(steps), engine.step, engine
        self.made, self._opened = 0, False
        engine.step = self._held  # type: ignore[method-assign]

    def _held(self) -> list[StepEvent]:
        assert self._opened or self._permits.acquire(timeout=60), "a test forgot to open the gate"
        self.made += 1
        return self._step()

    def allow(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        self._opened = True
        self._permits.release()


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with make_engine(SETUP) as engine:
        gc.collect()
        gc.freeze()  # collecting all of torch takes longer than most tests
        yield engine
        gc.unfreeze()


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """It is handed back idle by whatever a test does with it."""
    yield shared
    shared.__dict__.pop("step", None)
    assert not shared.has_work
    assert shared.stats().running == shared.stats().waiting == 0
    shared.step()


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "stepgraph-aio"] == []


def run(main: Coroutine[Any, Any, None]) -> None:
    """Whatever a loop would only log fails the test: lost tasks, errors in callbacks, coroutines that nobody awaits."""

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        await main
        assert asyncio.all_tasks() == {asyncio.current_task()}

    complaints: list[dict[str, Any]] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(watched(), debug=True)
    assert complaints == []
    assert [str(warning.message) for warning in warned if "never awaited" in str(warning.message)] == []


async def first(count: int, stream: JobStream) -> list[StepEvent]:
    """As many events, or fewer where it ends."""
    events: list[StepEvent] = []
    while len(events) < count and not (events and events[-1].finish_reason):
        events.append(await stream.__anext__())
    return events


async def read(stream: JobStream) -> list[StepEvent]:
    return [event async for event in stream]


def check_told(events: list[StepEvent], job: Job) -> None:
    """Once, in order, with its reason at the end."""
    assert [token for event in events for token in event.tokens] == job.tokens
    assert [told for event in events for told in event.logprobs] == job.logprobs
    assert sum(event.num_accepted_drafts for event in events) == job.num_accepted_drafts
    assert [event.job_id for event in events] == [job.id] * len(events)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [job.finish_reason]
    assert job.finished and events[-1].error == job.error


def check_alone(job: Job, answer: Answer) -> None:
    """What it would have said alone, or as much of it as it came to."""
    if job.finish_reason == FinishReason.CANCELLED:
        assert job.tokens == answer.tokens[: len(job.tokens)]
    else:
        assert (job.tokens, job.finish_reason) == (answer.tokens, answer.reason)


ASKS: list[dict[str, Any]] = [
    {"prompt_ids": [place, 5], "constraint": CONSTRAINTS[place % 4], "max_new_tokens": 12 + place, "sampling": sampling}
    for place, sampling in enumerate([LONG, None, None, None, SamplingParams(temperature=0, logprobs=True), None, None, None])
]


def answers() -> list[Answer]:
    return [plain(ask["prompt_ids"], ask["max_new_tokens"], ask["constraint"], sampling=ask["sampling"] or LONG_OFF) for ask in ASKS]


PER_TOKEN = [field.name for field in fields(StepEvent) if field.name == "tokens" or field.default == ()]
LONG_OFF = SamplingParams(temperature=0)


def test_forty_jobs_from_tasks_and_threads_with_cancels_say_what_they_would_alone(engine: Engine) -> None:
    wanted, dice = answers(), random.Random(7)
    plans = [(place % len(ASKS), dice.choice(["read", "read", "leave", "cancel"]), dice.randrange(4)) for place in range(40)]
    told: list[tuple[int, Job]] = []
    from_threads: list[tuple[int, Job]] = []

    async def ask(serving: AsyncEngine, which: int, plan: str, patience: int) -> None:
        async with await serving.submit(**ASKS[which]) as stream:
            events = await first(patience, stream)
            if plan != "leave":
                if plan == "cancel":
                    engine.cancel(stream.job)
                check_told([*events, *await read(stream)], stream.job)
        assert stream.job.finished
        told.append((which, stream.job))

    def ask_plainly(places: range) -> None:
        for place in places:
            from_threads.append((place % len(ASKS), engine.submit(**ASKS[place % len(ASKS)])))
            if place % 5 == 0:
                engine.cancel(from_threads[-1][1])

    async def main() -> None:
        threads = [threading.Thread(target=ask_plainly, args=(range(start, 20, 2),)) for start in range(2)]
        async with AsyncEngine(engine) as serving:
            for thread in threads:
                thread.start()
            await asyncio.gather(*(ask(serving, *plan) for plan in plans))
            for thread in threads:
                thread.join()

    run(main())
    assert (len(told), len(from_threads)) == (40, 20)
    for which, job in (*told, *from_threads):
        check_alone(job, wanted[which])
    assert {job.finish_reason for _, job in told} >= {FinishReason.CANCELLED, FinishReason.LENGTH}


def test_who_reads_late_gets_one_event_with_all_of_it_and_holds_up_nobody(engine: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            late = serving.generate([1], max_new_tokens=40, sampling=SamplingParams(temperature=0, ignore_eos=True, logprobs=True))
            job = await serving.generate([2], max_new_tokens=60, sampling=LONG).result()
            assert len(job.tokens) == 60 and late.job.finished
            assert not [kept for kept in vars(late._reading).values() if isinstance(kept, list) and kept], "tokens are kept twice"
            events = await read(late)
            assert len(events) == 1 and len(events[0].logprobs) == 40
            check_told(events, late.job)

    run(main())


def test_a_loop_that_is_busy_is_called_once_for_all_it_missed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop, calls = asyncio.get_running_loop(), list[str]()
        serving = AsyncEngine(engine)
        await serving.open()
        real = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *arguments: Any) -> Any:
            calls.append(callback.__name__)
            return real(callback, *arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        streams = [serving.generate([place], max_new_tokens=40, sampling=LONG) for place in range(6)]
        assert serving._stepper is not None
        serving._stepper.stop(drain=True)
        serving._stepper.thread.join(60)  # the loop looks at nothing until all has ended
        assert sorted(calls) == ["_bring", "_bring", "_settle", "_settle"], "one call for six texts, and those of the end"
        for stream in streams:
            check_told(await read(stream), stream.job)
        await serving.close()

    run(main())


def test_a_merged_event_adds_up_every_field() -> None:
    """Numbers are added, what there is per token follows each other, and the end is the last one's: for fields to come as well."""
    job = Job(7, (1,), None, LONG, 60, 2, (), 0)
    events = []
    for place in range(1, 4):
        values: dict[str, Any] = {field.name: place * (position + 2) for position, field in enumerate(fields(StepEvent))}
        values |= {"job_id": 7, "finish_reason": FinishReason.ERROR if place == 3 else None, "error": "burnt" if place == 3 else ""}
        for name in PER_TOKEN:
            values[name] = tuple(f"{name} {place} {token}" for token in range(place))
            getattr(job, name).extend(values[name])
        events.append(StepEvent(**values))
    job.finish_reason, job.error = FinishReason.ERROR, "burnt"
    reading = Reading(job)
    for event in events:
        reading.add(event)
    wanted: dict[str, Any] = {"job_id": 7, "finish_reason": FinishReason.ERROR, "error": "burnt"}
    for name in {field.name for field in fields(StepEvent)} - wanted.keys():
        several = [getattr(event, name) for event in events]
        wanted[name] = sum(several, ()) if name in PER_TOKEN else sum(several)
    assert reading.take() == StepEvent(**wanted)
    assert reading.take() is None


def test_forced_drafts_are_added_up() -> None:
    with make_engine(Setup(k=3, drafter="ngram", eager=True, forced_drafts=True)) as engine:

        async def main() -> None:
            async with AsyncEngine(engine) as serving:
                job = await (stream := serving.generate([1], constraint=CONSTRAINTS[1], max_new_tokens=40)).result()
                assert job is stream.job
                late = serving.generate([1], constraint=CONSTRAINTS[1], max_new_tokens=40)
                await serving.close()
                (event,) = await read(late)
                assert (event.num_forced_drafts, event.num_accepted_forced_drafts) == counted(job)

        def counted(job: Job) -> tuple[int, int]:
            again = engine.submit(job.prompt_ids, constraint=job.constraint, max_new_tokens=40)
            events = [event for event in engine.stream() if event.job_id == again.id]
            assert again.tokens == job.tokens
            return sum(event.num_forced_drafts for event in events), sum(event.num_accepted_forced_drafts for event in events)

        run(main())
        assert engine.stats().forced_drafts > 0


def test_a_cancelled_task_cancels_its_job_and_no_other(engine: Engine) -> None:
    async def main() -> None:
        gate = Gate(engine)
        async with AsyncEngine(engine) as serving:
            kept = serving.generate([1], max_new_tokens=30, sampling=LONG)
            stream, begun = serving.generate([2], max_new_tokens=60, sampling=LONG), asyncio.Event()

            async def reading() -> None:
                async for _ in stream:
                    begun.set()

            task = asyncio.create_task(reading())
            gate.allow(3)
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            await kept.result()
            events = await read(stream)  # the end can still be read
            assert stream.job.finish_reason == FinishReason.CANCELLED == events[-1].finish_reason
            check_alone(kept.job, plain([1], 30, sampling=LONG))

    run(main())


@pytest.mark.parametrize("way", ["aclose", "async with", "dropped"])
def test_who_leaves_early_frees_the_row(engine: Engine, way: str) -> None:
    async def main() -> None:
        gate = Gate(engine, steps=3)
        async with AsyncEngine(engine) as serving:
            stream = serving.generate([2], max_new_tokens=60, sampling=LONG)
            job = stream.job
            async for _ in stream:
                break
            assert not job.finished
            asyncio.get_running_loop().call_soon(gate.open)
            if way == "aclose":
                await stream.aclose()
            elif way == "async with":
                async with stream:
                    pass
            else:
                del stream, _  # the gate opens behind the call that this leaves to the loop
                gc.collect()
                await serving.close()
            assert (job.finish_reason, engine.stats().running) == (FinishReason.CANCELLED, 0)

    run(main())


def test_a_stream_that_nobody_reads_is_cancelled_when_it_is_dropped_before_it_began(engine: Engine) -> None:
    async def main() -> None:
        gate = Gate(engine)
        async with AsyncEngine(engine) as serving:
            jobs = [serving.generate([place], max_new_tokens=60, sampling=LONG).job for place in range(5)]
            kept = serving.generate([9], max_new_tokens=8, sampling=LONG)
            asyncio.get_running_loop().call_soon(gate.open)
            await kept.result()
        assert [job.finish_reason for job in jobs] == [FinishReason.CANCELLED] * 5
        assert kept.job.finish_reason == FinishReason.LENGTH

    run(main())


def test_close_lets_jobs_end_or_cancels_them_whoever_submitted_them(engine: Engine) -> None:
    async def main(drain: bool) -> None:
        gate = Gate(engine)
        serving = AsyncEngine(engine)
        async with serving:
            streams = [serving.generate([place], max_new_tokens=20, sampling=LONG) for place in range(7)]
            job = engine.submit([3], max_new_tokens=20, sampling=LONG)
            gate.allow(2)
            await first(1, streams[0])
            asyncio.get_running_loop().call_soon(gate.open)
            await asyncio.gather(serving.close(drain), serving.close(drain))
            wanted = FinishReason.LENGTH if drain else FinishReason.CANCELLED
            assert {job.finish_reason, *(stream.job.finish_reason for stream in streams)} == {wanted}
            for stream in streams[1:]:
                check_told(await read(stream), stream.job)
            with pytest.raises(EngineClosedError, match=r"AsyncEngine.generate\(\): it was closed"):
                serving.generate([1])
            with pytest.raises(EngineClosedError, match="it was closed"):
                await serving.submit([1])
        engine.__dict__.pop("step")
        assert engine.generate([2], max_new_tokens=9).tokens == plain([2], 9).tokens, "the engine is given back"

    run(main(drain=True))
    run(main(drain=False))


def test_who_raises_inside_cancels_and_who_is_cancelled_while_it_drains_too(engine: Engine) -> None:
    async def raising() -> None:
        gate = Gate(engine)
        with pytest.raises(KeyError):  # noqa: PT012
            async with AsyncEngine(engine) as serving:
                stream = serving.generate([2], max_new_tokens=60, sampling=LONG)
                asyncio.get_running_loop().call_soon(gate.open)
                raise KeyError
        assert stream.job.finish_reason == FinishReason.CANCELLED

    async def hurried() -> None:
        gate = Gate(engine)
        serving = AsyncEngine(engine)
        await serving.open()
        stream = serving.generate([2], max_new_tokens=60, sampling=LONG)
        closing = asyncio.create_task(serving.close())
        await asyncio.sleep(0)  # it begins to drain
        closing.cancel()
        asyncio.get_running_loop().call_soon(gate.open)
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert stream.job.finish_reason == FinishReason.CANCELLED

    run(raising())
    run(hurried())


def test_a_step_that_fails_ends_every_stream_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(SETUP)

    def burn(seats: Any) -> None:
        raise OSError("the host is on fire")

    async def main() -> None:
        gate = Gate(engine)
        with pytest.raises(OSError, match="on fire"):  # noqa: PT012
            async with AsyncEngine(engine) as serving:
                streams = [serving.generate([place], max_new_tokens=20, sampling=LONG) for place in range(5)]
                gate.allow(3)
                begun = await first(1, streams[0])
                monkeypatch.setattr(engine._flights, "launch", burn)
                gate.open()
                for events, stream in zip(await asyncio.gather(*map(read, streams)), streams, strict=True):
                    check_told([*(begun if stream is streams[0] else []), *events], stream.job)
                    assert (stream.job.finish_reason, stream.job.error) == (FinishReason.ERROR, "OSError: the host is on fire")
                assert isinstance(serving.failure, OSError)
                with pytest.raises(EngineClosedError, match="the engine failed: OSError: the host is on fire"):
                    serving.generate([1])
                await serving.close()

    run(main())
    with pytest.raises(EngineClosedError, match="on fire"):
        run(opened(engine))


async def opened(engine: Engine) -> None:
    async with AsyncEngine(engine):
        raise AssertionError("it opened")


def test_an_engine_that_somebody_closes_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(SETUP)

    async def main() -> None:
        asleep = watch_sleep(engine, monkeypatch)
        async with AsyncEngine(engine) as serving:
            await serving.generate([1], max_new_tokens=3).result()
            await asyncio.to_thread(asleep.wait)
            engine.close()  # wakes the thread that sleeps
            assert serving._stepper is not None
            await serving._stepper.ended
            assert serving.failure is None
            with pytest.raises(EngineClosedError, match="it was closed"):
                serving.generate([1])

    run(main())


def watch_sleep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when somebody begins to sleep without an end in sight."""
    asleep = threading.Event()
    real = Bell.wait

    def wait(bell: Bell, seconds: float | None = None) -> bool:
        if bell is engine._bell and seconds is None:
            asleep.set()
        elif bell is engine._bell:
            polls.append(seconds)
        return real(bell, seconds)

    polls: list[float | None] = []
    asleep.polls = polls  # type: ignore[attr-defined]
    monkeypatch.setattr(Bell, "wait", wait)
    return asleep


def test_who_waits_for_a_grammar_alone_lets_the_thread_sleep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is made and no clock is asked until the grammar is there, or another request comes."""
    real, go = GrammarCompiler._compiled, threading.Event()

    def held(*arguments: Any) -> Any:
        assert go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(GrammarCompiler, "_compiled", held)

    async def main() -> None:
        asleep, gate = watch_sleep(engine, monkeypatch), Gate(engine)
        gate.open()
        async with AsyncEngine(engine) as serving:
            await asyncio.to_thread(asleep.wait)
            waiting = serving.generate([1], constraint=Constraint.regex("[a-d]{4}q"), max_new_tokens=9)
            other = await serving.generate([2], max_new_tokens=9).result()
            assert other.tokens == plain([2], 9).tokens and not waiting.job.finished
            asleep.clear()
            await asyncio.to_thread(asleep.wait)
            asleep.polls.clear()  # type: ignore[attr-defined]
            made = gate.made
            assert engine.stats().waiting == 1
            go.set()
            check_told(await read(waiting), waiting.job)
            assert gate.made > made and waiting.job.finish_reason == FinishReason.CONSTRAINT_COMPLETE
            assert asleep.polls == [], "it slept by the clock"  # type: ignore[attr-defined]
            asleep.clear()
            await asyncio.to_thread(asleep.wait)
            assert serving._stepper is not None
            serving._stepper.stop(drain=True)
            serving._stepper.thread.join(60)
            slept_on = serving._stepper.thread.is_alive()
            engine.stepping.ring()
            assert not slept_on, "it was asked to stop in its sleep"

    run(main())


def test_one_requests_fault_is_its_own_and_what_submit_refuses_is_raised_at_the_call(engine: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            with pytest.raises(ValueError, match="max_new_tokens"):
                serving.generate([1], max_new_tokens=0)
            with pytest.raises(ValueError, match="prompt_ids"):
                await serving.submit([])
            with pytest.raises(TypeError, match="no_such_option"):
                serving.generate([1], no_such_option=1)
            bad = serving.generate([1], constraint=Constraint.ebnf("root ::= missing"), max_new_tokens=5)
            good = serving.generate([2], max_new_tokens=20)
            (event,) = await read(bad)
            assert (event.finish_reason, event.error) == (FinishReason.ERROR, bad.job.error) and "missing" in event.error
            assert (await good.result()).tokens == plain([2], 20).tokens

    run(main())


def test_a_full_queue_refuses_or_is_waited_for_in_order() -> None:
    engine = make_engine(Setup(k=0, max_rows=1, eager=True), max_queued=2)

    async def main() -> None:
        gate = Gate(engine)
        async with AsyncEngine(engine) as serving:
            jobs = [engine.submit([place], max_new_tokens=4) for place in range(2)]  # no stream is told of their ends
            with pytest.raises(QueueFullError, match="2 requests are waiting already"):
                serving.generate([7], max_new_tokens=4)
            tasks = [asyncio.create_task(serving.submit([place], max_new_tokens=4)) for place in range(2, 8)]
            await asyncio.sleep(0)  # they begin to wait, in this order
            tasks[3].cancel()
            tasks[0].cancel()  # the one in front
            for _ in range(9):
                await asyncio.sleep(0)  # the next one takes its place
            asyncio.get_running_loop().call_soon(gate.open)
            waited = [await task for place, task in enumerate(tasks) if place not in (0, 3)]
            assert [stream.job.prompt_ids for stream in sorted(waited, key=lambda stream: stream.job.id)] == [(3,), (4,), (6,), (7,)]
            for job in (*jobs, *[await stream.result() for stream in waited]):
                assert job.tokens == plain(job.prompt_ids, 4).tokens
            assert [task.cancelled() for task in tasks] == [True, False, False, True, False, False]

    with engine:
        run(main())


def test_what_waits_for_room_is_told_of_the_end() -> None:
    engine = make_engine(Setup(k=0, max_rows=1, eager=True), max_queued=1)

    async def main() -> None:
        gate = Gate(engine)
        serving = AsyncEngine(engine)
        await serving.open()
        stream = serving.generate([1], max_new_tokens=4)
        task = asyncio.create_task(serving.submit([2]))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(gate.open)
        await serving.close(drain=False)
        with pytest.raises(EngineClosedError, match="it was closed"):
            await task
        assert stream.job.finish_reason == FinishReason.CANCELLED

    with engine:
        run(main())


def test_it_serves_one_loop_and_steps_alone(engine: Engine) -> None:
    serving = AsyncEngine(engine)
    with pytest.raises(RuntimeError, match=r"AsyncEngine.generate\(\): it is not open"):
        serving.generate([1])

    async def elsewhere(stream: JobStream) -> None:
        with pytest.raises(RuntimeError, match="want a call in the event loop that it was opened in"):
            serving.generate([1])
        for method in (lambda: serving.submit([1]), stream.__anext__, stream.aclose, serving.close):
            with pytest.raises(RuntimeError, match="want a call in the event loop"):
                await method()

    async def main() -> None:
        async with serving:
            stream = serving.generate([1], max_new_tokens=5)
            await asyncio.to_thread(lambda: asyncio.run(elsewhere(stream)))
            with pytest.raises(RuntimeError, match="want a call in the event loop"):
                await asyncio.to_thread(serving.generate, [1])
            with pytest.raises(RuntimeError, match="open already"):
                await serving.open()
            with pytest.raises(RuntimeError, match="another thread serves this engine"):
                await AsyncEngine(engine).open()
            with pytest.raises(RuntimeError, match="another thread serves this engine"):
                engine.step()
            check_told(await read(stream), stream.job)

    run(main())
    run(opened_again(serving))  # in a loop of its own


async def opened_again(serving: AsyncEngine) -> None:
    async with serving:
        assert (await serving.generate([2], max_new_tokens=9).result()).tokens == plain([2], 9).tokens


def test_opening_captures_where_that_was_not_done() -> None:
    with make_engine(Setup(k=0, max_rows=1, eager=True)) as made:
        engine = Engine(made._models.target, vocabulary=VOCABULARY, config=replace(made.config, eager=False))
    with engine:
        assert not engine.stepping.captured
        run(opened_again(AsyncEngine(engine)))
        assert engine.stepping.captured


@pytest.mark.parametrize("how", ["dropped", "loop closed"])
def test_what_is_never_closed_ends_with_its_loop_or_when_it_is_dropped(engine: Engine, how: str) -> None:
    jobs: list[Job] = []
    threads: list[threading.Thread] = []
    kept: list[AsyncEngine] = []

    async def main() -> None:
        serving = AsyncEngine(engine)
        await serving.open()
        assert serving._stepper is not None
        threads.append(serving._stepper.thread)
        stream = serving.generate([1], max_new_tokens=60, sampling=LONG)
        jobs.append(stream.job)
        await first(1, stream)
        if how == "loop closed":
            kept.append(serving)
            kept.append(stream)  # type: ignore[arg-type]

    gate = Gate(engine, steps=3)
    asyncio.run(main())
    gc.collect()
    gate.open()
    threads[0].join(60)
    assert not threads[0].is_alive()
    assert [job.finish_reason for job in jobs] == [FinishReason.CANCELLED]
    if kept:
        with pytest.raises(RuntimeError, match="want a call in the event loop"):
            kept[0].generate([1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_is_refused_by_name(engine: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            stream, (mouth, hand) = serving.generate([1], max_new_tokens=30), os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                said = []
                for call in (lambda: serving.generate([1]), lambda: stream.__anext__().send(None), lambda: serving.close().send(None)):
                    try:
                        call()
                    except RuntimeError as error:
                        said.append(str(error))
                del call, stream  # dropped there, it must not cancel what goes on here
                gc.collect()
                os.write(hand, "\n".join(said).encode())
                os._exit(0)
            os.close(hand)
            with open(mouth, encoding="utf-8") as ear:
                said = ear.read().splitlines()
            assert os.waitpid(child, 0)[1] == 0
            calls = ("AsyncEngine.generate", "JobStream.__anext__", "AsyncEngine.close")
            assert said == [
                f"{call}(): got a fork of the process that opened it, want that process: the thread that steps is there" for call in calls
            ]
            assert (await stream.result()).tokens == plain([1], 30).tokens

    run(main())


EXITING = """
import asyncio, atexit
said = []
atexit.register(lambda: print(said[0].job.finish_reason, len(said[0].job.tokens) > 0))  # registered first, called last
from stepgraph.runtime import AsyncEngine, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.runtime.models.toy import ToyTarget
vocabulary = Vocabulary.printable()
config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=100_000, page_size=1000, eager=True, backend="tape")
engine = Engine(ToyTarget(vocabulary.logits_width), vocabulary=vocabulary, config=config)

async def main():
    serving = AsyncEngine(engine)
    await serving.open()
    said.append(serving.generate([1], max_new_tokens=90_000, sampling=SamplingParams(temperature=0, ignore_eos=True)))
    await said[0].__anext__()

asyncio.get_event_loop_policy().new_event_loop().run_until_complete(main())
"""


def test_an_interpreter_that_ends_in_the_middle_ends_cleanly() -> None:
    """Nothing was closed, the loop neither, and rounds are on their way."""
    ran = subprocess.run([sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "cancelled True\n", "")
