"""Accepted schemas are enforced: random schemas and texts, drawn under their masks and validated by `jsonschema`, with formats checked."""

from __future__ import annotations

import json
import re
from decimal import Decimal, localcontext
from random import Random
from typing import Any

import jsonschema
import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.schema.forms import expr, join
from stepgraph.sampling.grammar.schema.normalise import Normaliser
from stepgraph.sampling.grammar.xgrammar_lib.ebnf import json_grammar
from tests.helpers.c_library import EACH_BACKEND
from tests.helpers.format_texts import CHECKER, VALID
from tests.helpers.grammar_texts import random_text
from tests.helpers.schema_cases import BYTES

NAMES = ["a", "b", "ab", "x-1", "é"]
PATTERNS = ["^[ab]+$", "^a?b{1,3}$", "^.{2,4}$", "^[^a]*$", "^(a|bc)+$", "^\\d{1,3}$", '^["\\\\/]+$']
IN_PYTHON = {  # where Python matches more than JavaScript
    each: each.replace("$", r"\Z").replace(".", r"[^\n\r\u2028\u2029]").replace(r"\d", "[0-9]") for each in PATTERNS
}
FORMATS = [name for name in VALID if not name.startswith("older ")]  # the others are those of older drafts
VALUES: list[Any] = ["", "a", "é\n", 'x"y', 0, 1, -1, 2.5, 1.0, 100, True, None, [], [1, "a"], {"a": None}]
TYPES = ["string", "number", "integer", "array", "object"]


def random_schema(random: Random, depth: int = 0) -> Any:
    if depth > 2 or random.random() < 0.08:
        leaves = [True, {}, {"type": "integer"}, {"type": "string", "maxLength": 3}, {"const": random.choice(VALUES)}, {"type": "null"}]
        return random.choice(leaves)
    found: dict[str, Any] = {}
    kinds = random.sample([*TYPES, "branches", "enum", "$ref"], random.choice([1, 1, 1, 2]))
    if (types := [kind for kind in kinds if kind in TYPES]) and random.random() < 0.8:
        found["type"] = types[0] if len(types) == 1 and random.random() < 0.8 else [*types, "null"]

    def below() -> Any:
        return random_schema(random, depth + 1)

    for kind in kinds:
        for keyword, share, value in _keywords(random, kind, below):
            if random.random() < share:
                found[keyword] = value()
    return found


def _keywords(random: Random, kind: str, below: Any) -> list[tuple[str, float, Any]]:
    """The keywords of a kind, each with its probability and a function that returns a random value."""
    counts = [(f"{side}{noun}", 0.4, lambda: random.randint(0, 4)) for noun in ("Length", "Items", "Properties") for side in ("min", "max")]
    bounds = [(name, 0.3, lambda: random.choice([-5, 0, 3, 0.25, 7, 20])) for name in ("minimum", "maximum", "exclusiveMinimum")]
    table: dict[str, list[tuple[str, float, Any]]] = {
        "string": [*counts[:2], ("pattern", 0.3, lambda: random.choice(PATTERNS)), ("format", 0.3, lambda: random.choice(FORMATS))],
        "number": [*bounds, ("multipleOf", 0.2, lambda: random.choice([0.5, 2, 10]))],
        "integer": [*bounds, ("multipleOf", 0.2, lambda: random.choice([2, 3, 10]))],
        "array": [*counts[2:4], ("items", 0.7, below), ("prefixItems", 0.3, lambda: [below(), below()])],
        "object": [
            *counts[4:],
            ("properties", 0.8, lambda: {name: below() for name in random.sample(NAMES, 2)}),
            ("required", 0.4, lambda: random.sample(NAMES, 1)),
            ("additionalProperties", 0.4, lambda: random.choice([False, True, below()])),
            ("patternProperties", 0.25, lambda: {random.choice(["^a", "b$", "^x", "[0-9]"]): below()}),
        ],
        "branches": [(random.choice(["anyOf", "allOf", "oneOf"]), 1.0, lambda: [below() for _ in range(random.randint(1, 3))])],
        "enum": [("enum", 1.0, lambda: random.sample(VALUES, 3))],
        "$ref": [("$ref", 1.0, lambda: random.choice(["#/$defs/n", "#/$defs/m"]))],
    }
    return table[kind]


def faults(backend: BackendChoice, seed: int, schemas: int) -> tuple[int, list[str]]:
    """Sample `schemas` random schemas; return the positions in their texts and a line for each invalid text."""
    random, positions, found = Random(seed), 0, []
    compiler = GrammarCompiler(BYTES, cache_bytes=1, max_threads=1, backend=backend)
    for _ in range(schemas):
        requested = random_schema(random)
        if requested is True:
            continue
        requested = {**requested, "$defs": {name: random_schema(random, 2) for name in "nm"}}
        try:
            compiled = compiler.compile(Constraint.json_schema(requested))
        except ValueError:
            continue
        exact = json.loads(json.dumps(requested), parse_float=Decimal, object_hook=_in_python)
        validator = jsonschema.Draft202012Validator(exact, format_checker=CHECKER)
        for _ in range(3):
            text = random_text(compiled.matcher(), random, BYTES)
            if text is not None and not re.search(rb"[eE][+-]?\d{5}", text):  # Decimal has no larger exponents
                positions += len(text) + 1
                found += [] if _valid(validator, text) else [f"{text!r} under {json.dumps(requested)}"]
    return positions, found


def _in_python(part: dict[str, Any]) -> dict[str, Any]:
    return part | {"pattern": IN_PYTHON[part["pattern"]]} if isinstance(part.get("pattern"), str) else part


def _valid(validator: jsonschema.Draft202012Validator, text: bytes) -> bool:
    try:
        with localcontext() as context:
            context.prec = 20_000  # digits of 1e9999, which multipleOf divides
            return bool(validator.is_valid(json.loads(text, parse_float=Decimal)))
    except RecursionError:
        return True  # a schema that only refers to itself accepts everything


@pytest.mark.slow
@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_accepted_schemas_are_enforced(backend: BackendChoice) -> None:
    positions, found = faults(backend, 1, 700)
    assert found == [] and positions > 12_000


@pytest.mark.soak
@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_accepted_schemas_are_enforced_long(backend: BackendChoice) -> None:
    positions, found = faults(backend, 2, 60_000)
    assert found == [] and positions > 1_000_000


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_validator_detects_a_removed_guard(backend: BackendChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it oneOf is enforced as anyOf."""
    monkeypatch.setattr(Normaliser, "_exactly_one", lambda self, branches: join(*(self.form(expr(branch)) for branch in branches)))
    json_grammar.cache_clear()
    assert any(faults(backend, seed, 250)[1] for seed in range(18, 48))
    json_grammar.cache_clear()
