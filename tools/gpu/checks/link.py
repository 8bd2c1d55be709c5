<<<<<<< HEAD
"""The C library, compiled into this tree if it was not built: a machine that only runs the checks installs nothing."""
=======
"""Compiles the C library of the host link into this tree, for hosts where stepgraph is not installed."""
>>>>>>> main

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

<<<<<<< HEAD
from stepgraph.sampling.native import Unavailable, find_library

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SOURCES = ("sampling/grammar/link/c", "sampling/kernels/c", "graphs/layers/c")  # these and the flags as in setup.py
FLAGS = ("-std=c11", "-O3", "-pthread", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
SECONDS = 120.0


def compile_library(folder: Path = ROOT / "sampling") -> str:
    """Build the library in `folder` unless it is there. Returns why there is none; empty if there is one."""
    try:
        find_library(folder)
=======
SOURCES = Path(__file__).resolve().parent.parent.parent.parent / "sampling" / "grammar" / "link" / "c"
FLAGS = ("-std=c11", "-O3", "-pthread", "-fvisibility=hidden", "-shared", "-fPIC")  # as in setup.py
SECONDS = 120.0


def compile_link(folder: Path = SOURCES.parent) -> str:
    """Make `folder` hold the library. Returns why it does not; empty on success."""
    if any((folder / f"_link{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
>>>>>>> main
        return ""
    except Unavailable:
        pass
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler on the path"
<<<<<<< HEAD
    beside = folder / f"_native.{os.getpid()}"  # replaces the library atomically
    sources = sorted(str(path) for source in SOURCES for path in (ROOT / source).glob("*.c"))
    command = [compiler, *FLAGS, "-shared", "-fPIC", f"-I{ROOT / SOURCES[1]}", *sources, "-lm", "-o", str(beside)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
        os.replace(beside, folder / "_native.so")
=======
    unfinished = folder / f"_link.{os.getpid()}"
    command = [compiler, *FLAGS, *sorted(map(str, SOURCES.glob("*.c"))), "-o", str(unfinished)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
        os.replace(unfinished, folder / "_link.so")
>>>>>>> main
    except subprocess.CalledProcessError as failure:
        return f"{compiler}: {failure.stderr.strip()[-500:] or f'exit code {failure.returncode}'}"
    except (OSError, subprocess.TimeoutExpired) as failure:
        return str(failure)
    return ""
