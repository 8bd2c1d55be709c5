"""The workarounds for llguidance: texts that the bare library wrongly accepts or rejects."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from decimal import Decimal
from random import Random
from typing import Any, cast

import jsonschema
import pytest
import torch

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, GrammarLimits, MaskStatus, Matcher, Vocabulary
from stepgraph.sampling.grammar.link.llguidance_binding import LLGuidanceNativeGrammar, LLGuidanceTokenizer, llguidance_api
from stepgraph.sampling.grammar.llguidance_lib import schema as lark_schema
from stepgraph.sampling.grammar.llguidance_lib.grammar import LLGuidanceMatcher, LLGuidanceText
from stepgraph.sampling.grammar.llguidance_lib.library import LLGuidance, TokenizerWrapper
from tests.helpers.c_library import needs_c
from tests.helpers.grammar_texts import PRINTABLE, fill_mask, random_text
from tests.helpers.schema_cases import BYTES, groups, takes
from tests.sampling.grammar.constraints.test_constraint import SHAPES, VALID

COMPILER = GrammarCompiler(BYTES, max_threads=1, backend="llguidance")
STOP = BYTES.stop_token_ids[0]

STRING: dict[str, Any] = {"type": "string"}
COMBINED: list[dict[str, Any]] = [
    {"type": "object", "properties": {"abc": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"a|b": {"type": "null"}}, "additionalProperties": False, "minProperties": 1},
    {**STRING, "pattern": "^[^a]{2,4}$", "maxLength": 3},
    {"allOf": [{**STRING, "minLength": 2}, {"pattern": '^[ab"\\\\]+$'}, {"maxLength": 4}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}]},
    {"type": "number", "multipleOf": 0.5, "minimum": -2, "maximum": 3},
    {"type": "array", "prefixItems": [STRING], "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    {"type": ["string", "null"], "maxLength": 2},
]


def matcher_of(constraint: Constraint) -> LLGuidanceMatcher:
    return cast(LLGuidanceMatcher, COMPILER.compile(constraint).matcher())


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
def test_random_texts_satisfy_their_schemas(part: int) -> None:
    """Validated by jsonschema, which reads patterns as Python does; patterns of the suite are tested by the table of outcomes."""
    schemas: list[Any] = [group.schema for group in groups() if isinstance(group.schema, dict) and group.file != "pattern"]
    others = [*(case[0] for case in VALID), *SHAPES, *COMBINED * 3]
    schemas += [schema for schema in others if not schema.keys() & {"pattern", "nullable"}]  # nullable is a keyword of OpenAPI
    random, num_compared = Random(17), 0
    for schema in schemas[part::6]:
        try:
            matcher = matcher_of(Constraint.json_schema(schema))
        except ValueError:
            continue
        validator = jsonschema.Draft202012Validator(json.loads(json.dumps(schema), parse_float=Decimal))
        for _ in range(4):
            matcher.rollback(len(matcher.library_matcher.accepted_tokens))
            text = random_text(matcher, random, BYTES)
            if text is not None and not re.search(rb"[eE][+-]?\d{5}", text):  # Decimal has no larger exponents
                validator.validate(json.loads(text, parse_float=Decimal))
                num_compared += 1
    assert num_compared > 66  # of more than 400 in the six parts


@needs_c
def test_language_is_that_of_the_automaton() -> None:
    """Texts of the automaton and mutations of them: a letter left out, doubled or replaced."""
    random, num_compared = Random(5), 0
    automata = GrammarCompiler(BYTES, max_threads=1, backend="automaton")
    strings: list[Any] = [{**STRING, "format": name} for name in ("date", "ipv6", "email", "uri")]
    strings += [{**STRING, "pattern": pattern} for pattern in ("^(ab|c)*d$", "a.*b$", "(?!a)[ab]{2}", '"')]
    numbers: list[Any] = [
        {"type": "integer", "multipleOf": 7},
        {"type": "number", "minimum": -0.5, "exclusiveMaximum": 12},
        {"enum": [1, 12, -1.5]},
    ]
    for schema in [*COMBINED, *strings, *numbers, {"items": numbers[0], "maxItems": 2}, {"type": ["null", "integer", "string"]}]:
        for blanks in (False, True):
            ours, theirs = (made.compile(Constraint.json_schema(schema, blanks)) for made in (automata, COMPILER))
            for _ in range(6):
                text = random_text(ours.matcher(), random, BYTES)
                for _ in range(6 if text else 0):
                    assert text is not None
                    changed = bytearray(text)
                    at = random.randrange(len(changed))
                    changed[at : at + 1] = random.choice([b"", changed[at : at + 1] * 2, bytes([random.choice(text)])])
                    for tried in (text, bytes(changed)):
                        num_compared += 1
                        assert takes(theirs, tried) == takes(ours, tried), (schema, tried)
    assert num_compared > 1000


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({**STRING, "pattern": "^(?!x)(a|b)*a(a|b){10}$"}, "which takes more than 1000 states of an automaton"),
        ({"$ref": "http://localhost/other.json"}, "expected a reference to a schema in the same document"),
        ({"type": "array", "uniqueItems": True}, "#: uniqueItems: got true, which is enforced for a list of values"),
    ],
)
def test_unsupported_schemas_raise_with_the_keyword(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match="constraint json_schema: cannot be compiled") as caught:
        COMPILER.compile(Constraint.json_schema(schema))
    assert message in str(caught.value)


def test_states_of_automata_are_limited_for_each_string() -> None:
    """The library recurses into an expression, so one with many states could overflow the stack. Many strings may have more in total."""
    strings = {name: {**STRING, "pattern": f"^(?!{name})(a|b|c{{2}}){{400}}$"} for name in "abc"}
    schema = {"type": "object", "properties": strings, "required": ["a"]}
    compiled = COMPILER.compile(Constraint.json_schema(schema))
    assert takes(compiled, json.dumps({"a": "b" * 400, "c": "a" * 400})) and not takes(compiled, json.dumps({"a": "a" * 400}))


def test_terminals_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lark_schema, "MAX_TERMINALS", 2)
    with pytest.raises(ValueError, match=r"#: schema: got \{.*, which takes more than 2 terminals of llguidance; use another backend"):
        COMPILER.compile(Constraint.json_schema({"type": "integer", "multipleOf": 12, "not": {"multipleOf": 8}}))


def test_objects_are_closed_unless_they_are_read_by_the_standard() -> None:
    person = {"type": "object", "properties": {"a": {"type": "null"}}}
    for objects, taken in (("closed", False), ("standard", True)):
        compiled = COMPILER.compile(Constraint.json_schema(person, objects=cast(Any, objects)))
        assert takes(compiled, '{"a": null, "b": 1}') == taken and takes(compiled, '{"a": null}')
    assert takes(COMPILER.compile(Constraint.json_schema({"allOf": [person, {"required": ["b"]}]})), '{"a": null, "b": 1}')


def test_forced_text_allows_any_tokenization() -> None:
    vocabulary = Vocabulary([b"{", b'{"', b'"', b"a", b'{"a', b'a"', b"}", b""], stop_token_ids=[7])
    compiled = GrammarCompiler(vocabulary, backend="llguidance").compile(Constraint.regex('\\{"a"\\}'))
    matcher = compiled.matcher()
    assert fill_mask(matcher, 1) == (MaskStatus.OK, [0, 1, 4])
    assert matcher.accept_token(0) and matcher.accept_token(2)
    assert fill_mask(matcher, 1) == (MaskStatus.OK, [3, 5])


def test_tokens_with_equal_bytes_are_legal_together() -> None:
    vocabulary = Vocabulary([b"a", b"b", b"a", b""], stop_token_ids=[3])
    for backend in ("xgrammar", "llguidance"):
        matcher = GrammarCompiler(vocabulary, max_threads=1, backend=cast(Any, backend)).compile(Constraint.regex("a")).matcher()
        assert fill_mask(matcher, 1) == (MaskStatus.OK, [0, 2]), backend


def test_each_stop_token_ends_a_text_and_rolls_back() -> None:
    vocabulary = Vocabulary([b"a", b"", b"</s>"], stop_token_ids=[2, 1])
    matcher = GrammarCompiler(vocabulary, backend="llguidance").compile(Constraint.regex("aa?")).matcher()
    for stop in (1, 2, 1):
        assert not matcher.accept_token(stop) and matcher.accept_token(0)
        assert fill_mask(matcher, 1) == (MaskStatus.OK, [0, 1, 2])
        assert matcher.accept_token(stop) and fill_mask(matcher, 1) == (MaskStatus.TERMINATED, [])
        assert not matcher.accept_token(0) and not matcher.accept_token(stop)
        matcher.rollback(1)
        assert fill_mask(matcher, 1) == (MaskStatus.OK, [0, 1, 2])
        assert matcher.accept_token(0) and fill_mask(matcher, 1) == (MaskStatus.COMPLETE, [1, 2]) and matcher.accept_token(stop)
        matcher.rollback(3)


NESTED = Constraint.lark('start: x+\nx: "(" x ")" | /[a-z]+/ | "[" x "]"')
PIECES = [b"(", b"[", b")", b"]", b"a", b"b", b"(a", b"[a", b"]]", b"))"]


def test_mask_after_a_rollback_is_that_of_the_new_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differences(Random(1), 300) == 0
    real = LLGuidanceText._compute
    # As in the library: where paths diverge, the last computed mask is kept.
    monkeypatch.setattr(LLGuidanceText, "_compute", lambda self, row: None if row is self._scratch else real(self, row))
    assert differences(Random(1), 100) > 0


def differences(random: Random, rounds: int, walking: Callable[[CompiledConstraint], Matcher] = CompiledConstraint.matcher) -> int:
    """The number of masks of a matcher with rollbacks that differ from those of a fresh one."""
    vocabulary = Vocabulary([*PIECES, b""], stop_token_ids=[len(PIECES)])
    compiled = GrammarCompiler(vocabulary, backend="llguidance").compile(NESTED)
    matcher, history, wrong = walking(compiled), list[int](), 0

    def accept_any() -> None:
        taken = next((token_id for token_id in random.sample(range(len(PIECES)), len(PIECES)) if matcher.accept_token(token_id)), None)
        history.extend([] if taken is None else [taken])

    for _ in range(rounds):
        accept_any()
        for _ in range(random.randint(1, 4)):
            fresh = compiled.matcher()
            assert all(fresh.accept_token(token_id) for token_id in history)
            wrong += fill_mask(matcher, 1) != fill_mask(fresh, 1)
            accept_any()
        back = min(len(history), random.randint(0, 5) if len(history) < 30 else 30)
        matcher.rollback(back)
        del history[len(history) - back :]
    return wrong


def test_step_over_the_fuel_is_a_fault() -> None:
    branches = " | ".join(f'"a" /{"b" * (1 + index % 50)}c{{{1 + index}}}/' for index in range(2100))
    matcher = matcher_of(Constraint.lark(f'start: "x" ({branches})'))
    assert fill_mask(matcher, BYTES.mask_words) == (MaskStatus.OK, [ord("x")])
    matcher.accept_token(ord("x"))
    assert fill_mask(matcher, BYTES.mask_words) == (MaskStatus.FAULT, [])
    assert "items" in matcher.fault
    matcher.rollback(len(matcher.library_matcher.accepted_tokens))
    assert fill_mask(matcher, BYTES.mask_words) == (MaskStatus.FAULT, []) and not matcher.accept_token(ord("x"))


def test_slow_step_is_a_fault() -> None:
    slow = GrammarCompiler(BYTES, limits=GrammarLimits(step_seconds=1e-9), backend="llguidance")
    with pytest.raises(ValueError, match="one step of the grammar took"):
        slow.compile(Constraint.regex("a+"))


LARKS = [  # inside strings, patterns and comments: text that is an error elsewhere
    ('start: "%json {" /%jsonn<[1]>/ # %json { ~ <[1]> stop=\n', "%json {%jsonn<1>"),
    ("start: T // ~\nT: /(?s:.*)/ & ~/a/", "b"),
    ('start: T ~ 2..3\nT: "x"', "xxx"),
    ('%llguidance {\n"no_forcing": false}\nstart: %json\n {"type": "integer"} "!"', "12!"),
    ('start: a "b"\na[suffix="c"]: /[a-z]*/', "aaacb"),
    ('start: a "b"\na[lazy, capture]: /[a-z]*c/', "aaacb"),
]


@pytest.mark.parametrize(("grammar", "text"), LARKS)
def test_lark_grammar_keeps_its_meaning(grammar: str, text: str) -> None:
    """Its masks do not depend on tokens that were rolled back."""
    compiled = COMPILER.compile(Constraint.lark(grammar))
    assert takes(compiled, text)
    matcher, fresh = compiled.matcher(), compiled.matcher()
    masks = torch.zeros(2, BYTES.mask_words, dtype=torch.int32)
    for char in text.encode():
        for token in text.encode():
            matcher.fill_next_token_bitmask(masks, 0)
            if matcher.accept_token(token):
                matcher.rollback(1)
        assert matcher.fill_next_token_bitmask(masks, 0) == fresh.fill_next_token_bitmask(masks, 1)
        assert torch.equal(masks[0], masks[1])
        assert matcher.accept_token(char) and fresh.accept_token(char)


def test_lark_grammar_keeps_options_and_checks_schemas() -> None:
    text = '%llguidance {"no_forcing": false}\nstart: "x" %json {"type": "object", "properties": {"%json": {"type": "integer"}}}'
    compiled = COMPILER.compile(Constraint.lark(text))
    assert takes(compiled, 'x{"%json": 1}') and not takes(compiled, 'x{"b": 1}')
    lines = '%llguidance {"no_forcing": true}\n%llguidance {"allow_initial_skip": true}\n%ignore / /\nstart: "x"'
    assert takes(COMPILER.compile(Constraint.lark(lines)), " x")
    for text, message in [
        ('start: %json {"not": {}}', "no value satisfies #: not"),
        ("start: %json {", "the text after %json is not JSON"),
        ('start: %json {"type": "null", "type": "null"}', "the text after %json is not JSON .the key 'type' appears twice"),
        ('%llguidance [1]\nstart: "a"', "its %llguidance line is not one JSON object"),
        ('%llguidance {}\n%llguidance {"skip_repetition": "once"}\nstart: "a"', "#: skip_repetition: is an option that the library would"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "#: allow_invalid_utf8: allows bytes that are not text"),
        ("start: <[1]>", r"#: <\[1\]>: names tokens"),
        ("start: T\nT: ~/a/", "#: ~: allows bytes that are not text"),
        ('start: a "b"\na[max_tokens=3]: /a*/', "#: max_tokens=: is not enforced"),
        ('start: a "b"\na[stop="c"]: /a*/', "#: stop=: is not enforced"),
        ('start: a "b"\na[temperature=0.5]: /a*/', "#: temperature=: is a sampling parameter"),
        ("start: b", "#: lark: got 'start: b' at column 8: unknown name: \"b\"$"),
        ('start: "x"\n\n\na: "', "#: lark: got 'a: \"' at column 5: lexer error$"),
    ]:
        with pytest.raises(ValueError, match=f"constraint lark: cannot be compiled: .*{message}"):
            COMPILER.compile(Constraint.lark(text))


def test_a_token_that_the_library_cannot_hold_is_refused() -> None:
    compiler = GrammarCompiler(Vocabulary([b"a", b"b" * 1100, b""], [2]), max_threads=1)
    with pytest.raises(ValueError, match=r"Vocabulary\.tokens: got a token of 1100 bytes, expected at most 1024 for llguidance"):
        compiler.check(Constraint.lark('start: "a"'))


def test_error_of_the_c_api_has_the_librarys_message() -> None:
    tokenizer = LLGuidanceTokenizer(llguidance_api(), PRINTABLE)
    with pytest.raises(ValueError, match='unknown name: "nothing"'):
        LLGuidanceNativeGrammar(tokenizer, "start: nothing", {})


def test_closed_compilers_free_their_token_tables() -> None:
    def live_tables() -> int:
        gc.collect()
        return sum(isinstance(item, LLGuidance | TokenizerWrapper) for item in gc.get_objects())

    before = live_tables()
    for _ in range(3):
        compiler = GrammarCompiler(BYTES, max_threads=1, backend="llguidance")
        assert compiler.compile(Constraint.regex("a+")).matcher().accept_token(BYTES.tokens.index(b"a"))
        assert live_tables() > before
        compiler.close()
        del compiler
    assert live_tables() == before
