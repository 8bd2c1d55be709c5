"""Benchmark rounds, stages, grammars and a real model pair. Variants are interleaved; JSON last.

Times on a shared machine are noise: compare the ratios of interleaved variants, and the counts. No time is a failure.

    python -m tools.bench                          all parts
    python -m tools.bench --only round --rows 1 4
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # for tools.*

import torch
from tqdm import tqdm

from stepgraph import Constraint, Engine, EngineConfig, Vocabulary
from stepgraph.runtime.demo.pair import DRAFTS
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from tools import bench_demo, bench_grammar, bench_stages
from tools.gpu.checks.context import Context
from tools.gpu.checks.stopwatch import percentiles, ratio_of
from tools.profiling.workload import SCHEMA

PARTS = ("round", "grammar", "stages", "demo")


@dataclass(frozen=True)
class Variant:
    name: str
    constrained: bool
    drafts: int
    draft_masks: bool = True
    eager: bool = False


class Case:
    """One engine with `rows` running requests at all times."""

    def __init__(self, variant: Variant, rows: int, backend: str) -> None:
        self.variant, self.rows = variant, rows
        self.vocabulary = Vocabulary.printable()
        stop = self.vocabulary.stop_token_ids[0]
        target = ToyTarget(self.vocabulary.logits_width, seed=2, biases={stop: -4.0})
        config = EngineConfig(
            max_rows=rows,
            num_speculative_tokens=variant.drafts,
            draft_length=variant.drafts,
            max_length=512,
            draft_masks=variant.draft_masks,
            eager=variant.eager,
            backend=backend,
            buckets=(rows,),
            rounds_in_flight=1,
        )
        self.engine = Engine(target, ToyDraft(target, 0.8) if variant.drafts else None, vocabulary=self.vocabulary, config=config)
        self.engine.capture()
        if variant.constrained:
            self.engine.compile(Constraint.json_schema(SCHEMA))  # not timed
        self.prompt = 0
        self.seconds: list[float] = []

    def round(self) -> None:
        """Time of one step with every row busy, without admission."""
        stats = self.engine.stats()
        for _ in range(self.rows - stats.running - stats.waiting):
            self.prompt += 1
            constraint = Constraint.json_schema(SCHEMA) if self.variant.constrained else None
            self.engine.submit([self.prompt % 90], constraint=constraint, max_new_tokens=200)
        start = time.perf_counter()
        self.engine.step()
        self.seconds.append(time.perf_counter() - start)

    def figures(self) -> dict[str, object]:
        stats = self.engine.stats()
        micros = [second * 1e6 for second in self.seconds[len(self.seconds) // 5 :]]  # the first fifth is warm-up
        return {
            "variant": self.variant.name,
            "rows": self.rows,
            "round_us": percentiles(micros, (10, 50, 90), 3),
            "tokens_per_row_and_round": round(stats.tokens / stats.rounds / self.rows, 3),
            "mask_fills_per_row_and_round": round(stats.mask_fills / stats.rounds / self.rows, 3),
            "replays_per_round": stats.replays / stats.rounds,
            "host_syncs": stats.host_syncs,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8], help="batch sizes (default: 1 4 8)")
    parser.add_argument("--rounds", type=int, default=150, help="rounds of each variant (default: 150)")
    parser.add_argument("-k", "--drafts", type=int, default=4, help="drafts per round (default: 4)")
    parser.add_argument("--backend", default="auto", choices=("auto", "tape", "cuda"))
    parser.add_argument("--only", choices=PARTS, help="run only this part (default: all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    context = Context(rehearsal=not torch.cuda.is_available(), quick=False)
    parts: dict[str, Callable[[], Any]] = {
        "round": lambda: measure_rounds(options),
        "grammar": lambda: bench_grammar.report(rounds=400, drafts=options.drafts),
        "stages": lambda: bench_stages.report(context, rows=4, drafts=options.drafts),
        "demo": demonstration,
    }
    found = {name: part() for name, part in parts.items() if options.only in (None, name)}
    if "grammar" in found:
        print("\n".join(bench_grammar.lines(found["grammar"])))
    if "stages" in found:
        print("\n".join(bench_stages.lines(found["stages"])))
    if "ratios" in found.get("demo", {}):
        print("\n".join(bench_demo.lines(found["demo"])))
    print(json.dumps(found, indent=2))
    return 0


def demonstration() -> dict[str, Any]:
    """The model pair of `stepgraph demo`, if it is installed."""
    try:
        return bench_demo.report(DRAFTS, prompts=4, repeats=2, legal=100, threads=1)
    except ValueError as error:
        return {"missing": str(error)}


def measure_rounds(options: argparse.Namespace) -> dict[str, object]:
    """Rounds of the toy pair: with grammars, eager, with unmasked drafts and without drafts."""
    variants = [
        Variant("free", False, options.drafts),
        Variant("constrained", True, options.drafts),
        Variant("constrained, unmasked drafts", True, options.drafts, draft_masks=False),
        Variant("constrained, eager", True, options.drafts, eager=True),
        Variant("constrained, plain", True, 0),
    ]
    results: list[dict[str, object]] = []
    ratios: dict[str, object] = {}
    for rows in options.rows:
        cases = [Case(variant, rows, options.backend) for variant in variants]
        for _ in tqdm(range(options.rounds), desc=f"{rows} rows", unit="round", disable=not sys.stderr.isatty(), leave=False):
            for case in cases:
                case.round()
        results += [case.figures() for case in cases]
        ratios[f"{rows} rows"] = _ratios(cases)
        for case in cases:
            case.engine.close()
    return {
        "models": "toy pair",
        "backend": "cuda" if torch.cuda.is_available() and options.backend != "tape" else "tape",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "drafts": options.drafts,
        "ratios_of_paired_rounds": ratios,
        "variants": results,
    }


def _ratios(cases: Sequence[Case]) -> dict[str, dict[str, float]]:
    by_name = {case.variant.name: case for case in cases}
    pairs = (("constrained", "free"), ("constrained", "constrained, eager"), ("constrained", "constrained, unmasked drafts"))
    return {f"{above} / {below}": ratio_of(by_name[above].seconds, by_name[below].seconds) for above, below in pairs}


if __name__ == "__main__":
    sys.exit(main())
