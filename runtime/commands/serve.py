"""`stepgraph serve`: a model over HTTP until a signal ends the server."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import signal
import socket
from pathlib import Path

from stepgraph.runtime.aio import AsyncEngine
from stepgraph.runtime.commands import engines, terminal
from stepgraph.runtime.commands.flags import TOY
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.serve.reasoning import with_markers
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.grammar.vocabulary import Vocabulary


def run(options: argparse.Namespace) -> int:
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"the server needs {' and '.join(missing)}: pip install 'stepgraph[serve]'")
    if options.log:
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        logging.getLogger("stepgraph.serve").setLevel(logging.INFO)
    engines.set_threads(options)
    engine = open_engine(options)
    with engine:
        for name, folder in options.lora_modules.items():
            engine.add_lora(name, folder)
        if not options.eager:
            engine.capture(progress=terminal.shows_progress())  # before the event loop starts, so that Ctrl-C interrupts it
        asyncio.run(_serve(engine, options))
    return 0


def open_engine(options: argparse.Namespace) -> Engine:
    config = EngineConfig(
        max_rows=options.max_rows,
        num_speculative_tokens=options.drafts,
        draft_length=options.draft_length,
        look_up=options.look_up,
        max_length=options.max_length,
        eager=options.eager,
        max_top_logprobs=20,  # as in OpenAI's interface
        max_loras=len(options.lora_modules),
        max_lora_rank=options.max_lora_rank,
    )
    if options.model == TOY:
        vocabulary = Vocabulary([*(bytes([value]) for value in range(256)), b"<end>"], [256])
        target = ToyTarget(vocabulary.logits_width, biases={256: 3.0})
        draft = ToyDraft(target, 0.8) if options.drafts else None
        return Engine(target, draft, vocabulary=vocabulary, tokenizer=TextCodec.of_bytes(vocabulary), config=config)
    with terminal.waiting("opening the model ..."):
        loaded = engines.load(options, config, terminal.shows_progress())
        codec = with_markers(TextCodec.open(options.model, loaded.vocabulary), options.tool_format)
    engines.set_default_threads(options, loaded.target)
    return Engine(loaded.target, loaded.draft, vocabulary=codec.vocabulary, tokenizer=codec, config=loaded.config)


async def _serve(engine: Engine, options: argparse.Namespace) -> None:
    from stepgraph.runtime.serve.app import App  # needs the extra, which `run` has checked
    from stepgraph.runtime.serve.http import Bounds

    soon, at_once = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (at_once if soon.is_set() else soon).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listener:
        async with AsyncEngine(engine) as serving:
            app = App(
                serving, options.name or Path(options.model).name, Bounds(waiting=options.max_queued), options.api_keys, options.tool_format
            )
            announce(listener, options)
            await app.serve(listener, soon, at_once, options.grace)


def announce(listener: socket.socket, options: argparse.Namespace) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    if options.json:
        terminal.print_json({"url": url})
    else:
        terminal.print_text(f"listening on {url}")
