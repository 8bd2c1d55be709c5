"""The endpoints of the server."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import json
import logging
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stepgraph.runtime.histogram import HistogramBuilder
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.metrics import counters, gauge, histogram, prometheus_text
from stepgraph.runtime.models.files.tokenizer import LONG_TEXT
from stepgraph.runtime.request import EngineClosedError, Job, StepEvent
from stepgraph.runtime.request_queue import QueueFullError
from stepgraph.runtime.serve.calls import Delta, choose_format
from stepgraph.runtime.serve.fields import GenerationRequest, checked_model, parse_request, request_error
from stepgraph.runtime.serve.gate import Gate, Ticket
from stepgraph.runtime.serve.http import (
    Bounds,
    EventStream,
    HttpError,
    Server,
    compact_json,
    error_response,
    json_response,
    parse_body,
    read_body,
    server_config,
    until_disconnect,
)
from stepgraph.runtime.serve.replies import Reply, usage_of, whole_message
from stepgraph.runtime.serve.serving import AnswerError, AnswerStream, Serving
from stepgraph.sampling.grammar.compile.limits import names_limit

LOG = logging.getLogger("stepgraph.serve")  # one JSON object per answer or refused request; never prompts, texts or keys
SHUTTING_DOWN = "the server is shutting down"


class App:
    """Endpoints around an engine, or replicas of one; `asgi` is the ASGI application. keys: accepted API keys; none: no key is required.
    tool_format: one of FORMATS, or auto: by the chat template."""

    def __init__(self, serving: Serving, model: str, bounds: Bounds, keys: Sequence[str] = (), tool_format: str = "auto") -> None:
        self.serving, self._codec, self._model, self.bounds = serving, serving.codec, model, bounds
        self._keys = {hashlib.sha256(key.encode()).hexdigest() for key in keys}  # looked up by hash: times of comparisons reveal no key
        self._chosen_format = choose_format(self._codec, tool_format)
        rows = serving.max_rows
        self.gate = Gate(rows + max(1, rows // 4), bounds.waiting)  # some requests wait in the engine for the next free row
        self._created = int(time.time())
        self.shutting_down = False
        self._statuses = collections.Counter[int | str]()
        self.first_token_seconds, self.seconds = HistogramBuilder(), HistogramBuilder()
        routes = [
            Route("/v1/chat/completions", self._generate, methods=["POST"]),
            Route("/v1/completions", self._generate, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        self.asgi = Starlette(routes=routes, exception_handlers=dict.fromkeys((HTTPException, ClientDisconnect, Exception), self._refuse))
        self.asgi.router.redirect_slashes = False

    async def serve(self, listener: socket.socket, drain: asyncio.Event, stop_now: asyncio.Event, grace_seconds: float) -> None:
        """Serve until `drain` is set or the engine fails; let answers end for `grace_seconds` or until `stop_now` is set, then cancel their
        jobs. RuntimeError if the engine has failed."""
        server = Server(server_config(self.asgi, self.bounds))
        serving = asyncio.ensure_future(server.serve([listener]))
        ends = [asyncio.ensure_future(each) for each in (drain.wait(), self.serving.wait_failed(), stop_now.wait())]
        await asyncio.wait(ends[:2], return_when=asyncio.FIRST_COMPLETED)
        self.shutting_down = server.should_exit = True
        await asyncio.wait({serving, ends[2]}, timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in ends:
            each.cancel()
        try:
            await self.serving.close()  # answers in progress end with an error
        except Exception as error:
            raise RuntimeError("the engine failed") from error
        finally:
            await asyncio.wait({serving}, timeout=1.0)
            server.abort_connections()  # of clients that do not read, or whose requests have not arrived
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(serving, 1.0)

    async def _metrics(self, request: Request) -> Response:
        statuses = [({"status": status}, count) for status, count in self._statuses.items()]
        found = [
            gauge("http_waiting", "Answers that wait to be submitted.", self.gate.waiting),
            counters("http_requests", "Answers and refused requests, by status.", statuses),
            histogram("http_first_token_seconds", "Time from a request's arrival to its first token.", self.first_token_seconds.snapshot()),
            histogram("http_seconds", "Time from a request's arrival to the end of its answer.", self.seconds.snapshot()),
        ]
        return Response(prometheus_text([*await self.serving.metrics(), *found]), media_type=CONTENT_TYPE_LATEST)

    async def _health(self, request: Request) -> Response:
        if self.serving.failure is None and not self.shutting_down:
            return json_response({"status": "ok"})
        return json_response({"status": str(self.serving.failure or "shutting down")}, 503)

    async def _models(self, request: Request) -> Response:
        self._authorize(request)
        return json_response({"object": "list", "data": [self._model_entry(name) for name in self._names]})

    async def _one_model(self, request: Request) -> Response:
        self._authorize(request)
        return json_response(self._model_entry(checked_model(request.path_params["name"], self._names)))

    @property
    def _names(self) -> list[str]:
        """The name of the model, then those of its adapters."""
        return [self._model, *self.serving.list_loras()]

    def _model_entry(self, name: str) -> dict[str, Any]:
        entry = {"id": name, "object": "model", "created": self._created, "owned_by": "stepgraph", "max_model_len": self.serving.max_length}
        return entry if name == self._model else {**entry, "parent": self._model}

    def _authorize(self, request: Request) -> str:
        """The hash of the caller's key; empty if none is required. HttpError for a wrong key."""
        if not self._keys:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key_hash = hashlib.sha256(key.strip().encode("latin-1")).hexdigest()  # the bytes that were sent
        if scheme.lower() != "bearer" or key_hash not in self._keys:
            raise HttpError(401, "Authorization: expected `Bearer` and an API key of this server", code="invalid_api_key")
        return key_hash

    async def _refuse(self, request: Request, error: Exception) -> Response:
        where = f"{request.method[:20]} {request.scope['path'][:80]}"
        found = error if isinstance(error, HttpError) else HttpError(500, f"{type(error).__name__}: {error}")
        if isinstance(error, HTTPException) and found is not error:  # of the router, for a wrong path or method
            found = HttpError(error.status_code, f"{where}: {error.detail}")
            found.headers = error.headers  # Allow
        status = "disconnected" if isinstance(error, ClientDisconnect) else found.status_code
        self.record(status, {"request": where, "param": found.field, "code": found.code})
        return error_response(found)

    def record(self, status: int | str, fields: dict[str, Any]) -> None:
        """Count a request and write its line of the log."""
        self._statuses[status] += 1
        LOG.info(json.dumps({"time": round(time.time(), 3), "status": status, **fields}))

    async def _generate(self, request: Request) -> ASGIApp:
        """Check a request and queue its choices. HttpError if it is refused before it is submitted."""
        started, key = time.perf_counter(), self._authorize(request)
        body = await read_body(request, self.bounds)
        chat = request.scope["path"] == "/v1/chat/completions"

        def parse() -> GenerationRequest:
            arguments = self._codec, self._names, self.serving.max_length, self._chosen_format, self.gate.size
            try:
                return parse_request(parse_body(body), chat, *arguments)
            except RecursionError as error:  # near the limit of depth, what was read cannot be written into the prompt
                raise HttpError(400, f"body: got JSON that is too deep ({error}), expected less depth") from None

        in_thread = len(body) > LONG_TEXT or b'"tools"' in body  # an analysis of their schemas, or encoding a long text, can take seconds
        parsed = await asyncio.to_thread(parse) if in_thread else parse()
        parsed.options["cache_salt"] = parsed.options["tenant"] = key  # callers with different keys share no cached prefixes
        if self.shutting_down:
            raise HttpError(503, SHUTTING_DOWN)
        try:
            tickets = self.gate.tickets(parsed.choices, parsed.options["priority"], key)
        except QueueFullError as error:
            raise HttpError(429, str(error), code="rate_limit_exceeded") from None
        return Answer(self, parsed, tickets, key, started)


class Answer:
    """The answer to an accepted request, as an ASGI application."""

    def __init__(self, app: App, request: GenerationRequest, tickets: Sequence[Ticket], key: str, started: float) -> None:
        self._app, self._serving, self._gate, self._bounds = app, app.serving, app.gate, app.bounds
        self._request, self._tickets, self._key, self._started = request, tickets, key, started
        self._id = ("chatcmpl-" if request.chat else "cmpl-") + uuid.uuid4().hex
        kind = ("chat.completion" + (".chunk" if request.stream else "")) if request.chat else "text_completion"
        self._envelope = {"id": self._id, "object": kind, "created": int(time.time()), "model": request.model}
        self._envelope |= {"usage": None} if request.include_usage else {}  # the event after the last choice has a usage
        self._first_token_seconds: float | None = None  # since `started`
        self._replies = [Reply(request, app.serving.codec, index) for index in range(request.choices)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status: int | str = 500
        events = EventStream(send)
        answering = self._send_stream(events) if self._request.stream else self._send_whole(scope, receive, send)
        try:
            status = 200 if await until_disconnect(receive, answering, self._bounds.answer_seconds) else "disconnected"
        except (HttpError, asyncio.TimeoutError) as found:
            late = f"the answer is not complete after {self._bounds.answer_seconds:g} seconds"
            error = found if isinstance(found, HttpError) else HttpError(504, late)
            status = error.status_code
            if events.started:
                await events.event(compact_json(error.body))
                await events.end()
            else:
                await error_response(error)(scope, receive, send)
        finally:
            for ticket in self._tickets:
                self._gate.leave(ticket)
            self._record(status)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas: list[list[Delta]] = [[] for _ in self._replies]
        async with contextlib.aclosing(self._deltas()) as found:
            async for reply, delta in found:
                deltas[reply.index] += [delta] if delta is not None else []
        response = await asyncio.to_thread(self._whole, deltas) if self._request.scored else self._whole(deltas)
        await response(scope, receive, send)

    def _whole(self, deltas: Sequence[Sequence[Delta]]) -> Response:
        choices = []
        for reply in self._replies:
            message = whole_message(deltas[reply.index])
            choice = {"index": reply.index, "logprobs": reply.take_logprobs()(), "finish_reason": reply.reason, **reply.prompt_logprobs()}
            choices.append(choice | ({"message": message} if self._request.chat else {"text": reply.prompt.echo + message["content"]}))
        return json_response(self._envelope | {"choices": choices, "usage": usage_of(self._replies)})

    async def _send_stream(self, events: EventStream) -> None:
        begun = set[int]()  # choices that have begun
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for reply, found in deltas:
                logprobs, delta, begins = reply.take_logprobs(), found or {}, reply.index not in begun
                written = await asyncio.to_thread(logprobs) if self._request.scored and begins else logprobs()
                choice = {"index": reply.index, "logprobs": written, "finish_reason": reply.reason if found is None else None}
                if begins:
                    begun.add(reply.index)
                    delta = {"role": "assistant", **(delta or {"content": ""})}
                    delta |= {} if self._request.chat else {"content": reply.prompt.echo + delta["content"]}
                choice |= {"delta": delta} if self._request.chat else {"text": delta.get("content", "")}
                await events.event(compact_json(self._envelope | {"choices": [choice]}))
        if self._request.include_usage:
            await events.event(compact_json(self._envelope | {"choices": [], "usage": usage_of(self._replies)}))
        await events.event("[DONE]")
        await events.end()

    async def _deltas(self) -> AsyncGenerator[tuple[Reply, Delta | None], None]:
        """Deltas of all choices as they arrive, then None for each choice. HttpError if one fails."""
        updates: asyncio.Queue[tuple[Reply, Delta | HttpError | None]] = asyncio.Queue(2 * len(self._replies))  # full if a client is slow

        async def read(reply: Reply, ticket: Ticket) -> None:
            end: HttpError | None = None
            try:
                await asyncio.shield(ticket.entered)  # a cancelled reader must not cancel the ticket
                async with contextlib.aclosing(self._answer(reply)) as deltas:
                    async for delta in deltas:
                        await updates.put((reply, delta))
            except HttpError as error:
                end = error
            except AnswerError as error:
                end = HttpError(502, str(error))
            except Exception as error:  # a fault of the server
                LOG.exception("an answer failed")
                end = HttpError(500, f"{type(error).__name__}: {error}")
            self._gate.leave(ticket)
            await updates.put((reply, end))

        readers = [asyncio.ensure_future(read(*pair)) for pair in zip(self._replies, self._tickets, strict=True)]
        running = len(readers)
        try:
            while running:
                reply, delta = await updates.get()
                if isinstance(delta, HttpError):
                    raise delta
                running -= delta is None
                yield reply, delta
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _answer(self, reply: Reply) -> AsyncGenerator[Delta, None]:
        """Deltas of one choice until the end or a stop text; HttpError if the job failed."""
        request, prompt = self._request, reply.prompt
        while True:
            stream = await self._submit(prompt.ids + reply.ids, reply)
            try:
                async for event in stream:
                    if self._first_token_seconds is None and event.tokens:
                        self._first_token_seconds = time.perf_counter() - self._started
                    for delta in reply.push(event):
                        yield delta
                    if reply.stopped or reply.over_budget:
                        break
                    self._check_end(stream.job, event)
            finally:  # at a stop text, or when the client disconnected; does not wait until the step in progress has ended
                stream.cancel(reply.job_reason)
            room = prompt.max_tokens - reply.tokens - len(request.reasoning.closing_ids if request.reasoning else ())
            if not reply.over_budget or room < 1:
                break
            for delta in reply.close_reasoning():
                yield delta
        for delta in reply.finish():
            yield delta

    async def _submit(self, prompt_ids: list[int], reply: Reply) -> AnswerStream:
        """Submit a choice, or its continuation after closed reasoning. HttpError if that is refused."""
        request = self._request
        try:
            stream = await self._serving.generate(prompt_ids, **request.options_of(reply.index, reply.tokens))
        except ValueError as error:
            raise request_error(error, "messages" if request.chat else "prompt", request.constraint_field) from None
        except QueueFullError as error:
            raise HttpError(429, str(error), code="rate_limit_exceeded") from None
        except EngineClosedError as error:
            raise HttpError(503, str(error) if self._serving.failure else SHUTTING_DOWN) from None
        reply.jobs.append(stream.job)
        return stream

    def _check_end(self, job: Job, event: StepEvent) -> None:
        if event.finish_reason == FinishReason.CANCELLED:
            raise HttpError(503, SHUTTING_DOWN)
        if event.finish_reason == FinishReason.DEAD_END:
            raise HttpError(400, "no token may follow: the constraint and the sampling fields together exclude every token")
        if event.finish_reason == FinishReason.ERROR:
            refused = job.constraint is not None and (not job.rounds or names_limit(event.error))
            if refused and self._serving.failure is None:
                subject = "constraint: " if job.rounds else ""  # an error of a compile begins with it
                raise request_error(subject + event.error, constraint_field=self._request.constraint_field)
            raise HttpError(500, str(event.error))

    def _record(self, status: int | str) -> None:
        app, first, seconds = self._app, self._first_token_seconds, time.perf_counter() - self._started
        if first is not None:
            app.first_token_seconds.add(first)
        if status == 200:
            app.seconds.add(seconds)
        fields = {
            "id": self._id,
            "model": self._request.model,
            "stream": self._request.stream,
            "prompt_tokens": self._request.prompt_tokens,
            "completion_tokens": sum(reply.tokens for reply in self._replies),
            "finish_reasons": [reply.job_reason for reply in self._replies if reply.jobs],
            "first_token_seconds": None if first is None else round(first, 4),
            "key": self._key[:8],  # of its hash
            "seconds": round(seconds, 4),
        }
        app.record(status, fields)
