"""Compile cost: in this process, in the worker process, and from the cache.

Compiles are interleaved, so that other load affects both; medians of ratios are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import xgrammar

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, Vocabulary
from stepgraph.sampling.grammar.compile.limits import MIB
from tools.bench.grammar_documents import TEXTS
from tools.gpu.checks.stopwatch import ratio_of, wall_us

SMALL = Constraint.json_schema({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})


def worker_memory(compiler: GrammarCompiler) -> int:
    """Resident bytes of the compile worker; 0 if the system does not report them."""
    worker = compiler._idle_workers[-1]
    assert worker is not None
    try:
        with open(f"/proc/{worker.pid}/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
    except OSError:
        return 0


def measure(name: str, constraint: Constraint, turns: int, compilers: Mapping[str, GrammarCompiler], table: Vocabulary) -> dict[str, Any]:
    """One grammar, compiled each time with a new marker, then read from the cache."""
    seconds: dict[str, list[float]] = {"in_process": [], "worker": [], "cached": []}
    for turn in range(turns):
        requested = constraint.after(f"turn {turn}")  # a new cache key for the same grammar
        for index in ("in_process", "worker"):
            seconds[index].append(wall_us(partial(compilers[index].compile, requested)))
        seconds["cached"].append(wall_us(partial(compilers["worker"].compile, requested)))
    compiled = compilers["worker"].compile(replace(constraint, marker=None))
    figures = {
        "grammar": name,
        "backend": compiled.backend,
        "ms": {index: round(median(spent) / 1e3, 3) for index, spent in seconds.items()},
        "worker_over_in_process": ratio_of(seconds["worker"], seconds["in_process"])["p50"],
        "grammar_bytes": compiled.nbytes,
    }
    if compiled.backend == "xgrammar":
        grammar = compiled.grammar.grammar  # type: ignore[attr-defined]
        text = grammar.serialize_json()
        spent = [wall_us(lambda: xgrammar.CompiledGrammar.deserialize_json(text, table.tokenizer_info)) for _ in range(5)]
        figures |= {"travels_as_bytes": len(text), "deserialise_ms": round(median(spent) / 1e3, 3)}
    return figures


def report(table: Vocabulary, turns: int = 15) -> dict[str, Any]:
    compilers = {"in_process": GrammarCompiler(table, 1), "worker": GrammarCompiler(table, 1, isolation="process")}
    table.for_xgrammar  # noqa: B018  # cached: computed before either compiler is timed
    compilers["in_process"].compile(SMALL)
    start = wall_us(lambda: compilers["worker"].compile(SMALL))
    memory = worker_memory(compilers["worker"])
    grammars = [("two words", SMALL), *((name, constraint) for name, constraint, _ in TEXTS)]
    measured = [measure(name, constraint, turns, compilers, table) for name, constraint in grammars]
    compilers["worker"].close()
    return {"turns": turns, "worker_starts_in_ms": round(start / 1e3, 1), "worker_mib": round(memory / MIB), "grammars": measured}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the printed report."""
    yield f"compile: worker start and first schema in {found['worker_starts_in_ms']} ms; {found['worker_mib']} MiB"
    yield f"  {'ms':<24}{'in process':>12}{'worker':>10}{'cached':>10}{'worker/in process':>20}{'KiB':>8}{'KiB sent':>10}{'read in ms':>12}"
    for row in found["grammars"]:
        spent, sent = row["ms"], row.get("travels_as_bytes")
        yield (
            f"  {row['grammar']:<24}{spent['in_process']:>12}{spent['worker']:>10}{spent['cached']:>10}{row['worker_over_in_process']:>20}"
            f"{row['grammar_bytes'] // 1024:>8}{sent // 1024 if sent else '':>10}{row.get('deserialise_ms', ''):>12}"
        )
