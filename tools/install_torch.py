"""Installs torch into the environment that runs this, without CUDA libraries where there is no GPU.

    .venv/bin/python tools/install_torch.py 'torch==2.13.0'

For Linux on x86-64, PyPI has only builds that bring several gigabytes of CUDA libraries. pip reports what it would install
before it downloads that. If it needs CUDA libraries, torch comes from PyTorch's own index of CPU builds (TORCH_CPU_INDEX names another
index), and if that fails, the CUDA build is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def has_gpu() -> bool:
    command = shutil.which("nvidia-smi")
    return command is not None and subprocess.run([command], capture_output=True, check=False).returncode == 0


def needs_cuda_libraries(requirement: str) -> bool:
    """Whether the build that pip would install requires packages of NVIDIA. False if pip finds none or fails."""
    command = pip("install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", requirement)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    found = json.loads(result.stdout)["install"] if result.returncode == 0 else []
    return any(name.startswith("nvidia-") for package in found for name in package["metadata"].get("requires_dist", ()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirement", help="torch, with a version or a range")
    requirement = parser.parse_args(arguments).requirement
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # on a terminal pip shows how far its downloads are
    if not has_gpu() and needs_cuda_libraries(requirement):
        index = os.environ.get("TORCH_CPU_INDEX", CPU_INDEX)
        print(f"{requirement}: the default index has a build with CUDA libraries; trying the CPU build of {index}", file=sys.stderr)
        if subprocess.run(pip("install", *quiet, "--retries", "1", "--index-url", index, requirement), check=False).returncode == 0:
            return 0
        print(f"no CPU build of {requirement} could be installed; downloading several gigabytes with CUDA libraries", file=sys.stderr)
    return subprocess.run(pip("install", *quiet, requirement), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
