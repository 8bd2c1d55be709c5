"""Host cost of grammars per round: the native link (of the library and of automata), Python loops, batch calls.

All variants process the same documents in the same rounds, interleaved: roll back rejected drafts, accept the target's tokens,
fill, then accept and fill for each draft. The masks of all variants are compared, untimed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch
from tqdm import tqdm

from stepgraph.sampling.grammar import CompiledConstraint, GrammarCompiler, Vocabulary
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.link.native import available_processors
from stepgraph.sampling.grammar.link.python import PythonLink
from tools.bench.grammar_documents import TEXTS, DocumentRounds, RowRound, encode, vocabulary
from tools.bench.grammar_variants import LibraryBatch, LinkVariant, PythonLoop, make_native_link, native_forcing, native_reason
from tools.bench.library_calls import timed_library_calls
from tools.gpu.checks.stopwatch import percentiles, ratio_of
from tools.origin import origin

LIBRARIES = ("xgrammar", "llguidance")
BATCHES = (1, 8, 32, 64)
BLOCKS = 8  # measured blocks of rounds per variant
FROM_C, FORCING, TABLES = "native link, called from C", "native link, forced drafts", "native link, automata"  # all called from C


@dataclass
class Figures:
    seconds: dict[str, list[float]] = field(default_factory=dict)
    processor_seconds: dict[str, float] = field(default_factory=dict)  # of all threads, in all rounds
    fills: int = 0
    accepts: int = 0
    rounds: int = 0


class Bench:
    """One batch size. Every variant has its own matchers and masks."""

    def __init__(
        self,
        rows: int,
        drafts: int,
        table: Vocabulary,
        documents: Sequence[tuple[CompiledConstraint, list[int]]],
        backend: str,
        automata: Mapping[CompiledConstraint, CompiledConstraint],
    ) -> None:
        words = table.mask_words
        self.rows, self.drafts, self.documents, self.backend, self.rng = rows, drafts, documents, backend, random.Random(7)
        self.legal = torch.from_numpy(table.text_words | table.stop_words)
        self.loops = [loop(rows, words, drafts) for loop in library_loops(backend)]
        self.links = [LinkVariant("python link", PythonLink, rows, words, drafts)]
        if native_reason() == "":
            self.links += [
                LinkVariant("native link", make_native_link, rows, words, drafts),
                LinkVariant(FROM_C, make_native_link, rows, words, drafts, from_c=True),
                LinkVariant(FORCING, native_forcing(table), rows, words, drafts, from_c=True),
                LinkVariant(TABLES, make_native_link, rows, words, drafts, from_c=True, replacements=automata),
            ]
        self.readers: list[DocumentRounds | None] = [None] * rows
        self.figures = Figures({variant.name: [] for variant in self.variants}, {variant.name: 0.0 for variant in self.variants})

    @property
    def variants(self) -> list[Any]:
        return [*self.loops, *self.links]

    def turns(self) -> list[RowRound]:
        """The next round of every row; after the end of a document the row starts another."""
        result = []
        for slot in range(self.rows):
            reader = self.readers[slot]
            turn = reader.turn() if reader else None
            while turn is None:
                grammar, tokens = self.documents[self.rng.randrange(len(self.documents))]
                reader = self.readers[slot] = DocumentRounds(grammar, tokens, self.drafts, self.rng)
                for variant in self.variants:
                    variant.start_document(slot, grammar)
                turn = reader.turn()
            result.append(turn)
        return result

    def round(self, keep: bool, compare: bool) -> None:
        turns = self.turns()
        order = self.variants
        self.rng.shuffle(order)
        for variant in order:
            variant.prepare(turns)
            started = time.process_time()
            spent = variant.seconds()
            if keep:
                self.figures.processor_seconds[variant.name] += time.process_time() - started
                self.figures.seconds[variant.name].append(spent)
        if keep:
            self.figures.rounds += 1
            self.figures.fills += self.rows * (self.drafts + 1)
            self.figures.accepts += sum((turn.token >= 0) + len(turn.drafts) for turn in turns)
        if compare:
            expected = self.loops[0].masks & self.legal
            for variant in self.variants:
                assert torch.equal(expected, variant.masks & self.legal), f"{variant.name}: a mask differs from the library's"

    def library_over_loop(self, rounds: int) -> float | None:
        """Time inside xgrammar's functions during host nodes, all threads together, as a share of the Python loop's round. Drops the
        other variants."""
        loop, link = self.loops[0], next((link for link in self.links if link.name == FROM_C), None)
        if link is None or self.backend != "xgrammar":
            return None
        self.loops, self.links = [loop], [link]
        shares = list[float]()
        with timed_library_calls() as calls:
            if calls is None:
                return None
            for _ in range(rounds):
                turns = self.turns()
                for variant in self.variants:
                    variant.prepare(turns)
                whole = loop.seconds()
                link.seconds()
                shares.append(calls.take_seconds() / whole)
        return round(statistics.median(shares), 3)

    def keep_only(self, name: str) -> None:
        self.loops, self.links = [], [link for link in self.links if link.name == name]


def library_loops(backend: str) -> tuple[type[Any], type[Any]]:
    """Variants with the library's own calls, without a host link."""
    if backend == "xgrammar":
        return PythonLoop, LibraryBatch
    from tools.bench.llguidance_variants import LLGuidanceBatch, LLGuidanceLoop  # needs an optional library

    return LLGuidanceLoop, LLGuidanceBatch


def measure_alone(make: Callable[[], Bench], rounds: int) -> dict[str, float]:
    """Median microseconds of a round if no other variant runs between two rounds, as in a process with one variant, whose tables and
    masks stay in the caches. The variants alternate in blocks of rounds over the same documents."""
    cases = {name: make() for name in (FROM_C, TABLES)}
    for name, case in cases.items():
        case.keep_only(name)
    for block in range(1 + BLOCKS):
        for case in cases.values():
            for index in range(max(20, rounds // BLOCKS)):
                case.round(keep=block > 0 and index >= 10, compare=False)
    found = {name: round(statistics.median(case.figures.seconds[name]) * 1e6, 2) for name, case in cases.items()}
    for case in cases.values():
        case.links[0].link.close()
    return found


def rounds_for(rows: int, rounds: int) -> int:
    return max(rounds // max(1, rows // 8), 100)


def measure(rows: int, rounds: int, drafts: int, table: Vocabulary, documents: Any, backend: str, automata: Any) -> dict[str, object]:
    def make() -> Bench:
        return Bench(rows, drafts, table, documents, backend, automata)

    bench = make()
    warm_up = max(20, rounds // 10)
    gc.collect()
    gc.disable()
    for index in tqdm(range(warm_up + rounds), desc=f"{rows} rows", unit="round", disable=not sys.stderr.isatty(), leave=False):
        bench.round(keep=index >= warm_up, compare=index < warm_up)
    by_itself = measure_alone(make, rounds) if TABLES in bench.figures.seconds else None
    gc.enable()
    seconds, loop, link = bench.figures.seconds, bench.loops[0].name, bench.links[0].name
    processor = bench.figures.processor_seconds
    report: dict[str, object] = {
        "rows": rows,
        "rounds": bench.figures.rounds,
        "fills_per_round": bench.figures.fills / bench.figures.rounds,
        "accepts_per_round": round(bench.figures.accepts / bench.figures.rounds, 2),
        "us_per_round": {name: percentiles([second * 1e6 for second in spent], (50, 99, 99.9)) for name, spent in seconds.items()},
        "over_python_loop": {name: ratio_of(spent, seconds[loop])["p50"] for name, spent in seconds.items() if name != loop},
        "processor_time_over_python_loop": {name: round(spent / processor[loop], 3) for name, spent in processor.items() if name != loop},
        "over_python_link": {name: ratio_of(spent, seconds[link])["p50"] for name, spent in seconds.items() if name.startswith("native")},
        "forcing_over_native_link": ratio_of(seconds[FORCING], seconds[FROM_C])["p50"] if FORCING in seconds else None,
        "automata_over_native_link": ratio_of(seconds[TABLES], seconds[FROM_C])["p50"] if TABLES in seconds else None,
        "us_per_round_alone": by_itself,
        "automata_over_native_link_alone": round(by_itself[TABLES] / by_itself[FROM_C], 3) if by_itself else None,
    }
    links = bench.links
    report["library_calls_over_python_loop"] = bench.library_over_loop(max(10, rounds // 4))
    for variant in links:
        variant.link.close()
    return report


def report(batches: Sequence[int] = BATCHES, rounds: int = 400, drafts: int = 4, backend: BackendChoice = "xgrammar") -> dict[str, object]:
    table, what = vocabulary()
    ids = {token: token_id for token_id, token in reversed(list(enumerate(table.tokens))) if token}
    compiler = GrammarCompiler(table, backend=backend)
    documents = [(compiler.compile(constraint), encode(text, ids)) for _, constraint, text in TEXTS]
    to_tables = GrammarCompiler(table, backend="automaton")
    automata = {compiled: to_tables.compile(constraint) for (compiled, _), (_, constraint, _) in zip(documents, TEXTS, strict=True)}
    return {
        "vocabulary": what,
        "library": backend,
        "drafts": drafts,
        "grammars": {name: len(tokens) for (name, _, _), (_, tokens) in zip(TEXTS, documents, strict=True)},
        "processors": available_processors(),
        "native": native_reason() or "available",
        "python": platform.python_version(),
        "batches": [measure(rows, rounds_for(rows, rounds), drafts, table, documents, backend, automata) for rows in batches],
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the printed report."""
    for batch in found["batches"]:
        yield (
            f"{found['library']}, {batch['rows']} rows, {found['drafts']} drafts, {found['vocabulary']}: {batch['rounds']} rounds of "
            f"{batch['fills_per_round']:g} fills and {batch['accepts_per_round']:g} accepts"
        )
        if (share := batch["library_calls_over_python_loop"]) is not None:
            yield f"  inside xgrammar's functions, all threads together: {share} of the python loop"
        if (share := batch["automata_over_native_link"]) is not None:
            times = ", ".join(f"{name} {figure} us" for name, figure in batch["us_per_round_alone"].items())
            yield f"  automata over the native link: {share}; each alone {batch['automata_over_native_link_alone']} ({times})"
        yield f"  {'us per round':<28}{'p50':>10}{'p99':>10}{'p99.9':>10}{'x python loop':>15}{'x python link':>15}"
        for name, figures in batch["us_per_round"].items():
            times = batch["over_python_loop"].get(name, 1.0)
            links = batch["over_python_link"].get(name, "")
            yield f"  {name:<28}{figures['p50']:>10}{figures['p99']:>10}{figures['p99.9']:>10}{times:>15}{links:>15}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(BATCHES), help="batch sizes (default: 1 8 32 64)")
    parser.add_argument("--rounds", type=int, default=4000, help="rounds of the small batches; large ones get fewer (default: 4000)")
    parser.add_argument("-k", "--drafts", type=int, default=4, help="drafts per round (default: 4)")
    parser.add_argument("--library", nargs="+", choices=LIBRARIES, default=["xgrammar"], help="grammar libraries (default: xgrammar)")
    parser.add_argument("--out", help="write a record to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [report(options.rows, options.rounds, options.drafts, library) for library in options.library]
    for each in found:
        print("\n".join(lines(each)))
        print(json.dumps(each))
    if options.out:
        Path(options.out).write_text(json.dumps(origin() | {"libraries": found}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
