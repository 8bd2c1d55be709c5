"""tools/bench_grammar.py: every variant writes the same masks, and the JSON document is printed last."""

from __future__ import annotations

import json

import pytest

from tests.helpers.grammar_texts import PRINTABLE
from tests.helpers.toy_engines import needs_native
from tools import bench_grammar
from tools.bench.grammar_variants import PythonLoop

NATIVE = ("native link", "native link, called from C", "native link, forced drafts", "native link, automata")


@needs_native
@pytest.mark.parametrize("library", bench_grammar.LIBRARIES)
def test_every_variant_is_reported(library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_grammar, "vocabulary", lambda: (PRINTABLE, "printable"))
    assert bench_grammar.main(["--rows", "1", "3", "--rounds", "20", "-k", "2", "--library", library]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["library"], document["native"]) == (library, "available")
    assert all(0 < row["ms"]["cached"] < row["ms"]["worker"] and row["grammar_bytes"] for row in document["compile"]["grammars"])
    for batch, rows in zip(document["batches"], (1, 3), strict=True):
        assert batch["rows"] == rows and batch["fills_per_round"] == 3 * rows and 2 * rows < batch["accepts_per_round"] <= 3 * rows
        assert set(batch["us_per_round"]) == {"python loop", "library batch", "python link", *NATIVE}
        assert all(figures["p50"] <= figures["p99"] <= figures["p99.9"] for figures in batch["us_per_round"].values())
        assert batch["automata_over_native_link"] > 0
        assert batch["bytecodes_in_the_host_node"]["native link"] == 0 < batch["bytecodes_in_the_host_node"]["python link"]


@needs_native
def test_different_masks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_grammar, "vocabulary", lambda: (PRINTABLE, "printable"))
    monkeypatch.setattr(PythonLoop, "run", lambda loop: None)
    with pytest.raises(AssertionError, match="a mask differs from the library's"):
        bench_grammar.report([1], 20, 2)
