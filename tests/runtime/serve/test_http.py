"""The server: arbitrary bytes, arbitrary JSON, slow clients, too many clients."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.runtime.serve.http import Bounds
from tests.helpers.aio_runs import Gate as Steps
from tests.helpers.running_server import CHAT, ON, SECONDS, RunningServer, engine_of, running
from tests.sampling.grammar.compile.test_compiler import waited

BOUNDS = Bounds(head_bytes=4096, body_bytes=100_000)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = engine_of()
    with engine, running(engine, BOUNDS) as found:
        yield found


def test_get_endpoints(server: RunningServer) -> None:
    with server.client as client:
        assert [model.id for model in client.models.list()] == ["toy"]
    sent = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /metrics?x=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = server.send(sent, end=False)
    assert answer.count(b"HTTP/1.1 200 OK") == 2, "two requests in one packet"
    assert b'{"status":"ok"}' in answer and b"# TYPE stepgraph_" in answer


def test_bad_requests_get_an_error_status(server: RunningServer) -> None:
    def status(method: bytes, path: bytes, fields: bytes = b"", body: bytes = b"") -> int:
        head = b"%b %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b\r\n" % (method, path, fields)
        (found,) = server.statuses(head, body, end=False)
        return found

    assert [status(b"GET", b"/no"), status(b"PUT", b"/health"), status(b"GET", b"/v1/completions")] == [404, 405, 405]
    assert server.statuses(b"hello\r\n\r\n", end=False) == [400]
    assert server.statuses(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", end=False) == [400]
    assert server.statuses(b"GET /" + b"a" * 5000, end=False) == [400], "a head above the limit"
    for fields in (b"Content-Length: -1\r\n", b"Content-Length: 1\r\nContent-Length: 2\r\n", b"Transfer-Encoding: other\r\n"):
        assert status(b"POST", b"/v1/completions", fields) == 400
    repeated = b'{"prompt": "x", "prompt": "y"}'
    for body in (b"", b"[1]", b"{", b"NaN", b"[" * 90000, b'{"prompt": "\\ud800"}', b"\xff\xfe", b"1" * 9000, repeated):
        assert status(b"POST", b"/v1/completions", b"Content-Length: %d\r\n" % len(body), body) == 400, body[:40]
    for depth in range(900, sys.getrecursionlimit()):  # the depth at which values can be read and not written
        body = b'{"prompt": "x", "user": %b}' % (b"[" * depth + b"]" * depth)
        assert status(b"POST", b"/v1/completions", b"Content-Length: %d\r\n" % len(body), body) == 400, depth
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as wire:
        wire.sendall(POST + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n")
        assert wire.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n")
        wire.sendall(b"{}")
        assert wire.recv(100).startswith(b"HTTP/1.1 400 ")


def test_streams_ask_proxies_not_to_buffer_them(server: RunningServer) -> None:
    body = b'{"prompt":"x","max_tokens":1,"stream":true}'
    answer = server.send(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body, end=False)
    head = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert {b"content-type: text/event-stream", b"cache-control: no-store", b"x-accel-buffering: no"} <= {*head}
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_wrong_method_names_the_right_ones(server: RunningServer) -> None:
    answer = server.send(b"PUT /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", end=False)
    assert b"\r\nallow: POST\r\n" in answer and b'"type":"invalid_request_error"' in answer


def test_a_body_that_is_malformed_after_its_answer_ends_the_connection(server: RunningServer) -> None:
    """The last check of `running` finds what the event loop logs."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as wire:
        wire.sendall(b"POST /no HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        received = wire.recv(4096)
        while not received.endswith(b"}"):
            received += wire.recv(4096)
        assert received.startswith(b"HTTP/1.1 404 ")
        wire.sendall(b"no size\r\n")
        assert wire.recv(4096) == b""
    assert server.loop_errors == []


def test_a_connection_ends_after_a_request_with_two_lengths(server: RunningServer) -> None:
    two = POST + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    assert server.statuses(two + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", end=False) == [400]


def test_large_bodies_are_refused_and_the_connection_remains_usable(server: RunningServer) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    size = BOUNDS.body_bytes + 1
    assert server.statuses(POST + b"Content-Length: %d\r\n\r\n" % size, b"x" * size, health, end=False) == [413, 200]
    chunk = b"%x\r\n%b\r\n" % (BOUNDS.body_bytes // 2, b"x" * (BOUNDS.body_bytes // 2))
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert server.statuses(chunked, chunk, chunk, chunk, b"0\r\n\r\n", health, end=False) == [413, 200]
    assert server.statuses(chunked, chunk, b"0\r\n\r\n", health, end=False) == [400, 200], "below the limit, but not JSON"


@pytest.mark.parametrize(("encoding", "status"), [(b"gzip", 415), (b"br, zstd", 415), (b"identity", 200), (b"Identity", 200), (b"", 200)])
def test_a_compressed_body_is_refused_by_its_header(server: RunningServer, encoding: bytes, status: int) -> None:
    answer = server.send(GOOD.replace(b"Host", b"Connection: close\r\nContent-Encoding: %b\r\nHost" % encoding), end=False)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert status == 200 or b'"Content-Encoding: got \\"%b\\", expected identity"' % encoding in answer


@pytest.mark.parametrize("path", [b"/v1/completions", b"/no"])
def test_a_body_in_very_small_chunks_is_refused(server: RunningServer, path: bytes) -> None:
    """Each chunk takes as long as a large one. On the second path the request is answered before its body."""
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    health = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    status = 400 if path == b"/v1/completions" else 404
    assert server.statuses(head, b"1\r\n \r\n" * 9000, b"0\r\n\r\n", health, end=False) == [status, 200]
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as wire, contextlib.suppress(ConnectionError):
        wire.sendall(head)
        for _ in range(1000):  # until the connection ends
            wire.sendall(b"1\r\n \r\n" * 5000)
        pytest.fail("five million chunks were read")
    assert server.loop_errors == []


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GOOD = POST + b'Content-Length: 35\r\n\r\n{"prompt":"x","max_tokens":1,"n":1}'
LINES = st.lists(
    st.sampled_from(
        [b"GET /health HTTP/1.1", b"\r\n", b"\r\n\r\n", b"Content-Length: ", b"5", b"Transfer-Encoding: chunked", b":", b"{}", b" ", GOOD]
    )
    | st.binary(max_size=12),
    max_size=10,
).map(b"".join)
CHANGED = st.builds(
    lambda index, cut, put: GOOD[:index] + put + GOOD[index + cut :], st.integers(0, 90), st.integers(0, 6), st.binary(max_size=4)
)


@settings(max_examples=300)
@given(st.binary(max_size=60) | LINES | CHANGED)
def test_arbitrary_bytes_get_a_response_or_a_close(server: RunningServer, sent: bytes) -> None:
    assert set(server.statuses(sent)) <= {100, 200, 400, 404, 405, 408, 413, 429}  # 429: jobs of closed connections are not cancelled yet
    assert server.loop_errors == []


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
def test_arbitrary_json_gets_an_answer_or_a_refusal(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    prompt = {"messages": CHAT} if path.startswith("chat") else {"prompt": "x"}
    body = json.dumps({**prompt, "max_tokens": 1, **fields}).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    waited(lambda: not server.engine.has_work, "jobs of closed connections still decode")
    (status,) = server.statuses(head + body, end=False)
    assert status in (200, 400)


def test_a_long_prompt_delays_no_other_request(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoding of the prompt waits until another request is answered."""
    codec, encoding, answered = server.engine.tokenizer, threading.Event(), threading.Event()
    encode = codec._encode

    def held(text: str, begins: bool) -> Sequence[int]:
        encoding.set()
        return encode(text[:9] if answered.wait(20) else "", begins)

    monkeypatch.setattr(codec, "_encode", held)
    body = json.dumps({"prompt": "x" * 20_000, "max_tokens": 1, **ON}).encode()
    with ThreadPoolExecutor(1) as other:
        long = other.submit(server.statuses, POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body, end=False)
        assert encoding.wait(SECONDS)
        assert server.statuses(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", end=False) == [200]
        answered.set()
        assert long.result() == [200]


def test_slow_clients_are_disconnected() -> None:
    engine = engine_of()
    with engine, running(engine, Bounds(idle_seconds=1, read_seconds=0.01, write_seconds=0.2)) as strict:
        assert strict.send(end=False) == b"", "a connection without a request"
        assert strict.send(b"GET /he", end=False) == b"", "a head that does not end"
        assert strict.statuses(POST + b"Connection: close\r\nContent-Length: 9\r\n\r\n{", end=False) == [408]
        body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True, "logprobs": 0, **ON}).encode()
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect(("127.0.0.1", strict.port))
            wire.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            waited(lambda: strict.count("cancelled") == 1, "a client that does not read keeps its row")


def test_a_client_that_leaves_with_a_request_waiting_frees_its_row() -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 4000, **ON}).encode()
    ask = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with engine_of() as engine:
        steps = Steps(engine, 3)
        with running(engine, BOUNDS) as found:
            with socket.create_connection(("127.0.0.1", found.port), timeout=SECONDS) as wire:
                wire.sendall(ask)
                waited(lambda: steps.steps_made == 3, "the first request has no row")
                wire.sendall(ask)
            waited(lambda: bool(engine.queue.cancelled), "the row of a client that left still decodes")
            steps.open()


def test_a_body_does_not_wait_for_the_acknowledgement_of_its_head(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, accepted = socket.socket.accept, list[int]()

    def recorded(listener: socket.socket) -> Any:
        connection, address = accept(listener)
        accepted.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return connection, address

    monkeypatch.setattr(socket.socket, "accept", recorded)
    assert server.statuses(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") == [200] and all(accepted) and accepted


def test_connections_above_the_limit_are_closed() -> None:
    engine = engine_of()
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with engine, running(engine, Bounds(connections=1)) as strict:
        with socket.create_connection(("127.0.0.1", strict.port), timeout=SECONDS) as wire:
            wire.sendall(health)
            assert wire.recv(100).startswith(b"HTTP/1.1 200 ")
            assert strict.statuses(health, end=False) == []
        once = health.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        waited(lambda: strict.statuses(once, end=False) == [200], "a closed connection is still counted")
