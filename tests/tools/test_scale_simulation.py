"""The simulation of replicas: cases that can be computed by hand, and the rounds of real engines."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace

import pytest

from stepgraph import AsyncEngine, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.runtime.replicas.router import PrefixRouter, page_hashes
from tests.helpers.aio_runs import Gate
from tools.scale_simulation import Costs, Load, Pool, Prediction, Simulation, capacity

COSTS = Costs(0.02, 0.001, 0.0001)
ALL_AT_ONCE = Load(8, math.inf, prompt_tokens=64, prefix_tokens=0, output_tokens=100, spread=0)


def predicted(pool: Pool, load: Load, costs: Costs = COSTS) -> Prediction:
    return Simulation(pool, load, costs).run()


def test_one_request() -> None:
    found = predicted(Pool(1), replace(ALL_AT_ONCE, requests=1))
    assert found.first_token_p50 == pytest.approx(64 * 0.0001 + 0.021)
    assert found.request_p50 == pytest.approx(64 * 0.0001 + 100 * 0.021)
    assert found.tokens_per_second == pytest.approx(100 / found.request_p50)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_full_batches_take_the_time_of_their_rounds(replicas: int) -> None:
    found = predicted(Pool(replicas, rows=4), replace(ALL_AT_ONCE, requests=8 * replicas), replace(COSTS, tokens_per_round=2.0))
    batch = 4 * 64 * 0.0001 + 50 * 0.024
    assert found.request_p99 == pytest.approx(2 * batch) and found.busy == pytest.approx(1)
    assert found.tokens_per_second == pytest.approx(replicas * 800 / (2 * batch))


def test_prefixes_are_computed_once() -> None:
    load = replace(ALL_AT_ONCE, requests=40, per_second=2.0, prefix_tokens=48, prefixes=1)
    found, without = predicted(Pool(1), load), predicted(Pool(1), replace(load, prefix_tokens=0))
    assert found.prefix_hits == pytest.approx(39 * 48 / (40 * 64)) and without.prefix_hits == 0
    assert found.first_token_p50 < without.first_token_p50
    evicted = predicted(Pool(1, cached_pages=2), load)
    assert evicted.prefix_hits == 0


@pytest.mark.parametrize("replicas", [1, 3])
def test_failures_lose_no_request_and_cost_time(replicas: int) -> None:
    load = replace(ALL_AT_ONCE, requests=200, spread=0.5)
    calm, stormy = predicted(Pool(replicas), load), predicted(Pool(replicas, failures_per_hour=600, restart_seconds=2), load)
    assert stormy.failures > 0 and stormy.continued > 0 and calm.failures == 0
    assert stormy.tokens_per_second < calm.tokens_per_second


def test_throughput_grows_with_the_replicas() -> None:
    found = []
    for count in (1, 10, 100):
        pool, load = Pool(count), Load(30 * count, 1.0, prefixes=4 * count)
        found.append(predicted(pool, replace(load, per_second=0.9 * capacity(pool, load, COSTS))))
    rates = [each.tokens_per_second / each.replicas for each in found]
    assert max(rates) < 1.3 * min(rates) and all(each.busy > 0.8 for each in found)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="replicas: got 0, expected a whole number >= 1"):
        Simulation(Pool(0), ALL_AT_ONCE, COSTS)


ROWS, TOKENS = 2, 20


def small_engine() -> Engine:
    vocabulary = Vocabulary.printable()
    config = EngineConfig(max_rows=ROWS, num_speculative_tokens=0, max_length=128, eager=True, buckets=(ROWS,), rounds_in_flight=1)
    return Engine(ToyTarget(vocabulary.logits_width), vocabulary=vocabulary, config=config)


async def real(replicas: int, requests: int) -> int:
    """The most rounds of one engine, for requests that all arrive before its first round."""
    router, loads = PrefixRouter(), {str(index): 0 for index in range(replicas)}
    async with contextlib.AsyncExitStack() as stack:
        engines = [stack.enter_context(small_engine()) for _ in range(replicas)]
        gates = [Gate(engine) for engine in engines]
        serving = [await stack.enter_async_context(AsyncEngine(engine)) for engine in engines]

        async def one(number: int) -> None:
            pages = page_hashes([number], 16, ())
            name = router.rank(pages, loads)[0]
            router.note(pages, name)
            loads[name] += 1
            sampling = SamplingParams(ignore_eos=True)
            job = await serving[int(name)].generate([number + 1], max_new_tokens=TOKENS, sampling=sampling).result()
            assert len(job.tokens) == TOKENS
            loads[name] -= 1

        asked = asyncio.gather(*(one(number) for number in range(requests)))
        for gate in gates:
            asyncio.get_running_loop().call_soon(gate.open)  # after the first part of each request
        await asked
        return max(engine.stats().rounds for engine in engines)


@pytest.mark.parametrize(("replicas", "requests"), [(1, 4), (1, 8), (2, 8), (3, 12)])
def test_real_engines_run_the_predicted_rounds(replicas: int, requests: int) -> None:
    load = Load(requests, math.inf, prompt_tokens=1, prefix_tokens=0, output_tokens=TOKENS, spread=0)
    found = predicted(Pool(replicas, ROWS), load, Costs(1, 0, 0))
    assert asyncio.run(real(replicas, requests)) == pytest.approx(requests * TOKENS / found.tokens_per_second)
