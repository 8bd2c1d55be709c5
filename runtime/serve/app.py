"""The endpoints of the server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stepgraph import AsyncEngine, EngineClosedError, FinishReason, Job, QueueFullError, StepEvent
from stepgraph.runtime.aio import JobStream
from stepgraph.runtime.metrics import CONTENT_TYPE
from stepgraph.runtime.serve.fields import GenerationRequest, parse_request, runtime_refusal
from stepgraph.runtime.serve.http import (
    Bounds,
    EventStream,
    HttpError,
    Server,
    dumped,
    error_response,
    json_response,
    read_json,
    server_config,
    until_disconnect,
)
from stepgraph.runtime.serve.replies import Delta, Reply, whole_message


class App:
    """Endpoints around one engine; `asgi` is the ASGI application."""

    def __init__(self, serving: AsyncEngine, model: str, bounds: Bounds) -> None:
        self._serving, self._codec, self._model, self._bounds = serving, serving.engine.tokenizer, model, bounds
        self._opened = int(time.time())
        self.leaving = False
        routes = [
            Route("/v1/chat/completions", self._generate, methods=["POST"]),
            Route("/v1/completions", self._generate, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: error_response, Exception: error_response})
        self.asgi.router.redirect_slashes = False

    async def serve(self, listener: socket.socket, soon: asyncio.Event, at_once: asyncio.Event, grace: float) -> None:
        """Serve until `soon` is set; let answers end for `grace` seconds or until `at_once` is set, then cancel their jobs."""
        server = Server(server_config(self.asgi, self._bounds))
        serving, cut = asyncio.ensure_future(server.serve([listener])), asyncio.ensure_future(at_once.wait())
        await soon.wait()
        self.leaving = server.should_exit = True
        await asyncio.wait({serving, cut}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()
        await self._serving.close(drain=False)  # answers in progress end with an error
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(serving, 1.0)  # a client that does not read is not waited for

    async def _metrics(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self._serving.engine.metrics), media_type=CONTENT_TYPE)

    async def _health(self, request: Request) -> Response:
        if self._serving.failure is None and not self.leaving:
            return json_response({"status": "ok"})
        return json_response({"status": str(self._serving.failure or "shutting down")}, 503)

    async def _models(self, request: Request) -> Response:
        model = {"id": self._model, "object": "model", "created": self._opened, "owned_by": "stepgraph"}
        return json_response({"object": "list", "data": [model]})

    async def _generate(self, request: Request) -> ASGIApp:
        body = await read_json(request, self._bounds)
        chat = request.scope["path"] == "/v1/chat/completions"
        parsed = parse_request(body, chat, self._codec, self._model, self._serving.engine.limits.max_length)
        try:
            stream = self._serving.generate(parsed.prompt_ids, **parsed.options)
        except ValueError as error:
            raise runtime_refusal(error, "messages" if chat else "prompt") from None
        except QueueFullError as error:
            raise HttpError(429, str(error), code="rate_limit_exceeded") from None
        except EngineClosedError as error:
            raise HttpError(503, str(error)) from None

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with stream:  # leaving it early, as when the client disconnects, cancels the job and frees its row
                reply = Reply(parsed, self._codec, str(stream.job.id))
                if parsed.stream:
                    await until_disconnect(receive, self._stream(EventStream(send), parsed, stream, reply))
                else:
                    await until_disconnect(receive, self._whole(scope, receive, send, parsed, stream, reply))

        return answer

    async def _whole(self, scope: Scope, receive: Receive, send: Send, request: GenerationRequest, stream: JobStream, reply: Reply) -> None:
        message = whole_message([delta async for delta in self._deltas(stream, reply)])
        choice: dict[str, Any] = {"index": 0, "logprobs": reply.take_logprobs(), "finish_reason": reply.reason(stream.job)}
        choice |= {"message": message} if request.chat else {"text": message["content"]}
        body = self._envelope(request, reply, stream.job, [choice]) | {"usage": reply.usage(stream.job)}
        await json_response(body)(scope, receive, send)

    async def _stream(self, events: EventStream, request: GenerationRequest, stream: JobStream, reply: Reply) -> None:
        job, offset = stream.job, 0  # offset: characters sent so far

        async def send(delta: Delta | None, reason: str | None = None) -> None:
            choice: dict[str, Any] = {"index": 0, "logprobs": reply.take_logprobs(offset), "finish_reason": reason}
            choice |= {"delta": delta or {}} if request.chat else {"text": (delta or {}).get("content", "")}
            await events.event(dumped(self._envelope(request, reply, job, [choice])))

        try:
            async with contextlib.aclosing(self._deltas(stream, reply)) as deltas:
                async for delta in deltas:
                    await send(delta if events.started else {"role": "assistant", **delta})
                    offset += len(delta.get("content", ""))
            await send(None if events.started else {"role": "assistant", "content": ""}, reply.reason(job))
        except HttpError as error:
            if not events.started:
                raise
            await events.event(dumped(error.body))
        else:
            if request.include_usage:
                await events.event(dumped(self._envelope(request, reply, job, []) | {"usage": reply.usage(job)}))
            await events.event("[DONE]")
        await events.end()

    async def _deltas(self, stream: JobStream, reply: Reply) -> AsyncGenerator[Delta, None]:
        """Deltas until the end or a stop text; HttpError where the job failed."""
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
            raise HttpError(500, "no token may follow: the constraint and the sampling fields together exclude every one")
        if event.finish_reason == FinishReason.ERROR:
            refused = job.constraint is not None and not job.rounds and self._serving.failure is None
            raise HttpError(400 if refused else 500, str(event.error), "response_format" if refused else None)

    def _envelope(self, request: GenerationRequest, reply: Reply, job: Job, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = ("chat.completion" + (".chunk" if request.stream else "")) if request.chat else "text_completion"
        prefix = "chatcmpl" if request.chat else "cmpl"
        return {"id": f"{prefix}-{job.id}", "object": kind, "created": reply.created, "model": self._model, "choices": choices}
