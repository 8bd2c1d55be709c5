"""The JSON-Schema-Test-Suite as a regression test: no invalid value is accepted, and every change of an outcome must change the table.

After a change: `python tools/schema_suite.py` rewrites the table; commit its difference with the change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepgraph.sampling.grammar import GrammarCompiler
from stepgraph.sampling.grammar.schema.forms import expr, join
from stepgraph.sampling.grammar.schema.normalise import Normaliser
from stepgraph.sampling.grammar.xgrammar_lib.ebnf import json_grammar
from tests.helpers.schema_cases import (
    BYTES,
    FALSE_ACCEPT,
    REFUSED,
    classify,
    count_classes,
    differences,
    groups,
    key,
    outcomes,
    stored_outcomes,
    to_json,
    totals,
    written_forms,
)
from tests.helpers.schema_cases import TABLE as TABLE_FILE
from tests.helpers.toy_engines import needs_native

TABLE = stored_outcomes()
ROOT = Path(__file__).parent.parent.parent.parent


@pytest.mark.slow
def test_outcomes_equal_the_table() -> None:
    found = outcomes()
    changed = differences(TABLE, found)
    assert not changed, f"{len(changed)} outcomes; run tools/schema_suite.py and check:\n" + "\n".join(changed[:20])
    assert to_json(found) == TABLE_FILE.read_text(encoding="utf-8"), "the totals or the order of the table do not match its groups"


def test_no_invalid_value_is_accepted() -> None:
    wrong = [
        f"{where}: {name}"
        for where, row in TABLE.items()
        for name, kind in row.items()
        if not kind.startswith(REFUSED) and FALSE_ACCEPT in kind
    ]
    assert wrong == []


def test_table_contains_each_schema_once() -> None:
    keys = [key(group) for group in groups()]
    assert len(keys) == len(set(keys)) == len(TABLE) and set(keys) == TABLE.keys()
    assert sum(totals({where: REFUSED for where in keys}).values()) == 1257


def test_keyword_that_is_not_enforced_changes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enforces oneOf as anyOf."""
    monkeypatch.setattr(Normaliser, "_exactly_one", lambda self, branches: join(*(self.form(expr(branch)) for branch in branches)))
    json_grammar.cache_clear()
    unguarded = GrammarCompiler(BYTES, max_threads=1, backend="xgrammar")
    chosen = [group for group in groups() if group.file == "oneOf"]
    found = {key(group): {**TABLE[key(group)], "xgrammar": classify(group, unguarded)} for group in chosen}
    table = {where: TABLE[where] for where in found}
    assert any(FALSE_ACCEPT in row["xgrammar"] and not row["xgrammar"].startswith(REFUSED) for row in found.values())
    assert len(differences(table, found)) == len(differences(found, table)) > 5
    json_grammar.cache_clear()


STANDARD = {  # by draft; "" is 2020-12
    "": {"pass": 1125, "refused": 58, "false accept": 0, "false reject": 26},
    "draft4": {"pass": 559, "refused": 37, "false accept": 0, "false reject": 1},
    "draft6": {"pass": 774, "refused": 37, "false accept": 0, "false reject": 1},
    "draft7": {"pass": 862, "refused": 37, "false accept": 0, "false reject": 1},
    "draft2019-09": {"pass": 1169, "refused": 52, "false accept": 0, "false reject": 3},
}


@needs_native
@pytest.mark.parametrize("draft", [pytest.param(draft, marks=[pytest.mark.soak] * (draft not in ("", "draft4"))) for draft in STANDARD])
def test_drafts_that_are_read_by_the_standard(draft: str) -> None:
    """At least 90% of the cases without references to other documents have the right verdict, and no invalid value is accepted."""
    compiler = GrammarCompiler(BYTES, max_threads=1, isolation="none", backend="automaton")
    found = count_classes((group, classify(group, compiler, objects="standard")) for group in groups(draft) if group.is_one_document)
    assert found == STANDARD[draft]
    assert found["pass"] >= 0.9 * sum(found.values()) and found["false accept"] == 0


def test_documents_have_the_figures_of_the_suite() -> None:
    standard, closed = STANDARD[""], totals({where: row["auto"] for where, row in TABLE.items()})
    readme, page = (" ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in ("README.md", "docs/constrain.md"))
    cases = f"{sum(standard.values()):,} cases"
    assert f"of the {cases} of the test suite (2020-12, without references to other documents) {standard['refused']} are refused" in readme
    assert f"of the {cases} without references to other documents {standard['pass']:,} pass, {standard['refused']} are refused" in page
    assert f"and {standard['false reject']} valid values are rejected" in page and f"{closed['pass']} of all cases pass" in page
    assert f"{closed['refused']} are refused, and {closed['false reject']} valid values are rejected" in page


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": 1, "b": [2.0, "é"]}, ['{"a": 1, "b": [2.0, "é"]}', '{"b": [2, "\\u00e9"], "a": 1}', '{"a":1,"b":[2.0,"é"]}']),
        (1e308, ["1e+308", "1" + "0" * 308]),
    ],
)
def test_value_is_tried_in_all_its_written_forms(value: Any, expected: list[str]) -> None:
    found = list(written_forms(value))
    assert found[0] == expected[0] and set(expected) <= set(found)
