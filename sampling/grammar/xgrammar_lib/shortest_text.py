"""The length of the shortest text of each rule of a grammar, computed before it is compiled; some rules have no finite text.

Forced drafts ask the library for the bytes that must come next, and it returns all of them. Their length is at most that of the
shortest completion: for each open rule, the rest of one of its alternatives. So the shortest text of every alternative is limited,
and with it the forced text per open rule. A matcher would find an endless rule too late: it may be reached from any state.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from stepgraph.sampling.grammar.compile.limits import CompileAbortedError, over

# The library's kinds of expressions, by number. A token, a set of tokens and a part of a text have a bounded length.
_BYTES, _CLASS, _STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _TAGS, _REPEAT, _TOKEN, _OTHER_TOKENS, _TOKEN_TAGS, _REGEX, _PART = range(14)
_ESCAPE = rb"\\(?:[uxpP]\{[^}]*\}|.)"
_REGEX_PIECE = re.compile(rb"\{(\d+)[\d,]*\}|" + _ESCAPE + rb"|\[(?:" + _ESCAPE + rb"|[^\]])*\]|[^()|?*+^$]", re.DOTALL)


class _Alternative:
    """One alternative of a rule: its own bytes, and the other rules it contains."""

    __slots__ = ("num_bytes", "optional", "parts", "rule")

    def __init__(self, rule: int) -> None:
        self.rule, self.num_bytes = rule, 0
        self.parts: dict[int, int] = {}  # how often a rule is required
        self.optional: tuple[int, ...] = ()  # rules that may follow but need not

    def total(self, shortest: dict[int, int]) -> int:
        total = self.num_bytes
        for rule, count in self.parts.items():
            total += count * shortest[rule]
        return total


class _SerialisedGrammar:
    """A parsed grammar as the library serialises it."""

    def __init__(self, serialised: str) -> None:
        grammar: dict[str, Any] = json.loads(serialised)
        self._data: list[int] = grammar["grammar_expr_data"]
        self._starts: list[int] = grammar["grammar_expr_indptr"]
        # The library renames the root rule to "root", and another rule of that name to "root_0".
        self.names = ["root" if rule[0] == "root_0" else str(rule[0]) for rule in grammar["rules"]]
        self._bodies = [int(rule[1]) for rule in grammar["rules"]]
        self.root = int(grammar["root_rule_id"])

    def alternatives(self) -> Iterator[_Alternative]:
        for rule, body in enumerate(self._bodies):
            kind, content = self._expression(body)
            for expression in content if kind == _CHOICES else [body]:
                alternative = _Alternative(rule)
                kind, content = self._expression(expression)
                for element in content if kind == _SEQUENCE else [expression]:
                    self._add(element, alternative)
                yield alternative

    def _expression(self, index: int) -> tuple[int, list[int]]:
        start = self._starts[index]
        kind, size = self._data[start : start + 2]
        return kind, self._data[start + 2 : start + 2 + size]

    def _add(self, index: int, alternative: _Alternative) -> None:
        kind, content = self._expression(index)
        if kind == _BYTES:
            alternative.num_bytes += len(content)
        elif kind == _CLASS:
            negated, *ends = content
            alternative.num_bytes += 1 if negated else len(chr(min(ends)).encode(errors="surrogatepass"))
        elif kind == _RULE:
            alternative.parts[content[0]] = alternative.parts.get(content[0], 0) + 1
        elif kind == _REPEAT and content[1]:
            alternative.parts[content[0]] = alternative.parts.get(content[0], 0) + content[1]
        elif kind == _REPEAT:
            alternative.optional += (content[0],)
        elif kind == _TAGS:
            alternative.optional += tuple(content[1:-2:2])
        elif kind == _TOKEN_TAGS:
            alternative.optional += tuple(content[2 : 1 + 2 * content[0] : 2])
        elif kind == _REGEX:
            alternative.num_bytes += _bound_of(bytes(content[1:]))
        elif kind not in (_STAR, _EMPTY, _TOKEN, _OTHER_TOKENS, _PART):
            raise ValueError(f"the library's grammar has an expression of the unknown kind {kind}")


def check_shortest_texts(serialised: str, least_bytes: int) -> None:
    """CompileAbortedError naming a rule without a finite text, or with an alternative whose shortest text exceeds `least_bytes`.

    Rules that the root rule does not reach are ignored.
    """
    grammar = _SerialisedGrammar(serialised)
    alternatives = list(grammar.alternatives())
    shortest, reached = _shortest(alternatives), _reached(grammar.root, alternatives)
    endless = reached - shortest.keys()
    if endless:
        named = min(endless - {grammar.root} or endless)  # the root rule is endless too where it leads to another one
        raise CompileAbortedError(f"rule {grammar.names[named]}: no text of finite length satisfies it")
    totals = [(alternative.total(shortest), alternative.rule) for alternative in alternatives if alternative.rule in reached]
    too_long = [found for found in totals if found[0] > least_bytes]
    if too_long:
        size, rule = min(too_long)
        got = f"{size:,}" if size < 10**18 else "more than 10^18"
        raise CompileAbortedError(over("least_bytes", f"{got} bytes that rule {grammar.names[rule]} leads to", least_bytes))


def _shortest(alternatives: Sequence[_Alternative]) -> dict[int, int]:
    """The bytes of the shortest text of each rule that has a finite one, found in ascending order as in Dijkstra's algorithm."""
    used_by = defaultdict[int, list[int]](list)
    for index, alternative in enumerate(alternatives):
        for part in alternative.parts:
            used_by[part].append(index)
    missing = [len(alternative.parts) for alternative in alternatives]
    heap = [(alternative.num_bytes, alternative.rule) for alternative in alternatives if not alternative.parts]
    heapq.heapify(heap)
    shortest = dict[int, int]()
    while heap:
        size, rule = heapq.heappop(heap)
        if rule in shortest:
            continue
        shortest[rule] = size
        for index in used_by[rule]:
            missing[index] -= 1
            if not missing[index]:
                heapq.heappush(heap, (alternatives[index].total(shortest), alternatives[index].rule))
    return shortest


def _reached(root: int, alternatives: Sequence[_Alternative]) -> set[int]:
    leads_to = defaultdict[int, set[int]](set)
    for alternative in alternatives:
        leads_to[alternative.rule].update(alternative.parts, alternative.optional)
    reached, waiting = {root}, [root]
    while waiting:
        new = leads_to[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def _bound_of(pattern: bytes) -> int:
    """An upper bound for the shortest text of a regular expression: all its characters times the product of all its counts."""
    pieces = list(_REGEX_PIECE.finditer(pattern))
    counts = [int(piece[1][:9]) for piece in pieces if piece[1]]
    return (len(pieces) - len(counts)) * math.prod(max(count, 1) for count in counts)
