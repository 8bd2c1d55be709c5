"""64 clients on loopback, of which some read slowly and some disconnect: every other answer is complete, and memory stays flat."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import openai
import pytest

from stepgraph.runtime.serve.http import Bounds
from tests.helpers.running_server import FLAGS, ON, engine_of, running
from tests.sampling.grammar.compile.test_compiler import waited

pytestmark = pytest.mark.soak
CLIENTS, ROUNDS, TOKENS = 64, 4, 24


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_no_answer_is_lost_and_memory_is_flat() -> None:
    first_token: list[float] = []

    async def ask(client: openai.AsyncOpenAI, number: int, dice: random.Random) -> str:
        manner, started, tokens = dice.choice(["read", "read", "read", "slow", "leave"]), time.perf_counter(), 0
        stream = await client.completions.create(
            model="toy",
            prompt=f"{number}",
            max_tokens=TOKENS,
            seed=number,
            stream=True,
            extra_body=ON,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            if not tokens:
                first_token.append(time.perf_counter() - started)
            tokens = chunk.usage.completion_tokens if chunk.usage else max(tokens, 1)
            if manner == "slow":
                await asyncio.sleep(0.05)
            if manner == "leave":
                await stream.close()
                return manner
        assert tokens == TOKENS, manner
        return manner

    with engine_of([*FLAGS[:-4], "--max-rows", "8", "--max-length", "256"]) as engine, running(engine, Bounds()) as server:

        async def load(seed: int) -> None:
            async with openai.AsyncOpenAI(base_url=server.client.base_url, api_key="none", max_retries=0, timeout=600) as client:
                dice = random.Random(seed)
                manners = await asyncio.gather(*(ask(client, number, dice) for number in range(CLIENTS)))
            assert {"read", "slow", "leave"} <= {*manners}

        asyncio.run(load(0))  # allocates what is kept: graphs, caches, connections
        before = resident_bytes()
        for seed in range(1, ROUNDS):
            asyncio.run(load(seed))
        waited(lambda: not engine.has_work, "abandoned requests still decode")
        grown = resident_bytes() - before
    first_token.sort()
    print(f"time to first token: median {first_token[len(first_token) // 2]:.2f} s, p99 {first_token[len(first_token) * 99 // 100]:.2f} s")
    print(f"memory: {grown / 1e6:+.1f} MB after {CLIENTS * (ROUNDS - 1)} more requests")
    assert grown < 12e6
