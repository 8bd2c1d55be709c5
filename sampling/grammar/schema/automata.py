"""Minimal automata of languages, and whether a language is empty."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from stepgraph.sampling.grammar.constraints.charset import CharSet
from stepgraph.sampling.grammar.schema.language import ANY_CHAR, NOTHING, START, SURROGATES, Label, Term, both, repeat_bounds

MAX_STATES = 20_000  # of one automaton
MAX_LENGTH_STATES = 5_000  # of one automaton that counts characters


class TooComplexError(ValueError):
    """A language whose automaton takes more states than are allowed."""


@dataclass(frozen=True)
class Automaton:
    """State 0 is the start. From each state at least one text is accepted. The automaton of an empty language has no states."""

    edges: list[list[tuple[CharSet, int]]]  # by state
    accepts: list[bool]


_Ranges = list[tuple[int, int, int]]  # first and last character of a range, and the state that it leads to; ascending
_Case = tuple[bool, tuple[tuple[int, int, int], ...]]  # whether a state accepts, and its ranges


@functools.lru_cache(maxsize=512)
def automaton(term: Term) -> Automaton:
    """The minimal automaton; TooComplexError."""
    bounds, rest = split_length(term)
    if bounds is not None:
        return _of_length(automaton(rest), *repeat_bounds(bounds))
    return _minimal(*_explored(term))


def _explored(term: Term) -> tuple[list[_Ranges], list[bool]]:
    """The edges of the states, each the texts that may follow, and whether they accept; TooComplexError."""
    states, order, edges = {term: 0}, [term], list[_Ranges]()
    for state in order:  # grows
        starts, terms = state.transitions()
        found: _Ranges = []
        for index, target in enumerate(terms):
            first, last = starts[index], min(starts[index + 1] - 1, START - 1)
            parts = (first, min(last, SURROGATES[0] - 1)), (max(first, SURROGATES[1] + 1), last)
            pieces = [piece for piece in parts if piece[0] <= piece[1]]
            if target is NOTHING or not pieces:
                continue
            if target not in states:
                if len(states) >= MAX_STATES:
                    raise TooComplexError(f"takes more than {MAX_STATES} states; write a simpler pattern")
                states[target] = len(order)
                order.append(target)
            found += [(*piece, states[target]) for piece in pieces]
        edges.append(found)
    return edges, [state.nullable for state in order]


def split_length(term: Term) -> tuple[Term | None, Term]:
    """The part of an intersection that bounds only the length, or None, and the rest."""
    bounds = (
        next((part for part in term.parts if part.kind == "repeat" and part.parts[0] is ANY_CHAR), None) if term.kind == "and" else None
    )
    return bounds, term if bounds is None else both(*(part for part in term.parts if part is not bounds))


def _layers(source: Automaton, low: int, high: int | None) -> list[set[int]]:
    """The states after each number of characters. Without an upper bound, characters are counted up to the lower one."""
    found, num_counted, following = [{0} if source.edges else set[int]()], 0, [{target for _, target in leads} for leads in source.edges]
    while found[-1] and len(found) <= (low if high is None else high) + 1:
        num_counted += len(found[-1])
        if num_counted > MAX_LENGTH_STATES:
            raise TooComplexError(f"takes more than {MAX_LENGTH_STATES} states with its length; write smaller bounds")
        found.append(set[int]().union(*(following[state] for state in found[-1])))
    return found[:-1]


def _of_length(source: Automaton, low: int, high: int | None) -> Automaton:
    """The texts of these lengths. States, each of the source and with a number of characters, are merged from the largest number down."""
    flat = [sorted((first, end, target) for members, target in leads for first, end in members) for leads in source.edges]
    layers, numbers = _layers(source, low, high), dict[_Case, int]()
    after = [-1] * len(flat)  # the number of each state after one more character; -1: no text is accepted from it
    if high is None and len(layers) > low:  # the last states count no more
        after = list(range(len(flat)))
        numbers = {(source.accepts[state], tuple(ranges)): state for state, ranges in enumerate(flat)}
        layers.pop()
    for length, layer in reversed([*enumerate(layers)]):
        now = [-1] * len(flat)
        for state in layer:
            key = source.accepts[state] and length >= low, tuple(_merged_ranges(flat[state], after))
            if any(key):
                now[state] = numbers.setdefault(key, len(numbers))
        after = now
    if not after or after[0] < 0:
        return Automaton([], [])
    return _numbered(after[0], dict(enumerate(numbers)))


def _minimal(edges: list[_Ranges], accepts: list[bool]) -> Automaton:
    before = defaultdict[int, set[int]](set)
    for state, ranges in enumerate(edges):
        for _, _, target in ranges:
            before[target].add(state)
    distance = _distances(before, accepts)
    if 0 not in distance:
        return Automaton([], [])
    members, leads_to = _blocks(edges, before, distance)
    start = next(number for number, states in members.items() if 0 in states)
    ones = {number: next(iter(states)) for number, states in members.items()}
    return _numbered(start, {number: (accepts[state], tuple(leads_to[state])) for number, state in ones.items()})


def _numbered(start: int, cases: Mapping[int, _Case]) -> Automaton:
    """The automaton with states numbered in the order in which they are reached."""
    found, numbers, order = Automaton([], []), {start: 0}, [start]
    for state in order:  # grows
        leads = defaultdict[int, list[tuple[int, int]]](list)
        accepts, ranges = cases[state]
        for first, last, target in ranges:
            if target not in numbers:
                numbers[target] = len(order)
                order.append(target)
            leads[numbers[target]].append((first, last))
        found.edges.append([(tuple(pairs), target) for target, pairs in leads.items()])
        found.accepts.append(accepts)
    return found


def _blocks(
    edges: list[_Ranges], before: Mapping[int, set[int]], distance: Mapping[int, int]
) -> tuple[dict[int, set[int]], dict[int, _Ranges]]:
    """The states of each block of equivalent states, and the edges of each state to blocks.

    Blocks of states with equal distances are split until the edges of all states of a block lead to the same blocks.
    """
    block = [distance.get(state, -1) for state in range(len(edges))]
    members = defaultdict[int, set[int]](set)
    for state in distance:
        members[block[state]].add(state)
    keys, changed, count = dict[int, _Ranges](), set(distance), max(block) + 1
    while changed:
        split = {block[state] for state in changed if len(members[block[state]]) > 1}
        keys.update((state, _merged_ranges(edges[state], block)) for state in changed)
        changed = set()
        for old in split:
            groups = defaultdict[Label, set[int]](set)
            for state in members[old]:
                groups[tuple(keys[state])].add(state)
            largest, *others = sorted(groups.values(), key=len, reverse=True)
            members[old] = largest
            for group in others:
                members[count] = group
                for state in group:
                    block[state] = count
                    changed |= before[state] & distance.keys()
                count += 1
    return members, keys


def _distances(before: Mapping[int, set[int]], accepts: list[bool]) -> dict[int, int]:
    """The states that lead to an accepting state, with the distance. Equivalent states have equal distances, so few splits are left."""
    found = [state for state, accept in enumerate(accepts) if accept]
    distance = dict.fromkeys(found, 0)
    for state in found:  # grows
        for other in before.get(state, ()):
            if other not in distance:
                distance[other] = distance[state] + 1
                found.append(other)
    return distance


def _merged_ranges(ranges: _Ranges, block: list[int]) -> _Ranges:
    """The edges to blocks. Adjacent ranges that lead to the same block are joined; edges to states that accept no text are left out."""
    found: _Ranges = []
    end, lead = -1, -1  # of the last range
    for first, last, target in ranges:
        to = block[target]
        if to < 0:
            continue
        if to == lead and first == end + 1:
            first = found.pop()[0]
        found.append((first, last, to))
        end, lead = last, to
    return found


def list_texts(term: Term, limit: int) -> list[str] | None:
    """All texts, the shortest first; None if there are more than `limit`."""
    found, ends, machine = list[str](), [("", 0)] if not is_empty(term) else [], automaton(term)
    while ends:
        longer = list[tuple[str, int]]()
        for text, state in ends:
            found += [text] * machine.accepts[state]
            for chars, target in machine.edges[state]:
                if sum(last - first + 1 for first, last in chars) > limit:
                    return None
                longer += [(text + chr(char), target) for first, last in chars for char in range(first, last + 1)]
        if len(found) + len(longer) > limit:  # each item of `longer` leads to at least one text
            return None
        ends = longer
    return found


def is_empty(term: Term) -> bool:
    """Whether the language has no text; TooComplexError where its automaton is too large."""
    if term.is_regex or term.kind == "named":
        return term is NOTHING
    if term.kind == "alt":
        return all(map(is_empty, term.parts))
    return not (term.kind == "not" and term.parts[0].kind == "words") and not _has_text(term)


@functools.lru_cache(maxsize=512)
def _has_text(term: Term) -> bool:
    bounds, rest = split_length(term)
    if bounds is None:
        return any(_explored(term)[1])
    source, (low, high) = automaton(rest), repeat_bounds(bounds)
    return any(high is None or source.accepts[state] for layer in _layers(source, low, high)[low:] for state in layer)
