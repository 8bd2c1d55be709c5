"""Intersections and complements of canonical forms.

`simplify` returns an equivalent expression: NEVER if it is known that no value satisfies it, or an expression that was used before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NoReturn, TypeVar

from stepgraph.sampling.grammar.constraints.unsupported import reject
from stepgraph.sampling.grammar.schema.automata import MAX_STATES, TooComplexError, automaton, is_empty
from stepgraph.sampling.grammar.schema.forms import ANY_VALUE, NEVER, TRUE, Array, Contains, Expr, Form, KeyClass, Object, all_of, negations
from stepgraph.sampling.grammar.schema.language import ANY_TEXT, both, complement, either, words
from stepgraph.sampling.grammar.schema.numbers import Numbers

MAX_ALTERNATIVES = 2_000  # of arrays or objects in one form

Item = TypeVar("Item", Array, Object)
Simplify = Callable[[Expr], Expr]
(_ANY_ARRAY,), (_ANY_OBJECT,) = ANY_VALUE.arrays, ANY_VALUE.objects
_NO_ARRAY = Array(rest=NEVER, low=1)
_NO_OBJECT = Object(others=(KeyClass(ANY_TEXT, NEVER),), low=1)


def meet(left: Form, right: Form, simplify: Simplify, where: str, for_unevaluated: bool = False) -> Form:
    """The values that are in both forms; UnsupportedError if that takes too many alternatives."""
    if ANY_VALUE in (left, right):
        return left if right == ANY_VALUE else right
    for items in (len(left.arrays) * len(right.arrays), len(left.objects) * len(right.objects)):
        if items > MAX_ALTERNATIVES:
            reject(where, "schema", f"has {items} combinations of alternatives, expected at most {MAX_ALTERNATIVES}")

    def more_items(one: Array, other: Array) -> bool:
        more = other.evaluated is not None and (one.evaluated is None or one.evaluated > other.evaluated)
        return for_unevaluated and (more or not {*one.contains} <= {*other.contains})

    def more_names(one: Object, other: Object) -> bool:
        return for_unevaluated and either(one.evaluated, other.evaluated) is not other.evaluated

    numbers = dict.fromkeys(one.meet(other) for one, other in product(left.numbers, right.numbers))
    arrays = _meet_pairs(left.arrays, right.arrays, lambda one, other: meet_arrays(one, other, simplify), more_items)
    objects = _meet_pairs(
        left.objects,
        right.objects,
        lambda one, other: meet_objects(one, other, simplify),
        lambda one, other: (one.closable and other.closable) or more_names(one, other),  # a closed object has the properties of both
    )
    return Form(
        left.null and right.null,
        left.booleans & right.booleans,
        tuple(filter(None, numbers)),
        left.strings.meet(right.strings),
        arrays,
        objects,
    )


def _meet_pairs(
    left: tuple[Item, ...], right: tuple[Item, ...], meet_pair: Callable[[Item, Item], Item | None], is_kept: Callable[[Item, Item], bool]
) -> tuple[Item, ...]:
    """The intersections of all pairs. An intersection inside an alternative that is itself one is left out unless `is_kept`."""
    found, included = dict[Item, None](), set[Item]()  # included: alternatives on the right that an alternative on the left includes
    intersections_inside = dict[Item, list[Item]]()  # for each alternative on the right, the intersections that it includes
    for one in left:
        row = list[Item]()
        for other in right:
            if other in included and not is_kept(one, other):
                continue
            common = meet_pair(one, other)
            if common is None:
                continue
            if common == one and not any(is_kept(another, one) for another in right):
                row = [one]
                break
            row.append(common)
            if common == other:
                included.add(other)
                for part in intersections_inside.pop(other, ()):
                    found.pop(part, None)
            elif not is_kept(one, other):
                intersections_inside.setdefault(other, []).append(common)
        found.update(dict.fromkeys(row))
    return tuple(found)


def meet_arrays(left: Array, right: Array, simplify: Simplify) -> Array | None:
    if left == _ANY_ARRAY:
        return possible_array(right, simplify)
    superset = meet_arrays(left.superset or left, right.superset or right, simplify) if left.superset or right.superset else None
    size = max(len(left.prefix), len(right.prefix))
    evaluated = None if None in (left.evaluated, right.evaluated) else max(left.evaluated or 0, right.evaluated or 0)
    found = Array(
        tuple(all_of(left.item(index), right.item(index)) for index in range(size)),
        all_of(left.rest, right.rest),
        max(left.low, right.low),
        _min_bound(left.high, right.high),
        tuple(dict.fromkeys((*left.contains, *right.contains))),
        left.unique or right.unique,
        evaluated,
        superset,
    )
    return possible_array(found, simplify)


def possible_array(array: Array, simplify: Simplify) -> Array | None:
    """The array without the lengths that its items make impossible. If none is left: None, or a part of the superset without values."""
    no_array = _NO_ARRAY._replace(superset=array.superset) if array.superset else None
    prefix, rest, high = tuple(map(simplify, array.prefix[: array.high])), simplify(array.rest), array.high
    impossible = next((index for index, item in enumerate(prefix) if item == NEVER), None)
    if impossible is not None:
        high, prefix = impossible, prefix[:impossible]
    elif rest == NEVER:
        high = len(prefix) if high is None else min(high, len(prefix))
    needed = max((found.low + found.start for found in array.contains if found.low), default=0)
    low = max(array.low, needed)
    if high is not None and low > high:
        return no_array
    if any(found.high is not None and found.low > found.high for found in array.contains):
        return no_array
    return array._replace(prefix=prefix, rest=rest, low=low, high=high)


def meet_objects(left: Object, right: Object, simplify: Simplify) -> Object | None:
    if _ANY_OBJECT in (left, right):
        return possible_object(right if left == _ANY_OBJECT else left, simplify)
    superset = meet_objects(left.superset or left, right.superset or right, simplify) if left.superset or right.superset else None
    names = dict.fromkeys(name for one in (left, right) for name, _ in one.declared)
    found = Object(
        tuple((name, all_of(left.value(name), right.value(name))) for name in names),
        left.required | right.required,
        _merge_equal_values(meet_keys(left.others, right.others)),
        max(left.low, right.low),
        _min_bound(left.high, right.high),
        left.closable or right.closable,
        tuple(dict.fromkeys((*left.witnesses, *right.witnesses))),
        either(left.evaluated, right.evaluated),
        superset,
    )
    return possible_object(found, simplify)


def meet_keys(left: Sequence[KeyClass], right: Sequence[KeyClass]) -> list[KeyClass]:
    """The intersections of classes that cover all names. TooComplexError if they are too many: n patterns may have 2**n."""
    found, states = list[KeyClass](), 0
    for one in left:
        row = list[KeyClass]()
        for other in right:
            is_rest = not row and other is right[-1]  # all names of `one`
            common = one.names if is_rest else both(one.names, other.names)
            if is_rest or not is_empty(common):
                states += len(automaton(common).edges) if common.kind == "and" else 0  # which is_empty has computed
                row.append(KeyClass(common, all_of(one.value, other.value), one.is_default and other.is_default))
            if states > MAX_STATES:
                raise TooComplexError(f"takes more than {MAX_STATES} states to distinguish names; write patterns that begin with ^")
        found += [row[0]._replace(names=one.names)] if len(row) == 1 else row
    return found


def _merge_equal_values(others: list[KeyClass]) -> tuple[KeyClass, ...]:
    found = dict[tuple[Expr, bool], KeyClass]()
    for keys in others:
        before = found.get(keys[1:])
        found[keys[1:]] = keys if before is None else keys._replace(names=either(before.names, keys.names))
    if len(found) == 1:
        return (next(iter(found.values()))._replace(names=ANY_TEXT),)
    return tuple(found.values())


def possible_object(found: Object, simplify: Simplify) -> Object | None:
    """The object with the required names among the declared ones. If none is possible: None, or a part of the superset without values."""
    no_object = replace(_NO_OBJECT, superset=found.superset) if found.superset else None
    if undeclared := sorted(found.required - found.values.keys()):
        found = replace(found, declared=(*found.declared, *((name, found.value(name)) for name in undeclared)))
    low = max(found.low, len(found.required))
    if found.high is not None and low > found.high:
        return no_object
    required = {name: simplify(value) for name, value in found.declared if name in found.required}
    if NEVER in required.values():
        return no_object
    if any(simplify(keys.value) == NEVER for keys in found.witnesses):
        return no_object
    if all(keys.value == NEVER for keys in found.others):
        allowed = sum(value != NEVER for _, value in found.declared)
        if low > allowed:
            return no_object
    if low == found.low and all(value == found.values[name] for name, value in required.items()):
        return found
    return replace(found, declared=tuple((name, required.get(name, value)) for name, value in found.declared), low=low)


def complement_of(form: Form, simplify: Simplify, where: str) -> Form:
    """All values that are not in the form."""
    numbers: tuple[Numbers, ...] = (Numbers(),)
    for piece in form.numbers:
        numbers = tuple(filter(None, dict.fromkeys(one.meet(other) for one, other in product(numbers, list(piece.complement())))))
    found = Form(not form.null, frozenset([False, True]) - form.booleans, numbers, form.strings.complement(), (Array(),), (Object(),))
    for array in form.arrays:
        found = meet(found, ANY_VALUE._replace(arrays=tuple(_other_arrays(array, where))), simplify, where)
    for item in form.objects:
        found = meet(found, ANY_VALUE._replace(objects=tuple(_other_objects(item, where))), simplify, where)
    return found


def _reject_negated(where: str, reason: str) -> NoReturn:
    """Schemas are negated in `not`, `if` and `oneOf`, also through references; the error names that keyword."""
    above, _, last = where.rpartition("/")
    keyword = last if last in ("not", "if") else "oneOf" if above.endswith("/oneOf") else "not"
    reject(where, keyword, f"is not enforced with {reason}")


def _other_arrays(array: Array, where: str) -> Iterator[Array]:
    if array.superset:
        _reject_negated(where, "unevaluatedItems; write the items out")
    if array.unique:
        _reject_negated(where, "uniqueItems; give the cases a different type or value of one property")
    if array.low:
        yield Array(high=array.low - 1)
    if array.high is not None:
        yield Array(low=array.high + 1)
    for index, item in enumerate(array.prefix):
        for other in negations(item) if item else ():
            yield Array(prefix=(*(TRUE for _ in range(index)), other), low=index + 1)
    for other in negations(array.rest) if array.rest else ():
        yield Array(contains=(Contains(other, 1, None, len(array.prefix)),))
    for found in array.contains:
        if found.low:
            yield Array(contains=(found._replace(low=0, high=found.low - 1),))
        if found.high is not None:
            yield Array(contains=(found._replace(low=found.high + 1, high=None),))


def _other_objects(item: Object, where: str) -> Iterator[Object]:
    if item.superset:
        _reject_negated(where, "unevaluatedProperties, or names of a format of which not all are known; write the properties out")
    for name in sorted(item.required):
        yield Object.single(name, NEVER, required=False)
    if item.low > len(item.required):
        yield Object(high=item.low - 1)
    if item.high is not None:
        yield Object(low=item.high + 1)
    for name, value in item.declared:
        for other in negations(value) if value else ():
            yield Object.single(name, other, required=True)
    declared = complement(words(name for name, _ in item.declared))
    for keys in item.others:
        for other in negations(keys.value) if keys.value else ():
            if not is_empty(names := both(keys.names, declared)):
                yield Object(witnesses=(KeyClass(names, other),))
    for keys in item.witnesses:
        others = negations(keys.value)
        assert len(others) <= 1  # the value of a witness is one negated schema
        yield Object(others=(KeyClass(keys.names, others[0] if others else NEVER), KeyClass(complement(keys.names), TRUE, True)))


def _min_bound(left: int | None, right: int | None) -> int | None:
    return min((high for high in (left, right) if high is not None), default=None)
