"""`stepgraph serve`: a model over HTTP until a signal ends the server."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging

from stepgraph.runtime.aio import AsyncEngine
from stepgraph.runtime.commands import engines, terminal
from stepgraph.runtime.commands.server import ready_engine, serve
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.serve.serving import EngineServing


def run(options: argparse.Namespace) -> int:
    extra = "serve" if options.replicas is None else "ray"
    needed = ("starlette", "uvicorn", "prometheus_client", *(("ray",) if extra == "ray" else ()))
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ValueError(f"the server needs {' and '.join(missing)}: pip install 'stepgraph[{extra}]'")
    if options.log:
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        logging.getLogger("stepgraph.serve").setLevel(logging.INFO)
    engines.set_threads(options)
    if options.replicas is not None:
        from stepgraph.runtime.commands.serve_replicas import run_replicas  # needs the extra

        run_replicas(options)
        return 0
    with ready_engine(options, terminal.shows_progress()) as engine:
        asyncio.run(_serve_engine(engine, options))
    return 0


async def _serve_engine(engine: Engine, options: argparse.Namespace) -> None:
    async with AsyncEngine(engine) as serving:
        await serve(EngineServing(serving), options)
