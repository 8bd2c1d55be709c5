"""Processor time of the demonstration's rounds with a grammar on the device lane and of rounds without one, measured in turn."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm

from stepgraph import Constraint, Engine, EngineConfig
from stepgraph.runtime.demo.pair import target_path
from stepgraph.runtime.demo.variants import Pair
from stepgraph.runtime.request import Job
from tools.gpu.checks.stopwatch import ratio_of
from tools.train.demo.collect import LONGEST_PROMPT, encode_prompts
from tools.train.demo.prompts import make_prompt
from tools.train.demo.schemas import MEASURED, SCHEMAS

GOAL = 1.01
FIRST_SEED, PROMPTS, NEW_TOKENS = 1000, 4, 160


class Rounds:
    """An engine with one row that answers prompts one after another."""

    def __init__(self, pair: Pair, drafts: int, constrained: bool) -> None:
        config = EngineConfig(
            max_rows=1,
            num_speculative_tokens=drafts,
            draft_length=drafts,
            max_length=LONGEST_PROMPT + NEW_TOKENS,
            greedy_only=True,
            rounds_in_flight=1,
            forced_drafts=False,
            grammar_lane="device",
        )
        self.engine = Engine(pair.target, pair.draft, vocabulary=pair.vocabulary, config=config)
        self.engine.capture()
        pairs = ((seed, kind) for seed in range(FIRST_SEED, FIRST_SEED + PROMPTS) for kind in MEASURED)
        prompts = list(encode_prompts(target_path(), (make_prompt(seed, kind, held_out=True) for seed, kind in pairs)))
        grammars = {kind: Constraint.json_schema(SCHEMAS[kind]) if constrained else None for kind in MEASURED}
        self.prompts = itertools.cycle([(ids, grammars[each.kind]) for ids, each in prompts])
        self.job: Job | None = None

    def step(self) -> float | None:
        """Milliseconds of one round of a running request; None if the step did other work."""
        if self.job is None or self.job.finish_reason is not None:
            ids, constraint = next(self.prompts)
            self.job = self.engine.submit(ids, constraint=constraint, max_new_tokens=NEW_TOKENS)
        running, started = bool(self.job.tokens), time.process_time()
        self.engine.step()
        spent = (time.process_time() - started) * 1e3
        return spent if running and self.job.finish_reason is None else None


def report(pair: Pair, drafts: int, turns: int) -> dict[str, Any]:
    cases = {"free": Rounds(pair, drafts, constrained=False), "constrained": Rounds(pair, drafts, constrained=True)}
    times: dict[str, list[float]] = {name: [] for name in cases}
    bar = tqdm(total=turns, unit="turn", disable=not sys.stderr.isatty())
    for turn in itertools.count():
        order = list(cases)[:: 1 if turn % 2 else -1]
        spent = {name: cases[name].step() for name in order}
        both = {name: value for name, value in spent.items() if value is not None}
        if len(both) == len(cases):
            bar.update()
            for name, value in both.items():
                times[name].append(value)
        if len(times["free"]) == turns:
            break
    bar.close()
    fills = cases["constrained"].engine.stats().mask_fills
    for case in cases.values():
        case.engine.close()
    return {
        "turns": turns,
        "drafts": drafts,
        "masks_filled_on_the_host": fills,
        "ms_per_round": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "constrained_over_free": ratio_of(times["constrained"], times["free"], 4),
        "goal": GOAL,
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    ratio, ms = found["constrained_over_free"], found["ms_per_round"]
    yield (
        f"constrained round over unconstrained one, device lane, {found['drafts']} drafts, {found['turns']} turns: {ratio['p50']} "
        f"(quartiles {ratio['p25']} to {ratio['p75']}, goal {GOAL}); {ms['constrained']} and {ms['free']} ms of processor time"
    )
