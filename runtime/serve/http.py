"""HTTP for the server: uvicorn's protocol with limits on connections and slow clients, error bodies, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Coroutine, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stepgraph.sampling.fields import parse_exact_json, reject_constant, reject_repeated_keys
from stepgraph.sampling.grammar.schema.reader import clip_json

LONG_NUMBER = re.compile(r"[0-9.]{17}|[0-9][eE]-[0-9]{3}")
SCHEMA_FIELDS = ("response_format", "structured_outputs", "tools")


@dataclass(frozen=True)
class Bounds:
    head_bytes: int = 16 << 10
    body_bytes: int = 2 << 20
    idle_seconds: int = 60  # until the head of a connection's next request is complete
    read_seconds: float = 20.0  # until the body of a request is complete
    answer_seconds: float = 600.0  # until an answer is complete, time in the queue included
    write_seconds: float = 30.0  # without progress, while a client does not read
    connections: int = 512
    waiting: int = 256  # answers that wait for others to end


class HttpError(HTTPException):
    """An error response; `field` is the part of the request that is wrong."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(status))
        self.field, self.code = field, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.field, "code": self.code}}


def refuse(field: str, value: Any, expected: str, code: str | None = None) -> NoReturn:
    raise HttpError(400, f"{field}: got {clip_json(value)}, expected {expected}", field, code)


class EventStream:
    """Server-sent events; the first one starts the response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def event(self, data: str) -> None:
        if not self.started:
            self.started = True
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]  # nginx
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class Server(uvicorn.Server):
    """A server whose caller handles signals: uvicorn's own handling raises them again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def abort_connections(self) -> None:
        for connection in [*self.server_state.connections]:
            assert isinstance(connection, H11Protocol)
            connection.transport.abort()


class BoundedConnection(h11.Connection):
    """Refuses bodies in very small chunks: each takes as long as a large one, and meanwhile nothing else is answered."""

    _pieces = _nbytes = 0  # of the present body

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._nbytes = 0
        elif isinstance(event, h11.Data):
            self._pieces, self._nbytes = self._pieces + 1, self._nbytes + len(event.data)
            if self._pieces > 10_000 + self._nbytes // 16:
                raise h11.RemoteProtocolError("the chunks are too small")
        return event


def server_config(app: Any, bounds: Bounds) -> uvicorn.Config:
    class BoundedProtocol(H11Protocol):
        """Adds limits that uvicorn lacks: on connections, heads that do not end, small chunks, and clients that do not read."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            super().connection_made(transport)
            self.conn = BoundedConnection(h11.SERVER, bounds.head_bytes)
            self.timeout_keep_alive_task = self.loop.call_later(bounds.idle_seconds, self.timeout_keep_alive_handler)
            if len(self.connections) > bounds.connections:
                transport.abort()

        def data_received(self, data: bytes) -> None:
            self.conn.receive_data(data)  # the timer runs until the head is complete; uvicorn's stops at the first byte
            self.handle_events()

        def timeout_keep_alive_handler(self) -> None:
            self.transport.abort()  # close() would wait for a client that does not read

        def handle_events(self) -> None:
            super().handle_events()
            if self.headers and {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers}:
                self.cycle.keep_alive = False  # a proxy may have read another length: what follows may be a part of this body
            if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= bounds.head_bytes:
                self.flow.resume_reading()  # beside a request that waits for the present answer, to notice the end of the connection

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:  # the body is malformed after its request was answered
                self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.call_later(bounds.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stalled.cancel()

    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=bounds.idle_seconds,
    )


async def read_body(request: Request, bounds: Bounds) -> bytes:
    """ClientDisconnect if the client leaves before the end."""
    if (encoding := request.headers.get("content-encoding", "")).lower() not in ("", "identity"):
        raise HttpError(415, f'Content-Encoding: got "{encoding}", expected identity')
    try:
        return await asyncio.wait_for(_body(request, bounds.body_bytes), bounds.read_seconds)
    except asyncio.TimeoutError:
        raise HttpError(408, f"body: not complete after {bounds.read_seconds:g} seconds") from None


def parse_body(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8-sig")  # json would also read UTF-16 and UTF-32
        value = json.loads(text, object_pairs_hook=reject_repeated_keys, parse_constant=reject_constant)
        if isinstance(value, dict) and LONG_NUMBER.search(text):  # in schemas, floats would round it
            value |= {name: part for name, part in parse_exact_json(text).items() if name in SCHEMA_FIELDS}
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"body: got invalid JSON ({error}), expected a JSON object") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"body: got {type(value).__name__}, expected a JSON object")
    return value


async def _body(request: Request, limit: int) -> bytes:
    size, body = int(request.headers.get("content-length", 0)), bytearray()
    if size <= limit:
        async for piece in request.stream():
            body += piece
            if (size := len(body)) > limit:
                break
    if size > limit:
        raise HttpError(413, f"body: got {size} bytes, expected at most {limit}")
    return bytes(body)


async def until_disconnect(receive: Receive, answering: Coroutine[Any, Any, None], seconds: float) -> bool:
    """Run `answering`; cancel it when the client disconnects. Returns whether it ended by itself. TimeoutError after `seconds`."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work, disconnected = asyncio.ensure_future(answering), asyncio.ensure_future(disconnect())
    try:
        done, _ = await asyncio.wait({work, disconnected}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise asyncio.TimeoutError
        if work.done():
            work.result()
        return work.done()
    finally:
        for task in (work, disconnected):
            task.cancel()
        await asyncio.gather(work, disconnected, return_exceptions=True)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(compact_json(value), status, headers, "application/json")


def error_response(error: HttpError) -> Response:
    return json_response(error.body, error.status_code, error.headers)


def compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
