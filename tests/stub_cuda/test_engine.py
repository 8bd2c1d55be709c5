"""An engine on the real torch. Kernels do nothing, so the test writes the results that a round would have left on the device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from stepgraph import SamplingParams
from stepgraph.graphs.cuda.backend import CudaBackend
from stepgraph.graphs.graph_set import CaptureReport
from stepgraph.graphs.memory import available_bytes
from stepgraph.graphs.publishing import FINISH_COLUMN
from tests.helpers.failing_copies import FailingCopies
from tests.stub_cuda import counters
from tests.stub_cuda.subject import Constraint, Engine, greedy_engine

RUNNING = 1  # FinishCode
ROUNDS = 400


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = greedy_engine()
    yield made
    made.close()


@pytest.fixture(scope="module")
def report(engine: Engine) -> CaptureReport:
    counters.take_messages()
    return engine.capture()


def test_greedy_engine_captures_every_key(report: CaptureReport) -> None:
    assert report.keys and not report.failed
    assert not counters.take_messages()


def test_arguments_of_every_captured_kernel_are_known(engine: Engine, report: CaptureReport) -> None:
    kernels = [node for graph in counters.live_graphs() for node in counters.graph_nodes(graph) if node.type == "kernel"]
    assert len(kernels) == sum(recorded.nodes["kernel"] for _, recorded in (*report.keys, *report.prompts)) > 0
    assert {node.name for node in kernels if node.arguments is None} == set()
    of_triton = {node.name: node for node in kernels if "::" not in node.name}
    assert {"masked_candidates", "take_best", "accept_chain"} <= set(of_triton)
    masks = engine.buffers.row_masks
    pointers = {node.pointer(1) for node in kernels if node.name == "masked_candidates"}
    assert pointers & set(range(masks.data_ptr(), masks.data_ptr() + masks.numel() * masks.element_size()))


DRAWN = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, frequency_penalty=0.5, logprobs=True)
DEVICE_LANE = {"grammar_backend": "automaton", "grammar_lane": "device", "grammar_arena_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("config", "constrained", "sampling", "host_nodes"),
    [
        ({}, True, None, 3),
        ({}, False, None, 0),
        (DEVICE_LANE, True, None, 0),
        ({"greedy_only": False, "filters": "triton"}, True, DRAWN, 3),
        ({"greedy_only": False, "filters": "triton"}, False, DRAWN, 0),
    ],
    ids=["constrained", "free", "device", "constrained sampled", "sampled"],
)
def test_four_hundred_rounds_allocate_nothing_and_launch_one_graph_each(
    config: dict[str, object], constrained: bool, sampling: SamplingParams | None, host_nodes: int
) -> None:
    engine = greedy_engine(**config)
    engine.capture()
    constraint = Constraint.regex("[a-f]{150,200}") if constrained else None
    engine.submit(list(range(1, 20)), max_new_tokens=200, constraint=constraint, sampling=sampling)
    engine.buffers.results_ring_host[..., FINISH_COLUMN] = RUNNING  # of every batch slot: no token, and the row continues
    while not engine.stats().rounds:  # compilation of the grammar, the prompt, the first round
        engine.step()
    for _ in range(3):
        engine.step()
    before = engine.stats().rounds
    with counters.counted() as counts:
        for _ in range(ROUNDS):
            engine.step()
    assert engine.stats().rounds - before == ROUNDS
    assert counts["graph_launches"] == ROUNDS
    assert not counts.of(counters.ALLOCATIONS)
    assert counts.of(counters.SYNCS) == {"cuEventSynchronize": ROUNDS}  # the results of an earlier round
    assert not counts.of(counters.EAGER), "the graph reads its batch and writes its results"
    assert host_nodes * (ROUNDS - 1) <= counts["executed_host_nodes"] <= host_nodes * (ROUNDS + 1)  # some may be under way
    assert not counts.of(counters.LIVE)
    engine.close()


def test_pages_take_a_share_of_the_free_memory() -> None:
    gc.collect()  # engines of other tests
    share, free_bytes = 1e-4, available_bytes(torch.device("cuda", 0))
    assert free_bytes is not None
    with greedy_engine(num_pages=share) as engine:
        caches = sum(engine.buffers[name].nbytes for name in engine.buffers if name.endswith("cache"))
        assert 0.999 * share * free_bytes < caches <= share * free_bytes, "the models take a little first"
        assert engine.config.num_pages == engine.limits.num_pages == engine.stats().pages > 1000
    with pytest.raises(ValueError, match=r"EngineConfig.num_pages: got 1e-12 of [\d,]+ free bytes, expected a share for 32 pages of"):
        greedy_engine(num_pages=1e-12)


def test_rounds_with_grammars_on_the_device_have_no_host_node_and_no_copy_of_their_own() -> None:
    device = greedy_engine(**DEVICE_LANE)
    captured = {str(key): report for key, report in device.capture().keys}
    free, lane, host = (captured[f"rows=2 {kind} greedy"] for kind in ("free", "device", "constrained"))
    assert (len(lane.host_nodes), len(host.host_nodes)) == (0, 3)
    assert lane.nodes.get("copy", 0) == free.nodes.get("copy", 0) < host.nodes["copy"]
    kernels = [node for graph in counters.live_graphs() for node in counters.graph_nodes(graph) if node.name == "advance_rows"]
    assert len(kernels) == 3 * 3 and all(node.arguments is not None for node in kernels), "K + 1 in each constrained graph"
    device.submit(list(range(1, 20)), max_new_tokens=200, constraint=Constraint.regex("[a-f]{150,200}"))
    device.buffers.results_ring_host[..., FINISH_COLUMN] = RUNNING
    while not device.stats().rounds:
        device.step()
    with counters.counted() as counts:
        for _ in range(20):
            device.step()
    assert counts["graph_launches"] == 20 and counts["executed_host_nodes"] == 0 and not counts.of(counters.ALLOCATIONS)
    assert not counts.of(counters.EAGER)
    assert [graph.key.device for graph in device.stats().graphs] == [True]
    device.close()


@pytest.mark.parametrize("missing", ["", "wait of the round", "wait of the copy"])
def test_grammars_are_copied_beside_rounds_and_ordered_with_them(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "wait of the round":
        monkeypatch.setattr(CudaBackend, "wait_for", lambda self, copied: None)
    elif missing:
        copy_aside = CudaBackend.copy_aside
        monkeypatch.setattr(CudaBackend, "copy_aside", lambda self, copy, *, after_launched: copy_aside(self, copy, after_launched=False))
    device = greedy_engine(grammar_backend="automaton", grammar_lane="device", grammar_arena_bytes=8192, num_speculative_tokens=1)
    device.capture()
    device.buffers.results_ring_host[..., FINISH_COLUMN] = RUNNING
    prompts = (list(range(start, start + 19)) for start in (1, 40, 80))
    device.submit(next(prompts), max_new_tokens=200)
    counters.take_issued(more=True)
    for digits in (150, 160):  # tables of about 5,800 bytes: the arena has room for one
        constraint = Constraint.regex(f"[a-f]{{{digits},200}}[0-9]{{{digits}}}")
        job = device.submit(next(prompts), max_new_tokens=200, constraint=constraint)
        while not job.rounds:
            device.step()
        assert job.grammar_lane == "device"
        device.cancel(job)
    assert device.stats().lanes.evicted == 1, "the second grammar has the memory of the first one"
    issued, arena = counters.take_issued(more=False), device.buffers.grammar_arena
    device.close()
    first = counters.before(issued)
    copies = [index for index, each in enumerate(issued) if 0 <= each.subject - arena.data_ptr() < arena.nbytes]
    graphs = [index for index, each in enumerate(issued) if each.kind == "graph"]
    assert len(copies) == 2 and {issued[index].kind for index in copies} == {"eager_copies"}
    unordered = [[index for index in graphs if index > copy and copy not in first[index]] for copy in copies]
    prompts_only = [[next(index for index in graphs if index > copy)] for copy in copies]
    early = [index for index in graphs if index < copies[1] and index not in first[copies[1]]]
    if missing == "wait of the round":
        assert unordered[0] != prompts_only[0], "rounds that read the grammar do not wait for its copy"
    else:
        assert unordered == prompts_only, "only the graph of the prompt runs beside the copy"
    assert bool(early) == (missing == "wait of the copy"), "rounds that may read the memory end before the copy"


def test_a_copy_of_a_grammar_that_fails_ends_only_its_request() -> None:
    engine = greedy_engine(grammar_backend="automaton", grammar_lane="device", num_speculative_tokens=1)
    engine.capture()
    engine.buffers.results_ring_host[..., FINISH_COLUMN] = RUNNING
    first = engine.submit(list(range(1, 20)), max_new_tokens=200)
    constraint = engine.compile(Constraint.regex("[a-f]{150,200}[0-9]{150}"))
    failed = engine.submit(list(range(1, 30)), max_new_tokens=200, constraint=constraint)
    with FailingCopies(engine.buffers.grammar_arena, 1):
        while not failed.finished:
            engine.step()
    assert (failed.finish_reason, failed.grammar_lane, failed.tokens) == ("error", "device", []) and "no memory for a copy" in failed.error
    rounds, later = first.rounds, engine.submit(list(range(1, 30)), max_new_tokens=200, constraint=constraint)
    while not later.rounds:
        engine.step()
    assert first.rounds > rounds and later.grammar_lane == "device" and engine.stats().running == 2
    engine.close()


def all_memory() -> list[torch.Tensor]:
    """Takes the memory of the device, in ever smaller parts."""
    held = list[torch.Tensor]()
    for nbytes in (1 << 30, 1 << 21, 512):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
    return held


def test_a_request_without_memory_on_the_device_ends_alone() -> None:
    engine = greedy_engine()
    engine.capture()
    engine.buffers.results_ring_host[..., FINISH_COLUMN] = RUNNING
    first = engine.submit(list(range(1, 20)), max_new_tokens=200)
    while not first.rounds:
        engine.step()
    held = all_memory()
    failed = engine.submit(list(range(1, 30)), max_new_tokens=200)
    while not failed.finished:
        engine.step()
    assert (failed.finish_reason, failed.tokens) == ("error", []) and "out of memory" in failed.error
    rounds = first.rounds
    held.clear()
    later = engine.submit(list(range(1, 30)), max_new_tokens=200)
    while not later.rounds:
        engine.step()
    assert first.rounds > rounds and engine.stats().running == 2
    engine.close()
    assert "out of memory" in counters.take_messages()[0]  # the tests that follow expect none


def test_close_with_a_time_limit_leaves_nothing() -> None:
    """It waits for the stream of copies, which was not used before."""
    with greedy_engine(round_timeout_seconds=60.0) as engine:
        engine.capture()
    assert not counters.take_messages()
