"""The example server's HTTP: any bytes, any JSON, and clients that are slow or too many."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.running_server import ASK, FLAGS, SECONDS, Running, running
from tests.sampling.grammar.compile.test_compiler import waited
from tools.serve.http import Bounds, Connection, Request, serve_connection
from tools.serve_example import open_engine, parse


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine, codec = open_engine(parse(FLAGS))
    with engine, running(engine, codec, Bounds(head_bytes=4096, body_bytes=100_000)) as found:
        yield found


def test_what_else_is_there(server: Running) -> None:
    with server.client as client:
        assert [model.id for model in client.models.list()] == ["toy"]
    answer = server.send(b"GET /health HTTP/1.1\r\n\r\nGET /metrics?x=1 HTTP/1.1\r\nConnection: close\r\n\r\n", end=False)
    assert answer.count(b"HTTP/1.1 200 OK") == 2, "two requests behind each other"
    assert b'{"status":"ok"}' in answer and b"# TYPE stepgraph_" in answer


def test_what_is_no_request_is_an_error_and_an_end(server: Running) -> None:
    assert server.statuses(b"GET /no HTTP/1.1\r\n\r\nPUT /health HTTP/1.1\r\n\r\nGET /v1/completions HTTP/1.1\r\n\r\n") == [404, 405, 405]
    assert server.statuses(b"GET / HTTP/1.0\r\n\r\n", end=False) == [505]
    assert server.statuses(b"hello\r\n\r\n", end=False) == [400]
    assert server.statuses(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", end=False) == [400]
    assert server.statuses(b"GET /" + b"a" * 5000, end=False) == [431]
    post = b"POST /v1/completions HTTP/1.1\r\n"
    assert server.statuses(post + b"Content-Length: 100001\r\n\r\n", end=False) == [413]
    assert server.statuses(post + b"Content-Length: -1\r\n\r\n", end=False) == [400]
    assert server.statuses(post + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", end=False) == [400]
    assert server.statuses(post + b"Transfer-Encoding: chunked\r\n\r\n", end=False) == [501]
    assert server.statuses(post + b"Expect: tea\r\n\r\n", end=False) == [417]
    assert server.statuses(post + b"Content-Length: 5\r\n\r\n{}") == [400]
    for body in (b"", b"[1]", b"{", b"NaN", b"[" * 90000, b'{"prompt": "\\ud800"}', b"\xff\xfe", b"1" * 9000):
        told = post + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        assert server.statuses(told, body, end=False) == [400], body[:40]
    expecting = post + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as wire:
        wire.sendall(expecting)
        assert wire.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        wire.sendall(b"{}")
        assert wire.recv(100).startswith(b"HTTP/1.1 400 ")


GOOD = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 35\r\n\r\n{"prompt":"x","max_tokens":1,"n":1}'
LINES = st.lists(
    st.sampled_from(
        [b"GET /health HTTP/1.1", b"\r\n", b"\r\n\r\n", b"Content-Length: ", b"5", b"Transfer-Encoding: chunked", b":", b"{}", b" ", GOOD]
    )
    | st.binary(max_size=12),
    max_size=10,
).map(b"".join)
SPOILT = st.builds(
    lambda place, cut, put: GOOD[:place] + put + GOOD[place + cut :], st.integers(0, 90), st.integers(0, 6), st.binary(max_size=4)
)


@settings(max_examples=300)
@given(st.binary(max_size=60) | LINES | SPOILT)
def test_any_bytes_get_an_answer_an_error_or_an_end(server: Running, sent: bytes) -> None:
    assert set(server.statuses(sent)) <= {100, 200, 400, 404, 405, 408, 413, 417, 431, 501, 505}
    assert server.complaints == []


SCALARS: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "function", "name", "x"]), inner, max_size=2),
    max_leaves=5,
)
NAMES = [
    "messages",
    "prompt",
    "stop",
    "logit_bias",
    "response_format",
    "tools",
    "tool_choice",
    "seed",
    "top_p",
    "top_k",
    "logprobs",
    "stream",
    "n",
    "temperature",
]


@settings(max_examples=150)
@given(st.sampled_from(["chat/completions", "completions"]), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2))
def test_any_json_gets_an_answer_or_a_refusal(server: Running, path: str, spoilt: dict[str, Any]) -> None:
    prompt = {"messages": ASK} if path.startswith("chat") else {"prompt": "x"}
    body = json.dumps({**prompt, "max_tokens": 1, **spoilt}).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    (status,) = server.statuses(head + body, end=False)
    assert status in (200, 400)


def test_slow_clients_are_not_waited_for() -> None:
    async def ends(bounds: Bounds, *sent: bytes, read: bool = True) -> bytes:
        """What a connection with these bounds comes to, for who sends this and no more."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with theirs:
            for piece in sent:
                theirs.sendall(piece)
            reader, writer = await asyncio.open_connection(sock=ours)
            await serve_connection(Connection(reader, writer, bounds), talk, lambda: True)
            return theirs.recv(65536) if read else b""

    async def talk(connection: Connection, request: Request) -> None:
        try:
            while True:
                await connection.event("x" * 9000)
        finally:
            ended.append(request.path)

    async def main() -> None:
        assert await ends(Bounds(idle_seconds=0.01)) == b""
        assert (await ends(Bounds(read_seconds=0.01), b"GET /he")).startswith(b"HTTP/1.1 408 ")
        await ends(Bounds(write_seconds=0.01), b"GET /endless HTTP/1.1\r\n\r\n", read=False)

    ended: list[str] = []
    asyncio.run(main())
    assert ended == ["/endless"]


def test_connections_are_counted() -> None:
    engine, codec = open_engine(parse(FLAGS))
    with engine, running(engine, codec, Bounds(connections=1)) as strict:
        with socket.create_connection(("127.0.0.1", strict.port), timeout=SECONDS) as wire:
            wire.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert wire.recv(100).startswith(b"HTTP/1.1 200 ")
            assert strict.statuses(b"GET /health HTTP/1.1\r\n\r\n", end=False) == []
        waited(lambda: strict.statuses(b"GET /health HTTP/1.1\r\n\r\n") == [200], "a connection that ended still counts")
