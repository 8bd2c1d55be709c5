"""The C library of the host link, compiled into this tree where it was not built: who only runs the checks installs nothing."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent.parent / "sampling" / "grammar" / "native"
FLAGS = ("-std=c11", "-O3", "-pthread", "-fvisibility=hidden", "-shared", "-fPIC")  # as in setup.py
SECONDS = 120.0


def compile_link(folder: Path = FOLDER) -> str:
    """Why there is none; empty where there is one."""
    if any((folder / f"_link{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        return ""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler on the path"
    beside = folder / f"_link.{os.getpid()}"  # comes into its place whole
    command = [compiler, *FLAGS, *sorted(map(str, folder.glob("*.c"))), "-o", str(beside)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
        os.replace(beside, folder / "_link.so")
    except subprocess.CalledProcessError as failure:
        return f"{compiler}: {failure.stderr.strip()[-500:]}"
    except (OSError, subprocess.TimeoutExpired) as failure:
        return str(failure)
    return ""
