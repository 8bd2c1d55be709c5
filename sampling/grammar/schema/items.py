"""The items of an array as EBNF."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from stepgraph.sampling.grammar.constraints.unsupported import reject
from stepgraph.sampling.grammar.schema.automata import TooComplexError, list_texts
from stepgraph.sampling.grammar.schema.forms import TRUE, Array, Contains, Expr, Form, all_of, negations
from stepgraph.sampling.grammar.schema.language import Term
from stepgraph.sampling.grammar.schema.numbers import decimal
from stepgraph.sampling.grammar.schema.spelling import json_literal, literal, optional, repeated

MAX_STATES = 2_000  # states of an array or object with counts
MAX_COMPARED_ITEMS = 6  # items whose schemas are compared in pairs
MAX_ORDERS = 1_024  # alternatives of unique items in any order: 8 values have as many; more values come in the order of the schema
MAX_LISTED_VALUES = 200  # values of unique items
MAX_NESTED_CHARS = 1_000  # characters of nested optional items in one rule

State = tuple[int, ...]
Case = TypeVar("Case", str, Expr)
Steps = Callable[[State], tuple[bool, list[tuple[Case, State]]]]  # whether a text may end there; what may follow, with the state after it


class Writer(Protocol):
    """The interface with which items and members are written."""

    comma: str
    colon: str
    opening: str  # before the first item or property
    is_closed: bool
    any_order: bool  # declared properties may come in any order
    where: str
    rules: dict[str, str]

    def rule(self, text: str) -> str:
        """The name of a new rule."""

    def value(self, part: Expr) -> str:
        """An EBNF element for the values of an expression."""

    def string(self, term: Term) -> str:
        """JSON strings of these texts."""

    def form(self, part: Expr) -> Form: ...

    def strings(self, form: Form) -> Term: ...

    def narrow(self, keyword: str, reason: str) -> None:
        """Record that not all texts of the current schema are generated."""

    def is_satisfiable(self, part: Expr) -> bool:
        """Whether any value satisfies the expression."""

    def is_possible(self, part: Expr) -> bool:
        """Whether a value may satisfy the expression, also one that is never written."""


def items_text(writer: Writer, array: Array) -> str | None:
    """The text between the brackets; None if no array is possible."""
    if array.unique and (array.high is None or array.high > 1):
        return items_text(writer, array._replace(unique=False)) if _items_differ(writer, array) else _unique_text(writer, array)
    if array.contains:
        return _contains_text(writer, array)
    high, size = array.high, len(array.prefix)
    dead = next((index for index in range(size + 1) if not writer.is_satisfiable(array.item(index))), None)
    if dead is not None:
        high = dead if high is None else min(high, dead)
    text = ""
    if high is None or high > size:
        text = listed(writer, writer.value(array.rest), max(array.low - size, 0), None if high is None else high - size, is_first=not size)
    for index in range(min(size, size if high is None else high) - 1, -1, -1):  # from the last item backwards
        comma = f"{writer.comma} " if index else writer.opening
        text = optional(f"{comma}{writer.value(array.prefix[index])} {text}".strip(), index >= array.low)
        if text.startswith("(") and len(text) > MAX_NESTED_CHARS:
            text = writer.rule(text)
    return text


def listed(writer: Writer, item: str, low: int, high: int | None, is_first: bool) -> str:
    """`low` to `high` items or properties, each with the comma before it."""
    if not is_first:
        return repeated(f"{writer.comma} {item}", low, high)
    more = repeated(f"{writer.comma} {item}", max(low - 1, 0), None if high is None else high - 1)
    return optional(f"{writer.opening}{item} {more}".strip(), not low)


def _contains_text(writer: Writer, array: Array) -> str | None:
    following = _count_contains(array, writer.is_satisfiable)

    def steps(state: State) -> tuple[bool, list[tuple[str, State]]]:
        enough, choices = following(state)
        comma = f"{writer.comma} " if state[0] else writer.opening
        return enough, [(comma + writer.value(item), after) for item, after in choices]

    return write_states(writer, (0,) * (1 + len(array.contains)), steps, "contains")


def has_counts(array: Array, is_satisfiable: Callable[[Expr], bool]) -> bool:
    """Whether there is an array with as many items as `contains` requires. True also if that takes too many states to be written."""
    states = _explored((0,) * (1 + len(array.contains)), _count_contains(array, is_satisfiable))
    return any(enough or number == MAX_STATES for number, (_, enough, _) in enumerate(states))


def _count_contains(array: Array, is_satisfiable: Callable[[Expr], bool]) -> Steps[Expr]:
    """A state is the number of items so far and, for each `contains`, the number that satisfy it."""
    longest = max(1, len(array.prefix), array.low, array.high or 0, *(one.start for one in array.contains))

    def following(state: State) -> tuple[bool, list[tuple[Expr, State]]]:
        index, counts = state[0], state[1:]
        enough = index >= array.low and all(count >= one.low for count, one in zip(counts, array.contains, strict=True))
        if array.high is not None and index >= array.high:
            return enough, []
        cases: list[tuple[Expr, State]] = [(array.item(index), ())]
        for count, one in zip(counts, array.contains, strict=True):
            grown = list[tuple[Expr, State]]()
            for item, after in cases:
                if index < one.start or (one.high is None and count >= one.low):
                    grown.append((item, (*after, count)))
                    continue
                if one.high is None or count < one.high:
                    grown.append((all_of(item, one.items), (*after, count + 1)))
                grown += [(all_of(item, other), (*after, count)) for other in _uncounted_items(one)]
            cases = grown
        return enough, [(item, (min(index + 1, longest), *after)) for item, after in cases if is_satisfiable(item)]

    return following


def counted_items(array: Array) -> Iterator[Expr]:
    """The expressions for an item, in each position, for each choice of the `contains` that count it."""
    for item in (*array.prefix, array.rest):
        cases = [item]
        for one in array.contains:
            cases += [all_of(case, part) for case in cases for part in (one.items, *_uncounted_items(one))]
        yield from cases


def _uncounted_items(one: Contains) -> list[Expr]:
    """The expressions for an item that is not counted. Without an upper bound, any item may be left uncounted."""
    return [TRUE] if one.high is None else negations(one.items)


def _items_differ(writer: Writer, array: Array) -> bool:
    """Whether no value is possible at two positions, so that all items differ."""
    high = array.high if array.high is not None or writer.is_satisfiable(array.rest) else len(array.prefix)
    if high is None or high > MAX_COMPARED_ITEMS:
        return False
    pairs = itertools.combinations([array.item(index) for index in range(high)], 2)
    return not any(writer.is_possible(all_of(first, second)) for first, second in pairs)


def _unique_text(writer: Writer, array: Array) -> str | None:
    """A state is the number of items, and the set of values so far, as bits, or (in schema order) the first value that may still come."""
    size, high = len(array.prefix), array.high
    if array.contains or (tables := _value_lists(writer, array)) is None:
        reject(
            writer.where,
            "uniqueItems",
            "is enforced for a list of values, at most one item, or items whose schemas share no value, without contains; "
            "give items an enum, or omit it",
        )
    values = list(dict.fromkeys(text for table in tables for text in table))
    bits = [[(text, values.index(text)) for text in table] for table in tables]
    high = len(values) if high is None else min(high, len(values))

    def in_any_order(state: State) -> tuple[bool, list[tuple[str, State]]]:
        count, used = state
        comma, table = f"{writer.comma} " if count else writer.opening, bits[min(count, size)] if count < high else []
        return count >= array.low, [(comma + text, (count + 1, used | 1 << index)) for text, index in table if not used >> index & 1]

    def in_schema_order(state: State) -> tuple[bool, list[tuple[str, State]]]:
        count, first = state
        comma, after = f"{writer.comma} " if count else writer.opening, min(count + 1, max(array.low, 1 if array.high is None else high))
        more = array.high is None or count < high
        return count >= array.low, [(comma + text, (after, index + 1)) for text, index in bits[0] if index >= first and more]

    num_steps = itertools.accumulate(len(cases) for _, _, cases in _explored((0, 0), in_any_order))
    if all(steps <= MAX_ORDERS for steps in num_steps):
        return write_states(writer, (0, 0), in_any_order, "uniqueItems")
    if size:
        reject(writer.where, "uniqueItems", f"takes more than {MAX_ORDERS} combinations of values; write fewer values")
    writer.narrow("uniqueItems", "of so many values is enforced by generating them in the order of the schema")
    return write_states(writer, (0, 0), in_schema_order, "uniqueItems")


def _value_lists(writer: Writer, array: Array) -> list[list[str]] | None:
    """The texts of all values of each item of the prefix, and of the other items; None if they are too many to be listed."""
    last = len(array.prefix) if array.high is None or array.high > len(array.prefix) else array.high - 1
    found = [_list_values(writer, writer.form(array.item(index))) for index in range(last + 1)]
    return None if None in found else [table for table in found if table is not None]


def _list_values(writer: Writer, form: Form) -> list[str] | None:
    """The texts of all values; None if they cannot be listed."""
    if form.arrays or form.objects:
        return None
    found = ['"null"'] * form.null + [literal(str(value).lower()) for value in sorted(form.booleans)]
    for item in form.numbers:
        if (numbers := item.values(MAX_LISTED_VALUES)) is None:
            return None
        found += [literal(decimal(number)) for number in numbers]
    texts = list_texts_if_few(writer.strings(form))
    return None if texts is None or len(found) + len(texts) > MAX_LISTED_VALUES else [*found, *map(json_literal, texts)]


def list_texts_if_few(term: Term) -> list[str] | None:
    if term.kind == "words":
        return [str(text) for text in term.values]
    try:
        return list_texts(term, MAX_LISTED_VALUES)
    except TooComplexError:
        return None


def _explored(start: State, steps: Steps[Case]) -> Iterator[tuple[State, bool, list[tuple[Case, State]]]]:
    """The states that are reached, with their steps."""
    known, waiting = set[State](), [start]
    while waiting:
        state = waiting.pop()
        if state not in known:
            known.add(state)
            is_end, cases = steps(state)
            yield state, is_end, cases
            waiting += [after for _, after in cases]


def write_states(writer: Writer, start: State, steps: Steps[str], keyword: str) -> str | None:
    """Write one rule for each state from which an end is reached. Returns the rule of the start; None if it reaches no end."""
    cases, before, states_with_end = dict[State, tuple[bool, list[tuple[str, State]]]](), dict[State, list[State]](), list[State]()
    for state, is_end, following in _explored(start, steps):
        if len(cases) >= MAX_STATES:
            reject(writer.where, keyword, f"takes more than {MAX_STATES} combinations of counts; write smaller ones")
        cases[state] = is_end, following
        states_with_end += [state] * is_end
        for _, after in following:
            before.setdefault(after, []).append(state)
    names = {state: writer.rule("") for state in states_with_end}
    for state in states_with_end:  # grows
        for other in before.get(state, ()):
            if other not in names:
                names[other] = writer.rule("")
                states_with_end.append(other)
    for state, name in names.items():
        is_end, following = cases[state]
        texts = [f"{text} {names[after]}" for text, after in following if after in names]
        writer.rules[name] = " | ".join([*texts, *['""'] * is_end])
    return names.get(start)
