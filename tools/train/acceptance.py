"""Acceptance of a head's drafts in an engine, on held-out texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepgraph import Engine, EngineConfig, SamplingParams, StepEvent, Vocabulary
from stepgraph.graphs.model import DraftModel
from stepgraph.runtime.models.llama import Llama


def measure(
    target: Llama, draft: DraftModel, vocabulary: Vocabulary, prompts: Sequence[Sequence[int]], drafts: int, new_tokens: int
) -> dict[str, Any]:
    """Greedy and at temperature 1: acceptance rate of draft 1, 2, ... of a round, and tokens per round.

    A request's first round has no drafts yet and its last one is cut off, so neither counts.
    """
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    rows = min(8, len(prompts))
    config = EngineConfig(
        max_rows=rows,
        num_speculative_tokens=drafts,
        draft_length=drafts,
        max_length=longest,
        buckets=(rows,),
        eager=target.embedding.device.type == "cpu",  # the same tokens; capture would take longer than these few rounds
    )
    result: dict[str, Any] = {"drafts": drafts}
    with Engine(target, draft, vocabulary=vocabulary, config=config) as engine:
        engine.capture()
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            for seed, prompt in enumerate(prompts):
                engine.submit(prompt, sampling=SamplingParams(temperature=temperature, seed=seed), max_new_tokens=new_tokens)
            result[name] = _figures(list(engine.stream()), drafts)
    return result


def _figures(events: Sequence[StepEvent], drafts: int) -> dict[str, Any]:
    rounds: dict[int, list[StepEvent]] = {}
    for event in events:
        rounds.setdefault(event.job_id, []).append(event)
    accepted = [event.num_accepted_drafts for of_job in rounds.values() for event in of_job[1:-1]]
    count = max(1, len(accepted))
    rates = [round(sum(number >= index for number in accepted) / count, 4) for index in range(1, drafts + 1)]
    return {"rounds": len(accepted), "held": rates, "tokens_per_round": round(1 + sum(accepted) / count, 4)}
