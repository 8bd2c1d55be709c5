"""Checks of stage names, timelines and profiles."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from stepgraph.graphs import GraphKey, RecordedReport, make_backend
from stepgraph.graphs.cuda.trace import UNNAMED
from tools import nsys_profile
from tools.gpu.checks.context import Context, Figures, random_requests, serve
from tools.gpu.checks.states import ROWS, RoundBench
from tools.profiling import command, figures, sources, workload
from tools.profiling.spans import Profile
from tools.profiling.timeline import save_picture

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PICTURE = "profile-of-the-bench"


def profile_of_the_bench(context: Context) -> Figures:
    """Where the time of the bench's rounds goes: the report of nsys_report.py and a picture."""
    rounds = (20, 40) if not context.quick else (4, 9)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench"
        with_nsys = not context.on_tape and nsys_profile.uses_nsys("auto", "nsys")
        profile = _under_nsys(out, rounds) if with_nsys else _with_trace(out, rounds)
    # reported even if the stages have no names, to explain why
    context.figures["spans"] = dict(Counter(f"{span.stream}: {span.name}" for span in profile.spans if span.kind != "launch"))
    report = figures.document(profile)
    context.figures.update(report)
    if context.folder is not None and importlib.util.find_spec("matplotlib") is not None:
        context.folder.mkdir(parents=True, exist_ok=True)
        save_picture(profile, context.folder / f"{PICTURE}{'-rehearsal' if context.rehearsal else ''}.png")
    names = {stage["name"] for stage in report["stages"]}
    assert {"target_verify", "accept", "draft_prefill"} <= names, f"stages {sorted(names)}; {report['notes']}"
    assert report["rounds"]["count"] == rounds[1] - rounds[0] + 1, report["rounds"]
    hosts = report["host_nodes"]
    assert [node["name"] for node in hosts["nodes"]][:2] == ["verify", "commit"], f"{hosts}; {report['notes']}"
    return context.figures


def _under_nsys(out: Path, rounds: tuple[int, int]) -> Profile:
    """The child process imports stepgraph from this tree, installed or not."""
    package = out.parent / "path" / "stepgraph"
    package.parent.mkdir()
    package.symlink_to(ROOT, target_is_directory=True)
    with _environment({"PYTHONPATH": str(package.parent)}):
        code = nsys_profile.main(["--bench", "--grammar-lane", "host", "--rounds", f"{rounds[0]}-{rounds[1]}", "--out", str(out)])
    assert code == 0, f"nsys_profile ended with {code}; the nsys is {shutil.which('nsys')}"
    return sources.read_profile([out.with_name(out.name + ".2.nsys-rep")])


def _with_trace(out: Path, rounds: tuple[int, int]) -> Profile:
    with _environment(command.environment(rounds, out, with_nsys=False)):
        workload.main(["--rounds", str(rounds[1] + 1 + command.EXTRA_ROUNDS), "--rows", "2", "--grammar-lane", "host"])
    return sources.read_profile([command.rounds_file(out)])


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


TRACED_ROUNDS = 8


def _recorded(context: Context, nvtx: bool = False) -> dict[GraphKey, RecordedReport]:
    """Reports of one captured round per kind of key."""
    backend = make_backend("tape" if context.on_tape else "cuda", nvtx=nvtx)
    try:
        bench = RoundBench(backend, 3)
        keys = [GraphKey(ROWS, constrained, sampled) for constrained in (True, False) for sampled in (True, False)]
        return {key: backend.capture(bench.round.step(key), bench.buffers).report for key in keys}
    finally:
        backend.close()


def stages_have_names(context: Context) -> Figures:
    """Every node has a stage, and the stages of each stream have the order of the tape, with and without NVTX ranges."""
    captured = {nvtx: _recorded(context, nvtx) for nvtx in ((False,) if context.on_tape else (False, True))}
    tape = captured[False] if context.on_tape else _recorded(Context(rehearsal=True, quick=context.quick))
    for recorded in captured.values():
        for key, report in recorded.items():
            nodes = sum(count for kind, count in report.nodes.items() if kind != "wait")
            named = sum(run.nodes for run in report.stages)
            assert named == nodes, f"{key}: {named} of {nodes} nodes have a stage"
            for stream in ("main", "side"):
                ours, theirs = (
                    [name for name, _ in groupby(run.name for run in each.stages if run.stream == stream)] for each in (report, tape[key])
                )
                assert ours == theirs, f"{key}, {stream}: {ours}, on the tape {theirs}"
    report = captured[False][GraphKey(ROWS, True, False)]
    return {"nodes": {f"{run.stream}: {run.name}": run.nodes for run in report.stages}}


def timeline_has_every_round(context: Context) -> Figures:
    """One launch per round, all device work under stage names."""
    with context.engine(3) as engine:
        serve(engine, random_requests(0, 2, 3))
        first = engine.stats().rounds
        with engine.trace(rounds=TRACED_ROUNDS) as trace:
            serve(engine, random_requests(1, 12, 3))
        assert engine.stats().rounds >= first + TRACED_ROUNDS, "the jobs end before the traced rounds do"
    timeline, summary = trace.timeline, trace.timeline.summary()
    launches = [span.round for span in timeline.spans if span.kind == "launch"]
    assert launches == list(range(first, first + TRACED_ROUNDS)), f"launches {launches}"
    assert timeline.rounds == tuple(launches), f"rounds {timeline.rounds}"
    unnamed = sum(span.name == UNNAMED for span in timeline.spans)
    verified = sum(stage.count for stage in summary.stages if stage.name == "target_verify")
    assert (unnamed, verified) == (0, TRACED_ROUNDS), f"{unnamed} unnamed spans; {verified} rounds with target_verify"
    return {"unnamed_spans": unnamed, "rounds_with_target_verify": verified, **summary.as_dict()}
