"""The share of host grammar work that a round hides under the models' compute, for every drafter on the demonstration's target."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from stepgraph import Constraint, Engine, EngineConfig, Job
from stepgraph.runtime.config import LaneName
from stepgraph.runtime.demo.pair import target_path
from stepgraph.runtime.demo.variants import LOOK_UP, Pair
from tools.train.demo.collect import LONGEST_PROMPT, encode_prompts
from tools.train.demo.prompts import make_prompt
from tools.train.demo.schemas import MEASURED, SCHEMAS

GOAL = 0.95
FIRST_SEED, NEW_TOKENS = 1000, 160
LANES: tuple[LaneName, ...] = "device", "host"


def report(pair: Pair, drafts: int, rounds: int) -> dict[str, Any]:
    """Traces `rounds` rounds of each drafter, with grammars on the device and in host nodes."""

    def repeat(job: Job) -> list[int]:
        return job.tokens[-drafts:]

    length: dict[str, Any] = {"num_speculative_tokens": drafts, "draft_length": drafts}
    drafters: dict[str, tuple[Any, dict[str, Any]]] = {
        "head": (pair.draft, {**length, "forced_drafts": False}),
        "head, look-up, forced": (pair.draft, {**length, "look_up": LOOK_UP}),
        "look-up": ("ngram", length),
        "forced": ("forced", length),
        "function": (repeat, {**length, "rounds_in_flight": 1}),
        "none": (None, {"num_speculative_tokens": 0}),
    }
    prompts = list(encode_prompts(target_path(), (make_prompt(FIRST_SEED, kind, held_out=True) for kind in MEASURED)))
    found: dict[str, dict[str, Any]] = {lane: {} for lane in LANES}
    for lane, (name, (draft, options)) in ((lane, each) for lane in LANES for each in drafters.items()):
        config = EngineConfig(max_rows=1, max_length=LONGEST_PROMPT + NEW_TOKENS, greedy_only=True, grammar_lane=lane, **options)
        with Engine(pair.target, draft, vocabulary=pair.vocabulary, config=config) as engine:
            engine.capture()
            with engine.trace(rounds) as trace:
                for ids, each in itertools.cycle(prompts):
                    engine.generate(ids, constraint=Constraint.json_schema(SCHEMAS[each.kind]), max_new_tokens=NEW_TOKENS)
                    if engine.stats().rounds >= rounds:
                        break
        summary = trace.timeline.summary()
        found[lane][name] = {
            "rounds": summary.rounds,
            "host_nodes": summary.host_nodes,
            "host_us_per_round": round(summary.host_ns / 1e3 / summary.rounds, 1),
            "exposed_share_of_round": round(summary.exposed_ns / summary.rounds / summary.round_ns, 5),
            "share_hidden": None if summary.share_hidden is None else round(summary.share_hidden, 4),
        }
    return {"drafts": drafts, "goal": GOAL, "lanes": found}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'':<26}{'rounds':>8}{'host nodes':>12}{'us / round':>12}{'hidden':>9}{'exposed part of a round':>25}"
    for lane, name, row in ((lane, name, row) for lane, rows in found["lanes"].items() for name, row in rows.items()):
        hidden = "-" if row["share_hidden"] is None else f"{row['share_hidden']:.1%}"
        figures = f"{row['rounds']:>4}{row['host_nodes']:>12}{row['host_us_per_round']:>12}{hidden:>9}"
        yield f"{f'{lane}: {name}':<30}{figures}{row['exposed_share_of_round']:>25.2%}"
    yield f"goal {found['goal']:.0%} for every drafter; a round without host nodes has no time to hide"
