"""The first hour of a user, from an empty folder: install, demonstration, and the first program of five pages of docs/.

The package is installed there from this checkout, without its dependencies, which the Python that runs this must have. The programs
run as they are in docs/, with the demonstration's model in place of "model". Then the lines of each program are printed next to those
of the same task with other libraries; their programs are in first_hour.md, and do not run.

    python -m tools.first_hour                 runs everything, in a temporary folder
    python -m tools.first_hour --lines         prints the lines only
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepgraph.runtime.commands.flags import STEP_EXAMPLE
from stepgraph.runtime.commands.terminal import table

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("Outlines", "llama-cpp-python", "transformers")
PAGES = {  # by task, as first_hour.md names it
    "Text": "text",
    "JSON into a pydantic object": "json",
    "A chat of 8 users in asyncio": "asyncio",
    "Your own module": "own-model",
    "Your own step, captured and checked": "capture",
}
_PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CHECKOUT_ONLY = shutil.ignore_patterns(".*", "build", "dist", "tests", "tools", "docs", "*.so", "*.egg-info", "__pycache__")


def our_program(task: str) -> str:
    found = _PROGRAM.search((ROOT / "docs" / f"{PAGES[task]}.md").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def other_programs(task: str) -> dict[str, str]:
    """Programs by library, without libraries that cannot do the task."""
    page = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(task)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return {name: text for name in LIBRARIES for text in _PROGRAM.findall(section.partition(f"### {name}\n")[2].partition("### ")[0])}


def count(program: str) -> int:
    """Lines with code."""
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in program.splitlines())


def lines_table() -> list[str]:
    rows = []
    for task in PAGES:
        others = other_programs(task)
        rows.append([task, str(count(our_program(task))), *(str(count(others[name])) if name in others else "-" for name in LIBRARIES)])
    return table(["lines of code", "stepgraph", *LIBRARIES], rows)


def steps(source: Path) -> Iterator[tuple[str, list[str]]]:
    """Names and commands, for a folder with the programs and `site` for the package."""
    python = sys.executable
    yield "install", [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", "site", str(source)]
    yield "demonstration", [python, "-m", "stepgraph", "demo", "--repeats", "1", "--max-new-tokens", "48"]
    for task, page in PAGES.items():
        yield task, [python, f"first_{page}.py"]
    yield "the step from the shell", [python, "-m", "stepgraph", "capture-check", "my_step:make", "--replay"]


def reuse_library(source: Path) -> None:
    """Copy the library that was built in this tree, unless a source is newer: setuptools then packs it and does not compile it again."""
    sources = [path for folder in ("graphs", "sampling") for path in (ROOT / folder).rglob("*") if path.suffix in (".c", ".cpp", ".h")]
    for library in (ROOT / "sampling").glob(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"):
        if library.stat().st_mtime > max(path.stat().st_mtime for path in sources):
            folder = source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "stepgraph" / "sampling"
            folder.mkdir(parents=True)
            shutil.copyfile(library, folder / library.name)


def run(folder: Path) -> bool:
    """Whether every step succeeded. Prints the output of each, and its seconds."""
    with tempfile.TemporaryDirectory() as copy:  # a build writes into its source
        source = shutil.copytree(ROOT, Path(copy) / "stepgraph", ignore=CHECKOUT_ONLY)
        reuse_library(source)
        for task, page in PAGES.items():
            (folder / f"first_{page}.py").write_text(re.sub(r'"model(\.gguf)?"', '"demo"', our_program(task)), encoding="utf-8")
        (folder / "my_step.py").write_text(STEP_EXAMPLE, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
        for name, command in steps(source):
            start = time.perf_counter()
            print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
            if subprocess.run(command, cwd=folder, env=environment, check=False).returncode:
                print(f"{name} failed", flush=True)
                return False
            print(f"-- {time.perf_counter() - start:.1f} s", flush=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true", help="count the lines of the programs, and run none")
    options = parser.parse_args(arguments)
    succeeded = True
    if not options.lines:
        with tempfile.TemporaryDirectory() as folder:
            succeeded = run(Path(folder))
    print("\n" + "\n".join(lines_table()))
    return not succeeded


if __name__ == "__main__":
    sys.exit(main())
