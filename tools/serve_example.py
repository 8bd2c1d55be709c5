"""An OpenAI-style server around AsyncEngine, on the standard library alone: an example of serving, to read and to copy from.

    python tools/serve_example.py toy --port 8000                     a toy model, to try a client on
    python tools/serve_example.py demo -k 7                           the demonstration's model and its draft (make demo brings them)
    python tools/serve_example.py path/to/model --draft ngram -k 4    a Hugging Face folder or a .gguf file

It has POST /v1/chat/completions and /v1/completions, streamed or not, with response_format, tools, stop texts, log-probabilities
and usage; GET /v1/models, /health and /metrics (Prometheus). What it does not have it refuses by the field's name, with 400. A full
queue is 429. A client that leaves frees its row. Ctrl-C or SIGTERM lets answers end for --grace seconds; again, and they end at once.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch

from stepgraph import AsyncEngine, Engine, EngineConfig, Vocabulary
from stepgraph.runtime.commands.terminal import run_command, shows_progress
from stepgraph.runtime.demo.pair import head_path, target_path
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.text import TextCodec
from tools.serve.app import App
from tools.serve.http import Bounds, Connection, serve_connection


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a Hugging Face folder, a .gguf file, demo, or toy")
    add("--draft", default="auto", help="who drafts: auto, ngram, mtp, none, or a folder (default: %(default)s; of demo its own)")
    add("-k", "--drafts", type=int, default=4, metavar="N", help="drafts per round, 0 to 8 (default: %(default)s)")
    add("--name", help="of the model in requests (default: the file's)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--max-rows", type=int, default=8, metavar="N", help="requests decoded at once (default: %(default)s)")
    add("--max-length", type=int, default=2048, metavar="N", help="tokens of one request and its answer (default: %(default)s)")
    add("--max-queued", type=int, default=256, metavar="N", help="requests that may wait (default: %(default)s)")
    add("--eager", action="store_true", help="record no graphs: it starts sooner and decodes slower")
    add("--grace", type=float, default=10.0, metavar="SECONDS", help="that answers may take to end (default: %(default)s)")
    return parser.parse_args(arguments)


def open_engine(options: argparse.Namespace) -> tuple[Engine, TextCodec]:
    config = EngineConfig(
        max_rows=options.max_rows,
        num_speculative_tokens=options.drafts,
        max_length=options.max_length,
        max_queued=options.max_queued,
        eager=options.eager,
    )
    if options.model != "toy":
        demo = options.model == "demo"
        path = target_path() if demo else options.model
        draft = head_path() if demo and options.draft == "auto" else options.draft
        dtype = torch.bfloat16 if demo else None
        engine = Engine.from_pretrained(path, draft, config=config, dtype=dtype, progress=shows_progress())
        return engine, TextCodec.open(path)
    vocabulary = Vocabulary([*(bytes([value]) for value in range(256)), b"<end>"], [256])
    target = ToyTarget(vocabulary.logits_width, biases={256: 3.0})
    engine = Engine(target, ToyDraft(target, 0.8) if options.drafts else None, vocabulary=vocabulary, config=config)
    return engine, TextCodec.of_bytes(vocabulary)


class Server:
    """Connections on one address, each a task; leaves in good order."""

    def __init__(self, app: App, bounds: Bounds) -> None:
        self._app, self._bounds = app, bounds
        self._open: dict[asyncio.Task[None], Connection] = {}

    async def listen(self, host: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._accept, host, port, limit=self._bounds.head_bytes)

    async def leave(self, listener: asyncio.Server, grace: float, at_once: asyncio.Event) -> None:
        """Take no new connection; let answers end while there is time."""
        self._app.leaving = True
        listener.close()
        for task, connection in tuple(self._open.items()):
            if connection.waiting:
                task.cancel()
        waits: list[asyncio.Future[Any]] = [asyncio.gather(*self._open, return_exceptions=True), asyncio.ensure_future(at_once.wait())]
        await asyncio.wait(waits, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, task = Connection(reader, writer, self._bounds), asyncio.current_task()
        assert task is not None
        if self._app.leaving or len(self._open) >= self._bounds.connections:
            writer.close()
            return
        self._open[task] = connection
        try:
            await serve_connection(connection, self._app.answer, lambda: not self._app.leaving)
        except asyncio.CancelledError:  # the server leaves; nobody waits for this task's own end
            writer.close()
        finally:
            del self._open[task]


async def serve(engine: Engine, codec: TextCodec, options: argparse.Namespace, bounds: Bounds) -> None:
    soon, at_once = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (at_once if soon.is_set() else soon).set()

    async with AsyncEngine(engine) as serving:
        server = Server(App(serving, codec, options.name or Path(options.model).name), bounds)
        listener = await server.listen(options.host, options.port)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, signalled)
        host, port = listener.sockets[0].getsockname()[:2]
        print(f"listening on http://{host}:{port}/v1", flush=True)
        await soon.wait()
        await server.leave(listener, options.grace, at_once)
        await serving.close(drain=False)


def run(options: argparse.Namespace) -> int:
    engine, codec = open_engine(options)
    with engine:
        engine.capture(progress=shows_progress())  # not on the event loop, where Ctrl-C would have to wait for it
        asyncio.run(serve(engine, codec, options, Bounds()))
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run_command("serve_example", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
