"""The end of an AsyncEngine: closed, failed, dropped, asleep or with the interpreter. Each job has a finish reason; no thread is left."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest

from stepgraph import AsyncEngine, Constraint, Engine, EngineClosedError, FinishReason, Job
from stepgraph.runtime.aio import JobStream, StepThread
from stepgraph.sampling.grammar import GrammarCompiler
from tests.helpers.aio_runs import FIXTURES, LONG, SETUP, Gate, check_events, first, opened, opened_again, read, run, watch_sleep
from tests.helpers.c_library import NO_LINK_WARNING
from tests.helpers.toy_engines import Setup, make_engine, plain

shared, idle_engine, no_thread_left = FIXTURES


def test_close_drains_or_cancels_all_jobs(engine: Engine) -> None:
    async def main(drain: bool) -> None:
        gate = Gate(engine)
        serving = AsyncEngine(engine)
        async with serving:
            streams = [serving.generate([index], max_new_tokens=20, sampling=LONG) for index in range(7)]
            job = engine.submit([3], max_new_tokens=20, sampling=LONG)
            gate.allow(2)
            await first(1, streams[0])
            asyncio.get_running_loop().call_soon(gate.open)
            await asyncio.gather(serving.close(drain), serving.close(drain))
            expected = FinishReason.LENGTH if drain else FinishReason.CANCELLED
            assert {job.finish_reason, *(stream.job.finish_reason for stream in streams)} == {expected}
            for stream in streams[1:]:
                check_events(await read(stream), stream.job)
            with pytest.raises(EngineClosedError, match=r"AsyncEngine.generate\(\): it was closed"):
                serving.generate([1])
            with pytest.raises(EngineClosedError, match="it was closed"):
                await serving.submit([1])
        engine.__dict__.pop("step")
        assert engine.generate([2], max_new_tokens=9).tokens == plain([2], 9).tokens, "the engine can be used again"

    run(main(drain=True))
    run(main(drain=False))


def test_exception_inside_and_cancellation_while_draining_cancel_jobs(engine: Engine) -> None:
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
        await asyncio.sleep(0)  # close() begins to drain
        closing.cancel()
        asyncio.get_running_loop().call_soon(gate.open)
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert stream.job.finish_reason == FinishReason.CANCELLED

    run(raising())
    run(hurried())


def test_failed_step_ends_every_stream_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(SETUP)

    def burn(requests: Any) -> None:
        raise OSError("the host is on fire")

    async def main() -> None:
        gate = Gate(engine)
        with pytest.raises(OSError, match="on fire"):  # noqa: PT012
            async with AsyncEngine(engine) as serving:
                streams = [serving.generate([index], max_new_tokens=20, sampling=LONG) for index in range(5)]
                gate.allow(3)
                begun = await first(1, streams[0])
                monkeypatch.setattr(engine._in_flight, "launch", burn)
                gate.open()
                for events, stream in zip(await asyncio.gather(*map(read, streams)), streams, strict=True):
                    check_events([*(begun if stream is streams[0] else []), *events], stream.job)
                    assert (stream.job.finish_reason, stream.job.error) == (FinishReason.ERROR, "OSError: the host is on fire")
                assert isinstance(serving.failure, OSError)
                with pytest.raises(EngineClosedError, match="the engine failed: OSError: the host is on fire"):
                    serving.generate([1])
                await serving.close()

    run(main())
    with pytest.raises(EngineClosedError, match="on fire"):
        run(opened(engine))


def test_error_between_two_steps_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(SETUP)

    def out_of_memory() -> bool:
        raise MemoryError

    async def main() -> None:
        gate, serving = Gate(engine, steps=3), AsyncEngine(engine)
        await serving.open()
        stream = serving.generate([1], max_new_tokens=60, sampling=LONG)
        begun = await first(1, stream)
        monkeypatch.setattr(engine, "wait", out_of_memory)
        gate.open()
        check_events([*begun, *await read(stream)], stream.job)
        with pytest.raises(MemoryError):
            await serving.close()

    run(main())


def test_closing_the_engine_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(SETUP)

    async def main() -> None:
        asleep = watch_sleep(engine, monkeypatch)
        async with AsyncEngine(engine) as serving:
            await serving.generate([1], max_new_tokens=3).result()
            await asyncio.to_thread(asleep.wait)
            engine.close()  # wakes the thread that sleeps
            await serving.wait_closed()
            assert serving.failure is None
            with pytest.raises(EngineClosedError, match="it was closed"):
                serving.generate([1])

    run(main())


def test_thread_sleeps_while_all_requests_wait_for_grammars(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step and no timed wait until the grammar is compiled or another request arrives."""
    real, go = GrammarCompiler._compile_entry, threading.Event()

    def held(*arguments: Any) -> Any:
        assert go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(GrammarCompiler, "_compile_entry", held)

    async def main() -> None:
        asleep, gate = watch_sleep(engine, monkeypatch), Gate(engine)
        gate.open()
        async with AsyncEngine(engine) as serving:
            await asyncio.to_thread(asleep.wait)
            waiting = serving.generate([1], constraint=Constraint.regex("[a-d]{4}q"), max_new_tokens=9)
            other = await serving.generate([2], max_new_tokens=9).result()
            assert other.tokens == plain([2], 9).tokens and not waiting.job.finished
            asleep.clear()
            engine.queue.wake.notify()  # it may be asleep already
            await asyncio.to_thread(asleep.wait)
            asleep.polls.clear()  # type: ignore[attr-defined]
            made = gate.steps_made
            assert engine.stats().waiting == 1
            go.set()
            check_events(await read(waiting), waiting.job)
            assert gate.steps_made > made and waiting.job.finish_reason == FinishReason.CONSTRAINT_COMPLETE
            assert asleep.polls == [], "the thread slept with a time-out"  # type: ignore[attr-defined]
            asleep.clear()
            engine.queue.wake.notify()  # it may be asleep already
            await asyncio.to_thread(asleep.wait)
            assert serving._stepper is not None
            serving._stepper.stop(drain=True)
            serving._stepper.thread.join(60)
            slept_on = serving._stepper.thread.is_alive()
            engine.queue.wake.notify()
            assert not slept_on, "stop() wakes the thread"

    run(main())


@pytest.mark.parametrize("how", ["dropped", "loop closed", "loop closed before a scheduled call"])
def test_unclosed_engine_stops_when_dropped_or_when_its_loop_closes(engine: Engine, how: str) -> None:
    kept: list[tuple[AsyncEngine, JobStream]] = []

    async def main() -> tuple[StepThread, Job]:
        serving = AsyncEngine(engine)
        await serving.open()
        assert serving._stepper is not None
        stream = serving.generate([1], max_new_tokens=60, sampling=LONG)
        await first(1, stream)
        if how != "dropped":
            kept.append((serving, stream))
        return serving._stepper, stream.job

    gate, loop = Gate(engine, steps=3), asyncio.new_event_loop()
    stepper, job = loop.run_until_complete(main())
    if how == "loop closed before a scheduled call":
        gate.allow(1)
        while not stepper._deliver_pending:  # the loop does not run, so the call is lost
            time.sleep(0.001)
    loop.close()
    gc.collect()
    gate.open()
    stepper.thread.join(60)
    assert not stepper.thread.is_alive()
    assert job.finish_reason == FinishReason.CANCELLED
    for serving, _ in kept:
        with pytest.raises(RuntimeError, match="expected a call in the event loop"):
            serving.generate([1])


def test_engine_left_open_in_a_closed_loop_opens_in_another(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is asleep when the loop closes."""
    serving, asleep = AsyncEngine(engine), watch_sleep(engine, monkeypatch)

    async def left_open() -> tuple[JobStream, weakref.ref[StepThread]]:
        await serving.open()
        await asyncio.to_thread(asleep.wait)
        asleep.clear()
        stream = serving.generate([1], max_new_tokens=3)
        await stream.result()
        await asyncio.to_thread(asleep.wait)
        return stream, weakref.ref(stream._stepper)

    async def opened_twice(stream: JobStream) -> None:
        await opened_again(serving)
        with pytest.raises(RuntimeError, match="expected a call in the event loop"):
            await stream.result()
        await serving.open()
        with pytest.raises(RuntimeError, match="already open"):
            await serving.open()
        await serving.close()

    stream, former = asyncio.run(left_open())
    run(opened_twice(stream))
    del stream
    gc.collect()
    assert former() is None


def test_open_waits_for_the_capture_of_a_cancelled_open_and_for_close(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    held, capture, serving = threading.Event(), engine.ensure_captured, AsyncEngine(engine)
    monkeypatch.setattr(engine, "ensure_captured", lambda: held.wait(60) and capture())

    async def main() -> None:
        opening = asyncio.create_task(serving.open())
        await asyncio.sleep(0)  # open() starts the thread
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        calls = [asyncio.create_task(serving.open()) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not calls[0].done() and not calls[1].done()
        held.set()
        assert [str(error) for error in await asyncio.gather(*calls, return_exceptions=True) if error] == [
            "AsyncEngine.open(): already open"
        ]
        stream = serving.generate([2], max_new_tokens=9)
        closing = asyncio.create_task(serving.close())
        await asyncio.sleep(0)  # close() begins to drain
        await serving.open()
        assert stream.job.finished
        await closing
        assert stream.job.tokens == plain([2], 9).tokens
        await serving.close()

    run(main())


EXITING = """
import asyncio, atexit
streams = []
atexit.register(lambda: print(streams[0].job.finish_reason, len(streams[0].job.tokens) > 0))  # registered first, called last
from stepgraph import AsyncEngine, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.runtime.models.toy import ToyTarget
vocabulary = Vocabulary.printable()
config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=100_000, page_size=1000, eager=True, backend="tape")
engine = Engine(ToyTarget(vocabulary.logits_width), vocabulary=vocabulary, config=config)

async def main():
    serving = AsyncEngine(engine)
    await serving.open()
    streams.append(serving.generate([1], max_new_tokens=90_000, sampling=SamplingParams(temperature=0, ignore_eos=True)))
    await streams[0].__anext__()

asyncio.get_event_loop_policy().new_event_loop().run_until_complete(main())
"""


@pytest.mark.slow
def test_interpreter_exits_cleanly_with_rounds_in_flight() -> None:
    """Neither the engine nor the loop is closed."""
    ran = subprocess.run([sys.executable, *NO_LINK_WARNING, "-c", EXITING], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "cancelled True\n", "")


def test_close_before_open_does_nothing() -> None:
    with make_engine(Setup(k=0, max_rows=1, eager=True)) as engine:
        serving = AsyncEngine(engine)
        asyncio.run(serving.close())
        assert serving.failure is None
