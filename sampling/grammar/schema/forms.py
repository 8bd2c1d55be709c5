"""The canonical form of a schema: for each JSON type, the values of this type.

Arrays and objects are lists of alternatives; the values inside them are described by `Expr`, conjunctions of schemas and negated schemas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from stepgraph.sampling.grammar.schema.language import ANY_TEXT, NOTHING, Term, both, complement, either, matches
from stepgraph.sampling.grammar.schema.numbers import Numbers
from stepgraph.sampling.grammar.schema.reader import Node

Item = TypeVar("Item")


class ExprLiteral(NamedTuple):
    number: int  # of the node; an Expr is sorted by it
    positive: bool
    node: Node


Expr = tuple[ExprLiteral, ...]  # sorted; all of them hold
TRUE: Expr = ()
NEVER: Expr = (ExprLiteral(-1, True, Node(False, "#", "", -1)),)


def expr(node: Node, positive: bool = True) -> Expr:
    if isinstance(node.schema, bool):
        return TRUE if node.schema is positive else NEVER
    return (ExprLiteral(node.number, positive, node),)


def all_of(*parts: Expr) -> Expr:
    """The conjunction."""
    literals = {literal[:2]: literal for part in parts for literal in part}
    if (-1, True) in literals or any((number, not positive) in literals for number, positive in literals):
        return NEVER
    return tuple(literals[key] for key in sorted(literals))


def negations(part: Expr) -> list[Expr]:
    """Expressions of which every value outside the conjunction satisfies at least one."""
    return [TRUE] if part == NEVER else [expr(literal.node, not literal.positive) for literal in part]


class Strings(NamedTuple):
    """`anchored` is the part of the exact language that is generated if it is not empty: patterns match whole texts. Some formats are
    approximated: every text of `exact` satisfies the schema, and `superset` contains all texts that do, and others."""

    exact: Term
    anchored: Term
    superset: Term

    def meet(self, other: Strings) -> Strings:
        if self.exact is self.anchored is self.superset and other.exact is other.anchored is other.superset:
            return exactly(both(self.exact, other.exact))
        return Strings(both(self.exact, other.exact), both(self.anchored, other.anchored), both(self.superset, other.superset))

    def complement(self) -> Strings:
        others = complement(self.superset)
        return Strings(others, others, complement(self.exact))


def exactly(term: Term) -> Strings:
    return Strings(term, term, term)


class Contains(NamedTuple):
    """From position `start` on, at least `low` and at most `high` items satisfy the schema."""

    items: Expr
    low: int
    high: int | None
    start: int = 0


class Array(NamedTuple):
    prefix: tuple[Expr, ...] = ()
    rest: Expr = TRUE  # the items after the prefix
    low: int = 0
    high: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: bool = False
    evaluated: int | None = 0  # number of items that a keyword describes, for unevaluatedItems; None: all items
    superset: Array | None = None  # given if the schema accepts more arrays, all of them in it, so that a complement would be wrong

    def item(self, index: int) -> Expr:
        return self.prefix[index] if index < len(self.prefix) else self.rest


class KeyClass(NamedTuple):
    """A class of names of undeclared properties, and the expression for their values."""

    names: Term
    value: Expr
    is_default: bool = False  # allowed only because no keyword forbids it


@dataclass(frozen=True)
class Object:
    declared: tuple[tuple[str, Expr], ...] = ()
    required: frozenset[str] = frozenset()
    others: tuple[KeyClass, ...] = (KeyClass(ANY_TEXT, TRUE, True),)  # disjoint classes that cover all names; declared names are excluded
    low: int = 0
    high: int | None = None
    closable: bool = False  # `properties` is given: default classes are left out if objects are closed
    witnesses: tuple[KeyClass, ...] = ()  # for each, at least one property must have such a name and value
    evaluated: Term = NOTHING  # names that a keyword describes, for unevaluatedProperties
    superset: Object | None = None

    @classmethod
    def single(cls, name: str, value: Expr, required: bool) -> Object:
        """Objects in which one property is described."""
        return cls(((name, value),), frozenset([name] if required else []))

    @cached_property
    def values(self) -> dict[str, Expr]:
        return dict(self.declared)

    def value(self, name: str) -> Expr:
        """The expression for the value of a property."""
        if name in self.values:
            return self.values[name]
        return next((keys.value for keys in self.others if len(self.others) == 1 or matches(keys.names, name)), NEVER)


class Form(NamedTuple):
    null: bool
    booleans: frozenset[bool]
    numbers: tuple[Numbers, ...]
    strings: Strings
    arrays: tuple[Array, ...]
    objects: tuple[Object, ...]

    @property
    def is_nothing(self) -> bool:
        return not (self.null or self.booleans or self.numbers or self.arrays or self.objects or self.strings.superset is not NOTHING)


_NO_STRINGS, _ANY_STRINGS = exactly(NOTHING), exactly(ANY_TEXT)
NO_VALUE = Form(False, frozenset(), (), _NO_STRINGS, (), ())
ANY_VALUE = Form(True, frozenset([False, True]), (Numbers(),), _ANY_STRINGS, (Array(),), (Object(),))


def of_one_type(form: Form) -> Form:
    """If a form restricts exactly one type: its values of this type. Otherwise the form itself."""
    restricted = [index for index, part in enumerate(form) if part != ANY_VALUE[index]]
    found = Form._make(form[index] if [index] == restricted else nothing for index, nothing in enumerate(NO_VALUE))
    return form if found == NO_VALUE else found


def superset_of(form: Form) -> Form:
    """All values that a schema may accept, where its form has only a part of them."""
    arrays, objects = tuple(item.superset or item for item in form.arrays), tuple(item.superset or item for item in form.objects)
    return form._replace(strings=exactly(form.strings.superset), arrays=arrays, objects=objects)


def join(*forms: Form, for_unevaluated: bool = False) -> Form:
    """The values of any of the forms. for_unevaluated: with alternatives that only describe more of a value than others."""
    forms = (NO_VALUE, *forms)
    return Form(
        any(form.null for form in forms),
        frozenset[bool]().union(*(form.booleans for form in forms)),
        _absorbed((form.numbers for form in forms), Numbers(), lambda _: False),
        Strings(*(either(*terms) for terms in zip(*(form.strings for form in forms), strict=True))),
        _absorbed((form.arrays for form in forms), Array(), lambda one: for_unevaluated and (one.evaluated != 0 or bool(one.contains))),
        _absorbed(
            (form.objects for form in forms), Object(), lambda one: one.closable or (for_unevaluated and one.evaluated is not NOTHING)
        ),
    )


def _absorbed(parts: Iterable[tuple[Item, ...]], everything: Item, is_kept: Callable[[Item], bool]) -> tuple[Item, ...]:
    """The items; if one of them is `everything`, only that and those with `is_kept`, which may become narrower later."""
    found = tuple(dict.fromkeys(itertools.chain.from_iterable(parts)))
    return tuple(item for item in found if item == everything or is_kept(item)) if everything in found else found
