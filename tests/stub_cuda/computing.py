"""Runs a module as a program whose kernels have values: `python -m tests.stub_cuda.computing MODULE [ARGUMENT ...]`.

With --check instead of a module: tools/gpu_check.py, whose checks run in such a worker.
"""

from __future__ import annotations

import runpy
import sys

from tests.stub_cuda.preload import preload

NAME = "tests.stub_cuda.computing"


def check(arguments: list[str]) -> int:
    from tools import gpu_check
    from tools.gpu.checks.catalogue import CATALOGUE

    options = gpu_check.parse(arguments)
    entries = [entry for entry in CATALOGUE if not options.only or entry.name in options.only]
    return gpu_check.run(options, entries, [sys.executable, "-m", NAME, "tools.gpu_check", "--worker"])


if __name__ == "__main__":
    preload()
    if sys.argv[1] == "--check":
        sys.exit(check(sys.argv[2:]))
    from tests.stub_cuda.numerics import Numerics

    del sys.argv[0]
    if "--worker" in sys.argv:
        from tools.gpu.checks import smoke

        smoke.PYTHON_ARGUMENTS = ("-m", NAME, *smoke.PYTHON_ARGUMENTS[1:])  # of its child processes
    with Numerics().computing():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
