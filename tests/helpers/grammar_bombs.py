"""Hostile constraints: deep, wide, endless, malformed. Compiling each must end, with an error that names the cause where it fails, and
must not disturb other requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stepgraph import Constraint


def nested(levels: int) -> str:
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


def chained(fork: dict[str, Any], length: int) -> dict[str, Any]:
    """Definitions that each refer to the next one, in the shape of `fork`."""
    text = json.dumps(fork)
    chain = {f"d{index}": json.loads(text.replace("NEXT", f"#/$defs/d{index + 1}")) for index in range(length)}
    return {"$defs": {**chain, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def one_of(parts: int, ways: int) -> dict[str, Any]:
    """As many combinations as `ways` to the power of `parts`."""
    branches = [{"type": "object", "properties": {"p": {"const": way}}, "required": ["p"]} for way in range(ways)]
    return {"allOf": [{"oneOf": json.loads(json.dumps(branches).replace('"p"', f'"p{part}"'))} for part in range(parts)]}


NEXT_REFERENCE = {"$ref": "NEXT"}
COUNTED = {"type": "array", "minItems": 1000, "maxItems": 100_000}
THIN, WIDE = range(500), range(3000)

SCHEMAS: dict[str, Callable[[], Any]] = {
    "10,000 levels": lambda: nested(10_000),
    "100 levels": lambda: nested(100),
    "60 levels": lambda: nested(60),
    "references without progress": lambda: {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "branches without progress": lambda: {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "an object that requires itself": lambda: {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "references with progress": lambda: {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    "exponential references in arrays": lambda: chained({"type": "array", "prefixItems": [NEXT_REFERENCE] * 8}, 40),
    "exponential references in branches": lambda: chained({"anyOf": [NEXT_REFERENCE] * 8}, 40),
    "a million combinations": lambda: one_of(10, 4),
    "7,000 values": lambda: {"enum": [f"value {index}" for index in range(7000)]},
    "10,000 numbers": lambda: {"enum": [*range(10_000)]},
    "500 optional properties": lambda: {"type": "object", "properties": {f"p{index}": {} for index in THIN}},
    "3,000 optional properties": lambda: {"type": "object", "properties": {f"p{index}": {} for index in WIDE}},
    "3,000 properties": lambda: {
        "type": "object",
        "properties": {f"p{index}": {} for index in WIDE},
        "required": [f"p{index}" for index in WIDE],
    },
    "a million items": lambda: {"type": "array", "minItems": 1_000_000},
    "nested counts": lambda: {**COUNTED, "items": {**COUNTED, "items": {**COUNTED, "items": {"type": "integer"}}}},
    "a pattern with nested counts": lambda: {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "a long string": lambda: {"type": "string", "maxLength": 100_000},
    "a bound above the range of floats": lambda: {"type": "integer", "exclusiveMaximum": 10**400},
    "a bound of 5,000 digits": lambda: {"type": "integer", "maximum": 10**5000},
    "an infinite bound": lambda: '{"type": "number", "minimum": 1e999}',
    "a NaN bound": lambda: {"type": "number", "minimum": float("nan")},
    "a negative count": lambda: {"type": "array", "minItems": -1},
    "a lone surrogate": lambda: {"const": "\ud800"},
    "a lone surrogate in a name": lambda: {"type": "object", "properties": {"\udfff": {}}},
    "100,000 characters": lambda: {"const": "x" * 100_000},
    "two million characters": lambda: '{"const": "' + "x" * 2_000_000 + '"}',
}
PATTERNS: dict[str, Callable[[], str]] = {
    "10,000 groups": lambda: "(" * 10_000 + "a" + ")" * 10_000,
    "45 groups": lambda: "(" * 45 + "a" + ")" * 45,
    "a million repetitions": lambda: "a{1,1000000}",
    "100,000 repetitions": lambda: "(ab|c){1,100000}",
    "nested counts": lambda: "((a{1,1000}){1,1000}){1,1000}",
    "catastrophic": lambda: "(a+a+)+b",
    "nested stars": lambda: "(((((a*)*)*)*)*)*b",
    "exponentially many states": lambda: "[ab]*a[ab]{40}",
    "100,000 characters": lambda: "abc[x-z]|" * 11_000 + "q",
    "50,000 optional letters": lambda: "a?" * 50_000,
    "30,000 searches": lambda: ".*x" * 30_000,
    "a lone surrogate": lambda: "\ud800",
    "a bound of 5,000 digits": lambda: "a{" + "9" * 5000 + "}",
}
GRAMMARS: dict[str, Callable[[], str]] = {
    "10,000 brackets": lambda: "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000,
    "a million repetitions": lambda: 'root ::= "a"{1,1000000}',
    "nested counts": lambda: 'root ::= (("a"{1,1000}){1,1000}){1,1000}',
    "a count above 64 bits": lambda: 'root ::= "a"{99999999999999999999}',
    "doubling rules": lambda: "root ::= r0\n" + "".join(f"r{index} ::= r{index + 1} r{index + 1}\n" for index in range(60)) + 'r60 ::= "a"',
    "left recursion": lambda: 'root ::= root "a" | root | "b"',
    "a rule that is itself": lambda: "root ::= root",
    "endless recursion": lambda: 'root ::= "a" root',
    "endless recursion after a letter": lambda: 'root ::= "x" | "b" endless\nendless ::= "c" endless',
    "doubling rules after a letter": lambda: (
        'root ::= "x" | "b" r0\n' + "".join(f"r{index} ::= r{index + 1} r{index + 1}\n" for index in range(60)) + 'r60 ::= "a"'
    ),
    "a cycle of rules": lambda: "root ::= a\na ::= b\nb ::= a",
    "a repeated empty text": lambda: 'root ::= (""*)* "a"',
    "29,000 optional letters": lambda: "root ::= " + "[a]?" * 29_000,
    "29,000 loops": lambda: "root ::= " + "[a]*" * 29_000,
    "4,500 rules": lambda: "root ::= r0\n" + "".join(f'r{index} ::= "a" r{index + 1}\n' for index in range(4500)) + 'r4500 ::= "b"\n',
    "a lone surrogate": lambda: 'root ::= "\ud800"',
}
LARKS: dict[str, Callable[[], str]] = {
    "10,000 brackets": lambda: "start: " + "(" * 10_000 + '"a"' + ")" * 10_000,
    "10,000 groups": lambda: "start: /" + "(" * 10_000 + "a" + ")" * 10_000 + "/",
    "10,000 complements": lambda: "start: T\nT: " + "~" * 10_000 + '"a"',
    "a million repetitions": lambda: 'start: T\nT: "a"{1,1000000}',
    "nested counts": lambda: 'start: ((t{1,1000}){1,1000}){1,1000}\nt: "a"',
    "intersections": lambda: "start: T\nT: " + " & ".join(f"/(?s:.*)[a-z]{{{index}}}x(?s:.*)/" for index in range(40)),
    "doubling rules": lambda: "start: r0\n" + "".join(f"r{index}: r{index + 1} r{index + 1}\n" for index in range(60)) + 'r60: "a"',
    "a cycle of rules": lambda: "start: a\na: b\nb: a",
    "a schema of 60 levels": lambda: f"start: %json {nested(60)}",
    "a lone surrogate": lambda: 'start: "\ud800"',
}
TAG = {"begin": "<a>", "schema": {}, "end": ""}
OTHERS: dict[str, Callable[[], Constraint]] = {
    "7,000 choices": lambda: Constraint.choice([f"choice {index}" for index in range(7000)]),
    "a lone surrogate in a choice": lambda: Constraint.choice(["\udc00"]),
    "a marker id above all tokens": lambda: Constraint.json_object().after((10**9,)),
    "a negative marker id": lambda: Constraint.json_object().after((-1,)),
    "a NaN marker id": lambda: Constraint.json_object().after((float("nan"),)),  # type: ignore[arg-type]
    "1,000 tags": lambda: Constraint.structural_tag(
        {"triggers": ["<"], "structures": [{**TAG, "begin": f"<t{index}>"} for index in range(1000)]}
    ),
}
BOMBS: dict[str, Callable[[], Constraint]] = {
    **{f"schema: {name}": lambda build=build: Constraint.json_schema(build()) for name, build in SCHEMAS.items()},  # type: ignore[misc]
    **{
        f"schema, llguidance: {name}": lambda build=build: Constraint.json_schema(build(), backend="llguidance")  # type: ignore[misc]
        for name, build in SCHEMAS.items()
    },
    **{f"pattern: {name}": lambda build=build: Constraint.regex(build()) for name, build in PATTERNS.items()},  # type: ignore[misc]
    **{
        f"pattern, llguidance: {name}": lambda build=build: Constraint.regex(build(), "llguidance")  # type: ignore[misc]
        for name, build in PATTERNS.items()
    },
    **{f"ebnf: {name}": lambda build=build: Constraint.ebnf(build()) for name, build in GRAMMARS.items()},  # type: ignore[misc]
    **{f"lark: {name}": lambda build=build: Constraint.lark(build()) for name, build in LARKS.items()},  # type: ignore[misc]
    **OTHERS,
}
