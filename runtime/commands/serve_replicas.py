"""`stepgraph serve --replicas`: HTTP in this process, engines in processes of Ray Serve."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import socket
from pathlib import Path
from typing import Any

import ray
from ray import serve as ray_serve

from stepgraph.runtime.commands import engines, terminal
from stepgraph.runtime.commands.server import open_codec, ready_engine, serve
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.replicas.ray_serve import NAME, ReplicaPool, deployment
from stepgraph.runtime.replicas.streams import Resumption
from stepgraph.runtime.replicas.wire import Info
from stepgraph.runtime.text import TextCodec

ANSWER_SECONDS = 5
STARTS = 6  # on a loaded machine Ray's own limit of 30 seconds for a start is often too short


def run_replicas(options: argparse.Namespace) -> None:
    """Until a signal arrives. The replicas end with this process, unless they run on a cluster that was there before."""
    least, most = options.replicas
    application = deployment(
        functools.partial(make_engine, options),
        replicas=least if least == most else (least, most),
        rows=options.max_rows,
        cpus=options.replica_cpus,
        gpus=options.replica_gpus,
        drain_seconds=options.grace,
    )
    connect(most * options.replica_cpus)
    try:
        with terminal.waiting(f"starting {least} replicas ..."):
            handle = ray_serve.run(application, name=NAME, route_prefix=None)
        asyncio.run(_serve(handle, options))
    finally:
        ray_serve.delete(NAME)
        ray.shutdown()


def connect(cpus: float) -> None:
    """To the cluster of RAY_ADDRESS or of this machine, or else a new one here with at least these processors."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send them
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if "RAY_ADDRESS" in os.environ or noted_cluster_answers():
        ray.init(address="auto", **quiet)
        return
    for attempt in range(STARTS):
        try:
            ray.init(address="local", num_cpus=max(os.cpu_count() or 1, int(cpus) + 1), include_dashboard=False, **quiet)
            return
        except Exception as error:  # Ray raises that class itself
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == STARTS - 1:
                raise


def noted_cluster_answers() -> bool:
    """Whether the cluster is there whose address Ray keeps in a file. A killed one leaves the file, and Ray waits for it for minutes."""
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    try:
        host, _, port = (Path(folder) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip().rpartition(":")
        with socket.create_connection((host, int(port)), ANSWER_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def make_engine(options: argparse.Namespace) -> Engine:
    """In the process of a replica."""
    engines.set_threads(options)
    return ready_engine(options)


async def _serve(handle: object, options: argparse.Namespace) -> None:
    def codec(info: Info) -> TextCodec:
        assert info.vocabulary is not None
        return open_codec(options, info.vocabulary)

    pool = await ReplicaPool.open(handle, codec, replicas=options.replicas[1], how=Resumption(options.resume))
    await serve(pool, options)
