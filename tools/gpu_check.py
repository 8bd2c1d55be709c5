"""Checks stepgraph on the GPU of this machine: one command, nothing to install, no network, about eight minutes.

Prints a table as it goes and one JSON document last; never stops at the first failure; exits with 0 only if nothing failed.

    python tools/gpu_check.py                 everything, on the GPU
    python tools/gpu_check.py --quick         fewer repetitions of everything
    python tools/gpu_check.py --only figures  one check; may be given more than once
    python tools/gpu_check.py --save          keeps the JSON in tools/results/
    python tools/gpu_check.py --rehearse      the same code on the CPU tape: proves the checks, says nothing of a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tools.checks.context import Check, Context

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tools" / "results"


def find_stepgraph() -> None:
    """Make `import stepgraph` mean this tree, whether or not it is installed."""
    sys.path.append(str(ROOT))  # for tools.checks and tests.oracles
    spec = importlib.util.spec_from_file_location("stepgraph", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["stepgraph"] = package
    spec.loader.exec_module(package)


def load_checks() -> dict[str, Check]:
    from tools.checks import attention, filters, kernels, llama, masks, profile, rejection, rounds, steps, timing, traces

    checks = (
        steps.capture_user_step,
        rounds.replay_equals_eager,
        rounds.no_sync_no_allocation,
        rounds.one_replay_per_round,
        rounds.profiler_counts_one_launch_per_round,
        steps.host_nodes,
        steps.streams_overlap_correct,
        rounds.engine_matches_oracle,
        rounds.devices_agree,
        rounds.unconstrained_graph_has_no_host_nodes,
        steps.capture_leaves_buffers_untouched,
        steps.illegal_step_raises,
        rounds.several_engines,
        kernels.random_numbers_equal_the_cpus,
        kernels.kernels_equal_references,
        masks.masks_and_processors_equal_references,
        filters.filters_equal_references,
        rejection.rejection_equals_reference,
        llama.attention_equals_reference,
        attention.attention_choices_equal_reference,
        llama.llama_decodes_alike,
        traces.stages_are_told,
        traces.timeline_tells_every_round,
        profile.profile_of_the_bench,
        timing.gil_hold,
        timing.figures,
    )
    return {check.__name__: check for check in checks}


def run_check(name: str, check: Check, context: Context) -> dict[str, object]:
    """One row of the report; an assertion or any other exception is a failure of this check alone."""
    from tools.checks.context import Skipped

    begin = time.perf_counter()
    figures: dict[str, object] = {}
    verdict, error = "passed", ""
    try:
        figures = check(context)
    except Skipped as reason:
        verdict, error = "skipped", str(reason)
    except Exception as failure:
        verdict, error = "failed", f"{type(failure).__name__}: {failure}"
        traceback.print_exc(file=sys.stderr)
    if not context.rehearsal:
        with contextlib.suppress(RuntimeError):  # a check must not leave work for the next one
            torch.cuda.synchronize()
    return {"name": name, "verdict": verdict, "seconds": round(time.perf_counter() - begin, 3), "figures": figures, "error": error}


def describe(rehearsal: bool) -> dict[str, object]:
    """Where and with what this ran."""
    versions = {}
    for package in ("torch", "triton", "xgrammar", "llguidance", "flashinfer-python", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {
        "mode": "rehearsal" if rehearsal else "gpu",
        "device": platform.processor() or platform.machine() if rehearsal else torch.cuda.get_device_name(),
        "driver": "" if rehearsal else driver_version(),
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        **versions,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def save(report: dict[str, object]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", str(report["device"]).lower()).strip("-")
    path = RESULTS / f"{device}-{str(report['date'])[:10]}{'-rehearsal' if report['mode'] == 'rehearsal' else ''}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return path


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU tape instead of a GPU")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this check only; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the checks and end")
    parser.add_argument("--save", action="store_true", help="write the JSON document to tools/results/ as well")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    find_stepgraph()
    checks = load_checks()
    if options.list:
        for name, check in checks.items():
            print(f"{name:<40}{(check.__doc__ or '').strip().splitlines()[0]}")
        return 0
    unknown = sorted(set(options.only or ()) - set(checks))
    if unknown:
        print(f"--only: got {', '.join(unknown)}, want names of --list", file=sys.stderr)
        return 2
    if not options.rehearse and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here; --rehearse runs the same checks on the CPU", file=sys.stderr)
        return 2
    return run(options, {name: check for name, check in checks.items() if not options.only or name in options.only})


def run(options: argparse.Namespace, checks: dict[str, Check]) -> int:
    from tools.checks.context import Context

    torch.set_num_threads(1)
    context = Context(rehearsal=options.rehearse, quick=options.quick)
    report: dict[str, object] = {**describe(options.rehearse), "quick": options.quick}
    results: list[dict[str, object]] = []
    for place, (name, check) in enumerate(checks.items(), 1):
        print(f"[{place:>2}/{len(checks)}] {name:<40}", end="", flush=True)
        results.append(run_check(name, check, context))
        print(f"{results[-1]['verdict']:<9}{results[-1]['seconds']:>8.2f} s  {str(results[-1]['error'])[:200]}", flush=True)
    report["passed"] = all(result["verdict"] != "failed" for result in results)
    report["checks"] = results
    if options.save:
        print(f"saved {save(report).relative_to(ROOT)}")
    print(json.dumps(report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
