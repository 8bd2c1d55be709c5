"""Automata against fresh matchers of xgrammar: the mask of every state, for the named grammars and the schemas of the test suite.

Over the vocabulary of the demonstration (49,152 tokens) and over one of 131,072: that of `mistral-common` where it is installed, else a
generated one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.automaton_cases import CONSTRAINTS
from tests.helpers.c_library import needs_c
from tools.bench_automata import cases, compare, vocabularies

pytestmark = [pytest.mark.models, needs_c]

LEAST = 340  # grammars; the project refuses 44 schemas of the suite


@pytest.mark.parametrize("name", ["demonstration", "large"])
def test_masks_of_every_state_equal_those_of_fresh_matchers(name: str, tmp_path: Path) -> None:
    tokens = vocabularies()[name]
    found = {case.name: compare(case, tokens) for case in cases((name,), tmp_path, 0, 0) if case.kind == "states"}
    compared = {case: entry for case, entry in found.items() if "compared" in entry}
    assert len(compared) >= LEAST and CONSTRAINTS.keys() <= compared.keys()
    assert {case: entry["different"] for case, entry in compared.items() if entry["different"]} == {}
    assert sum(entry["unspelled"] + entry["time_outs"] for entry in compared.values()) == 0
