"""What AsyncEngine refuses: a full queue, other event loops, other stepping threads, forks."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from dataclasses import replace

import pytest

from stepgraph import AsyncEngine, Engine, EngineClosedError, FinishReason, QueueFullError
from stepgraph.runtime.aio import JobStream
from tests.helpers.aio_runs import FIXTURES, Gate, check_events, opened_again, read, run
from tests.helpers.toy_engines import VOCABULARY, Setup, make_engine, plain

shared, idle_engine, no_thread_left = FIXTURES


def test_full_queue_raises_or_is_awaited_in_order() -> None:
    engine = make_engine(Setup(k=0, max_rows=1, eager=True), max_queued=2)

    async def main() -> None:
        gate = Gate(engine)
        async with AsyncEngine(engine) as serving:
            jobs = [engine.submit([index], max_new_tokens=4) for index in range(2)]  # without streams
            with pytest.raises(QueueFullError, match="2 requests are waiting already"):
                serving.generate([7], max_new_tokens=4)
            tasks = [asyncio.create_task(serving.submit([index], max_new_tokens=4)) for index in range(2, 8)]
            await asyncio.sleep(0)  # they begin to wait, in this order
            tasks[3].cancel()
            tasks[0].cancel()  # the first one
            for _ in range(9):
                await asyncio.sleep(0)  # lets the next one start
            asyncio.get_running_loop().call_soon(gate.open)
            waited = [await task for index, task in enumerate(tasks) if index not in (0, 3)]
            assert [stream.job.prompt_ids for stream in sorted(waited, key=lambda stream: stream.job.id)] == [(3,), (4,), (6,), (7,)]
            for job in (*jobs, *[await stream.result() for stream in waited]):
                assert job.tokens == plain(job.prompt_ids, 4).tokens
            assert [task.cancelled() for task in tasks] == [True, False, False, True, False, False]

    with engine:
        run(main())


def test_close_ends_the_wait_for_room() -> None:
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


def test_other_loops_and_other_steppers_are_refused(engine: Engine) -> None:
    serving = AsyncEngine(engine)
    with pytest.raises(RuntimeError, match=r"AsyncEngine.generate\(\): not open"):
        serving.generate([1])

    async def elsewhere(stream: JobStream) -> None:
        with pytest.raises(RuntimeError, match="expected a call in the event loop that opened it"):
            serving.generate([1])
        for method in (lambda: serving.submit([1]), stream.__anext__, stream.aclose, serving.close):
            with pytest.raises(RuntimeError, match="expected a call in the event loop"):
                await method()

    async def main() -> None:
        async with serving:
            stream = serving.generate([1], max_new_tokens=5)
            await asyncio.to_thread(lambda: asyncio.run(elsewhere(stream)))
            with pytest.raises(RuntimeError, match="expected a call in the event loop"):
                await asyncio.to_thread(serving.generate, [1])
            with pytest.raises(RuntimeError, match="already open"):
                await serving.open()
            with pytest.raises(RuntimeError, match="another thread steps this engine"):
                await AsyncEngine(engine).open()
            with pytest.raises(RuntimeError, match="another thread steps this engine"):
                engine.step()
            check_events(await read(stream), stream.job)

    run(main())
    run(opened_again(serving))  # in another loop


def test_open_captures_if_needed() -> None:
    with make_engine(Setup(k=0, max_rows=1, eager=True)) as made:
        engine = Engine(made._parts.models.target, vocabulary=VOCABULARY, config=replace(made.config, eager=False))
    with engine:
        assert not engine.captured
        run(opened_again(AsyncEngine(engine)))
        assert engine.captured


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_calls_in_a_fork_raise(engine: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            stream, (mouth, hand) = serving.generate([1], max_new_tokens=30), os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                output = []
                for call in (lambda: serving.generate([1]), lambda: stream.__anext__().send(None), lambda: serving.close().send(None)):
                    try:
                        call()
                    except RuntimeError as error:
                        output.append(str(error))
                del call, stream  # dropping the stream in the child must not cancel the job of the parent
                gc.collect()
                os.write(hand, "\n".join(output).encode())
                os._exit(0)
            os.close(hand)
            with open(mouth, encoding="utf-8") as ear:
                output = ear.read().splitlines()
            assert os.waitpid(child, 0)[1] == 0
            calls = ("AsyncEngine.generate", "JobStream.__anext__", "AsyncEngine.close")
            assert output == [
                f"{call}(): got a forked process, expected the process that opened it, where the stepping thread is" for call in calls
            ]
            assert (await stream.result()).tokens == plain([1], 30).tokens

    run(main())
