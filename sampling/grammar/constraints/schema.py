"""The structure of JSON schemas, and the checks that are the same for both grammar libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stepgraph.sampling.grammar.constraints.unsupported import reject

MAX_DEPTH = 64  # compile time grows with a high power of the nesting depth
NOT_ENFORCED = "is not enforced; remove it or express it otherwise"
MAX_WHITESPACE = 32  # the longest run of blanks between JSON tokens under any_whitespace

ANNOTATIONS = frozenset("$schema $id $comment title description default examples deprecated readOnly writeOnly $defs definitions".split())
# Keywords with schemas as their value: by name, in a list, or one.
TABLES = ("properties", "patternProperties", "$defs", "definitions")
BRANCHES = ("prefixItems", "anyOf", "oneOf", "allOf")
CHILDREN = ("items", "additionalProperties")
# In the order in which xgrammar looks for them: the first one found hides all others.
DOMINANT = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
KEYWORDS = {
    "string": frozenset("minLength maxLength pattern format".split()),
    "integer": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "array": frozenset("items prefixItems minItems maxItems uniqueItems".split()),
    "object": frozenset("properties required additionalProperties minProperties maxProperties".split()),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}


def pointer(where: str, *names: str | int) -> str:
    """The JSON pointer to a child of `where`."""
    return "/".join([where, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])


def asserted(node: dict[str, Any]) -> set[str]:
    """The keywords of a schema that are not annotations."""
    return {key for key in node if key not in ANNOTATIONS and not key.startswith("x-")}


def rewritten(node: dict[str, Any], where: str, visit: Callable[[str, Any, str], Any]) -> dict[str, Any]:
    """A copy in which each schema directly inside this one is replaced by `visit(keyword, schema, pointer)`."""
    changed = dict(node)
    for keyword, value in node.items():
        if keyword in TABLES:
            if not isinstance(value, dict):
                reject(where, keyword, f"got {json.dumps(value)[:40]}, expected an object")
            changed[keyword] = {name: visit(keyword, child, pointer(where, keyword, name)) for name, child in value.items()}
        elif keyword in BRANCHES:
            if not isinstance(value, list):
                reject(where, keyword, f"got {json.dumps(value)[:40]}, expected a list of schemas")
            changed[keyword] = [visit(keyword, child, pointer(where, keyword, index)) for index, child in enumerate(value)]
        elif keyword in CHILDREN:
            changed[keyword] = visit(keyword, value, pointer(where, keyword))
    return changed


def types_of(node: dict[str, Any], where: str) -> list[str]:
    """The types that a schema names, or the one that its keywords imply; empty without either."""
    if "type" not in node:
        return [name for name in ("object", "array") if KEYWORDS[name] & node.keys()][:1]
    declared = node["type"] if isinstance(node["type"], list) else [node["type"]]
    if not declared or not all(isinstance(name, str) and name in KEYWORDS for name in declared):
        reject(where, "type", f"got {json.dumps(node['type'])[:60]}, expected one or several of {', '.join(KEYWORDS)}")
    return declared


def check_node(node: Any, where: str, depth: int, accepts_false: bool) -> None:
    """Reject what is no schema, and a depth above MAX_DEPTH."""
    if depth > MAX_DEPTH:
        reject(where, "nesting", f"got more than {MAX_DEPTH} levels, expected fewer")
    if not isinstance(node, dict) and node is not True and not (node is False and accepts_false):
        expected = "an object, true or false" if accepts_false else "an object or true"
        reject(where, "schema", f"got {json.dumps(node)[:40]}, expected {expected}")


def check_formats(node: dict[str, Any], where: str, formats: frozenset[str]) -> None:
    """Reject a format other than these, and unique items, which neither library enforces."""
    if node.get("uniqueItems", False) is not False:
        reject(where, "uniqueItems", "is not enforced")
    if "format" in node and node["format"] not in formats:
        reject(where, "format", f"{json.dumps(node['format'])[:40]} is not enforced; expected one of {', '.join(sorted(formats))}")


def check_least_properties(node: dict[str, Any], where: str) -> None:
    """For an object with undeclared properties: such a key may occur twice, and is counted twice."""
    least, required = node.get("minProperties", 0), node.get("required", [])
    most = (len(set(required)) if isinstance(required, list) and all(isinstance(name, str) for name in required) else 0) + 1
    if isinstance(least, (int, float)) and least > most:
        reject(where, "minProperties", f"got {least}, expected at most {most}: of the others only one is sure not to occur twice")


def translated(translate: Callable[..., str], pattern: Any, where: str, keyword: str = "pattern") -> str:
    """A pattern for the text inside a JSON string, translated by a function of pattern.py."""
    if not isinstance(pattern, str):
        reject(where, keyword, f"got {json.dumps(pattern)[:40]}, expected a string")
    try:
        return translate(pattern, keyword, in_json=True)
    except ValueError as error:
        reject(where, keyword, str(error).removeprefix(f"{keyword}: "))
