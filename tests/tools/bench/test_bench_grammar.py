"""tools/bench_grammar.py: every variant writes the same masks, and the JSON document is printed last."""

from __future__ import annotations

import json
import time
from shutil import which

import pytest

from stepgraph.sampling.grammar.link.native import load
from tests.helpers.grammar_texts import PRINTABLE
from tests.helpers.link_bench import AUTOMATON_COMPILER, ROUND_STEPS, XGRAMMAR_COMPILER, Memory, letters_row, native_link, set_running
from tests.helpers.toy_engines import needs_native
from tools import bench_grammar
from tools.bench.grammar_variants import PythonLoop
from tools.bench.library_calls import timed_library_calls

NATIVE = ("native link", "native link, called from C", "native link, forced drafts", "native link, automata")


@needs_native
@pytest.mark.parametrize("library", bench_grammar.LIBRARIES)
def test_every_variant_is_reported(library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_grammar, "vocabulary", lambda: (PRINTABLE, "printable"))
    assert bench_grammar.main(["--rows", "1", "3", "--rounds", "20", "-k", "2", "--library", library]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["library"], document["native"]) == (library, "available")
    for batch, rows in zip(document["batches"], (1, 3), strict=True):
        assert batch["rows"] == rows and batch["fills_per_round"] == 3 * rows and 2 * rows < batch["accepts_per_round"] <= 3 * rows
        assert set(batch["us_per_round"]) == {"python loop", "library batch", "python link", *NATIVE}
        assert all(figures["p50"] <= figures["p99"] <= figures["p99.9"] for figures in batch["us_per_round"].values())
        assert batch["automata_over_native_link"] > 0 and batch["automata_over_native_link_alone"] > 0
        assert batch["processor_time_over_python_loop"].keys() == batch["over_python_loop"].keys()
        inside = batch["library_calls_over_python_loop"]
        assert inside is None if library != "xgrammar" or which("cc") is None else 0 < inside < batch["over_python_loop"]["python link"]


@needs_native
@pytest.mark.skipif(which("cc") is None, reason="no compiler")
def test_time_inside_the_library_is_that_of_its_calls() -> None:
    """It is less than the time of the host node, and 0 for other grammars. The link is restored afterwards."""
    memory = Memory.make(1, 3)
    link, real = native_link(memory), load().xgrammar.struct.call
    seconds = []
    with timed_library_calls() as calls:
        assert calls is not None
        for compiler in (XGRAMMAR_COMPILER, AUTOMATON_COMPILER):
            row = letters_row(link, compiler=compiler)
            set_running(memory, row)
            link.push_batch([row])
            node, begun = link.node(ROUND_STEPS), time.perf_counter()
            node()
            seconds.append((calls.take_seconds(), time.perf_counter() - begun))
            assert calls.take_seconds() == 0 and not row.fault
    assert 0 < seconds[0][0] < seconds[0][1] and seconds[1][0] == 0
    assert load().xgrammar.struct.call == real


@needs_native
def test_different_masks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_grammar, "vocabulary", lambda: (PRINTABLE, "printable"))
    monkeypatch.setattr(PythonLoop, "run", lambda loop: None)
    with pytest.raises(AssertionError, match="a mask differs from the library's"):
        bench_grammar.report([1], 20, 2)
