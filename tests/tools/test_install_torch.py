"""Packages named torch from folders that form an index: the installed build depends on the requirements of the builds."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "install_torch.py"


def add_wheel(index: Path, name: str, version: str, *requirements: str) -> None:
    folder, info = index / name, f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requirements)]
    wheel = f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(folder / wheel, "w") as files:
        files.writestr(f"{info}/METADATA", "\n".join(lines))
        files.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any")
        files.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs_cuda", "cpu_index", "gpu", "installed", "said"),
    [
        pytest.param(False, "cpu", False, "torch-2.13.0", "", id="the default index has a CPU build"),
        pytest.param(True, "cpu", False, "torch-2.13.0+cpu", "has a build with CUDA libraries", id="CPU index"),
        pytest.param(
            *(True, "missing", False, "torch-2.13.0", "no CPU build of torch==2.13.0 could be installed"),
            id="the CPU index fails",
        ),
        pytest.param(True, "cpu", True, "torch-2.13.0", "", id="a GPU"),
    ],
)
def test_the_build_that_is_installed(needs_cuda: bool, cpu_index: str, gpu: bool, installed: str, said: str, tmp_path: Path) -> None:
    requirements = ["nvidia-cublas", "filelock"] if needs_cuda else ["filelock"]
    for index, version, requires in (("default", "2.13.0", requirements), ("cpu", "2.13.0+cpu", ["filelock"])):
        add_wheel(tmp_path / index, "torch", version, *requires)
        add_wheel(tmp_path / index, "filelock", "3.0")
    add_wheel(tmp_path / "default", "nvidia-cublas", "13.0")
    programs = tmp_path / "bin"
    programs.mkdir()
    if gpu:
        (programs / "nvidia-smi").write_text(f"#!{sys.executable}\n")
        (programs / "nvidia-smi").chmod(0o755)
    settings = {
        "PATH": str(programs),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": (tmp_path / "default").as_uri(),
        "TORCH_CPU_INDEX": (tmp_path / cpu_index).as_uri(),
        "PIP_TARGET": str(tmp_path / "target"),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "torch==2.13.0"], env={**environment, **settings}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [path.name.removesuffix(".dist-info") for path in (tmp_path / "target").glob("torch-*")] == [installed]
    assert said in done.stderr
    assert bool(said) == ("CUDA" in done.stderr)
