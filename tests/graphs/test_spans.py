"""Names of stages in reports, and ranges for a profiler."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from types import FrameType
from typing import Any

import pytest
import torch

from stepgraph import Engine, EngineConfig
from stepgraph.graphs import BufferSpec, RecordedReport, StaticBuffers, TapeBackend, capture, current_context, run_eager
from stepgraph.graphs.backends import EagerContext
from stepgraph.graphs.context import FirstError
from stepgraph.graphs.cuda.context import CudaCaptureContext
from stepgraph.graphs.spans import DEFAULT_STAGE, StageRun, stage_runs
from stepgraph.runtime.models.toy import ToyTarget
from tests.helpers.toy_engines import CONSTRAINTS, DRAFTERS, TARGET, VOCABULARY

CONSTRAINT = CONSTRAINTS[3]  # a-c, then maybe x


class Ranges:
    """A profiler that records every range with its enclosing ranges."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, ...]] = []
        self._open: tuple[str, ...] = ()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before, self._open = self._open, (*self._open, name)
        self.begun.append(self._open)
        yield
        self._open = before


def small_engine(k: int, drafter: str = "fair", *, backend: TapeBackend | None = None, **others: Any) -> Engine:
    sizes = {"max_rows": 1, "num_speculative_tokens": k, "draft_length": k, "max_length": 64, "page_size": 8, "greedy_only": True}
    config = EngineConfig(**sizes, compile_isolation="none", backend="tape", grammar_lane="host", **others)  # type: ignore[arg-type]
    engine = Engine(TARGET, DRAFTERS[drafter](), vocabulary=VOCABULARY, config=config, backend=backend)
    engine.capture()
    return engine


def report_of(engine: Engine, constrained: bool) -> RecordedReport:
    return engine._graphs[engine._graphs.key_for(1, constrained, False)].report


def names(report: RecordedReport, stream: str) -> list[str]:
    """The stages and host nodes of a recording on one stream, in order."""
    return [name for name, _ in groupby(run.name for run in report.stages if run.stream == stream)]


def node_counts(report: RecordedReport) -> tuple[int, int]:
    """Nodes in the stages of a report, and nodes of kinds that a CUDA graph has as well."""
    return sum(run.nodes for run in report.stages), sum(count for kind, count in report.nodes.items() if kind != "wait")


VERIFY = ["show verify", "verify", "place verify", "check verify"]
SHOWN = [*VERIFY, *(f"{verb}{node}" for node in ("commit", "advance 1", "advance 2") for verb in ("show ", "", "place "))]
DRAFTED = ["draft_prefill", "choose_draft 1", "draft_decode 1", "choose_draft 2", "draft_decode 2", "choose_draft 3", "store_chain"]


def test_report_has_the_stages_of_a_round_in_order() -> None:
    with small_engine(3) as engine:
        reports = {constrained: report_of(engine, constrained) for constrained in (True, False)}
    for constrained, report in reports.items():
        assert names(report, "main") == ["read_batch", "target_verify", "accept", *DRAFTED]
        assert names(report, "side") == (SHOWN if constrained else [])
        assert tuple(run.name for run in report.stages if run.kind == "host") == report.host_nodes
        assert all(run.nodes == 1 for run in report.stages if run.kind == "host")
        assert len(set(node_counts(report))) == 1, "every node has a stage"


def test_stages_of_proposed_and_unmasked_rounds() -> None:
    reports = []
    for drafter, option, on in (("ngram", "forced_drafts", True), ("ngram", "forced_drafts", False), ("fair", "draft_masks", False)):
        options: dict[str, Any] = {option: on}
        with small_engine(2, drafter, **options) as engine:
            reports.append(report_of(engine, True))
    masked, free, unmasked = reports
    followed = ["show follow", "follow", "place follow", "choose_drafts"]
    assert names(masked, "main") == ["read_batch", "target_verify", "accept", "propose", *followed, "propose"]
    assert names(masked, "side") == VERIFY
    assert names(free, "main") == ["read_batch", "target_verify", "accept", "propose"]
    assert names(free, "side") == names(unmasked, "side") == VERIFY
    assert all(len(set(node_counts(report))) == 1 for report in reports)


def small_step(buffers: StaticBuffers) -> None:
    context = current_context()
    buffers.x.add_(1)
    with context.stage("outer"):
        buffers.x.mul_(2)
        with context.stage("inner"):
            buffers.x.neg_()
        begun = context.record()
        with context.stream("side"):
            context.wait(begun)
            buffers.there_host.copy_(buffers.x, non_blocking=True)
            context.host_node("think", lambda: None, reads=[buffers.there_host])
            done = context.record()
        buffers.y.sub_(3)  # beside the copy
    context.wait(done)


def small_buffers() -> StaticBuffers:
    specs = [BufferSpec(name, (2,), torch.float32) for name in ("x", "y")]
    return StaticBuffers([*specs, BufferSpec("there_host", (2,), torch.float32, "pinned")])


def test_nodes_belong_to_the_innermost_stage_or_the_step() -> None:
    expected = [
        StageRun("main", DEFAULT_STAGE, "stage", 1),
        StageRun("main", "outer", "stage", 1),
        StageRun("main", "inner", "stage", 1),
        StageRun("side", "outer", "stage", 1),
        StageRun("side", "think", "host", 1),
        StageRun("main", "outer", "stage", 1),
    ]
    assert list(capture(small_step, small_buffers(), "tape").report.stages) == expected


def test_host_nodes_are_separate_runs() -> None:
    label, node = StageRun("main", "a"), StageRun("main", "a", "host")
    assert [run.nodes for run in stage_runs([label, label, node, node, label])] == [2, 1, 1, 1]
    assert stage_runs([]) == ()


def test_eager_run_has_a_range_per_stage_and_host_node() -> None:
    ranges = Ranges()
    run_eager(small_step, small_buffers(), ranges)
    assert ranges.begun == [("outer",), ("outer", "inner"), ("outer", "think")]


def test_ranges_of_replayed_and_eager_rounds() -> None:
    for eager in (False, True):
        ranges = Ranges()
        engine = small_engine(2, eager=eager, backend=TapeBackend(ranges=ranges))
        with engine:
            engine.generate([1, 2, 3], constraint=CONSTRAINT, max_new_tokens=6)
            rounds = engine.stats().rounds
            key = engine._graphs.key_for(1, True, False)
        outer = [begun[0] for begun in ranges.begun if len(begun) == 1]
        assert outer == [f"round {number}: {key}" for number in range(rounds)]
        inside = [begun[1] for begun in ranges.begun if begun[0] == outer[0] and len(begun) == 2]
        order = ["read_batch", *VERIFY, "target_verify", "accept"]
        assert inside[: len(order)] == (order if eager else [])


def calls_of(functions: tuple[Callable[..., object], ...], work: Callable[[], object]) -> int:
    """Number of calls of these functions by `work` on this thread."""
    codes, count = {function.__code__ for function in functions}, 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code in codes

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("eager", [False, True])
def test_round_without_ranges_creates_no_context_managers(eager: bool) -> None:
    makers = (torch.cuda.nvtx.range.__wrapped__, Ranges.__call__.__wrapped__, contextlib.nullcontext.__init__)  # type: ignore[attr-defined]
    counts = []
    for ranges in (None, Ranges()):
        with small_engine(2, eager=eager, backend=TapeBackend(ranges=ranges)) as engine:
            engine.submit([1, 2, 3], max_new_tokens=40)
            engine.step()
            counts.append(calls_of(makers, engine.step))
    assert counts[0] == 0
    assert counts[1] == 2 * (9 if eager else 1)  # a range is entered and left; an eager round has eight stages


def test_eager_stages_without_ranges_share_one_object() -> None:
    context = EagerContext()
    assert context.stage("a") is context.stage("b") is context.stream("side")


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build of torch with CUDA has NVTX")
@pytest.mark.parametrize("by", ["config", "environment"])
def test_nvtx_without_support_raises_value_error(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "environment":
        monkeypatch.setenv("STEPGRAPH_NVTX", "1")
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, nvtx=by == "config")
    with pytest.raises(ValueError, match=r"EngineConfig\.nvtx: got True, expected False: torch .* has no NVTX"):
        Engine(ToyTarget(8), config=config)


def test_nvtx_must_be_a_bool() -> None:
    with pytest.raises(ValueError, match=r"EngineConfig\.nvtx: got 1, expected True or False"):
        EngineConfig(nvtx=1)  # type: ignore[arg-type]


class CountingDriver:
    """The driver calls that CudaCaptureContext needs to label nodes."""

    def __init__(self) -> None:
        self.nodes = 0

    def captured_nodes(self, stream: int) -> int:
        return self.nodes

    def cuLaunchHostFunc(self, stream: int, address: int, data: int) -> None:
        self.nodes += 1


class OneStream:
    cuda_stream = 1

    def __getitem__(self, name: str) -> OneStream:
        return self


def test_cuda_context_labels_captured_nodes() -> None:
    driver, ranges = CountingDriver(), Ranges()
    context = CudaCaptureContext(driver, OneStream(), small_buffers(), FirstError(), launch_host=True, ranges=ranges)  # type: ignore[arg-type]
    driver.nodes += 2
    with context.stage("outer"):
        driver.nodes += 1
        with context.stage("inner"):
            driver.nodes += 3
        context.host_node("think", lambda: None)
        driver.nodes += 1
    driver.nodes += 1
    context.label_nodes()
    found = [(run.name, run.kind, run.nodes) for run in stage_runs(context.labels)]
    outer, think = ("outer", "stage", 1), ("think", "host", 1)
    assert found == [(DEFAULT_STAGE, "stage", 2), outer, ("inner", "stage", 3), think, outer, (DEFAULT_STAGE, "stage", 1)]
    assert ranges.begun == [("outer",), ("outer", "inner"), ("outer", "think")]
    with pytest.raises(ValueError, match=r"^host_node\.reads and writes of 'think': got 'x', expected tensors of pinned buffers"):
        context.host_node("think", lambda: None, reads="x")  # type: ignore[arg-type]
