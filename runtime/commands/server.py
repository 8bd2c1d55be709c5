"""What `stepgraph serve` opens and serves, in this process and in those of replicas."""

from __future__ import annotations

import argparse
import asyncio
import functools
import signal
import socket
from pathlib import Path

from stepgraph.runtime.commands import engines, terminal
from stepgraph.runtime.commands.flags import TOY
from stepgraph.runtime.commands.inputs import open_listener
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.serve.reasoning import with_markers
from stepgraph.runtime.serve.serving import Serving
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.grammar.vocabulary import Vocabulary


def ready_engine(options: argparse.Namespace, progress: bool = False) -> Engine:
    """With its adapters and graphs, which are made before the event loop starts, so that Ctrl-C interrupts it."""
    engine = open_engine(options)
    try:
        for name, folder in options.lora_modules.items():
            engine.add_lora(name, folder)
        if not options.eager:
            engine.capture(progress=progress)
    except BaseException:
        engine.close()
        raise
    return engine


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
        round_timeout_seconds=options.round_timeout_seconds,
        preemption=options.preemption,
    )
    if options.model == TOY:
        vocabulary = Vocabulary([*(bytes([value]) for value in range(256)), b"<end>"], [256])
        target = ToyTarget(vocabulary.logits_width, biases={256: 3.0})
        draft = ToyDraft(target, 0.8) if options.drafts else None
        return Engine(target, draft, vocabulary=vocabulary, tokenizer=open_codec(options, vocabulary), config=config)
    with terminal.waiting("opening the model ..."):
        marked = functools.partial(vocabulary_with_markers, options.model, options.tool_format)
        loaded = engines.load(options, config, terminal.shows_progress(), marked)
        codec = open_codec(options, loaded.vocabulary)
    return Engine(loaded.target, loaded.draft, vocabulary=codec.vocabulary, tokenizer=codec, config=loaded.config)


def open_codec(options: argparse.Namespace, vocabulary: Vocabulary) -> TextCodec:
    return TextCodec.of_bytes(vocabulary) if options.model == TOY else TextCodec.open(options.model, vocabulary)


def vocabulary_with_markers(model: str, tool_format: str, vocabulary: Vocabulary) -> Vocabulary:
    """For the vocabulary in the model's files. A module's function, as other ranks call it, too."""
    return with_markers(TextCodec.open(model, vocabulary), tool_format).vocabulary


async def serve(serving: Serving, options: argparse.Namespace) -> None:
    """Answer requests until a signal arrives."""
    from stepgraph.runtime.serve.app import App  # needs the extra, which `run` has checked
    from stepgraph.runtime.serve.http import Bounds

    soon, at_once = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (at_once if soon.is_set() else soon).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    with open_listener(options.host, options.port) as listener:
        bounds = Bounds(
            body_bytes=options.max_body_bytes,
            answer_seconds=options.answer_seconds,
            connections=options.max_connections,
            waiting=options.max_queued,
        )
        app = App(serving, options.name or Path(options.model).name, bounds, options.api_keys, options.tool_format)
        announce(listener, options)
        await app.serve(listener, soon, at_once, options.grace)


def announce(listener: socket.socket, options: argparse.Namespace) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    if options.json:
        terminal.print_json({"url": url})
    else:
        terminal.print_text(f"listening on {url}")
