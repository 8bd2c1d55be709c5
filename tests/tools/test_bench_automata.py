"""The report on a folder of schemas, and the comparison of masks with xgrammar: what it covers, resumption, and planted errors."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, Vocabulary
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar
from stepgraph.sampling.grammar.automaton.library import Field, next_entries
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammar
from tests.helpers.automaton_cases import CONSTRAINTS
from tests.helpers.automaton_cases import VOCABULARY as SMALL
from tests.helpers.c_library import needs_c
from tools.bench.automaton_masks import Comparer
from tools.bench_automata import Case, cases, compare_all, main, measure

VOCABULARY = Vocabulary.printable()
SCHEMAS = {
    "fits": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 300}}, "required": ["a"]},
    "refused": {"$ref": "https://example.com/elsewhere.json"},
    "unfit": {"type": "string", "pattern": "^[ab]*a[ab]{40}$"},
}
BYTE_IDS = {code: code for code in range(256)}  # of SMALL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, schema in SCHEMAS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(schema))
    return tmp_path


@needs_c
def test_counts_of_a_folder(folder: Path) -> None:
    found = measure(sorted(folder.iterdir()), VOCABULARY, repeats=1)
    assert (found["schemas"], found["compiled"], found["refused"], found["fit"]) == (3, 1, 1, 0.5)
    [(name, reason)] = found["unfit"].items()
    assert name == f"{folder.name}/unfit.json" and "automaton_states" in reason
    assert found["states"]["p50"] < 300 and found["kilobytes"]["p100"] > 0


def both(constraint: Constraint) -> tuple[AutomatonGrammar, XGrammar]:
    ours, library = (GrammarCompiler(SMALL, backend=backend).compile(constraint).grammar for backend in ("automaton", "xgrammar"))
    assert isinstance(ours, AutomatonGrammar) and isinstance(library, XGrammar)
    return ours, library


@pytest.mark.parametrize("marker", [None, "<t>"])
@pytest.mark.parametrize("field", [Field.NEXT, Field.CHANGE_VALUE])
@needs_c
def test_a_corrupted_table_is_detected(field: Field, marker: str | None) -> None:
    ours, library = both(CONSTRAINTS["brackets"])
    image = ours.image.copy()
    if field is Field.CHANGE_VALUE:
        image[image[field] : image[field + 1]] ^= 1 << ord("z") % 32
    else:  # one move of each state leads to the start
        for row in next_entries(image):
            row[np.flatnonzero(row >= 0)[:1]] = image[Field.START]
    for grammar, is_right in ((ours, True), (AutomatonGrammar(image, ours.table, SMALL), False)):
        comparer = Comparer(grammar, library, marker)
        comparer.walk(600, Random(0))
        if marker is None:
            comparer.states(BYTE_IDS)
        assert comparer.result.compared >= 600 and comparer.result.time_outs == 0
        assert (comparer.result.different == []) is is_right


@needs_c
def test_a_comparison_continues_after_the_positions_it_has(folder: Path) -> None:
    progress, tokens = folder / "progress", {"small": SMALL}
    todo = [Case("small", "states", pattern, Constraint.regex(pattern)) for pattern in ("a[ab]?c", "[ab]*a[ab]{40}")]
    first = compare_all(todo[:1], tokens, 10, progress)
    assert first["different"] == [] and first["compared"] == first["parts"]["small / states"]["compared"] > 3
    second = compare_all(todo, tokens, 10, progress)
    assert second["compared"] == first["compared"] and second["parts"]["small / states"]["refused"] == 1
    assert [json.loads(line)["case"] for line in progress.read_text().splitlines()] == [case.key for case in todo]


def test_cases_cover_states_markers_and_the_folder(folder: Path) -> None:
    found = cases(("small", "large", "sparse"), folder, 10, 0)
    kinds = {f"{case.vocabulary} {case.kind}" for case in found}
    assert kinds == {"small states", "large states", "small marker", "large marker", "sparse walk", "large walk"}
    assert {case.name for case in found if case.vocabulary == "large" and case.kind == "walk"} >= {"fits.json", "unfit.json"}
    assert len({case.key for case in found}) == len(found)


def test_a_folder_without_schemas_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "expected a folder with .json files" in capsys.readouterr().err
