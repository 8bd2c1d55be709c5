"""The paths of the server: what each is answered with. Knows requests and an engine, and nothing of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

from stepgraph import AsyncEngine, EngineClosedError, FinishReason, Job, QueueFullError, StepEvent
from stepgraph.runtime.aio import JobStream
from stepgraph.runtime.metrics import CONTENT_TYPE
from stepgraph.runtime.text import TextCodec
from tools.serve.fields import Asked, asked, refusal
from tools.serve.http import Connection, HttpError, Request
from tools.serve.replies import Delta, Reply, dumped, whole_message

_METHODS = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/models": "GET",
    "/health": "GET",
    "/metrics": "GET",
}


class App:
    """Answers one request at a time, for any number of connections."""

    def __init__(self, serving: AsyncEngine, codec: TextCodec, model: str) -> None:
        self._serving, self._codec, self._model = serving, codec, model
        self._opened = int(time.time())
        self.leaving = False

    async def answer(self, connection: Connection, request: Request) -> None:
        """HttpError where the answer is one."""
        method = _METHODS.get(request.path)
        if method is None:
            raise HttpError(404, f"path: got {request.path[:80]!r}, want one of {', '.join(_METHODS)}")
        if request.method != method:
            raise HttpError(405, f"method: got {request.method}, want {method} for {request.path}")
        if request.path == "/metrics":
            text = await asyncio.to_thread(self._serving.engine.metrics)
            await connection.answer(HTTPStatus.OK, text.encode(), CONTENT_TYPE)
        elif request.path == "/health":
            well = self._serving.failure is None and not self.leaving
            status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
            await connection.answer(status, dumped({"status": "ok" if well else str(self._serving.failure or "shutting down")}).encode())
        elif request.path == "/v1/models":
            model = {"id": self._model, "object": "model", "created": self._opened, "owned_by": "stepgraph"}
            await connection.answer(HTTPStatus.OK, dumped({"object": "list", "data": [model]}).encode())
        else:
            await self._generate(connection, request)

    async def _generate(self, connection: Connection, request: Request) -> None:
        chat, limits = request.path == "/v1/chat/completions", self._serving.engine.limits
        wanted = asked(request.json(), chat, self._codec, self._model, limits.max_length)
        try:
            stream = self._serving.generate(wanted.prompt_ids, **wanted.options)
        except ValueError as error:
            raise refusal(error, "messages" if chat else "prompt") from None
        except QueueFullError as error:
            raise HttpError(429, str(error), code="rate_limit_exceeded") from None
        except EngineClosedError as error:
            raise HttpError(503, str(error)) from None
        async with stream:  # whatever ends this, the client's leaving too, frees the row
            reply = Reply(wanted, self._codec, str(stream.job.id))
            if wanted.stream:
                await self._stream(connection, wanted, stream, reply)
            else:
                await self._whole(connection, wanted, stream, reply)

    async def _whole(self, connection: Connection, wanted: Asked, stream: JobStream, reply: Reply) -> None:
        deltas = [delta async for delta in self._said(stream, reply)]
        message = whole_message(deltas)
        choice: dict[str, Any] = {"index": 0, "logprobs": reply.told_logprobs(), "finish_reason": reply.reason(stream.job)}
        choice |= {"message": message} if wanted.chat else {"text": message["content"]}
        body = self._outer(wanted, reply, stream.job, [choice]) | {"usage": reply.usage(stream.job)}
        await connection.answer(HTTPStatus.OK, dumped(body).encode())

    async def _stream(self, connection: Connection, wanted: Asked, stream: JobStream, reply: Reply) -> None:
        job, told = stream.job, 0

        async def send(delta: Delta | None, reason: str | None = None) -> None:
            choice: dict[str, Any] = {"index": 0, "logprobs": reply.told_logprobs(told), "finish_reason": reason}
            choice |= {"delta": delta or {}} if wanted.chat else {"text": (delta or {}).get("content", "")}
            await connection.event(dumped(self._outer(wanted, reply, job, [choice])))

        first = True
        try:
            async with contextlib.aclosing(self._said(stream, reply)) as said:
                async for delta in said:
                    await send({"role": "assistant", **delta} if first else delta)
                    told, first = told + len(delta.get("content", "")), False
            await send({"role": "assistant", "content": ""} if first else None, reply.reason(job))
        except HttpError as error:
            if not connection.begun:
                raise
            await connection.event(dumped(error.body))
        else:
            if wanted.usage_too:
                await connection.event(dumped(self._outer(wanted, reply, job, []) | {"usage": reply.usage(job)}))
            await connection.event("[DONE]")
        await connection.end_events()

    async def _said(self, stream: JobStream, reply: Reply) -> AsyncGenerator[Delta, None]:
        """Deltas until the end, or until a stop text; HttpError where the text did not come to a good end."""
        async for event in stream:
            for delta in reply.push(event):
                yield delta
            self._check_end(stream.job, event)
            if reply.stopped:
                break
        for delta in reply.finish():
            yield delta

    def _check_end(self, job: Job, event: StepEvent) -> None:
        if event.finish_reason == FinishReason.CANCELLED:
            raise HttpError(503, "the server is shutting down")
        if event.finish_reason == FinishReason.DEAD_END:
            raise HttpError(500, "the text came to where nothing may follow: what it must obey and what it may hold leave no token")
        if event.finish_reason == FinishReason.ERROR:
            refused = job.constraint is not None and not job.rounds and self._serving.failure is None
            raise HttpError(400 if refused else 500, event.error, "response_format" if refused else None)

    def _outer(self, wanted: Asked, reply: Reply, job: Job, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = ("chat.completion" + (".chunk" if wanted.stream else "")) if wanted.chat else "text_completion"
        prefix = "chatcmpl" if wanted.chat else "cmpl"
        return {"id": f"{prefix}-{job.id}", "object": kind, "created": reply.created, "model": self._model, "choices": choices}
