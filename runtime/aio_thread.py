"""The thread that steps an engine for an event loop, and the state shared by the two.

There is no queue of events between them. A job keeps its own tokens and a StreamBuffer keeps positions in them, so a slow consumer
receives fewer, larger events, uses no more memory and does not delay the others.
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


class StreamBuffer:
    """What a stream has not yet read of its job. Changed under the lock of its StepThread."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.known = self.read = 0  # tokens
        self.drafts = NO_DRAFTS  # since the last read
        self.unread = self.ended = False
        self.changed = asyncio.Event()  # used by the event loop only

    def add(self, event: StepEvent) -> None:
        self.known += len(event.tokens)
        self.drafts = self.drafts.plus(event.drafts)
        self.unread, self.ended = True, event.finish_reason is not None

    def end(self) -> None:
        """For a job that ended without an event, since the engine was closed."""
        self.known, self.unread, self.ended = len(self.job.tokens), True, True

    def take(self) -> StepEvent | None:
        """Everything unread as one event."""
        if not self.unread:
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
        self.read, self.unread, self.drafts = self.known, False, NO_DRAFTS
        return event


class StepThread:
    """Steps an engine in a thread. Holds no reference to the AsyncEngine, so that one dropped without close() can be finalised."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.loop, self.process = engine, loop, os.getpid()
        self.opened, self.ended = asyncio.Event(), asyncio.Event()
        self.failure: BaseException | None = None
        self.stopping = self._cancel_jobs = False
        self._lock = threading.Lock()
        self._buffers: dict[int, StreamBuffer] = {}
        self._unread: list[StreamBuffer] = []
        self._room: asyncio.Event | None = None
        self._notified = False  # a call of _wake_readers is scheduled
        self._last_jobs: Sequence[Job] | None = None  # those to finish before the thread ends
        self.thread = threading.Thread(target=self._run, name="stepgraph-aio", daemon=True)
        self.thread.start()
        close_at_exit(self, ExitStage.STEPPER)

    def submit(self, prompt_ids: Any, options: dict[str, Any]) -> StreamBuffer:
        with self._lock:  # so that the job's first event finds its buffer
            buffer = StreamBuffer(self.engine.submit(prompt_ids, **options))
            self._buffers[buffer.job.id] = buffer
        return buffer

    def take(self, buffer: StreamBuffer) -> StepEvent | None:
        with self._lock:
            return buffer.take()

    async def wait_for_room(self) -> None:
        """Wait until the queue may have room. For one task at a time."""
        while self.engine.queue.full and not self.stopping:
            room = asyncio.Event()
            with self._lock:
                self._room = room
            if self.engine.queue.full:  # otherwise room appeared before the thread could see the event
                await room.wait()

    def stop(self, drain: bool) -> None:
        """Ask the thread to end after the present jobs have ended, or to cancel them. Takes no lock, as finalisers call it."""
        self._cancel_jobs = self._cancel_jobs or not drain
        self.stopping = True
        self.engine.queue.wake.notify()

    def close(self, seconds: float) -> None:
        """Cancel the jobs, and wait at most `seconds` for the thread."""
        self.stop(drain=False)
        self.thread.join(seconds)

    def cancel_soon(self, job: Job) -> None:
        """For finalisers, which may run at a point where their thread holds a lock of the engine."""
        if not job.finished and os.getpid() == self.process:
            self._call_in_loop(self.engine.cancel, job)

    def _run(self) -> None:
        try:
            with self.engine.step_lock.exclusive():
                if not self.engine.captured:
                    self.engine.capture()
                self.engine.wait(0)  # raises if the engine is closed
                self._call_in_loop(self.opened.set)
                while not self._done():
                    if self.engine.wait():
                        self._distribute(self.engine.step())
        except BaseException as error:  # of any kind: all streams must end
            self.failure = error
        self.stopping = True
        with self._lock:
            for buffer in self._buffers.values():
                buffer.end()
            self._unread.extend(self._buffers.values())
            self._buffers.clear()
        self._call_in_loop(self._wake_readers)
        self._call_in_loop(self.opened.set)
        self._call_in_loop(self.ended.set)

    def _done(self) -> bool:
        if not self.stopping:
            return False
        if self._last_jobs is None:
            self._last_jobs = [queued.job for queued in tuple(self.engine.queue.unfinished.values())]
        if self._cancel_jobs:
            for job in self._last_jobs:
                self.engine.cancel(job)
        return all(job.finished for job in self._last_jobs)

    def _distribute(self, events: Sequence[StepEvent]) -> None:
        """Add events to the buffers, and schedule one wake-up in the event loop for all steps until it runs."""
        with self._lock:
            for event in events:
                buffer = self._buffers.get(event.job_id)
                if buffer is None:  # submitted by Engine.submit()
                    continue
                if not buffer.unread:
                    self._unread.append(buffer)
                buffer.add(event)
                if buffer.ended:
                    del self._buffers[event.job_id]
            has_room = self._room is not None and not self.engine.queue.full
            if self._notified or not (self._unread or has_room):
                return
            self._notified = True
        self._call_in_loop(self._wake_readers)

    def _wake_readers(self) -> None:
        with self._lock:
            unread, self._unread = self._unread, []
            room, self._room = self._room, None
            self._notified = False
        for event in (*(buffer.changed for buffer in unread), *((room,) if room else ())):
            event.set()

    def _call_in_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop was closed without close(): there are no readers left
            self.stop(drain=False)
