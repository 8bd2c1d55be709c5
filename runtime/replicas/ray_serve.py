"""Replicas under Ray Serve. Ray starts, checks, scales and updates them and transports calls; the engines compute tokens and grammars.

docs/scale.md has an example. Every process that has the handle may open a pool. A pool belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import ReplicaUnavailableError, RequestCancelledError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from stepgraph.runtime.aio import AsyncEngine
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.metrics import counter, counters, engine_metrics
from stepgraph.runtime.replicas.replica import AnswerPart, EngineInfo, ReplicaRequest, answer, identity_of, info_of
from stepgraph.runtime.replicas.router import FREE_PAGES, PrefixRouter, scale
from stepgraph.runtime.replicas.streams import POLICIES, Counts, ReplicaLost, ResumedStream
from stepgraph.runtime.request_queue import QueueFullError
from stepgraph.runtime.stats import EngineStats
from stepgraph.runtime.text import TextCodec
from stepgraph.runtime.validate import REQUEST_NAMES, RequestOptions, TokenIds
from stepgraph.sampling.fields import Check, check_value, checked_keywords, error_summary, number, one_of, whole

DEPLOYMENT_NAME = "stepgraph"
METRICS_SECONDS = 5
LOST_ERRORS = (RayActorError, ReplicaUnavailableError, RequestCancelledError, TaskCancelledError)


class Replica:
    """One engine in a process of Ray."""

    async def __init__(self, make_engine: Callable[[], Engine]) -> None:  # type: ignore[misc]  # Ray awaits it
        self._engine = engine = await asyncio.to_thread(make_engine)  # until it returns, the replica gets no requests
        self._async_engine = AsyncEngine(engine)
        await self._async_engine.open()
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._identity = identity_of(engine)

    def check_health(self) -> None:
        """Ray calls this every half second; after three errors the replica gets no more requests and is replaced."""
        if self._async_engine.failure is not None:
            raise RuntimeError(f"the engine failed: {self._async_engine.failure}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {FREE_PAGES: stats.free_pages / max(1, stats.pages)}

    async def describe(self) -> EngineInfo:
        return info_of(self._engine, self._name)

    async def labelled_stats(self) -> tuple[dict[str, str], EngineStats]:
        return {"replica": self._name}, await asyncio.to_thread(self._engine.stats)

    async def generate(self, request: ReplicaRequest) -> AsyncIterator[AnswerPart]:
        """The parts of an answer. Ray closes the generator when the caller drops it, which cancels the job."""
        async with contextlib.aclosing(answer(self._async_engine, request, self._name, self._identity)) as parts:
            async for part in parts:
                yield part

    async def __del__(self) -> None:
        """Ray calls it once the requests have ended, or after graceful_shutdown_timeout_s."""
        await self._async_engine.close(drain=False)
        self._engine.close()


class PrefixRequestRouter(RequestRouter):
    """Ray's order of replicas: by the prefix of the request, with bounded load."""

    queue_len_response_deadline_s = 1.0  # default 0.1: replicas on a busy machine answer later, and would lose requests to others

    def initialize_state(self, **options: Any) -> None:
        self._prefixes = PrefixRouter(**options)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One list per replica. Ray takes the first replica that is not full, and calls again later if all are full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        request = _replica_request(pending_request)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        ranked = self._prefixes.rank(request.pages if request else (), loads, request.avoid if request else ())
        return [[replicas[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        if request := _replica_request(pending_request):
            self._prefixes.note(request.pages, replica_id.unique_id)


def _replica_request(request: PendingRequest | None) -> ReplicaRequest | None:
    found = request.args[0] if request is not None and request.args else None
    return found if isinstance(found, ReplicaRequest) else None


def deployment(
    make_engine: Callable[[], Engine],
    *,
    replicas: int | tuple[int, int] = 1,
    rows: int = 8,
    cpus: float = 1,
    gpus: float = 0,
    load_factor: float = 1.25,
    drain_seconds: float = 600,
) -> serve.Application:
    """An application for serve.run(). ValueError for a number that is out of range.

    make_engine: opens and captures an engine, in the replica's process; cloudpickle must be able to copy it.
    replicas: their number, or the least and the most, between which Ray chooses by requests and free pages.
    rows: EngineConfig.max_rows of the engines; a replica accepts a quarter more requests, which wait for the next free row.
    cpus, gpus: of one replica; Ray places it where they are free.
    load_factor: see PrefixRouter.
    drain_seconds: time that a replica's streams have to end when it is removed or updated; later they continue on another one.
    """
    check_value("deployment.replicas", replicas, Check(lambda given: not isinstance(given, tuple) or len(given) == 2, "a number or a pair"))
    least, most = replicas if isinstance(replicas, tuple) else (replicas, replicas)
    check_value("deployment.replicas", least, whole(1))
    check_value("deployment.replicas", most, whole(least))
    check_value("deployment.rows", rows, whole(1))
    for name, value in (("cpus", cpus), ("gpus", gpus), ("drain_seconds", drain_seconds)):
        check_value(f"deployment.{name}", value, number(0, 1e6))
    PrefixRouter(load_factor)
    scaling: dict[str, Any] = {"num_replicas": least}
    if isinstance(replicas, tuple):
        policy = AutoscalingPolicy(policy_function=scale)
        limits = AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=rows, policy=policy)
        scaling = {"autoscaling_config": limits}
    made = serve.deployment(
        Replica,
        name=DEPLOYMENT_NAME,
        max_ongoing_requests=rows + max(1, rows // 4),
        max_queued_requests=-1,  # ReplicaPool limits requests, so that a stream that continues is never refused
        graceful_shutdown_timeout_s=drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=0.5,
        health_check_timeout_s=10,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRequestRouter, request_router_kwargs={"load_factor": load_factor}
        ),
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        **scaling,
    )
    return made.bind(make_engine)


class ReplicaPool:
    """A Serving over the replicas of a deployment, which a server uses instead of an engine."""

    def __init__(self, handle: Any, info: EngineInfo, codec: TextCodec, replicas: int, resume: str, max_open: int) -> None:
        """Use open()."""
        self._handle, self._generate = handle, handle.options(stream=True, method_name="generate")
        self.info, self._resume, self._max_open = info, resume, max_open
        self.codec, self.max_rows, self.max_length = codec, info.max_rows * replicas, info.max_length
        self.failure: BaseException | None = None
        self.counts, self._num_open = Counts(), 0

    @classmethod
    async def open(
        cls,
        handle: Any,
        codec: Callable[[EngineInfo], TextCodec] | None = None,
        *,
        replicas: int = 1,
        resume: str = "exact",
        max_open: int = 4096,
    ) -> ReplicaPool:
        """Wait for a replica and read the EngineInfo of its engine.

        codec: makes the TextCodec of a server. replicas: their maximum number. resume: one of POLICIES.
        max_open: requests at once; more raise QueueFullError.
        """
        check_value("ReplicaPool.resume", resume, one_of(POLICIES))
        for name, value in (("replicas", replicas), ("max_open", max_open)):
            check_value(f"ReplicaPool.{name}", value, whole(1))
        info = await handle.describe.remote()
        made = codec(info) if codec else info.vocabulary and TextCodec.of_bytes(info.vocabulary)
        return cls(handle, info, made, replicas, resume, max_open)

    async def wait_failed(self) -> None:
        await asyncio.get_running_loop().create_future()  # Ray replaces replicas that fail

    def list_loras(self) -> Sequence[str]:
        return self.info.lora_names

    @checked_keywords(REQUEST_NAMES, RequestOptions.__annotations__)
    async def generate(self, prompt_ids: TokenIds, **options: Any) -> ResumedStream:
        """Submit a request to the best replica; options as for Engine.submit(), with a prompt of token ids.

        ValueError as for Engine.submit(), from the replica; QueueFullError; AnswerError if no replica can serve it.
        """
        if self._num_open >= self._max_open:
            raise QueueFullError(f"{self._num_open} requests are open already, of at most {self._max_open}")
        stream = ResumedStream(self._call, self.info, self._resume, self.counts, self._on_stream_end, prompt_ids, options)
        self._num_open += 1
        await stream.open()
        return stream

    async def _call(self, request: ReplicaRequest) -> AsyncGenerator[AnswerPart, None]:
        response = self._generate.remote(request)
        try:
            async for part in response:
                yield part
        except LOST_ERRORS as error:
            raise ReplicaLost(error_summary(error)) from error
        except RayTaskError as error:  # raised by the replica's code
            raise RuntimeError(f"a replica failed: {error}") from error
        finally:
            response.cancel()

    def _on_stream_end(self) -> None:
        self._num_open -= 1

    async def metrics(self) -> list[Metric]:
        """The metrics of every replica, with its label, and of the streams."""
        found = await self._handle.broadcast("labelled_stats").results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        ended = [({"reason": reason}, count) for reason, count in self.counts.ended.items()]
        return [
            *engine_metrics(pair for pair in found if isinstance(pair, tuple)),  # other replicas are ending
            counter("streams_retried", "Requests sent to another replica before their first token.", self.counts.retried),
            counter("streams_continued", "Times that a stream was continued on another replica.", self.counts.continued),
            counter("streams_refused", "Streams that could not be continued.", self.counts.refused),
            counters("streams_ended", "Streams that the server ended, by reason.", ended),
        ]

    async def close(self) -> None:
        """Does nothing: the replicas belong to Ray Serve, the streams to their readers."""
