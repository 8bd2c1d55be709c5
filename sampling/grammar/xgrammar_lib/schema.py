"""Checks that xgrammar enforces a JSON schema exactly; for any other schema an error names the keyword.

The library accepts many keywords that it ignores, alone or in combination. A text that violates its schema is worse than an error,
so unsupported schemas are rejected here, before anything is compiled.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from stepgraph.sampling.fields import is_int
from stepgraph.sampling.grammar.constraints.pattern import MAX_REPEAT, pattern_to_ebnf
from stepgraph.sampling.grammar.constraints.schema import (
    BRANCHES,
    CHILDREN,
    DOMINANT,
    KEYWORDS,
    NOT_ENFORCED,
    asserted,
    check_formats,
    check_least_properties,
    check_node,
    rewritten,
    translated,
    types_of,
)
from stepgraph.sampling.grammar.constraints.unsupported import reject

MAX_OPTIONAL = 500  # compile time also grows with the optional properties of one object (2,000 take 17 s),
MAX_COUNTED = 100  # and much faster where their number is bounded
MAX_MULTIPLE = 1000
MAX_DECIMALS = 5  # narrower ranges of numbers accept the empty text
MAX_FRACTIONAL, MAX_WHOLE = 10**9, 10**15  # bounds with more digits are rounded
INT64 = range(-(2**63), 2**63)
COUNTS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))

# Enforced by shape: a 30th of February is a date. The library's two json-pointer formats allow raw quotes and backslashes.
FORMATS = frozenset("date-time date time duration email hostname ipv4 ipv6 uri uri-reference uuid uri-template".split())


def check_schema(schema: Any) -> None:
    """UnsupportedError where a schema is malformed or would not be enforced."""
    _check_node(schema, schema, "#", 0)


def _check_node(node: Any, root: Any, where: str, depth: int) -> None:
    check_node(node, where, depth, accepts_false=False)
    if node is True:
        return
    dominant = next((key for key in DOMINANT if key in node), None)
    types = [] if dominant else types_of(node, where)
    _check_keywords(node, dominant, types, where)

    def visit(keyword: str, child: Any, at: str) -> None:
        if child is not False or keyword not in CHILDREN:
            _check_node(child, root, at, depth + 1)

    rewritten(node, where, visit)
    if dominant == "$ref":
        _check_ref(node["$ref"], root, where)
    elif dominant in ("const", "enum"):
        _check_values(node, dominant, where)
    elif dominant == "oneOf":
        _check_alternatives(node["oneOf"], root, where)
    check_formats(node, where, FORMATS)
    for low, high in COUNTS:
        _check_counts(node, low, high, where)
    if "string" in types:
        _check_string(node, where)
    if "integer" in types or "number" in types:
        _check_number(node, types, where)
    if "object" in types:
        _check_object(node, where)


def _check_keywords(node: dict[str, Any], dominant: str | None, types: list[str], where: str) -> None:
    """Reject keywords that the types or another keyword make ineffective, and more branches than are enforced."""
    if dominant is not None:
        allowed = {dominant, "type"} if dominant in ("const", "enum") else {dominant}
        if hidden := sorted(asserted(node) - allowed):
            reject(where, hidden[0], f"is not enforced beside {dominant}; expected one or the other")
        if dominant in BRANCHES and not (isinstance(node[dominant], list) and node[dominant]):
            reject(where, dominant, f"got {json.dumps(node[dominant])[:40]}, expected a list of at least one schema")
        if dominant == "allOf" and len(node["allOf"]) > 1:
            reject(where, "allOf", f"got {len(node['allOf'])} schemas; only one is enforced, merge them")
        return
    for keyword in sorted(asserted(node) - {"type"}.union(*(KEYWORDS[name] for name in types))):
        if needed := [name for name, words in KEYWORDS.items() if keyword in words]:
            reject(where, keyword, f"needs type {' or '.join(needed)}, got {' or '.join(types) or 'no type'}")
        reject(where, keyword, NOT_ENFORCED)


def _check_string(node: dict[str, Any], where: str) -> None:
    lengths = {"minLength", "maxLength"} & node.keys()
    if "pattern" in node:
        translated(pattern_to_ebnf, node["pattern"], where)
    if len({"format", "pattern"} & node.keys()) + bool(lengths) > 1:
        hidden = sorted(lengths or {"format"})[0]
        reject(where, hidden, "is not enforced beside pattern or format; write the limit into one pattern")


def _check_number(node: dict[str, Any], types: list[str], where: str) -> None:
    for keyword in sorted(KEYWORDS["integer"] & node.keys()):
        value = node[keyword]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            reject(where, keyword, f"got {json.dumps(value)[:40]}, expected a number")
        if "integer" in types and (int(value) != value or int(value) not in INT64):
            reject(where, keyword, f"got {value}, expected a whole number of 64 bits for type integer")
        if "number" in types and keyword != "multipleOf" and not _is_exact(value):
            limits = f"at most {MAX_DECIMALS} decimals below {MAX_FRACTIONAL:.0e}, or a whole number below {MAX_WHOLE:.0e}"
            reject(where, keyword, f"got {value}; enforced for {limits}")
    if "multipleOf" in node:
        bounds = sorted({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} & node.keys())
        if "number" in types or node["multipleOf"] < 1:
            reject(where, "multipleOf", f"got {node['multipleOf']}; enforced for whole numbers >= 1 and type integer only")
        if node["multipleOf"] > MAX_MULTIPLE:
            reject(where, "multipleOf", f"got {node['multipleOf']}; enforced up to {MAX_MULTIPLE}")
        if bounds:
            reject(where, "multipleOf", f"is not enforced beside {bounds[0]}")


def _is_exact(value: float) -> bool:
    exact = Decimal(repr(value))
    if exact == exact.to_integral_value():
        return abs(exact) < MAX_WHOLE
    return abs(exact) < MAX_FRACTIONAL and exact == round(exact, MAX_DECIMALS)


def _check_counts(node: dict[str, Any], low: str, high: str, where: str) -> None:
    for keyword in (low, high):
        value = node.get(keyword, 0)
        if not is_int(value) or not 0 <= value <= MAX_REPEAT:
            reject(where, keyword, f"got {json.dumps(value)[:40]}, expected an integer in 0..{MAX_REPEAT}")
    if high in node and node.get(low, 0) > node[high]:
        reject(where, low, f"got {node[low]}, expected at most {high}, which is {node[high]}")


def _check_object(node: dict[str, Any], where: str) -> None:
    properties = node.get("properties", {})
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        reject(where, "required", f"got {json.dumps(required)[:40]}, expected a list of strings")
    if undeclared := [name for name in required if name not in properties]:
        reject(where, "required", f"{undeclared[0]!r} is not in properties, so it would not be enforced; declare it there")
    optional = len(properties.keys() - set(required))
    limit = MAX_COUNTED if {"minProperties", "maxProperties"} & node.keys() else MAX_OPTIONAL
    if optional > limit:
        reject(where, "properties", f"got {optional} that are not required, expected at most {limit}; require more of them")
    if node.get("additionalProperties", "properties" not in node) is False:
        return
    # The last one of equal keys counts, and it matches the same schema, so they matter only for minProperties. The grammar excludes the
    # declared names character by character.
    check_least_properties(node, where)
    if odd := [name for name in properties if not all(" " <= char <= "~" and char not in '"\\' for char in name)]:
        reject(
            where, "additionalProperties", f"is not enforced with the name {odd[0]!r}; expected false, or printable ASCII without quotes"
        )


def _check_ref(reference: Any, root: Any, where: str) -> None:
    seen = []
    node: Any = {"$ref": reference}
    while isinstance(node, dict) and "$ref" in node:
        reference = node["$ref"]
        if reference in seen:
            reject(where, "$ref", f"{reference!r} refers to itself and to nothing else")
        seen.append(reference)
        node = _target(reference, root)
        if not isinstance(node, dict) and node is not True:
            reject(where, "$ref", f"got {json.dumps(reference)[:60]}, expected '#', '#/$defs/...' or '#/definitions/...' of this schema")


def _target(reference: Any, root: Any) -> Any:
    if reference == "#":
        return root
    parts = reference.split("/") if isinstance(reference, str) else []
    if len(parts) != 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
        return None
    return root[parts[1]].get(parts[2]) if isinstance(root.get(parts[1]), dict) else None


def _resolved(node: Any, root: Any) -> Any:
    while isinstance(node, dict) and "$ref" in node:
        node = _target(node["$ref"], root)
    return node


def _check_values(node: dict[str, Any], keyword: str, where: str) -> None:
    values = [node["const"]] if keyword == "const" else node["enum"]
    if not isinstance(values, list) or not values:
        reject(where, keyword, f"got {json.dumps(values)[:40]}, expected a list of at least one value")
    types = types_of(node, where)
    for value in values:
        if types and not any(_is_of_type(value, name) for name in types):
            reject(where, keyword, f"{json.dumps(value)[:40]} is not of type {' or '.join(types)}, which would not be enforced beside it")
        if is_int(value) and value not in INT64:
            reject(where, keyword, f"{value} does not fit 64 bits and would be rounded")


def _is_of_type(value: Any, name: str) -> bool:
    if name == "integer":
        return is_int(value) or (isinstance(value, float) and value.is_integer())
    kinds = {"string": str, "number": (int, float), "array": list, "object": dict, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[name]) and (name == "boolean" or not isinstance(value, bool))  # type: ignore[arg-type]


def _check_alternatives(branches: list[Any], root: Any, where: str) -> None:
    followed = [_resolved(child, root) for child in branches]
    for index, left in enumerate(followed):
        if not all(_disjoint(left, right) for right in followed[index + 1 :]):
            reject(where, "oneOf", "is enforced as anyOf; expected branches that differ by type, const, or a required property's const")


def _disjoint(left: Any, right: Any) -> bool:
    """Whether two schemas share no value, as shown by their constants, their types, or a required property with different constants."""
    if left is True or right is True:
        return False
    ours, theirs = _constants(left), _constants(right)
    if ours and theirs:
        return not ours & theirs
    first, second = types_of(left, "oneOf"), types_of(right, "oneOf")
    # Only declared types count: a branch with an inferred type accepts values of other types too.
    if "type" in left and "type" in right and not _merged_numbers(first) & _merged_numbers(second):
        return True
    shared = set(left.get("required", [])) & set(right.get("required", []))
    return first == second == ["object"] and any(_differ(left["properties"][name], right["properties"][name]) for name in shared)


def _differ(left: Any, right: Any) -> bool:
    ours, theirs = _constants(left), _constants(right)
    return bool(ours and theirs and not ours & theirs)


def _merged_numbers(types: list[str]) -> set[str]:
    return {"number" if name == "integer" else name for name in types}


def _constants(node: Any) -> set[str]:
    if not isinstance(node, dict):
        return set()
    values = [node["const"]] if "const" in node else node.get("enum", [])
    return {json.dumps(json.loads(json.dumps(value), parse_float=_plain), sort_keys=True) for value in values}


def _plain(text: str) -> float:
    """JSON does not distinguish 1.0 from 1, nor -0.0 from 0."""
    return int(float(text)) if float(text).is_integer() else float(text)
