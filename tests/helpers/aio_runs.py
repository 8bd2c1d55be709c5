"""Helpers of the AsyncEngine tests: a gate that holds an engine, event loops with strict checks, checks of streams."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from stepgraph import AsyncEngine, Engine, FinishReason, Job, SamplingParams, StepEvent
from stepgraph.runtime.aio import JobStream
from stepgraph.runtime.request_queue import WakeSignal
from tests.helpers.oracles import Answer
from tests.helpers.toy_engines import CONSTRAINTS, Setup, make_engine, plain

SETUP = Setup(k=2, max_rows=3, eager=True, greedy_only=False)  # eager: the same rounds, and no capture to wait for
LONG = SamplingParams(temperature=0, ignore_eos=True)  # ends by length unless cancelled


class Gate:
    """Lets an engine make `steps` steps, then blocks the stepping thread."""

    def __init__(self, engine: Engine, steps: int = 0) -> None:
        self._permits, self._step, self._engine = threading.Semaphore(steps), engine.step, engine
        self.steps_made, self._opened = 0, False
        engine.step = self._gated_step  # type: ignore[method-assign]

    def _gated_step(self) -> list[StepEvent]:
        assert self._opened or self._permits.acquire(timeout=60), "a test forgot to open the gate"
        self.steps_made += 1
        return self._step()

    def allow(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        self._opened = True
        self._permits.release()


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """An engine for the tests of one file."""
    with make_engine(SETUP) as engine:
        gc.collect()
        gc.freeze()  # collecting all of torch takes longer than most tests
        yield engine
        gc.unfreeze()


@pytest.fixture(name="engine")
def idle_engine(shared: Engine) -> Iterator[Engine]:
    """The shared engine; checks that the test leaves it idle."""
    yield shared
    shared.__dict__.pop("step", None)
    assert not shared.has_work
    assert shared.stats().running == shared.stats().waiting == 0
    shared.step()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Check that a test leaves no stepping thread."""
    yield
    assert threads_left() == []


FIXTURES = shared, idle_engine, no_thread_left  # a test module uses them by assigning them to names


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "stepgraph-aio"]


def run(main: Coroutine[Any, Any, None]) -> None:
    """Fail on what an event loop only logs: lost tasks, errors in callbacks, coroutines that were not awaited."""

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
    """The first `count` events, or fewer if the stream ends."""
    events: list[StepEvent] = []
    while len(events) < count and not (events and events[-1].finish_reason):
        events.append(await stream.__anext__())
    return events


async def read(stream: JobStream) -> list[StepEvent]:
    return [event async for event in stream]


def check_events(events: list[StepEvent], job: Job) -> None:
    """Check that the events have all tokens once and in order, and the finish reason at the end."""
    assert [token for event in events for token in event.tokens] == job.tokens
    assert [logprob for event in events for logprob in event.logprobs] == job.logprobs
    assert sum(event.num_accepted_drafts for event in events) == job.num_accepted_drafts
    assert [event.job_id for event in events] == [job.id] * len(events)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [job.finish_reason]
    assert job.finished and events[-1].error == job.error


def check_alone(job: Job, answer: Answer) -> None:
    """Check that a job has the tokens it would have alone, or a prefix of them if it was cancelled."""
    if job.finish_reason == FinishReason.CANCELLED:
        assert job.tokens == answer.tokens[: len(job.tokens)]
    else:
        assert (job.tokens, job.finish_reason) == (answer.tokens, answer.reason)


REQUESTS: list[dict[str, Any]] = [
    {"prompt": [index, 5], "constraint": CONSTRAINTS[index % 4], "max_new_tokens": 12 + index, "sampling": sampling}
    for index, sampling in enumerate([LONG, None, None, None, SamplingParams(temperature=0, logprobs=True), None, None, None])
]


def answers() -> list[Answer]:
    return [plain(ask["prompt"], ask["max_new_tokens"], ask["constraint"], sampling=ask["sampling"] or GREEDY) for ask in REQUESTS]


GREEDY = SamplingParams(temperature=0)


def watch_sleep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set when the stepping thread starts to sleep without a time-out."""
    asleep = threading.Event()
    original = WakeSignal.wait

    def wait(wake: WakeSignal, seconds: float | None = None) -> bool:
        if wake is engine.queue.wake and seconds is None:
            asleep.set()
        elif wake is engine.queue.wake:
            polls.append(seconds)
        return original(wake, seconds)

    polls: list[float | None] = []
    asleep.polls = polls  # type: ignore[attr-defined]
    monkeypatch.setattr(WakeSignal, "wait", wait)
    return asleep


async def opened(engine: Engine) -> None:
    async with AsyncEngine(engine):
        raise AssertionError("the engine was opened")


async def opened_again(serving: AsyncEngine) -> None:
    async with serving:
        assert (await serving.generate([2], max_new_tokens=9).result()).tokens == plain([2], 9).tokens
