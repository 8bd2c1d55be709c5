"""An engine on the real torch. Kernels do nothing, so the test writes the results that a round would have left on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.stub_cuda import counters
from tests.stub_cuda.device import set_result
from tests.stub_cuda.subject import Constraint, Engine, greedy_engine

RUNNING = 1  # FinishCode


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = greedy_engine()
    yield made
    made.close()


def test_greedy_engine_captures_every_key(engine: Engine) -> None:
    counters.take_messages()
    report = engine.capture()
    assert report.keys and not report.failed
    assert not counters.take_messages()


def test_fifty_constrained_rounds_allocate_nothing_wait_for_nothing_and_launch_one_graph_each(engine: Engine, record_property) -> None:
    engine.submit(list(range(1, 20)), max_new_tokens=200, constraint=Constraint.regex("[a-f]{150,200}"))
    results = np.zeros(engine.buffers.results.shape)
    results[:, 1] = RUNNING  # of every batch slot: no token, and it goes on
    set_result(engine.buffers.results, results)
    while not engine.stats().rounds:  # compilation of the grammar, the prompt, the first round
        engine.step()
    for _ in range(3):
        engine.step()
    before = engine.stats().rounds
    with counters.counted() as counts:
        for _ in range(50):
            engine.step()
    rounds = engine.stats().rounds - before
    assert rounds == 50
    assert counts["graph_launches"] == 50
    assert not counts.of(counters.ALLOCATIONS)
    assert not counts.of(
        ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize", "cuCtxSynchronize", "cudaMemcpy", "cudaFree")
    )
    for name, count in sorted(counts.items()):
        record_property(name, count)
    print({name: count / 50 for name, count in sorted(counts.items())})
