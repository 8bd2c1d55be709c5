"""The one thing that pyproject.toml cannot say yet: three libraries of plain C that are loaded with ctypes.

They are optional. Where there is no C compiler the installation goes on without them: grammars are driven from Python, and models
and choices on the CPU run in plain torch.
"""

from __future__ import annotations

import os

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = "sampling/grammar/link/c"
LINK = ("forced", "host_link", "marker", "matcher", "pool")
KERNELS = "graphs/layers/cpu"
CHOICES = "sampling/kernels/cpu"


class BuildBeside(build_ext):
    """What is built again comes into its place whole: a process that has the old library keeps it, and none opens half of a new one."""

    def copy_file(self, infile: str, outfile: str, *others: object, **options: object) -> tuple[str, bool]:  # type: ignore[override]
        beside = f"{outfile}.{os.getpid()}"  # others may build at the same time
        super().copy_file(infile, beside, *others, **options)  # type: ignore[arg-type]
        os.replace(beside, outfile)
        return outfile, True


setup(
    script_name="setup.py",  # the root is the package: what is known as the script is not taken for one of its modules
    cmdclass={"build_ext": BuildBeside},
    ext_modules=[
        Extension(
            "stepgraph.sampling.grammar.link._link",
            sources=[f"{SOURCES}/{name}.c" for name in (*LINK, "llguidance", "xgrammar")],
            depends=[f"{SOURCES}/{name}.h" for name in LINK],
            extra_compile_args=["-std=c11", "-O3", "-pthread", "-fvisibility=hidden"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        Extension(
            "stepgraph.graphs.layers.cpu._kernels",
            sources=[f"{KERNELS}/{name}.c" for name in ("attention", "places", "product", "product_dot", "tokens")],
            depends=[f"{KERNELS}/{name}.h" for name in ("kernels", "lanes", "product")],
            # What nobody reads back need not be kept: error numbers and floating point exceptions would stand in the way of vectors.
            extra_compile_args=[
                *("-std=c11", "-O3", "-g0", "-fvisibility=hidden"),
                *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
            ],
            libraries=["m"],
            optional=True,
        ),
        Extension(
            "stepgraph.sampling.kernels.cpu._choices",
            sources=[f"{CHOICES}/{name}.c" for name in ("argmax", "chain")],
            depends=[f"{CHOICES}/choices.h"],
            extra_compile_args=["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-fno-trapping-math"],
            optional=True,
        ),
    ],
)
