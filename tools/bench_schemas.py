"""Compiles JSON schemas and tries valid and invalid instances of each: how many pass, are refused and why, or are wrong.

    python tools/bench_schemas.py --data path/to/maskbench.jsonl.xz --out outcomes.jsonl

The data is a folder of .json files, or a file with one JSON object per line (.jsonl or .jsonl.xz), each with `schema` and `tests`, which
have `data` and `valid`. An instance counts as accepted if some order of its properties is. Grammars are compiled as by an engine: over
131,072 tokens, and in the worker process under the default limits. Compile times are processor time of this process and of the worker.
Mask times are processor time of one call from Python at each position of a valid instance: of the first call; of the same call repeated at
once, which shows the effect of interrupts; and the least of three first calls, which excludes them: for automata each of the three has a
copy of the tables that no call has read. With --out, a line per schema is appended as it is found, and a second run continues after the
schemas in the file. Prints one JSON document; the exit code is 1 if an invalid instance is accepted.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from stepgraph.sampling.grammar import Constraint, GrammarLimits, Vocabulary
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar
from stepgraph.sampling.grammar.compile.backends import Backends, Grammar
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from stepgraph.sampling.grammar.matchers.protocol import Matcher

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

from tools.bench.grammar_documents import encode, vocabulary

BYTES = Vocabulary([*(bytes([code]) for code in range(256)), b""], stop_token_ids=[256])
MAX_MASKS = 200  # measured masks of one schema
MASK_TIMES = ("first", "again at once", "least of three")
MAX_TRIED = 200  # properties written per instance in the search for an order
PASS, REFUSED, VALID_REJECTED, INVALID_ACCEPTED = "pass", "refused", "valid rejected", "invalid accepted"
_OLD_DRAFT = re.compile(r'"\$schema": "[^"]*draft-0[34]')
_NAMES = re.compile(r"'[^']*'|\"[^\"]*\"|#[^ :]*|\d+")


def read_entries(data: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """The name, the schema and the tests of each entry."""
    if data.is_dir():
        lines = ((str(path.relative_to(data)), path.read_text(encoding="utf-8")) for path in sorted(data.rglob("*.json")))
    else:
        with (lzma.open if data.suffix == ".xz" else open)(data, "rt", encoding="utf-8") as file:
            lines = enumerate(file.read().rstrip("\n").split("\n"), 1)  # type: ignore[assignment]
    for where, text in lines:
        entry = json.loads(text)
        yield entry.get("name", str(where)), entry["schema"], entry.get("tests", [])


class PropertyOrders:
    """Texts of instances with properties in the orders that a schema declares, one of which a grammar usually requires."""

    def __init__(self, schema: Any) -> None:
        self._lists = list(dict.fromkeys(tuple(names) for names in self._declared_orders(schema)))
        ranks = dict.fromkeys(name for names in self._lists for name in names)
        self._ranks = {name: rank for rank, name in enumerate(ranks)}

    def _declared_orders(self, schema: Any) -> Iterator[Sequence[str]]:
        if isinstance(schema, dict):
            for keyword in ("properties", "required"):
                names = schema.get(keyword)
                if isinstance(names, dict) or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
                    yield list(names)
            for child in schema.values():
                yield from self._declared_orders(child)
        elif isinstance(schema, list):
            for child in schema:
                yield from self._declared_orders(child)

    def texts(self, value: Any) -> list[str]:
        found = [json.dumps(ordered, ensure_ascii=False) for ordered in (self._best(value), self.ranked(value), value)]
        return list(dict.fromkeys(found))

    def ranked(self, value: Any) -> Any:
        """The value with the properties of all objects in one order."""
        if isinstance(value, list):
            return [self.ranked(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {name: self.ranked(value[name]) for name in sorted(value, key=lambda name: self._ranks.get(name, len(self._ranks)))}

    def _best(self, value: Any) -> Any:
        """The value with each object in the order of the declared list that has most of its names."""
        if isinstance(value, list):
            return [self._best(item) for item in value]
        if not isinstance(value, dict):
            return value
        names = max(self._lists, key=lambda names: (len(value.keys() & set(names)), -len(names)), default=())
        known = [name for name in names if name in value]
        return {name: self._best(value[name]) for name in (*known, *(name for name in value if name not in set(known)))}


class Tokens:
    """A vocabulary in which each byte has a token."""

    def __init__(self, table: Vocabulary) -> None:
        self.table, self.stop = table, table.stop_token_ids[0]
        self.ids = {token: index for index, token in enumerate(table.tokens) if token and index not in table.non_text_ids}
        self.bytes = [self.ids[bytes([code])] for code in range(256)]
        self.mask = torch.zeros(1, table.mask_words, dtype=torch.int32)

    def mask_micros(self, grammars: Sequence[Grammar], text: str) -> list[tuple[float, ...]]:
        """The times of `MASK_TIMES` at each position of a text. A walk ends early where the library exceeds a time limit; only
        positions that all walks reach count."""
        tokens = [*encode(text, self.ids), self.stop]
        walks = [self._walk(grammar, tokens) for grammar in grammars]
        return [(calls[0][0], calls[0][1], min(first for first, _ in calls)) for calls in zip(*walks, strict=False)]

    def _walk(self, grammar: Grammar, tokens: Sequence[int]) -> list[tuple[float, float]]:
        matcher, found = grammar.matcher(), list[tuple[float, float]]()
        for token in tokens:
            found.append((self._micros(matcher), self._micros(matcher)))
            if len(found) == MAX_MASKS or not matcher.accept_token(token):
                break
        return found

    def _micros(self, matcher: Matcher) -> float:
        start = time.thread_time()
        matcher.fill_next_token_bitmask(self.mask, 0)
        return round((time.thread_time() - start) * 1e6, 2)


def copies(grammar: Grammar, count: int) -> list[Grammar]:
    """An automaton `count` times, each with a copy of its tables; a grammar of another library `count` times, not copied."""
    if not isinstance(grammar, AutomatonGrammar):
        return [grammar] * count
    return [replace(grammar, image=grammar.image.copy()) for _ in range(count)]


class OrderSearch:
    """Looks for an order of properties in which a grammar accepts a value: combined schemas have an order of their own."""

    def __init__(self, grammar: Grammar, tokens: Tokens, has_whole_floats: bool = True) -> None:
        """`has_whole_floats`: 1.0 is an integer, which it is not in drafts 3 and 4."""
        self._matcher, self._tokens, self._whole, self._num_tried = grammar.matcher(), tokens, has_whole_floats, 0
        self.text = bytearray()

    def is_accepted(self, value: Any) -> bool:
        return self._accept_value(value) and self._matcher.accept_token(self._tokens.stop)

    def _accept_text(self, text: str) -> bool:
        data = text.encode("utf-8", "surrogatepass")
        for count, byte in enumerate(data):
            if not self._matcher.accept_token(self._tokens.bytes[byte]):
                self._matcher.rollback(count)
                return False
        self.text += data
        return True

    def _roll_back_to(self, length: int) -> None:
        self._matcher.rollback(len(self.text) - length)
        del self.text[length:]

    def _accept_value(self, value: Any) -> bool:
        """Append the text of a value; if no order is found, nothing."""
        start = len(self.text)
        if isinstance(value, dict):
            found = self._accept_text("{") and self._accept_members(value, "")
        elif isinstance(value, list):
            parts = (self._accept_text(", "[: 2 * bool(index)]) and self._accept_value(item) for index, item in enumerate(value))
            found = self._accept_text("[") and all(parts) and self._accept_text("]")
        else:
            found = self._accept_text(json.dumps(value, ensure_ascii=False))
            found = found or (self._whole and isinstance(value, float) and value.is_integer() and self._accept_text(str(int(value))))
        if not found:
            self._roll_back_to(start)
        return found

    def _accept_members(self, rest: dict[str, Any], comma: str) -> bool:
        if not rest:
            return self._accept_text("}")
        start, possible = len(self.text), self._possible(rest, comma)
        for name in possible:
            self._num_tried += 1
            if self._num_tried > MAX_TRIED:
                return False
            others = {other: value for other, value in rest.items() if other != name}
            # A name that can be written before this property must also be possible after it.
            if (
                self._accept_text(f"{comma}{_key(name)}")
                and self._accept_value(rest[name])
                and others.keys() & possible <= set(self._possible(others, ", "))
                and self._accept_members(others, ", ")
            ):
                return True
            self._roll_back_to(start)
        return False

    def _possible(self, names: Iterable[str], comma: str) -> list[str]:
        found, start = list[str](), len(self.text)
        for name in names:
            if self._accept_text(f"{comma}{_key(name)}"):
                found.append(name)
                self._roll_back_to(start)
        return found


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False) + ": "


def accepts(grammar: Grammar, text: str, tokens: Tokens) -> bool:
    matcher, data = grammar.matcher(), text.encode("utf-8", "surrogatepass")
    return all(matcher.accept_token(tokens.bytes[byte]) for byte in data) and matcher.accept_token(tokens.stop)


class Compiler:
    """Compiles as an engine does, and measures the processor time of this process and of the worker."""

    def __init__(self, table: Vocabulary, backend: Any) -> None:
        self._backends = Backends(table, backend, GrammarLimits(), max_threads=1)
        self._worker = CompileWorker(table, GrammarLimits(), max_threads=1)
        self._backends.build(Constraint.json_schema({}), self._worker)  # starts the worker

    def build(self, constraint: Constraint) -> tuple[Grammar, str, float]:
        """The grammar, its library, and the seconds."""
        start, before, pid = time.process_time(), self._worker_seconds(), self._worker.pid
        grammar, backend, _ = self._backends.build(constraint, self._worker)
        spent = self._worker_seconds() - (before if self._worker.pid == pid else 0.0)
        return grammar, backend, time.process_time() - start + spent

    def _worker_seconds(self) -> float:
        """The processor time of the worker so far; 0 while there is none."""
        return time.clock_gettime(~self._worker.pid << 3 | 2) if self._worker.pid else 0.0  # the clock id that clock_getcpuclockid returns


def outcome(schema: Any, tests: Sequence[dict[str, Any]], compiler: Compiler, tokens: Tokens, options: dict[str, Any]) -> dict[str, Any]:
    try:
        grammar, backend, seconds = compiler.build(Constraint.json_schema(schema, **options))
    except ValueError as error:
        return {"outcome": REFUSED, "reason": str(error)}
    found: dict[str, Any] = {"backend": backend, "seconds": seconds, "mask_us": [], "wrong": []}
    unread = copies(grammar, 3)
    orders, has_whole_floats = PropertyOrders(schema), not _OLD_DRAFT.search(json.dumps(schema))
    for number, test in enumerate(tests):
        text = next((text for text in orders.texts(test["data"]) if accepts(grammar, text, tokens)), None)
        instance = OrderSearch(grammar, tokens, has_whole_floats)
        if text is None and instance.is_accepted(orders.ranked(test["data"])):
            text = instance.text.decode("utf-8", "surrogatepass")
        if (text is not None) != test["valid"]:
            found["wrong"].append([number, VALID_REJECTED if text is None else INVALID_ACCEPTED])
        elif text is not None and len(found["mask_us"]) < MAX_MASKS and text.isprintable():
            found["mask_us"] += tokens.mask_micros(unread, text)
    kinds = [kind for _, kind in found["wrong"]]
    return {"outcome": max(kinds, key=[VALID_REJECTED, INVALID_ACCEPTED].index) if kinds else PASS, **found}


def summary(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    counts = Counter(found["outcome"] for found in outcomes)
    reasons = Counter(_normalised_reason(found["reason"]) for found in outcomes if found["outcome"] == REFUSED)
    compiled = [found for found in outcomes if found["outcome"] != REFUSED]
    wrong = Counter(kind for found in outcomes for _, kind in found.get("wrong", ()))
    backends = Counter(found["backend"] for found in compiled)
    masks = {name: [times for found in compiled if found["backend"] == name for times in found["mask_us"]] for name in backends}
    all_times = [times for found in masks.values() for times in found]
    return {
        "schemas": len(outcomes),
        "counts": dict(counts.most_common()),
        "instances": dict(wrong),
        "backends": dict(backends),
        "compile_ms": _percentiles([found["seconds"] * 1e3 for found in compiled], (50, 95, 99, 100)),
        "masks": len(all_times),
        "mask_us": {
            name: {kind: _percentiles([times[at] for times in found], (50, 99, 99.9, 100)) for at, kind in enumerate(MASK_TIMES)}
            for name, found in {"all": all_times, **masks}.items()
            if found
        },
        "refused": dict(reasons.most_common(40)),
    }


def _percentiles(values: Sequence[float], shares: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": round(float(np.percentile(values or [0.0], share)), 1) for share in shares}


def _normalised_reason(message: str) -> str:
    """A message without places and values, so that equal reasons are counted together."""
    return _NAMES.sub("_", message.partition("cannot be compiled: ")[2] or message)[:160]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of .json files, or a .jsonl or .jsonl.xz file")
    parser.add_argument("--out", type=Path, help="a file to which each outcome is appended; its schemas are not compiled again")
    parser.add_argument("--backend", default="auto", help="the grammar library (default: auto)")
    parser.add_argument(
        "--objects", choices=["closed", "standard"], default="standard", help="see Constraint.json_schema (default: standard)"
    )
    parser.add_argument(
        "--vocabulary", choices=["large", "bytes"], default="large", help="131,072 tokens, or one for each byte (default: large)"
    )
    options = parser.parse_args(arguments)
    if not options.data.exists():
        parser.error(f"--data: got {options.data}, expected a folder or a file")
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out and options.out.exists() else []
    names = {found["name"] for found in known}
    table = BYTES if options.vocabulary == "bytes" else vocabulary()[0]
    compiler, tokens = Compiler(table, options.backend), Tokens(table)
    pending = [entry for entry in read_entries(options.data) if entry[0] not in names]
    for name, schema, tests in tqdm(pending, unit="schema", disable=not sys.stderr.isatty()):
        found = {"name": name, **outcome(schema, tests, compiler, tokens, {"objects": options.objects})}
        known.append(found)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    document = summary(known)
    print(json.dumps(document, indent=2))
    return 1 if document["instances"].get(INVALID_ACCEPTED) else 0


if __name__ == "__main__":
    sys.exit(main())
