"""What a caller may ask of a text: a JSON schema, any JSON object, a regular expression, one of several strings, a grammar.

A constraint is a value: it is hashed as the key of the compile cache. It does not know a vocabulary; whether a grammar
library can enforce it is found out by compiling it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf"]

MAX_PAYLOAD_CHARS = 120_000


@dataclass(frozen=True)
class Constraint:
    """Build it with one of the constructors; `payload` is their canonical text.

    `any_whitespace` lets a JSON text be laid out freely, within a bound on every run of blanks. It is off by default: a
    model that is free to emit blanks may do so forever.
    """

    kind: ConstraintKind
    payload: str
    any_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise ValueError(f"Constraint.kind: got {self.kind!r}, want one of {', '.join(get_args(ConstraintKind))}")
        if not isinstance(self.payload, str):
            raise ValueError(f"Constraint.payload: got {type(self.payload).__name__}, want str")
        if len(self.payload) > MAX_PAYLOAD_CHARS:
            raise ValueError(f"Constraint.payload of {self.kind}: got {len(self.payload)} characters, want at most {MAX_PAYLOAD_CHARS}")
        if not isinstance(self.any_whitespace, bool):
            raise ValueError(f"Constraint.any_whitespace: got {self.any_whitespace!r}, want a bool")
        if self.any_whitespace and self.kind not in ("json_schema", "json_object"):
            raise ValueError(f"Constraint.any_whitespace: got True for {self.kind}, want it for json_schema and json_object only")

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str, any_whitespace: bool = False) -> Constraint:
        """A JSON value that the schema accepts. Objects have their declared properties, in the declared order, and no others
        unless `additionalProperties` says so, and then a key may come twice among the additional ones. A string with a length
        or a pattern is written without escapes, so it holds no quotes, backslashes or newlines; a pattern is anchored at both
        ends, as in `regex`; a `format` is enforced by its shape (a 30th of February is a date). Keywords that cannot be
        enforced are refused by name when compiled."""
        if not isinstance(schema, (dict, str)):
            raise ValueError(f"Constraint.json_schema: got {type(schema).__name__}, want a dict or JSON text")
        try:
            # Property order is part of the constraint, so the keys are not sorted.
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
            parsed = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constants)
            canonical = json.dumps(parsed, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"Constraint.json_schema: got a schema that is not JSON ({error}), want a JSON object") from error
        if not isinstance(parsed, dict):
            raise ValueError(f"Constraint.json_schema: got {canonical[:40]}, want a JSON object")
        return cls("json_schema", canonical, any_whitespace)

    @classmethod
    def json_object(cls, any_whitespace: bool = False) -> Constraint:
        """Any JSON object."""
        return cls("json_object", "", any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that the pattern matches from end to end, read as JavaScript reads it without flags: `.` is anything but the
        end of a line (`[^]` is anything), so `[^]a]` is two items; `\\d` and `\\w` are ASCII, `\\s` is any white space. Anchors
        are welcome at the ends; look-around, back-references, word boundaries and flags are refused."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Constraint:
        """Exactly one of the options."""
        if isinstance(options, str) or not options:
            raise ValueError(f"Constraint.choice: got {options!r}, want a sequence of at least one string")
        for index, option in enumerate(options):
            if not isinstance(option, str) or not option:
                raise ValueError(f"Constraint.choice[{index}]: got {option!r}, want a string that is not empty")
        return cls("choice", json.dumps(list(dict.fromkeys(options))))

    @classmethod
    def ebnf(cls, grammar: str, root: str = "root") -> Constraint:
        """A text of the grammar, in the GBNF notation of llama.cpp: `root ::= "a" | "b" root`."""
        for name, value in (("grammar", grammar), ("root", root)):
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"Constraint.ebnf.{name}: got {value!r}, want a string that is not blank")
        return cls("ebnf", json.dumps([root, grammar]))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = {key for key in keys if keys.count(key) > 1} if len(set(keys)) < len(keys) else set()
    if repeated:
        raise ValueError(f"the key {min(repeated)!r} appears twice")
    return dict(pairs)


def _no_constants(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
