"""Timelines: each stage, host node and wait appears once, times add up, files agree with them, and tokens do not change."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stepgraph import Constraint, Engine, EngineConfig, SamplingParams
from stepgraph.graphs import TapeBackend
from stepgraph.graphs.context import MAIN
from stepgraph.graphs.spans import BETWEEN_ROUNDS, LAUNCHING_THREAD, NO_ROUND, Span
from stepgraph.graphs.tape.backend import Tape
from stepgraph.graphs.tape.player import Segment
from stepgraph.runtime.trace import Timeline, covered, total_length, union
from tests.helpers.toy_engines import DRAFTERS, TARGET, VOCABULARY

ROUNDS, SIDE = 5, "side"
ASK: dict[str, Any] = {"constraint": Constraint.regex("[a-z]{50,60}"), "max_new_tokens": 50}


def small_engine(backend: TapeBackend | None = None, drafter: str = "fair", capture: bool = True, **others: Any) -> Engine:
    sizes: dict[str, Any] = {"max_rows": 1, "num_speculative_tokens": 3, "draft_length": 3, "max_length": 96, "page_size": 8}
    config = EngineConfig(**sizes | others, greedy_only=True, compile_isolation="none", backend="tape", grammar_lane="host")
    engine = Engine(TARGET, DRAFTERS[drafter](), vocabulary=VOCABULARY, config=config, backend=backend)
    if capture:
        engine.capture()
    return engine


class Traced(NamedTuple):
    engine: Engine
    timeline: Timeline
    tokens: tuple[list[int], ...]  # of the same request before, during and after the trace
    first_round: int
    tape: Tape


@pytest.fixture(scope="module", params=["fair", "ngram"])
def traced(request: pytest.FixtureRequest) -> Iterator[Traced]:
    with small_engine(drafter=request.param) as engine:
        before = engine.generate([1, 2, 3], **ASK).tokens
        first_round = engine.stats().rounds
        with engine.trace(rounds=ROUNDS) as trace:
            during = engine.generate([1, 2, 3], **ASK).tokens
        after = engine.generate([1, 2, 3], **ASK).tokens
        tape = engine._graphs[engine._graphs.key_for(1, True, False)]
        assert isinstance(tape, Tape)
        yield Traced(engine, trace.timeline, (before, during, after), first_round, tape)


def of_round(timeline: Timeline, number: int, stream: str, *kinds: str) -> list[Span]:
    return [span for span in timeline.spans if (span.round, span.stream) == (number, stream) and span.kind in kinds]


def test_trace_changes_no_token_and_no_count(traced: Traced) -> None:
    assert len(traced.tokens[0]) > 30
    assert traced.tokens[0] == traced.tokens[1] == traced.tokens[2]
    stats = traced.engine.stats()
    assert stats.rounds == stats.replays > 2 * ROUNDS


def test_trace_has_the_requested_number_of_rounds(traced: Traced) -> None:
    assert traced.timeline.rounds == tuple(range(traced.first_round, traced.first_round + ROUNDS))
    launches = [span for span in traced.timeline.spans if span.kind == "launch"]
    assert [span.round for span in launches] == list(traced.timeline.rounds)


def test_a_trace_during_calibration_has_rounds_of_requests_only() -> None:
    """Without a capture, the first round of each kind follows measurements of every draft length."""
    with small_engine(capture=False, draft_length="auto") as engine, engine.trace(rounds=ROUNDS) as trace:
        engine.generate([1, 2, 3], max_new_tokens=40, sampling=SamplingParams(ignore_eos=True))
    timeline = trace.timeline
    assert timeline.rounds == tuple(range(ROUNDS)) and [each.round for each in timeline.lengths] == [*timeline.rounds]
    for each in timeline.lengths:
        names = {span.name for span in of_round(timeline, each.round, MAIN, "stage")}
        assert sum(name.startswith("choose_draft ") for name in names) == each.drafts, names


def test_spans_of_one_stream_do_not_overlap(traced: Traced) -> None:
    assert traced.timeline.streams == (MAIN, SIDE, LAUNCHING_THREAD)
    for stream in traced.timeline.streams:
        spans = sorted((span for span in traced.timeline.spans if span.stream == stream), key=lambda span: span.start_ns)
        assert all(span.start_ns <= span.end_ns for span in spans)
        assert all(first.end_ns <= second.start_ns for first, second in pairwise(spans))


def test_traced_rounds_have_all_stages_and_host_nodes_of_the_recording(traced: Traced) -> None:
    recorded = traced.tape.report
    for number in traced.timeline.rounds:
        for stream in (MAIN, SIDE):
            names = [name for name, _ in groupby(span.name for span in of_round(traced.timeline, number, stream, "stage", "host"))]
            assert names == [name for name, _ in groupby(run.name for run in recorded.stages if run.stream == stream)]
        hosts = [span.name for span in traced.timeline.spans if span.kind == "host" and span.round == number]
        assert hosts == list(recorded.host_nodes)
    counts = Counter((stage.name, stage.kind) for stage in traced.timeline.summary().stages)
    assert max(counts.values()) == 1
    each = {stage.name: stage.count for stage in traced.timeline.summary().stages if stage.kind == "host"}
    assert each == dict.fromkeys(recorded.host_nodes, ROUNDS)


def test_waits_end_after_the_work_they_wait_for(traced: Traced) -> None:
    for number in traced.timeline.rounds:
        ends = {span.name: span.end_ns for span in of_round(traced.timeline, number, SIDE, "host")}
        waits = of_round(traced.timeline, number, MAIN, "wait")
        assert [span.name for span in waits] == list(ends)
        assert all(span.end_ns >= ends[span.name] for span in waits)
        first: dict[str, int] = {}  # a stage may continue after the event that the other stream waits for
        for span in of_round(traced.timeline, number, MAIN, "stage"):
            first.setdefault(span.name, span.end_ns)
        assert all(span.end_ns >= first[span.name] for span in of_round(traced.timeline, number, SIDE, "wait"))


def test_one_host_node_on_the_main_stream_follows_a_proposed_chain() -> None:
    with small_engine(drafter="ngram", forced_drafts=True) as engine, engine.trace(rounds=ROUNDS) as trace:
        engine.generate([1, 2, 3], **ASK)
    for number in trace.timeline.rounds:
        assert [span.name for span in of_round(trace.timeline, number, MAIN, "host", "wait")] == ["verify", "follow"]
        assert [span.name for span in of_round(trace.timeline, number, SIDE, "host")] == ["verify"]


def test_summary_times_add_up(traced: Traced) -> None:
    summary = traced.timeline.summary()
    assert summary.rounds == ROUNDS
    assert 0 < summary.host_ns == summary.hidden_ns + summary.exposed_ns
    assert summary.host_ns == sum(stage.total_ns for stage in summary.stages if stage.kind == "host")
    assert 0 <= summary.exposed_wait_ns == sum(stage.total_ns for stage in summary.stages if (stage.stream, stage.kind) == (MAIN, "wait"))
    assert summary.share_hidden == summary.hidden_ns / summary.host_ns
    assert json.loads(json.dumps(summary.as_dict()))["share_hidden"] == summary.share_hidden
    assert f"{ROUNDS} rounds, median " in str(summary) and "hidden under" in str(summary)


def test_only_traced_replays_are_split_into_stages(traced: Traced) -> None:
    def stages(tape: Tape) -> list[bool]:
        return ["pieces" in vars(item) for program in tape._programs.values() for item in program if isinstance(item, Segment)]

    free = traced.engine._graphs[traced.engine._graphs.key_for(1, False, False)]
    assert isinstance(free, Tape)
    assert all(stages(traced.tape)) and not any(stages(free)), "never traced"


def test_host_node_concurrent_with_a_stage_is_counted_as_hidden() -> None:
    """The second segment of the main stream ends after the first host node, which ends after that segment has begun."""
    begun, ended = threading.Event(), threading.Event()
    calls: Counter[str] = Counter()

    def delay(name: str) -> None:
        if not armed.is_set():
            return
        calls[name] += 1
        if (name, calls[name]) == (MAIN, 2):
            begun.set()
            assert ended.wait(60)
        elif (name, calls[name]) == ("verify", 1):
            assert begun.wait(60)
        elif (name, calls[name]) == (SIDE, 2):  # the copies after the host node
            ended.set()

    armed = threading.Event()
    with small_engine(TapeBackend(asynchronous=True, delay=delay)) as engine:
        engine.compile(ASK["constraint"])
        engine.submit([1, 2, 3], **ASK)
        engine.step()
        engine.backend.synchronize()
        armed.set()
        with engine.trace(rounds=1) as trace:
            engine.step()
    (number,) = trace.timeline.rounds
    (node,) = [span for span in of_round(trace.timeline, number, SIDE, "host") if span.name == "verify"]
    (verify,) = [span for span in of_round(trace.timeline, number, MAIN, "stage") if span.name == "target_verify"]
    assert verify.start_ns < node.end_ns <= verify.end_ns
    assert trace.timeline.summary().hidden_ns > 0


def planted(late: int) -> Timeline:
    """One round: a stage of 100 ns, and a host node that starts with it and takes `late` ns longer."""
    spans = [Span(MAIN, "target_verify", "stage", 7, 0, 100), Span(SIDE, "verify", "host", 7, 0, 100 + late)]
    if late:
        spans.append(Span(MAIN, "verify", "wait", 7, 100, 100 + late))
    return Timeline((*spans, Span(MAIN, "accept", "stage", 7, 100 + late, 150 + late)))


def test_late_host_node_is_exposed_by_its_delay() -> None:
    hidden, late = planted(0).summary(), planted(30).summary()
    assert (hidden.host_ns, hidden.hidden_ns, hidden.exposed_ns, hidden.exposed_wait_ns, hidden.share_hidden) == (100, 100, 0, 0, 1.0)
    assert (late.host_ns, late.hidden_ns, late.exposed_ns, late.exposed_wait_ns) == (130, 100, 30, 30)
    assert (hidden.round_ns, late.round_ns) == (150, 180)


def test_idle_time_excludes_work_between_rounds() -> None:
    spans = [Span(MAIN, "a", "stage", number, 1000 * number, 1000 * number + 400) for number in (3, 4, 5)]
    outside = Span(MAIN, BETWEEN_ROUNDS, "stage", NO_ROUND, 3500, 3650)
    assert Timeline((*spans, outside)).summary().idle_ns == 600 + 600 - 150
    assert Timeline((outside,)).summary().rounds == 0
    empty = Timeline(()).summary()
    assert (empty.rounds, empty.round_ns, empty.host_nodes, empty.share_hidden) == (0, 0, 0, None)
    assert "no host nodes" in str(empty)


def test_covered_time_agrees_with_counting_nanoseconds() -> None:
    pick = random.Random(5)
    for _ in range(300):
        intervals = [(start, start + pick.randint(0, 9)) for start in (pick.randint(0, 40) for _ in range(pick.randint(0, 6)))]
        start = pick.randint(0, 40)
        window = (start, start + pick.randint(0, 20))
        busy = {at for begin, end in intervals for at in range(begin, end)}
        joined = union(intervals)
        assert total_length(joined) == len(busy)
        assert covered(window, joined) == sum(at in busy for at in range(*window))


def test_perfetto_file_agrees_with_the_timeline(traced: Traced, tmp_path: Path) -> None:
    traced.timeline.save_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(named.values()) == list(traced.timeline.streams)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(traced.timeline.spans)
    begin = min(span.start_ns for span in traced.timeline.spans)
    for event, span in zip(slices, traced.timeline.spans, strict=True):
        assert (named[event["tid"]], event["cat"], event["args"]["round"]) == (span.stream, span.kind, span.round)
        assert event["name"].removeprefix("wait for ") == span.name
        assert event["ts"] * 1000 == pytest.approx(span.start_ns - begin, abs=1)
        assert event["dur"] * 1000 == pytest.approx(span.end_ns - span.start_ns, abs=1)
    arrows = {phase: {event["id"]: event for event in events if event["ph"] == phase} for phase in "sf"}
    assert len(arrows["s"]) == sum(span.kind == "wait" and span.stream == MAIN for span in traced.timeline.spans)
    for number, tail in arrows["s"].items():
        head = arrows["f"][number]
        assert head["ts"] >= tail["ts"]
        for end, kind in ((tail, "host"), (head, "wait")):
            inside = [s["cat"] for s in slices if s["tid"] == end["tid"] and s["ts"] <= end["ts"] <= s["ts"] + s["dur"]]
            assert kind in inside


@pytest.mark.parametrize("rounds", [0, -1, True, 2.0, None])
def test_trace_refuses_invalid_numbers_of_rounds(traced: Traced, rounds: Any) -> None:
    with pytest.raises(ValueError, match=r"Engine\.trace\.rounds: got .*, expected a whole number >= 1"), traced.engine.trace(rounds):
        pass


def test_timeline_is_available_after_the_block_and_traces_do_not_nest(traced: Traced) -> None:
    with traced.engine.trace(rounds=1) as trace:
        with pytest.raises(RuntimeError, match="before the with block"):
            _ = trace.timeline
        with pytest.raises(RuntimeError, match="a trace is already running"), traced.engine.trace():
            pass
    assert trace.timeline.rounds == ()
    with pytest.raises(KeyError), traced.engine.trace(rounds=1):
        raise KeyError("the block's own failure")
    with traced.engine.trace(rounds=1):
        pass


def test_trace_refuses_eager_engines_and_survives_close() -> None:
    with small_engine(eager=True) as engine, pytest.raises(ValueError, match=r"EngineConfig\.eager=True"), engine.trace():
        pass
    engine = small_engine()
    with engine.trace(rounds=2) as trace:
        engine.generate([1, 2, 3], max_new_tokens=9)
        engine.close()
    assert len(trace.timeline.rounds) == 2
    with pytest.raises(RuntimeError, match="closed"):
        engine.trace()
