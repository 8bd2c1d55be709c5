"""Runs a module as a program whose kernels have values: `python -m tests.stub_cuda.computing MODULE [ARGUMENT ...]`."""

from __future__ import annotations

import runpy
import sys

from tests.stub_cuda.preload import preload

if __name__ == "__main__":
    preload()
    from tests.stub_cuda.numerics import Numerics

    del sys.argv[0]
    if "--worker" in sys.argv:
        from tools.gpu.checks import smoke

        smoke.ARGUMENTS = ("-m", "tests.stub_cuda.computing", *smoke.ARGUMENTS[1:])  # of its child processes
    with Numerics().computing():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
