"""The two ways to serve: a loop that steps while threads submit and cancel, and an event loop with an AsyncEngine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepgraph import AsyncEngine, StepEvent
from stepgraph.runtime.aio import JobStream
from tools.soak.asking import Asks
from tools.soak.telling import Act, Followed, Told, submitter

THREADS, TASKS = 3, 6
DRAIN_SECONDS = 60.0  # what ends later than that hangs
MakeAsks = Callable[[], Asks]


@contextmanager
def submitting(act: Act, make_asks: MakeAsks, followed: Followed, count: int, at_once: int) -> Iterator[None]:
    """Threads that submit, until the act is over; they are gone behind this."""
    threads = [
        threading.Thread(target=submitter, args=(act, make_asks(), followed, at_once), name=f"soak-{number}") for number in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def loop_act(act: Act, make_asks: MakeAsks, close: bool) -> None:
    """This thread steps. With `close` the engine is closed while jobs run and threads submit."""
    engine, events = act.engine, list[StepEvent]()
    with submitting(act, make_asks, "whole", THREADS, at_once=6):
        while not act.over:
            if engine.wait(0.01):
                events += engine.step()
        if close:
            act.closed = True
            engine.close()
    deadline = time.monotonic() + DRAIN_SECONDS
    while not close and engine.has_work:
        events += engine.step()
        if time.monotonic() > deadline:
            act.problems.append(f"{DRAIN_SECONDS:g} s after the last submit there are jobs still: {engine.step_gate.jobs[:3]}")
            break
    by_job = {told.job.id: told for told in act.told}  # an event may be known sooner than submit() has returned
    for event in events:
        if event.job_id in by_job:
            by_job[event.job_id].events.append(event)
        else:
            act.problems.append(f"an event of a job that nobody submitted: {event}")


def served_act(act: Act, make_asks: MakeAsks, hurry: bool) -> None:
    """An AsyncEngine steps; tasks read, leave, are cancelled; one thread submits beside them. `hurry`: its jobs are not waited for."""

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: act.problems.append(f"event loop: {_told(context)}"))
        async with AsyncEngine(act.engine) as serving:
            tasks = [asyncio.create_task(_client(act, serving, make_asks())) for _ in range(TASKS)]
            ended, late = await asyncio.wait(tasks, timeout=act.seconds_left + DRAIN_SECONDS)
            for task in late:
                act.problems.append(f"a task still waits for its stream, {DRAIN_SECONDS:g} s after the end")
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            await asyncio.gather(*ended)
            if hurry:
                await serving.close(drain=False)

    with submitting(act, make_asks, "no", 1, at_once=3):
        asyncio.run(serve())


def _told(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"


async def _client(act: Act, serving: AsyncEngine, asks: Asks) -> None:
    """One request after another, left in all the ways there are."""
    drawn = asks.random
    while not act.over:
        ask, before = act.ask(asks)
        stream = await serving.submit(ask.prompt, **ask.options)
        told = Told(ask, stream.job, before)
        act.told.append(told)
        way = drawn.choices(("read", "slowly", "leave", "time-out", "drop"), (8, 2, 2, 2, 1))[0]
        if way == "time-out":
            told.followed = "part"
            try:
                await asyncio.wait_for(_read(stream, told, 0.0), drawn.choice((0.001, 0.02, 0.1)))
            except asyncio.TimeoutError:
                await stream.aclose()
        elif way in ("leave", "drop"):
            told.followed = "part"
            for _ in range(drawn.randint(0, 3)):
                if event := await anext(stream, None):
                    told.events.append(event)
            if way == "leave":
                await stream.aclose()
        else:
            await _read(stream, told, 0.01 if way == "slowly" else 0.0)
        act.counts[f"streams: {way}"] += 1
        del stream


async def _read(stream: JobStream, told: Told, pause: float) -> None:
    async for event in stream:
        told.events.append(event)
        if pause:
            await asyncio.sleep(pause)
