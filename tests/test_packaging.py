"""The listed packages are those of the tree, and a wheel built from the tree holds all of it and nothing else."""

from __future__ import annotations

import importlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import stepgraph
from tests.helpers.c_library import needs_c
from tools.first_hour import reuse_library

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
CORE = ("runtime", "graphs", "sampling")
NO_COMPILERS: dict[str, Any] = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}


def listed_packages() -> set[str]:
    table = re.search(r"^packages = \[(.*?)\]", PROJECT, re.DOTALL | re.MULTILINE)
    assert table is not None
    return set(re.findall(r'"([^"]+)"', table.group(1)))


def packages_of(root: Path) -> set[str]:
    found = (path.parent.relative_to(root) for folder in CORE for path in (root / folder).rglob("__init__.py"))
    return {"stepgraph", *(".".join(("stepgraph", *path.parts)) for path in found)}


def test_the_listed_packages_are_the_tree() -> None:
    assert listed_packages() == packages_of(ROOT)


def test_every_folder_with_a_module_is_a_package() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for folder in CORE for path in (ROOT / folder).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()] == []


def test_the_version_is_stated_once() -> None:
    stated = re.search(r'^version = "(.*)"', PROJECT, re.MULTILINE)
    assert stated is not None
    assert stated.group(1) == stepgraph.__version__


def test_the_tests_run_against_this_tree() -> None:
    assert stepgraph.__file__ is not None
    assert Path(stepgraph.__file__).resolve().parent == ROOT
    for folder in CORE:
        module = importlib.import_module(f"stepgraph.{folder}")
        assert module.__file__ is not None
        assert Path(module.__file__).resolve().parent == ROOT / folder
        assert folder not in sys.modules, f"a bare `import {folder}` made a second copy of the package"


PLACE = test_the_tests_run_against_this_tree


def test_a_checkout_next_to_a_program_gives_way_to_the_installed_package(tmp_path: Path) -> None:
    program, site = tmp_path / "program", tmp_path / "site"
    for folder, text in ((program, (ROOT / "__init__.py").read_text(encoding="utf-8")), (site, "")):
        (folder / "stepgraph").mkdir(parents=True)
        (folder / "stepgraph" / "__init__.py").write_text(text, encoding="utf-8")
    (program / "stepgraph" / "setup.py").touch()
    (program / "program.py").write_text("import stepgraph; print(stepgraph.__file__)", encoding="utf-8")
    for path, found in ((site, site), (program, program), (Path(), program)):  # installed; checkout in PYTHONPATH; not installed
        command = [sys.executable, "-S", str(program / "program.py")]
        printed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(path)}, capture_output=True, text=True, check=True).stdout
        assert Path(printed.strip()) == found / "stepgraph" / "__init__.py"


def build(what: str, tmp_path: Path, *, with_library: bool = False, **environment: str) -> Path:
    """A wheel or an sdist of a copy of the tree, since a build creates `build/` and reuses files of an earlier one."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    source.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for folder in (*CORE, "tests", "tools", "docs", ".ci"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    if with_library:
        reuse_library(source)
    command = [sys.executable, "-c", f"import setuptools.build_meta as build; print(build.build_{what}('..'))"]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert built.returncode == 0, built.stderr
    (result,) = [path for path in tmp_path.iterdir() if path.suffix in (".whl", ".gz")]
    return result


def files_of(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]


def hurried(tmp_path: Path, **compilers: str) -> dict[str, str]:
    """C and C++ compilers without optimisation, for libraries that cannot be reused: what is built here is not run."""
    for name, compiler in compilers.items():
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n', encoding="ascii")
        script.chmod(0o755)
    return {name: str(tmp_path / name) for name in compilers}


def test_a_wheel_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    compilers = {name: shutil.which((sysconfig.get_config_var(name) or "cc").split()[0]) for name in ("CC", "CXX")}
    found = {name: compiler for name, compiler in compilers.items() if compiler is not None}
    wheel = build("wheel", tmp_path, with_library=True, **hurried(tmp_path, **found))
    names = files_of(wheel)
    expected = {"stepgraph/__init__.py", "stepgraph/__main__.py", "stepgraph/py.typed"}
    kinds = (".py", ".c", ".cpp", ".h")
    expected |= {
        f"stepgraph/{path.relative_to(ROOT).as_posix()}" for folder in CORE for path in (ROOT / folder).rglob("*") if path.suffix in kinds
    }
    assert {name for name in names if name.endswith((*kinds, ".typed"))} == expected
    assert {name.split("/")[0] for name in names} == {"stepgraph"}
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())
    assert sum(name.endswith(".so") for name in names) == (1 if len(found) == len(compilers) else 0)


def test_a_wheel_without_a_compiler_lacks_only_the_c_library(tmp_path: Path) -> None:
    names = files_of(build("wheel", tmp_path, **NO_COMPILERS))
    assert {"stepgraph/sampling/grammar/link/c/host_link.c", "stepgraph/graphs/layers/c/attention.c"} <= set(names)
    assert not [name for name in names if name.endswith(".so")]


def setup_fields(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py declares."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(pytest.importorskip("setuptools", minversion="77"), "setup", lambda **fields: given.update(fields))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return given


# Data-flow warnings need the optimiser, which takes half a minute. The last warning is about vectors that no register holds: with sums
# in memory products, attention and filters took up to eleven times as long.
VECTORS = ("-O1", "-march=x86-64-v3", "-Wno-unknown-warning-option", "-Wvector-operation-performance")
CASES = {("-O0",): pytest.mark.slow, ("-O1",): pytest.mark.soak, VECTORS: pytest.mark.slow}


@pytest.mark.parametrize("options", [pytest.param(options, marks=mark, id=options[-1]) for options, mark in CASES.items()])
def test_the_c_library_compiles_without_warnings(options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library,) = setup_fields(monkeypatch)["ext_modules"]
    if options == VECTORS and platform.machine() != "x86_64":
        pytest.skip("for x86-64")
    flags = [
        *library.extra_compile_args,
        *(f"-I{folder}" for folder in library.include_dirs),
        *options,
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    for source in [each for each in library.sources if options != VECTORS or each.endswith(".c")]:
        name, standard = ("CXX", "-std=c++17") if source.endswith(".cpp") else ("CC", "-std=gnu11")
        compiler = shutil.which((sysconfig.get_config_var(name) or "cc").split()[0])
        if compiler is None:
            pytest.skip("no compiler")
        command = [compiler, standard, *flags, "-c", source, "-o", str(tmp_path / "object.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@needs_c
def test_the_command_that_tests_each_built_wheel_passes(tmp_path: Path) -> None:
    (command,) = re.findall(r'^test-command = "(.*)"$', PROJECT, re.MULTILINE)
    command = command.replace('\\"', '"').replace("python ", f"{sys.executable} ")
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "self-test" in done.stdout, done.stdout + done.stderr


def test_a_rebuilt_library_replaces_the_old_one_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process may have the old library open, and another may open it during the build."""
    setuptools = pytest.importorskip("setuptools", minversion="77")
    given = setup_fields(monkeypatch)
    new, old, seen = tmp_path / "built.so", tmp_path / "used.so", list[bytes]()
    new.write_bytes(b"new" * 9000)
    old.write_bytes(b"old" * 9000)
    with old.open("rb") as used:
        replace = os.replace

        def seen_before(first: str, second: str) -> None:
            seen.append(old.read_bytes())
            replace(first, second)

        monkeypatch.setattr(os, "replace", seen_before)
        given["cmdclass"]["build_ext"](setuptools.Distribution()).copy_file(str(new), str(old), level=1)
        assert used.read() == b"old" * 9000
    assert seen == [b"old" * 9000], "the old library exists until the new one is complete"
    assert old.read_bytes() == new.read_bytes() and sorted(tmp_path.iterdir()) == [new, old]


def test_public_names_do_not_import_transformers() -> None:
    program = (
        "import sys, stepgraph; early = {'torch', 'transformers'} & {*sys.modules}; "
        "[getattr(stepgraph, name) for name in stepgraph.__all__]; print(early, 'transformers' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == "set() False\n"


@pytest.mark.slow
def test_an_sdist_holds_all_that_a_clone_has_and_its_tests_run(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        archive.extractall(tmp_path / "unpacked", filter="data")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    files = {name for name in listed if name != ".typings/stepgraph"} or {"setup.py", "Makefile", "tests/conftest.py", "docs/text.md"}
    assert files <= names
    (root,) = (tmp_path / "unpacked").iterdir()
    for library in (ROOT / "sampling").glob("_native*.so"):
        shutil.copy(library, root / "sampling")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "stepgraph").symlink_to(root)  # as in .typings of an editable install
    files_run = ("tests/sampling/test_keywords.py", "tests/sampling/test_fields.py", "tests/test_parts.py")
    command = [sys.executable, "-m", "pytest", "-q", *files_run, f"tests/test_packaging.py::{PLACE.__name__}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0 and int(done.stdout.rpartition(" passed")[0].split()[-1]) >= 30, done.stdout + done.stderr


def test_type_checkers_see_an_editable_install(tmp_path: Path) -> None:
    """Type checkers read the paths in .pth files, and run no import hooks."""
    wheel = zipfile.ZipFile(build("editable", tmp_path, **NO_COMPILERS))
    (path,) = (name for name in wheel.namelist() if name.endswith(".pth"))
    folder = Path(wheel.read(path).decode().strip())
    assert os.listdir(folder) == ["stepgraph"] and (folder / "stepgraph").samefile(tmp_path / "source")
    assert (folder / "stepgraph" / "py.typed").exists()


def test_type_checkers_see_the_package_in_a_checkout_of_any_name() -> None:
    link = ROOT / ".typings" / "stepgraph"
    assert link.samefile(ROOT) if link.exists() else not (ROOT / ".git").exists(), "a source distribution has no links"
    assert 'mypy_path = "$MYPY_CONFIG_FILE_DIR/.typings"' in PROJECT and 'stubPath = ".typings"' in PROJECT


WRONG_PROGRAM = """
from stepgraph import Engine, Job

engine = Engine.from_pretrained("demo")
job: Job = engine.generate("a", max_new_tokens=3)
engine.generate("a", max_new_tokens="3")
"""


@pytest.mark.soak
@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_type_checkers_find_a_wrong_argument_after_an_install(how: str, tmp_path: Path) -> None:
    """`make lint` does the same in a checkout, with tests/typed_program.py."""
    environment, built = tmp_path / "environment", zipfile.ZipFile(build(how, tmp_path, **NO_COMPILERS))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    built.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")  # .pth files in that folder are not read
    program, python = tmp_path / "program.py", str(environment / "bin" / "python")
    program.write_text(WRONG_PROGRAM, encoding="utf-8")
    for checker in (
        ["mypy", "--cache-dir", str(tmp_path / "cache"), "--python-executable"],
        ["basedpyright", "--level", "error", "--pythonpath"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *checker, python, str(program)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        lines = [int(line) for line in re.findall(r"program\.py:(\d+)", done.stdout)]
        assert set(lines) == {6} and '"generate"' in done.stdout, done.stdout + done.stderr
