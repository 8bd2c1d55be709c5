"""Event loops that end before their AsyncEngine, and the loops after them."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from stepgraph import AsyncEngine, Constraint, FinishReason
from stepgraph.runtime.aio import JobStream
from stepgraph.sampling.grammar import GrammarCompiler
from tests.helpers.aio_runs import run, watch_sleep
from tests.helpers.toy_engines import Setup, make_engine, plain

SETUP = Setup(k=0, max_rows=1, eager=True)


def test_waiting_for_room_in_successive_event_loops() -> None:
    async def main() -> None:
        async with serving:
            for stream in await asyncio.gather(*(serving.submit([index], max_new_tokens=4) for index in range(5))):
                assert (await stream.result()).tokens == plain(stream.job.prompt_ids, 4).tokens

    with make_engine(SETUP, max_queued=1) as engine:
        serving = AsyncEngine(engine)
        for _ in range(2):
            run(main())


def test_dropping_a_stream_after_its_loop_ended_wakes_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread sleeps while its job waits for a grammar; nothing was closed."""
    real, go = GrammarCompiler._compile_entry, threading.Event()

    def held(*arguments: Any) -> Any:
        assert go.wait(60)
        return real(*arguments)

    async def main() -> tuple[AsyncEngine, JobStream]:
        serving = AsyncEngine(engine)
        await serving.open()
        return serving, serving.generate([1], constraint=Constraint.regex("[a-d]{4}r"), max_new_tokens=9)

    with make_engine(SETUP) as engine:
        monkeypatch.setattr(GrammarCompiler, "_compile_entry", held)
        asleep = watch_sleep(engine, monkeypatch)
        serving, stream = asyncio.run(main())
        job = stream.job
        assert serving._stepper is not None
        thread = serving._stepper.thread
        asleep.clear()
        engine.queue.wake.notify()
        assert asleep.wait(60)
        del stream
        gc.collect()
        thread.join(30)
        slept_on = thread.is_alive()
        go.set()
        engine.queue.wake.notify()
        assert not slept_on and job.finish_reason == FinishReason.CANCELLED


def test_generate_while_another_thread_steps_raises_and_leaves_no_job() -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            with pytest.raises(RuntimeError, match="another thread steps this engine"):
                engine.generate([1], max_new_tokens=60)
            assert (await serving.generate([2], max_new_tokens=4).result()).tokens == plain([2], 4).tokens

    with make_engine(SETUP) as engine:
        run(main())
        assert dict(engine.stats().finished)[FinishReason.CANCELLED] == 1


@pytest.mark.parametrize("seconds", [-1, -0.5, float("nan"), float("inf"), 1e300])
def test_invalid_wait_seconds_raise(seconds: float) -> None:
    with make_engine(SETUP) as engine, pytest.raises(ValueError, match=r"Engine.wait.seconds: got .*, expected a number from 0 to"):
        engine.wait(seconds)
