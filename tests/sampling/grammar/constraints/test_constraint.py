"""Schemas and patterns: those that compile are enforced, all others raise an error that names the keyword."""

from __future__ import annotations

import json
from decimal import Decimal
from random import Random
from typing import Any

import pytest

from stepgraph.sampling.grammar import Constraint
from stepgraph.sampling.grammar.schema.formats import FORMATS
from tests.helpers.grammar_texts import COMPILER, PRINTABLE, accepts, matcher_of, random_text

# By default, objects are closed and types implied. The test suite of the standard has the other keywords.
VALID: list[tuple[Any, list[Any], list[Any]]] = [
    ({"properties": {"a": {"type": "null"}}}, [{}, {"a": None}], [{"a": 1}, {"b": 1}, 1]),
    ({"type": "string", "pattern": "^[a-c]+$|^[^a]$"}, ["abc", "x"], ["ad", ""]),
    ({"type": "string", "pattern": "^" + "ab" * 400 + "$"}, ["ab" * 400], ["ab" * 399]),
    ({"type": "object", "required": ["z"]}, [{"z": 1}, {"z": 1, "a": 2}], [{}, {"a": 1}]),
    ({"type": "object", "properties": {"a": {}}, "required": ["z"]}, [{"a": 1, "z": 1}, {"z": 1}], [{"a": 1}, {"z": 1, "b": 1}]),
    ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {"const": 1}}}, [{"a": 1, "xa": 1}], [{"xa": 2}, {"b": 1}]),
    ({"type": "object", "nullable": True}, [{}, None], [1]),
    ({"minLength": 2}, ["ab"], ["a", 1]),
    ({"minimum": 3}, [3, 4.5], [2, "a"]),
    ({"items": {"type": "integer"}}, [[], [1]], [["a"], 1]),
    ({"minimum": 3, "type": "string"}, ["a"], [3]),
    ({"type": "string", "pattern": "a+", "maxLength": 3}, ["aa", "aaa"], ["", "aaaa", "ba"]),
    ({"type": "string", "pattern": '^["\\\\\n]$'}, ['"', "\\", "\n"], ["a", ""]),
    ({"type": "string", "format": "colour"}, ["red"], [1]),
    ({"const": 2**70}, [2**70], [2**70 + 1]),
    (
        {"allOf": [{"type": "object", "properties": {"a": {}}}, {"properties": {"b": {"const": 1}}}]},
        [{"a": 1, "b": 1}],
        [{"b": 2}, {"c": 1}],
    ),
    (
        {"properties": {f"p{index}": {} for index in range(101)}, "maxProperties": 2},
        [{}, {"p7": 1, "p99": 2}],
        [{"p1": 1, "p2": 2, "p3": 3}],
    ),
    (
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "$defs": {kind: {"type": "object", "properties": {"is": {"const": kind}}, "required": ["is"]} for kind in ("cat", "dog")},
        },
        [{"is": "cat"}, {"is": "dog"}],
        [{"is": "cow"}, {}],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), VALID)
def test_supported_schemas_are_enforced(schema: Any, good: list[Any], bad: list[Any]) -> None:
    constraint = Constraint.json_schema(schema)
    assert [value for value in good if not accepts(constraint, json.dumps(value).encode())] == []
    assert [value for value in bad if accepts(constraint, json.dumps(value).encode())] == []


SHAPES: list[dict[str, Any]] = [
    *({"type": "string", "format": name} for name in sorted(FORMATS)),
    *({"type": "string", "pattern": pattern} for pattern in ("^.{1,5}$", "^[ -~]{1,8}$", "^[^a]{1,5}$", "\\S{3}", "\\W+", "a[!-#]b")),
    {"enum": ['a"b\\c', 1.5, [1, {"x": "\t"}]]},
    {"type": "number", "minimum": -3.5, "maximum": 12.25},
]


@pytest.mark.parametrize("schema", [*(case[0] for case in VALID), *SHAPES], ids=json.dumps)
def test_random_walk_through_masks_is_valid_json(schema: Any) -> None:
    constraint, random = Constraint.json_schema(schema), Random(0)
    for _ in range(20):
        if (text := random_text(matcher_of(constraint), random, PRINTABLE, share=0)) is not None:
            json.loads(text)


REFUSED: list[tuple[Any, str]] = [
    ({"type": 12}, "#: type: got 12"),
    ({"type": []}, ": no value satisfies #: type"),
    ({"type": "object", "properties": {"a": 5}}, "#/properties/a: schema: got 5"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "refers to itself"),
    ({"$ref": "#anchor"}, '$ref: got "#anchor"'),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_unsupported_schemas_raise_with_the_keyword(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"constraint json_schema: cannot be compiled") as caught:
        COMPILER.compile(Constraint.json_schema(schema))
    assert message in str(caught.value)
    assert ".cc:" not in str(caught.value)


def test_deep_nesting_raises() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        Constraint.json_schema('{"items":' * 50_000 + "{}" + "}" * 50_000)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint.regex("("), "constraint regex: cannot be compiled: .*a closing parenthesis"),
        (Constraint.regex("a$b"), r"constraint regex: .*got 'a\$b', expected anchors at its ends"),
        (Constraint.regex("a(^b)"), r"constraint regex: .*got 'a\(\^b\)', expected anchors at its ends"),
        (
            Constraint.regex("a{,3}b"),
            r"constraint regex: .*got '\{,3\}' at position 1, expected a count such as \{0,3\}, or \\\{ for the character",
        ),
        (Constraint.regex("a{2, 3}"), r"constraint regex: .*got '\{2, 3\}' at position 1, expected a count"),
        (Constraint.regex("a{,}"), r"constraint regex: .*got '\{,\}' at position 1, expected a count"),
        (Constraint.regex("[[:alpha:]]"), r"constraint regex: .*got '\[\[:alpha:\]' at position 0, expected ranges such as A-Z, or \\\["),
        (Constraint.regex("b[^[:digit:]x]"), r"constraint regex: .*got '\[\^\[:digit:\]' at position 1, expected ranges"),
        (Constraint.regex("[^]a]"), r"constraint regex: .*got '\[\^\]' at position 0 and '\]' at position 4, expected \\\] inside a class"),
        *(
            (Constraint.regex(f"a{escape}"), "constraint regex: .*at position 1, expected an escape")
            for escape in (r"\Z", r"\z", r"\h", r"\1", r"\b")
        ),
        *((Constraint.regex(f"a{after}"), "constraint regex: .*expected one repetition only") for after in ("++", "*+", "?+", "{1,2}+")),
        *(
            (Constraint.regex(group), "constraint regex: .*no look-behind and no flags")
            for group in ("(?x) a", "(?i:a)", "(?P=n)", "(?>a)", "(?#a)")
        ),
        *(
            (Constraint.regex(pattern), None)
            for pattern in ("a{b}", "a{}", "[[a]", "[^]*", r"\[a]", "(?P<n>a)", "(?<n>a)", r"\{,3}", "[{,3}]", "a{1,2}?")
        ),
        (Constraint.regex("\\Aa"), r"constraint regex: .*got '\\\\Aa' at position 0"),
        (Constraint.regex("a{1,1000000}"), "constraint regex: .*at most 100000 repetitions"),
        (Constraint.regex("(?=a)b"), "constraint regex: .*no look-around"),
        (Constraint.ebnf("root ::= "), "constraint ebnf: .*Expect element"),
        (Constraint.ebnf('rule ::= "a"'), "constraint ebnf: .*root: got .root., expected the name of a rule"),
        (Constraint.ebnf("root ::= root"), "constraint ebnf: .*no text"),
        (Constraint.ebnf(r'root ::= "\ud800"'), r"constraint ebnf: .*got \\ud800, expected Unicode characters other than surrogates"),
        (Constraint.ebnf(r'root ::= "\U00110000"'), r"constraint ebnf: .*got \\U00110000, expected Unicode characters other"),
        (Constraint.ebnf("root ::= []"), "constraint ebnf: .*no text"),
        (Constraint.ebnf('root ::= "a"{1, 4294967297}'), r"constraint ebnf: .*got '{1, 4294967297', expected numbers below 1,000,000,000"),
        (Constraint.ebnf("root ::= Token(4294967393)"), r"constraint ebnf: .*got '\(4294967393', expected numbers below"),
        (Constraint.ebnf('root ::= Regex ("(ab+)?")'), r"constraint ebnf: .*got 'Regex \(', expected .* rules instead of Regex"),
        (Constraint.regex("a{" + "9" * 5000 + "}"), "constraint regex: .*at most 100000 repetitions"),
        (Constraint.regex("é" * 3 + "\u4e00"), None),
        (Constraint.regex("\u4e00"), "constraint regex: .*no text of this vocabulary"),
    ],
)
def test_compile_error_has_the_reason(constraint: Constraint, message: str | None) -> None:
    if message is None:
        COMPILER.compile(constraint)  # its first tokens exist; the missing last one is found as a dead end
        return
    with pytest.raises(ValueError, match=message):
        COMPILER.compile(constraint)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Constraint.choice([]),
        lambda: Constraint.choice("abc"),
        lambda: Constraint.choice(["a", ""]),
        lambda: Constraint.choice(["a", 1]),  # type: ignore[list-item]
        lambda: Constraint.regex(None),  # type: ignore[arg-type]
        lambda: Constraint.regex("a" * 2_000_000),
        lambda: Constraint.ebnf(""),
        lambda: Constraint.ebnf('root ::= "a"', root=""),
        lambda: Constraint.ebnf('root ::= "a"', root='a | "z"'),
        lambda: Constraint.ebnf('root ::= "a\0b"'),
        lambda: Constraint.lark('start: "a\0b"'),
        lambda: Constraint.regex("a").after(b"</think>"),
        lambda: Constraint.regex("a").after({1, 2}),  # type: ignore[arg-type]
        lambda: Constraint.json_schema([]),  # type: ignore[arg-type]
        lambda: Constraint.json_schema("[]"),
        lambda: Constraint.json_schema("{"),
        lambda: Constraint.json_schema('{"type": "string", "type": "null"}'),
        lambda: Constraint.json_schema({"const": float("nan")}),
        lambda: Constraint.json_schema({"const": {1, 2}}),
        lambda: Constraint.json_schema({"const": Decimal("nan")}),
        lambda: Constraint.json_schema('{"const": 1e999}'),
        lambda: Constraint.json_schema('{"const": 1e-99999999999999999999}'),
        lambda: Constraint.json_schema({}, any_whitespace=1),  # type: ignore[arg-type]
        lambda: Constraint("regex", "a", any_whitespace=True),
        lambda: Constraint("lark", "a", any_whitespace=True),
        lambda: Constraint("bnf", "a"),  # type: ignore[arg-type]
        lambda: Constraint.regex("a", backend="outlines"),  # type: ignore[arg-type]
        lambda: Constraint.lark(" "),
    ],
)
def test_malformed_constraints_raise(build: Any) -> None:
    with pytest.raises(ValueError, match=r"^Constraint\..*: got .*, expected "):
        build()


@pytest.mark.parametrize("constraint", [Constraint.choice(["漢" * 25_000]), Constraint.json_schema({"const": "漢" * 150_000})])
def test_a_character_counts_once_for_the_limits(constraint: Constraint) -> None:
    COMPILER.check(constraint)


def test_schema_equals_its_text_but_not_another_property_order() -> None:
    forward: dict[str, Any] = {"properties": {"a": {}, "b": {}}}
    assert Constraint.json_schema(forward) == Constraint.json_schema(json.dumps(forward, indent=2))
    assert Constraint.json_schema(forward) != Constraint.json_schema({"properties": {"b": {}, "a": {}}})


@pytest.mark.parametrize("as_text", [False, True])
def test_numbers_that_a_float_would_round_stay_exact(as_text: bool) -> None:
    digits = "0.1234567890123456789"
    text = f'{{"anyOf": [{{"const": {digits}}}, {{"minimum": 2.00000000000000000001}}]}}'
    schema = {"anyOf": [{"const": Decimal(digits)}, {"minimum": Decimal("2.00000000000000000001")}]}
    constraint = Constraint.json_schema(text if as_text else schema)
    assert constraint == Constraint.json_schema(constraint.payload)
    numbers = {digits: True, f"{digits}1": False, "0.12345678901234568": False, "2.00000000000000000001": True, "2.0": False}
    assert {number: accepts(constraint, number.encode()) for number in numbers} == numbers
    tag = {"structures": [{"begin": "", "schema": schema, "end": ""}]}
    assert digits in Constraint.structural_tag(tag).payload
    assert Constraint.json_schema('{"const": 0.10}') == Constraint.json_schema({"const": 0.1}), "a float has one text"


def test_a_number_with_too_small_an_exponent_is_refused() -> None:
    with pytest.raises(ValueError, match="got 1E-999, expected a number of at most 400 digits"):
        COMPILER.compile(Constraint.json_schema('{"minimum": 1e-999}'))
