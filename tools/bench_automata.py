"""Compiles the JSON schemas of a folder to automata over 131,072 tokens: how many fit, their sizes, and the processor time.

    python tools/bench_automata.py path/to/schemas --schemas 2000
    python tools/bench_automata.py path/to/schemas --positions 300000 --progress compared.jsonl

Schemas that the project refuses are counted and left out. With --positions, masks are compared with those of fresh xgrammar matchers
instead: in every state of the named grammars and of the schemas of the JSON-Schema-Test-Suite, after markers, over a vocabulary without
most single bytes, and along random legal texts of the folder's schemas. Prints one JSON document; the exit code is 1 if a mask differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from stepgraph.runtime.demo.pair import target_path
from stepgraph.sampling.grammar import Constraint, GrammarCompiler, GrammarLimits, Vocabulary
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar, automaton_vocabulary
from stepgraph.sampling.grammar.automaton.library import AutomatonVocabulary, Field, UnfitError, limits_of
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammar, XGrammarBuilder, parse

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

from tests.helpers.automaton_cases import CONSTRAINTS
from tests.helpers.automaton_cases import VOCABULARY as SMALL
from tests.helpers.schema_cases import groups
from tools.bench.automaton_masks import Comparer
from tools.bench.grammar_documents import TEXTS, vocabulary
from tools.origin import origin

PERCENTILES = (50, 85, 95, 99, 100)


WALK_POSITIONS, MAX_STATES, WALK_SECONDS = 500, 20_000, 30.0  # limits: positions of a walk, states of a grammar, processor time of a walk
MARKERS = ("</think>", '"a', "::")


@dataclass(frozen=True)
class Case:
    """What to compare with xgrammar: every state of a grammar over a vocabulary, or random texts, also after a marker."""

    vocabulary: str
    kind: str  # "states", "marker" or "walk"
    name: str
    constraint: Constraint
    marker: str | None = None

    @property
    def key(self) -> str:
        return f"{self.vocabulary} / {self.kind} / {self.name}"


def vocabularies() -> dict[str, Vocabulary]:
    """The demonstration's vocabulary, one of 131,072 tokens, a small one, and one where most bytes have no token of their own."""
    demonstration, (large, _) = Vocabulary.from_gguf(target_path()), vocabulary()
    tokens = [token if len(token) != 1 or token.isalnum() or token in b'"{}[]:, ' else b"" for token in demonstration.tokens]
    sparse = Vocabulary(tokens, demonstration.stop_token_ids, demonstration.logits_width, demonstration.control_token_ids)
    return {"demonstration": demonstration, "large": large, "small": SMALL, "sparse": sparse}


def cases(names: Sequence[str], folder: Path, schemas: int, seed: int) -> list[Case]:
    """First the named grammars and those of the test suite, then schemas of the folder in random order."""
    named = CONSTRAINTS | {name: constraint for name, constraint, _ in TEXTS}
    found = [Case("sparse", "walk", name, constraint) for name, constraint in named.items()]
    for index, (name, constraint) in enumerate(named.items()):
        found += [Case(tokens, "marker", name, constraint, MARKERS[index % len(MARKERS)]) for tokens in ("small", "demonstration", "large")]
    for group in groups():
        with suppress(ValueError):  # refused by the project
            named |= {f"{group.file} {group.description}": Constraint.json_schema(group.schema)}
    found += [
        Case(tokens, "states", name, constraint) for tokens in ("small", "demonstration", "large") for name, constraint in named.items()
    ]
    paths = sorted(folder.rglob("*.json"))
    for path in Random(seed).sample(paths, min(schemas, len(paths))):
        with suppress(ValueError):
            constraint = Constraint.json_schema(json.loads(path.read_text(encoding="utf-8")))
            found += [Case(tokens, "walk", str(path.relative_to(folder)), constraint) for tokens in ("demonstration", "large")]
    return [case for case in found if case.vocabulary in names]


def compare(case: Case, tokens: Vocabulary) -> dict[str, Any]:
    """Compares every state of a case "states", and random texts of other cases. The automaton is compiled from xgrammar's grammar, since
    the grammar that the automaton compiler otherwise writes out allows more host names."""
    limits, table = GrammarLimits(), automaton_vocabulary(tokens)
    try:
        library = GrammarCompiler(tokens, backend="xgrammar").compile(case.constraint).grammar
        image = table.compile(*parse(case.constraint, limits)[1:], limits_of(asdict(limits)))
    except ValueError as error:
        return {"refused": str(error)[:200]}
    ours = AutomatonGrammar(image, table, tokens)
    assert isinstance(library, XGrammar)
    comparer = Comparer(ours, library, case.marker)
    if case.kind == "states":
        comparer.states({token[0]: token_id for token_id, token in enumerate(tokens.for_xgrammar) if len(token) == 1}, MAX_STATES)
    else:
        comparer.walk(WALK_POSITIONS, Random(case.key), WALK_SECONDS)
    return asdict(comparer.result)


def compare_all(pending: Sequence[Case], tokens: Mapping[str, Vocabulary], positions: int, progress: Path) -> dict[str, Any]:
    """Compares until `positions` are reached. Results are appended to the file `progress`; cases in it are not repeated."""
    done = {
        entry["case"]: entry for line in (progress.read_text().splitlines() if progress.exists() else []) for entry in [json.loads(line)]
    }
    total = sum(entry.get("compared", 0) for entry in done.values())
    with progress.open("a") as log, tqdm(total=positions, initial=total, unit="position", disable=not sys.stderr.isatty()) as bar:
        for case in pending:
            if case.key in done or (total >= positions and case.kind == "walk"):
                continue
            found = done[case.key] = {"case": case.key} | compare(case, tokens[case.vocabulary])
            print(json.dumps(found), file=log, flush=True)
            total += found.get("compared", 0)
            bar.update(found.get("compared", 0))
    counts: dict[str, Counter[str]] = {}
    for key, entry in done.items():
        count = counts.setdefault(" / ".join(key.split(" / ")[:2]), Counter())
        count.update(grammars=int("compared" in entry), refused=int("refused" in entry))
        count.update({name: entry.get(name, 0) for name in ("compared", "time_outs", "unspelled")})
    different = [f"{key}: {text}" for key, entry in done.items() for text in entry.get("different", ())]
    return {"compared": total, "parts": counts, "different": different}


def summarise(values: Sequence[float]) -> dict[str, float]:
    return {f"p{at}": round(float(np.percentile(values, at)), 2) for at in PERCENTILES}


def measure(paths: Sequence[Path], tokens: Vocabulary, repeats: int) -> dict[str, Any]:
    limits = GrammarLimits()
    library, bounds = XGrammarBuilder(tokens, limits, 1), limits_of(asdict(limits))
    table = AutomatonVocabulary(tokens.for_xgrammar, tokens.stop_token_ids, tokens.mask_words)
    figures: dict[str, list[float]] = {name: [] for name in ("parse_ms", "compile_ms", "kilobytes", "states")}
    unfit, refused = dict[str, str](), 0
    for path in tqdm(paths, unit="schema", disable=not sys.stderr.isatty()):
        try:
            constraint = Constraint.json_schema(json.loads(path.read_text(encoding="utf-8")))
            library.check(constraint)
            start = time.thread_time()
            parsed = parse(constraint, limits)
        except (ValueError, RuntimeError):  # the library raises several types of its own
            refused += 1
            continue
        times = [time.thread_time()]
        figures["parse_ms"].append((times[0] - start) * 1e3)
        try:
            for _ in range(repeats):
                image = table.compile(*parsed[1:], bounds, has_formats=True)
                times.append(time.thread_time())
        except UnfitError as error:
            unfit[f"{path.parent.name}/{path.name}"] = str(error)
            continue
        for name, value in (
            ("compile_ms", np.median(np.diff(times)) * 1e3),
            ("kilobytes", image.nbytes / 1024),
            ("states", image[Field.STATES]),
        ):
            figures[name].append(float(value))
    compiled = len(figures["states"])
    counts = {
        "schemas": len(paths),
        "refused": refused,
        "compiled": compiled,
        "unfit": unfit,
        "fit": compiled / max(1, compiled + len(unfit)),
    }
    return counts | {name: summarise(values) for name, values in figures.items() if values}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="schemas, one in each .json file, also in sub-folders")
    parser.add_argument("--schemas", type=int, default=1000, help="number of schemas to choose at random (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of that choice (default: 0)")
    parser.add_argument("--repeats", type=int, default=3, help="compiles of each schema; their median is reported (default: 3)")
    parser.add_argument("--positions", type=int, default=0, metavar="N", help="compare at least N positions with xgrammar instead")
    parser.add_argument("--progress", type=Path, default=Path("compared.jsonl"), help="file of results; cases in it are not repeated")
    options = parser.parse_args(arguments)
    paths = sorted(options.folder.rglob("*.json"))
    if not paths:
        parser.error(f"folder: got {options.folder}, expected a folder with .json files")
    torch.set_num_threads(1)
    if options.positions:
        tokens = vocabularies()
        pending = cases(tuple(tokens), options.folder, options.schemas, options.seed)
        found = compare_all(pending, tokens, options.positions, options.progress)
    else:
        large, name = vocabulary()
        chosen = Random(options.seed).sample(paths, min(options.schemas, len(paths)))
        found = {"vocabulary": name} | measure(chosen, large, options.repeats)
    print(json.dumps(origin() | {"seed": options.seed} | found, indent=2))
    return 1 if found.get("different") else 0


if __name__ == "__main__":
    sys.exit(main())
