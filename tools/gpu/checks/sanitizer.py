"""Check of the Triton kernels in a separate process: under compute-sanitizer if available, interpreted in rehearsal."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.gpu.checks import smoke
from tools.gpu.checks.context import Context, Figures, Skipped

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SEARCH_PATHS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
ERROR_EXIT_CODE = 9  # exit code for errors found by the sanitizer


def programs_stay_in_bounds(context: Context) -> Figures:
    """Every Triton kernel on small inputs equals its reference; compute-sanitizer, if found, reports no invalid access."""
    if importlib.util.find_spec("triton") is None:
        raise Skipped("triton is not installed")
    sanitizer = None if context.on_tape else _find()
    sanitizer_command = [sanitizer, "--tool", "memcheck", "--error-exitcode", str(ERROR_EXIT_CODE)] if sanitizer else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    # the caching allocator would hide accesses beyond the end of a tensor
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if context.on_tape else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [*sanitizer_command, sys.executable, *smoke.PYTHON_ARGUMENTS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False)
    assert result.returncode != ERROR_EXIT_CODE, f"compute-sanitizer: {result.stdout[-2000:]}"
    documents = [line for line in result.stdout.splitlines() if line.startswith('{"interpreted"')]
    assert documents, f"exit code {result.returncode}: {result.stderr[-2000:]}"
    document: Figures = json.loads(documents[-1])
    assert result.returncode == 0, f"{document}"
    return {**document, "sanitizer": sanitizer or f"not run: no compute-sanitizer in PATH, {', '.join(SEARCH_PATHS)}"}


def _find() -> str | None:
    home = os.environ.get("CUDA_HOME", "")
    return shutil.which(
        "compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *SEARCH_PATHS, *([f"{home}/bin"] if home else [])])
    )
