"""The simulation of replicas: cases that can be computed by hand, and the rounds of real engines."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest

from stepgraph import AsyncEngine, Engine, EngineConfig, SamplingParams, StepEvent, Vocabulary
from stepgraph.runtime.models.toy import ToyTarget
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


def noted_rounds(engine: Engine) -> dict[int, list[int]]:
    """For each job, the rounds of its events."""
    found, step = dict[int, list[int]](), engine.step

    def noted() -> list[StepEvent]:
        events = step()
        for event in events:
            found.setdefault(event.job_id, []).append(engine.stats().rounds)
        return events

    engine.step = noted  # type: ignore[method-assign]
    return found


async def real(replicas: int, asks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """First and last round, as its engine counts, of each (replica, length). All requests arrive before the first round."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [stack.enter_context(small_engine()) for _ in range(replicas)]
        rounds = [noted_rounds(engine) for engine in engines]
        gates = [Gate(engine) for engine in engines]
        serving = [await stack.enter_async_context(AsyncEngine(engine)) for engine in engines]

        async def one(number: int, replica: int, length: int) -> tuple[int, int]:
            sampling = SamplingParams(ignore_eos=True)
            job = await serving[replica].generate([number + 1], max_new_tokens=length, sampling=sampling).result()
            assert len(job.tokens) == length
            return rounds[replica][job.id][0], rounds[replica][job.id][-1]

        asked = asyncio.gather(*(one(number, *ask) for number, ask in enumerate(asks)))
        for gate in gates:
            asyncio.get_running_loop().call_soon(gate.open)  # after the first step of each task
        return await asked


class Noted(Simulation):
    """Records the replica and the number of tokens of each request."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.asks = list[tuple[int, int]]()

    def _route(self, request: Any) -> None:
        length = int(request.left)
        super()._route(request)
        (name,) = (name for name, replica in self._replicas.items() if request in (*replica.rows, *replica.waiting))
        self.asks.append((int(name), length))


@pytest.mark.parametrize("spread", [0.0, 0.8])
@pytest.mark.parametrize(("replicas", "requests"), [(1, 4), (1, 9), (2, 8), (3, 14)])
def test_real_engines_run_the_predicted_rounds(replicas: int, requests: int, spread: float) -> None:
    """The number of rounds, and the median and the 99th percentile of the rounds until the first token and until the last."""
    load = Load(requests, math.inf, prompt_tokens=1, prefix_tokens=0, output_tokens=TOKENS, spread=spread)
    simulation = Noted(Pool(replicas, ROWS), load, Costs(1, 0, 0))
    expected = simulation.run()
    firsts, lasts = map(sorted, zip(*asyncio.run(real(replicas, simulation.asks)), strict=True))
    lengths = [length for _, length in simulation.asks]
    assert len({*lengths}) > 1 or not spread
    assert lasts[-1] == pytest.approx(sum(lengths) / expected.tokens_per_second)
    found = [values[int(share * requests)] for values in (firsts, lasts) for share in (0.5, 0.99)]
    assert found == pytest.approx([expected.first_token_p50, expected.first_token_p99, expected.request_p50, expected.request_p99])
