"""Schemas read by the standard: instances, random texts, and reasons. The judge of instances and texts is jsonschema."""

from __future__ import annotations

import itertools
import json
import random
import re
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, Vocabulary, coverage
from stepgraph.sampling.grammar.constraints.unsupported import UnsupportedError
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.schema import automata
from stepgraph.sampling.grammar.schema.grammar import schema_grammar
from stepgraph.sampling.grammar.schema.options import Options
from stepgraph.sampling.grammar.schema.reader import parsed

BYTES = Vocabulary([*(bytes([code]) for code in range(256)), b"<eos>"], stop_token_ids=[256])
EOS = 256
COMPILER = GrammarCompiler(BYTES, max_threads=1, isolation="none", backend="automaton")
DRAFT = "http://json-schema.org/draft-0{}/schema#"

Tree = {"type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}}, "required": ["v"]}

# A schema, and instances in the order of its properties, about half of them valid.
CASES: list[tuple[Any, list[Any]]] = [
    (True, [None, {"a": [1]}]),
    ({"type": ["integer", "null"]}, [1, None, 1.5, "1"]),
    ({"type": "integer", "description": 1, "readonly": True, "x": {}, "format": "int32"}, [1, -3, "a"]),
    ({"minimum": 3}, [3, 2, 2.9, "a", None, [1]]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 10}, [0, 0.1, 10, 10.5]),
    ({"type": "number", "multipleOf": 0.05}, [0.15, 0.12, -2, 7.05]),
    ({"type": "integer", "multipleOf": 7, "minimum": 10}, [14, 7, 15, 700]),
    ({"not": {"multipleOf": 2}, "type": "integer"}, [1, 2, -7, 0]),
    ({"minLength": 2, "maxLength": 3}, ["ab", "a", "äöü", "abcd", 'a"', "\n\\", 5]),
    ({"pattern": "b+$", "maxLength": 3}, ["ab", "abbb", "b", "ba"]),
    ({"pattern": "^(?!http)[a-z]+$"}, ["htt", "https", "x"]),
    ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ["ab", "a", "axb", "ba"]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "2023-02-29", "x"]),
    ({"type": "string", "format": "no-such-format"}, ["x", 1]),
    ({"format": "ipv4", "maxLength": 9}, ["10.0.0.1", "10.10.10.1", "10.0.0.256", 7]),
    ({"enum": ["a", 1, None, True, {"b": [1, {}]}, [2]]}, ["a", 1, None, True, {"b": [1, {}]}, [2], False, {"b": []}, 2]),
    ({"enum": [1, 2, "a"], "type": "integer"}, [1, 2, "a"]),
    ({"enum": ["ab", "b", "abc"], "pattern": "^a", "maxLength": 2}, ["ab", "b", "abc"]),
    ({"const": 1.0}, [1, 2]),
    (Tree, [{"v": 1}, {"v": 1, "kids": [{"v": 2}]}, {"kids": []}, {"v": 1, "kids": [{}]}, {"v": 1, "x": 0}]),
    ({"properties": {"a": {"type": "null"}}, "required": ["b", "a"]}, [{"a": None, "b": 1}, {"a": None}, {"a": 1, "b": 1}, []]),
    ({"additionalProperties": {"type": "integer"}, "properties": {"a": True}}, [{"a": "x", "b": 1}, {"b": "x"}, {}]),
    ({"additionalProperties": False, "patternProperties": {"^x-": {"type": "string"}}}, [{"x-a": "b"}, {"x-a": 1}, {"y": "b"}, {}]),
    ({"patternProperties": {"a": {"minimum": 3}, "b$": {"maximum": 5}}}, [{"ab": 4}, {"ab": 6}, {"a": 6}, {"ba": 2}, {"c": 0}]),
    ({"properties": {"ab": {"type": "integer"}}, "patternProperties": {"^a": {"minimum": 2}}}, [{"ab": 2}, {"ab": 1}, {"ac": 1}]),
    ({"propertyNames": {"pattern": "^[a-z]$"}}, [{"a": 1}, {"ab": 1}, {}]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}]),
    (
        {"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "minProperties": 2},
        [{"a": 1}, {"a": 1, "c": 2}, {"a": 1, "b": 1, "c": 1}, {}],
    ),
    ({"properties": {"a": False, "b": True}}, [{"a": 1}, {"b": 1}]),
    ({"items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[], [1], [1, 2], [1, 2, 3], ["a"], {}]),
    ({"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, [[1, "a"], [1], [], [1, "a", 2], ["a"]]),
    ({"$schema": DRAFT.format(7), "items": [{"const": 1}], "additionalItems": {"const": 2}}, [[1, 2, 2], [1, 3], [2], []]),
    ({"contains": {"const": 1}, "maxItems": 3}, [[1], [2, 1], [2], [], [2, 2, 1], [2, 2, 2, 1]]),
    ({"contains": {"type": "integer"}, "minContains": 2, "maxContains": 2}, [[1, 2], [1, "a", 2], [1, 2, 3], [1]]),
    ({"not": {"contains": {"const": 1}}}, [[1], [2], [], [2, 1]]),
    ({"items": {"enum": ["a", "b", 3]}, "uniqueItems": True}, [["a", "b"], ["b", 3, "a"], ["a", "a"], []]),
    ({"items": {"enum": list(range(9))}, "uniqueItems": True, "minItems": 2}, [[1, 4], [4], [4, 4]]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], ["x"], [1, 1]]),
    ({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"minimum": 2}}}]}, [{"a": 2}, {"a": 1}, {"a": 2.5}]),
    ({"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": {"type": "string", "minLength": 1}}}, ["a", "", "abc", 1]),
    ({"$schema": DRAFT.format(4), "$ref": "#/definitions/a", "maxLength": 1, "definitions": {"a": {"type": "string"}}}, ["abc", 1]),
    ({"anyOf": [{"type": "string"}, {"minimum": 5}], "type": ["string", "integer"]}, ["a", 5, 4, None]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 3, 2.5, 1.5, "a"]),
    (
        {
            "oneOf": [
                {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
            ]
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": "x"}, {}],
    ),
    ({"not": {"type": "string"}}, ["a", 1, [], None]),
    ({"type": "object", "not": {"required": ["a"]}}, [{}, {"a": 1}, {"b": 1}]),
    ({"not": {"properties": {"a": {"type": "string"}}}}, [{"a": 1}, {"a": "x"}, {}, 1]),
    ({"not": {"patternProperties": {"^a": {"type": "string"}}}}, [{"ab": 1}, {"ab": "x"}, {}, {"b": 2, "a": 1}]),
    ({"not": {"maxProperties": 1}, "properties": {"a": {}, "b": {}}}, [{}, {"a": 1}, {"a": 1, "b": 2}]),
    ({"not": {"items": {"type": "integer"}, "maxItems": 2}}, [[1], ["a"], [1, 2, 3], []]),
    ({"not": {"enum": ["a", 1]}, "type": ["string", "integer"]}, ["a", "b", 1, 2]),
    ({"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["a"]}, "else": {"required": ["b"]}}, [
        {"k": 1, "a": 0}, {"k": 1}, {"k": 2, "b": 0}, {"b": 0}, {"a": 0}, 4,
    ]),
    ({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 1}, {"a": 1}, {"b": 1}, {}]),
    ({"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"properties": {"b": {"const": 2}}}}}, [
        {"a": 1, "b": 2}, {"a": 1, "b": 1}, {"b": 1}, {"a": 1},
    ]),
    ({"$schema": DRAFT.format(7), "dependencies": {"a": ["b"], "c": {"required": ["a"]}}}, [{"a": 1, "b": 1}, {"a": 1}, {"c": 1}, {}]),
    ({"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False}, [{"a": 1, "b": 1}, {"c": 1}, {}]),
    ({"prefixItems": [{"const": 1}], "unevaluatedItems": {"const": 2}}, [[1], [1, 2], [1, 3]]),
    ({"$schema": DRAFT.format(4), "minimum": 3, "exclusiveMinimum": True}, [3, 4, "a"]),
    ({"$schema": DRAFT.format(4), "id": "http://x/y", "not": {"$ref": "http://x/y#/definitions/a"}, "definitions": {"a": {"type": "null"}}},
     [None, 1]),
    (
        {
            "$schema": DRAFT.format(3),
            "properties": {"a": {"required": True, "type": ["any"]}, "b": {"divisibleBy": 3, "disallow": ["string"]}},
        },
        [{"a": 1}, {"a": 1, "b": 6}, {"a": 1, "b": 5}, {"b": 6}, {"a": 1, "b": "x"}],
    ),
    ({"$schema": DRAFT.format(3), "extends": {"type": "integer"}, "maximum": 3}, [3, 4, "a"]),
    ({"$id": "http://x/", "properties": {"a": {"$ref": "item"}, "b": {"$ref": "#n"}}, "$defs": {
        "a": {"$id": "item", "type": "string"}, "b": {"$anchor": "n", "type": "null"}}}, [{"a": "", "b": None}, {"a": 1}, {"b": 1}]),
    ({"properties": {"a~b/c%": {"type": "null"}, "r": {"$ref": "#/properties/a~0b~1c%25"}}}, [{"r": None}, {"r": 1}]),
    ({"properties": {"id": {"type": "string"}, "$ref": {"type": "integer"}}}, [{"id": "#x", "$ref": 1}, {"id": 1}, {"$ref": "a"}]),
    ({"properties": {"é\"\n": {"type": "integer"}}, "additionalProperties": False}, [{"é\"\n": 1}, {"é": 1}]),
]  # fmt: skip


def judge(schema: Any) -> Any:
    found = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return found(exact, format_checker=found.FORMAT_CHECKER)


def matcher_of(schema: Any, **options: Any) -> Matcher:
    text = json.dumps(schema) if isinstance(schema, dict) else json.dumps({"allOf": [schema]})
    return COMPILER.compile(Constraint.json_schema(text, **options)).matcher()


def accepts(matcher: Matcher, text: str) -> bool:
    taken = [matcher.accept_token(byte) for byte in text.encode()]
    finished = all(taken) and matcher.accept_token(EOS)
    matcher.rollback(sum(taken) + finished)
    return finished


@pytest.mark.parametrize(("schema", "instances"), CASES, ids=[str(number) for number in range(len(CASES))])
def test_instances_are_accepted_as_by_jsonschema(schema: Any, instances: list[Any]) -> None:
    matcher, validator = matcher_of(schema, objects="standard"), judge(schema)
    verdicts = [validator.is_valid(value) for value in json.loads(json.dumps(instances), parse_float=Decimal)]
    assert True in verdicts
    for value, valid in zip(instances, verdicts, strict=True):
        assert accepts(matcher, json.dumps(value, ensure_ascii=False)) == valid, value


def walk(matcher: Matcher, draw: random.Random, words: torch.Tensor) -> bytes | None:
    """A random text of a grammar; None where it does not end."""
    text = bytearray()
    while len(text) < 600:
        matcher.fill_next_token_bitmask(words, 0)
        legal = np.flatnonzero(np.unpackbits(words[0].numpy().view(np.uint8), bitorder="little"))
        assert len(legal), f"dead end after {bytes(text)!r}"
        ends = [int(token) for token in legal if token == EOS or chr(token) in '"]}']
        readable = [int(token) for token in legal if 32 <= token < 127]
        token = draw.choice(ends if ends and draw.random() < 0.4 else readable or legal.tolist())
        assert matcher.accept_token(token)
        if token == EOS:
            return bytes(text)
        text.append(token)
    return None


@pytest.mark.parametrize("objects", ["closed", "standard"])
def test_random_texts_are_valid(objects: str) -> None:
    draw, words, finished = random.Random(11), torch.zeros(1, BYTES.mask_words, dtype=torch.int32), 0
    for schema, _ in CASES:
        text = schema_grammar(parsed(json.dumps(schema)), Options(objects=objects))  # type: ignore[arg-type]
        grammar, validator = COMPILER.compile(Constraint.ebnf(text)), judge(schema)
        for _ in range(6):
            found = walk(grammar.matcher(), draw, words)
            if found is not None and not re.search(rb"[eE][+-]?\d{5}", found):  # beyond the exponents of Decimal
                finished += 1
                error = next(validator.iter_errors(json.loads(found, parse_float=Decimal)), None)
                assert error is None, (schema, found, error)
    assert finished > 5 * len(CASES)


REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"a": {"type": "text"}}}, '#/properties/a: type: got "text"'),
    ({"type": "string", "enum": [1]}, "#: schema: no value satisfies both #: type and #: enum"),
    ({"allOf": [{"minimum": 3, "type": "integer"}, {"maximum": 2}]}, "no value satisfies both #/allOf/0 and #/allOf/1"),
    ({"$ref": "#"}, "#: $ref: refers to itself"),
    ({"$ref": "other.json"}, '#: $ref: got "other.json", expected a reference to a schema in the same document'),
    ({"items": {"pattern": "(?<=a)b"}}, "#/items: pattern: got '?<=a)b' at position 1"),
    ({"patternProperties": {"(?i)a": {}}}, "#: patternProperties: got"),
    ({"items": {"type": "array", "uniqueItems": True}}, "#/items: uniqueItems: is enforced for a list of values"),
    ({"minLength": "3"}, '#: minLength: got "3", expected an integer in 0..'),
    ({"multipleOf": 0}, "#: multipleOf: got 0, expected a number > 0"),
    ({"type": "integer", "multipleOf": 5003}, "#: multipleOf: got 5003, expected at most 4000"),
    ({"type": "object", "minProperties": 3}, "#: minProperties: is enforced as far as properties are declared"),
    ({"anyOf": []}, "#: anyOf: got [], expected a list of at least one schema"),
    ({"properties": []}, "#: properties: got [], expected an object"),
    ({"items": {"a": {"$ref": 3}}, "not": {"$ref": 3}}, "#/not: $ref: got 3, expected a string"),
    ({"type": "object", "required": ["a"], "properties": {"a": False}}, "no value satisfies both #: type and #: properties"),
    ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, "#: schema: no value satisfies it"),
    ({"not": {"format": "date"}}, "#/not: not: is not enforced with a format"),
    ({"not": {"uniqueItems": True}}, "#/not: not: is not enforced with uniqueItems"),
    ({"not": {"anyOf": [True, {"properties": {"a": {}}}], "unevaluatedProperties": False}}, "unevaluatedProperties"),
    ({"allOf": [{"anyOf": [{"required": [f"{one}{two}"]} for two in "abcdefgh"]} for one in "abcdefgh"]}, "cases, expected at most 2000"),
    (
        {"$dynamicRef": "#a", "$defs": {"x": {"$id": "x", "$dynamicAnchor": "a"}, "y": {"$id": "y", "$dynamicAnchor": "a"}}},
        "#: $dynamicRef: got \"#a\", to which several anchors",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_schema_that_is_not_enforced_is_refused_with_its_place(schema: Any, message: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        schema_grammar(parsed(json.dumps(schema)), Options(objects="standard"))
    assert message in str(error.value)


def test_unknown_words_are_annotations_or_refused() -> None:
    schema = {"properties": {"a": {"readonly": True, "title": "t", "x-order": 1, "format": "color"}}}
    matcher_of(schema)
    with pytest.raises(ValueError, match="#/properties/a: format: 'color' is not known; expected one of date, date-time"):
        matcher_of(schema, unknown_formats="refuse")
    schema["properties"]["a"]["markdownDescription"] = "m"
    with pytest.raises(ValueError, match="#/properties/a: markdownDescription: is no keyword of JSON Schema"):
        matcher_of(schema, unknown_keywords="refuse")


def test_closed_objects_have_declared_properties_only_and_patterns_match_whole_texts() -> None:
    schema = {"anyOf": [{"properties": {"a": {"pattern": "b+"}}, "required": ["c"]}, {"type": "object"}], "properties": {"d": {"const": 1}}}
    closed = schema_grammar(schema, Options())
    matcher = COMPILER.compile(Constraint.ebnf(closed)).matcher()
    texts = ['{"a": "bb", "c": 0, "d": 1}', '{"d": 1}', '{"a": "xb", "c": 0}', '{"d": 1, "x": 1}', "{}"]
    assert [accepts(matcher, text) for text in texts] == [True, True, False, False, True]


def test_closed_schema_of_one_type_is_written_for_that_type() -> None:
    """Unless it has no value then: a list that must have a next element ends by a value of another type."""
    listed = {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    for schema, objects, taken in (
        ({"properties": {"a": {}}}, "closed", [True, False, False]),
        ({"properties": {"a": {}}}, "standard", [True, True, True]),
        ({"minItems": 1}, "closed", [False, True, False]),
        ({"minItems": 1, "properties": {"a": {}}}, "closed", [True, True, True]),
        ({"type": ["object", "null"], "properties": {"a": {}}}, "closed", [True, False, False]),
        ({"description": "anything"}, "closed", [True, True, True]),
    ):
        matcher = matcher_of(schema, objects=objects)
        assert [accepts(matcher, text) for text in ("{}", "[1]", "3")] == taken, schema
    assert accepts(matcher_of(listed), '{"next": 3}')


@pytest.mark.parametrize("backend", ["automaton", "xgrammar"])
def test_blanks_between_tokens(backend: Any) -> None:
    schema = {"properties": {"a": {"type": "array"}, "b": {"const": {"x": [1]}}}, "required": ["b"], "type": "object"}
    constraint = Constraint.json_schema(schema, any_whitespace=True, backend=backend, objects="standard")
    matcher = GrammarCompiler(BYTES, max_threads=1, isolation="none").compile(constraint).matcher()
    texts = ['{"b":{"x":[1]}}', ' {"b":{"x":[1]}}', '{ "a" : [ 1 , "c" ] ,\n"b":{"x": [ 1\t] } }', '{"a":[],"b":{"x":[1]}' + " " * 33 + "}"]
    assert [accepts(matcher, text) for text in texts] == [True, False, True, False]


def test_reason_of_a_worker_keeps_its_place() -> None:
    found = coverage(Constraint.json_schema({"items": {"uniqueItems": True, "pattern": "(?i)a"}}, objects="standard", backend="xgrammar"))
    assert not found.enforced and {part.where for part in found.unsupported["xgrammar"]} >= {"#/items"}


def test_long_texts_of_a_pattern_are_left_out_where_they_take_too_many_states(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "string", "pattern": "^(ab|c{2,4}d)*$", "maxLength": 321}
    monkeypatch.setattr(automata, "MAX_LENGTH_STATES", 300)
    matcher = matcher_of(schema, objects="standard")
    assert accepts(matcher, '"' + "ab" * 15 + 'ccd"') and not accepts(matcher, '"' + "ab" * 81 + '"') and not accepts(matcher, '"aba"')


def test_pattern_with_too_many_states_is_refused_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automata, "MAX_STATES", 100)
    schema = {"items": {"allOf": [{"pattern": "a.{7}b"}, {"pattern": "c.{7}d"}]}}
    with pytest.raises(UnsupportedError, match="#/items: pattern: takes more than 100 states"):
        schema_grammar(schema, Options())


@pytest.mark.parametrize("backend", ["automaton", "xgrammar", "llguidance"])
def test_properties_in_any_order(backend: Any) -> None:
    schema = {
        "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
        "required": ["b"],
        "type": "object",
        "maxProperties": 3,
    }
    schema["additionalProperties"] = {"const": 4}
    constraint = Constraint.json_schema(schema, backend=backend, property_order="any")
    matcher = GrammarCompiler(BYTES, max_threads=1).compile(constraint).matcher()
    values = {"a": 1, "b": 2, "c": 3, "x": 4, "y": 4}
    for size in range(5):
        for names in itertools.permutations(values, size):
            ordered = sorted(names, key=lambda name: name in "xy") == list(names)
            text = json.dumps({name: values[name] for name in names})
            assert accepts(matcher, text) == ("b" in names and size <= 3 and ordered), text
    assert not accepts(matcher, '{"b": 2, "b": 2}')


@pytest.mark.parametrize(
    "schema",
    [
        {"required": ["y", "x"], "properties": {"a": {}}},
        {"dependencies": {"y": ["x"]}, "properties": {"a": {}}, "required": ["y"]},
        {"anyOf": [{"required": ["y", "x"]}, {"required": ["y"], "maxProperties": 2}], "properties": {"a": {}}},
    ],
)
def test_required_names_follow_described_ones_in_their_order(schema: Any) -> None:
    assert accepts(matcher_of(schema), '{"a": 1, "y": 2, "x": 3}')
    assert not accepts(matcher_of(schema), '{"y": 2, "x": 3, "a": 1}')


def test_many_properties_in_any_order_are_refused() -> None:
    schema: dict[str, object] = {"items": {"properties": {f"p{index}": {} for index in range(9)}}}
    with pytest.raises(ValueError, match="#/items: properties: got 9, expected at most 8 with property_order='any'"):
        matcher_of(schema, property_order="any")


def test_approximate_grammar_leaves_out_what_is_not_enforced() -> None:
    named = {"type": "string", "pattern": "(?<=a)b", "minLength": 2}
    schema = {
        "type": "array",
        "items": {"properties": {"pattern": named}},
        "uniqueItems": True,
        "not": {"uniqueItems": True},
        "minItems": 1,
    }
    with pytest.raises(ValueError, match=r"uniqueItems|pattern"):
        matcher_of(schema)
    matcher = matcher_of(schema, approximate=True)
    texts = ['[{"pattern": "ab"}, {"pattern": "ab"}]', "[]", '[{"pattern": "a"}]']
    assert [accepts(matcher, text) for text in texts] == [True, False, False]
    found = coverage(Constraint.json_schema(schema, approximate=True))
    assert found.backend == "automaton" and not found.enforced
    left_out = {(part.where, part.keyword) for part in found.unenforced}
    assert left_out == {("#", "uniqueItems"), ("#/not", "not"), ("#/items/properties/pattern", "pattern")}
    assert coverage(Constraint.json_schema({"minItems": 1}, approximate=True)).enforced
    for wrong in ({"type": "text", "uniqueItems": True}, {"allOf": [{"type": "string"}, {"type": "null"}]}):
        with pytest.raises(ValueError, match=r"type: got|schema: no value"):
            matcher_of(wrong, approximate=True)


CHOICES = {
    "objects": ("closed", "standard"),
    "unknown_keywords": ("annotation", "refuse"),
    "unknown_formats": ("annotation", "refuse"),
    "property_order": ("declared", "any"),
}


@pytest.mark.parametrize("field", CHOICES)
def test_options_are_checked(field: str) -> None:
    default, other = CHOICES[field]
    with pytest.raises(ValueError, match=rf"Constraint\.{field}: got 'open', expected one of '{default}', '{other}'"):
        Constraint.json_schema({}, **{field: "open"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"Constraint\.{field}: got {other} for regex, expected {default}: for json_schema only"):
        Constraint("regex", "a", **{field: other})  # type: ignore[arg-type]


def test_approximate_is_checked() -> None:
    with pytest.raises(ValueError, match=r"Constraint\.approximate: got 1, expected True or False"):
        Constraint.json_schema({}, approximate=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Constraint\.approximate: got True for regex, expected False: for json_schema only"):
        Constraint("regex", "a", approximate=True)
