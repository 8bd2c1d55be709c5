"""Fuzzing of grammars, compiled in the worker process under small limits. Accepted grammars generate a few tokens from their masks."""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, MaskStatus
from stepgraph.sampling.grammar.compile.backends import available_backends
from stepgraph.sampling.grammar.compile.limits import with_limit_name as limit_named
from tests.fuzz.loop import Door
from tests.fuzz.requests import LIMITS, WORKER
from tests.fuzz.values import Value, written
from tests.helpers.grammar_texts import PERSON, TAGS
from tests.helpers.schema_cases import BYTES
from tests.laws.test_schema_fuzz import random_schema

SUITE = Path(__file__).resolve().parent.parent / "data" / "json_schema_test_suite.jsonl"
TOKENS = 6  # per walk
SCHEMA_WORDS = (
    "type string number integer array object boolean null properties required additionalProperties items prefixItems minItems maxItems"
    " minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf enum const anyOf oneOf allOf $ref"
    " $defs definitions #/$defs/a # title default date ipv4 email uuid minProperties maxProperties patternProperties uniqueItems not if"
    " then else contains dependentRequired propertyNames $schema $id x-guidance a b"
).split()
PATTERN_WORDS = (
    r"( ) [ ] { } | * + ? . ^ $ \d \w \s \b \1 (?: (?= (?<n> [^ a-z \u0041 \u{1f600} \x41 {2,3} {0} {,4}"
    r" {1000} - , \\ \/ [^] [] \p{L} é"
).split()
EBNF_WORDS = [
    *r'root ::= | ( ) [a-z] [^a] "a" "b" * + ? {2,4} {0} # \n \x41 \u0041 "" rule TagDispatch( Token( Regex( (= ,'.split(),
    "loop_after_dispatch=true",
    "\n",
    " ",
]
LARK_WORDS = [
    *r'start : | ( ) [ ] /a/ "a" "b"i * + ? ~ & {2,4} ~3 %json %llguidance %ignore %import %regex {"type":"null"} TEXT t'.split(),
    *"rule -> suffix= stop= max_tokens= temperature= lazy <[1]> <tok> @ [capture] [lazy]".split(),
    "\n",
    " ",
]


@functools.cache
def compiler() -> GrammarCompiler:
    """A compiler with a worker process and a cache too small to keep anything."""
    return GrammarCompiler(BYTES, max_threads=1, limits=LIMITS, isolation="process", max_compiles=1, cache_bytes=1)


class GrammarDoor(Door):
    """Constraints of one kind."""

    allowed, named = WORKER, re.compile(r"(Constraint\.\w+|response_format|constraint \w+: cannot be compiled: )")

    def __init__(self) -> None:
        self._compiler = compiler()

    def constraint(self, given: Value) -> Constraint | None:
        raise NotImplementedError

    def enter(self, given: Value) -> None:
        constraint = self.constraint(given)
        if constraint is not None:
            walk(self._compiler, constraint, Random(zlib.crc32(written(given).encode())))


def walk(compiler: GrammarCompiler, constraint: Constraint, random: Random) -> None:
    """Generate random tokens from the masks. Each must be accepted, and each mask must allow one or the text must be complete."""
    matcher = compiler.compile(constraint).matcher()
    masks = torch.zeros(1, BYTES.mask_words, dtype=torch.int32)
    text: list[int] = []
    for _ in range(TOKENS):
        status = matcher.fill_next_token_bitmask(masks, 0)
        if status == MaskStatus.FAULT and "GrammarLimits." in limit_named(matcher.fault):
            return
        assert status in (MaskStatus.OK, MaskStatus.COMPLETE), f"{status.name} after {BYTES.decode(text)!r}: {matcher.fault}"
        allowed = np.flatnonzero(np.unpackbits(masks.numpy().view(np.uint8), bitorder="little")).tolist()
        token = random.choice(allowed)
        accepted = matcher.accept_token(token)
        if not accepted and "GrammarLimits." in limit_named(matcher.fault):
            return
        assert accepted, f"{BYTES.tokens[token]!r} is in the mask but rejected after {BYTES.decode(text)!r}: {matcher.fault}"
        if token in BYTES.stop_token_ids:
            return
        text.append(token)
    matcher.rollback(len(text))
    assert matcher.fill_next_token_bitmask(masks, 0) in (MaskStatus.OK, MaskStatus.COMPLETE), matcher.fault


def _library(given: Value) -> str:
    """The library to use, chosen by the hash of the input."""
    names = available_backends()
    return names[zlib.crc32(written(given).encode()) % len(names)]


class SchemaDoor(GrammarDoor):
    name = "schema"
    words: Sequence[str] = SCHEMA_WORDS

    def __init__(self) -> None:
        super().__init__()
        cases = [json.loads(line) for line in SUITE.read_text(encoding="utf-8").splitlines()]
        found = [case["schema"] for case in cases if isinstance(case.get("schema"), dict)]
        random = Random(0)
        self.seeds = [PERSON, *Random(1).sample(found, min(60, len(found))), *(random_schema(random) for _ in range(40))]

    def constraint(self, given: Value) -> Constraint | None:
        return Constraint.json_schema(given, zlib.crc32(written(given).encode()) % 3 == 0, _library([given]))  # type: ignore[arg-type]


class RegexDoor(GrammarDoor):
    name = "regex"
    words: Sequence[str] = PATTERN_WORDS
    seeds: Sequence[Value] = (
        "[a-c]{2}-[0-9]+",
        "(a|bc)+",
        r"\d{3}-\d{4}",
        "^a?b{1,3}$",
        "[^a]*",
        '["\\\\/]+',
        r"(?:\w+\s)*\w{0,5}",
        "(a+a+)+b",
        ".{2,4}",
        r"\u{1F600}|\x41|[\d\-z]",
        "(?<year>[0-9]{4})-(?<month>[01][0-9])",
        "",
        "a|",
        "[^]a",
        r"[\b]",
    )

    def constraint(self, given: Value) -> Constraint | None:
        return Constraint.regex(given, _library(given))  # type: ignore[arg-type]


class EbnfDoor(GrammarDoor):
    name = "ebnf"
    words: Sequence[str] = EBNF_WORDS
    seeds: Sequence[Value] = (
        'root ::= "a" | "b" root',
        'root ::= "(" root ")" | [0-9] [0-9]? | ""',
        'root ::= item ("," item)* \nitem ::= "true" | "false" | "name"',
        'root ::= [^"\\\\]{1,3} # rest\n',
        'root ::= a b*\na ::= "x"{2,3}\nb ::= [a-z]+ | (a)?',
        'root ::= TagDispatch(("<", a), loop_after_dispatch=true)\na ::= "b>"',
        'root ::= "\\u00e9" [\\u0041-\\u005a] a\na ::= ((("q")))',
        'root ::= Regex("a+") (=("b")) "b"',
    )

    def constraint(self, given: Value) -> Constraint | None:
        return Constraint.ebnf(given)


class LarkDoor(GrammarDoor):
    name = "lark"
    words: Sequence[str] = LARK_WORDS
    seeds: Sequence[Value] = (
        'start: "(" start ")" | "x"',
        "start: /[a-z]+/ NUMBER\nNUMBER: /[0-9]{1,3}/",
        'start: %json {"type": "integer"} "!"',
        'start: a ("," a)*\na: "x"{2,3} | B?\nB: "q" & /[a-q]/ & ~/./',
        '%llguidance {"no_forcing": true}\nstart: T\nT: /a/i "b"i',
        'start: head /\\n/ rest\nhead[lazy]: /.*!/\nrest: "a"+',
        '%ignore / +/\nstart: "a" "b"',
        'start: %regex {"substring_words": "a b c"}',
        'start: a b "c"\na[suffix="q"]: /[a-z]*/\nb[stop="x", max_tokens=3]: /[a-z]*/',
    )

    def constraint(self, given: Value) -> Constraint | None:
        return Constraint.lark(given)


class TagDoor(GrammarDoor):
    name = "structural_tag"
    words: Sequence[str] = (
        "triggers",
        "structures",
        "alternative",
        "begin",
        "schema",
        "end",
        "type",
        "<f=",
        "<f=a>",
        "<",
        "</f>",
        *SCHEMA_WORDS[:12],
    )
    seeds: Sequence[Value] = (
        TAGS,
        {"type": "structural_tag", "triggers": ["<"], "structures": [{"begin": "<a>", "schema": {}, "end": ""}]},
        {"structures": [{"begin": "a", "schema": {}, "end": ""}], "alternative": {"begin": "", "schema": {"type": "null"}, "end": "b"}},
        {"triggers": ["a", "bc"], "structures": [{"begin": t, "schema": {"type": "boolean"}, "end": t} for t in ("a", "ab", "bcd")]},
    )

    def constraint(self, given: Value) -> Constraint | None:
        return Constraint.structural_tag(given, False, _library(given))  # type: ignore[arg-type]


class FormatDoor(GrammarDoor):
    name = "response_format"
    words: Sequence[str] = (
        "type",
        "text",
        "json_object",
        "json_schema",
        "structural_tag",
        "name",
        "description",
        "schema",
        "strict",
        *SCHEMA_WORDS[:20],
    )
    seeds: Sequence[Value] = (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "description": "b", "schema": PERSON, "strict": True}},
        {"type": "structural_tag", **TAGS},
    )

    def constraint(self, given: Value) -> Constraint | None:
        return Constraint.response_format(given, False, _library(given))  # type: ignore[arg-type]
