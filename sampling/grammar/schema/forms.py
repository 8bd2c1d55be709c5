"""The canonical form of a schema: for each JSON type, the values of this type.

Arrays and objects are lists of alternatives; the values inside them are described by `Expr`, conjunctions of schemas and negated schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from stepgraph.sampling.grammar.schema.language import ANY_TEXT, NOTHING, Term, both, complement, either, matches
from stepgraph.sampling.grammar.schema.numbers import Numbers
from stepgraph.sampling.grammar.schema.reader import Node

Item = TypeVar("Item")


class Literal(NamedTuple):
    number: int  # of the node; an Expr is sorted by it
    positive: bool
    node: Node


Expr = tuple[Literal, ...]  # sorted; all of them hold
TRUE: Expr = ()
NEVER: Expr = (Literal(-1, True, Node(False, "#", "", -1)),)


def expr(node: Node, positive: bool = True) -> Expr:
    if isinstance(node.schema, bool):
        return TRUE if node.schema is positive else NEVER
    return (Literal(node.number, positive, node),)


def all_of(*parts: Expr) -> Expr:
    """The conjunction."""
    found = {literal[:2]: literal for part in parts for literal in part}
    if (-1, True) in found or any((number, not positive) in found for number, positive in found):
        return NEVER
    return tuple(found[key] for key in sorted(found))


def negations(part: Expr) -> list[Expr]:
    """Expressions of which every value outside the conjunction satisfies at least one."""
    return [TRUE] if part == NEVER else [expr(literal.node, not literal.positive) for literal in part]


class Strings(NamedTuple):
    """`narrow` is the part of the exact language that is generated if it is not empty: patterns match whole texts. Some formats are
    approximated: every text of `exact` satisfies the schema, and `most` contains all texts that do, and others."""

    exact: Term
    narrow: Term
    most: Term

    def meet(self, other: Strings) -> Strings:
        return Strings(both(self.exact, other.exact), both(self.narrow, other.narrow), both(self.most, other.most))

    def join(self, other: Strings) -> Strings:
        return Strings(either(self.exact, other.exact), either(self.narrow, other.narrow), either(self.most, other.most))

    def complement(self) -> Strings:
        others = complement(self.most)
        return Strings(others, others, complement(self.exact))


def exactly(term: Term) -> Strings:
    return Strings(term, term, term)


class Contains(NamedTuple):
    """From position `start` on, at least `low` and at most `high` items satisfy the schema."""

    items: Expr
    low: int
    high: int | None
    start: int = 0


@dataclass(frozen=True)
class Array:
    prefix: tuple[Expr, ...] = ()
    rest: Expr = TRUE  # the items after the prefix
    low: int = 0
    high: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: bool = False
    evaluated: int | None = 0  # number of items that a keyword describes, for unevaluatedItems; None: all items
    is_subset: bool = False  # the schema accepts more arrays, so that a complement would be wrong

    def item(self, index: int) -> Expr:
        return self.prefix[index] if index < len(self.prefix) else self.rest


class Keys(NamedTuple):
    """A class of names of undeclared properties, and the expression for their values."""

    names: Term
    value: Expr
    is_default: bool = False  # allowed only because no keyword forbids it


@dataclass(frozen=True)
class Object:
    declared: tuple[tuple[str, Expr], ...] = ()
    required: frozenset[str] = frozenset()
    others: tuple[Keys, ...] = (Keys(ANY_TEXT, TRUE, True),)  # disjoint classes that cover all names; declared names are excluded
    low: int = 0
    high: int | None = None
    closable: bool = False  # `properties` is given: default classes are left out if objects are closed
    witnesses: tuple[Keys, ...] = ()  # for each, at least one property must have such a name and value
    evaluated: Term = NOTHING  # names that a keyword describes, for unevaluatedProperties
    is_subset: bool = False

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


@dataclass(frozen=True)
class Form:
    null: bool
    booleans: frozenset[bool]
    numbers: tuple[Numbers, ...]
    strings: Strings
    arrays: tuple[Array, ...]
    objects: tuple[Object, ...]

    @property
    def is_nothing(self) -> bool:
        return not (self.null or self.booleans or self.numbers or self.arrays or self.objects or self.strings.most is not NOTHING)


_NO_STRINGS, _ANY_STRINGS = exactly(NOTHING), exactly(ANY_TEXT)
NOTHING_AT_ALL = Form(False, frozenset(), (), _NO_STRINGS, (), ())
ANYTHING = Form(True, frozenset([False, True]), (Numbers(),), _ANY_STRINGS, (Array(),), (Object(),))


def of_one_type(form: Form) -> Form:
    """If a form restricts exactly one type: its values of this type. Otherwise the form itself."""
    others = dict[str, object]()
    for field in fields(Form):
        if getattr(form, field.name) == getattr(ANYTHING, field.name):
            others[field.name] = getattr(NOTHING_AT_ALL, field.name)
    return replace(form, **others) if len(others) == len(fields(Form)) - 1 else form  # type: ignore[arg-type]


def join(*forms: Form) -> Form:
    """The values of any of the forms."""
    found = NOTHING_AT_ALL
    for form in forms:
        found = Form(
            found.null or form.null,
            found.booleans | form.booleans,
            _absorbed((*found.numbers, *form.numbers), Numbers()),
            found.strings.join(form.strings),
            _absorbed((*found.arrays, *form.arrays), Array()),
            _absorbed((*found.objects, *form.objects), Object(), lambda item: item.closable),
        )
    return found


def _absorbed(items: Iterable[Item], everything: Item, is_kept: Callable[[Item], bool] = lambda _: False) -> tuple[Item, ...]:
    """The items; if one of them is `everything`, only that and those with `is_kept`, which may become narrower later."""
    found = tuple(dict.fromkeys(items))
    return tuple(item for item in found if item == everything or is_kept(item)) if everything in found else found
