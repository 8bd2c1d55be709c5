"""Operations on byte automata, against all short texts over two letters."""

from __future__ import annotations

import gc
import itertools
import re
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import Vocabulary
from stepgraph.sampling.grammar import Constraint
from stepgraph.sampling.grammar.automaton.grammar import token_table
from stepgraph.sampling.grammar.automaton.library import ByteAutomaton, UnfitError, limits_of
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.xgrammar_lib.grammar import parse

LIMITS = GrammarLimits(automaton_states=500)
BOUNDS = limits_of(asdict(LIMITS))
TEXTS = ["".join(letters) for size in range(7) for letters in itertools.product("ab", repeat=size)]
PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "ab"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "?", "{1,2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=5,
)


def automaton(constraint: Constraint) -> ByteAutomaton:
    return ByteAutomaton.from_grammar(str(parse(constraint, LIMITS).serialize_json()), BOUNDS)


@settings(max_examples=80, deadline=None)
@given(PATTERNS, PATTERNS)
def test_operations_match_sets_of_short_texts(first: str, second: str) -> None:
    left, right = automaton(Constraint.regex(first)), automaton(Constraint.regex(second))
    short = automaton(Constraint.regex("[ab]{0,6}"))
    one, two = ({text for text in TEXTS if re.fullmatch(pattern, text)} for pattern in (first, second))
    for found, expected in (
        (left & right, one & two),
        (left | right, one | two),
        (left - right, one - two),
        (short - left, set(TEXTS) - one),
    ):
        shortest = (found & short).shortest()
        if not expected:
            assert shortest is None
        else:
            assert shortest is not None and shortest.decode() in expected and len(shortest) == min(map(len, expected))


def test_equal_languages_have_no_difference() -> None:
    left, right = automaton(Constraint.regex("(a|b)*abb?")), automaton(Constraint.regex("((a|b)*ab|(a|b)*abb)"))
    assert (left - right).shortest() is None and (right - left).shortest() is None


def test_what_is_not_regular_and_what_is_too_large_is_refused() -> None:
    letters = automaton(Constraint.regex("[ab]*"))
    with pytest.raises(UnfitError, match="needs a stack"):
        letters & automaton(Constraint.ebnf('root ::= "(" root ")" | "a"'))
    last_letters, sevens = automaton(Constraint.regex("[ab]*a[ab]{7}")), automaton(Constraint.regex("([ab]{7})*"))
    with pytest.raises(UnfitError, match=r"automaton_states: .* at most 500"):
        last_letters & sevens


def test_compiling_images_of_new_sizes_defines_no_types() -> None:
    table = token_table(Vocabulary.printable(logits_width=128))

    def num_types_after(lengths: range) -> int:
        images = [table.compile(str(parse(Constraint.regex("a" * length), LIMITS).serialize_json()), BOUNDS) for length in lengths]
        assert len({len(image) for image in images}) == len(lengths) and not any(image.flags.writeable for image in images)
        gc.collect()
        return sum(isinstance(item, type) for item in gc.get_objects())

    before = num_types_after(range(1, 3))
    assert num_types_after(range(3, 30)) == before
