"""`stepgraph serve`: a model over HTTP until a signal ends the server; with --replicas the engines are in processes of Ray Serve."""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import importlib.util
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

from stepgraph.runtime.aio import AsyncEngine
from stepgraph.runtime.commands import engines, terminal
from stepgraph.runtime.commands.flags import TOY
from stepgraph.runtime.commands.inputs import open_listener
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.replicas.replica import EngineInfo
from stepgraph.runtime.serve.reasoning import with_markers
from stepgraph.runtime.serve.serving import EngineServing, Serving
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.grammar.vocabulary import Vocabulary

CONFIG_FLAGS = (  # named as in EngineConfig
    *("max_rows", "max_length", "draft_length", "look_up", "eager", "preemption"),
    *("num_pages", "page_allocation", "max_lora_rank", "round_timeout_seconds"),
)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CONNECT_SECONDS = 5
MAX_STARTS = 6  # on a loaded machine a start often takes longer than Ray's limit of 30 seconds


def run(options: argparse.Namespace) -> int:
    extra = "serve" if options.replicas is None else "ray"
    needed = ("starlette", "uvicorn", "prometheus_client", *(("ray",) if extra == "ray" else ()))
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ValueError(f"the server needs {' and '.join(missing)}: pip install 'stepgraph[{extra}]'")
    if options.log:
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        logging.getLogger("stepgraph.serve").setLevel(logging.INFO)
    if options.replicas is None:
        with ready_engine(options, terminal.shows_progress()) as engine:
            gc.collect()
            gc.freeze()  # a collection that visits the objects of torch stops all answers for tenths of a second
            try:
                asyncio.run(_serve_engine(engine, options))
            finally:
                gc.unfreeze()
    else:
        engines.set_threads(options)
        run_replicas(options)
    return 0


async def _serve_engine(engine: Engine, options: argparse.Namespace) -> None:
    async with AsyncEngine(engine) as serving:
        await serve(EngineServing(serving), options)


def ready_engine(options: argparse.Namespace, progress: bool = False) -> Engine:
    """An engine with its adapters and graphs, made before the event loop starts so that Ctrl-C interrupts it. Also called in replicas."""
    engines.set_threads(options)
    engine = open_engine(options)
    try:
        for name, folder in options.lora_modules.items():
            try:
                engine.add_lora(name, folder)
            except ValueError as error:
                raise ValueError(f"--lora-modules: {name}={folder}: {error}") from None
        if not options.eager:
            engine.capture(progress=progress)
    except BaseException:
        engine.close()
        raise
    return engine


def open_engine(options: argparse.Namespace) -> Engine:
    config = EngineConfig(
        **{name: getattr(options, name) for name in CONFIG_FLAGS},
        num_speculative_tokens=options.drafts,
        max_top_logprobs=20,  # as in OpenAI's interface
        max_loras=len(options.lora_modules),
    )
    if options.model == TOY:
        vocabulary = Vocabulary([*(bytes([value]) for value in range(256)), b"<end>"], [256])
        target = ToyTarget(vocabulary.logits_width, biases={256: 3.0})
        draft = ToyDraft(target, 0.8) if options.drafts and options.draft != "none" else None
        return Engine(target, draft, vocabulary=vocabulary, tokenizer=open_codec(options, vocabulary), config=config)
    with terminal.waiting("opening the model ..."):
        add_markers = functools.partial(vocabulary_with_markers, options.model, options.tool_format)
        loaded = engines.load(options, config, terminal.shows_progress(), vocabulary=add_markers)
        codec = open_codec(options, loaded.vocabulary)
    return Engine(loaded.target, loaded.draft, vocabulary=codec.vocabulary, tokenizer=codec, config=loaded.config)


def open_codec(options: argparse.Namespace, vocabulary: Vocabulary) -> TextCodec:
    return TextCodec.of_bytes(vocabulary) if options.model == TOY else TextCodec.open(options.model, vocabulary)


def vocabulary_with_markers(model: str, tool_format: str, vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary in the model's files, with markers as text. At module level, so that pickle can pass it to other ranks."""
    return with_markers(TextCodec.open(model, vocabulary), tool_format).vocabulary


async def serve(serving: Serving, options: argparse.Namespace) -> None:
    """Answer requests until a signal arrives."""
    from stepgraph.runtime.serve.app import App  # needs the extra, which `run` has checked
    from stepgraph.runtime.serve.http import Bounds

    drain, stop_now, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def signalled() -> None:
        if drain.is_set():
            stop_now.set()
            for number in SIGNALS:  # a third one ends a process whose step hangs
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)
        drain.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, signalled)
    with open_listener(options.host, options.port) as listener:
        bounds = Bounds(
            body_bytes=options.max_body_bytes,
            answer_seconds=options.answer_seconds,
            connections=options.max_connections,
            waiting=options.max_queued,
        )
        app = App(serving, options.name or Path(options.model).absolute().name, bounds, options.api_keys, options.tool_format)
        print_address(listener, options)
        await app.serve(listener, drain, stop_now, options.grace)


def print_address(listener: socket.socket, options: argparse.Namespace) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    terminal.print_document({"url": url}, options.json, lambda document: [f"listening on {url}"])


def run_replicas(options: argparse.Namespace) -> None:
    """Serve until a signal arrives, then delete the replicas. On a cluster that existed before, they outlive a killed process."""
    import ray  # needs the extra
    from ray import serve as ray_serve

    from stepgraph.runtime.replicas.ray_serve import DEPLOYMENT_NAME, deployment

    least, most = options.replicas
    application = deployment(
        functools.partial(ready_engine, options),
        replicas=least if least == most else (least, most),
        rows=options.max_rows,
        cpus=options.replica_cpus,
        gpus=options.replica_gpus,
        drain_seconds=options.grace,
    )
    connect(most * options.replica_cpus)
    try:
        with terminal.waiting(f"starting {least} replicas ..."):
            handle = ray_serve.run(application, name=DEPLOYMENT_NAME, route_prefix=None)
        asyncio.run(_serve_replicas(handle, options))
    finally:
        ray_serve.delete(DEPLOYMENT_NAME)
        ray.shutdown()


def connect(cpus: float) -> None:
    """Connect to the cluster of RAY_ADDRESS or of this machine, otherwise start one here with at least this many processors."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # by default Ray sends usage statistics
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if "RAY_ADDRESS" in os.environ or recorded_cluster_responds():
        ray.init(address="auto", **quiet)
        return
    for attempt in range(MAX_STARTS):
        try:
            ray.init(address="local", num_cpus=max(os.cpu_count() or 1, int(cpus) + 1), include_dashboard=False, **quiet)
            return
        except Exception as error:  # Ray raises plain Exception
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == MAX_STARTS - 1:
                raise


def recorded_cluster_responds() -> bool:
    """Whether the cluster whose address is in Ray's file answers. A killed cluster leaves the file, and ray.init() waits minutes for it."""
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    try:
        host, _, port = (Path(folder) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip().rpartition(":")
        with socket.create_connection((host, int(port)), CONNECT_SECONDS):
            return True
    except (OSError, ValueError):
        return False


async def _serve_replicas(handle: object, options: argparse.Namespace) -> None:
    from stepgraph.runtime.replicas.ray_serve import ReplicaPool

    def codec(info: EngineInfo) -> TextCodec:
        assert info.vocabulary is not None
        return open_codec(options, info.vocabulary)

    pool = await ReplicaPool.open(handle, codec, replicas=options.replicas[1], resume=options.resume)
    await serve(pool, options)
