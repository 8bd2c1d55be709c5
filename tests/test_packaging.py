"""The list of packages is the tree, and a wheel built from the tree holds all of it and nothing else."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import stepgraph

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
CORE = ("runtime", "graphs", "sampling")


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


def test_a_wheel_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"  # a build leaves `build/` behind, and would pick up what an earlier one left there
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md", "__init__.py", "py.typed"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for folder in (*CORE, "tests", "tools"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", "import setuptools.build_meta as build; print(build.build_wheel('..'))"]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    wanted = {"stepgraph/__init__.py", "stepgraph/py.typed"}
    wanted |= {f"stepgraph/{path.relative_to(ROOT).as_posix()}" for folder in CORE for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in names if name.endswith((".py", ".typed"))} == wanted
    assert {name.split("/")[0] for name in names} == {"stepgraph"}
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())
