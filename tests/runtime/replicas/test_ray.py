"""Replicas in real processes of Ray Serve on loopback: kills, failures, updates, scaling, and what they cost. `make replicas` runs this."""

from __future__ import annotations

import asyncio
import collections
import functools
import math
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from ray import serve

from stepgraph import SamplingParams
from stepgraph.runtime.metrics import prometheus_text
from stepgraph.runtime.replicas.ray_serve import ReplicaPool, deployment
from stepgraph.runtime.request_queue import QueueFullError
from tests.helpers.ray_replicas import LENGTH, ROWS, Bare, Canned, Request, cluster, expected, make_engine, requests
from tools.scale_simulation import Costs, Load, Pool, Simulation

pytestmark = pytest.mark.replicas
STREAMS, KILLS = 100, 4
MAX_RATIO, UNHEALTHY_SECONDS = 1.3, 5.0


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with cluster():
        yield
        serve.shutdown()


def run(make: Callable[[], Any] = make_engine, replicas: int = 2) -> Any:
    return serve.run(deployment(make, replicas=replicas, rows=ROWS, cpus=0.5, drain_seconds=300), name="test", route_prefix=None)


@pytest.mark.parametrize(
    "field", [{"replicas": (1,)}, {"replicas": (2, 1)}, {"rows": 0}, {"cpus": -1}, {"gpus": "1"}, {"drain_seconds": -1}]
)
def test_wrong_settings_of_a_deployment_are_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"deployment\.{next(iter(field))}: got .*, expected"):
        deployment(make_engine, **field)


def delete(name: str) -> None:
    """Deletes the application of earlier tests."""
    if name in serve.status().applications:
        serve.delete(name)


async def processes(handle: Any) -> dict[str, int]:
    """Process ids of the replicas to which requests are routed."""
    found = await handle.broadcast("describe").results_async(timeout_s=60, return_exceptions=True)
    return {info.replica: info.process for info in found if not isinstance(info, Exception)}


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.1)


async def read(
    pool: ReplicaPool, asks: list[Request], delay: float = 0, opened: asyncio.Semaphore | None = None
) -> tuple[list[tuple[list[int], str]], list[Any]]:
    """Tokens and finish reasons of each stream, and the jobs. delay: seconds after each event. opened: released per stream with tokens."""

    async def one(ask: Request) -> tuple[tuple[list[int], str], Any]:
        prompt, options = ask
        stream, tokens, reason = await pool.generate(prompt, **options), list[int](), ""
        if opened:
            opened.release()
        async for event in stream:
            tokens += event.tokens
            reason = str(event.finish_reason or "")
            await asyncio.sleep(delay)
        return (tokens, reason), stream.job

    found = await asyncio.gather(*(one(ask) for ask in asks))
    return [each for each, _ in found], [job for _, job in found]


def test_streams_survive_repeated_kills() -> None:
    """Processes are killed one after another, each time after the replacement of the last one has begun to serve."""
    asks, handle = requests(STREAMS, LENGTH), run()

    async def main() -> None:
        wanted = await expected(asks)
        pool = await ReplicaPool.open(handle, replicas=2)
        reading = asyncio.ensure_future(read(pool, asks))
        kills = 0
        while not reading.done() and kills < KILLS:
            await asyncio.sleep(2)
            alive = await processes(handle)
            if len(alive) == 2 and not reading.done():
                os.kill(min(alive.values()), 9)  # the older one
                kills += 1
        found, jobs = await reading
        lost = sum(not reason for _, reason in found)
        different = sum(each != want for each, want in zip(found, wanted, strict=True))
        print(f"{len(asks)} streams, {kills} kills, {pool.counts}: {lost} lost, {different} different")
        assert (lost, different) == (0, 0) and kills >= 2 and pool.counts.continued > 0
        assert any(len(job.replicas) > 1 and job.constraint is not None for job in jobs)

    asyncio.run(main())


def test_a_rolling_update_loses_nothing() -> None:
    """Another argument of the engine without effect on tokens: the streams drain, or continue on the new replicas."""
    asks, handle = requests(24, LENGTH), run()

    async def main() -> None:
        wanted, before = await expected(asks), {*await processes(handle)}
        pool = await ReplicaPool.open(handle, replicas=2)
        first = asyncio.ensure_future(read(pool, asks, 0.01))
        await asyncio.sleep(1)
        update = asyncio.ensure_future(asyncio.to_thread(run, functools.partial(make_engine, max_queued=99)))
        second = []
        while not update.done():
            second.append(await read(pool, asks[:2]))
        await update
        assert (await first)[0] == wanted
        assert second and all(found == wanted[:2] for found, _ in second)
        assert not before & {*await processes(handle)}
        print(f"{len(asks) + 2 * len(second)} streams, {len(second)} pairs during the update, {pool.counts}")

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [None, 3.0], ids=["raises", "hangs"])
def test_an_unhealthy_engine_leaves_routing_and_its_streams_continue(timeout: float | None, tmp_path: Path) -> None:
    """timeout: the limit of a round that hangs."""
    flag, asks, opened = tmp_path / "flag", requests(12, LENGTH), asyncio.Semaphore(0)
    handle = run(functools.partial(make_engine, flag, hangs=timeout is not None, round_timeout_seconds=timeout))

    async def main() -> None:
        wanted = await expected(asks)
        pool = await ReplicaPool.open(handle, replicas=2)
        reading = asyncio.ensure_future(read(pool, asks, opened=opened))
        for _ in asks:
            await opened.acquire()
        flag.touch()
        mark = flag.with_suffix(".time")

        async def failed() -> bool:
            return mark.exists()

        await until(failed, "no engine has failed")
        pid, at = mark.read_text(encoding="ascii").split()

        async def left() -> bool:
            return int(pid) not in (await processes(handle)).values()

        await until(left, "the failed engine still gets requests")
        seconds = time.time() - float(at) - (timeout or 0.0)
        found, _ = await reading
        print(f"out of routing {seconds:.1f} s after the failure or the limit of its round, {pool.counts}")
        assert found == wanted and pool.counts.continued > 0 and seconds < UNHEALTHY_SECONDS

    asyncio.run(main())


def test_scaling_to_one_replica_drains_the_other() -> None:
    asks, handle = requests(12, LENGTH), run()

    async def main() -> None:
        wanted = await expected(asks)
        pool = await ReplicaPool.open(handle, replicas=2)
        reading = asyncio.ensure_future(read(pool, asks, 0.01))
        await asyncio.sleep(1)
        await asyncio.to_thread(run, make_engine, 1)
        found, jobs = await reading
        assert found == wanted and pool.counts.continued == pool.counts.retried == 0
        assert len({job.replicas[0] for job in jobs}) == 2

        async def one_left() -> bool:
            return len(await processes(handle)) == 1

        await until(one_left, "the removed replica still gets requests")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("requests_at_once", "changes", "wanted"),
    [
        pytest.param(3 * ROWS, {}, 2, id="more requests than rows"),
        pytest.param(3, {"num_pages": 32}, 2, id="no free pages"),  # of which each request needs 31
        pytest.param(3, {}, 1, id="few requests"),
    ],
)
def test_replicas_are_added_for_requests_and_for_pages(requests_at_once: int, changes: dict[str, Any], wanted: int) -> None:
    """Requests are repeated until Ray adds a replica, or up to a time limit."""
    delete("test")
    make = functools.partial(make_engine, seconds=0.02, **changes)
    handle = serve.run(deployment(make, replicas=(1, 2), rows=ROWS, cpus=0.5), name="test", route_prefix=None)

    async def main() -> None:
        pool, started, asks = await ReplicaPool.open(handle, replicas=2), time.monotonic(), requests(requests_at_once, 480)
        assert len(await processes(handle)) == 1
        seconds, most = 0.0, 150.0 if wanted > 1 else 90.0

        async def one(index: int) -> None:
            while not seconds and time.monotonic() < started + most:
                ((_, reason),), _ = await read(pool, asks[index : index + 1])
                assert reason

        reading = asyncio.gather(*(one(index) for index in range(len(asks))))
        while not seconds and not reading.done():
            await asyncio.sleep(0.5)
            if len(await processes(handle)) == 2:
                seconds = time.monotonic() - started
        await reading
        print(f"{len(asks)} requests at once, {changes}: a second replica after {seconds:.0f} s (0: none)")
        assert bool(seconds) == (wanted == 2)

    asyncio.run(main())


def test_requests_with_one_prefix_go_to_one_replica() -> None:
    """One after another, so that the load of the replicas does not matter."""
    handle = run()

    async def main() -> None:
        pool, found = await ReplicaPool.open(handle, replicas=2), list[set[str]]()
        for prefix in range(5):
            names = set[str]()
            for end in range(4):
                _, (job,) = await read(pool, [([10 + prefix] * 64 + [end], {"max_new_tokens": 4})])
                names.update(job.replicas)
            found.append(names)
        assert all(len(names) == 1 for names in found) and len(await processes(handle)) == 2, found

    asyncio.run(main())


def test_wrong_requests_and_metrics_of_every_replica() -> None:
    handle = run()

    async def main() -> None:
        pool = await ReplicaPool.open(handle, replicas=2)
        with pytest.raises(ValueError, match=r"max_new_tokens: got 0, expected"):
            await pool.generate([1], max_new_tokens=0)
        one = await ReplicaPool.open(handle, max_open=1)
        stream = await one.generate([1], max_new_tokens=400, sampling=SamplingParams(ignore_eos=True))
        with pytest.raises(QueueFullError, match="1 requests are open already, of at most 1"):
            await one.generate([2])
        await stream.aclose()
        assert await one.generate([2])
        text, running = prometheus_text(await pool.metrics()), await processes(handle)
        for name in running:
            assert f'stepgraph_pages{{replica="{name}"}}' in text
        assert len(running) == 2 and text.count("# TYPE stepgraph_pages ") == 1

    asyncio.run(main())


def test_the_overhead_is_bounded() -> None:
    """Requests of 1 and of 200 tokens, in turns through a pool and through Ray alone. The answers need no engine."""
    delete("test")
    canned = serve.deployment(Canned).options(**options_of(deployment(make_engine, rows=ROWS, cpus=0.5)))
    handle = serve.run(canned.bind(), name="canned", route_prefix=None)
    options = {"max_ongoing_requests": ROWS + 2, "ray_actor_options": {"num_cpus": 0.5}}
    bare = serve.run(serve.deployment(Bare).options(**options).bind(), name="bare", route_prefix=None).options(stream=True)

    async def main() -> None:
        pool = await ReplicaPool.open(handle)

        async def ours(count: int) -> None:
            stream, found = await pool.generate([1] * 100, max_new_tokens=count), 0
            async for event in stream:
                found += len(event.tokens)
            assert found == count

        async def theirs(count: int) -> None:
            assert len([each async for each in bare.generate.remote([1] * 100, count)]) == count

        async def seconds(call: Callable[[int], Awaitable[None]], count: int) -> float:
            started = time.perf_counter()
            await call(count)
            return time.perf_counter() - started

        for _ in range(20):
            await ours(5)
            await theirs(5)
        found = {(call, count): list[float]() for call in (ours, theirs) for count in (1, 200)}
        for _ in range(60):
            for (call, count), times in found.items():
                times.append(await seconds(call, count))
        median = {key: statistics.median(times) for key, times in found.items()}
        request = {call: median[call, 1] for call in (ours, theirs)}
        chunk = {call: (median[call, 200] - median[call, 1]) / 199 for call in (ours, theirs)}
        for name, cost in (("request", request), ("chunk", chunk)):
            print(f"{name}: {cost[ours] * 1e3:.3f} ms, Ray Serve alone {cost[theirs] * 1e3:.3f} ms, {cost[ours] / cost[theirs]:.2f}")
        assert all(cost[ours] <= MAX_RATIO * cost[theirs] for cost in (request, chunk))

    asyncio.run(main())


def options_of(application: Any) -> dict[str, Any]:
    """The settings of a deployment that affect its calls."""
    config = application._bound_deployment._deployment_config
    return {"max_ongoing_requests": config.max_ongoing_requests, "request_router_config": config.request_router_config}


def round_seconds(make: Callable[[], Any], rows: int) -> float:
    """The median round time of one engine in this process."""
    with make() as engine:
        jobs = [engine.submit([1 + row], max_new_tokens=24, sampling=SamplingParams(ignore_eos=True)) for row in range(rows)]
        while not all(job.tokens for job in jobs):
            engine.step()
        times = list[float]()
        for _ in range(16):
            started = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_simulation_predicts_replicas(replicas: int) -> None:
    """Throughput, and the times to the first and the last token, from measured round times."""
    delete("test")
    count, length, gap = 20 * replicas, 40, 0.25
    make = functools.partial(make_engine, seconds=0.05, num_speculative_tokens=0, draft_length=0)
    one, full = (round_seconds(make, rows) for rows in (1, ROWS))
    row = max(0.0, full - one) / (ROWS - 1)
    load = Load(count, math.inf, prompt_tokens=1, prefix_tokens=0, output_tokens=length, spread=0)
    predicted = Simulation(Pool(replicas, ROWS), load, Costs(one - row, row, 0.0)).run()
    handle = run(make, replicas)

    async def main() -> None:
        pool, served = await ReplicaPool.open(handle, replicas=replicas), collections.Counter[str]()
        sampling = SamplingParams(ignore_eos=True)

        async def ask(index: int) -> tuple[float, float]:
            first = 0.0
            stream = await pool.generate([1 + index], max_new_tokens=length, sampling=sampling)
            async for _ in stream:
                first = first or time.perf_counter() - started
            served.update(stream.job.replicas)
            return first, time.perf_counter() - started

        started = time.perf_counter()
        firsts, lasts = map(sorted, zip(*await asyncio.gather(*map(ask, range(count))), strict=True))
        pairs = {
            "tokens per second": (count * length / lasts[-1], predicted.tokens_per_second),
            "p99 of the first token": (firsts[int(0.99 * count)], predicted.first_token_p99),
            "p50 of requests": (lasts[count // 2], predicted.request_p50),
            "p99 of requests": (lasts[int(0.99 * count)], predicted.request_p99),
        }
        print(f"requests by replica: {[*served.values()]}")
        for name, (real, simulated) in pairs.items():
            print(f"{replicas} replicas, {name}: {real:.2f}, predicted {simulated:.2f}, {real / simulated:.2f}")
        assert all(abs(real / simulated - 1) < gap for real, simulated in pairs.values())

    asyncio.run(main())
