"""The benchmark of captures: a process of its own for every engine, which may be that of another checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench_capture import DRAFTS, FIGURES, in_a_process, lines, main


@pytest.mark.slow
def test_a_process_reports_graphs_times_and_memory() -> None:
    options = {"greedy_only": True, "draft_length": DRAFTS, "max_length": 64}
    found = in_a_process("", 1, False, options)
    assert {*FIGURES} < {*found} and found["graphs"] >= 2 and found["nodes"] > 100
    assert 0 < found["later_seconds"] < 60 and found["peak_bytes"] >= found["kept_bytes"]
    over = {"other": dict.fromkeys(FIGURES, 1.25)}
    table = lines({"captures": {"1 row": {"auto": found, "auto_over": over}}})
    assert table[-1].split()[-4:] == ["1.25"] * 4 and len(table) == 3


@pytest.mark.slow
def test_another_checkout_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stepgraph").mkdir()
    (tmp_path / "stepgraph" / "__init__.py").write_text("raise SystemError('the other one')")
    with pytest.raises(RuntimeError, match="the other one"):
        in_a_process(str(tmp_path), 1, False, {})
    assert main(["--other", str(tmp_path / "nowhere")]) == 2
    assert "expected a folder that holds stepgraph/__init__.py" in capsys.readouterr().err
