"""AsyncEngine: serves the tasks of one asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from typing import Any

from stepgraph.runtime.aio_thread import StepThread, StreamBuffer
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.request import EngineClosedError, Job, StepEvent
from stepgraph.runtime.request_queue import QueueFullError


class JobStream:
    """The events of one job: `async for event in stream`. Events that were not read are merged; no token is lost.

    The job is cancelled by aclose(), by leaving `async with`, by dropping the stream, and if a task that waits for an event is cancelled.
    """

    def __init__(self, serving: AsyncEngine, stepper: StepThread, buffer: StreamBuffer) -> None:
        self.job = buffer.job
        self._serving, self._stepper, self._buffer = serving, stepper, buffer  # keeps the AsyncEngine alive

    def __aiter__(self) -> JobStream:
        return self

    async def __anext__(self) -> StepEvent:
        self._serving.check("JobStream.__anext__")
        buffer = self._buffer
        while True:
            ended = buffer.ended  # read before take(), so that nothing follows the event that take() returns
            if event := self._stepper.take(buffer):
                return event
            if ended:
                raise StopAsyncIteration
            buffer.changed.clear()
            try:
                await buffer.changed.wait()
            except asyncio.CancelledError:
                self._stepper.engine.cancel(self.job)
                raise

    async def result(self) -> Job:
        """Read to the end and return the finished job."""
        async for _ in self:
            pass
        return self.job

    async def aclose(self) -> None:
        """Cancel the job if it is running, and wait until its row is free."""
        self._serving.check("JobStream.aclose")
        if not self._buffer.ended:
            self._stepper.engine.cancel(self.job)
        await self.result()

    async def __aenter__(self) -> JobStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._stepper.cancel_soon(self.job)


class AsyncEngine:
    """Serves the tasks of one event loop: `async with AsyncEngine(engine) as serving: async for event in serving.generate(ids): ...`

    While it is open, only its thread steps the engine; it sleeps if there is nothing to do. engine.submit() and engine.cancel() may
    still be called from any thread. After close() the engine has no jobs and can be used or closed by its owner.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._stepper: StepThread | None = None
        self._submit_lock = asyncio.Lock()

    async def open(self) -> None:
        """Start stepping, after capture() if it was not called. RuntimeError if another thread steps the engine."""
        if self._stepper is not None and self._stepper.thread.is_alive():
            raise RuntimeError("AsyncEngine.open(): already open")
        self._stepper = stepper = StepThread(self.engine, asyncio.get_running_loop())
        self._submit_lock = asyncio.Lock()  # a used lock is bound to its event loop
        weakref.finalize(self, stepper.stop, drain=False).atexit = False
        try:
            await stepper.opened.wait()
        except asyncio.CancelledError:
            stepper.stop(drain=False)
            raise
        if stepper.failure is not None:
            stepper.thread.join()  # `failure` is set at the end of the thread
            raise stepper.failure

    def generate(self, prompt_ids: Any, **options: Any) -> JobStream:
        """Submit a request and return its stream. Options and errors as in Engine.submit(), QueueFullError included."""
        stepper = self.check("AsyncEngine.generate")
        if stepper.stopping:
            why = f"the engine failed: {type(self.failure).__name__}: {self.failure}" if self.failure else "it was closed"
            raise EngineClosedError(f"AsyncEngine.generate(): {why}") from stepper.failure
        return JobStream(self, stepper, stepper.submit(prompt_ids, options))

    async def submit(self, prompt_ids: Any, **options: Any) -> JobStream:
        """Like generate(), but wait for room in a full queue, in the order of the calls."""
        stepper = self.check("AsyncEngine.submit")
        async with self._submit_lock:
            while True:
                await stepper.wait_for_room()
                with contextlib.suppress(QueueFullError):  # another thread took the room
                    return self.generate(prompt_ids, **options)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the stepping; None before one and after close()."""
        failure = self._stepper.failure if self._stepper else None
        return None if isinstance(failure, EngineClosedError) else failure

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
        if os.getpid() != stepper.process:
            raise RuntimeError(f"{call}(): got a forked process, expected the process that opened it, where the stepping thread is")
        if _running_loop() is not stepper.loop:
            raise RuntimeError(f"{call}(): expected a call in the event loop that opened it; Engine.submit() works in any thread")
        return stepper


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
