"""Comparison with a hand-written loop and `transformers` on the same weights. Ratios without a verdict."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stepgraph.graphs import Backend
from stepgraph.graphs.attention.choose import choose_attention
from stepgraph.sampling.grammar import GrammarCompiler
from tools.gpu.baselines.three_graphs import PAGE, Sizes, ThreeGraphs
from tools.gpu.baselines.transformers_generate import Generator, not_available, same_weights, small_assistant
from tools.gpu.checks.cases import GRAMMARS, PROMPT_LEN, ROW_SCHEMA, Case, Variant, alternate, case_of, cell, close_all, ratio
from tools.gpu.checks.context import Context, Figures, Skipped, summary
from tools.gpu.checks.shapes import Pair, Shape, pair_of, shape_of

DRAFTS = 3


class LoopCase:
    """The hand-written loop with all rows busy, timed like a Case."""

    def __init__(self, context: Context, backend: Backend, shape: Shape, rows: int, grammar: str) -> None:
        self.pair, self._backend = pair_of(shape, context.device), backend
        self._length = 96 if context.rehearsal else 768
        attention = choose_attention(
            context.device, "auto" if context.on_tape else "triton", (*self.pair.target.attends, *self.pair.draft.attends), PAGE
        )
        sizes = Sizes(rows, DRAFTS, self._length)
        self._loop = ThreeGraphs(backend, self.pair.target, self.pair.draft, self.pair.vocabulary, sizes, attention)
        compiler = GrammarCompiler(self.pair.vocabulary)
        self._grammar = compiler.compile(GRAMMARS[grammar]) if grammar else None
        self._admitted = 0

    def block(self, rounds: int) -> float:
        """Median of `rounds` steps without an admission, in microseconds."""
        times: list[float] = []
        for _ in range(4 * rounds):
            admitted = self._fill_rows()
            start = time.perf_counter()
            self._backend.run(self._loop.step)  # on the stream of its graphs: another stream would have to wait for each
            if not admitted:
                times.append(time.perf_counter() - start)
            if len(times) == rounds:
                break
        assert times
        return statistics.median(times) * 1e6

    def _fill_rows(self) -> int:
        count = self._loop.rows.count(None)
        for _ in range(count):
            self._admitted += 1
            prompt = [(7 * self._admitted + 3 * index) % 90 for index in range(PROMPT_LEN)]
            self._loop.admit(prompt, self._grammar, self._length - PROMPT_LEN)
        return count


def against_hand_written_loop(context: Context) -> Figures:
    """Step time of a loop with three graphs and host masks, over a round of this engine: same kernels, same drafts per round.

    Compares time per step: unmasked drafts of random weights are never legal, so the loop's matchers do less work than in practice.
    """
    cells = [(1, "1B"), (1, "8B")] if context.rehearsal else [(1, "1B"), (1, "8B"), (16, "8B"), (16, "1B")]
    for index, (rows, size) in enumerate(cells, 1):
        shape = shape_of(context, size)
        for grammar in ("", "schema"):
            name = f"{size} batch {rows} {grammar or 'free'}"
            if not context.fits(name):
                continue
            with cell(context, name), context.backend() as backend:
                loop = LoopCase(context, backend, shape, rows, grammar)
                ours = case_of(context, shape, rows, Variant(grammar or "free", grammar))
                blocks = _warm_and_alternate(context, {"loop": loop.block, "ours": ours.block}, index / len(cells))
                context.figures[name] = _ratios(blocks, "loop", "ours")
    return context.figures


def _warm_and_alternate(context: Context, blocks: dict[str, Callable[[int], float]], share: float) -> dict[str, list[float]]:
    for block in blocks.values():
        block(2)
    return alternate(context, blocks, 12, share)


def _ratios(blocks: dict[str, list[float]], above: str, below: str) -> Figures:
    return {"ratio": ratio(blocks, above, below), **{f"{name}_us": summary(times) for name, times in blocks.items()}}


def against_transformers(context: Context) -> Figures:
    """Microseconds per token of transformers' generate, over a round without drafts: every cache, compiled, assisted, xgrammar."""
    missing = not_available()
    if missing:
        raise Skipped(missing)
    shape = shape_of(context, "1B")
    pair = pair_of(shape, context.device)
    generator = same_weights(pair.target, pair.vocabulary)
    ours = {name: case_of(context, shape, 1, Variant(name, name if name == "schema" else "", drafts=0)) for name in ("free", "schema")}
    found, grammar = context.figures, generator.compile(_schema())
    modes = (
        ("compiled", "compiled", False),  # the strongest baseline first
        ("compiled, xgrammar", "compiled", True),
        ("static", "static", False),
        ("dynamic", "dynamic", False),
        ("dynamic, xgrammar", "dynamic", True),
        ("assisted", "assisted", False),
    )
    for index, (name, mode, constrained) in enumerate(modes, 1):
        if mode == "compiled" and (context.rehearsal or context.quick):
            found[name] = "not run: compilation takes most of a minute"
            continue
        assistant = small_assistant(pair.target, pair.vocabulary) if mode == "assisted" else None
        theirs = partial(_per_token, context, generator, pair, mode, grammar if constrained else None, assistant)
        case: Case = ours["schema" if constrained else "free"]
        try:
            blocks = _warm_and_alternate(context, {"theirs": theirs, "ours": case.block}, share=index / len(modes))
        except Exception as error:  # library versions may be incompatible
            found[name] = f"not available: {type(error).__name__}: {str(error)[:200]}"
            continue
        found[name] = _ratios(blocks, "theirs", "ours")
    close_all()
    return found


def _schema() -> str:
    return json.dumps({"type": "array", "items": ROW_SCHEMA, "minItems": 60})


def _per_token(context: Context, generator: Generator, pair: Pair, mode: str, grammar: Any, assistant: Any, rounds: int) -> float:
    """Microseconds per token after the first, of one text; with an assistant, whose first token is not timed, per token of all."""
    tokens = 4 if context.rehearsal else 4 * rounds
    with torch.no_grad():
        timed = generator.generate([7 * index % 90 for index in range(PROMPT_LEN)], tokens, grammar, mode, assistant, stops=False)
    return timed.later_seconds / max(1, len(timed.tokens) - (assistant is None)) * 1e6
