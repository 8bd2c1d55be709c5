"""Profiles the built-in bench: under nsys where there is one, else by the engine's own timeline, which is what the rehearsal does too."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools import nsys_profile
from tools.gpu.checks.context import Context, Figures
from tools.profiling import command, figures, sources, workload
from tools.profiling.spans import Profile
from tools.profiling.timeline import save_picture

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PICTURE = "profile-of-the-bench"


def profile_of_the_bench(context: Context) -> Figures:
    """Where the time of the bench's rounds goes: the report of nsys_report.py, and a picture beside the document."""
    rounds = (20, 40) if not context.quick else (4, 9)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench"
        with_nsys = not context.rehearsal and nsys_profile.uses_nsys("auto", "nsys")
        profile = _under_nsys(out, rounds) if with_nsys else _by_itself(out, rounds)
    # told even where stages could not be named, and that is all that would say why
    context.found["spans"] = dict(Counter(f"{span.stream}: {span.name}" for span in profile.spans if span.kind != "launch"))
    report = figures.document(profile)
    context.found.update(report)
    if context.folder is not None and importlib.util.find_spec("matplotlib") is not None:
        context.folder.mkdir(parents=True, exist_ok=True)
        save_picture(profile, context.folder / f"{PICTURE}{'-rehearsal' if context.rehearsal else ''}.png")
    names = {stage["name"] for stage in report["stages"]}
    assert {"target_verify", "accept", "draft_prefill"} <= names, f"stages {sorted(names)}; {report['notes']}"
    assert report["rounds"]["count"] == rounds[1] - rounds[0] + 1, report["rounds"]
    hosts = report["host_nodes"]
    assert [node["name"] for node in hosts["nodes"]][:2] == ["head", "commit"], f"{hosts}; {report['notes']}"
    return context.found


def _under_nsys(out: Path, rounds: tuple[int, int]) -> Profile:
    """The child finds stepgraph whether or not it is installed, as this process does."""
    package = out.parent / "path" / "stepgraph"
    package.parent.mkdir()
    package.symlink_to(ROOT, target_is_directory=True)
    with _environment({"PYTHONPATH": str(package.parent)}):
        code = nsys_profile.main(["--bench", "--rounds", f"{rounds[0]}-{rounds[1]}", "--out", str(out)])
    assert code == 0, f"nsys_profile ended with {code}; the nsys is {shutil.which('nsys')}"
    return sources.read_profile([out.with_name(out.name + ".2.nsys-rep")])


def _by_itself(out: Path, rounds: tuple[int, int]) -> Profile:
    with _environment(command.environment(rounds, out, with_nsys=False)):
        workload.main(["--rounds", str(rounds[1] + 1 + command.BEHIND), "--rows", "2"])
    return sources.read_profile([command.rounds_file(out)])


@contextlib.contextmanager
def _environment(told: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(told)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
