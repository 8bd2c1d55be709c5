"""Schemas in the shapes that applications send: they compile within the limits, and a random text of each validates."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler
from tests.helpers.application_schemas import APPLICATIONS, in_json_schema, large
from tests.helpers.format_texts import CHECKER
from tests.helpers.grammar_texts import random_text
from tests.helpers.schema_cases import BYTES

MAX_BYTES = 60_000
LARGE = large()


def random_answer(schema: Any, draw: random.Random, start: bytes = b"") -> str:
    """Legal bytes at random after the start of a text, mostly those that end a string, an array or an object."""
    constraint = Constraint.json_schema(schema, objects="standard")
    matcher = GrammarCompiler(BYTES, max_threads=1, isolation="none").compile(constraint).matcher()
    assert all(map(matcher.accept_token, start)), start
    found = random_text(matcher, draw, BYTES, MAX_BYTES, likely=b'"}]', share=0.8)
    assert found is not None, f"no end after {MAX_BYTES} bytes"
    return (start + found).decode()


@pytest.mark.parametrize("name", APPLICATIONS)
def test_random_text_of_an_application_validates(name: str) -> None:
    draw = random.Random(name)
    for _ in range(3):
        jsonschema.validate(json.loads(random_answer(APPLICATIONS[name], draw)), in_json_schema(name), format_checker=CHECKER)


@pytest.mark.parametrize("name", LARGE)
def test_random_text_of_a_large_schema_validates(name: str) -> None:
    jsonschema.validate(json.loads(random_answer(LARGE[name], random.Random(name))), LARGE[name])


def test_thirty_schemas_are_those_of_openapi() -> None:
    assert sum(name.startswith("openapi") for name in APPLICATIONS) == 30


def test_large_schemas_are_as_large_as_their_names_say() -> None:
    assert len(json.dumps(LARGE["500 kB"])) > 500_000
    assert len(LARGE["enum of 5,000"]["enum"]) == len(set(LARGE["enum of 5,000"]["enum"])) == 5000
    assert len(LARGE["200 properties"]["properties"]) == 200 and len(LARGE["100 tools"]["anyOf"]) == 100
