"""A schema document, read by the rules of its draft: references, identifiers, and keywords, which are converted to draft 2020-12."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, NoReturn, TypeGuard
from urllib.parse import unquote, urljoin, urlsplit

from stepgraph.sampling.fields import Check, instance_of
from stepgraph.sampling.grammar.constraints.unsupported import Unsupported, UnsupportedError, reject
from stepgraph.sampling.grammar.schema import patterns
from stepgraph.sampling.grammar.schema.formats import FORMATS
from stepgraph.sampling.grammar.schema.options import OMITTABLE_KEYWORDS, Options

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
ANNOTATIONS = frozenset(
    "$schema $id id $anchor $dynamicAnchor $recursiveAnchor $comment $vocabulary title description default example examples deprecated"
    " readOnly readonly writeOnly $defs definitions"
    " nullable discriminator xml externalDocs contentEncoding contentMediaType contentSchema".split()
)
MAX_COUNT = 10**9
MAX_CHECKED_SCHEMAS = 3_000  # schemas of a document that `check_schema` reads
MAX_DEPTH = 400  # nesting of objects and lists of a schema
MAX_DIGITS = 400  # digits of a number without an exponent
MAX_CLIP_CHARS = 60  # characters of a value in a message
_ENCODER = json.JSONEncoder(default=float)
DRAFTS = {"3": 3, "4": 4, "6": 6, "7": 7, "2019-09": 8, "2020-12": 9}
_FIRST_DRAFT = {  # the first draft with a keyword that older schemas may contain as an annotation
    **dict.fromkeys(("multipleOf",), 4),
    **dict.fromkeys(("contains", "const", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("minContains", "maxContains"), 8),
    **dict.fromkeys(("prefixItems",), 9),
}
_LAST_DRAFT = dict.fromkeys(("divisibleBy", "disallow", "extends"), 3)
_DRAFT = re.compile(r"https?://json-schema\.org/draft[-/]0?(3|4|6|7|2019-09|2020-12)/(?:hyper-)?schema#?$")

NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
KEYWORDS = frozenset(
    "$ref $dynamicRef $recursiveRef additionalItems additionalProperties allOf anyOf const contains dependencies dependentRequired"
    " dependentSchemas disallow divisibleBy else enum exclusiveMaximum exclusiveMinimum extends format if items maxContains maxItems"
    " maxLength maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties"
    " prefixItems properties propertyNames required then type unevaluatedItems unevaluatedProperties uniqueItems".split()
)

# Keywords whose values are schemas: a dict (_SCHEMA_DICTS), a list (_SCHEMA_LISTS), or one schema (_SINGLE_SCHEMAS).
_SCHEMA_DICTS = frozenset("properties patternProperties dependencies dependentRequired dependentSchemas".split())
_SCHEMA_LISTS = frozenset("allOf anyOf oneOf prefixItems items extends type disallow".split())
_KEYWORDS_WITH_NAMES = frozenset("dependencies dependentRequired type disallow".split())  # their values may also be names
_TABLES = _SCHEMA_DICTS | {"definitions", "$defs"}
_CONDITIONAL = frozenset(("if", "then", "else"))
_SINGLE_SCHEMAS = frozenset("additionalProperties contains not propertyNames unevaluatedItems unevaluatedProperties".split()) | _CONDITIONAL


@dataclass(frozen=True, eq=False)
class Node:
    """A schema at its place in a document. Nodes are compared by identity; `Document.node` returns the same node for the same place."""

    schema: Any
    where: str  # JSON pointer
    base: str  # URI that references are relative to
    number: int  # in the order of creation
    keywords: dict[str, Any] = field(default_factory=dict)  # assertions, in the spelling of draft 2020-12


@dataclass
class Document:
    root: Any
    unknown_keywords: Literal["annotation", "refuse"] = "annotation"
    _nodes: dict[str, Node] = field(default_factory=dict)
    _pointers: dict[str, str] = field(default_factory=dict)  # URI of an identifier or anchor -> JSON pointer

    def __post_init__(self) -> None:
        schema = self.root.get("$schema") if isinstance(self.root, dict) else None
        found = _DRAFT.match(schema) if isinstance(schema, str) else None
        self.draft = DRAFTS[found[1]] if found else 0  # 0: $schema names no draft, so every spelling is read
        self._bases = {"#": ""}
        self._dynamic_anchors = Counter[str]()
        self.has_unevaluated = False  # whether unevaluatedItems or unevaluatedProperties is anywhere in it
        self._index(self.root, "#", "", 0)

    def _index(self, value: Any, where: str, base: str, depth: int, is_table: bool = False) -> None:
        """Find all identifiers, wherever a schema may be. Identifiers outside schemas do no harm: no valid reference leads to them."""
        if depth > MAX_DEPTH:
            reject(where[:200].rpartition("/")[0], "nesting", f"has more than {MAX_DEPTH} levels; write fewer levels")
        if isinstance(value, list):
            for index, child in enumerate(value):
                self._index(child, f"{where}/{index}", base, depth + 1)
        elif isinstance(value, dict):
            base = base if is_table else self._register(value, where, base)  # a table of schemas by name: "id" is a name
            for name, child in value.items():
                if isinstance(child, (dict, list)) and (is_table or name not in ("enum", "const", "default", "examples", "example")):
                    self._index(child, pointer(where, name), base, depth + 1, not is_table and name in _TABLES)

    def _register(self, value: dict[str, Any], where: str, base: str) -> str:
        """Record the identifiers and anchors of a schema. Returns the base URI of references inside it."""
        self.has_unevaluated |= not {"unevaluatedItems", "unevaluatedProperties"}.isdisjoint(value)
        for name in ("$id", "id"):
            identifier = value.get(name)
            if not isinstance(identifier, str) or (name == "id" and self.draft not in (0, 3, 4)):
                continue
            if 0 < self.draft < 8 and isinstance(value.get("$ref"), str):
                continue  # the siblings of a reference are ignored
            if identifier.startswith("#"):
                self._pointers.setdefault(base.partition("#")[0] + identifier, where)
            else:
                try:
                    base = self._bases[where] = urljoin(base, identifier)
                    urlsplit(base)
                except ValueError:
                    reject(where, name, f"got {clip_json(identifier)}, expected a URI reference")
                self._pointers.setdefault(base.rstrip("#"), where)
        self._dynamic_anchors.update(["$recursiveRef"] * (value.get("$recursiveAnchor") is True))
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(value.get(name), str):
                self._dynamic_anchors.update([value[name]] * (name == "$dynamicAnchor"))
                self._pointers.setdefault(f"{base.partition('#')[0]}#{value[name]}", where)
        return base

    def node(self, where: str, above: Node | None = None, names: Sequence[str | int] = ()) -> Node:
        """The schema at a JSON pointer that exists in this document, which these names lead to from the schema `above`."""
        node = self._nodes.get(where)
        if node is None:
            value = functools.reduce(operator.getitem, names, above.schema) if above else value_at(self.root, where)
            place = where
            while place not in self._bases:  # that of a node above is in it
                place = place.rpartition("/")[0]
            self._bases[where] = self._bases[place]
            node = Node(value, where, self._bases[where], len(self._nodes))
            if not isinstance(value, (dict, bool)):
                reject(where, "schema", f"got {clip_json(value)}, expected an object, true or false")
            if isinstance(value, dict):
                node.keywords.update(self._current_keywords(value, where))
            self._nodes[where] = node  # not before: an error may be suppressed
        return node

    def constant(self, value: Any, where: str) -> Node:
        """A schema of this value only. The value is at `where` or inside the value there."""
        where = re.sub("/(const|enum)/const$", r"/\1", where)  # the parts of a constant have no places of their own
        key = f"= {value!r}"
        if key not in self._nodes:
            self._nodes[key] = Node({"const": value}, where, "", len(self._nodes), {"const": value})
        return self._nodes[key]

    def child(self, node: Node, *names: str | int) -> Node:
        return self.node(pointer(node.where, *names), node, names)

    def target(self, node: Node, keyword: str) -> Node:
        """The schema that a reference leads to."""
        reference = node.schema[keyword]
        if not isinstance(reference, str):
            reject(node.where, keyword, f"got {clip_json(reference)}, expected a string")
        relative = reference.startswith("#")
        uri = node.base.partition("#")[0] + reference
        if not relative:
            with contextlib.suppress(ValueError):  # no URI reference, which leads to no schema
                uri = urljoin(node.base, reference)
        where = self._resolved(uri)
        if where is None and relative:  # inside a schema with an $id, which generators write without meaning a new document
            where = self._resolved(self._bases["#"].partition("#")[0] + reference)
        if keyword != "$ref" and self._dynamic_anchors[keyword if keyword == "$recursiveRef" else reference.rpartition("#")[2]] > 1:
            reject(node.where, keyword, f"got {clip_json(reference)}, to which several anchors of one name may apply; write $ref")
        if where is None:
            reject(node.where, keyword, f"got {clip_json(reference)}, expected a reference to a schema in the same document")
        return self.node(where)

    def in_place(self, where: str) -> list[str]:
        """The places of schemas of `allOf`, `anyOf`, `oneOf` and `$ref`, which apply to the same value."""
        node = self.node(where)
        found = [pointer(where, word, index) for word in ("allOf", "anyOf", "oneOf") for index in range(len(node.keywords.get(word, ())))]
        return [*found, self.target(node, "$ref").where] if "$ref" in node.keywords else found

    def types(self, node: Node, keyword: str) -> list[Any]:
        """The names of types that a keyword lists; in draft 3 also schemas."""
        value = node.schema[keyword]
        names, is_old_draft = value if isinstance(value, list) else [value], self.draft in (0, 3)
        for name in names:
            known = name in TYPES or (is_old_draft and name == "any") if isinstance(name, str) else is_old_draft and isinstance(name, dict)
            if not known:
                reject(node.where, keyword, f"got {clip_json(value)}, expected one or several of {', '.join(TYPES)}")
        return names

    def _resolved(self, uri: str) -> str | None:
        if uri.rstrip("#") in self._pointers:
            return self._pointers[uri.rstrip("#")]
        base, _, fragment = uri.partition("#")
        start = "#" if base in ("", self._bases["#"].partition("#")[0]) else self._pointers.get(base)
        fragment = unquote(fragment)  # before it is divided: RFC 6901
        if start is None or (fragment and not fragment.startswith("/")):
            return None
        where = pointer(start, *map(_unescaped, fragment.split("/")[1:]))
        try:
            value_at(self.root, where)
        except (KeyError, IndexError, ValueError, TypeError):
            return None
        return where

    def _current_keywords(self, schema: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
        """The assertions, each checked. Older spellings are replaced; JSON pointers to the schemas inside do not change."""
        draft = self.draft
        ignores_siblings = 0 < draft < 8 and isinstance(schema.get("$ref"), str)
        for keyword, value in schema.items():
            is_of_draft = not draft or _FIRST_DRAFT.get(keyword, 0) <= draft <= _LAST_DRAFT.get(keyword, draft)
            is_ignored = ignores_siblings and keyword != "$ref"
            if keyword == "required" and isinstance(value, bool) and draft in (0, 3):
                continue  # draft 3: read with the schema of the object, in Normaliser._required_children
            if keyword not in KEYWORDS or not is_of_draft or is_ignored or (keyword == "required" and isinstance(value, bool)):
                if self.unknown_keywords == "refuse" and keyword not in ANNOTATIONS and not keyword.startswith("x-"):
                    why = "beside $ref, which has no effect in this draft" if is_ignored else "for no known keyword"
                    reject(where, keyword, f"got {clip_json(value)} {why}; remove it, or set unknown_keywords='annotation'")
            elif keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
                continue  # draft 4: read with `minimum` or `maximum`
            elif keyword in ("minimum", "maximum") and schema.get(f"exclusive{keyword.capitalize()}") is True:
                yield f"exclusive{keyword.capitalize()}", _number(value, where, keyword)
            elif keyword == "divisibleBy":
                if draft or "multipleOf" not in schema:
                    yield "multipleOf", _number(value, where, keyword)
            else:
                yield keyword, _checked_value(keyword, value, where)


def pointer(where: str, *names: str | int) -> str:
    """The JSON pointer to a child of `where`."""
    return "/".join([where, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])


def check_schema(schema: Any, options: Options) -> None:
    """UnsupportedError for a malformed keyword, type, pattern or reference, and for unknown keywords and formats that are refused, in
    the first `MAX_CHECKED_SCHEMAS` schemas that the root leads to. Contradictions between schemas are not checked."""
    pointers = ["#"]
    known = set(pointers)
    with naming_values(schema):
        document = Document(schema, options.unknown_keywords)
        for where in pointers:  # grows
            try:
                node = document.node(where)
                _check_keywords(document, node, options)
                children = [child for child in _referenced_schemas(document, node) if child not in known]
            except UnsupportedError as error:
                if not options.approximate or error.unsupported.keyword not in OMITTABLE_KEYWORDS:
                    raise
                continue
            pointers += children
            known.update(children)
            if len(known) > MAX_CHECKED_SCHEMAS:
                break


@contextlib.contextmanager
def naming_values(schema: Any) -> Iterator[None]:
    """Add the value of the keyword, or the schema, to the message of an UnsupportedError that is raised inside."""
    try:
        yield
    except UnsupportedError as error:
        part = error.unsupported
        if part.reason.startswith("got "):
            raise
        raise UnsupportedError(part.where, part.keyword, f"got {clip_json(value_of(schema, part))}, which {part.reason}") from None


def value_of(schema: Any, part: Unsupported) -> Any:
    """The value of the keyword of `part`, or the schema at its place if that does not have the keyword."""
    found = value_at(schema, part.where)
    return found.get(part.keyword, found) if isinstance(found, dict) else found


def _check_keywords(document: Document, node: Node, options: Options) -> None:
    keywords = node.keywords
    for keyword in ("type", "disallow"):
        if keyword in keywords:
            document.types(node, keyword)
    if "format" in keywords and keywords["format"] not in FORMATS and options.unknown_formats == "refuse":
        refuse_format(node)
    for keyword in ("pattern", "patternProperties"):
        for pattern in [keywords[keyword]] if keyword in keywords and keyword == "pattern" else keywords.get(keyword, ()):
            try:
                patterns.check_pattern(pattern)
            except patterns.PatternError as error:
                reject(node.where, keyword, str(error))


def refuse_format(node: Node) -> NoReturn:
    accepted = f"one of {', '.join(sorted(FORMATS))}, or unknown_formats='annotation'"
    reject(node.where, "format", f"got {clip_json(node.keywords['format'])}, expected {accepted}")


def _referenced_schemas(document: Document, node: Node) -> Iterator[str]:
    """The places of the schemas that a schema contains or refers to."""
    keywords = node.keywords
    for keyword, value in keywords.items():
        if keyword.endswith(("$ref", "Ref")):
            yield document.target(node, keyword).where
        elif keyword in _CONDITIONAL and not ("if" in keywords and {"then", "else"} & keywords.keys()):
            continue  # `if` without `then` and `else`, or these without `if`, has no effect
        elif keyword in _SCHEMA_DICTS or (keyword in _SCHEMA_LISTS and isinstance(value, list)):
            children = value.items() if keyword in _SCHEMA_DICTS else enumerate(value)
            names = (name for name, child in children if keyword not in _KEYWORDS_WITH_NAMES or isinstance(child, (dict, bool)))
            yield from (pointer(node.where, keyword, name) for name in names)
        elif keyword in _SINGLE_SCHEMAS or (keyword in _SCHEMA_LISTS and not isinstance(value, str)):
            yield pointer(node.where, keyword)
    if isinstance(keywords.get("items"), list) and "additionalItems" in keywords:
        yield pointer(node.where, "additionalItems")


def _checked_value(keyword: str, value: Any, where: str) -> Any:
    if keyword in NUMBER_KEYWORDS:
        return _number(value, where, keyword)
    check = _COUNT if keyword.startswith(("min", "max")) else _VALUE_CHECKS.get(keyword)
    if check and not check.accepts(value):
        reject(where, keyword, f"got {clip_json(value)}, expected {check.expected}")
    return int(value) if check is _COUNT else value


def _number(value: Any, where: str, keyword: str) -> Fraction:
    if not _is_number(value) or (keyword in ("multipleOf", "divisibleBy") and value <= 0):
        reject(where, keyword, f"got {clip_json(value)}, expected a number{' > 0' if keyword in ('multipleOf', 'divisibleBy') else ''}")
    return fraction(value, where, keyword)


def _is_number(value: Any) -> TypeGuard[int | Decimal]:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


_COUNT = Check(lambda value: _is_number(value) and 0 <= value <= MAX_COUNT and int(value) == value, f"an integer in 0..{MAX_COUNT}")
_SCHEMAS = Check(lambda value: isinstance(value, list) and bool(value), "a list of at least one schema")
_VALUE_CHECKS = {
    **dict.fromkeys(_SCHEMA_DICTS, instance_of(dict, "an object")),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _SCHEMAS),
    **dict.fromkeys(("prefixItems", "enum"), instance_of(list, "a list")),
    "required": Check(lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value), "a list of strings"),
    **dict.fromkeys(("pattern", "format"), instance_of(str, "a string")),
    "uniqueItems": instance_of(bool, "true or false"),
}


def fraction(value: int | Decimal, where: str, keyword: str) -> Fraction:
    """A number of a schema as an exact fraction; rejected if it has too many digits."""
    exact = Decimal(value)
    if max(exact.adjusted(), 0) - min(int(exact.as_tuple().exponent), 0) >= MAX_DIGITS:
        reject(where, keyword, f"got {clip_json(value)}, expected a number of at most {MAX_DIGITS} digits")
    return Fraction(value)


def clip_json(value: Any) -> str:
    """A value as JSON for a message, cut after MAX_CLIP_CHARS characters."""
    if isinstance(value, Decimal):
        return str(value)[:MAX_CLIP_CHARS]
    text = ""
    for piece in _ENCODER.iterencode(value):  # in pieces: the whole value may be long and deep
        text += piece
        if len(text) > MAX_CLIP_CHARS:
            return f"{text[: MAX_CLIP_CHARS - 3]}..."
    return text


def value_at(schema: Any, where: str) -> Any:
    """The value at a JSON pointer that exists."""
    return functools.reduce(_child_at, where.split("/")[1:], schema)


def _child_at(value: Any, step: str) -> Any:
    if isinstance(value, list):  # an IndexError for other spellings of a number
        return value[int(step) if re.fullmatch("0|[1-9][0-9]*", step) else len(value)]
    return value[_unescaped(step)]


def _unescaped(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")


def parse_json(text: str) -> Any:
    """The value of a JSON text; numbers with a point or exponent become Decimal, so that they stay exact."""
    return json.loads(text, parse_float=Decimal)
