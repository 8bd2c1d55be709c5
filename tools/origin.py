"""The origin of every stored measurement: commit, date, device, machine and versions; nothing that identifies the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

CPU = torch.device("cpu")


def origin(device: torch.device = CPU) -> dict[str, Any]:
    versions = {}
    for package in ("stepgraph", "torch", "xgrammar", "llguidance", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (tape)",
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def commit() -> str:
    """Twelve digits, and a plus sign if tracked files differ from it."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--match=", "--dirty=+")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def processor() -> str:
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or "unknown processor"
