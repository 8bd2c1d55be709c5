"""Compiles the JSON schemas of a folder to automata over 131,072 tokens: how many fit, their sizes, and the processor time.

    python tools/bench_automata.py path/to/schemas --schemas 2000 --compare 60

Schemas that the project refuses are counted and left out. With --compare, masks along random legal texts are compared with those of
xgrammar. Prints one JSON document; the exit code is 1 if a mask differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from stepgraph.sampling.grammar import Constraint, GrammarLimits, Vocabulary
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar
from stepgraph.sampling.grammar.automaton.library import TokenTable, UnfitError, limits_of
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarBuilder, parse

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

from tools.bench.grammar_documents import vocabulary

PERCENTILES = (50, 85, 95, 99, 100)


def different_masks(grammar: AutomatonGrammar, library: Any, positions: int, draw: Random) -> list[bytes]:
    """Texts after which the masks of the automaton and of xgrammar differ, of `positions` along random legal texts."""
    table, found = grammar.vocabulary, list[bytes]()
    rows = torch.zeros((2, table.mask_words), dtype=torch.int32)
    history, matchers = list[int](), (grammar.matcher(), library.matcher())
    for _ in range(positions):
        same = len({matcher.fill_next_token_bitmask(rows, index) for index, matcher in enumerate(matchers)}) == 1
        if not same or not torch.equal(rows[0], rows[1]):
            found.append(table.decode(history))
        legal = np.flatnonzero(np.unpackbits((rows[0] & rows[1]).numpy().view(np.uint8), bitorder="little"))
        token = int(draw.choice(legal)) if len(legal) else table.stop_token_ids[0]
        history.append(token)
        if token in table.stop_token_ids or not all([matcher.accept_token(token) for matcher in matchers]):
            history, matchers = [], (grammar.matcher(), library.matcher())
    return found


def summarise(values: Sequence[float]) -> dict[str, float]:
    return {f"p{at}": round(float(np.percentile(values, at)), 2) for at in PERCENTILES}


def measure(paths: Sequence[Path], compare: int, tokens: Vocabulary) -> dict[str, Any]:
    limits, draw = GrammarLimits(), Random(0)
    library, bounds = XGrammarBuilder(tokens, limits, 1), limits_of(asdict(limits))
    table = TokenTable(tokens.for_xgrammar, tokens.stop_token_ids, tokens.mask_words)
    figures: dict[str, list[float]] = {name: [] for name in ("parse_ms", "compile_ms", "kilobytes", "states")}
    unfit, different, compared, refused = dict[str, str](), list[str](), 0, 0
    for number, path in enumerate(paths):
        if sys.stderr.isatty():
            print(f"\r{number} of {len(paths)} schemas", end="", file=sys.stderr)
        try:
            constraint = Constraint.json_schema(json.loads(path.read_text(encoding="utf-8")))
            library.check(constraint)
            start = time.process_time()
            parsed = str(parse(constraint, limits).serialize_json())
        except (ValueError, RuntimeError):  # the library raises several types of its own
            refused += 1
            continue
        middle = time.process_time()
        try:
            grammar = AutomatonGrammar(table.compile(parsed, bounds), table, tokens)
        except UnfitError as error:
            unfit[str(path)] = str(error)
            continue
        sizes = (middle - start) * 1e3, (time.process_time() - middle) * 1e3, grammar.nbytes / 1024, grammar.states
        for name, value in zip(figures, sizes, strict=True):
            figures[name].append(value)
        if compare:
            texts = different_masks(grammar, library.build(constraint), compare, draw)
            compared += compare
            different += [f"{path}: {text!r}" for text in texts]
    summary = {
        name: {f"p{at}": round(float(np.percentile(values, at)), 2) for at in PERCENTILES} for name, values in figures.items() if values
    }
    counts = {"schemas": len(paths), "refused": refused, "compiled": len(figures["states"]), "unfit": unfit}
    return counts | summary | {"compared": compared, "different": different}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="schemas, one in each .json file, also in sub-folders")
    parser.add_argument("--schemas", type=int, default=1000, help="how many to choose at random (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: 0)")
    parser.add_argument("--compare", type=int, default=0, metavar="N", help="positions per schema to compare with xgrammar (default: 0)")
    options = parser.parse_args(arguments)
    paths = sorted(options.folder.rglob("*.json"))
    if not paths:
        parser.error(f"folder: got {options.folder}, expected a folder with .json files")
    torch.set_num_threads(1)
    tokens, name = vocabulary()
    found = measure(Random(options.seed).sample(paths, min(options.schemas, len(paths))), options.compare, tokens)
    print(json.dumps({"vocabulary": name, "seed": options.seed} | found, indent=2))
    return 1 if found["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
