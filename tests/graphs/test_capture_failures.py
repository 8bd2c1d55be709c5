"""Graphs that cannot be captured, and graphs for which there is no memory: told of, and served by what is there."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from stepgraph import Engine, EngineConfig, Job
from stepgraph.graphs import CaptureError, TapeBackend
from stepgraph.graphs.graph_set import CaptureBudget
from stepgraph.graphs.shapes import GraphKey
from tests.helpers.toy_engines import CONSTRAINTS, DRAFTERS, TARGET, VOCABULARY, plain

CONFIG = EngineConfig(
    max_rows=4,
    buckets=(2, 4),
    num_speculative_tokens=2,
    max_length=48,
    page_size=8,
    greedy_only=True,
    backend="tape",
    compile_isolation="none",
    host_link="python",
)
KEYS = [GraphKey(rows, constrained) for rows in (4, 2) for constrained in (True, False)]  # in the order of the capture


class Refusing(TapeBackend):
    """Some of its captures fail, counted from 1."""

    def __init__(self, *failing: int, error: Exception | None = None) -> None:
        super().__init__(asynchronous=True)
        self.failing, self.captures = failing, 0
        self.error = error or CaptureError("host-sync", "planted fault", "model.py", 7, "x.item()")

    def capture(self, *arguments: Any, **options: Any) -> Any:
        self.captures += 1
        if self.captures in self.failing:
            raise self.error
        return super().capture(*arguments, **options)


def make(backend: TapeBackend | None = None, **others: Any) -> Engine:
    return Engine(
        TARGET,
        DRAFTERS["fair"](),
        vocabulary=VOCABULARY,
        config=replace(CONFIG, **others),
        backend=backend or TapeBackend(asynchronous=True),
    )


def serve(engine: Engine, rows: int, grammar: int) -> None:
    """A batch of so many rows, each token for token what plain decoding says."""
    engine.compile(CONSTRAINTS[1])
    jobs: list[Job] = [engine.submit([row, 5], constraint=CONSTRAINTS[grammar], max_new_tokens=8) for row in range(rows)]
    for _ in engine.stream():
        pass
    for row, job in enumerate(jobs):
        assert job.tokens == plain([row, 5], 8, CONSTRAINTS[grammar]).tokens


def test_a_graph_that_cannot_be_captured_is_served_by_a_larger_one_or_eagerly() -> None:
    with make(Refusing(1, 4), on_capture_failure="eager") as engine:  # rows=4 constrained and rows=2 free
        report = engine.capture()
        assert [key for key, _ in report.keys] == [KEYS[1], KEYS[2]]
        assert [(one.key, one.served_by) for one in report.failed] == [(KEYS[0], None), (KEYS[3], KEYS[1])]
        assert all("[host-sync] planted fault\n  model.py:7" in one.why for one in report.failed)
        assert f"{KEYS[0]} is not captured, its batches are run eagerly: [host-sync] planted fault" in str(report)
        assert f"{KEYS[3]} is not captured, its batches are replayed as {KEYS[1]}: [host-sync] planted fault" in str(report)
        assert json.loads(json.dumps(report.as_dict()))["failed"][0]["key"]["rows"] == 4
        serve(engine, 2, 0)
        stats = engine.stats()
        (graph,) = stats.graphs
        assert (graph.key, graph.padded_rounds, stats.eager_rounds, stats.replays) == (KEYS[1], graph.rounds, 0, graph.rounds)
        serve(engine, 4, 1)
        stats = engine.stats()
        eager = next(graph.rounds for graph in stats.graphs if graph.key == KEYS[0])
        assert stats.eager_rounds == eager > 0 and stats.replays == stats.rounds - eager
        assert stats.eager_reason == "not captured: [host-sync] planted fault"
        with pytest.raises(ValueError, match="or with graphs that could not be captured"), engine.trace():
            pass


def test_by_default_a_capture_that_fails_raises_and_leaves_the_engine_as_it_was() -> None:
    with make(Refusing(3)) as engine:
        with pytest.raises(CaptureError, match="planted fault"):
            engine.capture()
        with pytest.raises(RuntimeError, match="nothing is captured"):
            engine.step()
        assert len(engine.capture().keys) == len(KEYS), "the fault is gone"
        serve(engine, 1, 1)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_names_the_graph_and_what_to_lower(error: Exception) -> None:
    told = r"\[memory\] rows=4 constrained greedy needs more memory than available .*; lower max_rows"
    with make(Refusing(1, error=error)) as engine, pytest.raises(CaptureError, match=told):
        engine.capture()


def test_error_of_the_step_names_the_graph_and_is_chained() -> None:
    with make(Refusing(1, error=TypeError("a bug")), on_capture_failure="eager") as engine:
        with pytest.raises(RuntimeError, match=f"capture of {KEYS[0]}: the step raised TypeError: a bug") as caught:
            engine.capture()
        assert isinstance(caught.value.__cause__, TypeError) and not isinstance(caught.value, CaptureError)


def test_a_budget_refuses_before_it_is_spent() -> None:
    with make() as engine:
        report = engine.capture()
        graphs, buffers = sum(one.nbytes for _, one in report.keys), report.buffer_bytes
    backend = Refusing()
    with make(backend, capture_bytes=buffers + graphs // 2) as engine:
        with pytest.raises(CaptureError) as caught:
            engine.capture()
        assert backend.captures == 2, "the two smallest, for what they take"
        told = str(caught.value)
        assert f"capture_bytes: got {buffers + graphs // 2:,}, need about " in told and f"{buffers:,} bytes of static buffers" in told
        assert "lower max_rows, buckets" in told
    with make(capture_bytes=(buffers + graphs) * 21 // 20) as engine:
        (note,) = [note for note in engine.capture().notes if note.startswith("memory: about")]
        about = int(note.split()[2].replace(",", ""))
        assert abs(about - buffers - graphs) < graphs * 0.05, "an estimate from the two smallest"
    with make(capture_bytes=buffers + graphs // 2, on_capture_failure="eager") as engine:
        report = engine.capture()
        assert sum(one.nbytes for _, one in report.keys) <= graphs // 2
        assert report.failed and all("[memory] capture_bytes: got" in one.why for one in report.failed)
        serve(engine, 4, 1)


def test_a_graph_that_takes_more_than_was_estimated_is_dropped() -> None:
    key, budget = GraphKey(4, False), CaptureBudget(1000, 400, pooled=True)
    budget.learn([(1, 100), (2, 150)])
    assert budget.estimate([key, GraphKey(2, False)]) == 400 + 250, "in one pool the largest is all"
    budget.check_next(key)
    with pytest.raises(CaptureError, match=r"capture_bytes: got 1,000, rows=4 free greedy needs 601, and 400 are used"):
        budget.add(key, 601)
    budget.add(key, 600)


def test_graphs_that_fit_into_the_pool_of_a_larger_one_take_no_more() -> None:
    budget = CaptureBudget(700, 400, pooled=True)
    budget.learn([(1, 100), (2, 150)])
    for key, nbytes in ((GraphKey(4, False), 250), (GraphKey(2, False), 0)):
        budget.check_next(key)
        budget.add(key, nbytes)
    with pytest.raises(CaptureError, match=r"rows=8 free greedy would need about 200, and 650 are used"):
        budget.check_next(GraphKey(8, False))
    alone = CaptureBudget(700, 400, pooled=False)
    alone.learn([(1, 100), (2, 150)])
    alone.add(GraphKey(4, False), 250)
    with pytest.raises(CaptureError, match=r"rows=2 free greedy would need about 150, and 650 are used"):
        alone.check_next(GraphKey(2, False))


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("on_capture_failure", "ignore", "want 'raise' or 'eager'"),
        ("capture_bytes", 0, "want a whole number >= 1, or None"),
        ("capture_bytes", True, "want a whole number >= 1, or None"),
    ],
)
def test_what_is_no_choice_is_refused_by_name(field: str, value: object, wanted: str) -> None:
    with pytest.raises(ValueError, match=rf"EngineConfig\.{field}: got {value!r}, {wanted}"):
        EngineConfig(**{field: value})  # type: ignore[arg-type]
