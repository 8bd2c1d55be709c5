"""Cost of `Engine.capture()` on the CPU, with one draft length and with "auto": processor time and memory; one JSON document last.

    python tools/bench_capture.py --demo                          the demonstration's models, one row and eight; else the toy pair
    python tools/bench_capture.py --demo --other FOLDER --name 0643677      also the package FOLDER/stepgraph, with its C library built

Every engine is captured in a process of its own, in turn. A process captures three engines: the first includes one-time costs, the
later ones reuse its memory. Memory is the resident growth of the first capture: at its end, and the largest while it ran.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch
from tqdm import tqdm

from tools.origin import origin

DRAFTS = 7
CAPTURES = 3
FIGURES = ("first_seconds", "later_seconds", "kept_bytes", "peak_bytes")
GOAL = 2.0  # "auto" over one length


def resident(name: str) -> int:
    """Resident bytes of this process: VmRSS at present, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def capture(rows: int, demo: bool, options: Mapping[str, Any]) -> dict[str, float]:
    """Captures engines. Runs in a process of its own, whose package may be that of another commit."""
    from stepgraph.runtime.config import EngineConfig
    from stepgraph.runtime.demo.variants import open_pair, toy_pair
    from stepgraph.runtime.engine import Engine

    torch.set_num_threads(1)
    pair, found = open_pair(DRAFTS) if demo else toy_pair(), list[dict[str, float]]()
    for _ in range(CAPTURES):
        config = EngineConfig(max_rows=rows, num_speculative_tokens=DRAFTS, **options)
        engine = Engine(pair.target, pair.draft, vocabulary=pair.vocabulary, config=config)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to the present size
        before, start = resident("VmRSS"), time.process_time()
        report = engine.capture()
        seconds = time.process_time() - start
        sizes = {"kept_bytes": resident("VmRSS") - before, "peak_bytes": resident("VmHWM") - before}
        graphs = [each for _, each in (*report.keys, *getattr(report, "prompts", ()))]
        found.append({"seconds": seconds, **sizes, "graphs": len(graphs), "nodes": sum(sum(each.nodes.values()) for each in graphs)})
        engine.close()
        del engine, report, graphs
        gc.collect()
    first, *later = found
    return {
        **{name: value for name, value in first.items() if name != "seconds"},
        "first_seconds": first["seconds"],
        "later_seconds": statistics.median(each["seconds"] for each in later),
    }


def in_a_process(folder: str, *arguments: Any) -> dict[str, float]:
    """folder: the one that contains another `stepgraph`; empty for this one."""
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    environment = {**os.environ, **({"PYTHONPATH": folder} if folder else {})}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"a capture failed: {result.stderr.strip()[-1000:]}")
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def report(rows: Sequence[int], turns: int, demo: bool, other: str, name: str) -> dict[str, Any]:
    variants = {"one length": ("", {"draft_length": DRAFTS}), "auto": ("", {}), **({name: (other, {})} if other else {})}
    found: dict[str, Any] = {}
    with tqdm(total=len(rows) * turns * len(variants), unit="process", disable=not sys.stderr.isatty()) as bar:
        for count in rows:
            samples: dict[str, list[dict[str, float]]] = {label: [] for label in variants}
            for _ in range(turns):
                for label, (folder, options) in variants.items():
                    samples[label].append(in_a_process(folder, count, demo, options))
                    bar.update()
            medians = {label: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for label, runs in samples.items()}
            over = {label: {key: round(medians["auto"][key] / each[key], 3) for key in FIGURES} for label, each in medians.items()}
            del over["auto"]
            found[f"{count} row{'s' * (count > 1)}"] = {**medians, "auto_over": over}
    return {
        **origin(),
        "models": "demonstration" if demo else "toy pair",
        "drafts": DRAFTS,
        "turns": turns,
        "goal": GOAL,
        "captures": found,
    }


def lines(found: Mapping[str, Any]) -> Sequence[str]:
    output = [f"{'':<20}{'graphs':>8}{'nodes':>9}{'first s':>10}{'later s':>10}{'kept MB':>10}{'peak MB':>10}"]
    for label, rows in found["captures"].items():
        for name, each in rows.items():
            if name != "auto_over":
                seconds = "".join(f"{each[key]:>10.2f}" for key in FIGURES[:2])
                sizes = "".join(f"{each[key] / 1e6:>10.1f}" for key in FIGURES[2:])
                output.append(f"{f'{label}, {name}':<20}{each['graphs']:>8.0f}{each['nodes']:>9.0f}{seconds}{sizes}")
        for name, ratios in rows["auto_over"].items():
            output.append(f"{f'{label}, auto over {name}':<37}{''.join(f'{ratios[key]:>10.2f}' for key in FIGURES)}")
    return output


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--demo", action="store_true", help="the demonstration's models, instead of the toy pair")
    add("--rows", type=int, nargs="+", default=[1, 8], metavar="N", help="max_rows of the engines (default: 1 8)")
    add("--turns", type=int, default=3, metavar="N", help="processes of each engine (default: %(default)s)")
    add("--other", default="", metavar="FOLDER", help="a folder that holds another stepgraph")
    add("--name", default="other", help="name of the other package in the document, for example its commit (default: %(default)s)")
    add("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(capture(*json.loads(options.one))))
        return 0
    if options.other and not (Path(options.other) / "stepgraph" / "__init__.py").exists():
        print(f"bench_capture: --other: got {options.other!r}, expected a folder that holds stepgraph/__init__.py", file=sys.stderr)
        return 2
    try:
        found = report(options.rows, options.turns, options.demo, options.other, options.name)
    except (ValueError, RuntimeError) as error:
        print(f"bench_capture: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(found)))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
