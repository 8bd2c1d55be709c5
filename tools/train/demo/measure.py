"""Acceptance of the demonstration's draft on held-out prompts; five of the schemas occur in no training prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stepgraph import Constraint, Engine, EngineConfig, StepEvent
from stepgraph.runtime.demo.pair import DRAFTS
from stepgraph.runtime.demo.variants import LOOK_UP
from stepgraph.runtime.models.files.loading import load_models
from tools.train.demo.collect import LONGEST_PROMPT, encode_prompts
from tools.train.demo.prompts import KINDS, DemoPrompt, make_prompt
from tools.train.demo.schemas import MEASURED

NEW_TOKENS = 96
ROWS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "head": {},
    "head, drafts not masked": {"draft_masks": False},
    "head, forced drafts": {"forced_drafts": True},
    "head, forced drafts, look-up": {"forced_drafts": True, "look_up": LOOK_UP},
}


def measure(target: Path, head: Path, count: int, progress: bool = False, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, Any]:
    """Tokens per round and acceptance of draft 1, 2, ... for every variant and kind of prompt."""
    prompts = {kind: list(encode_prompts(target, (make_prompt(seed, kind, held_out=True) for seed in range(count)))) for kind in kinds}
    results: dict[str, Any] = {"drafts": DRAFTS, "prompts_of_each_kind": count, "new_tokens": NEW_TOKENS}
    bar = tqdm(total=len(VARIANTS) * len(kinds), desc="measure", unit="kind", disable=not progress)
    with bar:
        for name, options in VARIANTS.items():
            results[name] = _measure_variant(target, head, prompts, options, bar)
    return results


def _measure_variant(
    target: Path, head: Path, prompts: Mapping[str, list[tuple[tuple[int, ...], DemoPrompt]]], options: dict[str, Any], bar: Any
) -> Any:
    config = EngineConfig(
        max_rows=ROWS,
        num_speculative_tokens=DRAFTS,
        draft_length=DRAFTS,
        max_length=LONGEST_PROMPT + NEW_TOKENS,
        buckets=(ROWS,),
        greedy_only=True,
        compile_isolation="none",
        **{"forced_drafts": False} | options,
    )
    loaded = load_models(target, head, config, dtype=torch.bfloat16)
    figures: dict[str, Any] = {}
    with Engine(loaded.target, loaded.draft, vocabulary=loaded.vocabulary, config=loaded.config) as engine:
        engine.capture()
        for kind, requested in prompts.items():
            rounds: dict[int, list[StepEvent]] = {}
            for ids, each in requested:
                constraint = Constraint.json_schema(each.schema) if each.schema else None
                rounds[engine.submit(ids, constraint=constraint, max_new_tokens=NEW_TOKENS).id] = []
            for event in engine.stream():
                rounds[event.job_id].append(event)
            figures[kind] = acceptance(list(rounds.values()))
            bar.update()
    for name, kinds in (("json", MEASURED), ("free", ("talk", "code"))):
        if set(kinds) <= set(prompts):
            figures[name] = _mean([figures[kind] for kind in kinds])
    return figures


def acceptance(jobs: list[list[StepEvent]]) -> dict[str, Any]:
    """Acceptance per draft position, without the first round, which has no drafts, and the last, which is cut short."""
    accepted = [event.num_accepted_drafts for events in jobs for event in events[1:-1]]
    counted = max(1, len(accepted))
    tokens, rounds = sum(len(event.tokens) for events in jobs for event in events), sum(len(events) for events in jobs)
    return {
        "tokens_per_round": round(tokens / max(1, rounds), 3),
        "held": [round(sum(number >= index for number in accepted) / counted, 3) for index in range(1, DRAFTS + 1)],
    }


def _mean(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean over kinds with equal weight."""
    columns = zip(*(each["held"] for each in figures), strict=True)
    return {
        "tokens_per_round": round(sum(each["tokens_per_round"] for each in figures) / len(figures), 3),
        "held": [round(sum(column) / len(figures), 3) for column in columns],
    }
