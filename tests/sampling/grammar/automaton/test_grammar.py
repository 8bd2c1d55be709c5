"""Automata against xgrammar: masks in every state, legal tokens, rollback, forced text, and grammars without an automaton."""

from __future__ import annotations

import functools
import itertools
import re
from ctypes import c_int32
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepgraph.sampling.c_declarations import constants
from stepgraph.sampling.grammar import Constraint, GrammarCompiler, Matcher, Vocabulary
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar
from stepgraph.sampling.grammar.automaton.library import MOVE_INTS, Field
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.status import MaskStatus
from tests.helpers.automaton_cases import CONSTRAINTS, VOCABULARY
from tests.helpers.automaton_reference import ReferenceAutomaton
from tests.helpers.c_library import needs_c
from tests.helpers.grammar_texts import fill_mask
from tests.helpers.growth import growth

pytestmark = needs_c

COMPILERS = {name: GrammarCompiler(VOCABULARY, backend=name) for name in ("automaton", "xgrammar")}


@functools.cache
def automaton(name: str) -> AutomatonGrammar:
    grammar = COMPILERS["automaton"].compile(CONSTRAINTS[name]).grammar
    assert isinstance(grammar, AutomatonGrammar)
    return grammar


def states_of(grammar: AutomatonGrammar) -> int:
    return int(grammar.image[Field.STATES])


def library_matcher(name: str) -> Matcher:
    return COMPILERS["xgrammar"].compile(CONSTRAINTS[name]).matcher()


def mask(matcher: Matcher) -> tuple[MaskStatus, list[int]]:
    return fill_mask(matcher, VOCABULARY.mask_words)


def tokens_of(words: Tensor) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little"))]


def differing_texts(name: str, grammar: AutomatonGrammar, texts: list[bytes], limit: int = 400) -> list[bytes]:
    """The texts after which the masks of the automaton and of a fresh matcher of xgrammar differ."""
    found = list[bytes]()
    for text in texts if len(texts) <= limit else Random(0).sample(texts, limit):
        ours, library = grammar.matcher(), library_matcher(name)
        # The library's own look-ahead is not applied to a text that is accepted as a string, so bytes are accepted as tokens.
        legal = all(ours.accept_token(byte) and library.accept_token(byte) for byte in text)
        if not legal or mask(ours) != mask(library):
            found.append(text)
    return found


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_of_every_state_equal_those_of_xgrammar(name: str) -> None:
    texts = [text for _, text in ReferenceAutomaton(automaton(name).image).texts()]
    assert differing_texts(name, automaton(name), texts) == []


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_along_random_texts_equal_those_of_xgrammar(name: str) -> None:
    draw, kept, written = Random(name), torch.zeros(VOCABULARY.mask_words, dtype=torch.int32), (c_int32 * constants.WRITTEN)(-1)
    for _ in range(12):
        ours, library = automaton(name).matcher(), library_matcher(name)
        for _ in range(60):
            status, legal = mask(ours)
            assert (status, legal) == mask(library)
            found = ours.functions.fill(None, ours.handle, kept.data_ptr(), len(kept), written, None)
            assert (found, tokens_of(kept)) == (status, legal), "filled over the previous mask"
            if not legal:
                break
            token = draw.choice(legal)
            assert ours.accept_token(token) and library.accept_token(token)
            illegal = draw.randrange(len(VOCABULARY.tokens))
            if illegal not in mask(ours)[1]:
                assert not ours.accept_token(illegal)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_token_is_legal_where_its_bytes_are(name: str) -> None:
    reference = ReferenceAutomaton(automaton(name).image)
    texts = reference.texts(per_state=1)
    for place, text in Random(0).sample(texts, min(120, len(texts))):
        matcher = automaton(name).matcher()
        assert all(matcher.accept_token(byte) for byte in text)
        legal = {
            token_id
            for token_id, token in enumerate(VOCABULARY.for_xgrammar)
            if (token and reference.walk(place, token) is not None) or (token_id in VOCABULARY.stop_token_ids and reference.accepts(place))
        }
        assert set(mask(matcher)[1]) == legal


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("x((c{20}b){20}e|[cb]*bd{20}f)", f"x{('c' * 20 + 'b') * 20}e"),
        ("x((ab){23}e|(abc{20}){20}f)", f"x{('ab' + 'c' * 20) * 20}f"),
    ],
)
def test_loops_that_a_text_enters_at_the_same_time_are_counted_apart(pattern: str, text: str) -> None:
    matcher = COMPILERS["automaton"].compile(Constraint.regex(pattern)).matcher()
    assert re.fullmatch(pattern, text) and all(map(matcher.accept_token, [*text.encode(), VOCABULARY.stop_token_ids[0]]))


def equivalence_classes(grammar: AutomatonGrammar) -> tuple[int, int]:
    """The number of classes of equivalent states and of equivalent symbols, by rounds in which all rows are compared."""
    automaton, image = ReferenceAutomaton(grammar.image), grammar.image
    finish_sets, symbols = range(image[Field.FINISH_SETS]), int(image[Field.SYMBOLS])
    states, tops, count = [0] * states_of(grammar), [0] * symbols, -1

    def after(entry: int) -> tuple[int, ...]:
        if entry > -2:
            return (states[entry] if entry >= 0 else -1,)
        target, push, counter, last, *sets = (automaton.at(Field.MOVES, (-2 - entry) * MOVE_INTS + column) for column in range(MOVE_INTS))
        found = states[target] if target >= 0 else -1, tops[push] if push >= 0 else -1, counter, states[last] if last >= 0 else -1
        return *found, *sets

    while len({*states}) + len({*tops}) != count:
        count = len({*states}) + len({*tops})
        rows = [(automaton.tables[automaton.leave + state], *map(after, entries)) for state, entries in enumerate(automaton.next)]
        columns = [tuple(after(automaton.at(Field.RETURN, finish * symbols + top)) for finish in finish_sets) for top in range(symbols)]
        for numbers, keys in ((states, rows), (tops, columns)):
            known = dict[Any, int]()
            numbers[:] = [known.setdefault(key, len(known)) for key in keys]
    return len({*states}), len({*tops})


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "ab"]),
    lambda inner: (
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format)
        | st.tuples(inner, inner).map("".join)
        | st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])).map("({0[0]}){0[1]}".format)
    ),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(PATTERNS)
def test_the_automaton_of_a_pattern_is_minimal_and_accepts_its_texts(pattern: str) -> None:
    grammar = COMPILERS["automaton"].compile(Constraint.regex(pattern)).grammar
    assert isinstance(grammar, AutomatonGrammar)
    assert equivalence_classes(grammar) == (states_of(grammar), 0)
    reference = ReferenceAutomaton(grammar.image)
    for text in map("".join, itertools.chain.from_iterable(itertools.product("ab", repeat=size) for size in range(7))):
        place = reference.walk(reference.start, text.encode())
        assert (place is not None and reference.accepts(place)) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_no_two_states_or_symbols_of_an_automaton_are_equivalent(name: str) -> None:
    grammar = automaton(name)
    assert equivalence_classes(grammar) == (states_of(grammar), grammar.image[Field.SYMBOLS])


def test_rules_that_are_used_in_many_places_are_not_copied() -> None:
    """Copying would repeat the innermost object 8**5 times."""
    levels: dict[str, Any] = {"l5": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string", "maxLength": 3}}}}
    for level in range(5):
        names = {f"k{index}": {"$ref": f"#/$defs/l{level + 1}"} for index in range(8)}
        levels[f"l{level}"] = {"type": "object", "properties": names}
    constraint = Constraint.json_schema({"$defs": levels, "$ref": "#/$defs/l0"})
    ours, library = (COMPILERS[name].compile(constraint) for name in ("automaton", "xgrammar"))
    assert isinstance(ours.grammar, AutomatonGrammar) and states_of(ours.grammar) < 2_000
    draw = Random(5)
    for _ in range(6):
        matchers = ours.matcher(), library.matcher()
        for _ in range(120):
            first, other = map(mask, matchers)
            assert first == other
            if not first[1]:
                break
            token = draw.choice(first[1])
            assert all(matcher.accept_token(token) for matcher in matchers)


@pytest.mark.parametrize("field", [Field.NEXT, Field.CHANGE_VALUE, Field.RETURN, Field.MOVES])
def test_a_planted_error_in_a_table_is_found(field: Field) -> None:
    name = "long counter" if field is Field.MOVES else "recursive schema"
    good = automaton(name)
    begin = int(good.image[field])
    end = min(int(good.image[other]) for other in Field if other >= Field.CLASS_OF and good.image[other] > begin)
    columns = MOVE_INTS if field is Field.MOVES else 1  # the first column of a move is its target
    used = [index for index in range(begin, end, columns) if good.image[index] >= 0]
    texts = [text for _, text, _ in ReferenceAutomaton(good.image).moves()]
    for index in Random(0).sample(used, min(4, len(used))):
        image = good.image.copy()
        image[index] = image[index] ^ 16 if field is Field.CHANGE_VALUE else (image[index] + 1) % image[Field.STATES]
        assert differing_texts(name, AutomatonGrammar(image, good.table, VOCABULARY), texts, limit=len(texts))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(CONSTRAINTS)), st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 30)), max_size=40))
def test_rollback_restores_the_matcher(name: str, actions: list[tuple[bool, int]]) -> None:
    matcher, history = automaton(name).matcher(), list[int]()
    for back, number in actions:
        legal = mask(matcher)[1]
        if back and history:
            count = number % len(history) + 1
            matcher.rollback(count)
            del history[-count:]
        elif legal:
            history.append(legal[number % len(legal)])
            assert matcher.accept_token(history[-1])
    fresh = automaton(name).matcher()
    assert all(fresh.accept_token(token) for token in history)
    assert mask(matcher) == mask(fresh)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_forced_bytes_are_the_only_continuation(name: str) -> None:
    reference = ReferenceAutomaton(automaton(name).image)
    texts = reference.texts(per_state=1)
    for start, text in Random(0).sample(texts, min(60, len(texts))):
        matcher = automaton(name).matcher()
        assert all(matcher.accept_token(byte) for byte in text)
        place = start
        for byte in matcher.forced_bytes():
            legal = [other for other in range(256) if reference.step(place, other) is not None]
            assert legal == [byte] and not reference.accepts(place)
            after = reference.step(place, byte)
            assert after is not None
            place = after


def test_the_schema_is_forced_up_to_its_first_value() -> None:
    assert automaton("recursive schema").matcher().forced_bytes() == b'{"value": '


def test_a_bound_of_32767_takes_no_more_states_than_one_of_500() -> None:
    sizes = []
    for bound in (500, 32_767):
        compiled = COMPILERS["automaton"].compile(Constraint.json_schema({"type": "string", "maxLength": bound}))
        matcher = compiled.matcher()
        assert isinstance(compiled.grammar, AutomatonGrammar)
        sizes.append(states_of(compiled.grammar))
        assert matcher.accept_token(ord('"')) and all(matcher.accept_token(ord("a")) for _ in range(bound))
        assert mask(matcher)[1] == [ord('"')]
        matcher.rollback(1)
        assert ord("a") in mask(matcher)[1] and VOCABULARY.tokens.index(b"aa") not in mask(matcher)[1]
    assert sizes[0] == sizes[1] < 300


def test_strings_of_equal_bounds_in_alternatives_share_a_counter() -> None:
    """Without a counter, each string would take as many states as its bound."""
    fields = {name: {"type": "string", "maxLength": 3_000} for name in ("id", "name", "slug")}
    schema = {"type": "object", "properties": fields, "anyOf": [{"required": [name]} for name in fields]}
    compiled = COMPILERS["automaton"].compile(Constraint.json_schema(schema))
    assert isinstance(compiled.grammar, AutomatonGrammar) and states_of(compiled.grammar) < 1_000
    matcher = compiled.matcher()
    assert all(matcher.accept_token(byte) for byte in b'{"name": "' + b"a" * 3_000)
    assert mask(matcher)[1] == [VOCABULARY.tokens.index(token) for token in (b'"', b'", "', b'"}')]


def test_strings_are_called_if_copies_of_them_exceed_a_limit() -> None:
    fields: dict[str, Any] = {f"f{index}": {"type": "string", "format": "uri"} for index in range(10)}
    constraint = Constraint.json_schema({"type": "object", "properties": fields | {"kind": {"enum": ["a", "b", "cd"]}}})
    limits = GrammarLimits(automaton_states=1_000)
    ours = GrammarCompiler(VOCABULARY, backend="automaton", limits=limits).compile(constraint)
    copied, library = (COMPILERS[name].compile(constraint) for name in ("automaton", "xgrammar"))
    assert isinstance(ours.grammar, AutomatonGrammar) and isinstance(copied.grammar, AutomatonGrammar)
    assert states_of(ours.grammar) < 400 and states_of(copied.grammar) > 1_000
    matchers = [grammar.matcher() for grammar in (ours, library)]
    for byte in b'{"f0": "http://a/?b=%20", "f3": "x:y", "kind": "cd"}':
        first, other = map(mask, matchers)
        assert first == other
        assert all(matcher.accept_token(byte) for matcher in matchers)


def test_long_chains_of_rules_take_a_bounded_stack() -> None:
    """A rule for each state of a string of bounded length, and rules that lead back to the first one, and to themselves."""
    slug = COMPILERS["automaton"].compile(Constraint.json_schema({"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$", "maxLength": 2_000}))
    for size, is_legal in ((2_000, True), (2_001, False)):
        matcher = slug.matcher()
        text = b'"' + b"a-" * ((size - 1) // 2) + b"b" * (2 - size % 2) + b'"'
        assert len(text) == size + 2 and all(map(matcher.accept_token, text)) == is_legal
    rules = [f'r{index} ::= "a" r{index + 1} | "b"' for index in range(3_500)]
    chain = COMPILERS["automaton"].compile(
        Constraint.ebnf("\n".join([*rules, 'r3500 ::= "d" r0 | left', 'left ::= left "c" | "e"']), root="r0")
    )
    matcher = chain.matcher()
    assert all(map(matcher.accept_token, b"a" * 3_500 + b"d" + b"a" * 3_500 + b"ec"))
    assert mask(matcher)[1] == [ord("c"), VOCABULARY.stop_token_ids[0]]


def test_after_many_attempts_no_loop_is_counted() -> None:
    """An attempt finds one loop that cannot be counted, here one in each of 20 parts, and builds all states again."""
    constraint = Constraint.regex("x{300}" + "".join(f"(ab?){{40}}(a|ba){{40}}{end}" for end in "defghijklm" * 2))
    sizes, masks = list[int](), list[tuple[MaskStatus, list[int]]]()
    for limits in (GrammarLimits(automaton_states=5_000), GrammarLimits()):
        compiled = GrammarCompiler(VOCABULARY, backend="automaton", limits=limits).compile(constraint)
        assert isinstance(compiled.grammar, AutomatonGrammar)
        sizes.append(states_of(compiled.grammar))
        matcher = compiled.matcher()
        assert all(map(matcher.accept_token, b"x" * 300 + b"".join(b"a" * 80 + end for end in (b"d", b"e"))))
        masks.append(mask(matcher))
    assert masks[0] == masks[1] and sizes[0] > sizes[1] + 250  # the 300 characters before them


TAGS = 'root ::= TagDispatch(("<t>", tag), loop_after_dispatch={}, excludes={})\ntag ::= "a"'


@pytest.mark.parametrize(
    ("constraint", "limits", "reason"),
    [
        (Constraint.regex("[ab]*a[ab]{40}"), {}, "GrammarLimits.automaton_states: got a grammar that takes more, expected at most 200000"),
        (Constraint.ebnf('root ::= "a" root "b" root | "c" | root root'), {}, "recursion that is not enclosed in literal text"),
        (Constraint.ebnf('root ::= "a" root "a" | "a"'), {}, "with the same text|after the same text"),
        (
            Constraint.ebnf('root ::= "[" root "]" root | "[" [0-9]* "]" root | "a"'),
            {},
            "begin a nested part or continue, with the same text",
        ),
        (Constraint.ebnf('root ::= root "[" root "]" root | "a"'), {}, "recursion that is not enclosed in literal text"),
        (Constraint.ebnf(TAGS.format("false", "()")), {}, "its tags do not repeat or exclude texts"),
        (Constraint.ebnf(TAGS.format("true", '("zz")')), {}, "its tags do not repeat or exclude texts"),
        (Constraint.ebnf("root ::= " + "[a]*" * 9000), {}, "GrammarLimits.automaton_bytes: got a grammar that takes more"),
        (CONSTRAINTS["schema"], {"automaton_states": 50}, "GrammarLimits.automaton_states: .* at most 50"),
        (CONSTRAINTS["schema"], {"automaton_bytes": 500}, "GrammarLimits.automaton_bytes: .* at most 500"),
        (CONSTRAINTS["schema"], {"automaton_steps": 500}, "GrammarLimits.automaton_steps: .* at most 500"),
    ],
)
def test_grammar_without_an_automaton_is_refused_with_the_reason(constraint: Constraint, limits: dict[str, int], reason: str) -> None:
    compiler = GrammarCompiler(VOCABULARY, backend="automaton", limits=GrammarLimits(**limits))
    with pytest.raises(ValueError, match=reason):
        compiler.compile(constraint)


def test_a_vocabulary_with_a_token_of_more_than_1024_bytes_has_no_automata() -> None:
    """Walks over the bytes of a token are recursive: one of 300,000 bytes exceeded the stack of the process."""
    for size in (1_024, 1_025, 300_000):
        tokens = Vocabulary([b"a", b"b", (b"ab" * size)[:size], b""], [3])
        compiled = GrammarCompiler(tokens).compile(Constraint.regex("(ab|cd)*"))
        assert compiled.backend == ("automaton" if size == 1_024 else "xgrammar")
        matcher = compiled.matcher()
        assert fill_mask(matcher, tokens.mask_words)[1] == [0, 2, 3] and matcher.accept_token(2)
        assert fill_mask(matcher, tokens.mask_words)[1] == ([0, 2, 3] if size % 2 == 0 else [1])
    with pytest.raises(ValueError, match=r"Vocabulary\.tokens: got a token of 300000 bytes, expected at most 1024 for automata"):
        GrammarCompiler(tokens, backend="automaton").compile(Constraint.regex("(ab|cd)*"))


@pytest.mark.parametrize("count", ["{}", "{},", "0,{}"])
def test_repetitions_of_the_empty_text_are_not_counted_one_by_one(count: str) -> None:
    """They took 98 s, and no limit of work ended them."""

    def compile_repetition(times: int) -> Matcher:
        text = f'root ::= x{{{count.format(times)}}} "a"\nx ::= "" | y\ny ::= ""'
        return COMPILERS["automaton"].compile(Constraint.ebnf(text)).matcher()

    assert mask(compile_repetition(999_999_999))[1] == [ord("a")]
    assert growth(compile_repetition, 9, 999_999_998) < 20


def test_the_largest_number_of_states_is_not_exceeded() -> None:
    compiler = GrammarCompiler(VOCABULARY, backend="automaton", limits=GrammarLimits(automaton_states=2**31 - 1))
    assert compiler.compile(CONSTRAINTS["schema"]).nbytes == automaton("schema").nbytes


def test_the_worker_returns_the_same_image() -> None:
    compiler = GrammarCompiler(VOCABULARY, backend="automaton", isolation="process")
    try:
        for name in ("schema", "recursive schema"):
            found = compiler.compile(CONSTRAINTS[name])
            assert found.backend == "automaton" and isinstance(found.grammar, AutomatonGrammar)
            assert np.array_equal(found.grammar.image, automaton(name).image)
        with pytest.raises(ValueError, match="recursion that is not enclosed"):
            compiler.compile(Constraint.ebnf('root ::= "a" root "b" root | "c" | root root'))
    finally:
        compiler.close()


SIGNS = Vocabulary([bytes(letters) for size in (1, 2, 3) for letters in itertools.product(b'"[]{},', repeat=size)] + [b"<stop>"], [258])


def test_tokens_that_are_legal_after_no_stack_are_not_followed() -> None:
    grammar = GrammarCompiler(SIGNS, backend="automaton").compile(Constraint.json_object()).grammar
    assert isinstance(grammar, AutomatonGrammar)
    reference, legal, most = ReferenceAutomaton(grammar.image), dict[int, list[set[int]]](), 0
    for place, _ in reference.texts(per_state=6):
        tokens = {token_id for token_id, token in enumerate(SIGNS.tokens[:-1]) if token and reference.walk(place, token)}
        legal.setdefault(place.state, []).append(tokens)
    for state, of_places in legal.items():
        followed = {reference.at(Field.CROSS, at) for at in range(*(reference.at(Field.CROSS_START, state + end) for end in (0, 1)))}
        somewhere = set[int]().union(*of_places)
        assert somewhere - of_places[0].intersection(*of_places) <= followed <= somewhere
        most = max(most, len(followed))
    assert most == 9, "of 42 that leave a string"


def test_a_repeated_text_has_as_many_copies_as_one_token_may_repeat_it() -> None:
    """A token of nine bytes repeats three characters of three bytes, as many as literals of three bytes."""
    repeated = (Constraint.regex(f"({text}){{3,400}}") for text in ("[\\u4e00-\\u9fff]", "abc"))
    characters, literals = (COMPILERS["automaton"].compile(constraint).grammar for constraint in repeated)
    assert isinstance(characters, AutomatonGrammar) and isinstance(literals, AutomatonGrammar)
    assert max(map(len, VOCABULARY.tokens)) == 9
    assert states_of(literals) == 22 and states_of(characters) == 29, "a copy of the characters has more states"


def test_tokens_that_leave_a_part_are_followed_in_a_grammar_with_very_many_parts() -> None:
    """The compiler examines what may follow a part up to a limit of work; from then on, lists have all tokens that leave the part."""
    count, ends = 1500, [b")0", b")1", b"))", b"))0", b"))x"]
    vocabulary = Vocabulary([*(bytes([code]) for code in range(256)), *ends, b"<stop>"], [261])
    rules = [f'x{part} ::= "(" x{part} ")" | "{part:03x}"' for part in range(count)]
    starts = " | ".join(f'"{part:03x}" x{part} "{part:03x}"' for part in range(count))
    grammar = GrammarCompiler(vocabulary, backend="automaton").compile(Constraint.ebnf("\n".join([f"root ::= {starts}", *rules]))).grammar
    assert isinstance(grammar, AutomatonGrammar)
    lists = grammar.image[grammar.image[Field.CROSS_START] :][: states_of(grammar) + 1]
    assert {2, len(ends)} <= set(np.diff(lists)), "with and without what may follow"
    reference = ReferenceAutomaton(grammar.image)
    for part in (0, 1, count // 2, count - 1):
        matcher, row, place = grammar.matcher(), torch.zeros((1, vocabulary.mask_words), dtype=torch.int32), reference.start
        for byte in f"{part:03x}((({part:03x}":
            after = reference.step(place, ord(byte))
            assert after and matcher.accept_token(ord(byte))
            place = after
        matcher.fill_next_token_bitmask(row, 0)
        expected = [token_id for token_id, token in enumerate(vocabulary.tokens[:-1]) if token and reference.walk(place, token)]
        assert tokens_of(row[0]) == expected and b"))" in [vocabulary.tokens[token_id] for token_id in expected]


ALL_TEXTS = [bytes(letters) for size in range(1, 8) for letters in itertools.product(b"abc", repeat=size)]
DENSE = Vocabulary([*ALL_TEXTS, b"<stop>"], [len(ALL_TEXTS)])  # a tree with many tokens below its nodes


@pytest.mark.parametrize(
    ("pattern", "steps"),  # separately for each state: 71,334, 13,152, 57,372
    [(r"[ab]{1,14}(c[ab]{1,14}){0,3}", 20_000), (r"(a(b|ca)*|[bc]c{0,9}a)*", 5_000), (r"([abc]{2}){0,11}", 20_000)],
)
def test_tokens_are_found_once_for_similar_states(pattern: str, steps: int) -> None:
    compiler = GrammarCompiler(DENSE, backend="automaton", limits=GrammarLimits(automaton_steps=steps))
    grammar = compiler.compile(Constraint.regex(pattern)).grammar
    assert isinstance(grammar, AutomatonGrammar)
    reference = ReferenceAutomaton(grammar.image)
    for place, text in reference.texts(per_state=1):
        matcher, row = grammar.matcher(), torch.zeros((1, DENSE.mask_words), dtype=torch.int32)
        assert all(matcher.accept_token(ALL_TEXTS.index(bytes([byte]))) for byte in text)
        matcher.fill_next_token_bitmask(row, 0)
        found = np.flatnonzero(np.unpackbits(row.numpy().view(np.uint8), bitorder="little")).tolist()
        places = {b"": place}
        for token in ALL_TEXTS:
            if token[:-1] in places and (after := reference.step(places[token[:-1]], token[-1])) is not None:
                places[token] = after
        expected = [token_id for token_id, token in enumerate(ALL_TEXTS) if token in places]
        assert found == expected + [len(ALL_TEXTS)] * reference.accepts(place)


ARROW = "→".encode()
OF_ARROWS = Vocabulary([b"x", ARROW, ARROW + b"a", b"a", b"y", b"1", b""], [6])
OF_PAIRS = Vocabulary([b"aa", b"ab", b'"', b"<s>"], [3])


@pytest.mark.parametrize(
    ("vocabulary", "constraint", "status"),
    [
        (
            OF_ARROWS,
            Constraint.structural_tag({"triggers": ["x→"], "structures": [{"begin": "x→y", "schema": {"enum": [1]}, "end": ""}]}),
            MaskStatus.OK,
        ),
        (OF_PAIRS, Constraint.regex(r'[^"\\\x00-\x1f]{3}'), MaskStatus.DEAD_END),
        (OF_PAIRS, Constraint.regex(r'[^"\\\x00-\x1f]{1,3}'), MaskStatus.COMPLETE),
    ],
)
def test_masks_after_the_first_token_equal_those_of_xgrammar(vocabulary: Vocabulary, constraint: Constraint, status: MaskStatus) -> None:
    matchers = [GrammarCompiler(vocabulary, 1, name).compile(constraint).matcher() for name in ("automaton", "xgrammar")]
    assert all(matcher.accept_token(0) for matcher in matchers)
    ours, library = (fill_mask(matcher, vocabulary.mask_words) for matcher in matchers)
    assert ours == library and ours[0] == status


def test_nbytes_is_the_size_of_the_image() -> None:
    grammar = automaton("schema")
    assert grammar.nbytes == grammar.image[Field.SIZE] * 4 == COMPILERS["automaton"].compile(CONSTRAINTS["schema"]).nbytes


def test_a_matcher_with_a_fault_clears_its_row_only() -> None:
    matcher = automaton("schema").matcher()
    masks = torch.full((2, matcher.vocabulary.mask_words), -1, dtype=torch.int32)
    matcher.fault = "planted"
    assert matcher.fill_next_token_bitmask(masks, 1) is MaskStatus.FAULT
    assert not masks[1].any() and (masks[0] == -1).all()
