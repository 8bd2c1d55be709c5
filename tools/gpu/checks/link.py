"""Compiles the C library of the host link into this tree, for hosts where stepgraph is not installed."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent.parent.parent / "sampling" / "grammar" / "link" / "c"
FLAGS = ("-std=c11", "-O3", "-pthread", "-fvisibility=hidden", "-shared", "-fPIC")  # as in setup.py
SECONDS = 120.0


def compile_link(folder: Path = SOURCES.parent) -> str:
    """Make `folder` hold the library. Returns why it does not; empty on success."""
    if any((folder / f"_link{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        return ""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler on the path"
    unfinished = folder / f"_link.{os.getpid()}"
    command = [compiler, *FLAGS, *sorted(map(str, SOURCES.glob("*.c"))), "-o", str(unfinished)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
        os.replace(unfinished, folder / "_link.so")
    except subprocess.CalledProcessError as failure:
        return f"{compiler}: {failure.stderr.strip()[-500:] or f'exit code {failure.returncode}'}"
    except (OSError, subprocess.TimeoutExpired) as failure:
        return str(failure)
    return ""
