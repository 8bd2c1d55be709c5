"""The formats against independent validators, and the grammars of both libraries against the formats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, coverage
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.schema import patterns
from stepgraph.sampling.grammar.schema.automata import is_empty
from stepgraph.sampling.grammar.schema.formats import AT_MOST, FEW_REGEXES, FORMATS, NARROWED, OLDER, few_hostnames
from stepgraph.sampling.grammar.schema.language import both, complement
from tests.helpers.c_library import AUTOMATON, EACH_BACKEND
from tests.helpers.format_texts import AUTOMATON_REGEXES, FORMAT_TEXTS, VALID, accepts, compare_format, python_regex, texts
from tests.helpers.schema_cases import BYTES, DATA, takes

SLOW = ("iri", "iri-reference")  # their validator takes 10 ms for a text


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # of the validator for regular expressions
@pytest.mark.parametrize("name", [*FORMATS, *(f"older {name}" for name in OLDER)])
def test_format_agrees_with_a_validator(name: str) -> None:
    found = compare_format(name, 200 if name in SLOW else 1000, 1)
    assert found["accepted"] >= 20 and found["rejected"] >= 5


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_format_agrees_with_a_validator_long(name: str) -> None:
    found = compare_format(name, FORMAT_TEXTS, 2)
    assert found["accepted"] > 4000 and found["rejected"] > 500


def test_suite_of_the_standard() -> None:
    """Its optional tests of formats. A valid text is rejected only where the format is narrowed."""
    rejected = dict[str, int]()
    for line in (DATA / "json_schema_test_suite_formats.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        name, cases = entry["format"], entry["tests"]
        assert [case["data"] for case in cases if not case["valid"] and accepts(name, case["data"])] == []
        rejected[name] = sum(case["valid"] and not accepts(name, case["data"]) for case in cases)
    assert {name: count for name, count in rejected.items() if count} == {
        "hostname": 15, "idn-email": 1, "regex": 6,
    }  # fmt: skip
    assert rejected.keys() == FORMATS.keys() and {name for name in rejected if rejected[name]} <= NARROWED.keys()


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize("name", NARROWED)
def test_upper_bound_of_a_narrowed_format_contains_its_texts(name: str) -> None:
    less = {"hostname": few_hostnames(253), "regex": FEW_REGEXES}.get(name, FORMATS[name])
    assert is_empty(both(patterns.full(less), complement(patterns.full(AT_MOST[name]))))
    most = python_regex(AT_MOST[name].replace("[^]", r"[\s\S]"))
    valid = [text for text in texts(name, 200, 4) if VALID[name](text)]
    assert len(valid) > 20 and all(map(most.fullmatch, valid))


COMPILER = {backend: GrammarCompiler(BYTES, max_threads=1, backend=backend) for backend in ("xgrammar", "llguidance", "automaton")}


def generates(backend: BackendChoice, schema: dict[str, Any], values: list[Any]) -> list[bool]:
    """Whether a grammar accepts each value as JSON."""
    compiled = COMPILER[backend].compile(Constraint.json_schema(schema))
    return [takes(compiled, json.dumps(value, ensure_ascii=False)) for value in values]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_grammars_accept_the_texts_of_a_format(backend: BackendChoice, name: str) -> None:
    values = [value for value in texts(name, 40, 3) if value.isprintable()]
    found = generates(backend, {"type": "string", "format": name}, values)
    expected = [accepts(f"few {name}" if name in AUTOMATON_REGEXES and backend != "automaton" else name, value) for value in values]
    if (name == "hostname" and backend != "automaton") or (name == "regex" and backend == "llguidance"):
        assert sum(found) > 5 and all(map(bool.__le__, found, expected))  # a part of them, see `NARROWED`
    else:
        assert found == expected


@pytest.mark.parametrize("backend", [AUTOMATON])
def test_leap_seconds_with_any_offset(backend: BackendChoice) -> None:
    """Each minute of a day, alone and in items that share a part of the automaton; not all beside a string with the same start."""
    minutes = [f"{minute // 60:02}:{minute % 60:02}" for minute in range(1440)]
    zones = ["Z", *(f"{sign}{minutes[after]}" for sign, after in zip("+-+-", (540, 899, 541, 1439), strict=True))]
    values = [f"{minute}:{second}{zone}" for minute in minutes for second in ("60", "60.5", "59") for zone in zones]
    time = {"type": "string", "format": "time"}
    expected = [VALID["time"](value) for value in values]
    assert expected.count(True) == 1440 * 5 + 2 * 5 and generates(backend, time, values) == expected
    leap = ["1998-12-31T15:59:60.1-08:00", "1998-12-31t08:59:60+09:00", "1998-12-31T08:59:60-09:00", "2024-02-29T08:59:59+09:00"]
    schema = {"type": "array", "maxItems": 500, "items": {"type": "string", "anyOf": [{"format": "date-time"}, {"format": "date"}]}}
    texts_of = [[leap[0]] * 2 + leap[1:2] + ["2024-02-29"], leap, leap[3:], [leap[0][:-1]]]
    assert generates(backend, schema, texts_of) == [True, False, True, False]
    without = {"type": "string", "format": "date-time", "not": {"pattern": ":60"}}
    assert generates(backend, without, ["1998-12-31T23:59:60Z", leap[0], leap[3]]) == [False, False, True]
    other = {"type": "string", "anyOf": [{"format": "time"}, {"pattern": "^1[0-9]*$"}]}
    assert generates(backend, other, ["15:59:60-08:00", "23:59:60Z", "11:59:59-08:00", "12"]) == [False, True, True, True]


LONG_NAMES = [f"{'a' * 63}.{'b-' * 31}b.{'c' * 63}.{'d' * last}" for last in (60, 61, 62)]


@pytest.mark.parametrize("backend", [AUTOMATON])
def test_host_names_of_any_lengths(backend: BackendChoice) -> None:
    """Up to 63 characters per label and 253 per name; alone, with a maxLength of at least 253, beside ipv6, and in an older draft."""
    values = [*LONG_NAMES, "a." * 126 + "b", "a." * 127, "a" * 64, "a.b" * 50, "x" * 63, "xn-a.xn", "a-.b", "a.xn--b", "XN--a", "::1"]
    expected = [True, True, False, True, False, False, True, True, True, False, False, False, False]
    schema: dict[str, Any] = {"type": "string", "format": "hostname"}
    assert generates(backend, schema, values) == expected
    assert generates(backend, schema | {"maxLength": 255}, values) == expected
    both_formats = {"type": "string", "anyOf": [{"format": "hostname"}, {"format": "ipv6"}]}
    assert generates(backend, both_formats, values) == [*expected[:-1], True]
    older = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema
    assert generates(backend, older, values) == [*expected[:-3], True, True, False]


@pytest.mark.parametrize("backend", [AUTOMATON, pytest.param("xgrammar", marks=pytest.mark.slow)])
def test_regular_expressions_nest_to_any_depth(backend: BackendChoice) -> None:
    values = [
        r"(((((a|b)+c){2}?)|(?:d(?=e(?!f(g)))))*)$",
        "((((((((a))))))))",
        "((a)",
        "a)",
        r"(?=a)*",
        "(?:[z-a])",
        r"[\u0400-\u04ff!-~]{12,15}",
    ]
    assert generates(backend, {"type": "string", "format": "regex"}, values) == [True, True, False, False, False, False, True]
    names = {"type": "object", "propertyNames": {"format": "regex"}, "additionalProperties": {"type": "null"}}
    assert coverage(Constraint.json_schema(names)).enforced
    node = {"type": "object", "properties": {"in": {"$ref": "#"}, "text": {"type": "string", "format": "regex"}}}
    assert generates(backend, node, [{"in": {"in": {"text": "((((a))))"}}}, {"text": "((a)"}]) == [True, False], "two recursions"


@pytest.mark.parametrize("longest", [6, 63, 100, 255])
@pytest.mark.parametrize("backend", [AUTOMATON])
def test_host_names_beside_a_length(backend: BackendChoice, longest: int) -> None:
    values = [value for value in texts("hostname", 60, 6) if value.isprintable()] + LONG_NAMES + ["a." * 49 + "bc", "a." * 49 + "bcd"]
    expected = [accepts("hostname", value) and len(value) <= longest for value in values]
    assert any(expected) and not all(expected)
    assert generates(backend, {"type": "string", "format": "hostname", "maxLength": longest}, values) == expected


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
def test_regular_expressions_beside_a_length() -> None:
    found = [text for text in texts("few regexes", 1000, 6)]
    accepted = [text for text in found if accepts("few regexes", text)]
    assert len(found) > len(accepted) > 300 and all(map(VALID["regex"], accepted))
    values = [text for text in found if text.isprintable()][:40]
    expected = [accepts("few regexes", text) and len(text) <= 6 for text in values]
    assert any(expected) and not all(expected)
    assert generates("llguidance", {"type": "string", "format": "regex", "maxLength": 6}, values) == expected


def test_a_format_beside_a_pattern_is_enforced() -> None:
    schema = {"type": "string", "format": "date", "pattern": ".{9}9"}
    assert generates("llguidance", schema, ["2024-02-29", "2023-02-29", "2024-02-28"]) == [True, False, False]


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_dates_are_those_of_the_calendar(backend: BackendChoice) -> None:
    dates = ["2024-02-29", "2023-02-29", "2000-02-29", "1900-02-29", "2024-02-30", "2024-04-31", "2024-12-31", "0000-01-01"]
    expected = [True, False, True, False, False, False, True, False]
    assert generates(backend, {"type": "string", "format": "date"}, dates) == expected
    times = [date + "T23:59:60Z" for date in dates]
    assert generates(backend, {"type": "string", "format": "date-time"}, times) == expected
    assert generates(backend, {"type": "string", "format": "time"}, ["22:59:60Z", "23:59:59+24:00", "24:00:00Z"]) == [False] * 3
