"""The C library, which pyproject.toml cannot declare yet: C, and C++ for the compiler of automata, loaded with ctypes.

It is optional. Without a C and C++ compiler the installation goes on without it: grammars are driven from Python, and models and token
choices on the CPU run in torch.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import _StaticPth, editable_wheel

FOLDERS = ("sampling/grammar/automaton/c", "sampling/grammar/link/c", "sampling/kernels/c", "graphs/layers/c")
SANITIZE = os.environ.get("STEPGRAPH_SANITIZE", "").split()  # flags for the C sources of grammars: tests/helpers/sanitized.py


class BuildBeside(build_ext):
    """A rebuilt library replaces the old one atomically: a process that has the old one open keeps it, and none opens a partial file."""

    def build_extension(self, ext: Extension) -> None:
        """As the base class, with a process for each file, as many at once as there are processors."""
        compile_one, compile_all, jobs = self.compiler._compile, self.compiler.compile, list[Future[None]]()

        def compile_source(obj: str, source: str, suffix: str, cc: object, extra: list[str], pp: object) -> None:
            # In gnu11 gcc fuses products and sums, and so does clang, which with -ffp-contract=fast would ignore the pragma of lanes.h.
            standard = "-std=c++17" if suffix == ".cpp" else "-std=gnu11"
            more = SANITIZE if source.startswith("sampling/grammar") else []  # vector code takes many minutes to compile with them
            jobs.append(pool.submit(compile_one, obj, source, suffix, cc, [standard, *extra, *more], pp))

        def compile_sources(*args: object, **options: object) -> list[str]:
            objects: list[str] = compile_all(*args, **options)
            for job in jobs:
                job.result()
            return objects

        self.compiler._compile, self.compiler.compile = compile_source, compile_sources
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            super().build_extension(ext)

    def copy_file(self, infile: str, outfile: str, *others: object, **options: object) -> tuple[str, bool]:  # type: ignore[override]
        beside = f"{outfile}.{os.getpid()}"  # others may build at the same time
        super().copy_file(infile, beside, *others, **options)  # type: ignore[arg-type]
        os.replace(beside, outfile)
        return outfile, True


class VisibleEditable(editable_wheel):  # type: ignore[misc]
    """An editable install adds the folder `.typings` to the path: type checkers do not see the import hook that is the default here."""

    def _select_strategy(self, name: str, *_: object) -> _StaticPth:
        link = Path(".typings", "stepgraph")
        if not link.exists():  # a source distribution has no links
            link.parent.mkdir(exist_ok=True)
            link.symlink_to("..")
        return _StaticPth(self.distribution, name, [link.parent])


setup(
    script_name="setup.py",  # the root is the package: otherwise setuptools takes this script for one of its modules
    cmdclass={"build_ext": BuildBeside, "editable_wheel": VisibleEditable},
    ext_modules=[
        Extension(
            "stepgraph.sampling._native",
            sources=sorted(path for folder in FOLDERS for path in glob(f"{folder}/*.c") + glob(f"{folder}/*.cpp")),
            depends=sorted(path for folder in FOLDERS for path in glob(f"{folder}/*.h")),
            include_dirs=["sampling/kernels/c"],
            # Nothing reads errno or floating point exceptions, and both prevent vector code.
            extra_compile_args=[
                *("-O3", "-g0", "-pthread", "-fvisibility=hidden"),
                *("-fno-math-errno", "-fno-trapping-math"),
                "-Wno-psabi",  # no wide vector is passed to another file
                *(["-O1", "-g1", "-fno-omit-frame-pointer"] if SANITIZE else []),
            ],
            extra_link_args=["-pthread", *SANITIZE],
            libraries=["m"],
            language="c++",  # for the link: the automaton compiler is C++17
            optional=not SANITIZE,
        ),
    ],
)
