"""Streams on one event loop: one is left early, one is cancelled by a timeout. `python tools/examples/async_stream.py`"""

from __future__ import annotations

import asyncio

from stepgraph import AsyncEngine, Constraint, Engine, EngineConfig, Job, SamplingParams, Vocabulary
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget

VOCABULARY = Vocabulary.printable()
LONG = SamplingParams(temperature=0, ignore_eos=True)


async def whole(serving: AsyncEngine) -> Job:
    """Every token as it is decoded."""
    stream = serving.generate([1, 2, 3], constraint=Constraint.regex("[a-z]{3,12} [0-9]{4}"), max_new_tokens=40)
    async for event in stream:
        print(f"job {event.job_id}: {VOCABULARY.decode(event.tokens)!r}")
    return stream.job


async def until_enough(serving: AsyncEngine) -> Job:
    """Leaving `async with` cancels the request and frees its row."""
    async with serving.generate([4], sampling=LONG, max_new_tokens=100_000) as stream:
        async for _ in stream:
            if len(stream.job.tokens) >= 10:
                break
    return stream.job


async def with_a_timeout(serving: AsyncEngine) -> Job:
    """Cancelling a task that awaits its result cancels the job. submit() waits while the queue is full."""
    stream = await serving.submit([5], sampling=LONG, max_new_tokens=100_000)
    try:
        await asyncio.wait_for(stream.result(), timeout=0.2)
    except asyncio.TimeoutError:
        await stream.aclose()  # the job is cancelled already: waits until it has ended
    return stream.job


async def main() -> list[Job]:
    target = ToyTarget(VOCABULARY.logits_width)
    config = EngineConfig(max_rows=3, num_speculative_tokens=3, max_length=120_000, page_size=1000, eager=True)
    with Engine(target, ToyDraft(target, agreement=0.8), vocabulary=VOCABULARY, config=config) as engine:
        async with AsyncEngine(engine) as serving:
            jobs = await asyncio.gather(whole(serving), until_enough(serving), with_a_timeout(serving))
    for job in jobs:
        print(f"job {job.id}: {len(job.tokens)} tokens, {job.finish_reason}")
    return list(jobs)


if __name__ == "__main__":
    asyncio.run(main())
