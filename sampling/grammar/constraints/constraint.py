"""Constraints on a generated text: a JSON schema, any JSON object, a regular expression, a choice, a grammar, structural tags."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any, Literal, get_args

from stepgraph.sampling.fields import (
    Check,
    check_fields,
    check_value,
    clip_name,
    clip_repr,
    instance_of,
    is_int,
    one_of,
    optional,
    parse_exact_json,
    whole,
)
from stepgraph.sampling.grammar.constraints.structural_tag import checked_tag
from stepgraph.sampling.grammar.schema.options import ObjectsMode, Options, PropertyOrder, UnknownMode

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag"]
BackendChoice = Literal["auto", "automaton", "xgrammar", "llguidance"]

MAX_PAYLOAD_CHARS = 1_000_000
MAX_MARKER = 1000  # characters or ids
MAX_MARKER_LIMIT = (1 << 31) - 2  # tokens
MAX_JSON_CHARS = 1_000_000  # of JSON text, before its blanks are removed
_DECIMAL = secrets.token_hex(16)  # begins the string that represents a Decimal, which json cannot write; no other text contains it

_FORMATS = {  # the fields of response_format by its type
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "triggers", "structures"},
}
_STRING = instance_of(str, "a string")
_GRAMMAR = Check(lambda value: isinstance(value, str) and bool(value.strip()) and "\0" not in value, "a non-blank string without NUL")
_RULE_NAME = Check(lambda value: isinstance(value, str) and bool(re.fullmatch(r"[\w.-]+", value, re.ASCII)), "the name of a rule")
_FIELD_CHECKS = {
    "kind": one_of(get_args(ConstraintKind)),
    "backend": one_of(get_args(BackendChoice)),
    "marker_limit": optional(whole(1, MAX_MARKER_LIMIT)),
    "objects": one_of(get_args(ObjectsMode)),
    "unknown_keywords": one_of(get_args(UnknownMode)),
    "unknown_formats": one_of(get_args(UnknownMode)),
    "property_order": one_of(get_args(PropertyOrder)),
}
_NON_EMPTY = Check(lambda value: isinstance(value, str) and bool(value), "a non-empty string")
_JSON_SCHEMA_FIELDS = {  # the fields of its json_schema
    "name": _NON_EMPTY,
    "description": optional(_STRING),
    "strict": Check(lambda value: value is None or isinstance(value, bool), "true, false or null"),
    "schema": instance_of(dict, "a JSON schema"),
}


@dataclass(frozen=True)
class Constraint:
    """Created by the constructors below; `payload` is the canonical text of the constraint, which is the key of the compile cache.

    `any_whitespace` allows white space between JSON tokens, up to a limit per run. It is off by default: a model may emit nothing but
    white space until the request ends. `marker` is described at `after`, `objects` and the fields after it at `json_schema`.
    """

    kind: ConstraintKind
    payload: str
    any_whitespace: bool = False
    backend: BackendChoice = "auto"
    marker: str | tuple[int, ...] | None = None
    marker_limit: int | None = None
    objects: ObjectsMode = "closed"
    unknown_keywords: UnknownMode = "annotation"
    unknown_formats: UnknownMode = "annotation"
    property_order: PropertyOrder = "declared"
    approximate: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _FIELD_CHECKS)
        if not isinstance(self.payload, str):
            raise ValueError(f"Constraint.payload: got {type(self.payload).__name__}, expected str")
        if len(self.payload) > MAX_PAYLOAD_CHARS:
            raise ValueError(f"Constraint.payload of {self.kind}: got {len(self.payload)} characters, expected at most {MAX_PAYLOAD_CHARS}")
        _check_surrogates(f"Constraint.payload of {self.kind}", self.payload)
        if self.any_whitespace and self.kind not in ("json_schema", "json_object", "structural_tag"):
            raise ValueError(f"Constraint.any_whitespace: got True for {self.kind}, expected False: for kinds with JSON only")
        for option in fields(Options)[1:]:  # except any_whitespace, which other kinds have too
            value, default = getattr(self, option.name), option.default
            if value != default and self.kind != "json_schema":
                raise ValueError(f"Constraint.{option.name}: got {value} for {self.kind}, expected {default}: for json_schema only")
        is_token_ids = isinstance(self.marker, tuple) and all(is_int(token_id) and token_id >= 0 for token_id in self.marker)
        if self.marker is not None and (not (is_token_ids or isinstance(self.marker, str)) or not self.marker):
            raise ValueError(f"Constraint.marker: got {clip_repr(self.marker)}, expected a text or token ids, at least one")
        if len(self.marker or ()) > MAX_MARKER:
            raise ValueError(f"Constraint.marker: got {len(self.marker or ())} characters or ids, expected at most {MAX_MARKER}")
        if isinstance(self.marker, str):
            _check_surrogates("Constraint.marker", self.marker)
        if self.marker_limit is not None and self.marker is None:
            raise ValueError(f"Constraint.marker_limit: got {self.marker_limit} without a marker, expected None")

    @property
    def schema_options(self) -> Options:
        """How the schemas of the constraint are read."""
        return Options(**{option.name: getattr(self, option.name) for option in fields(Options)})

    @classmethod
    def json_schema(
        cls,
        schema: dict[str, Any] | bool | str,
        any_whitespace: bool = False,
        backend: BackendChoice = "auto",
        *,
        objects: ObjectsMode = "closed",
        unknown_keywords: UnknownMode = "annotation",
        unknown_formats: UnknownMode = "annotation",
        property_order: PropertyOrder = "declared",
        approximate: bool = False,
    ) -> Constraint:
        """A JSON value that the schema accepts. The schema is read by the rules of its draft (3 to 2020-12): a keyword restricts only
        values of its type, and schemas for one value are combined exactly. Declared properties come first, in their order; among the
        others, a name may occur twice. `submit` rejects malformed keywords, patterns and references (in up to 3,000 schemas). The compile
        finds contradictions and unsupported combinations, which end the job with an error; `coverage` lists them, and what is narrowed.
        The options are described in docs/constrain.md."""
        if not isinstance(schema, (dict, bool, str)):
            raise ValueError(f"Constraint.json_schema: got {type(schema).__name__}, expected a dict, a bool or JSON text")
        canonical = _canonical_json(schema, "Constraint.json_schema")
        if canonical not in ("true", "false") and not canonical.startswith("{"):
            raise ValueError(f"Constraint.json_schema: got {canonical[:40]}, expected a JSON object, true or false")
        return cls(
            "json_schema",
            canonical,
            any_whitespace,
            backend,
            objects=objects,
            unknown_keywords=unknown_keywords,
            unknown_formats=unknown_formats,
            property_order=property_order,
            approximate=approximate,
        )

    @classmethod
    def json_object(cls, any_whitespace: bool = False, backend: BackendChoice = "auto") -> Constraint:
        """Any JSON object."""
        return cls("json_object", "", any_whitespace, backend)

    @classmethod
    def response_format(cls, value: dict[str, Any], any_whitespace: bool = False, backend: BackendChoice = "auto") -> Constraint | None:
        """OpenAI's `response_format`: text (no constraint: None), json_object, json_schema, and structural_tag as in other servers.
        `strict` has no effect: a schema that cannot be enforced is always an error."""
        name = "response_format"
        if not isinstance(value, dict):
            raise ValueError(f"{name}: got {type(value).__name__}, expected a dict with a type")
        kind: Any = value.get("type")
        check_value(f"{name}.type", kind, Check(lambda kind: isinstance(kind, str) and kind in _FORMATS, f"one of {', '.join(_FORMATS)}"))
        _check_no_other_fields(value, _FORMATS[kind], name)
        if kind == "text":
            return None
        if kind == "json_object":
            return cls.json_object(any_whitespace, backend)
        if kind == "structural_tag":
            return cls.structural_tag(value, any_whitespace, backend)
        inner: Any = value.get("json_schema")
        name += ".json_schema"
        check_value(name, inner, instance_of(dict, "an object with a name and a schema"))
        _check_no_other_fields(inner, _JSON_SCHEMA_FIELDS, name)
        for field, check in _JSON_SCHEMA_FIELDS.items():
            check_value(f"{name}.{field}", inner.get(field), check)
        return cls.json_schema(inner["schema"], any_whitespace, backend)

    @classmethod
    def regex(cls, pattern: str, backend: BackendChoice = "auto") -> Constraint:
        """A full match of the pattern, in the syntax of JavaScript without flags: `.` matches any character except a line end, `[^]` any
        character; `\\d` and `\\w` are ASCII, `\\s` is any white space. Anchors are allowed at the ends. These are errors: look-around,
        back-references, word boundaries, flags, and what other dialects read differently, such as `a{,3}` and `[[:alpha:]]`."""
        check_value("Constraint.regex.pattern", pattern, _STRING)
        return cls("regex", pattern, backend=backend)

    @classmethod
    def choice(cls, options: Sequence[str], backend: BackendChoice = "auto") -> Constraint:
        """Exactly one of the options."""
        if isinstance(options, str) or not isinstance(options, Sequence) or not options:
            raise ValueError(f"Constraint.choice: got {clip_repr(options)}, expected a sequence of at least one string")
        for index, option in enumerate(options):
            check_value(f"Constraint.choice[{index}]", option, _NON_EMPTY)
        return cls("choice", json.dumps(list(dict.fromkeys(options)), ensure_ascii=False), backend=backend)

    @classmethod
    def ebnf(cls, grammar: str, root: str = "root") -> Constraint:
        """A text of a grammar in the GBNF notation of llama.cpp: `root ::= "a" | "b" root`. Enforced by an automaton or xgrammar."""
        check_value("Constraint.ebnf.grammar", grammar, _GRAMMAR)
        check_value("Constraint.ebnf.root", root, _RULE_NAME)
        return cls("ebnf", json.dumps([root, grammar], ensure_ascii=False))

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """A text of a grammar in the Lark notation of llguidance: `start: "a" | "b" start`. Enforced by llguidance.

        These are errors: tokens by name or number; `stop=` and `max_tokens=`, which cannot be rolled back with drafts (`suffix=` can);
        and `~` not preceded by `&`, which allows bytes that are not text."""
        check_value("Constraint.lark.grammar", grammar, _GRAMMAR)
        return cls("lark", grammar)

    @classmethod
    def structural_tag(cls, tag: dict[str, Any], any_whitespace: bool = False, backend: BackendChoice = "auto") -> Constraint:
        """Free text in which each of the `triggers` must be followed by one of the `structures` that begin with it: its `begin`, a JSON
        value of its `schema`, its `end`. Triggers are text, not control tokens.

        separator, opening, closing: a list of structures instead of one: `opening`, structures with the `separator` between them,
        `closing`. Without `triggers` the text is one structure or list, or the structure `alternative`. A structure with `style: qwen_xml`
        writes each property of an object as `<parameter=NAME>`, value, `</parameter>`, each on its own line; strings are written without
        quotes and escapes."""
        name = "Constraint.structural_tag"
        return cls("structural_tag", _canonical_json(checked_tag(tag, name), name), any_whitespace, backend)

    def after(self, marker: str | Sequence[int], *, limit: int | None = None) -> Constraint:
        """The same constraint, beginning after the marker: `Constraint.json_object().after("</think>")`.

        Before the marker any text is allowed, but no stop token. A text marker is found in any tokenization, and no token extends past
        its end; token ids are for markers that are control tokens. `limit`: a number of tokens after which only the marker is legal."""
        try:
            ids: Any = marker if isinstance(marker, (str, bytes, Set, Mapping)) else tuple(marker)  # the last three are refused below
            return replace(self, marker=ids, marker_limit=limit)
        except TypeError:
            raise ValueError(f"Constraint.marker: got {clip_repr(marker)}, expected a text or token ids, at least one") from None


def _check_no_other_fields(value: dict[str, Any], known: Iterable[str], name: str) -> None:
    """ValueError for a field that would be ignored."""
    if unknown := [field for field, stated in value.items() if field not in known and stated is not None]:
        hint = "; a schema is json_schema.schema, of the type json_schema" if unknown[0] == "schema" else ""  # elsewhere of json_object too
        raise ValueError(f"{name}.{clip_name(unknown[0])}: got an unknown field, expected {', '.join(sorted(known))}{hint}")


def _canonical_json(value: Any, name: str) -> str:
    """Compact JSON of a value or of JSON text. Keys are not sorted, because the order of properties is part of a constraint."""
    chars = _min_json_chars(value)
    try:
        if chars <= MAX_JSON_CHARS:
            return _json_text(parse_exact_json(value if isinstance(value, str) else _json_text(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: got a schema that is not JSON ({error}), expected a JSON object") from error
    raise ValueError(f"{name}: got {chars} characters{'' if isinstance(value, str) else ' or more'}, expected at most {MAX_JSON_CHARS}")


def _json_text(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=_decimal_text)  # 1e999 is infinity
    return re.sub(f'"{_DECIMAL}([^"]*)"', r"\1", text)


def _decimal_text(value: Any) -> str:
    if isinstance(value, Decimal) and value.is_finite():
        return f"{_DECIMAL}{value}"
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _min_json_chars(value: Any) -> int:
    """A lower bound of the length as JSON text, counted up to MAX_JSON_CHARS: a small value with shared parts may be a long text."""
    if isinstance(value, str):
        return len(value)
    parts, chars = [value], 0
    while parts and chars <= MAX_JSON_CHARS:
        part = parts.pop()
        if isinstance(part, dict):
            parts += part.keys()
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
        chars += 1 + (len(part) if isinstance(part, (str, dict, list, tuple)) else part.bit_length() // 4 if isinstance(part, int) else 0)
    return chars


def _check_surrogates(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: got half of a surrogate pair at position {error.start}, expected text") from None
