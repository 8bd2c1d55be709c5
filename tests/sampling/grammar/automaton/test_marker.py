"""Images of grammars after a marker: masks, statuses and legal tokens are those of a MarkerMatcher around the same grammar."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, GrammarLimits, Vocabulary
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar
from stepgraph.sampling.grammar.automaton.library import Field, next_entries
from stepgraph.sampling.grammar.matchers.marker import Marker, MarkerMatcher
from stepgraph.sampling.grammar.status import BITS_PER_WORD
from tests.helpers.automaton_cases import VOCABULARY
from tests.helpers.c_library import needs_c
from tests.sampling.grammar.matchers.test_marker import SMALL

pytestmark = needs_c

# A token that is hidden from xgrammar: it is legal before the end of the marker and never after it.
BREAKS = Vocabulary([b"\n", b"\r", b"\n\r", b"\r\r\n", b"\r\r\r\n", b"a", b"b", b"ab", b"", b"<c>"], [8], control_token_ids=[9])
NO_B = Vocabulary([b"a", b"aa", b"c", b""], [3])
BRACKETS = r'root ::= "(" root ")" root | "x" | ""'
CASES = {
    SMALL: (("a", "aab", "abab", "bb", "aaba"), Constraint.regex("x+|ab")),
    VOCABULARY: (('"', "</think>", "é", "日本", "aa", 'a",', "))"), Constraint.ebnf(BRACKETS)),
    BREAKS: (("a", "\r\n", "ab", "\r\r", "bb"), Constraint.regex("[ab\r\n]*")),
    NO_B: (("aac", "ab"), Constraint.regex("a{2,40}")),
}


Pair = tuple[AutomatonGrammar, AutomatonGrammar]


def both(
    vocabulary: Vocabulary, constraint: Constraint, marker: str, limits: GrammarLimits | None = None, limit: int | None = None
) -> Pair:
    """The grammar after the marker, and the grammar alone."""
    compiler = GrammarCompiler(vocabulary, backend="automaton", limits=limits)
    after, alone = compiler.compile(constraint.after(marker, limit=limit)), compiler.compile(constraint)
    assert after.marker is None and isinstance(after.grammar, AutomatonGrammar) and isinstance(alone.grammar, AutomatonGrammar)
    return after.grammar, alone.grammar


def compare(grammars: Pair, marker: Marker, draw: Random, texts: int, length: int = 16) -> int:
    """The number of random texts that reached the end of the marker."""
    (after, alone), ends = grammars, 0
    vocabulary = alone.vocabulary
    ids = range(-1, len(vocabulary.tokens) + 1)
    for _ in range(texts):
        ours, expected = after.matcher(), MarkerMatcher(alone.matcher(), marker)
        rows = torch.full((2, vocabulary.mask_words), -1, dtype=torch.int32)
        for _ in range(length):
            status = ours.fill_next_token_bitmask(rows, 0)
            assert status == expected.fill_next_token_bitmask(rows, 1) and torch.equal(rows[0], rows[1])
            assert ours.forced_bytes() == expected.forced_bytes()
            words = rows[0].tolist()
            legal = [token for token in ids[1:-1] if words[token // BITS_PER_WORD] >> token % BITS_PER_WORD & 1]
            for token in draw.sample(ids, min(40, len(ids))):
                accepted = ours.accept_token(token)
                assert accepted == (token in legal)
                ours.rollback(accepted)
            if not legal:
                break
            # In half of the steps, a token that continues the marker, so that the marker ends.
            state = expected.state
            closer = [token for token in legal if state < marker.complete and (marker.next_state(state, token) or 0) > state]
            assert closer or marker.limit is None or expected.past_marker or expected.num_free < marker.limit, "only the marker is legal"
            token = draw.choice(closer if closer and draw.random() < 0.5 else legal)
            assert ours.accept_token(token) and expected.accept_token(token)
        ends += expected.past_marker
    return ends


@pytest.mark.parametrize("vocabulary", CASES, ids=lambda vocabulary: f"{len(vocabulary.tokens)} tokens")
def test_masks_and_tokens_are_those_of_a_marker_matcher(vocabulary: Vocabulary) -> None:
    markers, constraint = CASES[vocabulary]
    ends = sum(
        compare(both(vocabulary, constraint, marker), Marker(marker, vocabulary), Random(marker), 24 // len(markers) + 4)
        for marker in markers
    )
    assert ends > 8


@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("vocabulary", CASES, ids=lambda vocabulary: f"{len(vocabulary.tokens)} tokens")
def test_after_the_limit_only_the_marker_is_legal(vocabulary: Vocabulary, limit: int) -> None:
    markers, constraint = CASES[vocabulary]
    for marker in (marker for marker in markers if vocabulary is not NO_B or "b" not in marker):
        grammars = both(vocabulary, constraint, marker, limit=limit)
        assert compare(grammars, Marker(marker, vocabulary, limit), Random(marker), 8, limit + len(marker.encode()) + 2) == 8


@pytest.mark.parametrize("field", [Field.LIMIT, Field.LIMITED])
def test_a_planted_error_of_the_limit_is_found(field: Field) -> None:
    after, alone = both(SMALL, Constraint.regex("x+|ab"), "aab", limit=3)
    image = after.image.copy()
    image[field] += 1
    with pytest.raises(AssertionError):
        compare((AutomatonGrammar(image, after.table, SMALL), alone), Marker("aab", SMALL, 3), Random(1), 40)


def test_a_hidden_token_is_legal_before_the_marker_only() -> None:
    (hidden,) = BREAKS.xgrammar_unsafe_ids
    matcher = both(BREAKS, CASES[BREAKS][1], "a")[0].matcher()
    assert matcher.accept_token(hidden) and matcher.accept_token(BREAKS.tokens.index(b"a"))
    assert not matcher.accept_token(hidden) and matcher.accept_token(BREAKS.tokens.index(b"\r\r\n"))


@pytest.mark.parametrize("field", [Field.NEXT, Field.CHANGE_VALUE, Field.FREE, Field.CLASS_OF])
def test_a_planted_error_is_found(field: Field) -> None:
    after, alone = both(SMALL, Constraint.regex("x+|ab"), "aab")
    image = after.image.copy()
    free = int(image[Field.FREE])
    if field is Field.FREE:
        image[Field.FREE] = image[Field.STATES]
    elif field is Field.CLASS_OF:
        image[image[field] + ord("a")] = image[image[field] + ord("z")]
    elif field is Field.NEXT:
        next_entries(image)[free, image[image[Field.CLASS_OF] + ord("a")]] = free
    else:
        image[image[field] : image[field + 1]] ^= 2
    with pytest.raises(AssertionError):
        compare((AutomatonGrammar(image, after.table, SMALL), alone), Marker("aab", SMALL), Random(1), 40)


def test_a_marker_that_does_not_fit_uses_a_marker_matcher() -> None:
    constraint = Constraint.regex("x+").after("ab" * 100)
    size = both(SMALL, Constraint.regex("x+"), "ab" * 100)[0].nbytes
    compiled = GrammarCompiler(SMALL, backend="automaton", limits=GrammarLimits(automaton_bytes=size - 1)).compile(constraint)
    assert compiled.marker is not None and isinstance(compiled.matcher(), MarkerMatcher)
    of_ids = GrammarCompiler(SMALL, backend="automaton").compile(Constraint.regex("x+").after([9]))
    assert of_ids.marker is not None and isinstance(of_ids.matcher(), MarkerMatcher)


def test_the_grammar_after_the_marker_is_checked() -> None:
    with pytest.raises(ValueError, match="no text of this vocabulary satisfies it"):
        GrammarCompiler(NO_B, backend="automaton").compile(Constraint.regex("b").after("a"))


def test_the_image_contains_that_of_the_grammar_alone() -> None:
    after, alone = both(VOCABULARY, CASES[VOCABULARY][1], "</think>")
    assert after.image[Field.FREE] == alone.image[Field.STATES] == alone.image[Field.FREE]
    assert after.image[Field.START] == after.image[Field.FREE] and not after.image[Field.DENSE] % 4
    assert np.array_equal(after.image[Field.DEPTH : Field.FREE], alone.image[Field.DEPTH : Field.FREE])
