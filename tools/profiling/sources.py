"""Reads a profile from the files that a user names; exports nsys reports and finds related files beside them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tools.profiling.activities import with_host_nodes
from tools.profiling.nsys_sqlite import read_nsys
from tools.profiling.sidecar import Sidecar, read_sidecar
from tools.profiling.spans import Profile

REPORTS = (".nsys-rep", ".qdrep")
EXPORT_SECONDS = 600


def read_profile(paths: Sequence[Path], sidecar: Path | None = None, nsys: str = "nsys") -> Profile:
    """ValueError names a missing or unusable file."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: got no such file, expected a .nsys-rep, .sqlite or .rounds.json")
    sidecar_file = sidecar or sidecar_beside(paths[0])
    if paths[0].suffix == ".json":
        events = _trace_events(paths[0])
        return engine_profile(paths[0], read_sidecar(paths[0])) if events is None else _torch_profile(paths[0], events, sidecar_file)
    exported = [exported_file(path, nsys) for path in with_capture_report(paths)]
    return read_nsys(exported, read_sidecar(sidecar_file) if sidecar_file else Sidecar())


def _trace_events(path: Path) -> list[dict[str, Any]] | None:
    """Events of a Chrome trace; None for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError):
        return None
    events = content.get("traceEvents") if isinstance(content, dict) else None
    return events if isinstance(events, list) else None


def _torch_profile(path: Path, events: list[dict[str, Any]], sidecar_file: Path | None) -> Profile:
    from tools.profiling.timeline import from_torch

    if sidecar_file is None:
        raise ValueError(f"{path}: a trace of torch's profiler does not name stages; expected --sidecar with the file of the engine")
    sidecar = read_sidecar(sidecar_file)
    spans, names = with_host_nodes(from_torch(events, sidecar), sidecar), (path.name, sidecar_file.name)
    return Profile("torch", spans, names, sidecar.counters, sidecar.notes, sidecar.without_host_nodes)


def engine_profile(path: Path, sidecar: Sidecar) -> Profile:
    """The timeline that the engine recorded; ValueError if nsys recorded it."""
    if not sidecar.spans:
        raise ValueError(f"{path}: it goes with a profile of nsys and holds no times; expected that profile's .nsys-rep or .sqlite")
    if not any(sidecar.stages.values()):
        raise ValueError(f"{path}: the engine ran these rounds without recording them, expected EngineConfig.eager=False")
    backend: Literal["tape", "torch"] = "tape" if sidecar.backend == "tape" else "torch"
    spans = with_host_nodes(sidecar.spans, sidecar)
    return Profile(backend, spans, (path.name,), sidecar.counters, sidecar.notes, sidecar.without_host_nodes)


def sidecar_beside(path: Path) -> Path | None:
    """The engine's file of the same run."""
    stem = re.sub(r"(\.\d+)?\.(nsys-rep|qdrep|sqlite|json)$", "", path.name)
    found = path.with_name(f"{stem}.rounds.json")
    return found if found.is_file() else None


def with_capture_report(paths: Sequence[Path]) -> list[Path]:
    """Adds the capture's report, name.1, to that of the rounds, name.2, if it exists."""
    if len(paths) == 1 and (match := re.fullmatch(r"(.*)\.2\.([a-z-]+)", paths[0].name)):
        capture = paths[0].with_name(f"{match[1]}.1.{match[2]}")
        if capture.is_file():
            return [capture, paths[0]]
    return list(paths)


def exported_file(path: Path, nsys: str) -> Path:
    """The .sqlite of a report, exported unless a newer one exists."""
    if path.suffix not in REPORTS:
        return path
    exported = path.with_suffix(".sqlite")
    if exported.is_file() and exported.stat().st_mtime >= path.stat().st_mtime:
        return exported
    command = [nsys, "export", "--type", "sqlite", "--force-overwrite=true", "--output", str(exported), str(path)]
    if shutil.which(nsys) is None:
        raise ValueError(f"{path}: no {nsys} here to export it; run `{' '.join(command)}` where there is one, and pass {exported.name}")
    result = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_SECONDS, check=False)
    if result.returncode:
        raise ValueError(f"{path}: `{' '.join(command)}` ended with {result.returncode}: {(result.stderr or result.stdout).strip()[-400:]}")
    return exported


def read_report(path: Path) -> dict[str, Any] | None:
    """An earlier report; None for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("document") == "stepgraph profile" else None
