"""How much text a grammar wants at the least, computed before it is compiled: some want more than there will ever be.

Forced drafts ask the library what must come next, and it writes all of it. Whatever the text so far, that is no more than the shortest
end: of every rule begun and not ended, the rest of one of its alternatives. So none of those may want more than a limit, and what is
forced is at most that much for every rule that is open. A matcher tells too late: the endless part may lie behind any state.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepgraph.sampling.grammar.compile.limits import GrammarLimits, over

# The library's kinds of expressions, by number; a token, a set of them and a part of a text want nothing that could grow.
_BYTES, _CLASS, _STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _TAGS, _REPEAT, _TOKEN, _OTHER_TOKENS, _TOKEN_TAGS, _REGEX, _PART = range(14)
_ESCAPE = rb"\\(?:[uxpP]\{[^}]*\}|.)"
_REGEX_PIECE = re.compile(rb"\{(\d+)[\d,]*\}|" + _ESCAPE + rb"|\[(?:" + _ESCAPE + rb"|[^\]])*\]|[^()|?*+^$]", re.DOTALL)


class EndlessError(ValueError):
    """A grammar that asks for more text than there will be, by whichever library it were enforced."""


@dataclass
class _Alternative:
    """One way to write a rule: some bytes, and other rules, each some number of times; and those that may be written besides."""

    rule: int
    num_bytes: int = 0
    parts: Counter[int] = field(default_factory=Counter)
    others: set[int] = field(default_factory=set)

    def total(self, least: dict[int, int]) -> int:
        return self.num_bytes + sum(count * least[rule] for rule, count in self.parts.items())


class _Printed:
    """A grammar as the library serialises it, before it is compiled."""

    def __init__(self, serialised: str) -> None:
        told: dict[str, Any] = json.loads(serialised)
        self._data: list[int] = told["grammar_expr_data"]
        self._starts: list[int] = told["grammar_expr_indptr"]
        # The library calls the first rule "root", and another one that was called so "root_0".
        self.names = ["root" if rule[0] == "root_0" else str(rule[0]) for rule in told["rules"]]
        self._bodies = [int(rule[1]) for rule in told["rules"]]
        self.root = int(told["root_rule_id"])

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
            alternative.parts[content[0]] += 1
        elif kind == _REPEAT and content[1]:
            alternative.parts[content[0]] += content[1]
        elif kind == _REPEAT:
            alternative.others.add(content[0])
        elif kind == _TAGS:
            alternative.others.update(content[1:-2:2])
        elif kind == _TOKEN_TAGS:
            alternative.others.update(content[2 : 1 + 2 * content[0] : 2])
        elif kind == _REGEX:
            alternative.num_bytes += _most_of(bytes(content[1:]))
        elif kind not in (_STAR, _EMPTY, _TOKEN, _OTHER_TOKENS, _PART):
            raise ValueError(f"the library's grammar has an expression of kind {kind}, which is not known here")


def check_least(serialised: str, limits: GrammarLimits) -> None:
    """EndlessError naming a rule that no text of finite length satisfies, or one whose shortest text is beyond the limit.

    Rules that are not reached from the first one may be what they like.
    """
    grammar = _Printed(serialised)
    alternatives = list(grammar.alternatives())
    least, reached = _least(alternatives), _reached(grammar.root, alternatives)
    endless = reached - least.keys()
    if endless:
        named = min(endless - {grammar.root} or endless)  # which the first one is, where it leads to another
        raise EndlessError(f"rule {grammar.names[named]}: no text of finite length satisfies it")
    totals = [(alternative.total(least), alternative.rule) for alternative in alternatives if alternative.rule in reached]
    too_long = [found for found in totals if found[0] > limits.least_bytes]
    if too_long:
        size, rule = min(too_long)
        told = f"{size:,}" if size < 10**18 else "more than 10^18"
        raise EndlessError(over("least_bytes", f"{told} bytes that rule {grammar.names[rule]} leads to", limits.least_bytes))


def _least(alternatives: Sequence[_Alternative]) -> dict[int, int]:
    """The bytes of the shortest text of each rule that has one, found in order of size: what is made of others is no shorter."""
    wanted_by = defaultdict[int, list[int]](list)
    for place, alternative in enumerate(alternatives):
        for part in alternative.parts:
            wanted_by[part].append(place)
    missing = [len(alternative.parts) for alternative in alternatives]
    heap = [(alternative.num_bytes, alternative.rule) for alternative in alternatives if not alternative.parts]
    heapq.heapify(heap)
    least = dict[int, int]()
    while heap:
        size, rule = heapq.heappop(heap)
        if rule in least:
            continue
        least[rule] = size
        for place in wanted_by[rule]:
            missing[place] -= 1
            if not missing[place]:
                heapq.heappush(heap, (alternatives[place].total(least), alternatives[place].rule))
    return least


def _reached(root: int, alternatives: Sequence[_Alternative]) -> set[int]:
    leads_to = defaultdict[int, set[int]](set)
    for alternative in alternatives:
        leads_to[alternative.rule] |= alternative.parts.keys() | alternative.others
    reached, waiting = {root}, [root]
    while waiting:
        new = leads_to[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def _most_of(pattern: bytes) -> int:
    """The shortest text of a regular expression is at most that: all its characters, as often as all its counts together say."""
    pieces = list(_REGEX_PIECE.finditer(pattern))
    counts = [int(piece[1][:9]) for piece in pieces if piece[1]]
    return (len(pieces) - len(counts)) * math.prod(max(count, 1) for count in counts)
