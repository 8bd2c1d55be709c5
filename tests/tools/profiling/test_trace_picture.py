"""Pictures of timelines: what the tool reads back, and the PNG it writes."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from stepgraph.graphs.context import MAIN
from stepgraph.graphs.spans import BETWEEN_ROUNDS, LAUNCHING_THREAD, NO_ROUND, Span
from stepgraph.runtime.trace import ChosenLength, Timeline
from tests.helpers.tool_runs import examples
from tools import trace_picture

MILLISECOND = 1_000_000


def timeline(rounds: int) -> Timeline:
    """Rounds of 4 ms, with a host node during target_verify."""
    spans = []
    for number in range(rounds):
        start = number * 5 * MILLISECOND
        spans += [
            Span(LAUNCHING_THREAD, f"launch {number}", "launch", number, start, start + 100_123),
            Span("side", "verify", "host", number, start + 200_001, start + MILLISECOND),
            Span(MAIN, "target_verify", "stage", number, start + 150_000, start + 3 * MILLISECOND),
            Span(MAIN, "verify", "wait", number, start + 3 * MILLISECOND, start + 3 * MILLISECOND + 7),
            Span(MAIN, "accept", "stage", number, start + 3 * MILLISECOND + 7, start + 4 * MILLISECOND),
            Span(MAIN, BETWEEN_ROUNDS, "stage", NO_ROUND, start + 4 * MILLISECOND, start + 4 * MILLISECOND + 900),
        ]
    lengths = tuple(ChosenLength(number, number % 3, number / 100) for number in range(rounds))
    return Timeline(tuple(sorted(spans, key=lambda span: span.start_ns)), "tape", lengths)


def test_a_saved_timeline_is_read_back_to_the_nanosecond(tmp_path: Path) -> None:
    timeline(3).save_perfetto(tmp_path / "rounds.json")
    assert trace_picture.read_perfetto(tmp_path / "rounds.json") == timeline(3)


@pytest.mark.parametrize("words", examples(trace_picture.__doc__, "trace_picture.py"))
def test_every_example_writes_a_png_of_the_expected_width(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path(words[0]).parent.mkdir(exist_ok=True)
    timeline(4).save_perfetto(words[0])
    assert trace_picture.main(words) == 0
    content = Path(words[1]).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", content[16:20]) == (1600,)


def refused(file: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert trace_picture.main([str(file), str(file.parent / "none.png"), *options]) == trace_picture.BAD_INPUT
    assert not (file.parent / "none.png").exists()
    return capsys.readouterr().err


def test_unusable_files_options_and_installations_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rounds.json"
    assert "No such file" in refused(file, capsys)
    for content in ("no JSON", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}]}'):
        file.write_text(content)
        assert "expected a file written by Timeline.save_perfetto" in refused(file, capsys)
    timeline(0).save_perfetto(file)
    assert "got a timeline without rounds" in refused(file, capsys)
    timeline(3).save_perfetto(file)
    assert "rounds: got 0, expected an integer >= 1" in refused(file, capsys, "--rounds", "0")
    Timeline(timeline(3).spans).save_perfetto(file)
    assert "got a timeline without draft lengths" in refused(file, capsys, "--lengths")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib: pip install 'stepgraph[pictures]'" in refused(file, capsys)
