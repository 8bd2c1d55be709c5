"""Bugs of xgrammar that are worked around; each test fails without the workaround. Those of llguidance are in test_llguidance.py.

A mask is correct where it contains exactly the tokens that `accept_token` accepts.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import pytest
import torch
import xgrammar

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, GrammarLimits, MaskStatus, Vocabulary
from stepgraph.sampling.grammar.constraints import pattern
from stepgraph.sampling.grammar.constraints.charset import ebnf_class
from stepgraph.sampling.grammar.schema import grammar as schema_grammar
from stepgraph.sampling.grammar.schema.options import Options
from stepgraph.sampling.grammar.xgrammar_lib import ebnf
from stepgraph.sampling.grammar.xgrammar_lib import grammar as xgrammar_grammar
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarBuilder
from tests.helpers.grammar_texts import fill_mask
from tests.helpers.schema_cases import BYTES, takes


def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary, max_threads=1, backend="xgrammar")


def disagreements(compiled: CompiledConstraint, random: Random, steps: int) -> list[tuple[bytes, list[int], list[int]]]:
    """The texts of a random walk after which mask and `accept_token` differ, with the tokens that each considers legal."""
    vocabulary = compiled.vocabulary
    matcher, ids, found = compiled.matcher(), list[int](), []
    for _ in range(steps):
        status, legal = fill_mask(matcher, vocabulary.mask_words)
        taken = []
        for token_id in range(len(vocabulary.tokens)):
            if matcher.accept_token(token_id):
                taken.append(token_id)
                matcher.rollback(1)
        if taken != legal:
            found.append((vocabulary.decode(ids), legal, taken))
        continuations = [token_id for token_id in taken if token_id not in vocabulary.stop_token_ids]
        if status != MaskStatus.OK or not continuations:
            break
        ids.append(random.choice(continuations))
        assert matcher.accept_token(ids[-1])
    return found


def random_vocabulary(random: Random, letters: str) -> Vocabulary:
    tokens = {letter.encode() for letter in letters}
    while len(tokens) < 24:
        tokens.add("".join(random.choice(letters) for _ in range(random.randint(2, 5))).encode())
    return Vocabulary([*random.sample(sorted(tokens), len(tokens)), b""], stop_token_ids=[24])


GRAMMARS = [
    (Constraint.ebnf('root ::= "(" root ")" | "a" | "\\n"'), "(a)\n"),
    (Constraint.ebnf('root ::= x*\nx ::= "a" | "b)" | ")" ")"+ "\\n" | "(" root ")"'), "ab)(\n"),
    (Constraint.json_schema({"type": "array", "items": {"$ref": "#"}}), "[], "),
    (Constraint.regex("(\\)\\)\\n)*a{1,3}b?"), "ab)\n"),
]


def wrong_masks() -> int:
    random, found = Random(4), 0
    for _ in range(60):
        for constraint, letters in GRAMMARS:
            found += len(disagreements(compiler(random_vocabulary(random, letters)).compile(constraint), random, 10))
    return found


def test_masks_agree_with_accept_token() -> None:
    assert wrong_masks() == 0


def test_substring_skipping_needs_the_hidden_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vocabulary, "xgrammar_unsafe_ids", frozenset())
    assert wrong_masks() > 0


def test_tokens_that_end_in_the_first_byte_of_a_character_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary([b" ", b"1", b"\xe0", b"\xf0", b" 1", b" \xe0", b" \xf0", b" \xf0\x9f", b"\x9f", b""], stop_token_ids=[9])
    assert vocabulary.xgrammar_unsafe_ids == {5, 6}
    constraint = Constraint.regex(" ?[0-9]")
    assert disagreements(compiler(vocabulary).compile(constraint), Random(0), 1) == []
    monkeypatch.setattr(Vocabulary, "xgrammar_unsafe_ids", frozenset())
    exposed = compiler(Vocabulary(vocabulary.tokens, [9])).compile(constraint)
    assert disagreements(exposed, Random(0), 1) == [(b"", [0, 1, 4, 5, 6], [0, 1, 4])]


def test_unsafe_tokens_are_hidden_where_others_spell_them() -> None:
    vocabulary = Vocabulary([b"x", b"y", b"z", b"xy", b"xzxy", b"xyz", b""], stop_token_ids=[6])
    assert vocabulary.xgrammar_unsafe_ids == {4}
    matcher = compiler(vocabulary).compile(Constraint.regex("[xyz]*")).matcher()
    assert fill_mask(matcher, 1)[1] == [0, 1, 2, 3, 5, 6] and not matcher.accept_token(4)
    assert vocabulary.decode([4]) == b"xzxy"
    assert Vocabulary([b"b", b"cb", b""], [2]).xgrammar_unsafe_ids == set()


def test_recursive_root_rule_needs_a_separate_first_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary([b"(", b")", b"))", b"a", b"a)", b""], stop_token_ids=[5])
    constraint = Constraint.ebnf('root ::= "(" root ")" | "a"')
    assert disagreements(compiler(vocabulary).compile(constraint), Random(0), 12) == []

    def without_first_rule(core: Any, kind: str, payload: str, options: Options, least_bytes: int) -> ebnf.ParsedGrammar:
        return ebnf.ParsedGrammar(core.Grammar.from_ebnf(*ebnf.ebnf_text(core, kind, payload, options)), {}, 0, {})

    monkeypatch.setattr(xgrammar_grammar, "parsed_grammar", without_first_rule)
    found = [disagreements(compiler(vocabulary).compile(constraint), Random(seed), 12) for seed in range(5)]
    assert any(found)


def test_builtin_json_grammar_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forbids `}]` after a string that ends an object in an array."""
    tokens = [b"{", b"}", b"[", b"]", b'"', b"a", b": ", b", ", b"}]", b""]
    vocabulary, text = Vocabulary(tokens, stop_token_ids=[9]), [0, 4, 5, 4, 6, 2, 0, 4, 5, 4, 6, 4, 5, 4]  # {"a": [{"a": "a"
    matcher = compiler(vocabulary).compile(Constraint.json_object()).matcher()
    assert all(matcher.accept_token(token_id) for token_id in text)
    assert 8 in fill_mask(matcher, 1)[1] and matcher.accept_token(8)
    builtin = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(vocabulary.tokenizer_info).compile_builtin_json_grammar())
    assert all(builtin.accept_token(token_id) for token_id in text)
    mask = torch.zeros(1, 1, dtype=torch.int32)
    builtin.fill_next_token_bitmask(mask, 0)
    assert not int(mask[0, 0]) >> 8 & 1 and builtin.accept_token(8)


def test_unmarked_control_tokens_are_text() -> None:
    tokens = [b'"', b"a", b"<|im_start|>", b""]
    in_string = [XGrammarBuilder(Vocabulary(tokens, [3], control_token_ids=ids), GrammarLimits(), 1) for ids in ([], [2])]
    legal = []
    for builder in in_string:
        matcher = builder.build(Constraint.json_schema({"type": "string"})).matcher()
        assert matcher.accept_token(0)
        legal.append(fill_mask(matcher, 1)[1])
    assert legal == [[0, 1, 2], [0, 1]]


QUOTED = ['"', "a", "b", "\\", "n", "1", "{", "}", "[", "]", ", ", ": ", " ", '{"', "{}", '["', '"}', '"]', '",', '", ', '", "', '"},']
QUOTED += ['":', '": ', '": "', '" ', '"\n', '"]}', 'a"', 'a", "b', 'b": ', '"a"', 'a": [', "\\n", '"\\', '"1', '";']
QUOTED += ['", {', '"}]', "\n", ","]
STRINGS = [
    Constraint.json_schema({"type": "string"}),
    Constraint.json_schema({"type": "array", "items": {"type": "string"}}),
    Constraint.json_schema({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}),
    Constraint.json_schema({"type": "object", "properties": {"b": {"type": "array"}}, "additionalProperties": {"type": "string"}}),
    Constraint.json_object(),
    Constraint.json_object(any_whitespace=True),
]


def test_tokens_after_a_string_are_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary([*(text.encode() for text in QUOTED), b""], stop_token_ids=[len(QUOTED)])

    def found() -> int:
        compiled = [compiler(vocabulary).compile(constraint) for constraint in STRINGS]
        return sum(len(disagreements(one, Random(seed), 12)) for one in compiled for seed in range(6))

    assert found() == 0
    monkeypatch.setattr(schema_grammar, "AFTER_STRING", r" (=([,}\]]))")  # excludes property names
    ebnf.json_grammar.cache_clear()
    assert found() > 0
    ebnf.json_grammar.cache_clear()


COUNTS = [(0, 101), (0, 129), (90, 100), (127, 128), (128, 128), (128, 129), (129, 129), (150, 200), (20, 300), (300, None)]


def long_string(low: int, high: int | None) -> Constraint:
    return Constraint.json_schema({"type": "string", "minLength": low, **({} if high is None else {"maxLength": high})})


def test_long_strings_end_within_their_bounds() -> None:
    texts = [*QUOTED, "aaaaaaaa", "\u6f22", '\u6f22"', "\u6f22a", "a\0", "\0a"]
    vocabulary = Vocabulary([*(text.encode() for text in texts), b""], stop_token_ids=[len(texts)])

    def found(low: int, high: int | None) -> int:
        return len(disagreements(compiler(vocabulary).compile(long_string(low, high)), Random(low), 150))

    assert [found(low, high) for low, high in COUNTS] == [0] * len(COUNTS)


WIDE = ["x", "xx", "0", "B", "N", "c", "(", "\0", "\u0430", "\u044f", "\u4e00", "\u00e9"]
WIDE += [
    "xN",
    "xNc",
    "x0",
    "xB",
    "x(",
    "x\0",
    "\u0430\u044f",
    "\u04300",
    "\u0430B",
    "x\u0430",
    "\u044fc",
    "x\u4e00",
    "\u4e00\u4e00",
    "\u00e9\0",
]
PATTERNS = [
    "[\u0430-\u044f]{150}c",
    "x{1,2}[\u0430-\u044f]c",
    "(x|0)+[\u0430-\u044f]*c",
    "(x|0)+[^\u0430-\u044f]c",
    "[^\u0430-\u044f]{150}c",
    "(x|0)+.c",
    ".{150}c",
    "x{1,2}[\u4e00-\u9fa5]c",
    "[\u4e00-\u9fa5x]{150}c",
    "(x|0)+[^N]c",
]


EBNF = [
    'root ::= ("x" | "a")+ [^\u0430-\u044f] "c"',
    'root ::= [^\\u0430-\\u044f]{150} "c"',
    'root ::= "x"{1,2} letter "c"\nletter ::= [\u0430-\u044f]',
    'root ::= [\u4e00-\u9fa5x]{150} "c"',
]


@pytest.mark.parametrize(
    ("constraints", "module", "name", "replacement", "least"),
    [
        ([Constraint.regex(text) for text in PATTERNS], pattern, "xgrammar_safe_class", ebnf_class, 5),
        ([Constraint.ebnf(text) for text in EBNF], ebnf, "_with_safe_classes", lambda core, text, root: text, 2),
    ],
    ids=["regex", "ebnf"],
)
def test_classes_beyond_ascii_survive_the_look_ahead(
    constraints: list[Constraint], module: Any, name: str, replacement: Any, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """least: of the constraints that are wrong without the workaround. Some are correct."""
    vocabulary = Vocabulary([*(text.encode() for text in WIDE), b""], stop_token_ids=[len(WIDE)])

    def found(constraint: Constraint) -> bool:
        compiled = compiler(vocabulary).compile(constraint)
        return any(disagreements(compiled, Random(seed), 40) for seed in range(3))

    assert not any(map(found, constraints))
    monkeypatch.setattr(module, name, replacement)
    assert sum(map(found, constraints)) >= least


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_rewritten_class_accepts_the_same_characters(isolation: Literal["none", "process"]) -> None:
    """Escapes whose digits the library merges with the following text, hyphens, carets, quotes, and strings next to the class."""
    chars = "-]^\\\"'abcfx\x1f\x7f\x80\xe9\xff\u01fc\u0430\u0431\u044f\u0450\ud7ff\ue001\uffff\U0001f600\U0010ffff"
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], stop_token_ids=[256])
    classes = {
        r"[\u001fc\u0430-\u044f\-]": "-c\x1f\u0430\u0431\u044f",
        r'[^\u001fc\u0430-\u044f"]': "".join(set(chars) - set('c\x1f\u0430\u0431\u044f"')),
        r"[\]\\\-^\u00e9b]": "-]\\^b\xe9",
        "[\U0001f600-\U0010ffff'a-c]": "'abc\U0001f600\U0010ffff",
        "[^a]": chars.replace("a", ""),
        r'[^"\n]': chars.replace('"', ""),
    }
    made = GrammarCompiler(vocabulary, backend="xgrammar", isolation=isolation)
    for text, held in classes.items():
        compiled = made.compile(Constraint.ebnf(f'start ::= "\xe9b\\"[" {text} "\\u007fc"', "start"))
        for char in (*chars, "\ud800", "\udfff"):
            matcher = compiled.matcher()
            assert all(map(matcher.accept_token, '\xe9b"['.encode()))
            taken = all(map(matcher.accept_token, char.encode(errors="surrogatepass")))
            assert taken == (char in held), (text, char)
            assert not taken or all(map(matcher.accept_token, b"\x7fc"))
    made.close()


@pytest.mark.parametrize(
    ("rule", "taken", "refused"),
    [
        (r'"\x41B"', ["AB"], ["A", "B", "\u041b"]),
        (r"[\x41B]", ["A", "B"], ["\u041b"]),
        (r"[\u005eab] [\xe9]", ["a\xe9", "b\xe9", "^\xe9"], ["c\xe9"]),
        (r"[\x4] [^\x4]", ["\x044", "\x04x"], ["44", "\x04\x04"]),
        ('| "a" | "b"', ["", "a", "b"], ["ab"]),
        ('"a" | # |\n | "b" |', ["", "a", "b"], ["ab"]),
        ('( | "a" | # ' + "#" * 99 + '\n "b") [|] ("c" | )', ["|", "a|c"], ["", "a"]),
    ],
)
def test_grammars_are_read_as_by_llama_cpp(rule: str, taken: list[str], refused: list[str]) -> None:
    compiled = compiler(BYTES).compile(Constraint.ebnf(f"root ::= {rule}"))
    assert [text for text in (*taken, *refused) if takes(compiled, text)] == taken
