"""AsyncEngine: every event arrives once and in order, with cancelled, dropped and slow consumers."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from stepgraph import AsyncEngine, Constraint, DraftCounts, Engine, FinishReason, Job, SamplingParams, StepEvent
from stepgraph.runtime.aio import JobStream
from tests.helpers.aio_runs import FIXTURES, LONG, REQUESTS, Gate, answers, check_alone, check_events, first, read, run
from tests.helpers.toy_engines import CONSTRAINTS, Setup, make_engine, plain

PER_TOKEN = [field.name for field in fields(StepEvent) if field.name == "tokens" or field.default == ()]

shared, idle_engine, no_thread_left = FIXTURES


def test_jobs_from_tasks_and_threads_have_the_same_tokens_as_alone(engine: Engine) -> None:
    expected, dice = answers(), random.Random(7)
    plans = [(index % len(REQUESTS), dice.choice(["read", "read", "leave", "cancel"]), dice.randrange(4)) for index in range(40)]
    from_tasks: list[tuple[int, Job]] = []
    from_threads: list[tuple[int, Job]] = []

    async def ask(serving: AsyncEngine, which: int, plan: str, patience: int) -> None:
        async with await serving.submit(**REQUESTS[which]) as stream:
            events = await first(patience, stream)
            if plan != "leave":
                if plan == "cancel":
                    engine.cancel(stream.job)
                check_events([*events, *await read(stream)], stream.job)
        assert stream.job.finished
        from_tasks.append((which, stream.job))

    def generate_all(positions: range) -> None:
        for index in positions:
            from_threads.append((index % len(REQUESTS), engine.submit(**REQUESTS[index % len(REQUESTS)])))
            if index % 5 == 0:
                engine.cancel(from_threads[-1][1])

    async def main() -> None:
        threads = [threading.Thread(target=generate_all, args=(range(start, 20, 2),)) for start in range(2)]
        async with AsyncEngine(engine) as serving:
            for thread in threads:
                thread.start()
            await asyncio.gather(*(ask(serving, *plan) for plan in plans))
            for thread in threads:
                thread.join()

    run(main())
    assert (len(from_tasks), len(from_threads)) == (40, 20)
    for which, job in (*from_tasks, *from_threads):
        check_alone(job, expected[which])
    assert {job.finish_reason for _, job in from_tasks} >= {FinishReason.CANCELLED, FinishReason.LENGTH}


def test_slow_consumer_receives_one_merged_event_and_delays_no_other(engine: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            late = serving.generate([1], max_new_tokens=40, sampling=SamplingParams(temperature=0, ignore_eos=True, logprobs=True))
            job = await serving.generate([2], max_new_tokens=60, sampling=LONG)
            assert len(job.tokens) == 60 and late.job.finished
            assert not [kept for kept in vars(late).values() if isinstance(kept, list) and kept], "tokens are kept twice"
            events = await read(late)
            assert len(events) == 1 and len(events[0].logprobs) == 40
            check_events(events, late.job)

    run(main())


def test_busy_loop_is_woken_once_for_many_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop, calls = asyncio.get_running_loop(), list[str]()
        serving = AsyncEngine(engine)
        await serving.open()
        real = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *arguments: Any) -> Any:
            calls.append(callback.__name__)
            return real(callback, *arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        streams = [serving.generate([index], max_new_tokens=40, sampling=LONG) for index in range(6)]
        assert serving._stepper is not None
        serving._stepper.stop(drain=True)
        serving._stepper.thread.join(60)  # the event loop runs no callback until all requests have ended
        assert sorted(calls) == ["_deliver", "_end"], "one call for six streams, and one for the end"
        for stream in streams:
            check_events(await read(stream), stream.job)
        await serving.close()

    run(main())


def test_merged_event_combines_every_field(engine: Engine) -> None:
    """Counts are summed, per-token fields are concatenated, and the finish reason is the last; the last assertion finds new fields."""
    job = Job(7, (1,), None, LONG, 60, 2, (), 0)
    events = []
    for index in range(1, 4):
        values: dict[str, Any] = {"drafts": DraftCounts(*(index * (position + 2) for position in range(len(DraftCounts._fields))))}
        values |= {"job_id": 7, "finish_reason": FinishReason.ERROR if index == 3 else None, "error": "burnt" if index == 3 else ""}
        for name in PER_TOKEN:
            values[name] = tuple(f"{name} {index} {token}" for token in range(index))
            getattr(job, name).extend(values[name])
        events.append(StepEvent(**values))
    job.finish_reason, job.error = FinishReason.ERROR, "burnt"
    expected: dict[str, Any] = {"job_id": 7, "finish_reason": FinishReason.ERROR, "error": "burnt"}
    expected["drafts"] = DraftCounts(*(6 * (position + 2) for position in range(len(DraftCounts._fields))))
    for name in PER_TOKEN:
        expected[name] = sum((getattr(event, name) for event in events), ())
    assert expected.keys() == {field.name for field in fields(StepEvent)}

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            assert serving._stepper is not None
            stream = JobStream(serving, serving._stepper, job)
            for event in events:
                stream._add(event)
            assert await read(stream) == [StepEvent(**expected)]

    run(main())


def test_merged_events_sum_forced_drafts() -> None:
    with make_engine(Setup(k=3, drafter="ngram", eager=True, forced_drafts=True)) as engine:

        async def main() -> None:
            async with AsyncEngine(engine) as serving:
                job = await (stream := serving.generate([1], constraint=CONSTRAINTS[1], max_new_tokens=40)).result()
                assert job is stream.job
                late = serving.generate([1], constraint=CONSTRAINTS[1], max_new_tokens=40)
                await serving.close()
                (event,) = await read(late)
                assert (event.drafts.forced, event.drafts.accepted_forced) == counted(job)

        def counted(job: Job) -> tuple[int, int]:
            again = engine.submit(job.prompt_ids, constraint=job.constraint, max_new_tokens=40)
            events = [event for event in engine.stream() if event.job_id == again.id]
            assert again.tokens == job.tokens
            return sum(event.drafts.forced for event in events), sum(event.drafts.accepted_forced for event in events)

        run(main())
        assert engine.stats().drafts.forced > 0


def test_cancelled_task_cancels_only_its_job(engine: Engine) -> None:
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
def test_leaving_a_stream_early_frees_the_row(engine: Engine, way: str) -> None:
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
                del stream, _  # schedules the cancellation in the loop, right after gate.open
                gc.collect()
                await serving.close()
            assert (job.finish_reason, engine.stats().running) == (FinishReason.CANCELLED, 0)

    run(main())


def test_dropping_an_unread_stream_cancels_its_job(engine: Engine) -> None:
    async def main() -> None:
        gate = Gate(engine)
        async with AsyncEngine(engine) as serving:
            jobs = [serving.generate([index], max_new_tokens=60, sampling=LONG).job for index in range(5)]
            kept = serving.generate([9], max_new_tokens=8, sampling=LONG)
            asyncio.get_running_loop().call_soon(gate.open)
            await kept.result()
        assert [job.finish_reason for job in jobs] == [FinishReason.CANCELLED] * 5
        assert kept.job.finish_reason == FinishReason.LENGTH

    run(main())


def test_a_reader_gives_the_reason_with_which_it_ends_a_job(engine: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            stream = serving.generate([1], max_new_tokens=60, sampling=LONG)
            with pytest.raises(ValueError, match="reason: got 'enough', expected a FinishReason"):
                stream.cancel("enough")  # type: ignore[arg-type]
            stream.cancel(FinishReason.STOP)
            stream.cancel()
            assert (await stream.result()).finish_reason == FinishReason.STOP

    run(main())


def test_faults_end_one_request_and_invalid_arguments_raise_at_the_call(engine: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            with pytest.raises(ValueError, match="max_new_tokens"):
                serving.generate([1], max_new_tokens=0)
            with pytest.raises(ValueError, match="prompt"):
                await serving.submit([])
            with pytest.raises(TypeError, match="no_such_option"):
                serving.generate([1], no_such_option=1)  # type: ignore[call-overload]
            bad = serving.generate(
                [1], constraint=Constraint.json_schema({"type": "integer", "minimum": 2, "maximum": 1}), max_new_tokens=5
            )
            good = serving.generate([2], max_new_tokens=20)
            (event,) = await read(bad)
            assert (event.finish_reason, event.error) == (FinishReason.ERROR, bad.job.error) and "no value satisfies" in event.error
            assert (await good.result()).tokens == plain([2], 20).tokens

    run(main())
