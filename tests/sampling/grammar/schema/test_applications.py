"""Schemas in the shapes that applications send: they compile within the limits, and a random text of each validates."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from stepgraph.sampling.grammar import Constraint, GrammarCompiler
from stepgraph.sampling.grammar.status import MaskStatus
from tests.helpers.application_schemas import APPLICATIONS, in_json_schema, large
from tests.helpers.format_texts import CHECKER
from tests.helpers.schema_cases import BYTES

STOP = 256
ENDS = {*b'"}]', STOP}
MAX_BYTES = 60_000
LARGE = large()


def compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTES, max_threads=1, isolation="none")


def random_text(schema: Any, draw: random.Random, objects: Any, start: bytes = b"") -> str:
    """Legal bytes at random after the start of a text, mostly those that end a string, an array or an object."""
    matcher = compiler().compile(Constraint.json_schema(schema, objects=objects)).matcher()
    mask, text = torch.zeros(1, BYTES.mask_words, dtype=torch.int32), bytearray(start)
    assert all(map(matcher.accept_token, text)), start
    while len(text) < MAX_BYTES:
        assert matcher.fill_next_token_bitmask(mask, 0) in (MaskStatus.OK, MaskStatus.COMPLETE), bytes(text)
        legal = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
        preferred = [token for token in legal if token in ENDS]
        token = int(draw.choice(preferred if preferred and draw.random() < 0.8 else legal))
        assert matcher.accept_token(token)
        if token == STOP:
            return text.decode()
        text.append(token)
    raise AssertionError(f"no end after {MAX_BYTES} bytes: {bytes(text[-200:])!r}")


@pytest.mark.parametrize("name", APPLICATIONS)
def test_random_text_of_an_application_validates(name: str) -> None:
    draw = random.Random(name)
    for _ in range(3):
        text = random_text(APPLICATIONS[name], draw, "standard")
        jsonschema.validate(json.loads(text), in_json_schema(name), format_checker=CHECKER)


@pytest.mark.parametrize("name", LARGE)
def test_random_text_of_a_large_schema_validates(name: str) -> None:
    jsonschema.validate(json.loads(random_text(LARGE[name], random.Random(name), "standard")), LARGE[name])


def test_thirty_schemas_are_those_of_openapi() -> None:
    assert sum(name.startswith("openapi") for name in APPLICATIONS) == 30


def test_large_schemas_are_as_large_as_their_names_say() -> None:
    assert len(json.dumps(LARGE["500 kB"])) > 500_000
    assert len(LARGE["enum of 5,000"]["enum"]) == len(set(LARGE["enum of 5,000"]["enum"])) == 5000
    assert len(LARGE["200 properties"]["properties"]) == 200 and len(LARGE["100 tools"]["anyOf"]) == 100
