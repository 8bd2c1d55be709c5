"""Masks along random chains of drafts over vocabularies of at least 128k tokens: bit-identical to those of a fresh matcher.

A chain is what a round does to a matcher: legal, illegal and stop tokens as drafts, a mask after each, then a rollback of any number
of them. `make soak` checks 20,000 masks per library and vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, GrammarLimits, MaskStatus, Matcher, Vocabulary
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.llguidance_lib.grammar import LLGuidanceText
from tests.helpers.c_library import EACH_BACKEND
from tests.helpers.grammar_texts import TAGS
from tests.helpers.vocabularies import VOCABULARIES, vocabulary

FIELDS = {
    "name": {"type": "string", "maxLength": 20},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
}
NESTED = {"type": "object", "properties": FIELDS, "required": [*FIELDS]}
_BRACKETS = Constraint.ebnf('root ::= x+\nx ::= "(" x ")" | [a-z]+ | "[" x "]"')
_EXPRESSIONS = Constraint.ebnf('root ::= e\ne ::= t (" "? [-+] " "? t)*\nt ::= [0-9]+ | "(" e ")" | "[" e ("," e)* "]"')
BRACKETS = {
    "automaton": replace(_BRACKETS, backend="automaton"),
    "xgrammar": replace(_BRACKETS, backend="xgrammar"),
    "llguidance": Constraint.lark('start: x+\nx: "(" x ")" | /[a-z]+/ | "[" x "]"'),
}
EXPRESSIONS = {
    "automaton": replace(_EXPRESSIONS, backend="automaton"),
    "xgrammar": replace(_EXPRESSIONS, backend="xgrammar"),
    "llguidance": Constraint.lark('start: e\ne: t (/ ?[-+] ?/ t)*\nt: /[0-9]+/ | "(" e ")" | "[" e ("," e)* "]"'),
}
MAX_HISTORY = 40
MASKS = 20_000  # per library and vocabulary, of the long run
_PUNCTUATION = frozenset([b'"', b"}", b"]", b")", b",", b"<", b"/", b"(", b"["])
Words = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]


def constraints(backend: str) -> list[Constraint]:
    choice = cast(BackendChoice, backend)
    return [
        Constraint.json_object(backend=choice),
        Constraint.json_schema(NESTED, backend=choice),
        EXPRESSIONS[backend],
        BRACKETS[backend],
        Constraint.regex(r"[a-z0-9._]+@[a-z0-9-]+(\.[a-z]{2,6}){1,2}", choice),
        Constraint.regex("[a-z ]{0,30}", choice),
        Constraint.structural_tag(TAGS, backend=choice),
        Constraint.regex("[a-z ]{0,30}", choice).after("</think>"),
    ]


@functools.cache
def compiled(name: str, backend: str) -> list[CompiledConstraint]:
    compiler = GrammarCompiler(vocabulary(name), max_threads=2, limits=GrammarLimits(step_seconds=30.0))
    return [compiler.compile(constraint) for constraint in constraints(backend)]


class ChainWalker:
    """Takes one matcher through chains of drafts and counts masks that differ from a fresh matcher's."""

    def __init__(self, constraint: CompiledConstraint, random: Random) -> None:
        self.constraint, self.vocabulary, self.random = constraint, constraint.vocabulary, random
        self.matcher, self.history = constraint.matcher(), list[int]()
        self.masks = torch.zeros(1, self.vocabulary.mask_words, dtype=torch.int32)
        self.num_masks = self.differences = self.illegal = self.ends = self.rollbacks = 0

    def walk(self, num_masks: int) -> None:
        while self.num_masks < num_masks:
            drafts = self.random.randint(1, 8)
            accepted = 0
            while accepted < drafts and self.step():
                accepted += 1
            # As in a round: reject drafts, accept the target's token, and only then fill a mask.
            rejected = self.random.randint(0, accepted) if len(self.history) < MAX_HISTORY else len(self.history)
            self.matcher.rollback(rejected)
            del self.history[len(self.history) - rejected :]
            self.rollbacks += rejected > 0
            status, row = self.filled(self.fresh())  # a fresh matcher: self.matcher fills its next mask after the token
            if rejected and status == MaskStatus.OK:
                self.history.append(self.pick(ids_of(row)))
                assert self.matcher.accept_token(self.history[-1])

    def step(self) -> bool:
        """Compare one mask and accept one draft; False at the end of the chain."""
        status, row = self.filled(self.matcher)
        expected_status, expected = self.filled(self.fresh())
        self.num_masks += 1
        self.differences += status != expected_status or not np.array_equal(row, expected)
        token = self.draft(row)
        allowed = bool(int(row[token // 32]) >> token % 32 & 1)
        accepted = self.matcher.accept_token(token)
        self.differences += accepted != allowed
        if not accepted:
            self.illegal += 1
            return False
        self.history.append(token)
        self.ends += token in self.vocabulary.stop_token_ids
        return True

    def draft(self, row: Words) -> int:
        kind = self.random.random()
        if kind < 0.1:
            return self.random.randrange(self.vocabulary.logits_width)
        if kind < 0.22:
            return self.random.choice(self.vocabulary.stop_token_ids)
        legal = ids_of(row)
        stop = self.vocabulary.stop_token_ids[0]
        if not len(legal) or (stop in legal and kind < 0.4):
            return stop
        return self.pick(legal)

    def pick(self, legal: Ids) -> int:
        """Prefers punctuation, which changes the grammar's state, over letters, of which there are many more."""
        sample = [int(token) for token in self.random.choices(legal, k=12)]
        punctuation = [token for token in sample if self.vocabulary.tokens[token][:1] in _PUNCTUATION]
        return self.random.choice(punctuation or sample) if self.random.random() < 0.7 else sample[0]

    def fresh(self) -> Matcher:
        fresh = self.constraint.matcher()
        assert all(fresh.accept_token(token) for token in self.history)
        return fresh

    def filled(self, matcher: Matcher) -> tuple[MaskStatus, Words]:
        self.masks.fill_(0x5A5A5A5A)
        status = matcher.fill_next_token_bitmask(self.masks, 0)
        assert not matcher.fault, matcher.fault
        return status, self.masks[0].numpy().copy()


def ids_of(row: Words) -> Ids:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def walk_all(name: str, backend: str, num_masks: int, seed: int, without: Sequence[Constraint] = ()) -> list[ChainWalker]:
    grammars = [grammar for grammar in compiled(name, backend) if grammar.constraint not in without]
    walkers = [ChainWalker(constraint, Random(seed + index)) for index, constraint in enumerate(grammars)]
    for walker in walkers:
        walker.walk(-(-num_masks // len(walkers)))
    return walkers


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_masks_along_drafts_equal_those_of_a_fresh_matcher(backend: str) -> None:
    slow = [BRACKETS["xgrammar"], Constraint.json_object(backend="xgrammar")]  # 20 to 40 ms per mask
    walkers = walk_all("synthetic", backend, 1200, 1, without=slow)
    assert [walker.differences for walker in walkers] == [0] * len(walkers)
    assert sum(walker.num_masks for walker in walkers) >= 1000
    assert sum(walker.illegal for walker in walkers) > 100 and sum(walker.rollbacks for walker in walkers) > 100
    assert sum(walker.ends for walker in walkers) > 5


@pytest.mark.soak
@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_twenty_thousand_masks_equal_those_of_a_fresh_matcher(name: str, backend: str) -> None:
    walkers = walk_all(name, backend, MASKS, 7)
    assert [walker.differences for walker in walkers] == [0] * len(walkers)
    assert sum(walker.num_masks for walker in walkers) >= MASKS


def test_the_comparison_detects_a_mask_that_is_cached_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LLGuidanceText._compute
    monkeypatch.setattr(LLGuidanceText, "_compute", lambda self, row: None if row is self._scratch else real(self, row))
    (brackets,) = (grammar for grammar in compiled("synthetic", "llguidance") if grammar.constraint == BRACKETS["llguidance"])
    walker = ChainWalker(brackets, Random(1))
    walker.walk(400)
    assert walker.differences > 0


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies_have_the_size_of_real_ones(name: str) -> None:
    table: Vocabulary = vocabulary(name)
    assert len(table.tokens) >= 128_000 and table.logits_width >= len(table.tokens)
    assert {bytes([code]) for code in range(0x20, 0x7F)} <= set(table.tokens)
    assert 0 <= len(table.xgrammar_unsafe_ids) < (100 if name != "synthetic" else 40_000)
