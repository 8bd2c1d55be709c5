"""Checks stepgraph on the GPU of this machine: one command, nothing to install, no network, at most eight minutes.

Compiles the C library of the host link into this tree if it is missing. Prints a table row per check and one JSON document last, and
saves the document in tools/results/. Continues after failures: a check that crashes or hangs is ended and reported, an interruption is
reported as well. Exits with 0 only if no check failed.

    python tools/gpu_check.py                      everything, on the GPU
    python tools/gpu_check.py --quick              a quarter of the time for everything
    python tools/gpu_check.py --only gil_hold      one check; may be given more than once
    python tools/gpu_check.py --rehearse --quick   the same code on the CPU tape: tests the checks, not a GPU
    python tools/gpu_check.py --rehearse cuda      at the same sizes on a CUDA device, as on stub libraries; decides no goal either
    python tools/gpu_check.py --merge a.json b.json  one document of runs with --only, where one run would take too long
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.* and tests.*
if __name__ == "__main__":
    for package in ("tools", "tests"):  # other packages of these names may be installed; ours have no __init__.py
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [f"{sys.path[-1]}/{package}"]

from tools.gpu.checks.catalogue import CATALOGUE, FULL_SECONDS, QUICK_SECONDS, Entry
from tools.gpu.checks.document import compose, merge, save
from tools.gpu.checks.link import compile_library
from tools.gpu.checks.supervisor import Row, Supervisor, WorkerLost, modules_of, rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tools" / "results"
WORKER = (sys.executable, str(Path(__file__).resolve()), "--worker")


def find_stepgraph() -> None:
    """Make `import stepgraph` import this tree, installed or not."""
    spec = importlib.util.spec_from_file_location("stepgraph", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["stepgraph"] = package
    spec.loader.exec_module(package)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rehearse", nargs="?", const="tape", default="", choices=("tape", "cuda"), help="small sizes, on the CPU tape or on this device"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="about two minutes")
    length.add_argument("--full", action="store_true", help="at most eight minutes (default)")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this check only; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the checks and their budgets in seconds, and exit")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="save one document of several runs with --only, and exit")
    parser.add_argument("--save", action="store_true", help="save the document of a rehearsal as well")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="save the document in this folder (default: tools/results/)")
    parser.add_argument("--worker", type=int, metavar="FD", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, catalogue: Sequence[Entry] = CATALOGUE) -> int:
    options = parse(arguments)
    if options.worker is not None:
        find_stepgraph()
        from tools.gpu.checks.worker import serve

        return serve(options.worker)
    if options.list:
        for entry in catalogue:
            print(f"{entry.name:<42}{entry.seconds:>4.0f}  {entry.description}")
        return 0
    if options.merge:
        return merge_documents(options, catalogue)
    unknown = sorted(set(options.only or ()) - {entry.name for entry in catalogue})
    if unknown:
        print(f"--only: got {', '.join(unknown)}, expected names of --list", file=sys.stderr)
        return 2
    return run(options, [entry for entry in catalogue if not options.only or entry.name in options.only])


def merge_documents(options: argparse.Namespace, catalogue: Sequence[Entry]) -> int:
    try:
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
        document = merge(documents, [entry.name for entry in catalogue])
    except KeyError as missing:
        print(f"--merge: got a file without the field {missing}, expected documents of gpu_check.py", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"saved {save(document, options.out or RESULTS)}")
    return 0 if document["passed"] else 1


def run(options: argparse.Namespace, entries: Sequence[Entry], worker: Sequence[str] = WORKER) -> int:
    begin, found = time.monotonic(), list[Row]()
    limit_seconds = math.inf if options.rehearse else QUICK_SECONDS if options.quick else FULL_SECONDS
    folder = options.out or (RESULTS if options.save or not options.rehearse else None)
    supervisor = Supervisor(worker, options.rehearse, options.quick, str(folder.resolve()) if folder else "")
    missing = compile_library()
    if missing:
        print(f"gpu_check: no native host link, so figures with grammars are those of the Python link: {missing}", file=sys.stderr)
    with _interruptible():
        try:
            facts = supervisor.describe(modules_of(entries))
            if "refusal" in facts:
                print(facts["refusal"], file=sys.stderr)
                return 2
            document = compose(facts, (), options.quick, not options.only, 0.0)
            for index, row in enumerate(rows(supervisor, entries, limit_seconds - (time.monotonic() - begin)), 1):
                found.append(row)
                print(f"[{index:>2}/{len(entries)}] {_line(row)}", flush=True)
                document = compose(facts, found, options.quick, not options.only, time.monotonic() - begin)
                if folder:  # after every check, so that a killed run leaves its results
                    save(document, folder)
        except WorkerLost as lost:
            print(f"gpu_check: no worker: {lost}", file=sys.stderr)
            return 1
        finally:
            supervisor.end()
    for goal in document["goals"]:
        print(_goal_line(goal))
    if folder:
        print(f"saved {save(document, folder)}")
    print(json.dumps(document))
    return 0 if document["passed"] else 1


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM end the run with its document."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(row: Row) -> str:
    return f"{row['name']:<42}{row['verdict']:<12}{row['seconds']:>8.2f} s  {row['error'][:200]}".rstrip()


def _goal_line(goal: dict[str, Any]) -> str:
    found = "" if goal["found"] is None else f"{goal['found']:.3g}"
    return f"goal: {goal['name']:<56}{goal['expected']:<16}{found:>10}  {goal['verdict']}"


if __name__ == "__main__":
    sys.exit(main())
