"""Which parts of a schema contradict each other, where no value satisfies it: found by trying the schema with these parts only."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from stepgraph.sampling.grammar.constraints.unsupported import Unsupported
from stepgraph.sampling.grammar.schema.normalise import Normaliser
from stepgraph.sampling.grammar.schema.reader import KNOWN, pointer, shown, value_at

MAX_PARTS = 12  # keywords, and schemas of `allOf`, that are tried
MAX_CHARS = 20_000  # of a schema in which they are tried

_Part = tuple[str, int]  # a keyword, and the number of a schema of `allOf`


def contradiction(normaliser: Normaliser, has_value: Callable[[Any, str], bool]) -> Unsupported:
    """Why no value satisfies a schema. `has_value`: whether a value satisfies the part of a schema at a place."""
    root, conflicts = normaliser.document.root, normaliser.conflicts
    where = conflicts[0].at if conflicts else "#"
    places = conflicts[0].places if conflicts else ()
    if not places and len(json.dumps(root, default=float)) <= MAX_CHARS:
        parts = next((parts for parts in _candidates(value_at(root, where)) if not has_value(_with_only(root, where, parts), where)), ())
        places = tuple(pointer(where, word, index) if word == "allOf" else f"{where}: {word}" for word, index in parts)
    several = {0: "", 1: "", 2: "both ", 3: "all of "}[len(places)]
    named = " and ".join(filter(None, (", ".join(places[:-1]), *places[-1:]))) or "it"
    return Unsupported(where, "schema", f"got {shown(value_at(root, where))}: no value satisfies {several}{named}; change one of its parts")


def _candidates(schema: Any) -> Iterator[tuple[_Part, ...]]:
    if not isinstance(schema, dict):
        return
    words = [word for word in schema if word in KNOWN and word not in ("then", "else")]
    words.sort(key=lambda word: word != "type")  # pairs with the type first
    parts = [(word, index) for word in words for index in range(len(schema["allOf"]) if word == "allOf" else 1)]
    if len(parts) <= MAX_PARTS:
        yield from ((part,) for part in parts)
        yield from itertools.combinations(parts, 2)
        yield from itertools.combinations(parts, 3)


def _with_only(root: Any, where: str, parts: tuple[_Part, ...]) -> Any:
    """A schema that has, at a place, only these parts and its type."""
    schema, words = value_at(root, where), {word for word, _ in parts}
    typed = words | ({"type"} if len(parts) > 1 else set()) | ({"then", "else"} if "if" in words else set())
    kept = {word: value for word, value in schema.items() if word not in KNOWN or word in typed}
    if "allOf" in words:
        kept["allOf"] = [schema["allOf"][index] for word, index in parts if word == "allOf"]
    while where != "#":
        above, _, step = where.rpartition("/")
        outer = value_at(root, above)
        copied: Any = list(outer) if isinstance(outer, list) else dict(outer)
        copied[int(step) if isinstance(outer, list) else step.replace("~1", "/").replace("~0", "~")] = kept
        kept, where = copied, above
    return kept
