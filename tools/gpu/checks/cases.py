"""Engines with all rows busy, and interleaved timing of their rounds."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from stepgraph import Constraint, Engine, EngineConfig, SamplingParams
from stepgraph.runtime.config import LaneName
from stepgraph.sampling.grammar.link.native import HostLinkName
from tools.gpu.checks.context import Context, Figures
from tools.gpu.checks.shapes import Shape, pair_of
from tools.gpu.checks.stopwatch import ratio_of

ROW_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "active": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 6},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "active", "tags", "address"],
    "additionalProperties": False,
}
# Grammars whose texts last for the whole measurement. "anything" needs the same device work per round and almost no matcher time.
GRAMMARS = {
    "schema": Constraint.json_schema({"type": "array", "items": ROW_SCHEMA, "minItems": 60}),
    "recursive": Constraint.ebnf(
        'root ::= "[" item ("," item){199} "]"\nitem ::= number | text | "[" (item ("," item)*)? "]"\n'
        'number ::= "-"? [0-9]{1,12}\ntext ::= "\\"" [a-zA-Z0-9 _-]{0,24} "\\""'
    ),
    "anything": Constraint.regex("[ -~]+"),
}
FORCED_ACCEPTANCE = 0.7  # forced acceptance: with random weights no draft would be accepted
PROMPT_LEN = 32
MAX_OPEN_CASES = 8  # open cases, reused by later checks


@dataclass(frozen=True)
class Variant:
    """`name` separates two cases that are otherwise equal."""

    name: str
    grammar: str = ""
    drafts: int = 3
    draft_masks: bool = True
    grammar_lane: LaneName = "auto"
    host_link: HostLinkName = "auto"
    eager: bool = False
    sampling: SamplingParams | None = None  # None: greedy


class Case:
    """One engine of one variant."""

    def __init__(self, context: Context, shape: Shape, rows: int, variant: Variant) -> None:
        self.rows, self.variant = rows, variant
        self.pair = pair_of(shape, context.device)
        self.length = 96 if context.rehearsal else 768
        config = EngineConfig(
            max_rows=rows,
            num_speculative_tokens=variant.drafts,
            draft_length=variant.drafts,
            max_length=self.length,
            buckets=(rows,),
            greedy_only=variant.sampling is None,
            prefill_chunk=256,
            forced_acceptance=(FORCED_ACCEPTANCE,) * variant.drafts if variant.drafts else None,
            draft_masks=variant.draft_masks,
            grammar_lane=variant.grammar_lane,
            host_link=variant.host_link,
            eager=variant.eager,
            compile_isolation="none",
            prefix_reuse=False,
            attention="auto" if context.on_tape else "triton",  # needs no build; compiling FlashInfer takes minutes
        )
        self.engine = Engine(self.pair.target, self.pair.draft if variant.drafts else None, vocabulary=self.pair.vocabulary, config=config)
        self.engine.capture()
        self.constraint = GRAMMARS[variant.grammar] if variant.grammar else None
        if self.constraint:
            self.engine.compile(self.constraint)
        self._submitted = 0
        self.seconds: list[float] = []

    def block(self, rounds: int) -> float:
        """Time `rounds` rounds without a prompt, always with one round in flight. Returns the median in microseconds."""
        self.engine.backend.synchronize()
        self._step_until_decoding()  # the first round has no predecessor in flight
        times: list[float] = []
        prompts, steps_without = self._fill_rows(), 1
        for _ in range(4 * rounds):
            begin = time.perf_counter()
            self.engine.step()
            seconds = time.perf_counter() - begin
            before, prompts = prompts, self._fill_rows()
            steps_without = steps_without + 1 if prompts == before else 0
            if steps_without >= self.engine.limits.rounds_in_flight:  # a step waits for the round before it, and for the prompt before that
                times.append(seconds)
            if len(times) == rounds:
                break
        self.engine.backend.synchronize()
        assert times, f"{self.variant}: no round without a prompt"
        self.seconds += times
        return statistics.median(times) * 1e6

    def _step_until_decoding(self) -> None:
        """Step until all rows are decoding."""
        self._fill_rows()
        while True:
            self.engine.step()
            prompts = self._fill_rows()
            self.engine.step()
            if self._fill_rows() == prompts:
                return

    def _fill_rows(self) -> int:
        """Submit a request for every free row. Returns the number of prompt tokens computed so far."""
        stats = self.engine.stats()
        for _ in range(self.rows - stats.running - stats.waiting):
            self._submitted += 1
            prompt = [(7 * self._submitted + 3 * index) % 90 for index in range(PROMPT_LEN)]
            self.engine.submit(prompt, sampling=self.variant.sampling, constraint=self.constraint, max_new_tokens=self.length - PROMPT_LEN)
        return stats.prompt_tokens

    def percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e6

    def figures(self) -> Figures:
        stats = self.engine.stats()
        tokens = stats.tokens / max(1, stats.rounds)
        return {
            "rounds": len(self.seconds),
            "tokens_per_round": round(tokens, 2),
            "p50_us": round(self.percentile(0.5), 2),
            "p99_us": round(self.percentile(0.99), 2),
            "tokens_per_second": round(tokens / self.percentile(0.5) * 1e6, 1),
        }


_open_cases: OrderedDict[tuple[Shape, int, Variant], Case] = OrderedDict()


def case_of(context: Context, shape: Shape, rows: int, variant: Variant) -> Case:
    """An open case, with its times cleared. Cases stay open because capture takes longer than a measurement."""
    key = (shape, rows, variant)
    if key not in _open_cases:
        while len(_open_cases) >= MAX_OPEN_CASES:
            _open_cases.popitem(last=False)[1].engine.close()
        _open_cases[key] = Case(context, shape, rows, variant)
    _open_cases.move_to_end(key)
    _open_cases[key].seconds.clear()
    return _open_cases[key]


def close_all() -> None:
    while _open_cases:
        _open_cases.popitem()[1].engine.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def cell(context: Context, name: str) -> Iterator[None]:
    """A part of a check. On failure all engines are closed."""
    with context.part(name):
        try:
            yield
        except Exception:
            close_all()
            raise


def take_turns(context: Context, cases: Sequence[Case], turns: int, share: float = 1.0) -> dict[str, list[float]]:
    """Interleaved blocks of every case. Returns the median of each block in microseconds."""
    for case in cases:
        case.block(2)  # warm up
        case.seconds.clear()
    return alternate(context, {case.variant.name: case.block for case in cases}, turns, share)


def alternate(context: Context, blocks: Mapping[str, Callable[[int], float]], turns: int, share: float = 1.0) -> dict[str, list[float]]:
    """Call every function once per turn with a number of rounds, in rotating order. Returns their results."""
    found: dict[str, list[float]] = {name: [] for name in blocks}
    least = 2 if context.rehearsal else context.count(8, 2)  # the budget includes making engines, and a 99th percentile needs rounds
    for turn in context.turns(2 if context.rehearsal else turns, least=least, share=share):
        start = turn % len(blocks)
        for name in (*list(blocks)[start:], *list(blocks)[:start]):
            found[name].append(blocks[name](2 if context.rehearsal else 12))
    return found


def ratio(blocks: Mapping[str, Sequence[float]], above: str, below: str) -> dict[str, float]:
    """Median and quartiles of the ratios of blocks that ran in the same turn."""
    quartiles = ratio_of(blocks[above], blocks[below], digits=4)
    return {"median": quartiles.pop("p50"), **quartiles, "turns": len(blocks[above])}
