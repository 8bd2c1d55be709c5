"""The file lists of docs/architecture.md, traced on a small engine. `python -m tests.helpers.architecture --write` updates the document."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable

from stepgraph import Constraint, Engine, EngineConfig, Vocabulary
from stepgraph.graphs import GraphKey, run_eager
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from tests.helpers.documents import ROOT
from tests.helpers.file_trace import file_trace

PATH = ROOT / "docs" / "architecture.md"
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
PROMPT = list(range(1, 10))
VOCABULARY = Vocabulary.printable()


def make_engine() -> Engine:
    target = ToyTarget(VOCABULARY.logits_width)
    config = EngineConfig(
        max_rows=1, num_speculative_tokens=2, draft_length=2, max_length=128, prefill_chunk=4, rounds_in_flight=1, greedy_only=True
    )
    engine = Engine(target, ToyDraft(target, agreement=0.8), vocabulary=VOCABULARY, config=config)
    engine.capture()
    return engine


def traced(run: Callable[[], object], *, all_threads: bool = False) -> dict[str, list[str]]:
    """The functions by file, both in the order in which they are first entered."""
    with file_trace(all_threads=all_threads) as trace:
        trace.active = True
        run()
    calls = [call.split(":") for call in trace.functions]
    return {path: [name.split(".")[-1] for other, name in calls if other == path] for path in trace.files}


def prompt_files() -> dict[str, list[str]]:
    """From `submit` to the first prompt chunk; no round is launched."""
    with make_engine() as engine:

        def run() -> None:
            engine.submit(PROMPT, max_new_tokens=4)
            engine.step()

        return traced(run)


def first_token_files(constraint: Constraint | None) -> dict[str, list[str]]:
    with make_engine() as engine:

        def run() -> None:
            job = engine.submit(PROMPT, constraint=constraint, max_new_tokens=32)
            while not job.tokens:
                engine.step()

        return traced(run, all_threads=True)


def constraint_files() -> dict[str, list[str]]:
    """From `submit` to the first masked token: the files that a request without a constraint does not enter."""
    free = set(first_token_files(None))
    return {path: names for path, names in first_token_files(Constraint.json_schema(SCHEMA)).items() if path not in free}


def steady_engine() -> Engine:
    """An engine after the first rounds of one constrained request."""
    engine = make_engine()
    constraint = Constraint.regex("[a-z]{60,90}")
    engine.compile(constraint)
    job = engine.submit(PROMPT, constraint=constraint, max_new_tokens=100)
    while not job.tokens:
        engine.step()
    engine.step()
    return engine


def result_files() -> dict[str, list[str]]:
    """The host's part of a steady constrained round: launch, results, event."""
    with steady_engine() as engine:
        return traced(engine.step)


def draft_files() -> dict[str, list[str]]:
    """The device's part of a round, run eagerly: verify, mask, accept, draft."""
    with steady_engine() as engine:
        step = engine._graphs.step(GraphKey(rows=1, constrained=True, device=True))
        return traced(lambda: run_eager(step, engine.buffers))


LISTS = {"prompt id": prompt_files, "constraint": constraint_files, "draft token": draft_files, "result": result_files}


def purpose(path: str) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[^.]{3})[.:](?:\s|$)", " ".join(text.split()))[0]


def table(files: dict[str, list[str]]) -> str:
    rows = ["| | file | first calls there | purpose of the file |", "|---|---|---|---|"]
    for number, (path, names) in enumerate(files.items(), 1):
        calls = [f"`{name}`" for name in dict.fromkeys(names) if name.isidentifier() and not name.startswith("__")]
        rows.append(f"| {number} | [{path}](../{path}) | {', '.join(calls[:2])} | {purpose(path)} |")
    return "\n".join(rows)


def updated(text: str) -> str:
    """The document with its tables traced anew. Each table is between `<!-- NAME -->` and `<!-- end -->`."""
    for name, files in LISTS.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        assert end, f"{PATH}: no table {name!r}"
        text = before + begin + table(files()) + end + after
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="update docs/architecture.md; without it, exit with 1 if it is out of date")
    options = parser.parse_args()
    before = PATH.read_text(encoding="utf-8")
    after = updated(before)
    if options.write:
        PATH.write_text(after, encoding="utf-8")
    return 0 if options.write or before == after else 1


if __name__ == "__main__":
    sys.exit(main())
