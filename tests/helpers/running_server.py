"""The server of `stepgraph serve` in a thread."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

from stepgraph import AsyncEngine, Engine
from stepgraph.runtime.cli import make_parser
from stepgraph.runtime.commands.inputs import open_listener
from stepgraph.runtime.commands.serve import open_engine
from stepgraph.runtime.serve.app import App
from stepgraph.runtime.serve.http import Bounds
from stepgraph.runtime.serve.serving import EngineServing

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
CHAT: Any = [{"role": "user", "content": "who is it?"}]
ON: Any = {"ignore_eos": True}  # the toy model ends its texts at once otherwise
SECONDS = 600  # limit of any wait; generous, for a loaded machine
FLAGS = ["serve", "toy", "--eager", "-k", "2", "--max-rows", "2", "--max-length", "4096"]


@dataclass
class RunningServer:
    """A server in a thread, with an event loop of its own."""

    engine: Engine
    port: int
    loop_errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def client(self) -> Any:  # Any: the client's types lack some fields that tests send
        without_certificates = openai.DefaultHttpxClient(verify=False)  # reading them takes longer than most tests
        address = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=SECONDS, http_client=without_certificates)

    def count(self, reason: str) -> int:
        return dict(self.engine.stats().finished).get(reason, 0)

    def metrics(self) -> str:
        return self.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", end=False).decode()

    def send(self, *pieces: bytes, end: bool = True) -> bytes:
        """Send the pieces, then end the sending side; everything that is received until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as wire:
            try:
                for piece in pieces:
                    wire.sendall(piece)
                if end:
                    wire.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: wire.recv(65536), b""))
            except OSError as error:  # the server closed before it had read everything
                if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                    raise
                return b""

    def statuses(self, *pieces: bytes, end: bool = True) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", self.send(*pieces, end=end))]


def engine_of(flags: Sequence[str] = FLAGS) -> Engine:
    return open_engine(make_parser().parse_args(flags))


@contextmanager
def running(engine: Engine, bounds: Bounds, keys: Sequence[str] = (), tool_format: str = "auto") -> Iterator[RunningServer]:
    stop, server, loop = asyncio.Event(), RunningServer(engine, 0), asyncio.new_event_loop()

    async def serve(listener: socket.socket) -> None:
        loop.set_exception_handler(lambda _, context: server.loop_errors.append(context))
        async with AsyncEngine(engine) as serving:
            await App(EngineServing(serving), "toy", bounds, keys, tool_format).serve(listener, stop, asyncio.Event(), 60)

    listener = open_listener("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # small, so that a client that does not read stalls the server soon
    server.port = listener.getsockname()[1]
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(listener)))
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
    assert server.loop_errors == []
    assert engine.stats().running == engine.stats().waiting == 0
