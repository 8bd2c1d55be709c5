"""Compiles the C library into this tree, for hosts where stepgraph is not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from stepgraph.sampling.native import Unavailable, find_library

ROOT = Path(__file__).resolve().parent.parent.parent.parent
KERNELS = "sampling/kernels/c"
SOURCES = ("sampling/grammar/automaton/c", "sampling/grammar/link/c", KERNELS, "graphs/layers/c")  # these and the flags as in setup.py
FLAGS = ("-O3", "-pthread", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
COMPILE_SECONDS = 120.0


def compile_library(folder: Path = ROOT / "sampling") -> str:
    """Put the library into `folder`. Returns the reason for a failure; empty on success."""
    try:
        find_library(folder)
        return ""
    except Unavailable:
        pass
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler on the path"
    unfinished = folder / f"_native.{os.getpid()}"
    sources = sorted(str(path) for source in SOURCES for path in (ROOT / source).glob("*.c*"))
    flags = [*FLAGS, *os.environ.get("CFLAGS", "").split(), "-shared", "-fPIC", f"-I{ROOT / KERNELS}"]
    command = [compiler, *flags, *sources, "-lm", "-lstdc++", "-o", str(unfinished)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True)
        os.replace(unfinished, folder / "_native.so")
    except subprocess.CalledProcessError as failure:
        return f"{compiler}: {failure.stderr.strip()[-500:] or f'exit code {failure.returncode}'}"
    except (OSError, subprocess.TimeoutExpired) as failure:
        return str(failure)
    return ""
