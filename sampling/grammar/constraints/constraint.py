"""What a caller may ask of a text: a JSON schema, any JSON object, a regular expression, one of several strings, a grammar, tags.

A constraint is a value: it is hashed as the key of the compile cache. It does not know a vocabulary; whether a grammar
library can enforce it is found out by compiling it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from stepgraph.sampling.fields import clip_repr, is_int
from stepgraph.sampling.grammar.constraints.response_format import checked_response_format
from stepgraph.sampling.grammar.constraints.structural_tag import checked_tag

if TYPE_CHECKING:
    from stepgraph.sampling.grammar.compile.coverage import Coverage
    from stepgraph.sampling.grammar.compile.limits import GrammarLimits

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag"]
BackendChoice = Literal["auto", "xgrammar", "llguidance"]

MAX_PAYLOAD_CHARS = 120_000
MAX_MARKER = 1000  # characters or ids
MAX_GIVEN_CHARS = 1_000_000  # of JSON text, before its blanks are taken out


def checked_backend(name: str, value: object) -> None:
    if not isinstance(value, str) or value not in get_args(BackendChoice):
        raise ValueError(f"{name}: got {clip_repr(value)}, want one of {', '.join(get_args(BackendChoice))}")


@dataclass(frozen=True)
class Constraint:
    """Build it with one of the constructors; `payload` is their canonical text.

    `any_whitespace` lets a JSON text be laid out freely, within a bound on every run of blanks. It is off by default: a
    model that is free to emit blanks may do so forever.

    `backend` names the grammar library. "auto" is xgrammar, and llguidance for what xgrammar does not enforce. `marker` is what
    the text must come to before the constraint begins; see `after`.
    """

    kind: ConstraintKind
    payload: str
    any_whitespace: bool = False
    backend: BackendChoice = "auto"
    marker: str | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in get_args(ConstraintKind):
            raise ValueError(f"Constraint.kind: got {clip_repr(self.kind)}, want one of {', '.join(get_args(ConstraintKind))}")
        if not isinstance(self.payload, str):
            raise ValueError(f"Constraint.payload: got {type(self.payload).__name__}, want str")
        if len(self.payload) > MAX_PAYLOAD_CHARS:
            raise ValueError(f"Constraint.payload of {self.kind}: got {len(self.payload)} characters, want at most {MAX_PAYLOAD_CHARS}")
        _check_text(f"Constraint.payload of {self.kind}", self.payload)
        if not isinstance(self.any_whitespace, bool):
            raise ValueError(f"Constraint.any_whitespace: got {clip_repr(self.any_whitespace)}, want a bool")
        if self.any_whitespace and self.kind not in ("json_schema", "json_object", "structural_tag"):
            raise ValueError(f"Constraint.any_whitespace: got True for {self.kind}, want it for constraints with JSON in them only")
        checked_backend("Constraint.backend", self.backend)
        of_ids = isinstance(self.marker, tuple) and all(is_int(token_id) and token_id >= 0 for token_id in self.marker)
        if self.marker is not None and (not (of_ids or isinstance(self.marker, str)) or not self.marker):
            raise ValueError(f"Constraint.marker: got {clip_repr(self.marker)}, want a text or token ids, at least one")
        if len(self.marker or ()) > MAX_MARKER:
            raise ValueError(f"Constraint.marker: got {len(self.marker or ())} characters or ids, want at most {MAX_MARKER}")
        if isinstance(self.marker, str):
            _check_text("Constraint.marker", self.marker)

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str, any_whitespace: bool = False, backend: BackendChoice = "auto") -> Constraint:
        """A JSON value that the schema accepts. Objects have their declared properties, in the declared order, and no others
        unless `additionalProperties` says so, and then a key may come twice among the additional ones. A string with a length
        or a pattern is written without escapes, so it holds no quotes, backslashes or newlines; a pattern is anchored at both
        ends, as in `regex`; a `format` is enforced by its shape (a 30th of February is a date). Where llguidance combines several
        schemas for one value, undeclared properties are allowed and strings may hold escapes. Keywords that neither library
        enforces are refused by name when compiled; `coverage` tells which."""
        if not isinstance(schema, (dict, str)):
            raise ValueError(f"Constraint.json_schema: got {type(schema).__name__}, want a dict or JSON text")
        canonical = _canonical(schema, "Constraint.json_schema")
        if not canonical.startswith("{"):
            raise ValueError(f"Constraint.json_schema: got {canonical[:40]}, want a JSON object")
        return cls("json_schema", canonical, any_whitespace, backend)

    @classmethod
    def json_object(cls, any_whitespace: bool = False, backend: BackendChoice = "auto") -> Constraint:
        """Any JSON object."""
        return cls("json_object", "", any_whitespace, backend)

    @classmethod
    def response_format(cls, value: dict[str, Any], any_whitespace: bool = False, backend: BackendChoice = "auto") -> Constraint | None:
        """OpenAI's `response_format`: text (no constraint: None), json_object, json_schema, and structural_tag as other servers
        have it. `strict` changes nothing: a schema is always enforced, or refused."""
        kind, inner = checked_response_format(value)
        if kind == "text":
            return None
        if kind == "json_object":
            return cls.json_object(any_whitespace, backend)
        return (cls.json_schema if kind == "json_schema" else cls.structural_tag)(inner, any_whitespace, backend)

    @classmethod
    def regex(cls, pattern: str, backend: BackendChoice = "auto") -> Constraint:
        """A text that the pattern matches from end to end, read as JavaScript reads it without flags: `.` is anything but the
        end of a line (`[^]` is anything), so `[^]a]` is two items; `\\d` and `\\w` are ASCII, `\\s` is any white space. Anchors
        are welcome at the ends; look-around, back-references, word boundaries and flags are refused."""
        return cls("regex", pattern, backend=backend)

    @classmethod
    def choice(cls, options: Sequence[str], backend: BackendChoice = "auto") -> Constraint:
        """Exactly one of the options."""
        if isinstance(options, str) or not isinstance(options, Sequence) or not options:
            raise ValueError(f"Constraint.choice: got {clip_repr(options)}, want a sequence of at least one string")
        for index, option in enumerate(options):
            if not isinstance(option, str) or not option:
                raise ValueError(f"Constraint.choice[{index}]: got {clip_repr(option)}, want a string that is not empty")
            _check_text(f"Constraint.choice[{index}]", option)
        return cls("choice", json.dumps(list(dict.fromkeys(options))), backend=backend)

    @classmethod
    def ebnf(cls, grammar: str, root: str = "root") -> Constraint:
        """A text of the grammar, in the GBNF notation of llama.cpp: `root ::= "a" | "b" root`. For xgrammar."""
        for name, value in (("grammar", grammar), ("root", root)):
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"Constraint.ebnf.{name}: got {clip_repr(value)}, want a string that is not blank")
            _check_text(f"Constraint.ebnf.{name}", value)
        return cls("ebnf", json.dumps([root, grammar]))

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """A text of the grammar, in the Lark notation of llguidance: `start: "a" | "b" start`. For llguidance.

        Refused are tokens by name or number, `stop=` and `max_tokens=`, which cannot be taken back with drafts (`suffix=` can),
        and `~` that does not stand behind `&`, as it allows bytes that are no text."""
        if not isinstance(grammar, str) or not grammar.strip():
            raise ValueError(f"Constraint.lark.grammar: got {clip_repr(grammar)}, want a string that is not blank")
        return cls("lark", grammar)

    @classmethod
    def structural_tag(cls, tag: dict[str, Any], any_whitespace: bool = False, backend: BackendChoice = "auto") -> Constraint:
        """Free text in which each of the `triggers` calls for one of the `structures` that begin with it: its `begin`, a JSON value
        of its `schema`, its `end`. Triggers are text; a control token is none."""
        name = "Constraint.structural_tag"
        return cls("structural_tag", _canonical(checked_tag(tag, name), name), any_whitespace, backend)

    def after(self, marker: str | Sequence[int]) -> Constraint:
        """The same constraint, from where the text has come to the marker: `Constraint.json_object().after("</think>")`.

        In front of it any text may stand, but no stop token. A text is found in whatever tokens it comes, and no token reaches
        beyond its end; ids are for markers that are control tokens. The grammar begins with the very next byte."""
        try:
            return replace(self, marker=marker if isinstance(marker, str) else tuple(marker))
        except TypeError:
            raise ValueError(f"Constraint.marker: got {clip_repr(marker)}, want a text or token ids, at least one") from None

    def coverage(self, limits: GrammarLimits | None = None) -> Coverage:
        """What each grammar library makes of this constraint, and which one would enforce it. Compiles it in a worker process that
        ends with the call, at the limits of any compile: seconds, and for each library twice `compile_seconds` at the most."""
        from stepgraph.sampling.grammar.compile.coverage import coverage  # builds grammars, and so needs what needs this module

        return coverage(self, limits)


def _canonical(value: Any, name: str) -> str:
    """JSON text of a value or of another text of it. Property order is part of a constraint, so the keys are not sorted."""
    chars = _least_chars(value)
    try:
        if chars <= MAX_GIVEN_CHARS:
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
            parsed = json.loads(text, object_pairs_hook=unique_keys, parse_constant=no_constants)
            _check_text("a string in it", json.dumps(parsed, ensure_ascii=False))
            return json.dumps(parsed, separators=(",", ":"), allow_nan=False)  # 1e999 was read as infinity
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: got a schema that is not JSON ({error}), want a JSON object") from error
    raise ValueError(f"{name}: got {chars} characters{'' if isinstance(value, str) else ' or more'}, want at most {MAX_GIVEN_CHARS}")


def _least_chars(value: Any) -> int:
    """Of a text; of JSON text, counted until there are too many: a small value that stands in many places is long as text."""
    if isinstance(value, str):
        return len(value)
    parts, chars = [value], 0
    while parts and chars <= MAX_GIVEN_CHARS:
        part = parts.pop()
        if isinstance(part, dict):
            parts += part.keys()
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
        chars += 1 + (len(part) if isinstance(part, (str, dict, list, tuple)) else part.bit_length() // 4 if isinstance(part, int) else 0)
    return chars


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: got half of a surrogate pair at position {error.start}, want text") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json: an object whose keys are all different."""
    if len(dict(pairs)) < len(pairs):
        repeated = min(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {clip_repr(repeated)} appears twice")
    return dict(pairs)


def no_constants(name: str) -> None:
    """For json: no NaN, no Infinity."""
    raise ValueError(f"{name} is not a JSON value")
