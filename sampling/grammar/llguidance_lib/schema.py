"""JSON schemas for llguidance: what it enforces to the letter, written so that it reads them as they are read here.

It enforces more than a grammar can be written for (allOf, patternProperties, a pattern beside a length) and refuses by itself most
of what it cannot. What it lets through in silence is refused or rewritten here: words that it does not know, `lenient` in a
schema's own options, patterns that JavaScript reads otherwise, and names in escapes that are other names unescaped.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

from stepgraph.sampling.grammar.constraints.charset import SPELLABLE, charset, intersection
from stepgraph.sampling.grammar.constraints.pattern import regex_of
from stepgraph.sampling.grammar.constraints.unsupported import refuse, step
from stepgraph.sampling.grammar.xgrammar_lib.schema import ANNOTATIONS, MAX_DEPTH, SOVEREIGN, types_of

MAX_WHITESPACE = 32  # the longest run of blanks between JSON tokens under any_whitespace
FORMATS = frozenset("date-time date time duration email hostname ipv4 ipv6 uri uuid".split())
MAX_DIGITS = 15  # numbers go through floats of 64 bits
_TABLES = ("properties", "patternProperties", "$defs", "definitions")
_BRANCHES = ("prefixItems", "anyOf", "oneOf", "allOf")
_CHILDREN = ("items", "additionalProperties")
_COUNTS = frozenset("minItems maxItems minProperties maxProperties minLength maxLength".split())
_BOUNDS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
_VALUES = frozenset("type required const enum $ref $anchor $id $schema pattern format uniqueItems".split())
_KNOWN = frozenset((*_TABLES, *_BRANCHES, *_CHILDREN, *_COUNTS, *_BOUNDS, *_VALUES))
_COMBINING = frozenset("$ref anyOf oneOf allOf".split())
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def llguidance_schema(schema: Any, any_whitespace: bool) -> str:
    """JSON of the schema with the library's options in it; RefusedError where it would not be enforced.

    Objects are closed unless they say otherwise, as in the grammars that are written here. Where the schema combines schemas
    that each see a part of an object, closing one part would forbid the other: then they are open, as JSON Schema has it.
    """
    written = _written(schema, "#", 0, closed=not _combines(schema))
    # Without "u": an additional key written in escapes may be a declared one when read.
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
    beside = {key for key in node if key not in ANNOTATIONS and not key.startswith("x-")} - applied
    # Of oneOf too: closed, or with a type inferred, a branch may look apart from another one and not be.
    several = any(isinstance(node.get(word), list) and len(node[word]) > 1 for word in ("allOf", "oneOf"))
    below = [node[word] for word in (*_BRANCHES, *_CHILDREN) if word in node]
    below += [child for word in _TABLES if isinstance(node.get(word), dict) for child in node[word].values()]
    return several or len(applied) > 1 or bool(applied and beside) or any(map(_combines, below))


def _written(node: Any, where: str, depth: int, closed: bool) -> Any:
    if depth > MAX_DEPTH:
        refuse(where, "nesting", f"got more than {MAX_DEPTH} levels, want fewer")
    if isinstance(node, bool):
        return node
    if not isinstance(node, dict):
        refuse(where, "schema", f"got {json.dumps(node)[:40]}, want an object, true or false")
    _check_words(node, where)
    _check_exclusive(node, where, closed)
    _check_least(node, where, closed)
    written: dict[str, Any] = {}
    for keyword, value in node.items():
        if keyword in _TABLES:
            written[keyword] = _table(keyword, value, where, depth, closed)
        elif keyword in _BRANCHES:
            written[keyword] = _list(keyword, value, where, depth, closed)
        elif keyword in _CHILDREN:
            written[keyword] = _written(value, step(where, keyword), depth + 1, closed)
        elif keyword == "pattern":
            written[keyword] = f"^(?:{_regex(value, where)})$"
        elif keyword in _COUNTS and isinstance(value, float) and value.is_integer():
            written[keyword] = int(value)
        elif keyword in _KNOWN - {"uniqueItems", "$schema"}:
            written[keyword] = value
    if closed and not any(word in node for word in SOVEREIGN):
        _close(written, node, where)
    return written


def _list(keyword: str, value: Any, where: str, depth: int, closed: bool) -> list[Any]:
    if not isinstance(value, list):
        refuse(where, keyword, f"got {json.dumps(value)[:40]}, want a list of schemas")
    return [_written(child, step(where, keyword, index), depth + 1, closed) for index, child in enumerate(value)]


def _check_words(node: dict[str, Any], where: str) -> None:
    for keyword in sorted(node):
        if keyword not in _KNOWN and keyword not in ANNOTATIONS and not keyword.startswith("x-"):
            refuse(where, keyword, "is not enforced; remove it or express it otherwise")
    for keyword in ("const", "enum", *sorted(_BOUNDS)):
        if reason := _inexact(node.get(keyword)):
            refuse(where, keyword, reason)
    if node.get("uniqueItems", False) is not False:
        refuse(where, "uniqueItems", "is not enforced")
    if "format" in node and node["format"] not in FORMATS:
        refuse(where, "format", f"{json.dumps(node['format'])[:40]} is not enforced; want one of {', '.join(sorted(FORMATS))}")
    if node.get("$schema", _DIALECT).rstrip("#") != _DIALECT:
        refuse(where, "$schema", f"got {json.dumps(node['$schema'])[:60]}, want {_DIALECT}")


def _check_exclusive(node: dict[str, Any], where: str, alone: bool) -> None:
    """An exclusive bound that is whole is taken for an inclusive one where the other bound is less than 1 away ("0" under 0 < x < 0.25).

    Where schemas are combined, the other bound may be anywhere."""
    bounds = {keyword: node[keyword] for keyword in _BOUNDS - {"multipleOf"} if isinstance(node.get(keyword), (int, float))}
    low = max((value for keyword, value in bounds.items() if keyword in ("minimum", "exclusiveMinimum")), default=-math.inf)
    high = min((value for keyword, value in bounds.items() if keyword in ("maximum", "exclusiveMaximum")), default=math.inf)
    for keyword, value in sorted(bounds.items()):
        whole = keyword.startswith("exclusive") and float(value).is_integer()
        if whole and node.get("type") != "integer" and not (alone and high - low >= 1):
            refuse(
                where, keyword, f"got {value}; enforced for integers, and for numbers with the other bound at least 1 away in one schema"
            )


def _check_least(node: dict[str, Any], where: str, alone: bool) -> None:
    """A key that is not declared may come twice, and counts twice."""
    least, required = node.get("minProperties", 0), node.get("required", [])
    declared_only = node.get("additionalProperties", not (alone and "properties" in node)) is False and "patternProperties" not in node
    most = (len(set(required)) if isinstance(required, list) and all(isinstance(name, str) for name in required) else 0) + 1
    if isinstance(least, (int, float)) and least > most and not declared_only:
        refuse(where, "minProperties", f"got {least}, want at most {most}: beside those required only one is sure not to come twice")


def _inexact(value: Any) -> str:
    """Why the library would enforce something near this constant or bound; empty where it is exact."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return next(filter(None, map(_inexact, value)), "")
    if isinstance(value, str):
        unspelled = next((char for char in value if not intersection(charset(char), SPELLABLE)), "")
        return unspelled and f"holds {unspelled!r}, which is left out where escapes by number are not allowed"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    exact = len(Decimal(repr(value)).normalize().as_tuple().digits) <= MAX_DIGITS
    return "" if exact else f"got {value}; exact for at most {MAX_DIGITS} digits"


def _close(written: dict[str, Any], node: dict[str, Any], where: str) -> None:
    """Say what goes without saying for `check_schema`: the type that the keywords mean, and no properties but those declared."""
    types = types_of(node, where)
    if types and "type" not in node:
        written["type"] = types[0]
    if "object" in types and "properties" in node:
        written.setdefault("additionalProperties", False)


def _table(keyword: str, value: Any, where: str, depth: int, closed: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(where, keyword, f"got {json.dumps(value)[:40]}, want an object")
    children = {name: _written(child, step(where, keyword, name), depth + 1, closed) for name, child in value.items()}
    if keyword != "patternProperties":
        return children
    return {_searching(name, where): child for name, child in children.items()}


def _regex(pattern: Any, where: str, keyword: str = "pattern") -> str:
    if not isinstance(pattern, str):
        refuse(where, keyword, f"got {json.dumps(pattern)[:40]}, want a string")
    try:
        return regex_of(pattern, keyword, in_json=True)
    except ValueError as error:
        refuse(where, keyword, str(error).removeprefix(f"{keyword}: "))


def _searching(pattern: str, where: str) -> str:
    """The pattern of a name, which may match anywhere in it unless it is anchored."""
    body = _regex(pattern, where, "patternProperties")
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    if "|" in pattern and (starts or ends):
        refuse(where, "patternProperties", f"got {pattern[:40]!r}, want anchors in a group, or no alternatives beside them")
    return f"^{'' if starts else '(?s:.*)'}(?:{body}){'' if ends else '(?s:.*)'}$"
