"""Engines under load: a loop that steps while threads submit and cancel, or an event loop with an AsyncEngine. Records every job."""

from __future__ import annotations

import asyncio
import collections
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from stepgraph import AsyncEngine, Engine, EngineClosedError, Job, QueueFullError, StepEvent
from stepgraph.runtime.aio import JobStream
from tools.soak.requests import Request, RequestSource

THREADS, TASKS = 3, 6
DRAIN_SECONDS = 60.0  # a job that takes longer counts as hung
MakeSource = Callable[[], RequestSource]
Collected = Literal["whole", "part", "no"]  # how many of a job's events were collected


@dataclass(frozen=True)
class Answer:
    """An earlier answer: the same request must give it again, sampled or not."""

    request: Request
    tokens: tuple[int, ...]
    reason: str


@dataclass(eq=False)
class JobRecord:
    """A job and its events."""

    request: Request
    job: Job
    earlier: Answer | None = None
    collected: Collected = "whole"
    events: list[StepEvent] = field(default_factory=list)


class Act:
    """One engine under load for some seconds. Several threads append to the lists; only the driving thread changes dicts."""

    def __init__(self, engine: Engine, answers: collections.deque[Answer], seconds: float, stop: threading.Event) -> None:
        self.engine, self.answers, self._until, self._stop = engine, answers, time.monotonic() + seconds, stop
        self.records: list[JobRecord] = []
        self.problems: list[str] = []
        self.counts = collections.Counter[str]()  # each key is counted by one thread, except keys whose lost counts do not matter
        self.closed = False  # the engine was closed under load

    @property
    def seconds_left(self) -> float:
        return 0.0 if self._stop.is_set() else max(0.0, self._until - time.monotonic())

    @property
    def over(self) -> bool:
        return self.seconds_left == 0.0

    def request(self, source: RequestSource) -> tuple[Request, Answer | None]:
        """A new request, or one with an earlier answer."""
        if source.random.random() < 0.12:
            try:
                earlier = self.answers.popleft()
            except IndexError:
                return source.draw(), None
            return earlier.request, earlier
        return source.draw(), None

    def submit_refused(self, rng: random.Random) -> None:
        """Submit a bad request, which must be refused. The counters are checked at the end of the act."""
        bad: Sequence[tuple[Sequence[int], int]] = (([], 4), ([-1], 4), ([1] * 400, 4), ([1, 2], 0), ([1, 2], 400))
        prompt, new_tokens = rng.choice(bad)
        try:
            self.engine.submit(prompt, max_new_tokens=new_tokens)
        except (ValueError, EngineClosedError):
            self.counts["refused"] += 1
        else:
            self.problems.append(f"submit({prompt}, max_new_tokens={new_tokens}) was accepted")


def submitter(act: Act, source: RequestSource, collected: Collected, max_jobs: int) -> None:
    """Body of a thread that submits and cancels, with at most `max_jobs` running jobs."""
    rng, running = source.random, list[JobRecord]()
    try:
        while not act.over:
            running = [record for record in running if not record.job.finished]
            if len(running) >= max_jobs:
                time.sleep(0.002)
                continue
            request, earlier = act.request(source)
            try:
                running.append(JobRecord(request, request.submit(act.engine), earlier, collected))
                act.records.append(running[-1])
            except QueueFullError:
                act.counts["queue was full"] += 1
                time.sleep(0.005)
                continue
            if rng.random() < 0.02:
                act.submit_refused(rng)
            if rng.random() < 0.3:
                time.sleep(rng.choice((0.001, 0.01, 0.05)))
            if rng.random() < 0.15:
                act.engine.cancel(rng.choice(running).job)
            if rng.random() < 0.05:
                act.engine.cancel(rng.choice(act.records).job)  # may be another thread's job, or finished
    except EngineClosedError:
        act.counts["engine was closed"] += 1
    except BaseException as error:  # otherwise it would only be printed
        act.problems.append(f"a thread that submits: {type(error).__name__}: {error}")


@contextmanager
def submitting(act: Act, make_source: MakeSource, collected: Collected, count: int, max_jobs: int) -> Iterator[None]:
    """Run submitting threads until the act is over, and join them."""
    threads = [
        threading.Thread(target=submitter, args=(act, make_source(), collected, max_jobs), name=f"soak-{number}") for number in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def loop_act(act: Act, make_source: MakeSource, close: bool) -> None:
    """Step in this thread. With `close` the engine is closed while jobs run and threads submit."""
    engine, events = act.engine, list[StepEvent]()
    with submitting(act, make_source, "whole", THREADS, max_jobs=6):
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
            left = [queued.job for queued in engine.queue.unfinished.values()]
            act.problems.append(f"{DRAIN_SECONDS:g} s after the last submit there are still jobs: {left[:3]}")
            break
    by_job = {record.job.id: record for record in act.records}  # a job's first event may arrive before submit() returns
    for event in events:
        if event.job_id in by_job:
            by_job[event.job_id].events.append(event)
        else:
            act.problems.append(f"an event of an unknown job: {event}")


def served_act(act: Act, make_source: MakeSource, abort: bool) -> None:
    """Step with an AsyncEngine while tasks read, leave early or are cancelled and one thread submits. `abort`: close without draining."""

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: act.problems.append(f"event loop: {_described(context)}"))
        async with AsyncEngine(act.engine) as serving:
            tasks = [asyncio.create_task(_client(act, serving, make_source())) for _ in range(TASKS)]
            ended, late = await asyncio.wait(tasks, timeout=act.seconds_left + DRAIN_SECONDS)
            for task in late:
                act.problems.append(f"a task still waits for its stream, {DRAIN_SECONDS:g} s after the end")
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            await asyncio.gather(*ended)
            if abort:
                await serving.close(drain=False)

    with submitting(act, make_source, "no", 1, max_jobs=3):
        asyncio.run(serve())


def _described(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"


async def _client(act: Act, serving: AsyncEngine, source: RequestSource) -> None:
    """One request after another, each left in one of five ways."""
    rng = source.random
    while not act.over:
        request, earlier = act.request(source)
        stream = await serving.submit(request.prompt, **request.options)
        record = JobRecord(request, stream.job, earlier)
        act.records.append(record)
        ending = rng.choices(("read", "slowly", "leave", "time-out", "drop"), (8, 2, 2, 2, 1))[0]
        if ending == "time-out":
            record.collected = "part"
            try:
                await asyncio.wait_for(_read(stream, record, 0.0), rng.choice((0.001, 0.02, 0.1)))
            except asyncio.TimeoutError:
                await stream.aclose()
        elif ending in ("leave", "drop"):
            record.collected = "part"
            for _ in range(rng.randint(0, 3)):
                if event := await anext(stream, None):
                    record.events.append(event)
            if ending == "leave":
                await stream.aclose()
        else:
            await _read(stream, record, 0.01 if ending == "slowly" else 0.0)
        act.counts[f"streams: {ending}"] += 1
        del stream


async def _read(stream: JobStream, record: JobRecord, pause: float) -> None:
    async for event in stream:
        record.events.append(event)
        if pause:
            await asyncio.sleep(pause)
