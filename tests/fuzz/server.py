"""Fuzzing of the server: arbitrary bytes and JSON over a socket pair, served by the real HTTP code and a toy engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Sequence

from uvicorn.server import ServerState

from stepgraph import AsyncEngine
from stepgraph.runtime.serve.app import App
from stepgraph.runtime.serve.http import Bounds, server_config
from stepgraph.runtime.serve.serving import EngineServing
from tests.fuzz.loop import Door
from tests.fuzz.requests import WORKER
from tests.fuzz.values import Value, blob, bytes_of
from tests.helpers.grammar_texts import PERSON
from tests.helpers.running_server import CHAT, FORMAT, TOOLS, engine_of

FLAGS = ["serve", "toy", "--eager", "-k", "0", "--max-rows", "1", "--max-length", "96"]
STATUSES = {200, 400, 404, 405, 408, 413, 415, 429}
MOST_LATE = 3  # tokens of a cancelled job: of the step in progress and of rounds in flight
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 29\r\n\r\n"


class Refused(ValueError):
    """A response with a status other than 200, or no response."""


class ServerDoor(Door):
    """`{"path": ..., "body": ...}` is a request with a JSON body; `{"raw": ...}` holds the bytes of the connection."""

    name = "http"
    words: Sequence[str] = (
        "/v1/chat/completions /v1/completions /v1/models /health /metrics model messages role content user system"
        " assistant tool_calls"
        " prompt max_tokens max_completion_tokens temperature top_p top_k min_p seed stop stop_token_ids logit_bias logprobs stream"
        " stream_options include_usage n response_format tools tool_choice function name parameters type auto required none 5 GET POST"
        " HTTP/1.1"
        " Content-Length: Transfer-Encoding: chunked Expect: 100-continue Connection: close ignore_eos echo best_of prompt_logprobs"
    ).split()
    refusal, allowed = Refused, WORKER
    named = re.compile(r"(POST \S{1,120}|[^:]{1,120}):+ ")

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.engine = engine_of(FLAGS)
        self._serving = self._loop.run_until_complete(AsyncEngine(self.engine).__aenter__())
        bounds = Bounds(head_bytes=2048, body_bytes=20_000, idle_seconds=1, read_seconds=0.5)
        self._state, self._config = ServerState(), server_config(App(EngineServing(self._serving), "toy", bounds).asgi, bounds)
        self._config.load()
        self._wrong: list[object] = []
        self._loop.set_exception_handler(lambda _, context: self._wrong.append(context))
        chat, plain = {"messages": CHAT, "max_tokens": 1}, {"prompt": "x", "max_tokens": 1}
        more: list[Value] = [
            {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["a", "b"], "logit_bias": {"65": 5}, "stream": True},
            {"logprobs": True, "stream": True, "stream_options": {"include_usage": True}, "stop_token_ids": [3]},
            {"response_format": FORMAT},
            {"response_format": {"type": "json_object"}, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1},
            {"tools": TOOLS, "tool_choice": "required"},
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": PERSON}}], "tool_choice": "auto"},
            {"tools": TOOLS, "response_format": FORMAT},
            {"messages": [*CHAT, {"role": "assistant", "content": "a"}], "continue_final_message": True, "add_generation_prompt": False},
        ]
        self.seeds: Sequence[Value] = [
            {"path": "/v1/chat/completions", "body": chat},
            {"path": "/v1/completions", "body": plain},
            *({"path": "/v1/chat/completions", "body": chat | fields} for fields in more),
            {"path": "/v1/completions", "body": plain | {"prompt": ["x", [1, 2]], "n": 2, "echo": True}},
            {"path": "/v1/completions", "body": {"prompt": "xy", "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs": 2}},
            {"path": "/v1/completions", "body": plain | {"prompt": [1, 2], "logprobs": 0, "stream": True, "ignore_eos": True}},
            {"raw": blob(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /metrics?x=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")},
            {"raw": blob(HEAD + b'{"prompt":"x","max_tokens":1}')},
        ]

    def prepare(self, given: Value) -> None:
        document = given if isinstance(given, dict) else {"body": given}
        raw = bytes_of(document.get("raw"))
        self._ends = raw is not None
        if raw is None:
            body = json.dumps(document.get("body")).encode()
            path = str(document.get("path")).encode(errors="replace")
            raw = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (path, len(body), body)
        self._raw = raw

    def enter(self, given: Value) -> None:
        answer = self._loop.run_until_complete(self._response())
        assert not self._wrong, f"unhandled error in the event loop: {self._wrong.pop()}"
        found = re.findall(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n((?:[^\r]+\r\n)*)\r\n", answer)
        statuses = {int(status) for status, _ in found} - {100}
        assert statuses <= STATUSES, answer[:400]
        assert statuses or not answer, answer[:100]
        self._loop.run_until_complete(self._idle())
        if statuses != {200}:
            start = answer.find(b'{"error"')
            if start < 0:
                raise Refused("connection: closed without an answer")
            raise Refused(json.JSONDecoder().raw_decode(answer[start:].decode())[0]["error"]["message"])

    async def _response(self) -> bytes:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)

        def protocol() -> asyncio.Protocol:
            return self._config.http_protocol_class(config=self._config, server_state=self._state, app_state={})  # type: ignore[call-arg]

        await self._loop.connect_accepted_socket(protocol, ours)
        with theirs:
            with contextlib.suppress(OSError):
                await self._loop.sock_sendall(theirs, self._raw)
                if self._ends:  # a partial request would wait for more; after a whole one, shutdown would count as a disconnect
                    theirs.shutdown(socket.SHUT_WR)
            pieces = []
            with contextlib.suppress(OSError):
                while piece := await self._loop.sock_recv(theirs, 1 << 16):
                    pieces.append(piece)
        await asyncio.gather(*self._state.tasks)
        return b"".join(pieces)

    async def _idle(self) -> None:
        """Wait for jobs that were cancelled by a stop text or a disconnect: a response does not wait for their last step."""
        left = {queued.job: len(queued.job.tokens) for queued in tuple(self.engine.queue.unfinished.values())}
        while self.engine.has_work:
            await asyncio.sleep(0.001)
        assert not self.engine.stats().running and not self.engine.stats().waiting
        late = {job.id: more for job, tokens in left.items() if (more := len(job.tokens) - tokens) > MOST_LATE}
        assert not late, f"tokens of jobs after their answers: {late}"

    def close(self) -> None:
        self._loop.run_until_complete(self._serving.close(drain=False))
        self.engine.close()
        self._loop.close()
