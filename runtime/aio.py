"""AsyncEngine: serves the tasks of one asyncio event loop; a thread steps the engine.

A job keeps its own tokens and a JobStream keeps positions in them, so a slow consumer receives fewer, larger events, uses no more
memory and does not delay the others. The event loop owns the streams; the thread passes it the events of its steps.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, overload

from stepgraph.runtime.engine import Engine
from stepgraph.runtime.job import FinishReason, T
from stepgraph.runtime.parallel.lockstep import LockstepQueue
from stepgraph.runtime.request import NO_DRAFTS, EngineClosedError, Job, StepEvent
from stepgraph.runtime.request_queue import PAUSE_SECONDS, QueueFullError
from stepgraph.runtime.validate import REQUEST_NAMES, Prompt, RequestOptions, UntypedOptions
from stepgraph.sampling.fields import check_value, checked_keywords, instance_of, message_of
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.lifetimes import BoundToProcess, ExitStage, close_at_exit

if TYPE_CHECKING:
    from typing_extensions import Unpack

LONG_CONSTRAINT = 10_000  # characters, whose check takes up to about 30 ms


class StepThread:
    """Steps an engine in a thread. Holds no reference to the AsyncEngine, so that one dropped without close() can be finalised."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, owner: AsyncEngine) -> None:
        self.engine, self.loop, self.process_id = engine, loop, os.getpid()
        self._owner = weakref.ref(owner, lambda _: self.stop(drain=False))
        self.opened, self.ended, self.submit_lock = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self.failure: BaseException | None = None
        self.stopping = self._cancel_jobs = False
        # By job id, of jobs that have not ended; used by the event loop only. A stream that is dropped cancels its job
        self.streams: weakref.WeakValueDictionary[int, JobStream] = weakref.WeakValueDictionary()
        self._events: collections.deque[StepEvent] = collections.deque()  # from the thread to the event loop
        self._room_event: asyncio.Event | None = None
        self._deliver_pending = False  # a call of _deliver is scheduled
        self._last_jobs: Sequence[Job] | None = None  # the jobs that must finish before the thread ends
        self.thread = threading.Thread(target=self._run, name="stepgraph-aio", daemon=True)
        self.thread.start()
        close_at_exit(self, ExitStage.STEPPER)

    async def wait_for_room(self) -> None:
        """Wait until the queue may have room. Only one task at a time may call this."""
        while self.engine.queue.full and not self.stopping:
            self._room_event = room = asyncio.Event()
            if self.engine.queue.full:  # otherwise room appeared before `_room_event` was set
                await room.wait()

    def check(self, call: str) -> None:
        """RuntimeError in another process or event loop."""
        if os.getpid() != self.process_id:
            raise RuntimeError(f"{call}(): got a forked process, expected the process that opened it, where the stepping thread is")
        running = None
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread
            running = asyncio.get_running_loop()
        if running is not self.loop:
            raise RuntimeError(f"{call}(): expected a call in the event loop that opened it; Engine.submit() works in any thread")

    def stop(self, drain: bool) -> None:
        """Let the thread end after the present jobs have ended, or cancel them. Takes no lock, because finalisers call it."""
        self._cancel_jobs = self._cancel_jobs or not drain
        self.stopping = True
        self.engine.queue.wake.notify()

    def close(self, seconds: float) -> None:
        """Cancel the jobs, and wait at most `seconds` for the thread."""
        self.stop(drain=False)
        self.thread.join(seconds)

    def cancel_soon(self, job: Job) -> None:
        """Cancel the job from the event loop. For finalisers: their thread may hold a lock of the engine."""
        if not job.finished and os.getpid() == self.process_id:
            self._call_in_loop(self.engine.cancel, job)

    def _run(self) -> None:
        try:
            with self.engine.step_lock.exclusive():
                self.engine.ensure_captured()
                self.engine.wait(0)  # raises if the engine is closed
                self._call_in_loop(self.opened.set)
                try:
                    while not self._done():
                        if self.engine.wait():
                            self._store_events(self.engine.step())
                except BaseException:  # also between two steps
                    self.engine.close()  # or wait until another thread has closed it: all jobs have ended then
                    raise
        except BaseException as error:  # any exception: all streams must end
            self.failure = error
        self.stopping = True
        self._call_in_loop(self._end)

    def _done(self) -> bool:
        if not self.stopping:
            return False
        if self._last_jobs is None:
            self._last_jobs = [queued.job for queued in tuple(self.engine.queue.unfinished.values())]
        if self._cancel_jobs:
            for job in self._last_jobs:
                self.engine.cancel(job)
        return all(job.finished for job in self._last_jobs)

    def _store_events(self, events: Sequence[StepEvent]) -> None:
        """Store the events, and schedule _deliver in the event loop unless a call of it is pending."""
        self._events.extend(events)
        has_room = self._room_event is not None and not self.engine.queue.full
        if not self._deliver_pending and (events or has_room):
            self._deliver_pending = True
            self._call_in_loop(self._deliver)
        elif self.loop.is_closed():  # the pending call of _deliver never runs
            self.stop(drain=False)

    def _deliver(self) -> None:
        """Add the events to the streams, and wake the task that waits for room. Runs in the event loop."""
        self._deliver_pending = False  # before the events are taken: for later events the thread schedules another call
        while self._events:
            event = self._events.popleft()
            ends = event.finish_reason is not None
            stream = self.streams.pop(event.job_id, None) if ends else self.streams.get(event.job_id)
            if stream is not None:  # otherwise it is of a job of Engine.submit()
                stream._add(event)
        if self._room_event is not None:
            self._room_event.set()
            self._room_event = None

    def _end(self) -> None:
        """End all streams. Runs in the event loop, after the thread's last step."""
        self._deliver()
        for stream in self.streams.values():
            stream._end()
        self.streams.clear()
        self.opened.set()
        self.ended.set()

    def _call_in_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop was closed without close(): there are no readers left
            self.stop(drain=False)


class JobStream(Generic[T]):
    """The events of one job: `async for event in stream`. Events that were not read are merged; no token is lost.

    The job is cancelled by aclose(), by leaving `async with`, by dropping the stream, and if a task that waits for an event is cancelled.
    """

    def __init__(self, async_engine: AsyncEngine, stepper: StepThread, job: Job[T]) -> None:
        self.job = job
        self._async_engine, self._stepper = async_engine, stepper  # keeps the AsyncEngine alive
        self._num_received = self._num_read = 0  # numbers of tokens
        self._drafts = NO_DRAFTS  # since the last read
        self._has_unread = self._ended = False
        self._changed = asyncio.Event()
        stepper.streams[job.id] = self  # before the event loop runs the call that delivers its first event

    def _add(self, event: StepEvent) -> None:
        self._num_received += len(event.tokens)
        self._drafts = self._drafts.plus(event.drafts) if self._has_unread else event.drafts
        self._has_unread, self._ended = True, event.finish_reason is not None
        self._changed.set()

    def _end(self) -> None:
        """End the stream of a job that ended without an event because the engine was closed."""
        self._num_received, self._has_unread, self._ended = len(self.job.tokens), True, True
        self._changed.set()

    def _take(self) -> StepEvent:
        """Everything unread as one event."""
        job, new, ended = self.job, slice(self._num_read, self._num_received), self._ended
        reason, error = (job.finish_reason, job.error) if ended else (None, "")
        event = StepEvent(job.id, tuple(job.tokens[new]), self._drafts, reason, error, tuple(job.logprobs[new]), tuple(job.origins[new]))
        self._num_read, self._has_unread, self._drafts = self._num_received, False, NO_DRAFTS
        return event

    def __aiter__(self) -> JobStream[T]:
        return self

    async def __anext__(self) -> StepEvent:
        self._stepper.check("JobStream.__anext__")
        while not self._has_unread:
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await self._changed.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._take()

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the job without waiting; the last event has this reason. Idempotent."""
        self._stepper.engine.queue.cancel(self.job, reason)

    async def text(self) -> AsyncIterator[str]:
        """The text piece by piece: `async for piece in stream.text()`. An error is in `job.error`."""
        stream = self.job.text_stream()
        async for event in self:
            if piece := stream.push(event.tokens) + (stream.finish() if event.finish_reason else ""):
                yield piece

    async def result(self) -> Job[T]:
        """Read to the end and return the finished job."""
        async for _ in self:
            pass
        return self.job

    def __await__(self) -> Generator[Any, None, Job[T]]:
        """`await stream` is `await stream.result()`."""
        return self.result().__await__()

    async def aclose(self) -> None:
        """Cancel the job if it is running, and wait until its row is free."""
        self._stepper.check("JobStream.aclose")
        if not self._ended:
            self.cancel()
        await self.result()

    async def __aenter__(self) -> JobStream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._stepper.cancel_soon(self.job)


class AsyncEngine(BoundToProcess):
    """Serves the tasks of one event loop: `async with AsyncEngine(engine) as serving: async for event in serving.generate(ids): ...`

    While it is open, only its thread steps the engine; it sleeps if there is nothing to do. engine.submit() and engine.cancel() may
    still be called from any thread. After close() the engine has no jobs and can be used or closed by its owner.
    """

    def __init__(self, engine: Engine) -> None:
        check_value("AsyncEngine.engine", engine, instance_of(Engine, "an Engine"))
        if isinstance(engine.queue, LockstepQueue) and not engine.queue.ranks.rank0_decides:
            raise ValueError("AsyncEngine.engine: got an engine under torchrun, expected one that started its ranks")
        self.engine = engine
        self._stepper: StepThread | None = None

    def __repr__(self) -> str:
        state = "not open" if self._stepper is None or self._stepper.ended.is_set() else "closing" if self._stepper.stopping else "open"
        return f"<AsyncEngine: {state}, {self.engine!r}>"

    async def open(self) -> None:
        """Start stepping, after capture() if it was not called, and after an earlier open() or close() has ended the stepping thread.
        RuntimeError if another thread steps the engine."""
        while self._stepper is not None and self._stepper.thread.is_alive():
            if self._stepper.loop.is_closed():
                self._stepper.stop(drain=False)  # also wakes the thread, which may be asleep
            elif not self._stepper.stopping:
                raise RuntimeError("AsyncEngine.open(): already open")
            await asyncio.sleep(PAUSE_SECONDS)  # until close() is done, or the capture of a cancelled open(), which nothing interrupts
        self._stepper = stepper = StepThread(self.engine, asyncio.get_running_loop(), self)
        try:
            await stepper.opened.wait()
        except asyncio.CancelledError:
            stepper.stop(drain=False)
            raise
        if stepper.failure is not None:
            stepper.thread.join()  # `failure` is set at the end of the thread
            raise stepper.failure

    @overload
    def generate(self, prompt: Prompt, *, constraint: type[T], **options: Unpack[UntypedOptions]) -> JobStream[T]: ...
    @overload
    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> JobStream: ...
    @checked_keywords(REQUEST_NAMES, RequestOptions.__annotations__)
    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> JobStream:
        """Submit a request and return its stream. Options and errors as in Engine.submit(), QueueFullError included."""
        stepper = self.check("AsyncEngine.generate")
        if stepper.stopping:
            why = f"the engine failed: {type(self.failure).__name__}: {message_of(self.failure)}" if self.failure else "it was closed"
            raise EngineClosedError(f"AsyncEngine.generate(): {why}") from stepper.failure
        return JobStream(self, stepper, self.engine.submit(prompt, **options))

    @overload
    async def submit(self, prompt: Prompt, *, constraint: type[T], **options: Unpack[UntypedOptions]) -> JobStream[T]: ...
    @overload
    async def submit(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> JobStream: ...
    async def submit(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> JobStream:
        """Like generate(), but wait for room in a full queue, in the order of the calls, and check long constraints in a thread."""
        stepper = self.check("AsyncEngine.submit")
        await self.check_long(options.get("constraint"))
        async with stepper.submit_lock:
            while True:
                await stepper.wait_for_room()
                with contextlib.suppress(QueueFullError):  # another thread took the room
                    return self.generate(prompt, **options)

    async def check_long(self, constraint: object) -> None:
        """ValueError for a long constraint or a grammar that generate() would refuse. It is checked in a thread, since that can take
        tenths of a second, or load a library, and generate() does not repeat it."""
        compiler = self.engine._parts.compiler
        if not isinstance(constraint, Constraint) or compiler is None:
            return
        if len(constraint.payload) > LONG_CONSTRAINT or constraint.kind in ("ebnf", "lark"):
            await asyncio.to_thread(compiler.check, constraint)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the stepping thread or closed the engine; None if there was none."""
        failure = self._stepper.failure if self._stepper else None
        return self.engine._failure if isinstance(failure, EngineClosedError) else failure

    async def wait_closed(self) -> None:
        """Wait until stepping has ended, by close() or by an error, which is `failure`."""
        await self.check("AsyncEngine.wait_closed").ended.wait()

    async def close(self, drain: bool = True) -> None:
        """Stop stepping after all present jobs have ended, or cancel them if drain is False. Raises the error of a failed step.

        Idempotent. If the calling task is cancelled while jobs drain, the jobs are cancelled.
        """
        await self._stop(drain)
        if self.failure is not None:
            raise self.failure

    async def __aenter__(self) -> AsyncEngine:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
        else:
            await self._stop(drain=False)

    async def _stop(self, drain: bool) -> None:
        if self._stepper is None:
            return
        stepper = self.check("AsyncEngine.close")
        stepper.stop(drain)
        try:
            await stepper.ended.wait()
        except asyncio.CancelledError:
            stepper.stop(drain=False)
            await stepper.ended.wait()
            raise
        finally:
            if stepper.ended.is_set():
                stepper.thread.join()

    def check(self, call: str) -> StepThread:
        """Return the stepping thread. RuntimeError if it cannot serve the caller."""
        stepper = self._stepper
        if stepper is None:
            raise RuntimeError(f"{call}(): not open; call it inside `async with AsyncEngine(engine) as serving`")
        stepper.check(call)
        return stepper
