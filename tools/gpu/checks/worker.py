"""The process that checks run in: reads requests from stdin, answers each with one line of JSON."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stepgraph.sampling.grammar.link.native import load
from stepgraph.sampling.native import Unavailable
from tools.gpu.checks.context import Context, Skipped
from tools.gpu.checks.document import MISSING

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PACKAGES = ("torch", "triton", "xgrammar", "llguidance", "apache-tvm-ffi", "flashinfer-python", "transformers", "numpy")


def serve(answers: int) -> int:
    """Answer requests until stdin ends."""
    faulthandler.enable()
    torch.set_num_threads(1)
    with os.fdopen(answers, "w", encoding="utf-8") as out:
        for line in sys.stdin:
            request = json.loads(line)
            answer = run_check(request) if "name" in request else start(request["rehearsal"], request["modules"])
            out.write(_as_json(answer) + "\n")
            out.flush()
    return 0


def _as_json(answer: dict[str, Any]) -> str:
    try:
        return json.dumps(answer, allow_nan=False)
    except (TypeError, ValueError) as error:
        return json.dumps({**answer, "verdict": "failed", "figures": {}, "error": f"figures are not valid JSON: {error}"})


def run_check(request: dict[str, Any]) -> dict[str, Any]:
    """Run one check; an exception is its verdict."""
    begin, name = time.perf_counter(), request["name"]
    folder = Path(request["folder"]) if request["folder"] else None
    context = Context(bool(request["rehearsal"]), request["quick"], request["budget"], folder, on_gpu=request["rehearsal"] == "cuda")
    figures = context.figures
    verdict, error = "passed", ""
    faulthandler.dump_traceback_later(request["limit"] * 0.9)  # shows where a check hangs
    try:
        check = getattr(importlib.import_module(request["module"]), name)
        figures = check(context) | ({"cut": context.cut} if context.cut else {})
        if context.failures:
            verdict, error = "failed", "; ".join(context.failures)
    except Skipped as reason:
        verdict, error, figures = "skipped", str(reason), {}
    except Exception as failure:
        verdict, error = "failed", "; ".join([*context.failures, f"{type(failure).__name__}: {failure}"])
        traceback.print_exc(file=sys.stderr)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {
        "name": name,
        "verdict": verdict,
        "seconds": round(time.perf_counter() - begin, 3),
        "budget": round(request["budget"], 3),
        "figures": figures,
        "error": error,
        "device_lost": not (context.on_tape or _device_works()),
    }


def _device_works() -> bool:
    """Wait for the device and free its memory; False after a device fault."""
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def start(rehearsal: str, modules: Sequence[str]) -> dict[str, Any]:
    """Load what a process loads once, so that it is not charged to a check. Returns the facts of `describe`."""
    facts = describe(rehearsal)
    if "refusal" not in facts:
        for module in modules:
            with contextlib.suppress(Exception):  # its checks report it
                importlib.import_module(module)
        if rehearsal != "tape":
            with contextlib.suppress(RuntimeError):
                torch.mm(*torch.ones(2, 16, 16, device="cuda")).sum().item()  # the device's context, and the library of products
    return facts


def describe(rehearsal: str) -> dict[str, Any]:
    """Device, versions and commit of this run. rehearsal: `tape`, `cuda` or empty."""
    tape = rehearsal == "tape"
    if not tape and not torch.cuda.is_available():
        return {"refusal": f"torch {torch.__version__} sees no GPU here; --rehearse runs the same checks on the CPU"}
    versions = {}
    for package in PACKAGES:
        versions[package] = MISSING
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "mode": "rehearsal" if rehearsal else "gpu",
        "device": platform.processor() or platform.machine() if tape else torch.cuda.get_device_name(),
        "device_bytes": 0 if tape else torch.cuda.get_device_properties(0).total_memory,
        "driver": "" if tape else _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count() or 0,
        "host_link": _host_link(),
        "versions": versions,
        "commit": _output_of("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _host_link() -> str:
    """`native`, or `python: ` and the reason."""
    try:
        load()
    except Unavailable as missing:
        return f"python: {missing}"
    return "native"


def _output_of(*command: str) -> str:
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return output.strip().split("\n")[0].strip()
