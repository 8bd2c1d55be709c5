"""Runs the tests of grammars in C with a library that gcc's sanitizers check, in a copy of the tracked files: `make sanitize`.

`python -m tests.helpers.sanitized [arguments of pytest]`. The library is built into build/sanitize; reports are written beside it.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.no_compiler import ROOT, copy_tracked_files

BUILD = ROOT / "build" / "sanitize"
# Without checks of every access, which double the time to compile; that of addresses finds most of these errors too.
FLAGS = "-fsanitize=address,undefined -fno-sanitize=null,alignment,object-size,pointer-overflow,vptr"
# The sanitizer keeps memory that was freed; a matcher reads beyond the end of a table with a planted error.
EXCLUDED = "not leak_nothing and not reported_and_freed and not planted_error_in_a_table"
STACK_BYTES = 64 << 20  # functions take several times as much as without sanitizers


def runtime_library(name: str) -> str:
    path = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):  # gcc repeats the name of a library that it does not have
        sys.exit(f"make sanitize: gcc has no {name}; install it (Debian: libgcc-12-dev for gcc 12; Fedora: libasan, libubsan)")
    return path


def run(arguments: list[str], scratch: Path) -> int:
    preloaded = " ".join(map(runtime_library, ("libasan.so", "libubsan.so", "libstdc++.so")))
    package = scratch / "stepgraph"
    copy_tracked_files(package)
    build = [sys.executable, "setup.py", "build_ext", "--build-lib", str(BUILD), "--build-temp", str(BUILD / "objects")]
    subprocess.run(build, cwd=package, env={**os.environ, "STEPGRAPH_SANITIZE": FLAGS}, check=True)
    [library] = (BUILD / "stepgraph" / "sampling").glob("_native*.so")
    shutil.copy2(library, package / "sampling")
    for report in BUILD.glob("report.*"):
        report.unlink()
    options = f"log_path={BUILD / 'report'}:detect_leaks=0:print_stacktrace=1"  # the interpreter frees little at its end
    environment = {**os.environ, "PYTHONPATH": str(scratch), "LD_PRELOAD": preloaded, "ASAN_OPTIONS": options, "UBSAN_OPTIONS": options}
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    tests = [sys.executable, "-m", "pytest", "-q", "-k", EXCLUDED, *arguments]
    failed = subprocess.run(tests, cwd=package, env=environment, check=False).returncode
    reports = [report.read_text(errors="replace") for report in BUILD.glob("report.*")]
    print(*reports, f"{len(reports)} reports of the sanitizers", sep="\n")
    return failed or bool(reports)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(run(sys.argv[1:], Path(scratch)))
