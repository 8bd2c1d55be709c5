"""Checks that llguidance enforces a JSON schema exactly, and rewrites it so that the library reads it as JSON Schema does.

It enforces more than xgrammar (allOf, patternProperties, a pattern together with a length) and rejects most of the rest itself. What
it silently ignores is rejected or rewritten here: unknown keywords, `lenient` in a schema's own options, patterns with another meaning
in JavaScript, and names with escapes that are equal to other names once unescaped.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

from stepgraph.sampling.grammar.constraints.charset import SPELLABLE, charset, intersection
from stepgraph.sampling.grammar.constraints.pattern import pattern_to_regex
from stepgraph.sampling.grammar.constraints.schema import (
    BRANCHES,
    CHILDREN,
    DOMINANT,
    MAX_WHITESPACE,
    NOT_ENFORCED,
    TABLES,
    asserted,
    check_formats,
    check_least_properties,
    check_node,
    rewritten,
    translated,
    types_of,
)
from stepgraph.sampling.grammar.constraints.unsupported import reject

FORMATS = frozenset("date-time date time duration email hostname ipv4 ipv6 uri uuid".split())
MAX_DIGITS = 15  # numbers are converted to 64-bit floats
_COUNTS = frozenset("minItems maxItems minProperties maxProperties minLength maxLength".split())
_BOUNDS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
_VALUES = frozenset("type required const enum $ref $anchor $id $schema pattern format uniqueItems".split())
_KNOWN = frozenset((*TABLES, *BRANCHES, *CHILDREN, *_COUNTS, *_BOUNDS, *_VALUES))
_KEPT = _KNOWN - {"uniqueItems", "$schema"}
_COMBINING = frozenset("$ref anyOf oneOf allOf".split())
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def llguidance_schema(schema: Any, any_whitespace: bool) -> str:
    """JSON of the schema with the library's options; UnsupportedError where it would not be enforced.

    Objects are closed by default, as for xgrammar. Where the schema combines schemas that each describe a part of an object, closing
    one part would forbid the others, so objects are open then, as in JSON Schema.
    """
    written = _written(schema, "#", 0, closed=not _combines(schema))
    # Without "u": an additional key written with escapes may equal a declared one.
    options: dict[str, Any] = {"item_separator": ", ", "key_separator": ": ", "json_allowed_escapes": 'nrbtf\\"', "lenient": False}
    options |= {"whitespace_flexible": False, "coerce_one_of": False}
    if any_whitespace:
        options |= {"item_separator": ",", "key_separator": ":", "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"}
        options["whitespace_flexible"] = True
    if not isinstance(written, dict):
        written = {"allOf": [written]}
    return json.dumps({**written, "$schema": _DIALECT, "x-guidance": options})


def _combines(node: Any) -> bool:
    """Whether somewhere in the schema several schemas apply to one value."""
    if isinstance(node, list):
        return any(_combines(child) for child in node)
    if not isinstance(node, dict):
        return False
    applied = _COMBINING & node.keys()
    beside = asserted(node) - applied
    # oneOf too: closing branches, or adding inferred types, may make them appear disjoint.
    several = any(isinstance(node.get(word), list) and len(node[word]) > 1 for word in ("allOf", "oneOf"))
    below = [node[word] for word in (*BRANCHES, *CHILDREN) if word in node]
    below += [child for word in TABLES if isinstance(node.get(word), dict) for child in node[word].values()]
    return several or len(applied) > 1 or bool(applied and beside) or any(map(_combines, below))


def _written(node: Any, where: str, depth: int, closed: bool) -> Any:
    check_node(node, where, depth, accepts_false=True)
    if isinstance(node, bool):
        return node
    _check_words(node, where)
    _check_exclusive(node, where, closed)
    declared_only = node.get("additionalProperties", not (closed and "properties" in node)) is False
    if not declared_only or "patternProperties" in node:
        check_least_properties(node, where)
    written = rewritten(node, where, lambda _, child, at: _written(child, at, depth + 1, closed))
    for keyword in node.keys() - _KEPT:
        del written[keyword]
    for keyword in _COUNTS & node.keys():
        if isinstance(node[keyword], float) and node[keyword].is_integer():
            written[keyword] = int(node[keyword])
    if "pattern" in node:
        written["pattern"] = f"^(?:{translated(pattern_to_regex, node['pattern'], where)})$"
    if "patternProperties" in node:
        written["patternProperties"] = {_name_pattern(name, where): child for name, child in written["patternProperties"].items()}
    if closed and not any(word in node for word in DOMINANT):
        _close(written, node, where)
    return written


def _check_words(node: dict[str, Any], where: str) -> None:
    for keyword in sorted(asserted(node) - _KNOWN):
        reject(where, keyword, NOT_ENFORCED)
    for keyword in ("const", "enum", *sorted(_BOUNDS)):
        if reason := _inexact(node.get(keyword)):
            reject(where, keyword, reason)
    check_formats(node, where, FORMATS)
    if node.get("$schema", _DIALECT).rstrip("#") != _DIALECT:
        reject(where, "$schema", f"got {json.dumps(node['$schema'])[:60]}, expected {_DIALECT}")


def _check_exclusive(node: dict[str, Any], where: str, alone: bool) -> None:
    """The library treats an integral exclusive bound as inclusive where the other bound is less than 1 away ("0" for 0 < x < 0.25).

    Where schemas are combined, the other bound may be in any of them."""
    bounds = {keyword: node[keyword] for keyword in _BOUNDS - {"multipleOf"} if isinstance(node.get(keyword), (int, float))}
    low = max((value for keyword, value in bounds.items() if keyword in ("minimum", "exclusiveMinimum")), default=-math.inf)
    high = min((value for keyword, value in bounds.items() if keyword in ("maximum", "exclusiveMaximum")), default=math.inf)
    for keyword, value in sorted(bounds.items()):
        whole = keyword.startswith("exclusive") and float(value).is_integer()
        if whole and node.get("type") != "integer" and not (alone and high - low >= 1):
            reject(
                where, keyword, f"got {value}; enforced for integers, and for numbers with the other bound at least 1 away in one schema"
            )


def _inexact(value: Any) -> str:
    """Why the library would not enforce this constant or bound exactly; empty where it does."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return next(filter(None, map(_inexact, value)), "")
    if isinstance(value, str):
        escaped = next((char for char in value if not intersection(charset(char), SPELLABLE)), "")
        return escaped and f"contains {escaped!r}, which needs a numeric escape"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    exact = len(Decimal(repr(value)).normalize().as_tuple().digits) <= MAX_DIGITS
    return "" if exact else f"got {value}; exact for at most {MAX_DIGITS} digits"


def _close(written: dict[str, Any], node: dict[str, Any], where: str) -> None:
    """Write out the defaults: the type that the keywords imply, and no undeclared properties."""
    types = types_of(node, where)
    if types and "type" not in node:
        written["type"] = types[0]
    if "object" in types and "properties" in node:
        written.setdefault("additionalProperties", False)


def _name_pattern(pattern: str, where: str) -> str:
    """The pattern of a property name, which matches anywhere in it unless anchored."""
    body = translated(pattern_to_regex, pattern, where, "patternProperties")
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    if "|" in pattern and (starts or ends):
        reject(where, "patternProperties", f"got {pattern[:40]!r}, expected anchors in a group, or no alternatives at the same level")
    return f"^{'' if starts else '(?s:.*)'}(?:{body}){'' if ends else '(?s:.*)'}$"
