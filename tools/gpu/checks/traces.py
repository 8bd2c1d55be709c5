"""Checks of stages by name: that a recording knows whose each of its nodes is, and that a timeline tells of every round."""

from __future__ import annotations

from itertools import groupby

from stepgraph.graphs import GraphKey, RecordedReport, make_backend
from stepgraph.graphs.cuda.trace import UNNAMED
from tools.gpu.checks.context import Context, Figures, random_asks, serve
from tools.gpu.checks.states import ROWS, RoundBench

TRACED = 8


def _recorded(context: Context, nvtx: bool = False) -> dict[GraphKey, RecordedReport]:
    """One round per kind of key, captured."""
    backend = make_backend("tape" if context.rehearsal else "cuda", nvtx=nvtx)
    try:
        bench = RoundBench(backend, 3)
        keys = [GraphKey(ROWS, constrained, sampled) for constrained in (True, False) for sampled in (True, False)]
        return {key: backend.capture(bench.round.step(key), bench.buffers).report for key in keys}
    finally:
        backend.close()


def stages_are_told(context: Context) -> Figures:
    """Every node has a stage, and the stages of each stream are in the order that the tape records; with ranges for nsys as without."""
    captured = {nvtx: _recorded(context, nvtx) for nvtx in ((False,) if context.rehearsal else (False, True))}
    tape = captured[False] if context.rehearsal else _recorded(Context(rehearsal=True, quick=context.quick))
    for recorded in captured.values():
        for key, report in recorded.items():
            nodes = sum(count for kind, count in report.nodes.items() if kind != "wait")
            told = sum(run.nodes for run in report.stages)
            assert told == nodes, f"{key}: {told} of {nodes} nodes have a stage"
            for stream in ("main", "side"):
                ours, theirs = (
                    [name for name, _ in groupby(run.name for run in each.stages if run.stream == stream)] for each in (report, tape[key])
                )
                assert ours == theirs, f"{key}, {stream}: {ours}, on the tape {theirs}"
    report = captured[False][GraphKey(ROWS, True, False)]
    return {"nodes": {f"{run.stream}: {run.name}": run.nodes for run in report.stages}}


def timeline_tells_every_round(context: Context) -> Figures:
    """As many launches as rounds, and device work under the names of its stages; how much has none is a figure."""
    with context.engine(3) as engine:
        serve(engine, random_asks(0, 2, 3))
        first = engine.stats().rounds
        with engine.trace(rounds=TRACED) as trace:
            serve(engine, random_asks(1, 12, 3))
        assert engine.stats().rounds >= first + TRACED, "the jobs last for as many rounds as are traced"
    timeline, summary = trace.timeline, trace.timeline.summary()
    launches = [span.round for span in timeline.spans if span.kind == "launch"]
    assert launches == list(range(first, first + TRACED)), f"launches {launches}"
    assert timeline.rounds == tuple(launches), f"rounds {timeline.rounds}"
    unnamed = sum(span.name == UNNAMED for span in timeline.spans)
    verified = sum(stage.count for stage in summary.stages if stage.name == "target_verify")
    assert not context.rehearsal or (unnamed, verified) == (0, TRACED)
    return {"unnamed_spans": unnamed, "rounds_with_target_verify": verified, **summary.as_dict()}
