"""tools/bench_parallel.py: the messages of a step are those of the layers, and the processor time of coordination is printed."""

from __future__ import annotations

import json

import pytest

from stepgraph.graphs.layers import parallel
from stepgraph.runtime.parallel.ranks import Ranks
from tests.helpers.command_models import model_folder
from tools import bench_parallel
from tools.bench_parallel import ROWS


@pytest.mark.slow
def test_ranks_are_measured_by_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    before = parallel.gather, Ranks.publish
    assert bench_parallel.main([str(model_folder()), "--tokens", "40", "--turns", "1"]) == 0
    assert before == (parallel.gather, Ranks.publish)
    printed = capsys.readouterr().out
    (found,) = json.loads(printed.splitlines()[-1])["models"]
    layers, width = 2, 32  # of the model
    assert found["same_tokens"] and found["steps"] == 39
    messages = 1 + 2 * layers + 1  # of embeddings, attention and MLP of each layer, and the choice of tokens
    sent, in_flight = ROWS * 4 * ((1 + 2 * layers) * width + 2), 2 / 39  # rounds that began before the first step, or at its end
    assert found["messages_per_step"] == pytest.approx(messages, rel=in_flight)
    assert found["sent_bytes_per_step"] == pytest.approx(sent, rel=in_flight)
    assert found["coordination_ms"]["processor_mean"] > 0 and found["coordination_ms"]["goal"] == 0.2
    assert "coordination of a step: " in printed and "divided over whole: " in printed
