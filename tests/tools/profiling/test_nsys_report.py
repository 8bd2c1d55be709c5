"""tools/nsys_report.py on files with known times: figures by arithmetic, and errors for unusable files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from stepgraph.graphs import spans as marks
from stepgraph.graphs.context import MAIN as ENGINES_MAIN
from tests.helpers import nsys_files
from tests.helpers.nsys_files import FIRST, KEY, RUNS
from tools.profiling import figures, tables
from tools.profiling.activities import BETWEEN_ROUNDS, SIDE, UNKNOWN, Activity, named_spans
from tools.profiling.nsys_sqlite import Export, read_nsys, stages_of_nodes
from tools.profiling.sidecar import Run, Sidecar, read_sidecar
from tools.profiling.spans import MAIN, NO_ROUND, Profile, Span, intersection, subtract, total_length, union

STAGES = {  # runs, total, median per round; of three rounds
    ("side", "show verify"): (3, 150, 50),
    ("main", "target_verify"): (6, 5970, 1990),
    ("side", "place verify"): (3, 120, 40),
    ("main", "accept"): (3, 600, 200),
    ("main", "draft_prefill"): (3, 3000, 1000),
    ("main", "between rounds"): (3, 120, 40),
}
DEVICE_TIME = 9960


def test_report_is_read_without_torch() -> None:
    """Constants duplicated to avoid importing torch are equal."""
    code = "import sys, tools.nsys_report; sys.exit(any(name in sys.modules for name in ('torch', 'stepgraph')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent.parent.parent, check=False).returncode == 0
    assert (Span._fields, Run._fields) == (marks.Span._fields, tuple(field.name for field in fields(marks.StageRun)))
    assert (MAIN, NO_ROUND, BETWEEN_ROUNDS) == (ENGINES_MAIN, marks.NO_ROUND, marks.BETWEEN_ROUNDS)


def test_intersection_equals_brute_force() -> None:
    pick = random.Random(5)
    for _ in range(300):
        one, other = ([(start, start + pick.randint(1, 9)) for start in pick.choices(range(40), k=pick.randint(0, 6))] for _ in range(2))
        inside = [{at for begin, end in intervals for at in range(begin, end)} for intervals in (one, other)]
        assert total_length(intersection(union(one), union(other))) == len(inside[0] & inside[1])
        assert total_length(subtract((5, 30), union(other))) == len(set(range(5, 30)) - inside[1])


def written(path: Path, **changes: Any) -> Sidecar:
    path.write_text(json.dumps(nsys_files.sidecar_document(**changes)))
    return read_sidecar(path)


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    files = [nsys_files.captures(tmp_path / "a.1.sqlite"), nsys_files.rounds(tmp_path / "a.2.sqlite")]
    return figures.document(read_nsys(files, written(tmp_path / "a.json")))


def stages(report: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {(row["stream"], row["name"]): (row["runs"], row["total_ns"], row["median_per_round_ns"]) for row in report["stages"]}


def test_round_and_stage_times_are_sums_of_node_times(report: dict[str, Any]) -> None:
    assert report["rounds"] == {
        "first": 20,
        "last": 22,
        "count": 3,
        "window_ns": {"total": 3300 + 3700 + 3300, "median": 3300, "max": 3700, "count": 3},
        "period_ns": {"total": 20_000, "median": 10_000, "max": 10_000, "count": 2},
    }
    assert stages(report) == STAGES
    names = [row["name"] for row in report["stages"]]
    assert names == ["show verify", "target_verify", "place verify", "accept", "draft_prefill", "between rounds"], "in the order of a round"
    assert sum(row["share"] for row in report["stages"]) == pytest.approx(1, abs=1e-5)
    assert next(row["share"] for row in report["stages"] if row["name"] == "accept") == pytest.approx(600 / DEVICE_TIME, abs=1e-6)


def test_nodes_and_clones_have_the_innermost_open_range(tmp_path: Path) -> None:
    export = Export(nsys_files.captures(tmp_path / "a.sqlite"))
    names = ["show verify", "verify", "place verify", "target_verify", "target_verify", "accept", "draft_prefill", "capture"]
    expected = {start + index: name for start in (nsys_files.CAPTURED, nsys_files.GRAPH) for index, name in enumerate(names, 1)}
    assert stages_of_nodes(export) == expected
    export.close()


def test_gaps_are_between_consecutive_rounds_only() -> None:
    spans = tuple(Span("main", "accept", "stage", number, 1000 * number, 1000 * number + 400) for number in (3, 4, 6))
    found = figures.document(Profile("tape", spans))
    assert found["idle"]["between_rounds_ns"] == {"total": 600, "median": 600, "max": 600, "count": 1}


def test_idle_is_time_without_device_work(report: dict[str, Any]) -> None:
    # Inside: 10 between two kernels and 100 before accept; in the late round 10 and 500.
    assert report["idle"]["inside_rounds_ns"] == {"total": 110 + 510 + 110, "median": 110, "max": 510, "count": 3}
    assert report["idle"]["inside_share"] == pytest.approx(730 / 10_300, abs=1e-6)
    # From 3,300 or 3,700 to 10,000, without a copy of 40.
    assert report["idle"]["between_rounds_ns"] == {"total": 6660 + 6260, "median": 6460, "max": 6660, "count": 2}


def test_a_late_host_node_is_exposed(report: dict[str, Any]) -> None:
    hosts = report["host_nodes"]
    # Hidden: 600 twice; of 2,300 the 900 and 990 during which target_verify ran. The rest is exposed.
    assert (hosts["source"], hosts["total_ns"], hosts["hidden_ns"], hosts["exposed_ns"]) == ("recorded", 3500, 3090, 410)
    assert hosts["hidden_share"] == pytest.approx(3090 / 3500, abs=1e-6)
    assert [(node["name"], node["runs"], node["time_ns"]["max"]) for node in hosts["nodes"]] == [("verify", 3, 2300)]
    # Accept waited from 2,000 to 2,500 while the host node (until 2,400) and its copy (2,420 to 2,460) ran.
    assert report["exposed_wait"]["time_ns"] == {"total": 440, "median": 0, "max": 440, "count": 3}
    assert report["acceptance"] == {
        "row_rounds": 3,
        "tokens": 9,
        "accepted_drafts": 6,
        "tokens_per_row_and_round": 3.0,
        "accepted_per_row_and_round": 2.0,
    }


def test_the_table_has_every_figure(report: dict[str, Any]) -> None:
    printed = tables.text(report)
    for expected in (
        "rounds 20 to 22 (3 recorded by nsys)",
        "target_verify",
        "88.3%",
        "0.4 of 3.5 us exposed",
        "3.00 tokens per row and round",
    ):
        assert expected in printed
    assert max(map(len, printed.splitlines())) <= 140


@pytest.mark.parametrize("older", [False, True])
def test_stages_follow_from_node_order_without_the_capture(tmp_path: Path, older: bool) -> None:
    table = "" if older else "CUDA_HOST_CALLBACK"
    profile = read_nsys([nsys_files.rounds(tmp_path / "a.sqlite", host_table=table, older=older)], written(tmp_path / "a.json"))
    found = figures.document(profile)
    assert stages(found) == STAGES and found["notes"] == []
    # An older nsys records no host nodes: the engine's times are used, converted to the profiler's clock.
    assert (found["host_nodes"]["total_ns"], found["host_nodes"]["exposed_ns"]) == (3500, 410)
    assert [node["name"] for node in found["host_nodes"]["nodes"]] == ["verify"]


def test_nodes_that_do_not_match_the_recording_are_unknown(tmp_path: Path) -> None:
    file = nsys_files.rounds(tmp_path / "a.sqlite")
    found = figures.document(read_nsys([file], written(tmp_path / "a.json", stages={KEY: RUNS[:-1]})))
    assert {row["name"] for row in found["stages"]} == {"unknown stage", "between rounds"}
    assert found["notes"] == [
        f"stages of round {FIRST} ({KEY}) are unknown: the capture was not profiled, and the profile shows 6 of its nodes, "
        "the recording has 5"
    ]
    alone = figures.document(read_nsys([file], Sidecar()))
    assert alone["notes"] == [
        f"stages of round {FIRST} (no key) are unknown: the capture was not profiled, and the list of the engine is missing"
    ]
    assert alone["acceptance"] is None


def test_internal_streams_of_a_graph_are_not_taken_for_captured_ones() -> None:
    """A launch on stream 7 whose branches run on 30 and 31, most of it on 30; a copy on its stream and one on a stream without graphs."""
    sidecar = Sidecar(
        stages={KEY: tuple(Run("side" if name == "fill" else "main", name, "stage", 1) for name in ("read", "verify", "fill"))}
    )
    nodes = [("read", 7), ("verify", 30), ("fill", 31), ("no stage", 31)]
    launched = [Activity(10 * at, 1000 if stream == 30 else 10 * at + 5, stream, 20, at) for at, (_, stream) in enumerate(nodes)]
    copies = [Activity(2000, 2001, stream, NO_ROUND, None) for stream in (7, 22)]
    names = {at: name for at, (name, _) in enumerate(nodes[:3])}
    found = named_spans([*launched, *copies], {**names, 3: UNKNOWN}, sidecar)
    assert [(span.stream, span.name) for span in found.spans] == [
        *((MAIN, "read"), (MAIN, "verify"), (SIDE, "fill"), (MAIN, UNKNOWN), (MAIN, BETWEEN_ROUNDS), (SIDE, BETWEEN_ROUNDS))
    ]


def test_wait_is_bounded_without_host_node_records(tmp_path: Path) -> None:
    file = nsys_files.rounds(tmp_path / "a.sqlite", host_table="")
    counters = {"host_node_ns": 3500}
    found = figures.document(read_nsys([file], written(tmp_path / "a.json", host_nodes=[], counters=counters)))
    assert (found["host_nodes"]["source"], found["host_nodes"]["total_ns"], found["host_nodes"]["hidden_share"]) == ("counted", 3500, None)
    assert found["exposed_wait"] == {
        "source": "idle before a mask is read",
        "time_ns": {"total": 100 + 500 + 100, "median": 100, "max": 500, "count": 3},
        "share_of_rounds": pytest.approx(700 / 10_300, abs=1e-6),
    }
    assert "when they ran was not recorded" in tables.text(found)
    unknown = figures.document(read_nsys([file], written(tmp_path / "a.json", host_nodes=[])))
    assert unknown["host_nodes"]["source"] == "unknown" and "host nodes: not recorded" in tables.text(unknown)
    sidecar = written(tmp_path / "a.json", host_nodes=[])
    of_stages = {key: tuple(run for run in runs if run.kind != "host") for key, runs in sidecar.stages.items()}
    subtract = figures.document(read_nsys([file], replace(sidecar, stages=of_stages)))["host_nodes"]
    assert (subtract["source"], subtract["total_ns"]) == ("none", 0), "grammars on the device"


def no_kernels(path: Path) -> Path:
    export = nsys_files.Export(path)
    export.ranges([(1, 2, "round 20: key")])
    export.add("CUPTI_ACTIVITY_KIND_RUNTIME", [])
    return export.close()


def no_end(path: Path) -> Path:
    export = nsys_files.Export(path, {"NVTX_EVENTS": "start INTEGER NOT NULL, eventType INTEGER NOT NULL, text TEXT"})
    export.ranges([(1, 2, "round 20: key")], by_id=False)
    return export.close()


def no_ranges(path: Path) -> Path:
    export = nsys_files.Export(path)
    export.ranges([(1, 2, "another")])
    return export.close()


def no_database(path: Path) -> Path:
    path.write_text("QDSTRM " * 100)
    return path


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (no_kernels, "no table CUPTI_ACTIVITY_KIND_KERNEL; profile with --trace=cuda,nvtx, and a range in which rounds ran"),
        (no_end, "table NVTX_EVENTS has no column end; expected an export of nsys 2023.4 or newer"),
        (no_ranges, "expected one file with NVTX ranges 'round <n>', got none; --trace=cuda,nvtx, and an engine with nvtx on"),
        (no_database, "file is not a database; expected a file that `nsys export --type sqlite` wrote"),
        (
            lambda path: nsys_files.rounds(path, graph_only=True),
            "it shows graphs as a whole, expected nodes of graphs: profile captured rounds with --cuda-graph-trace=node",
        ),
    ],
)
def test_unusable_file_is_named(tmp_path: Path, make: Callable[[Path], Path], named: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as raised:
        read_nsys([make(tmp_path / "a.sqlite")], Sidecar())
    assert named in str(raised.value)
