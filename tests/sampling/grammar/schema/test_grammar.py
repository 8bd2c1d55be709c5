"""Schemas read by the standard: instances and random texts, validated by jsonschema, and reasons of errors."""

from __future__ import annotations

import ast
import itertools
import json
import os
import random
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, coverage
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.constraints.unsupported import UnsupportedError
from stepgraph.sampling.grammar.schema import automata, normalise, reader
from stepgraph.sampling.grammar.schema.forms import Form, Object
from stepgraph.sampling.grammar.schema.grammar import GrammarWriter, schema_grammar
from stepgraph.sampling.grammar.schema.options import Options
from stepgraph.sampling.grammar.schema.parameters import parameters_grammar
from stepgraph.sampling.grammar.schema.reader import parse_json
from stepgraph.sampling.native import why_not
from tests.helpers.c_library import AUTOMATON, EACH_BACKEND
from tests.helpers.grammar_texts import random_text
from tests.helpers.kept_worker import keep_worker
from tests.helpers.schema_cases import BYTES, DATA, takes
from tools.bench_schemas import OrderSearch, Tokens

MAX_WALK = 600  # bytes
BACKEND: BackendChoice = "xgrammar" if why_not() else "automaton"
COMPILER = GrammarCompiler(BYTES, max_threads=1, isolation="none", backend=BACKEND)
# Written for these tests. A line has a schema and instances, or why it is refused, with options of `Options`, limits of the modules,
# and the style of a structural tag.
WRITTEN = [parse_json(line) for line in (DATA / "schemas.jsonl").read_text(encoding="utf-8").splitlines()]
ENFORCED = {entry["name"]: entry for entry in WRITTEN if "tests" in entry}
REFUSED = {entry["name"]: entry for entry in WRITTEN if "refused" in entry}
PRINT_GRAMMARS = """
import json, sys
from stepgraph.sampling.grammar.schema.grammar import schema_grammar
from stepgraph.sampling.grammar.schema.options import Options
from stepgraph.sampling.grammar.schema.reader import parse_json
print(json.dumps([schema_grammar(schema, Options()) for schema in parse_json(sys.stdin.read())]))
"""
SOURCES = Path(reader.__file__).parent


def validator_of(schema: Any) -> Any:
    found = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    exact = json.loads(json.dumps(schema, default=float), parse_float=Decimal)
    return found(exact, format_checker=found.FORMAT_CHECKER)


def compiled_of(schema: Any, **options: Any) -> CompiledConstraint:
    text = json.dumps(schema if isinstance(schema, dict) else {"allOf": [schema]}, default=float)
    return COMPILER.compile(Constraint.json_schema(text, **options))


@pytest.fixture(autouse=True)
def _one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_worker(monkeypatch)


def test_two_hundred_schemas_are_written_with_valid_and_invalid_instances() -> None:
    assert len(ENFORCED) + len(REFUSED) == len(WRITTEN) >= 200 and len(ENFORCED) >= 150
    one_sided = {name for name, entry in ENFORCED.items() if {test["valid"] for test in entry["tests"]} != {False, True}}
    assert one_sided == {"boolean schema"}  # `true` accepts everything


def test_each_keyword_and_draft_has_a_schema() -> None:
    words, drafts, waiting = set[str](), set[int](), [entry["schema"] for entry in ENFORCED.values()]
    for value in waiting:  # grows
        if isinstance(value, dict):
            words |= value.keys()
            drafts |= {reader.Document(value).draft} if "$schema" in value else set()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    assert words >= reader.KEYWORDS | reader.ANNOTATIONS
    assert drafts == set(reader.DRAFTS.values())


@pytest.mark.parametrize("name", ENFORCED)
def test_instances_are_accepted_as_by_jsonschema(name: str) -> None:
    schema, tests = ENFORCED[name]["schema"], ENFORCED[name]["tests"]
    compiled, validator = compiled_of(schema, objects="standard"), validator_of(schema)
    for test in tests:
        assert validator.is_valid(test["data"]) == test["valid"], test
        value = json.loads(json.dumps(test["data"], default=float))
        as_written = takes(compiled, json.dumps(value, ensure_ascii=False))
        assert (as_written or OrderSearch(compiled, Tokens(BYTES)).is_accepted(value)) == test["valid"], test


@pytest.mark.parametrize("objects", ["closed", "standard"])
@pytest.mark.parametrize(("walks", "positions"), [(2, 6_500), pytest.param(20, 60_000, marks=pytest.mark.soak)])
def test_random_texts_are_valid(objects: Any, walks: int, positions: int) -> None:
    draw, finished, walked = random.Random(11), 0, 0
    for name, entry in ENFORCED.items():
        text = schema_grammar(entry["schema"], Options(objects=objects))
        grammar, validator = COMPILER.compile(Constraint.ebnf(text)), validator_of(entry["schema"])
        for _ in range(walks):
            found = random_text(grammar.matcher(), draw, BYTES, MAX_WALK, share=0.4)
            walked += MAX_WALK if found is None else len(found) + 1
            if found is not None and not re.search(rb"[eE][+-]?\d{5}", found):  # Decimal has no larger exponents
                finished += 1
                error = next(validator.iter_errors(json.loads(found, parse_float=Decimal)), None)
                assert error is None, (name, found, error)
    assert walked > positions and finished > 0.8 * walks * len(ENFORCED)


def test_grammar_depends_on_its_schema_only() -> None:
    """Not on the schemas that the process read before, and not on the hashes of its texts."""
    schemas = [{"pattern": "^(?:a+|b+)c$"}, *(entry["schema"] for entry in ENFORCED.values()), {"pattern": "^(?:b+|a+)c$"}]

    def printed(given: list[Any], seed: str) -> list[str]:
        program = [sys.executable, "-c", PRINT_GRAMMARS]
        text, variables = json.dumps(given, default=float), os.environ | {"PYTHONHASHSEED": seed}
        found: list[str] = json.loads(subprocess.run(program, input=text, env=variables, capture_output=True, text=True, check=True).stdout)
        return found

    assert printed(schemas, "1") == printed(schemas[::-1], "2")[::-1]


def refusal(entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> UnsupportedError:
    for limit, value in entry.get("limits", {}).items():
        automata.automaton.cache_clear()
        automata._has_text.cache_clear()
        monkeypatch.setattr(f"stepgraph.sampling.grammar.schema.{limit}", value)
    options = Options(objects="standard", **entry.get("options", {}))
    try:
        reader.check_schema(entry["schema"], options)
        (parameters_grammar if entry.get("style") == "qwen_xml" else schema_grammar)(entry["schema"], options)
    except UnsupportedError as error:
        return error
    raise AssertionError(f"{entry['name']}: is enforced")


@pytest.mark.parametrize("name", REFUSED)
def test_schema_that_is_not_enforced_is_refused_with_its_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert REFUSED[name]["refused"] in str(refusal(REFUSED[name], monkeypatch))


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_place_keyword_value_reason_and_alternative(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, place = refusal(REFUSED[name], monkeypatch).unsupported, REFUSED[name]["schema"]
    whole = json.dumps(place, default=str)
    for step in part.where.removeprefix("#").split("/")[1:]:
        place = place[int(step)] if isinstance(place, list) else place[step]
    value = place.get(part.keyword, place) if isinstance(place, dict) else place
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=float)
    found = re.match(r"got (.+?)(?:, which (.+)|, expected (.+)|, to which (.+)|: (no value .+)| for (.+))$", part.reason)
    assert found and (shown := found[1]).removesuffix("...") in text and (len(shown) >= 60 or shown[-3:] != "..."), part
    reason, alternative = part.split
    assert len(alternative) > 5 and reason != alternative and part.reason.endswith(alternative.removeprefix("use ")), part
    assert part.keyword in ("schema", "nesting") or f'"{part.keyword}"' in whole, part
    assert str(part) == f"{part.where}: {part.keyword}: {part.reason}"


CONTRADICTIONS: list[tuple[str, str]] = [
    ('{"type": "integer", "minimum": 5, "exclusiveMaximum": 5}', "both #: minimum and #: exclusiveMaximum"),
    ('{"type": "integer", "minimum": 1, "maximum": 3, "multipleOf": 10}', "all of #: minimum, #: maximum and #: multipleOf"),
    ('{"type": "string", "minLength": 4, "maxLength": 3, "title": ""}', "both #: minLength and #: maxLength"),
    ('{"type": "array", "minItems": 3, "items": false}', "both #: minItems and #: items"),
    ('{"type": "array", "contains": {}, "minContains": 3, "maxContains": 2}', "all of #: contains, #: minContains and #: maxContains"),
    ('{"type": "object", "required": ["a", "b"], "maxProperties": 1}', "both #: required and #: maxProperties"),
    ('{"type": "object", "required": ["a"], "properties": {"a": false}}', "both #: required and #: properties"),
    ('{"type": "object", "required": ["a"], "additionalProperties": false}', "both #: required and #: additionalProperties"),
    ('{"type": "object", "required": ["xy"], "propertyNames": {"maxLength": 1}}', "both #: required and #: propertyNames"),
    ('{"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}', "both #: required and #: properties"),
    ('{"type": "string", "allOf": [{}, {"pattern": "^a$"}, {"pattern": "^b$"}]}', "both #/allOf/1 and #/allOf/2"),
    ('{"type": "string", "pattern": "^a", "format": "date"}', "both #: pattern and #: format"),
    ('{"type": "string", "not": {"type": "string"}}', "both #: type and #: not"),
    ('{"const": 3, "enum": [4]}', "both #: const and #: enum"),
    ('{"allOf": [{"items": {"items": {"type": "string"}}}, {"enum": [[[1]]]}]}', "both #/allOf/0/items/items and #/allOf/1/enum"),
    ('{"const": {"a": {"b": 1}}, "properties": {"a": {"properties": {"b": {"type": "string"}}}}}',
     "both #/const and #/properties/a/properties/b"),
    ('{"enum": []}', "#: enum"),
    ('{"properties": {"a/: b": {"type": "string", "enum": [1]}}, "required": ["a/: b"], "type": "object"}',
     "both #/properties/a~1: b: type and #/properties/a~1: b: enum"),
    ('{"type": "object", "required": ["a"], "allOf": [{"properties": {"a": {"minimum": 3, "type": "integer"}}}, {"properties": {"a": '
     '{"maximum": 2}}}]}', "both #/allOf/0/properties/a and #/allOf/1/properties/a"),
    ('{"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {"type": "integer"}}}', "both #: type and #: $ref"),
    ('{"type": "string", "anyOf": [{"allOf": [{"type": "integer"}, {"type": "null"}]}, {"type": "null"}]}', "both #: type and #: anyOf"),
    ('{"type": "string", "oneOf": [{"type": "integer"}, {"type": "null"}]}', "both #: type and #: oneOf"),
    ('{"type": "string", "if": {"maxLength": 3}, "then": {"type": "integer"}, "else": {"type": "null"}}', "both #: type and #: if"),
    ('{"type": "object", "required": ["a"], "dependentRequired": {"a": ["b"]}, "maxProperties": 1}',
     "all of #: required, #: dependentRequired and #: maxProperties"),
    ('{"type": "object", "required": ["a"], "dependentSchemas": {"a": {"maxProperties": 0}}}', "both #: required and #: dependentSchemas"),
    ('{"type": "object", "required": ["ab"], "patternProperties": {"^a": false}}', "both #: required and #: patternProperties"),
    ('{"type": "object", "minProperties": 1, "unevaluatedProperties": false}', "both #: minProperties and #: unevaluatedProperties"),
    ('{"type": "array", "minItems": 1, "unevaluatedItems": false}', "both #: minItems and #: unevaluatedItems"),
    ('{"type": "array", "uniqueItems": true, "items": {"enum": [1, 2]}, "minItems": 3}', "both #: uniqueItems and #: minItems"),
    ('{"type": "array", "contains": {"type": "string"}, "items": {"type": "integer"}}', "both #/items and #/contains"),
    ('{"type": "string", "minLength": 4, "pattern": "^a?$"}', "both #: minLength and #: pattern"),
    ('{"type": "string", "minLength": 40, "format": "date"}', "both #: minLength and #: format"),
    ('{"type": "string", "disallow": "string", "$schema": "http://json-schema.org/draft-03/schema#"}', "both #: type and #: disallow"),
    ('{"oneOf": [{"type": "string"}, {"type": "string"}]}', "both #/oneOf/0 and not #/oneOf/1"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "places"), CONTRADICTIONS)
def test_contradiction_names_both_places(schema: str, places: str) -> None:
    with pytest.raises(UnsupportedError, match=f": no value satisfies {re.escape(places)}; change one of"):
        schema_grammar(parse_json(schema), Options(objects="standard"))


def refusing_places() -> dict[tuple[str, int], str]:
    """File and line of each error that the reader and the writer of schemas raise, with its source."""
    found = dict[tuple[str, int], str]()
    for path in SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
            if name in ("reject", "_fail", "expect") or (isinstance(node, ast.Raise) and node.exc):
                assert isinstance(node, (ast.Call, ast.Raise))
                found |= {(path.name, line): ast.unparse(node) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return found


def test_each_reason_to_refuse_a_schema_has_a_schema() -> None:
    pending = refusing_places()
    assert len(set(pending.values())) > 50
    for entry in REFUSED.values():
        with pytest.MonkeyPatch.context() as patch:
            error: BaseException | None = refusal(entry, patch)
        while error is not None:  # an error may repeat the message of an earlier one
            for frame, line in traceback.walk_tb(error.__traceback__):
                reason = pending.get((Path(frame.f_code.co_filename).name, line))
                pending = {place: text for place, text in pending.items() if text != reason}
            error = error.__context__
    assert pending == {}


def test_unknown_words_are_annotations_or_refused() -> None:
    schema = {"properties": {"a": {"readonly": True, "title": "t", "x-order": 1, "format": "color"}}}
    compiled_of(schema)
    with pytest.raises(ValueError, match='#/properties/a: format: got "color", expected one of date, date-time'):
        compiled_of(schema, unknown_formats="refuse")
    newer = {"$schema": "http://json-schema.org/draft-04/schema", "properties": {"a": {"required": True}}}
    compiled_of(newer)
    with pytest.raises(ValueError, match="#/properties/a: required: got true for no known keyword; remove it"):
        compiled_of(newer, unknown_keywords="refuse")
    schema["properties"]["a"]["markdownDescription"] = "m"
    with pytest.raises(ValueError, match='#/properties/a: markdownDescription: got "m" for no known keyword; remove it'):
        compiled_of(schema, unknown_keywords="refuse")


@pytest.mark.parametrize(
    ("draft", "keyword", "value", "reason"),
    [
        ("draft-07", "minLength", 3, "beside $ref, which has no effect in this draft"),
        ("draft-07", "markdown", 3, "beside $ref, which has no effect in this draft"),
        ("draft-06", "minLength", 3, "beside $ref, which has no effect in this draft"),
        ("draft-04", "required", True, "beside $ref, which has no effect in this draft"),
        ("draft-03", "required", True, ""),  # the object reads it
        ("draft-07", "title", "t", ""),
        ("draft-07", "x-order", 3, ""),
        ("draft/2019-09", "minLength", 3, ""),
        ("draft/2020-12", "markdown", 3, "for no known keyword"),
    ],
)
def test_keywords_without_effect_beside_a_reference_are_refused_with_unknown_ones(
    draft: str, keyword: str, value: object, reason: str
) -> None:
    schema = {
        "$schema": f"http{'s' * ('/' in draft)}://json-schema.org/{draft}/schema",
        "definitions": {"word": {"type": "string"}},
        "properties": {"a": {"$ref": "#/definitions/word", keyword: value}},
    }
    assert takes(compiled_of(schema), '{"a": "bcd"}')
    if not reason:
        assert takes(compiled_of(schema, unknown_keywords="refuse"), '{"a": "bcd"}')
        return
    with pytest.raises(ValueError, match=re.escape(f"#/properties/a: {keyword}: got {json.dumps(value)} {reason}; remove it")):
        compiled_of(schema, unknown_keywords="refuse")


def test_closed_objects_have_declared_properties_only_and_patterns_match_whole_texts() -> None:
    schema = {"anyOf": [{"properties": {"a": {"pattern": "b+"}}, "required": ["c"]}, {"type": "object"}], "properties": {"d": {"const": 1}}}
    closed = schema_grammar(schema, Options())
    compiled = COMPILER.compile(Constraint.ebnf(closed))
    texts = ['{"a": "bb", "c": 0, "d": 1}', '{"d": 1}', '{"a": "xb", "c": 0}', '{"d": 1, "x": 1}', "{}"]
    assert [takes(compiled, text) for text in texts] == [True, True, False, False, True]


def test_closed_conjunctions_and_unique_values_are_those_of_the_written_parts() -> None:
    short, word = {"not": {"type": "string", "maxLength": 3}}, {"not": {"type": "string", "pattern": "x"}}
    compiled = compiled_of({"type": "object", "allOf": [{"properties": {"a": short}}, {"properties": {"a": word}}]})
    assert takes(compiled, '{"a": 1}') and takes(compiled, '{"a": "long"}') and not takes(compiled, '{"a": "ab"}')
    compiled = compiled_of({"type": "array", "uniqueItems": True, "items": {"enum": ["ab", "b"], "pattern": "b"}})
    assert takes(compiled, '["b"]') and not takes(compiled, '["ab"]')
    parts = [{"not": {"type": "string", "pattern": "^a"}}, {"not": {"type": "string", "pattern": "^[^a]|^$"}}]
    with pytest.raises(ValueError, match="uniqueItems: got true, which is enforced for a list of values"):
        compiled_of({"type": "array", "items": False, "uniqueItems": True, "prefixItems": parts})


def test_closed_schema_of_one_type_is_written_for_that_type() -> None:
    """Unless that type has no finite value: an object that requires itself ends with a value of another type."""
    listed = {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    for schema, objects, taken in (
        ({"properties": {"a": {}}}, "closed", [True, False, False]),
        ({"properties": {"a": {}}}, "standard", [True, True, True]),
        ({"minItems": 1}, "closed", [False, True, False]),
        ({"minItems": 1, "properties": {"a": {}}}, "closed", [True, True, True]),
        ({"type": ["object", "null"], "properties": {"a": {}}}, "closed", [True, False, False]),
        ({"description": "anything"}, "closed", [True, True, True]),
        ({"not": {"type": "null"}}, "closed", [True, True, True]),
        ({"not": {"type": "integer"}}, "closed", [True, True, False]),
        ({"not": {"type": "object", "properties": {"a": {"type": "string"}}}}, "closed", [False, True, True]),
    ):
        compiled = compiled_of(schema, objects=objects)
        assert [takes(compiled, text) for text in ("{}", "[1]", "3")] == taken, schema
    assert takes(compiled_of(listed), '{"next": 3}')


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_blanks_between_tokens(backend: Any) -> None:
    schema = {"properties": {"a": {"type": "array"}, "b": {"const": {"x": [1]}}}, "required": ["b"], "type": "object"}
    constraint = Constraint.json_schema(schema, any_whitespace=True, backend=backend, objects="standard")
    compiled = GrammarCompiler(BYTES, max_threads=1, isolation="none").compile(constraint)
    texts = ['{"b":{"x":[1]}}', ' {"b":{"x":[1]}}', '{ "a" : [ 1 , "c" ] ,\n"b":{"x": [ 1\t] } }', '{"a":[],"b":{"x":[1]}' + " " * 33 + "}"]
    assert [takes(compiled, text) for text in texts] == [True, False, True, False]


def test_reason_of_a_worker_keeps_its_place() -> None:
    found = coverage(Constraint.json_schema({"items": {"uniqueItems": True, "pattern": "(?i)a"}}, objects="standard", backend="xgrammar"))
    assert not found.enforced and {part.where for part in found.unsupported["xgrammar"]} >= {"#/items"}


def test_long_texts_of_a_pattern_are_left_out_where_they_take_too_many_states(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "string", "pattern": "^(ab|c{2,4}d)*$", "maxLength": 321}
    monkeypatch.setattr(automata, "MAX_LENGTH_STATES", 300)
    compiled = compiled_of(schema, objects="standard")
    assert takes(compiled, '"' + "ab" * 15 + 'ccd"') and not takes(compiled, '"' + "ab" * 81 + '"') and not takes(compiled, '"aba"')


def test_many_texts_without_equal_parts_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their automaton would take too many states."""
    monkeypatch.setattr(automata, "MAX_STATES", 500)
    texts = ["".join(random.Random(number).choices('abcde\u00e9" ', k=12)) for number in range(250)]
    for schema in ({"enum": texts}, {"anyOf": [{"type": "string", "enum": texts}, {"type": "null"}]}):
        compiled = COMPILER.compile(Constraint.json_schema(schema))
        assert all(takes(compiled, json.dumps(text, ensure_ascii=False)) for text in texts)
        assert not any(
            takes(compiled, json.dumps(text, ensure_ascii=False)) for text in ("", texts[0][:-1], texts[0] + "a", "aaaaaaaaaaaa")
        )


def test_one_of_many_constants_excludes_those_that_are_listed_twice() -> None:
    """Titles of an enumeration are written as `oneOf` with `const` and `title`, e.g. of 249 countries."""
    constants: list[Any] = [{"const": f"text {number}", "title": f"Text {number}"} for number in range(249)]
    compiled = COMPILER.compile(
        Constraint.json_schema({"oneOf": [*constants, {"enum": ["text 0", "x"]}, {"const": 1}, {"const": 1.0}, {}]})
    )
    assert not any(takes(compiled, text) for text in ('"text 0"', '"x"', '"text 1"', "1"))
    compiled = COMPILER.compile(Constraint.json_schema({"oneOf": [*constants, {"enum": ["text 0", "x"]}, {"const": 1}, {"const": 1.0}]}))
    assert all(takes(compiled, text) for text in ('"x"', '"text 1"', '"text 248"'))
    assert not any(takes(compiled, text) for text in ('"text 0"', '"text 249"', "1"))


def test_objects_with_a_type_do_not_count_as_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events with a type, each in a definition. Without `type: object`, or with `nullable`, branches have other values in common."""
    monkeypatch.setattr(normalise, "MAX_FORMS", 150)
    kinds = [
        {"type": "object", "properties": {"t": {"const": f"k{number}"}, "x": {"type": "integer"}}, "required": ["t"]}
        for number in range(20)
    ]
    schema = {"$defs": {f"d{number}": kind for number, kind in enumerate(kinds)}, "oneOf": [{"$ref": f"#/$defs/d{n}"} for n in range(20)]}
    compiled = COMPILER.compile(Constraint.json_schema(schema))
    assert takes(compiled, '{"t": "k0"}') and takes(compiled, '{"t": "k19", "x": 5}') and not takes(compiled, '{"t": "k20"}')
    twice = COMPILER.compile(Constraint.json_schema({"oneOf": [*kinds[:3], kinds[0] | {"properties": {"t": {"enum": ["k0", "k9"]}}}]}))
    assert [takes(twice, f'{{"t": "{kind}"}}') for kind in ("k0", "k1", "k9", "k3")] == [False, True, True, False]
    for more, text in (({"nullable": True}, "null"), ({"type": ["object", "null"]}, "null"), ({"type": ["object", "integer"]}, "5")):
        compiled = COMPILER.compile(Constraint.json_schema({"oneOf": [kind | more for kind in kinds[:2]]}))
        assert takes(compiled, '{"t": "k1"}') and not takes(compiled, text)


def test_pattern_with_too_many_states_is_refused_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automata, "MAX_STATES", 100)
    schema = {"items": {"allOf": [{"pattern": "a.{7}b"}, {"pattern": "c.{7}d"}]}}
    with pytest.raises(UnsupportedError, match=r'#/items: pattern: got {"allOf": .*, which takes more than 100 states; write'):
        schema_grammar(schema, Options())


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_properties_in_any_order(backend: Any) -> None:
    schema = {
        "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
        "required": ["b"],
        "type": "object",
        "maxProperties": 3,
    }
    schema["additionalProperties"] = {"const": 4}
    constraint = Constraint.json_schema(schema, backend=backend, property_order="any")
    compiled = GrammarCompiler(BYTES, max_threads=1).compile(constraint)
    values = {"a": 1, "b": 2, "c": 3, "x": 4, "y": 4}
    for size in range(5):
        for names in itertools.permutations(values, size):
            ordered = sorted(names, key=lambda name: name in "xy") == list(names)
            text = json.dumps({name: values[name] for name in names})
            assert takes(compiled, text) == ("b" in names and size <= 3 and ordered), text
    assert not takes(compiled, '{"b": 2, "b": 2}')


@pytest.mark.parametrize(
    "schema",
    [
        {"required": ["y", "x"], "properties": {"a": {}}},
        {"dependencies": {"y": ["x"]}, "properties": {"a": {}}, "required": ["y"]},
        {"anyOf": [{"required": ["y", "x"]}, {"required": ["y"], "maxProperties": 2}], "properties": {"a": {}}},
    ],
)
def test_undeclared_required_names_follow_declared_ones_in_order(schema: Any) -> None:
    assert takes(compiled_of(schema), '{"a": 1, "y": 2, "x": 3}')
    assert not takes(compiled_of(schema), '{"y": 2, "x": 3, "a": 1}')


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"if": {"prefixItems": [{"const": "a"}]}, "unevaluatedItems": False}, "unevaluatedItems"),
        ({"contains": {"type": "string"}, "unevaluatedItems": False}, "unevaluatedItems"),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, ""),
        ({"prefixItems": [{}], "unevaluatedItems": False}, ""),
        ({"type": "object", "minProperties": 3, "properties": {"a": {}, "b": {}}}, "minProperties"),
        ({"type": "object", "minProperties": 2, "properties": {"a": {}}, "required": ["a"]}, ""),
        ({"type": "string", "format": "hostname"}, "format"),
    ],
)
def test_narrowed_parts_are_listed(schema: Any, keyword: str) -> None:
    found = coverage(Constraint.json_schema({"items": schema}, objects="standard"))
    assert found.enforced and [(part.where, part.keyword) for part in found.narrowed] == [("#/items", keyword)] * bool(keyword)


def test_many_properties_in_any_order_are_refused() -> None:
    schema: dict[str, object] = {"items": {"properties": {f"p{index}": {} for index in range(9)}}}
    with pytest.raises(ValueError, match=r"#/items: properties: got .* has 9 names, expected at most 8 with property_order='any'"):
        compiled_of(schema, property_order="any")


def test_approximate_grammar_leaves_out_what_is_not_enforced() -> None:
    named = {"type": "string", "pattern": "(?<=a)b", "minLength": 2}
    schema = {
        "type": "array",
        "items": {"properties": {"pattern": named, "x": {"maximum": 0.5, "allOf": [{"$ref": "#/$defs/list"}]}}},
        "$defs": {"list": {"type": "array", "uniqueItems": True}},
        "uniqueItems": True,
        "not": {"uniqueItems": True},
        "minItems": 1,
    }
    with pytest.raises(ValueError, match=r"uniqueItems|pattern"):
        compiled_of(schema)
    compiled = compiled_of(schema, approximate=True)
    texts = ['[{"pattern": "ab"}, {"pattern": "ab"}]', "[]", '[{"pattern": "a"}]']
    assert [takes(compiled, text) for text in texts] == [True, False, False]
    found = coverage(Constraint.json_schema(schema, approximate=True))
    assert found.backend == BACKEND and not found.enforced
    left_out = {(part.where, part.keyword) for part in found.unenforced}
    unique = {("#", "uniqueItems"), ("#/items/properties/x", "uniqueItems")}
    assert left_out == {*unique, ("#/not", "not"), ("#/items/properties/pattern", "pattern")}
    assert found.narrowed == () and coverage(Constraint.json_schema({"minItems": 1}, approximate=True)).enforced
    found = coverage(Constraint.json_schema({"format": "regex", "pattern": "(?<=a)b"}, approximate=True))
    assert {part.keyword for part in found.unenforced} == {"pattern"} and [part.keyword for part in found.narrowed] == ["format"]
    for wrong in ({"type": "text", "uniqueItems": True}, {"allOf": [{"type": "string"}, {"type": "null"}]}):
        with pytest.raises(ValueError, match=r"type: got|schema: got .*: no value"):
            compiled_of(wrong, approximate=True)


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


def test_alternatives_included_in_a_later_one_are_left_out() -> None:
    """Each case of oneOf excludes the other: alternatives with another value of `kind` include those in which a property is absent."""
    cases = [{"properties": {"kind": {"enum": [kind]}, kind: {}}, "required": ["kind", kind]} for kind in ("x", "y")]
    rules = schema_grammar({"type": "object", "oneOf": cases}, Options(objects="standard")).splitlines()
    assert sum(rule.count('\\"kind\\"') for rule in rules) == 2


@pytest.mark.parametrize("backend", [AUTOMATON])
def test_alternatives_of_a_pattern_do_not_multiply_states(backend: BackendChoice) -> None:
    """Recording which of 20 words were found would take over a million states."""
    words = [f"{chr(97 + index)}{index:02}" for index in range(20)]
    text = schema_grammar({"type": "string", "pattern": "|".join(words)}, Options(objects="standard"))
    assert len(text) < 5_000
    grammar = GrammarCompiler(BYTES, max_threads=1, isolation="none", backend=backend).compile(Constraint.ebnf(text))
    assert takes(grammar, '"-e04-"') and takes(grammar, '"t19a00"') and not takes(grammar, '"a01"')


def test_an_object_is_examined_after_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object with n properties takes n steps to examine, so it must not be examined after each of them."""
    examined, examine = list[Form](), GrammarWriter._form_has_value

    def record(self: GrammarWriter, part: Any, form: Form) -> Any:
        examined.append(form)
        return examine(self, part, form)

    monkeypatch.setattr(GrammarWriter, "_form_has_value", record)
    names = [f"p{index}" for index in range(100)]
    schema_grammar({"properties": {name: {"items": {"type": "string"}} for name in names}, "required": names}, Options())
    assert 200 < len(examined) < 210


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, write: Callable[[int], object], sizes: Sequence[int]) -> list[int]:
    """The number of calls of a function in each run."""
    calls, function = [0], getattr(owner, name)

    def count(*arguments: Any) -> Any:
        calls[-1] += 1
        return function(*arguments)

    monkeypatch.setattr(owner, name, count)
    for size in sizes:
        write(size)
        calls.append(0)
    return calls[:-1]


def test_schemas_are_found_from_the_schema_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the root, a schema below n others takes n steps to find."""

    def write(depth: int) -> str:
        schema: dict[str, Any] = {}
        for _ in range(depth):
            schema = {"properties": {"a": schema}}
        return schema_grammar(schema, Options())

    (steps,) = counted(monkeypatch, reader, "_child_at", write, [50])
    assert steps < 50, "2,500 from the root"


def test_alternatives_are_compared_a_constant_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(count: int) -> str:
        return schema_grammar({"anyOf": [{"type": "object", "required": [f"p{index}"]} for index in range(count)]}, Options())

    few, many = counted(monkeypatch, Object, "__hash__", write, [20, 80])
    assert few < many < 6 * few, "4 if linear, 16 if quadratic"
