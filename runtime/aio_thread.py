"""The thread that steps an engine for an event loop, and what the two share.

Nothing is queued between them. A job keeps its tokens itself, and a reading only how far it was read: who reads slowly gets fewer
and longer events, and neither holds up the others nor takes more memory.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from stepgraph.runtime.engine import Engine
from stepgraph.runtime.request import NO_DRAFTS, Job, StepEvent
from stepgraph.sampling.lifetimes import ExitStage, close_at_exit


class Reading:
    """How far a job is known to the event loop, and how far it was read. Changed under its stepper's lock."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.known = self.read = 0  # tokens
        self.drafts = NO_DRAFTS  # since the last read
        self.fresh = self.ended = False
        self.readers: list[asyncio.Future[None]] = []  # for the event loop alone

    def add(self, event: StepEvent) -> None:
        self.known += len(event.tokens)
        self.drafts = self.drafts.plus(event.drafts)
        self.fresh, self.ended = True, event.finish_reason is not None

    def end(self) -> None:
        """What is known of a job that ended without an event: the engine was closed."""
        self.known, self.fresh, self.ended = len(self.job.tokens), True, True

    def take(self) -> StepEvent | None:
        """All that was not read yet, as one event."""
        if not self.fresh:
            return None
        job, new = self.job, slice(self.read, self.known)
        event = StepEvent(
            job.id,
            tuple(job.tokens[new]),
            self.drafts,
            job.finish_reason if self.ended else None,
            job.error if self.ended else "",
            tuple(job.logprobs[new]),
            tuple(job.origins[new]),
        )
        self.read, self.fresh, self.drafts = self.known, False, NO_DRAFTS
        return event

    def wake(self) -> None:
        for reader in self.readers:
            _settle(reader)


class Stepper:
    """The thread that steps, and what it shares with the event loop. Holds nothing of AsyncEngine, which may be dropped unclosed."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.loop, self.process = engine, loop, os.getpid()
        self.opened, self.ended = loop.create_future(), loop.create_future()
        self.failure: BaseException | None = None
        self.stopping = self._hurry = False
        self._lock = threading.Lock()
        self._readings: dict[int, Reading] = {}
        self._fresh: list[Reading] = []
        self._room: asyncio.Future[None] | None = None
        self._bringing = False
        self._last: Sequence[Job] | None = None  # the jobs whose ends it waits for when it stops
        self.thread = threading.Thread(target=self._run, name="stepgraph-aio", daemon=True)
        self.thread.start()
        close_at_exit(self, ExitStage.STEPPER)

    def submit(self, prompt_ids: Any, options: dict[str, Any]) -> Reading:
        with self._lock:  # its first event comes behind this
            reading = Reading(self.engine.submit(prompt_ids, **options))
            self._readings[reading.job.id] = reading
        return reading

    def take(self, reading: Reading) -> StepEvent | None:
        with self._lock:
            return reading.take()

    async def room(self) -> None:
        """Wait until the queue may have room. One task at a time."""
        while self.engine.step_gate.queue_full and not self.stopping:
            with self._lock:
                self._room = self.loop.create_future()
            if self.engine.step_gate.queue_full:  # else it became so before anybody could see that it is wanted
                await self._room

    def stop(self, drain: bool) -> None:
        """Ask the thread to end, behind the jobs there are or by cancelling them. Takes no lock: a finaliser may call it."""
        self._hurry = self._hurry or not drain
        self.stopping = True
        self.engine.step_gate.notify()

    def close(self, seconds: float) -> None:
        """Cancel the jobs, and wait at most `seconds` for the thread."""
        self.stop(drain=False)
        self.thread.join(seconds)

    def cancel_soon(self, job: Job) -> None:
        """For finalisers, which may run wherever the engine's locks are held."""
        if not job.finished and os.getpid() == self.process:
            self._call(self.engine.cancel, job)

    def _run(self) -> None:
        try:
            with self.engine.step_gate.exclusive():
                if not self.engine.step_gate.captured:
                    self.engine.capture()
                self.engine.wait(0)  # raises where it was closed
                self._call(_settle, self.opened)
                while not self._done():
                    if self.engine.wait():
                        self._tell(self.engine.step())
        except BaseException as error:  # whatever it is, everybody who waits is told
            self.failure = error
        self.stopping = True
        with self._lock:
            for reading in self._readings.values():
                reading.end()
            self._fresh.extend(self._readings.values())
            self._readings.clear()
        self._call(self._bring)
        self._call(_settle, self.opened)
        self._call(_settle, self.ended)

    def _done(self) -> bool:
        if not self.stopping:
            return False
        if self._last is None:
            self._last = self.engine.step_gate.jobs
        if self._hurry:
            for job in self._last:
                self.engine.cancel(job)
        return all(job.finished for job in self._last)

    def _tell(self, events: Sequence[StepEvent]) -> None:
        """Note what became known, and have the event loop look, once however many steps are made before it does."""
        with self._lock:
            for event in events:
                reading = self._readings.get(event.job_id)
                if reading is None:  # submitted to the engine itself: who did so looks at the job
                    continue
                if not reading.fresh:
                    self._fresh.append(reading)
                reading.add(event)
                if reading.ended:
                    del self._readings[event.job_id]
            roomy = self._room is not None and not self.engine.step_gate.queue_full
            if self._bringing or not (self._fresh or roomy):
                return
            self._bringing = True
        self._call(self._bring)

    def _bring(self) -> None:
        with self._lock:
            fresh, self._fresh = self._fresh, []
            room, self._room = self._room, None
            self._bringing = False
        if room is not None:
            _settle(room)
        for reading in fresh:
            reading.wake()

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop was closed, and close() not called: nobody is there any more to read
            self.stop(drain=False)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
