"""An OpenAI-compatible server around AsyncEngine, on starlette and uvicorn: an example to read and to copy from.

    python tools/serve_example.py toy --port 8000                     a toy model, to try a client on
    python tools/serve_example.py demo -k 7                           the demonstration's model and its draft (make demo brings them)
    python tools/serve_example.py path/to/model --draft ngram -k 4    a Hugging Face folder or a .gguf file

It serves POST /v1/chat/completions and /v1/completions, streamed or not, with response_format, tools, stop texts, log-probabilities
and usage; GET /v1/models, /health and /metrics (Prometheus). A field that it does not support is refused with status 400 and the
name of the field. Status 429 means that the queue is full. A disconnect cancels the request and frees its row. After Ctrl-C or
SIGTERM, running answers may take --grace seconds; a second signal cancels them. pip install 'stepgraph[serve]' installs what it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch

from stepgraph import AsyncEngine, Engine, EngineConfig, Vocabulary
from stepgraph.runtime.commands.terminal import run_command, shows_progress
from stepgraph.runtime.demo.pair import head_path, target_path
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.text import TextCodec
from tools.serve.app import App
from tools.serve.http import Bounds


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a Hugging Face folder, a .gguf file, demo, or toy")
    add("--draft", default="auto", help="drafter: auto, ngram, mtp, none, or a folder (default: %(default)s; for demo its own draft)")
    add("-k", "--drafts", type=int, default=4, metavar="N", help="drafts per round, 0 to 8 (default: %(default)s)")
    add("--name", help="model name in requests (default: the file name)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on; 0 picks a free one (default: %(default)s)")
    add("--max-rows", type=int, default=8, metavar="N", help="requests decoded at once (default: %(default)s)")
    add("--max-length", type=int, default=2048, metavar="N", help="tokens of a prompt and its answer (default: %(default)s)")
    add("--max-queued", type=int, default=256, metavar="N", help="requests that may wait in the queue (default: %(default)s)")
    add("--eager", action="store_true", help="capture no graphs: faster start, slower decoding")
    add("--grace", type=float, default=10.0, metavar="SECONDS", help="time for running answers after a signal (default: %(default)s)")
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


async def serve(engine: Engine, codec: TextCodec, options: argparse.Namespace) -> None:
    soon, at_once = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (at_once if soon.is_set() else soon).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listener:
        async with AsyncEngine(engine) as serving:
            app = App(serving, codec, options.name or Path(options.model).name, Bounds())
            host, port = listener.getsockname()[:2]
            print(f"listening on http://{host}:{port}/v1", flush=True)
            await app.serve(listener, soon, at_once, options.grace)


def run(options: argparse.Namespace) -> int:
    engine, codec = open_engine(options)
    with engine:
        engine.capture(progress=shows_progress())  # before the event loop starts, so that Ctrl-C interrupts it
        asyncio.run(serve(engine, codec, options))
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run_command("serve_example", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
