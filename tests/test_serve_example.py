"""The example server, asked by OpenAI's own client and by sockets that send anything."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.runtime import AsyncEngine, Engine
from tests.test_compile_service import waited
from tools import serve_example
from tools.serve_example import Server, open_engine, parse
from tools.serving.app import App
from tools.serving.http import Bounds, Connection, Request, serve_connection
from tools.serving.replies import Splitter
from tools.serving.tools import CLOSING, OPENING

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look_up", "description": "finds somebody", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "give_up"}},
]
ASK: Any = [{"role": "user", "content": "who is it?"}]
ON: Any = {"ignore_eos": True}  # the toy would end its texts at once
SECONDS = 600  # that something may take on a machine that does much else
FLAGS = ["toy", "--eager", "-k", "2", "--max-rows", "2", "--max-length", "4096", "--max-queued", "2"]


@dataclass
class Running:
    """A server in a thread, with an event loop of its own."""

    engine: Engine
    port: int
    complaints: list[dict[str, Any]] = field(default_factory=list)

    @property
    def client(self) -> Any:  # what it is asked for by name, its types do not all know
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def count(self, reason: str) -> int:
        return dict(self.engine.stats().finished).get(reason, 0)

    def send(self, *pieces: bytes, end: bool = True) -> bytes:
        """All that comes back until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as wire:
            try:
                for piece in pieces:
                    wire.sendall(piece)
                if end:
                    wire.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: wire.recv(65536), b""))
            except ConnectionError:  # it closed before it had read all of it
                return b""

    def statuses(self, *pieces: bytes, end: bool = True) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", self.send(*pieces, end=end))]


@contextmanager
def running(engine: Engine, codec: Any, bounds: Bounds) -> Iterator[Running]:
    ready, leave = threading.Event(), asyncio.Event()
    found = Running(engine, 0)
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        loop.set_exception_handler(lambda _, context: found.complaints.append(context))
        async with AsyncEngine(engine) as serving:
            server = Server(App(serving, codec, "toy"), bounds)
            listener = await server.listen("127.0.0.1", 0)
            found.port = listener.sockets[0].getsockname()[1]
            ready.set()
            await leave.wait()
            await server.leave(listener, 60, asyncio.Event())

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(SECONDS)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(leave.set)
        thread.join()
        loop.close()
    assert found.complaints == []
    assert engine.stats().running == engine.stats().waiting == 0


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine, codec = open_engine(parse(FLAGS))
    with engine, running(engine, codec, Bounds(head_bytes=4096, body_bytes=100_000)) as found:
        yield found


def test_a_chat_says_the_same_streamed_or_not(server: Running) -> None:
    asked: Any = {"model": "toy", "messages": ASK, "max_tokens": 25, "temperature": 0.8, "seed": 5, "extra_body": ON}
    with server.client as client:
        whole = client.chat.completions.create(**asked, logprobs=True)
        chunks = [*client.chat.completions.create(**asked, logprobs=True, stream=True, stream_options={"include_usage": True})]
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert whole.usage is not None and (whole.usage.completion_tokens, whole.usage.prompt_tokens) == (
        25,
        len("user: who is it?\nassistant: "),
    )
    *pieces, last = chunks
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 25
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == choice.message.content
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert pieces[0].choices[0].delta.role == "assistant" and len(pieces) > 3
    assert choice.logprobs is not None and choice.logprobs.content is not None
    told = [told for piece in pieces if piece.choices[0].logprobs for told in piece.choices[0].logprobs.content or []]
    assert told == choice.logprobs.content and len(told) == 25
    assert bytes(byte for one in told for byte in one.bytes or []).decode("utf-8", "replace") == choice.message.content


def test_a_completion_takes_text_or_ids_and_ends_at_a_stop_text(server: Running) -> None:
    asked: Any = {"model": "toy", "max_tokens": 40, "temperature": 0, "extra_body": ON}
    with server.client as client:
        text = client.completions.create(prompt="abc", **asked).choices[0].text
        assert client.completions.create(prompt=[97, 98, 99], **asked).choices[0].text == text
        stop = text[9:12]
        place = text.find(stop)
        before = server.count("cancelled")
        for stream in (False, True):
            answer: Any = client.completions.create(prompt="abc", stop=["never there", stop], stream=stream, logprobs=0, **asked)
            choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
            assert ("".join(choice.text for choice in choices), choices[-1].finish_reason) == (text[:place], "stop")
            tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
            assert place < len(tokens) < 40
    waited(lambda: server.count("cancelled") == before + 2, "the rest of a stopped text is decoded")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_obeys_its_response_format(server: Running, stream: bool) -> None:
    with server.client as client:
        asked: Any = {"model": "toy", "messages": ASK, "max_completion_tokens": 60, "seed": 1, "stream": stream}
        for wanted in (FORMAT, {"type": "json_object"}):
            answer: Any = client.chat.completions.create(response_format=wanted, temperature=0.3, logit_bias={"125": 9}, **asked)
            if stream:
                chunks = [*answer]
                content, reason = "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason
            else:
                content, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert reason == "stop"
            jsonschema.validate(json.loads(content), SCHEMA if wanted is FORMAT else {"type": "object"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(server: Running, stream: bool) -> None:
    asked: Any = {"model": "toy", "messages": [{"role": "system", "content": "be brief"}, *ASK], "tools": TOOLS, "temperature": 0}
    with server.client as client:
        for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
            answer: Any = client.chat.completions.create(tool_choice=choice, stream=stream, **asked)
            last = [*answer][-2:] if stream else [answer]
            (call,) = (last[0].choices[0].delta if stream else answer.choices[0].message).tool_calls
            assert last[-1].choices[0].finish_reason == "tool_calls"
            assert call.function.name == "look_up" or choice == "required"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA if call.function.name == "look_up" else {"type": "object"})
        free = client.chat.completions.create(tool_choice="auto", max_tokens=9, **asked)
        assert free.choices[0].finish_reason in ("length", "stop") and free.choices[0].message.tool_calls is None
        plain = client.chat.completions.create(tool_choice="none", max_tokens=9, **asked)
        assert free.usage is not None and plain.usage is not None and plain.usage.prompt_tokens < free.usage.prompt_tokens


MARKED = st.lists(st.sampled_from(["a", "<", "<tool", "stop", "st", "op", "\n", "{}", "<tool_call>", OPENING, CLOSING]), max_size=12).map(
    "".join
)


@given(MARKED, st.data())
def test_where_a_text_is_cut_changes_nothing(text: str, data: st.DataObject) -> None:
    def said(pieces: list[str]) -> tuple[list[tuple[bool, str]], bool]:
        splitter, found = Splitter(["stop", "\n<"], calls=True), list[tuple[bool, str]]()
        for piece in pieces:
            for inside, part in splitter.push(piece):
                if found and not inside and not found[-1][0]:
                    found[-1] = (False, found[-1][1] + part)
                else:
                    found.append((inside, part))
        rest = splitter.finish()
        return ([*found[:-1], (False, found[-1][1] + rest)] if found and not found[-1][0] else [*found, (False, rest)]), splitter.stopped

    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, stopped = said([text])
    assert said(pieces) == (whole, stopped)
    written = "".join(OPENING + part + CLOSING if inside else part for inside, part in whole)
    assert text.startswith(written) and (stopped or written == text)
    outside = "|".join(part for inside, part in whole if not inside)
    assert stopped == (len(written) < len(text)) and "stop" not in outside


def test_a_call_in_free_text_is_told_as_one() -> None:
    call = OPENING + '{"name": "f", "arguments": {"x": 1}}' + CLOSING
    splitter = Splitter([], calls=True)
    assert [*splitter.push("so: " + call[:20]), *splitter.push(call[20:] + "<to"), (False, splitter.finish())] == [
        (False, "so: "),
        (True, '{"name": "f", "arguments": {"x": 1}}'),
        (False, "<to"),
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    ({"user": "me"}, "user"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": -3}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 99999}, "max_tokens"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": FORMAT, "tools": TOOLS}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function"),
    ({"tools": TOOLS[:1] * 2}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
]


def test_what_is_not_supported_is_refused_by_name(server: Running) -> None:
    submitted = server.engine.stats().submitted
    with server.client as client:
        for given_too, name in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**{"model": "toy", "messages": ASK}, extra_body=given_too)
            assert caught.value.param == name, given_too
            assert name in caught.value.message, given_too
        with pytest.raises(openai.BadRequestError, match="suffix"):
            client.completions.create(model="toy", prompt="a", suffix="b")
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.completions.create(model="toy", prompt="a", logprobs=2)
        with pytest.raises(openai.NotFoundError, match="want 'toy'"):
            client.completions.create(model="gpt", prompt="a")
        assert server.engine.stats().submitted == submitted
        unknown = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"unevaluatedItems": False}}}
        with pytest.raises(openai.BadRequestError, match="unevaluatedItems"):
            client.chat.completions.create(**{"model": "toy", "messages": ASK, "response_format": unknown, "stream": True})


def test_a_client_that_leaves_frees_its_row(server: Running) -> None:
    before = server.count("cancelled")
    with server.client as client:
        asked: Any = {"model": "toy", "messages": ASK, "max_tokens": 4000, "extra_body": ON}
        with client.chat.completions.create(stream=True, **asked) as stream:
            for chunk in stream:
                assert chunk.choices[0].finish_reason is None
                break
        waited(lambda: server.count("cancelled") == before + 1, "the row of a closed stream is decoded on")
    body = json.dumps({"prompt": "x", "max_tokens": 4000, **ON}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert server.send(head + body) == b""  # not streamed, and gone as soon as it had asked
    waited(lambda: server.count("cancelled") == before + 2, "the row of a client that left is decoded on")
    assert server.engine.stats().running == 0


def test_a_full_queue_is_told(server: Running) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True, **ON}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    wires = []
    try:
        for running_rows, waiting in ((1, 0), (2, 0), (2, 1), (2, 2)):
            wires.append(socket.create_connection(("127.0.0.1", server.port)))
            wires[-1].sendall(request)
            waited(lambda: (server.engine.stats().running, server.engine.stats().waiting) == (running_rows, waiting), "nobody took it")  # noqa: B023
        with server.client as client, pytest.raises(openai.RateLimitError, match="2 requests are waiting already") as caught:
            client.completions.create(model="toy", prompt="x", max_tokens=4)
        assert caught.value.response.headers["retry-after"] == "1"
    finally:
        for wire in wires:
            wire.close()
    waited(lambda: not server.engine.has_work, "rows of clients that left are decoded on")


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_answers_end(number: signal.Signals) -> None:
    """The first one; a second one would end them at once."""
    text: list[str] = []

    def ask(port: int) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
            for place, chunk in enumerate(client.completions.create(model="toy", prompt="x", max_tokens=300, stream=True, extra_body=ON)):
                text.append(chunk.choices[0].text)
                if place == 0:
                    os.kill(os.getpid(), number)
            with pytest.raises(openai.APIConnectionError):
                client.models.list()

    def told(line: str, **_: Any) -> None:
        matched = re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)/v1", line)
        assert matched is not None
        asking.append(threading.Thread(target=ask, args=(int(matched[1]),)))
        asking[0].start()

    asking: list[threading.Thread] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_example, "print", told, raising=False)
        assert serve_example.main([*FLAGS, "--port", "0"]) == 0
    asking[0].join()
    assert len("".join(text)) > 100
