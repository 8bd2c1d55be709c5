"""Runs tests as on a host without a C compiler: a copy of the tracked files, which has no C library, and a PATH without compilers.

`python -m tests.helpers.no_compiler [arguments of pytest]`, or `make no-compiler`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILER = re.compile(r"(.*-)?(cc|c\+\+|c[89]9|gcc|g\+\+|cpp|clang|clang\+\+|tcc|nvcc)([-.0-9]*)$")


def copy_tracked_files(folder: Path) -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def run(arguments: list[str], scratch: Path) -> int:
    package, tools = scratch / "stepgraph", scratch / "bin"  # tests import the package from the folder above
    copy_tracked_files(package)
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if not COMPILER.match(program.name) and not (tools / program.name).is_symlink():
                (tools / program.name).symlink_to(program)
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    environment |= {"PATH": os.pathsep.join([str(Path(sys.executable).parent), str(tools)]), "PYTHONPATH": str(scratch)}
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=package, env=environment, check=False).returncode


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(run(sys.argv[1:], Path(scratch)))
