"""The interface through which the endpoints use one engine or several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from stepgraph.runtime.aio import AsyncEngine, JobStream
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.request import Job, StepEvent
from stepgraph.runtime.text import TextCodec

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class AnswerError(RuntimeError):
    """An answer cannot be completed, and the request is not the cause."""


class AnswerStream(Protocol):
    """Events of one request, the last one with a finish reason."""

    @property
    def job(self) -> Job: ...

    def __aiter__(self) -> AnswerStream: ...

    async def __anext__(self) -> StepEvent:
        """AnswerError if the answer cannot be completed."""

    def cancel(self, reason: FinishReason) -> None:
        """End the request, without waiting. Idempotent. reason: for the metrics of the engine."""


class Serving(Protocol):
    codec: TextCodec
    max_rows: int  # requests that are decoded at once
    max_length: int

    @property
    def failure(self) -> BaseException | None: ...

    async def wait_failed(self) -> None:
        """Wait until `failure` is set."""

    def list_loras(self) -> Sequence[str]: ...

    async def metrics(self) -> list[Metric]: ...

    async def generate(self, prompt_ids: list[int], **options: Any) -> AnswerStream:
        """Raises ValueError, QueueFullError and EngineClosedError as Engine.submit() does, and AnswerError."""

    async def close(self) -> None:
        """End answers in progress with an error. Raises the error of a failed engine."""


class EngineServing:
    def __init__(self, async_engine: AsyncEngine) -> None:
        self._async_engine, engine = async_engine, async_engine.engine
        self.codec, self.max_rows, self.max_length = engine.tokenizer, engine.config.max_rows, engine.limits.max_length

    @property
    def failure(self) -> BaseException | None:
        return self._async_engine.failure

    async def wait_failed(self) -> None:
        await self._async_engine.wait_closed()
        if self.failure is None:  # closed by its owner
            await asyncio.get_running_loop().create_future()

    def list_loras(self) -> Sequence[str]:
        return self._async_engine.engine.list_loras()

    async def metrics(self) -> list[Metric]:
        from stepgraph.runtime.metrics import engine_metrics  # needs the extra

        return engine_metrics([({}, await asyncio.to_thread(self._async_engine.engine.stats))])

    async def generate(self, prompt_ids: list[int], **options: Any) -> JobStream:
        await self._async_engine.check_long(options["constraint"])
        return self._async_engine.generate(prompt_ids, **options)

    async def close(self) -> None:
        await self._async_engine.close(drain=False)
