"""The grammar of the JSON texts that a schema accepts, in the EBNF notation that all grammar libraries here read."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

from stepgraph.sampling.grammar.constraints.unsupported import Unsupported, UnsupportedError, reject
from stepgraph.sampling.grammar.schema.automata import TooComplexError, is_empty
from stepgraph.sampling.grammar.schema.forms import Array, Expr, Form, Object, all_of, expr, of_one_type, superset_of
from stepgraph.sampling.grammar.schema.items import counted_items, has_counts, items_text
from stepgraph.sampling.grammar.schema.language import ANY_TEXT, Term, both, complement, either, matches, words
from stepgraph.sampling.grammar.schema.members import members_texts
from stepgraph.sampling.grammar.schema.normalise import Normaliser, text_keyword
from stepgraph.sampling.grammar.schema.numbers import Numbers
from stepgraph.sampling.grammar.schema.options import OMITTABLE_KEYWORDS, Options
from stepgraph.sampling.grammar.schema.reader import KEYWORDS, Document, clip_json, naming_values, pointer, value_at
from stepgraph.sampling.grammar.schema.spelling import LanguageWriter, literal, with_few_states

MAX_WHITESPACE = 32  # characters of white space between JSON tokens under any_whitespace
MAX_RULES = 50_000
MAX_OMITTED_KEYWORDS = 100
MAX_INLINE_CHARS = 60  # characters of alternatives that do not become a rule
MAX_CONTRADICTION_PARTS = 12  # parts of a schema in which `reject_contradiction` searches: keywords, and schemas of `allOf`
MAX_CONTRADICTION_CHARS = 20_000  # characters of a document in which `reject_contradiction` searches

_SHORTER_TEXTS = "with the pattern takes too many states, so that shorter texts are generated; write a smaller maxLength, or none"
_HEX = "[0-9A-Fa-f]"
# The assertion about the character after a string excludes tokens when a grammar is compiled, which saves a check per mask. It is left
# out in a part of a grammar (with a prefix), where any text may follow.
_STRING = (
    r'(["] | [\U00000020-\U00000021\U00000023-\U0000005b\U0000005d-\U0000d7ff\U0000e000-\U0010ffff] {0}string_rest'
    r' | "\\" {0}escape {0}string_rest)'
)
AFTER_STRING = r" (=([ \n\r\t,}\]:]))"
_BASE_RULES = {
    "string": r'"\"" {0}string_rest',
    "string_rest": _STRING,
    "escape": (
        rf'["\\/bfnrt] | "u" ([0-9A-CE-Fa-ce-f] {_HEX} {_HEX} {_HEX} | [Dd] [0-7] {_HEX} {_HEX}'
        rf' | [Dd] [89ABab] {_HEX} {_HEX} "\\u" [Dd] [C-Fc-f] {_HEX} {_HEX})'
    ),
    "integer": '"0" | "-"? [1-9] [0-9]*',
    "number": '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\\-]? [0-9]+)?',
    "boolean": '"true" | "false"',
}

WriterType = TypeVar("WriterType", bound="GrammarWriter")


def schema_grammar(schema: Any, options: Options, prefix: str = "", writer: type[GrammarWriter] | None = None) -> str:
    """The rules of the grammar; the first one is `root`. UnsupportedError for what is not enforced, and if no value satisfies the schema.

    Names of rules start with the prefix. Numbers of the schema are int and Decimal.
    """
    rules = write_enforced(schema, options, prefix, writer or GrammarWriter)[1].rules
    return "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())


def narrowed_parts(schema: Any, options: Options) -> tuple[Unsupported, ...]:
    """The parts that are enforced, but not all of whose texts are generated, with the reasons."""
    return tuple(write_enforced(schema, options, "", GrammarWriter)[0].narrowed)


def write_enforced(schema: Any, options: Options, prefix: str, writer: type[WriterType]) -> tuple[Normaliser, WriterType]:
    """The normaliser and writer of a schema; with `approximate`, of its enforced part."""
    omissions = MAX_OMITTED_KEYWORDS if options.approximate else 0
    while True:
        try:
            normaliser = Normaliser(Document(schema, options.unknown_keywords), options.unknown_formats)
            return normaliser, write_schema(normaliser, options, prefix, writer)
        except UnsupportedError as error:
            rest = without_keyword(schema, error.unsupported) if omissions and error.unsupported.keyword in OMITTABLE_KEYWORDS else None
            if rest is None:
                with naming_values(schema):
                    raise
            schema, omissions = rest, omissions - 1


def without_keyword(schema: Any, part: Unsupported) -> Any | None:
    """A schema without the keyword of `part`, which is at its place, applies to the same value, or leads to it; None if there is none."""
    changed, places = copy.deepcopy(schema), [part.where, part.where.removesuffix(f"/{part.keyword}")]
    for where in places:  # grows
        node = value_at(changed, where)
        if isinstance(node, dict) and part.keyword in node:
            del node[part.keyword]
            return changed
        if part.keyword in OMITTABLE_KEYWORDS:
            with contextlib.suppress(UnsupportedError):  # a malformed schema, which is reported when the grammar is written
                places += [below for below in Document(schema).in_place(where) if below not in places]
    return None


def write_schema(normaliser: Normaliser, options: Options, prefix: str, writer_type: type[WriterType]) -> WriterType:
    """The writer of a schema, with its rules."""
    root = expr(normaliser.document.node("#"))
    try:
        writer = writer_type(normaliser, options, prefix, implies_types=options.objects == "closed")
        if not writer.is_satisfiable(root):
            writer = writer_type(normaliser, options, prefix, implies_types=False)
        writer.write(root)
    except RecursionError:
        reject("#", "nesting", "is nested too deeply, or has too long a pattern; write fewer levels or a shorter pattern")
    return writer


class GrammarWriter:
    """A `Writer` of items.py."""

    blank = f"[ \\n\\r\\t]{{0,{MAX_WHITESPACE}}}"

    def __init__(self, normaliser: Normaliser, options: Options, prefix: str, implies_types: bool) -> None:
        self._normaliser, self._prefix, self._implies_types = normaliser, prefix, implies_types
        blank = self.blank if options.any_whitespace else ""
        self.comma, self.colon = (f'{blank} "," {blank}', f'{blank} ":" {blank}') if blank else ('", "', '": "')
        self.is_closed, self.any_order = options.objects == "closed", options.property_order == "any"
        self.opening = f"{blank} " if blank else ""
        self.rules: dict[str, str] = {f"{prefix}root": ""}
        self._language_writer = LanguageWriter(self.rules, prefix)
        self._names = dict[Form, str]()
        self._strings = dict[str, str]()  # text of a rule -> name
        self._waiting = deque[tuple[str, Form, str]]()
        self.where = "#"  # place of the schema that is being written
        self._forms, self._nonempty = dict[Expr, Form](), dict[Expr, bool]()
        self._is_superset = False  # whether forms include values that are never written

    def write(self, root: Expr) -> None:
        if not self.is_satisfiable(root):
            part = next((part for part in self._normaliser.narrowed if part.keyword.startswith("unevaluated")), None)
            if part and self.is_possible(root):
                reject(part.where, part.keyword, f"is enforced {part.reason}, and no text is left; write the properties or items out")
            reject_contradiction(self._normaliser)
        try:
            self.rules[f"{self._prefix}root"] = self.root(root)
            while self._waiting:
                name, form, self.where = self._waiting.popleft()
                self.rules[name] = self._alternatives(form)
                if len(self.rules) > MAX_RULES:
                    reject("#", "schema", f"takes more than {MAX_RULES} rules of a grammar; write fewer alternatives or smaller counts")
        except TooComplexError as error:
            reject(self.where, text_keyword(self._normaliser.document.node(self.where)), str(error))

    # Which expressions have values: the least fixed point, so that no rule leads to an endless text.

    def _find_satisfiable(self, root: Expr) -> None:
        found, waiting = list[Expr](), [root]
        used_by = dict[Expr, list[Expr]]()
        while waiting:
            part = waiting.pop()
            if part in self._nonempty:
                continue
            self._nonempty[part] = False
            found.append(part)
            for child in self._children(self.form(part)):
                used_by.setdefault(child, []).append(part)
                waiting.append(child)
        pending = dict.fromkeys(found)  # the latest first: the values inside an object before it, which is slow to examine
        while pending:
            part, _ = pending.popitem()
            if not self._nonempty[part] and self._form_has_value(part, self.form(part)):
                self._nonempty[part] = True
                pending.update(dict.fromkeys(used_by.get(part, ())))

    def _children(self, form: Form) -> Iterator[Expr]:
        for array in form.arrays:
            yield from counted_items(array)
        for one in form.objects:
            yield from (value for _, value in one.declared)
            yield from (keys.value for keys in one.others)
            for witness in one.witnesses:
                yield from (all_of(witness.value, value) for name, value in one.declared if matches(witness.names, name))
                yield from (all_of(witness.value, keys.value) for keys in one.others)

    def _form_has_value(self, part: Expr, form: Form) -> bool:
        if form.null or form.booleans or form.numbers or any(map(self._array_has_value, form.arrays)):
            return True
        try:
            return not is_empty(with_few_states(form.strings.exact)) or any(map(self._object_has_value, form.objects))
        except TooComplexError as error:
            reject(part[-1].node.where, text_keyword(part[-1].node), str(error))

    def _array_has_value(self, array: Array) -> bool:
        if not all(self._nonempty[array.item(index)] for index in range(min(array.low, len(array.prefix) + 1))):
            return False
        return not array.contains or has_counts(array, self._nonempty.__getitem__)

    def _object_has_value(self, item: Object) -> bool:
        values = dict(item.declared)
        if not all(self._nonempty[values[name]] for name in item.required):
            return False
        for witness in item.witnesses:
            declared = any(matches(witness.names, name) and self._nonempty[all_of(witness.value, value)] for name, value in item.declared)
            if not declared and not any(
                self._nonempty[all_of(witness.value, keys.value)] and not is_empty(both(witness.names, keys.names)) for keys in item.others
            ):
                return False
        if item.low <= sum(self._nonempty[value] for value in values.values()):
            return True
        undeclared = complement(words(values))
        return any(self._nonempty[keys.value] and not is_empty(both(keys.names, undeclared)) for keys in item.others)

    # Values

    def root(self, part: Expr) -> str:
        return self.value(part)

    def value(self, part: Expr) -> str:
        form = self.form(part)
        if form not in self._names:
            is_scalar, where = not form.arrays and not form.objects, part[-1].node.where if part else self.where
            outer_where, self.where = self.where, where
            text = self._alternatives(form) if is_scalar else ""
            self.where = outer_where
            if is_scalar and len(text) <= MAX_INLINE_CHARS:
                self._names[form] = f"({text})" if "|" in text else text
            else:
                name = self._names[form] = f"{self._prefix}v{len(self._names)}"
                self.rules[name] = ""  # rules are in the order of the schema
                self._waiting.append((name, form, where))
        return self._names[form]

    def _base_rule(self, name: str) -> str:
        if f"{self._prefix}{name}" not in self.rules:
            rule = _BASE_RULES[name].replace("{0}", self._prefix)
            self.rules[f"{self._prefix}{name}"] = rule + AFTER_STRING if name == "string_rest" and not self._prefix else rule
            for other in _BASE_RULES:
                if f"{self._prefix}{other}" in rule.split():
                    self._base_rule(other)
        return f"{self._prefix}{name}"

    def _alternatives(self, form: Form) -> str:
        cases = list[str]()
        if form.null:
            cases.append('"null"')
        cases += [self._base_rule("boolean")] if len(form.booleans) == 2 else [literal(str(value).lower()) for value in form.booleans]
        cases += self._numbers(form.numbers)
        term = self.strings(form)
        cases += [] if is_empty(term) else [self.string(term)]
        for array in form.arrays:
            inside = items_text(self, array) if self._array_has_value(array) else None
            cases += [] if inside is None else [f'"[" {inside} {self.opening}"]"']
        for item in form.objects:
            texts = members_texts(self, item) if self._object_has_value(item) else ()
            cases += [f'"{{" {inside} {self.opening}"}}"' for inside in texts]
        if not cases and form.objects:
            reject(
                self.where, "minProperties", "counts properties that are not declared, of which two may have one name; declare more of them"
            )
        if not cases:
            both_of = f"{self.where}: uniqueItems and {self.where}: minItems"
            reject(self.where, "uniqueItems", f"requires too many different items: no value satisfies both {both_of}; change one of them")
        return " | ".join(dict.fromkeys(cases))

    def _numbers(self, numbers: tuple[Numbers, ...]) -> list[str]:
        if not numbers:
            return []
        if Numbers() in numbers:
            return [self._base_rule("number")]
        if numbers == (Numbers(multiple=Fraction(1)),):
            return [self._base_rule("integer")]
        try:
            language = either(*(item.language() for item in numbers))
            return [self.number(language)] if not is_empty(language) else []
        except UnsupportedError:
            raise
        except ValueError as error:
            reject(self.where, "multipleOf", str(error))

    def number(self, term: Term) -> str:
        return self._language_writer.body(term, in_string=False)

    def strings(self, form: Form) -> Term:
        exact, anchored, _ = form.strings
        language = anchored if self.is_closed and not is_empty(with_few_states(anchored)) else exact
        return self.narrowed(language)

    def narrowed(self, language: Term) -> Term:
        """The language, or its shorter texts if its automaton is too large."""
        if (term := with_few_states(language)) is not language:
            self.narrow("maxLength", _SHORTER_TEXTS)
        return term

    def string(self, term: Term) -> str:
        if term is ANY_TEXT:
            return self._base_rule("string")
        text = f'"\\"" {self._language_writer.body(term, in_string=True)} "\\""'
        if text not in self._strings:
            self._strings[text] = self.rule(text)
        return self._strings[text]

    def form(self, part: Expr) -> Form:
        """The form of an expression. If types are implied, a form that restricts only one type, not by `not`, has only that type."""
        if part not in self._forms:
            form = self._normaliser.form(part)
            negated = all(not one.positive or one.node.keywords.keys() == {"not"} for one in part)
            form = of_one_type(form) if self._implies_types and not negated else form
            self._forms[part] = superset_of(form) if self._is_superset else form
        return self._forms[part]

    def is_satisfiable(self, part: Expr) -> bool:
        if part not in self._nonempty:
            self._find_satisfiable(part)
        return self._nonempty[part]

    def is_possible(self, part: Expr) -> bool:
        other = copy.copy(self)
        other._forms, other._nonempty, other._is_superset = {}, {}, True
        return other.is_satisfiable(part)

    def narrow(self, keyword: str, reason: str) -> None:
        self._normaliser.narrowed[Unsupported(self.where, keyword, reason)] = None

    def rule(self, text: str) -> str:
        name = f"{self._prefix}r{len(self.rules)}"
        self.rules[name] = text
        return name


# Which parts of a schema contradict each other, if no value satisfies it: found by trying the schema with few of its parts.

_Part = tuple[str, int]  # a keyword, and the number of a schema of `allOf`


def _has_value(root: Any, where: str) -> bool:
    """Whether a value satisfies the schema at a place; True if that is not known."""
    normaliser = Normaliser(Document(root))
    try:
        return GrammarWriter(normaliser, Options(), "", implies_types=False).is_satisfiable(expr(normaliser.document.node(where)))
    except UnsupportedError:
        return True


def reject_contradiction(normaliser: Normaliser) -> NoReturn:
    """UnsupportedError with the reason why no value satisfies a schema."""
    root = normaliser.document.root
    where, places = next(iter(normaliser.conflicts), ("#", ()))
    if not places and len(json.dumps(root, default=float)) <= MAX_CONTRADICTION_CHARS:
        parts = next((parts for parts in _candidates(value_at(root, where)) if not _has_value(_with_only(root, where, parts), where)), ())
        places = tuple(pointer(where, keyword, index) if keyword == "allOf" else f"{where}: {keyword}" for keyword, index in parts)
    several, got = {0: "", 1: "", 2: "both ", 3: "all of "}[len(places)], clip_json(value_at(root, where))
    named = " and ".join(filter(None, (", ".join(places[:-1]), *places[-1:]))) or "it"
    reject(where, "schema", f"got {got}: no value satisfies {several}{named}; change one of its parts")


def _candidates(schema: Any) -> Iterator[tuple[_Part, ...]]:
    if not isinstance(schema, dict):
        return
    keywords = [keyword for keyword in schema if keyword in KEYWORDS and keyword not in ("then", "else")]
    keywords.sort(key=lambda keyword: keyword != "type")  # pairs with the type first
    parts = [(keyword, index) for keyword in keywords for index in range(len(schema["allOf"]) if keyword == "allOf" else 1)]
    if len(parts) <= MAX_CONTRADICTION_PARTS:
        yield from ((part,) for part in parts)
        yield from itertools.combinations(parts, 2)
        yield from itertools.combinations(parts, 3)


def _with_only(root: Any, where: str, parts: tuple[_Part, ...]) -> Any:
    """The document in which the schema at `where` has only these parts and its type."""
    changed, keywords = copy.deepcopy(root), {keyword for keyword, _ in parts}
    typed = keywords | ({"type"} if len(parts) > 1 else set()) | ({"then", "else"} if "if" in keywords else set())
    schema = value_at(changed, where)
    for keyword in (schema.keys() & KEYWORDS) - typed:
        del schema[keyword]
    if "allOf" in keywords:
        schema["allOf"] = [schema["allOf"][index] for keyword, index in parts if keyword == "allOf"]
    return changed
