"""The report on a folder of schemas: its counts, and that a mask that differs is reported."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, Vocabulary
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar
from tools.bench_automata import different_masks, main, measure

VOCABULARY = Vocabulary.printable()
SCHEMAS = {
    "fits": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 300}}, "required": ["a"]},
    "refused": {"type": "string", "contentEncoding": "base64", "if": {}},
    "unfit": {"type": "string", "pattern": "^[ab]*a[ab]{40}$"},
}


def test_counts_of_a_folder(tmp_path: Path) -> None:
    for name, schema in SCHEMAS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(schema))
    found = measure(sorted(tmp_path.iterdir()), 30, VOCABULARY)
    assert (found["schemas"], found["compiled"], found["refused"]) == (3, 1, 1)
    assert list(found["unfit"]) == [str(tmp_path / "unfit.json")] and "automaton_states" in found["unfit"][str(tmp_path / "unfit.json")]
    assert found["compared"] == 30 and found["different"] == []
    assert found["states"]["p50"] < 300 and found["kilobytes"]["p100"] > 0


def test_a_mask_that_differs_is_reported() -> None:
    grammar = GrammarCompiler(VOCABULARY, backend="automaton").compile(Constraint.regex("ab?c")).grammar
    library = GrammarCompiler(VOCABULARY, backend="xgrammar").compile(Constraint.regex("a[bd]?c")).grammar
    assert isinstance(grammar, AutomatonGrammar)
    assert b"a" in different_masks(grammar, library, 10, Random(0))


def test_a_folder_without_schemas_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "expected a folder with .json files" in capsys.readouterr().err
