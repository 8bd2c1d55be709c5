"""Engines at the edges: loops that end with an error or never begin, recordings on a disk that is full."""

from __future__ import annotations

import asyncio
import io
import warnings
from pathlib import Path

import pytest

from stepgraph import AsyncEngine, Engine, EngineConfig
from stepgraph.runtime.extras.record import Recorder, Recording
from tests.helpers.toy_engines import TARGET, VOCABULARY

CONFIG = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=32, greedy_only=True, eager=True)


def test_who_leaves_a_served_engine_is_told_what_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def burns() -> None:
        raise OSError("the host is on fire")

    async def serve(engine: Engine) -> None:
        async with AsyncEngine(engine) as serving:
            monkeypatch.setattr(engine, "step", burns)
            serving.generate([1, 2], max_new_tokens=20)

    engine = Engine(TARGET, vocabulary=VOCABULARY, config=CONFIG)
    with pytest.raises(OSError, match="on fire"):
        asyncio.run(serve(engine))


def test_what_was_never_opened_is_closed_already() -> None:
    with Engine(TARGET, vocabulary=VOCABULARY, config=CONFIG) as engine:
        serving = AsyncEngine(engine)
        asyncio.run(serving.close())
        assert serving.failure is None


def test_half_a_line_ends_a_recording_and_no_request(tmp_path: Path) -> None:
    recorder = Recorder(Recording(tmp_path / "run.jsonl"), {})
    assert recorder._file is not None
    recorder._file.close()
    recorder._file = io.FileIO("/dev/full", "wb")
    with pytest.warns(RuntimeWarning, match="the recording .* ends here: .*No space left"):
        recorder.write("submit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.write("submit")
    assert not recorder.close(), "it ended by itself"
