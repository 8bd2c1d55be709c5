"""As much of HTTP/1.1 as JSON over a socket takes, with a bound on everything that a client may send or wait for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/(\d\.\d)")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_ONCE = ("content-length", "content-type", "expect", "host", "transfer-encoding")
_READ = 65536


@dataclass(frozen=True)
class Bounds:
    head_bytes: int = 16 << 10
    body_bytes: int = 2 << 20
    idle_seconds: float = 60.0  # until the next request of a connection begins
    read_seconds: float = 20.0  # from a request's first byte to its last
    write_seconds: float = 30.0  # that a client may take to read one piece of an answer
    connections: int = 512


class HttpError(Exception):
    """A request that is answered with an error; `field` is the part of the request that is to blame."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = HTTPStatus(status), message, field, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes
    keep: bool  # the client may ask again on the same connection

    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"body: got what is not JSON ({error}), want a JSON object") from None
        if not isinstance(value, dict):
            raise HttpError(400, f"body: got {type(value).__name__}, want a JSON object")
        return value


class Connection:
    """One client's socket: requests out of it, answers and streams of events into it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bounds: Bounds) -> None:
        self._reader, self._writer, self._bounds = reader, writer, bounds
        self._ahead = bytearray()  # what came behind the request that is being answered
        self.waiting = True  # for a request to begin
        self.begun = False  # an answer has: too late for another status

    async def request(self) -> Request | None:
        """The next request; None where the client has none any more."""
        self.waiting = True
        if not self._ahead and not await asyncio.wait_for(self._more(), self._bounds.idle_seconds):
            return None
        self.waiting = self.begun = False
        try:
            return await asyncio.wait_for(self._request(), self._bounds.read_seconds)
        except asyncio.TimeoutError:
            raise HttpError(408, f"request: got no end of it within {self._bounds.read_seconds:g} seconds") from None

    async def gone(self) -> None:
        """Wait until the client is not there any more. One that sends without end is not."""
        while len(self._ahead) <= self._bounds.body_bytes and await self._more():
            pass

    async def answer(self, status: HTTPStatus, body: bytes, kind: str = "application/json", headers: str = "") -> None:
        await self._send(self._head(status, f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n{headers}") + body)

    async def refuse(self, error: HttpError, close: bool = False) -> None:
        headers = ("Retry-After: 1\r\n" if error.status == 429 else "") + ("Connection: close\r\n" if close else "")
        await self.answer(error.status, json.dumps(error.body).encode(), headers=headers)

    async def event(self, data: str) -> None:
        """One server-sent event, as a chunk of its own; the first one begins the answer."""
        kind = "Content-Type: text/event-stream\r\nCache-Control: no-store\r\nTransfer-Encoding: chunked\r\n"
        head = b"" if self.begun else self._head(HTTPStatus.OK, kind)
        piece = f"data: {data}\n\n".encode()
        await self._send(head + b"%x\r\n%b\r\n" % (len(piece), piece))

    async def end_events(self) -> None:
        await self._send(b"0\r\n\r\n")

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), self._bounds.write_seconds)

    def _head(self, status: HTTPStatus, fields: str) -> bytes:
        self.begun = True
        return f"HTTP/1.1 {status.value} {status.phrase}\r\n{fields}\r\n".encode("ascii")

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await asyncio.wait_for(self._writer.drain(), self._bounds.write_seconds)

    async def _more(self) -> bool:
        data = await self._reader.read(_READ)
        self._ahead += data
        return bool(data)

    async def _request(self) -> Request:
        while (end := self._ahead.find(b"\r\n\r\n", 0, self._bounds.head_bytes)) < 0:
            if len(self._ahead) >= self._bounds.head_bytes:
                raise HttpError(431, f"head: got more than {self._bounds.head_bytes} bytes")
            await self._need()
        head = bytes(self._ahead[:end])
        del self._ahead[: end + 4]
        method, path, fields = _parsed(head)
        body = await self._body(fields)
        return Request(method, path.split("?", 1)[0], body, fields.get("connection", "").lower() != "close")

    async def _body(self, fields: dict[str, str]) -> bytes:
        if "transfer-encoding" in fields:
            raise HttpError(501, f"Transfer-Encoding: got {fields['transfer-encoding'][:40]!r}, want a Content-Length")
        told = fields.get("content-length", "0")
        if not re.fullmatch(r"[0-9]{1,12}", told):
            raise HttpError(400, f"Content-Length: got {told[:40]!r}, want a number of bytes")
        size = int(told)
        if size > self._bounds.body_bytes:
            raise HttpError(413, f"body: got {size} bytes, want at most {self._bounds.body_bytes}")
        expected = fields.get("expect", "").lower()
        if expected not in ("", "100-continue"):
            raise HttpError(417, f"Expect: got {expected[:40]!r}, want 100-continue")
        if expected and len(self._ahead) < size:
            await self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self._ahead) < size:
            await self._need()
        body = bytes(self._ahead[:size])
        del self._ahead[:size]
        return body

    async def _need(self) -> None:
        if not await self._more():
            raise HttpError(400, "request: got an end in the middle of it")


async def answer_or_leave(connection: Connection, answering: Awaitable[None]) -> bool:
    """Answer while the client is there; False where it left, and what was being done for it was cancelled."""
    work, gone = asyncio.ensure_future(answering), asyncio.ensure_future(connection.gone())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        return work.done()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def serve_connection(
    connection: Connection, answer: Callable[[Connection, Request], Awaitable[None]], stay: Callable[[], bool]
) -> None:
    """Requests of one client, one behind the other. Whatever it sends, it gets an answer, an error or an end."""
    try:
        while (request := await connection.request()) is not None:
            try:
                if not await answer_or_leave(connection, answer(connection, request)):
                    return
            except HttpError as error:
                if connection.begun:
                    return
                await connection.refuse(error)
            except (OSError, asyncio.TimeoutError):
                raise
            except Exception as error:  # a mistake in here must not end more than this request
                traceback.print_exc()
                if connection.begun:
                    return
                await connection.refuse(HttpError(500, f"{type(error).__name__}: {error}"))
            if not request.keep or not stay():
                return
    except HttpError as error:  # what it sent is no request, so nobody knows where the next one would begin
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await connection.refuse(error, close=True)
    except (OSError, asyncio.TimeoutError):
        pass  # it left, or it is too slow
    finally:
        await connection.close()


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.split(b"\r\n")
    matched = _REQUEST_LINE.fullmatch(first)
    if matched is None:
        raise HttpError(400, f"request line: got {first[:80].decode('ascii', 'replace')!r}, want a method, a path and HTTP/1.1")
    if matched[3] != b"1.1":
        raise HttpError(505, f"HTTP version: got {matched[3].decode()}, want 1.1")
    fields: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise HttpError(400, f"header: got {line[:80].decode('ascii', 'replace')!r}, want a name, a colon and a value")
        name = header[1].decode().lower()
        if name in _ONCE and name in fields:
            raise HttpError(400, f"header: got {name} twice")
        fields[name] = header[2].decode("latin-1")
    return matched[1].decode(), matched[2].decode(), fields


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
