"""JSON grammars: strings, patterns, numbers and properties are accepted exactly, also where the bare library is wrong."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from itertools import chain, product
from random import Random
from typing import Any

import pytest

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, Matcher, Vocabulary
from tests.helpers.grammar_texts import random_text

LONGER = [b'": ', b", ", b'"}', b"abc", b"null", b"true", b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"\\u", b"d83d"]
BYTES = Vocabulary([*(bytes([code]) for code in range(256)), *LONGER, b"<eos>"], stop_token_ids=[256 + len(LONGER)])
STOP = BYTES.stop_token_ids[0]
COMPILERS: dict[str, GrammarCompiler] = {
    "xgrammar": GrammarCompiler(BYTES, max_threads=1, backend="xgrammar"),
    "llguidance": GrammarCompiler(BYTES, max_threads=1, backend="llguidance"),
}
COMPILER = COMPILERS["xgrammar"]
both = pytest.mark.parametrize("backend", COMPILERS)


def compiled(constraint: Any, backend: str = "xgrammar") -> CompiledConstraint:
    return COMPILERS[backend].compile(constraint if isinstance(constraint, Constraint) else Constraint.json_schema(constraint))


def begun(grammar: CompiledConstraint, text: str | bytes) -> Matcher | None:
    matcher = grammar.matcher()
    data = text.encode() if isinstance(text, str) else text
    return matcher if all(matcher.accept_token(byte) for byte in data) else None


def takes(constraint: Any, text: str | bytes, backend: str = "xgrammar") -> bool:
    matcher = begun(compiled(constraint, backend), text)
    return matcher is not None and matcher.accept_token(STOP)


def taken(grammar: CompiledConstraint, letters: str, longest: int, quote: str = "") -> set[str]:
    """All accepted texts of these letters. Extensions of a rejected prefix are not tried."""
    found, alive = set[str](), [""]
    while alive:
        text = alive.pop()
        whole = begun(grammar, quote + text + quote)
        if whole is not None and whole.accept_token(STOP):
            found.add(text)
        alive += [text + letter for letter in letters if len(text) < longest and begun(grammar, quote + text + letter) is not None]
    return found


BOUNDS = [(0, 12), (2, None), (2, 5), (0, 150), (101, 130), (0, 0), (3, 3)]


@both
@pytest.mark.parametrize("types", ["string", ["string", "null"]], ids=str)
@pytest.mark.parametrize(("least", "most"), BOUNDS)
def test_bounded_string_is_json_and_counts_characters(backend: str, types: Any, least: int, most: int | None) -> None:
    schema = {"type": types, **({"minLength": least} if least else {}), **({} if most is None else {"maxLength": most})}
    within = max(2, least)
    if most is None or most >= within:
        for code in range(0x20):
            assert not takes(schema, '"' + "a" * (within - 1) + chr(code) + '"', backend), code
    for char in ("a", *("\x7f" if backend == "xgrammar" else ""), "é", "漢", "😀"):
        for length in {0, max(0, least - 1), least, (most or least) - 1, most or least, (most or least) + 1} - {-1}:
            assert takes(schema, f'"{char * length}"', backend) == (least <= length and (most is None or length <= most))
    assert not any(takes(schema, text, backend) for text in (b'"aa"aa"', b'"aa\\"', b'"aa\xed\xa0\x80"'))
    random, wrapped = Random(7), {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a"]}
    for _ in range(25):
        if (text := random_text(compiled(wrapped, backend).matcher(), random, BYTES, 400)) is not None:
            for value in json.loads(text).values():
                assert value is None or least <= len(value) <= (10**6 if most is None else most)


def test_strings_contain_no_lone_surrogates() -> None:
    assert takes({"type": "string"}, '"\\ud83d\\ude00 \\u00e9\\n"')
    for text in ('"\\ud83d"', '"\\ude00"', '"\\ud83da"', '"\\ud83d\\u0041"', b'"\xed\xa0\x80"', b'"\xe0\x80\x80"'):
        assert not takes({"type": "string"}, text)
    email = {"type": "string", "format": "email"}
    assert takes(email, '"a.b@example.com"') and not takes(email, r'"\"\q\"@example.com"')


@both
@pytest.mark.parametrize("text", ["éa", "\u2028\x85b", 'a[^"b]', '"\\\n', "漢f", "😀1", '"(" | Regex("pattern0", json_string=true)'])
def test_property_names_and_constants_are_exact(backend: str, text: str) -> None:
    written = json.dumps(text, ensure_ascii=False)
    assert takes({"const": text}, written, backend)
    assert takes({"type": "object", "properties": {text: {"type": "null"}}, "required": [text]}, f"{{{written}: null}}", backend)


PATTERNS = [r"(ab+)?", r"(ab*){2}", r"[\^]?a", r"[\^a]{1,2}", r"[\x5e]", r"[\u005ea]", r"[a\^]*", r"[^\^a]", r"\x61b", r"\x61b?[\x61b]"]
PATTERNS += [
    r"^a$|^b$",
    r"(?:a|)b?",
    r"a{0,2}b{1}",
    r"(a|b)+?",
    r"[!-\^]",
    r"[\w-]",
    r"\W\S",
    r"[b-][-b]",
    r"[]]a".replace("[]", "[\\]"),
    r"[^b]{2}",
]


@both
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_has_the_common_meaning(backend: str, pattern: str) -> None:
    letters, schema = "ab^-]x \u061b", {"type": "string", "pattern": pattern}
    texts = map("".join, chain.from_iterable(product(letters, repeat=length) for length in range(4)))
    expected = {text for text in texts if re.fullmatch(pattern, text, re.ASCII)}
    assert taken(compiled(Constraint.regex(pattern), backend), letters, 3) == expected
    assert taken(compiled(schema, backend), letters, 3, '"') == expected


@both
def test_pattern_follows_javascript_where_engines_differ(backend: str) -> None:
    assert takes(Constraint.regex("[^]a"), "\na", backend) and not takes(Constraint.regex("[^]a"), "b", backend)
    assert takes(Constraint.regex("."), "é", backend) and not any(takes(Constraint.regex("."), text, backend) for text in "\n\r\u2028")
    assert takes(Constraint.regex(r"\s[^\S]"), "\u00a0\u3000", backend) and not takes(Constraint.regex(r"\S"), "\u00a0", backend)


@both
@pytest.mark.parametrize("pattern", ["(?!ab)a", "a{2}{3}", r"[\1]", r"\01", "[]", "a\\"])
def test_unsupported_patterns_raise(backend: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=r"pattern: got .*, expected "):
        compiled(Constraint.regex(pattern), backend)


@both
@pytest.mark.parametrize(
    ("pattern", "char"), [(r"[\b]", "\b"), (r"\cA", "\x01"), (r"[\t]", "\t"), (r"\x0a", "\n"), ('"', '"'), (r"\\", "\\")]
)
def test_characters_of_a_pattern_are_written_as_escapes(backend: str, pattern: str, char: str) -> None:
    assert takes({"type": "string", "pattern": pattern}, json.dumps(char), backend)
    assert not takes({"type": "string", "pattern": pattern}, f'"{char}"', backend) and not takes({"pattern": pattern}, '"a"', backend)


@both
@pytest.mark.parametrize("value", [0.1234567, 1.5000001, -0.000001, 1e-6, 1e15, 1e20, 38719974749.1506, -9007199254740993])
def test_number_bounds_of_many_digits_are_exact(backend: str, value: float) -> None:
    bound = Decimal(repr(value))
    step = Decimal(1).scaleb(-7)
    for keyword, taken in (("minimum", (False, True, True)), ("exclusiveMaximum", (True, False, False))):
        grammar = compiled({"type": "array", "items": {"type": ["number", "null"], keyword: value}}, backend)
        for other, expected in zip((bound - step, bound, bound + step), taken, strict=True):
            matcher = begun(grammar, f"[null, {format(other, 'f')}]")
            assert (matcher is not None and matcher.accept_token(STOP)) == expected, other


@pytest.mark.parametrize("backend", ["xgrammar", pytest.param("llguidance", marks=pytest.mark.slow)])
def test_number_ranges_are_exact(backend: str) -> None:
    random, tried = Random(3), 0
    while tried < 75:
        size, positions = 10 ** random.uniform(-4, 9), random.randint(0, 5)
        low = round(random.uniform(-size, size), positions)
        high = round(low + random.choice([random.randint(1, 9) / 10**positions, random.uniform(0, size)]), positions)
        low_word, high_word = random.choice(["minimum", "exclusiveMinimum"]), random.choice(["maximum", "exclusiveMaximum"])
        schema = {"type": "number", **random.choice([{low_word: low}, {high_word: high}, {low_word: low, high_word: high}])}
        try:
            compiled(schema, backend)
        except ValueError:
            continue  # an empty range, or unsupported bounds
        tried += 1
        near = {
            bound + step * Decimal(1).scaleb(-n) for bound in map(Decimal, map(repr, (low, high))) for n in range(8) for step in (-1, 0, 1)
        }
        texts = {format(value, "f") for value in near} | {"0", "-0", "0.0"}
        assert [text for text in texts if takes(schema, text, backend) and not _within(schema, Decimal(text))] == [], schema
        assert not takes(schema, "", backend) and not takes({"type": "object", "properties": {"a": schema}}, '{"a": }', backend)


def _within(schema: dict[str, Any], value: Decimal) -> bool:
    bounds = {keyword: Decimal(repr(bound)) for keyword, bound in schema.items() if keyword != "type"}
    return bounds.get("minimum", value) <= value <= bounds.get("maximum", value) and bounds.get(
        "exclusiveMinimum", value - 1
    ) < value < bounds.get("exclusiveMaximum", value + 1)


def test_additional_property_differs_from_declared_ones() -> None:
    boolean = {"type": "boolean"}
    schema = {"type": "object", "properties": {"abc": {"type": "integer"}}, "additionalProperties": boolean}
    assert takes(schema, '{"abc": 1, "ab": true, "abcd": true, "a\\u0062d": true}'.replace("\\u0062", "b"))
    for name in ("abc", "\\u0061bc", "a\\u0062c", "ab\\u0063"):
        assert not takes(schema, f'{{"abc": 1, "{name}": true}}') and not takes(schema, f'{{"{name}": true}}')
    assert takes({**schema, "minProperties": 1}, '{"x": true}') and not takes({**schema, "minProperties": 1}, "{}")
    odd = {"properties": {"é": {"const": 1}, 'a"': {"const": 2}}, "additionalProperties": boolean}
    assert takes(odd, '{"é": 1, "a\\"": 2, "è": true}') and not takes(odd, '{"é": true}') and not takes(odd, '{"a\\"": true}')
    for refused in (
        {"type": "object", "additionalProperties": boolean, "minProperties": 2},
        {"type": "object", "minProperties": 2},
        {**schema, "required": ["abc"], "minProperties": 3},
    ):
        with pytest.raises(ValueError, match=r"minProperties: got [23], which counts properties that are not declared"):
            compiled(refused)
    closed = {"type": "object", "properties": {name: boolean for name in "abc"}, "additionalProperties": False, "minProperties": 2}
    for names in ("", "a", "ab", "bc", "abc", "aa"):
        text = "{" + ", ".join(f'"{name}": true' for name in names) + "}"
        assert takes(closed, text) == (len(set(names)) == len(names) >= 2)


def test_equal_json_constants_satisfy_both_branches() -> None:
    for left, right in ((0, -0.0), (1, 1.0), ([2], [2.0])):
        with pytest.raises(ValueError, match="no value satisfies"):
            compiled({"oneOf": [{"const": left}, {"const": right}]})


@both
def test_random_texts_are_json(backend: str) -> None:
    string, random, ended = {"type": "string"}, Random(11), 0
    schemas: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {"abc": {**string, "maxLength": 3}, "n": {"type": "number", "minimum": -0.5}},
            "additionalProperties": string,
        },
        {"type": "array", "items": {**string, "minLength": 1}, "maxItems": 3},
        {"type": "array", "items": {**string, "format": "email"}, "maxItems": 2},
        {"type": "object", "properties": {"p": {**string, "pattern": r"^[0-9]{2}(-[0-9]+)?$"}, "q": {"enum": ["é", 1.5, {"a": [None]}]}}},
        {"type": "object", "additionalProperties": {"type": ["string", "null"], "maxLength": 2}},
        {"type": "object"},
    ]
    for schema in schemas * 60:
        text = random_text(compiled(schema, backend).matcher(), random, BYTES, 80)
        if text is not None:
            json.loads(text)
            ended += 1
    assert ended > 200
