"""The JSON-Schema-Test-Suite as a ratchet: no invalid value is ever taken, and nothing gets worse or better without the table saying so.

After a change: `python tools/schema_suite.py` rewrites the table; its difference is part of the change.
"""

from __future__ import annotations

from typing import Any

import pytest

from stepgraph.sampling.grammar import GrammarCompiler
from stepgraph.sampling.grammar.xgrammar_lib import grammar as xgrammar_grammar
from tests.helpers.schema_cases import (
    BYTES,
    FALSE_ACCEPT,
    REFUSED,
    classed,
    differences,
    groups,
    kept,
    outcomes,
    place,
    totals,
    writings,
    written,
)
from tests.helpers.schema_cases import TABLE as TABLE_FILE

TABLE = kept()


def test_the_grammars_do_what_the_table_says() -> None:
    found = outcomes()
    changed = differences(TABLE, found)
    assert not changed, f"{len(changed)} outcomes; run tools/schema_suite.py and look:\n" + "\n".join(changed[:20])
    assert written(found) == TABLE_FILE.read_text(encoding="utf-8"), "the table's totals or its order are not those of its groups"


def test_no_back_end_takes_an_invalid_value() -> None:
    wrong = [
        f"{where}: {name}"
        for where, row in TABLE.items()
        for name, kind in row.items()
        if not kind.startswith(REFUSED) and FALSE_ACCEPT in kind
    ]
    assert wrong == []


def test_every_schema_of_the_suite_is_in_the_table_once() -> None:
    places = [place(group) for group in groups()]
    assert len(places) == len(set(places)) == len(TABLE) and set(places) == TABLE.keys()
    assert sum(totals({where: REFUSED for where in places}).values()) == 1257


def test_a_keyword_that_is_no_longer_refused_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar_grammar, "check_schema", lambda schema: None)
    unguarded = GrammarCompiler(BYTES, max_threads=1, backend="xgrammar")
    chosen = [group for group in groups() if group.file in ("not", "uniqueItems")]
    found = {place(group): {**TABLE[place(group)], "xgrammar": classed(group, unguarded)} for group in chosen}
    table = {where: TABLE[where] for where in found}
    assert any(FALSE_ACCEPT in row["xgrammar"] and not row["xgrammar"].startswith(REFUSED) for row in found.values())
    assert len(differences(table, found)) > 10 and len(differences(found, table)) > 10


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"a": 1, "b": [2.0, "é"]}, ['{"a": 1, "b": [2.0, "é"]}', '{"b": [2, "\\u00e9"], "a": 1}', '{"a":1,"b":[2.0,"é"]}']),
        (1e308, ["1e+308", "1" + "0" * 308]),
    ],
)
def test_a_value_is_tried_in_all_its_writings(value: Any, wanted: list[str]) -> None:
    found = list(writings(value))
    assert found[0] == wanted[0] and set(wanted) <= set(found)
