"""An engine for asyncio: requests in, streams of events out, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from types import TracebackType
from typing import Any

from stepgraph.runtime.aio_thread import Reading, Stepper
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.request import EngineClosedError, Job, QueueFullError, StepEvent


class JobStream:
    """The events of one job, as they become known: `async for event in stream`. Merged while nobody reads: no token is lost.

    A task that is cancelled while it waits for an event cancels the job. So do aclose(), leaving `async with`, and dropping the stream.
    """

    def __init__(self, serving: AsyncEngine, stepper: Stepper, reading: Reading) -> None:
        self.job = reading.job
        self._serving, self._stepper, self._reading = serving, stepper, reading  # who reads keeps what serves

    def __aiter__(self) -> JobStream:
        return self

    async def __anext__(self) -> StepEvent:
        self._serving.check("JobStream.__anext__")
        reading = self._reading
        while True:
            ended = reading.ended  # asked first: all that was known by then is taken
            if event := self._stepper.take(reading):
                return event
            if ended:
                raise StopAsyncIteration
            reader = self._stepper.loop.create_future()
            reading.readers.append(reader)
            try:
                await reader
            except asyncio.CancelledError:
                self._stepper.engine.cancel(self.job)
                raise
            finally:
                reading.readers.remove(reader)

    async def result(self) -> Job:
        """Read to the end; the job then has all of it."""
        async for _ in self:
            pass
        return self.job

    async def aclose(self) -> None:
        """Cancel the job if it goes on, and wait until its row is free."""
        self._serving.check("JobStream.aclose")
        if not self._reading.ended:
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

    While it is open its thread alone steps the engine, and sleeps when there is nothing to do; engine.submit() and engine.cancel()
    are still for any thread. Behind it the engine is as it was, without jobs, for whoever made it to use or close.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._stepper: Stepper | None = None
        self._door = asyncio.Lock()

    async def open(self) -> None:
        """Start stepping; captures first where that was not done. RuntimeError where somebody else steps the engine."""
        if self._stepper is not None and self._stepper.thread.is_alive():
            raise RuntimeError("AsyncEngine.open(): it is open already")
        self._stepper = stepper = Stepper(self.engine, asyncio.get_running_loop())
        self._door = asyncio.Lock()  # a lock that somebody waited for is of one event loop for good
        weakref.finalize(self, stepper.stop, drain=False).atexit = False
        try:
            await stepper.opened
        except asyncio.CancelledError:
            stepper.stop(drain=False)
            raise
        if stepper.failure is not None:
            stepper.thread.join()  # it has said its last word
            raise stepper.failure

    def generate(self, prompt_ids: Any, **options: Any) -> JobStream:
        """Submit a request, with the options of Engine.submit(), and read its events; raises what that raises, QueueFullError too."""
        stepper = self.check("AsyncEngine.generate")
        if stepper.stopping:
            raise EngineClosedError(f"AsyncEngine.generate(): {self._why(stepper)}") from stepper.failure
        return JobStream(self, stepper, stepper.submit(prompt_ids, options))

    async def submit(self, prompt_ids: Any, **options: Any) -> JobStream:
        """generate(), but where the queue is full wait for room in it, in order of calls."""
        stepper = self.check("AsyncEngine.submit")
        async with self._door:
            while True:
                await stepper.room()
                with contextlib.suppress(QueueFullError):  # another thread was quicker
                    return self.generate(prompt_ids, **options)

    @property
    def failure(self) -> BaseException | None:
        """What ended the stepping; None while all is well, and behind close()."""
        failure = self._stepper.failure if self._stepper else None
        return None if isinstance(failure, EngineClosedError) else failure

    async def close(self, drain: bool = True) -> None:
        """Let the jobs that there are end, or cancel them, whoever submitted them; then stop stepping. Raises what a step raised.

        Idempotent. Who is cancelled while it drains cancels the jobs.
        """
        await self._stop(drain)
        if self.failure is not None:
            raise self.failure

    async def __aenter__(self) -> AsyncEngine:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stop(drain=kind is None)
        if kind is None and self.failure is not None:
            raise self.failure

    async def _stop(self, drain: bool) -> None:
        if self._stepper is None:
            return
        stepper = self.check("AsyncEngine.close")
        stepper.stop(drain)
        try:
            await asyncio.shield(stepper.ended)
        except asyncio.CancelledError:
            stepper.stop(drain=False)
            await asyncio.shield(stepper.ended)
            raise
        finally:
            if stepper.ended.done():
                stepper.thread.join()

    def check(self, call: str) -> Stepper:
        """RuntimeError where there is nobody to serve the caller."""
        stepper = self._stepper
        if stepper is None:
            raise RuntimeError(f"{call}(): it is not open; call it inside `async with AsyncEngine(engine) as serving`")
        if os.getpid() != stepper.process:
            raise RuntimeError(f"{call}(): got a fork of the process that opened it, want that process: the thread that steps is there")
        if _running_loop() is not stepper.loop:
            raise RuntimeError(f"{call}(): want a call in the event loop that it was opened in; Engine.submit() is for any thread")
        return stepper

    def _why(self, stepper: Stepper) -> str:
        return f"the engine failed: {type(self.failure).__name__}: {self.failure}" if self.failure else "it was closed"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
