"""Languages by derivatives and their automata, against Python's re and arithmetic."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.sampling.grammar.constraints.charset import ALL_CHARS, charset
from stepgraph.sampling.grammar.schema import automata, patterns
from stepgraph.sampling.grammar.schema.automata import MAX_STATES, TooComplexError, automaton, is_empty
from stepgraph.sampling.grammar.schema.language import (
    ANY_CHAR,
    ANY_TEXT,
    NOTHING,
    Term,
    both,
    cat,
    chars,
    complement,
    either,
    length_range,
    matches,
    repeat,
    words,
)
from stepgraph.sampling.grammar.schema.numbers import Numbers, decimal
from tests.helpers.growth import growth

TEXTS = ["".join(letters) for size in range(5) for letters in itertools.product("ab1", repeat=size)]


def accepts(term: Term, text: str) -> bool:
    """Whether the automaton accepts a text."""
    found, state = automaton(term), 0
    for char in text:
        edges = found.edges[state] if found.edges else []
        targets = [target for ranges, target in edges if any(first <= ord(char) <= last for first, last in ranges)]
        if not targets:
            return False
        (state,) = targets
    return bool(found.accepts) and found.accepts[state]


PATTERNS = ["a*b", "^a|b$", "(a|b1)+", "^(?:a|b){2,3}$", "a{2}", "[^a]b", "\\d", "^$", "", "(^a|1$)b?"]
PATTERNS += ["^(?!ab).*1", "a(?=1)", "b(?!1)", "a??b+?"]
PATTERNS += [r"(?!1)^\w+$", "(?!.*a1)^b.*$", "(?!^)b", r"(?=.*1)^\w+$", "(?=^.{3,}$)(?=.*1)(?=.*[a-z]).*$", "(?=^a)ab"]
PATTERNS += ["^(?!a(?=b)).*$", "^(?!.*1(?!a$)).*$", "^(?!.*a(?!b)).*$", "^(?=a(?=b)).*$"]
PATTERNS += ["$^", "^(?!$^)", "^(?!$$)", "a(?!$$)"]
PATTERNS += ["(?:b?$)^", "$(?:^)", "(?:a|$)(?:^|b)", "(?!(?:b?$)^)a?", "(?:^){9}a", "(?!(?:$){2})", "a(?!(?:$){2})", "(?:^|a)(?:$|b)+"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_is_searched_as_by_re(pattern: str) -> None:
    term, found = patterns.search(pattern), re.compile(pattern)
    for text in TEXTS:
        assert matches(term, text) == accepts(term, text) == bool(found.search(text)), text
    whole = patterns.full(pattern)
    for text in TEXTS:
        assert matches(whole, text) == bool(found.fullmatch(text)), text


@pytest.mark.parametrize(("left", "right"), [*itertools.combinations(["a*b", "^a|b$", "^(?!ab).*1", "^.{2,4}$", "^[ab]+$"], 2)])
def test_operations_on_languages_are_those_on_sets(left: str, right: str) -> None:
    one, other = patterns.search(left), patterns.search(right)
    for text in TEXTS:
        first, second = matches(one, text), matches(other, text)
        assert accepts(both(one, other), text) == (first and second)
        assert accepts(either(one, other), text) == (first or second)
        assert accepts(both(one, complement(other)), text) == (first and not second)


ATOMS = st.sampled_from(["a", "b", "[^a]", "[^b]", "[ab]", ""])
PATTERN = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


def shortest(term: Term) -> str | None:
    """A shortest text that the automaton accepts; None if there is none."""
    found = automaton(term)
    order, texts = [0] if found.edges else [], {0: ""}
    for state in order:  # grows
        if found.accepts[state]:
            return texts[state]
        for ranges, target in found.edges[state]:
            if target not in texts:
                order.append(target)
                texts[target] = texts[state] + chr(ranges[-1][1])
    return None


@given(PATTERN, PATTERN)
def test_operations_on_random_patterns_are_those_on_sets(left: str, right: str) -> None:
    one, other = patterns.full(left), patterns.full(right)
    first, second = re.compile(left), re.compile(right)
    combined = {
        "product": (both(one, other), lambda x, y: x and y),
        "union": (either(one, other), lambda x, y: x or y),
        "complement": (complement(one), lambda x, y: not x),
        "difference": (both(one, complement(other)), lambda x, y: x and not y),
    }
    for name, (term, expected) in combined.items():
        for text in TEXTS:
            assert accepts(term, text) == expected(bool(first.fullmatch(text)), bool(second.fullmatch(text))), (name, text)
        found = shortest(term)
        assert is_empty(term) == (found is None), name
        assert found is None or expected(bool(first.fullmatch(found)), bool(second.fullmatch(found))), (name, found)


def test_escapes_and_properties_are_those_of_javascript() -> None:
    assert matches(patterns.full(r"\u{1F600}\ud83d\ude00\x41\cJ\/\-[\b]"), "😀😀A\n/-\b")
    assert matches(patterns.full(r"\p{Lu}\P{L}\p{gc=Ll}"), "É1α") and not matches(patterns.full(r"\p{Lu}"), "é")
    assert not matches(patterns.full(r"[\p{Zl}-\u{3000}\u{3001}-\p{Zp}]"), "\u2500")
    assert matches(patterns.full("a{٣}"), "a{٣}") and not matches(patterns.full("a{٣}"), "aaa")


def test_equal_languages_have_the_same_automaton() -> None:
    long, short = automaton(patterns.full("(ab|ab)*(ab)?|a?b?|(abab)*")), automaton(patterns.full("(ab)*|a|b"))
    assert long.edges == short.edges and long.accepts == short.accepts


def test_automaton_has_no_surrogates_and_no_state_without_an_end() -> None:
    found = automaton(complement(words(["a"])))
    labels = {piece for edges in found.edges for ranges, _ in edges for piece in ranges}
    assert labels and not any(first <= 0xDFFF and last >= 0xD800 for first, last in labels)
    assert automaton(both(patterns.full("a+"), complement(patterns.full("aa*")))).accepts == []
    assert is_empty(both(patterns.full("a.*"), patterns.full("[^a].*"))) and not is_empty(complement(words(["", "a"])))


def test_terms_are_simplified() -> None:
    assert both(ANY_TEXT, words(["a"])) is words(["a"]) and both(words(["a", "b"]), patterns.full("b+")) is words(["b"])
    assert either(words(["b"]), words(["a"])) is words(["a", "b"]) and complement(complement(words(["a"]))) is words(["a"])
    assert both(repeat(ANY_CHAR, 2, 9), repeat(chars(charset("x")), 1, 4)) is repeat(chars(charset("x")), 2, 4)
    assert both(repeat(ANY_CHAR, 0, 3), cat(words(["abcd"]), ANY_TEXT)) is NOTHING
    assert length_range(patterns.full("a{2,3}(bc|d)")) == (3, 5) and chars(ALL_CHARS) is ANY_CHAR


@pytest.mark.parametrize("pattern", ["^(a|bb)(1|a1)[ab]*$", "(a|bb|b1b)a*(1|bb)", "^[ab]{1,2}(1|11)b*$", "^(ab|1a)*(a|b1)$"])
def test_length_is_bounded_by_the_counts_of_a_pattern(pattern: str) -> None:
    term = patterns.full(pattern)
    for low, high in ((0, 3), (2, 4), (3, None), (0, 0), (3, 3)):
        bounded = both(term, repeat(ANY_CHAR, low, high))
        assert bounded.is_regex
        for text in TEXTS:
            assert matches(bounded, text) == (matches(term, text) and low <= len(text) <= (len(text) if high is None else high)), text


def test_too_large_automaton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automata, "MAX_STATES", 50)
    with pytest.raises(TooComplexError, match="more than 50 states"):
        automaton(both(patterns.search("a.{7}b"), repeat(ANY_CHAR, 0, 99)))
    assert MAX_STATES > 50


def test_automata_of_bounded_lengths_take_time_linear_in_the_length() -> None:
    """Each state of the pattern is another state after each number of characters: states of different lengths are not compared."""
    pattern = patterns.search("^(?:ab|c)*d*$")

    def build(length: int) -> None:
        term = both(pattern, repeat(ANY_CHAR, 0, length))
        assert not is_empty(term)
        assert 2 * length < len(automaton(term).edges) < 4 * length

    assert growth(build, 150, 1_200) < 24, "8 if linear, 64 if quadratic"


def test_groups_inside_each_other_take_time_at_most_quadratic_in_their_depth() -> None:
    def search(depth: int) -> Term:
        return patterns.search("(" * depth + "a" + ")+" * depth)

    assert growth(search, 47, 188) < 28, "16 if quadratic, 64 if cubic"


def test_emptiness_of_a_bounded_length_takes_the_automaton_without_it() -> None:
    term = both(patterns.search("^(?:ab|c)*e*$"), repeat(ANY_CHAR, 3, 1_000))
    automaton.cache_clear()
    assert not is_empty(term)
    assert automaton.cache_info().misses == 1 and len(automaton(term).edges) > 2_000


def test_states_that_only_surrogates_or_marks_reach_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a character that no text has, all texts are outside the language: one more state."""
    monkeypatch.setattr(automata, "MAX_STATES", 1)
    assert automaton(complement(repeat(ANY_CHAR, 1, None))).accepts == [True]


BOUNDS = [
    Numbers(low=Fraction(3), high=Fraction(250)),
    Numbers(low=Fraction("-1.25"), high=Fraction("0.5"), high_open=True),
    Numbers(low=Fraction("0.105"), low_open=True),
    Numbers(high=Fraction(-7)),
    Numbers(low=Fraction(-20), multiple=Fraction(1)),
    Numbers(multiple=Fraction("0.25"), low=Fraction("-3.5")),
    Numbers(multiple=Fraction(7)),
    Numbers(not_multiples=frozenset([Fraction(1)]), low=Fraction(0)),
    Numbers(low=Fraction(10), high=Fraction(99), multiple=Fraction(5)),
    Numbers(multiple=Fraction(20), not_multiples=frozenset([Fraction(100)])),
    Numbers(low=Fraction(0), low_open=True),
    Numbers(high=Fraction(0)),
]
SAMPLES = [Fraction(number, 200) for number in range(-6000, 60000, 25)]


@pytest.mark.parametrize("numbers", BOUNDS)
def test_language_of_numbers_has_exactly_the_numbers_of_the_set(numbers: Numbers) -> None:
    language = numbers.language()
    outside = list(numbers.complement())
    for value in SAMPLES:
        assert matches(language, decimal(value)) == (value in numbers), value
        assert any(value in other for other in outside) != (value in numbers)


def test_exponents_only_where_the_bound_is_a_sign() -> None:
    assert matches(Numbers(low=Fraction(0), low_open=True).language(), "0.5e-3") and matches(Numbers(high=Fraction(0)).language(), "-1E5")
    assert not matches(Numbers(low=Fraction(0), low_open=True).language(), "0.0e3") and not matches(
        Numbers(low=Fraction(2)).language(), "1e5"
    )


def test_intersections_of_sets_of_numbers() -> None:
    halves, thirds = Numbers(multiple=Fraction("0.5")), Numbers(multiple=Fraction("0.3"))
    assert halves.meet(thirds) == Numbers(multiple=Fraction("1.5"))
    assert Numbers(low=Fraction(2)).meet(Numbers(high=Fraction(2), high_open=True)) is None
    assert Numbers(low=Fraction(1), high=Fraction(9), multiple=Fraction(10)).meet(Numbers()) is None
    assert Numbers(multiple=Fraction(4)).meet(Numbers(not_multiples=frozenset([Fraction(2)]))) is None
    with pytest.raises(ValueError, match="at most 4000 without the point"):
        Numbers(multiple=Fraction(4001)).language()
