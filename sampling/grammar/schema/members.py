"""The properties of an object as EBNF: declared properties in their order, then others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from stepgraph.sampling.grammar.constraints.unsupported import reject
from stepgraph.sampling.grammar.schema.automata import is_empty
from stepgraph.sampling.grammar.schema.forms import Expr, KeyClass, Object, all_of
from stepgraph.sampling.grammar.schema.items import MAX_STATES, State, Writer, list_texts_if_few, listed, write_states
from stepgraph.sampling.grammar.schema.language import Term, both, complement, matches, words
from stepgraph.sampling.grammar.schema.spelling import json_literal, repeated

MAX_ANY_ORDER = 8  # declared properties
MAX_WITNESS_CASES = 512  # cases of the witnesses of one object
MAX_INLINE_CHARS = 60  # characters that are repeated instead of becoming a rule


def members_texts(writer: Writer, item: Object) -> list[str]:
    """The texts between the braces, one for each case."""
    found = [_properties(writer, one, last) for one, last in _witness_cases(writer, item)]
    return [text for text in found if text is not None]


def _witness_cases(writer: Writer, item: Object, undeclared: tuple[KeyClass, ...] = ()) -> Iterator[tuple[Object, tuple[KeyClass, ...]]]:
    """The cases of an object, by which declared properties satisfy its witnesses; with the undeclared properties that satisfy the other
    witnesses, no two of which have the same name. `undeclared`: witnesses left for undeclared properties."""
    if not item.witnesses:
        cases = list(itertools.islice(_disjoint_keys(writer, undeclared), MAX_WITNESS_CASES + 1))
        if len(cases) > MAX_WITNESS_CASES:
            reject(writer.where, "not", f"requires undeclared properties in more than {MAX_WITNESS_CASES} ways; declare them in properties")
        for last in cases:
            yield item, last
        return
    names = {witness: _names_to_declare(item, witness) for witness in item.witnesses}
    first = next((witness for witness in item.witnesses if names[witness] is not None), item.witnesses[0])
    rest = replace(item, witnesses=tuple(witness for witness in item.witnesses if witness is not first))
    for name in names[first] or ():
        value_expr = all_of(item.value(name), first.value)
        if writer.is_satisfiable(value_expr):
            declared = (*item.declared, (name, value_expr))
            yield from _witness_cases(writer, replace(rest, declared=declared, required=item.required | {name}), undeclared)
    for index, (name, value) in enumerate(item.declared):
        value_expr = all_of(value, first.value)
        if matches(first.names, name) and writer.is_satisfiable(value_expr):
            declared = (*item.declared[:index], (name, value_expr), *item.declared[index + 1 :])
            yield from _witness_cases(writer, replace(rest, declared=declared, required=item.required | {name}), undeclared)
    if names[first] is None and any(
        writer.is_satisfiable(all_of(first.value, keys.value)) and not is_empty(both(first.names, keys.names)) for keys in item.others
    ):
        yield from _witness_cases(writer, rest, (*undeclared, first))


def _disjoint_keys(writer: Writer, witnesses: tuple[KeyClass, ...], last: tuple[KeyClass, ...] = ()) -> Iterator[tuple[KeyClass, ...]]:
    """Properties without common names that satisfy these witnesses, after `last`. One property may satisfy several witnesses."""
    if not witnesses:
        yield last
        return
    first, rest = witnesses[0], witnesses[1:]
    for index, keys in enumerate(last):
        common = KeyClass(both(keys.names, first.names), all_of(keys.value, first.value))
        if writer.is_satisfiable(common.value) and not is_empty(common.names):
            yield from _disjoint_keys(writer, rest, (*last[:index], common, *last[index + 1 :]))
    common_names = [list_texts_if_few(both(keys.names, first.names)) for keys in last]
    if any(names is None or len(names) > 1 for names in common_names):
        writer.narrow("not", "is enforced without texts in which two undeclared properties each have a name that the same two parts match")
    # As a separate property: for each other property, one of the two has a name that the other cannot have.
    for chosen in itertools.product((True, False), repeat=len(last)):
        separate, others = first, list(last)
        for index, keys in enumerate(last):
            if chosen[index]:
                separate = separate._replace(names=both(separate.names, complement(keys.names)))
            else:
                others[index] = keys._replace(names=both(keys.names, complement(first.names)))
        if not any(is_empty(keys.names) for keys in (separate, *others)):
            yield from _disjoint_keys(writer, rest, (*others, separate))


def _names_to_declare(item: Object, witness: KeyClass) -> list[str] | None:
    """The undeclared names of a witness, to be declared, if they are few; else None."""
    names = list_texts_if_few(both(witness.names, complement(words(item.values))))
    return names if names is not None and len(names) ** len(item.witnesses) <= MAX_WITNESS_CASES else None


def _properties(writer: Writer, item: Object, witnesses: tuple[KeyClass, ...]) -> str | None:
    """The text between the braces; None if no object is possible."""
    closed = writer.is_closed and item.closable
    declared = [(name, value) for name, value in item.declared if writer.is_satisfiable(value)]
    excluded = complement(words(name for name, _ in item.declared))
    others = _other_property_text(writer, [keys for keys in item.others if not (closed and keys.is_default)], excluded)
    ends = list[str]()
    for witness in witnesses:
        last = [keys._replace(names=both(keys.names, witness.names), value=all_of(keys.value, witness.value)) for keys in item.others]
        ends.append(_other_property_text(writer, last, excluded))
    if "" in ends:
        return None
    pairs = [(_property_text(writer, json_literal(name), value), name in item.required) for name, value in declared]
    text = _Members(writer, pairs, others, ends, item.low, item.high).text()
    if text is None and closed and any(keys.is_default for keys in item.others):
        return _properties(writer, replace(item, closable=False), witnesses)
    return text


def _other_property_text(writer: Writer, classes: list[KeyClass], excluded: Term) -> str:
    """A property with a name of one of the classes; empty if there is none."""
    found = list[str]()
    for keys in classes:
        names = both(keys.names, excluded)
        if writer.is_satisfiable(keys.value) and not is_empty(names):
            key = writer.string(names)
            found.append(_property_text(writer, key, keys.value))
    return found[0] if len(found) == 1 else f"({' | '.join(found)})" if found else ""


def _property_text(writer: Writer, key: str, value: Expr) -> str:
    return f"{key} {writer.colon} {writer.value(value)}"


class _Members:
    """The properties of an object: declared properties in their order, then others. `ends`: the last of the others, all required."""

    def __init__(self, writer: Writer, pairs: list[tuple[str, bool]], others: str, ends: list[str], low: int, high: int | None) -> None:
        self._writer, self._pairs, self._others, self._ends = writer, pairs, others, ends
        self._comma = f"{writer.comma} "
        required = self._required = sum(is_required for _, is_required in pairs)
        capacity = None if others or ends else len(pairs)
        self._low = low if low > required else 0
        self._high = None if high is None or (capacity is not None and high >= capacity) else high
        self._most = max(1, self._low, self._high or 0)  # counts up to here are distinguished
        if self._most > 1 and (self._most + 1) * (len(pairs) + 1) > MAX_STATES:
            reject(
                writer.where,
                "minProperties" if self._low else "maxProperties",
                f"takes more than {MAX_STATES} rules; write a smaller count",
            )

    def text(self) -> str | None:
        if self._writer.any_order and len(self._pairs) > 1:
            return self._in_any_order()
        counted = self._most > 1
        first_required = next((index for index, (_, is_required) in enumerate(self._pairs) if is_required), len(self._pairs))
        after: list[list[str] | None] = [self._end(count) for count in range(self._most + 1)]
        for index in range(len(self._pairs) - 1, -1, -1):
            if counted or index < first_required:  # the rest is used several times
                for count, cases in enumerate(after[1:], 1):
                    if cases and (len(cases) > 1 or len(cases[0]) > MAX_INLINE_CHARS):
                        after[count] = [self._writer.rule(_cases(cases))]
            after = [self._tail(index, count, after) for count in range(self._most + 1)]
        found = after[0]
        return None if found is None else _grouped(found)

    def _in_any_order(self) -> str | None:
        """A state is the set of declared properties so far, as bits."""
        if len(self._pairs) > MAX_ANY_ORDER:
            most = f"expected at most {MAX_ANY_ORDER} with property_order='any'"
            reject(self._writer.where, "properties", f"has {len(self._pairs)} names, {most}")
        required = sum(is_required << index for index, (_, is_required) in enumerate(self._pairs))
        ended = (-1,)

        def steps(state: State) -> tuple[bool, list[tuple[str, State]]]:
            (used,) = state
            if state == ended:
                return True, []
            count, found = used.bit_count(), list[tuple[str, State]]()
            if self._high is None or count < self._high:
                comma = self._comma if count else self._writer.opening
                pairs = enumerate(self._pairs)
                found += [(comma + pair, (used | 1 << index,)) for index, (pair, _) in pairs if not used >> index & 1]
            ends = (self._end(min(count, self._most)) or []) if used & required == required else []
            return "" in ends, [*found, *((end, ended) for end in ends if end)]

        return write_states(self._writer, (0,), steps, "properties")

    def _tail(self, index: int, count: int, after: list[list[str] | None]) -> list[str] | None:
        """The cases from a declared property on, with `count` of them before it."""
        pair, is_required = self._pairs[index]
        comma = self._comma if count else self._writer.opening
        next_count = min(count + 1, self._most)
        taken, skipped = after[next_count] if self._high is None or count < self._high else None, None if is_required else after[count]
        if taken is not None and taken is skipped:
            return [f"({comma}{pair})? {_grouped(taken)}"]
        cases = [f"{comma}{pair} {_grouped(taken)}"] if taken is not None else []
        return [*cases, *(skipped or [])] or None

    def _end(self, count: int) -> list[str] | None:
        """The cases after all declared properties. Other properties may have equal names, so at most one of them is counted, except those
        at the end."""
        needed, comma = max(self._low - count, 0), self._comma if count else self._writer.opening
        room, ends = None if self._high is None else self._high - count, len(self._ends)
        if needed > max(ends, 1) and self._others and count >= self._required:
            self._writer.narrow("minProperties", "is enforced with at most one property that is not declared")
        if needed > max(ends, 1) or (room is not None and room < ends):
            return None
        if self._ends:
            before = repeated(f"{self._others} {self._comma}", 0, None if room is None else room - ends) if self._others else ""
            return [f"{comma}{before} {f' {self._comma}'.join(self._ends)}"]
        if not self._others or room == 0:
            return None if needed else [""]
        return [listed(self._writer, self._others, needed, room, is_first=not count)]


def _grouped(cases: list[str]) -> str:
    return cases[0] if len(cases) == 1 else f"({_cases(cases)})"


def _cases(cases: list[str]) -> str:
    return " | ".join(case or '""' for case in cases)
