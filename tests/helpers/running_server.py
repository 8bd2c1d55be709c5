"""The example server in a thread, for tests that ask it."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

from stepgraph import AsyncEngine, Engine
from tools.serve.app import App
from tools.serve.http import Bounds
from tools.serve_example import Server

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
            except OSError as error:  # it closed before it had read all of it
                if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                    raise
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
