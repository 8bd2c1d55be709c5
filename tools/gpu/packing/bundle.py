"""Builds a bundle: pinned wheels, a wheel of prebuilt libraries, large files in parts, and a manifest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.packing import triton_cache, unpack

PART_BYTES = 58 << 20  # limit of the file transfer to such hosts
MAX_WHEEL_BYTES = PART_BYTES  # wheels are not split
WHEELS = Path(__file__).resolve().parent / "wheels.txt"
MAX_GLIBC_MINOR = 35  # glibc of the host; torch for CUDA 13 needs at least 2.28
TAGS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(MAX_GLIBC_MINOR, 4, -1)), "manylinux2014_x86_64", "linux_x86_64")


def read_pins(path: Path) -> list[str]:
    """`name==version` lines; ValueError names a wrong line."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.split("#")[0].strip()
        if text and text.count("==") != 1:
            raise ValueError(f"{path}:{number}: got {text!r}, expected name==version")
        found += [text] if text else []
    return found


def without_installed(pins: Sequence[str], installed_list: Path | None) -> list[str]:
    """Lines whose package is not in the list `installed_list`, in any version: packages of the host are not replaced."""
    lines = [] if installed_list is None else installed_list.read_text(encoding="utf-8").splitlines()
    installed = {_normalised_name(line) for line in lines}
    return [line for line in pins if _normalised_name(line) not in installed]


def _normalised_name(line: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=@\s]", line.strip())[0]).lower()


def download(pins: Sequence[str], folder: Path, python: str, options: Sequence[str]) -> None:
    """Download these wheels for a Python version on Linux, without dependencies. RuntimeError has the message of pip."""
    folder.mkdir(parents=True, exist_ok=True)
    short = python.replace(".", "")
    tags = [part for tag in TAGS for part in ("--platform", tag)]
    abis = [part for abi in (f"cp{short}", "abi3", "none") for part in ("--abi", abi)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), "--quiet"]
    command += ["--disable-pip-version-check", "--python-version", python, "--implementation", "cp", *abis, *tags, *options, *pins]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"pip download: {result.stderr.strip()[-2000:]}")


def split_file(path: Path, name: str, bundle: Path) -> dict[str, Any]:
    """Split a file. Returns its manifest entry."""
    parts: list[str] = []
    with path.open("rb") as file:
        while piece := file.read(PART_BYTES):
            part = f"parts/{name}.{len(parts):03d}"
            (bundle / part).parent.mkdir(parents=True, exist_ok=True)
            (bundle / part).write_bytes(piece)
            parts.append(part)
    return {"parts": parts, "bytes": path.stat().st_size, "sha256": unpack.digest(path)}


# FlashInfer looks for libraries in a package of this name before it builds. Libraries in its workspace would be rebuilt, since the
# build commands there contain paths of the build machine.
PREBUILT = "flashinfer_jit_cache"
PREBUILT_MODULE = """\"\"\"Prebuilt libraries of FlashInfer.\"\"\"

from pathlib import Path

__version__ = {version!r}


def get_jit_cache_dir():
    return str(Path(__file__).parent / "programs")
"""


def prebuilt_wheel(libraries: Path, pins: Sequence[str], folder: Path) -> Path:
    """A wheel of the libraries in a FlashInfer workspace, in the package where the packed FlashInfer version looks for them."""
    versions = [line.split("==")[1] for line in pins if line.split("==")[0] == "flashinfer-python"]
    found = sorted(libraries.rglob("*.so"))
    if not found or not versions:
        raise ValueError(f"--libraries: got {len(found)} .so files and {len(versions)} flashinfer-python to pack, expected some and one")
    path, dist_info = folder / f"{PREBUILT}-{versions[0]}-py3-none-linux_x86_64.whl", f"{PREBUILT}-{versions[0]}.dist-info"
    texts = {
        f"{PREBUILT}/__init__.py": PREBUILT_MODULE.format(version=versions[0]),
        f"{dist_info}/METADATA": f"Metadata-Version: 2.1\nName: {PREBUILT.replace('_', '-')}\nVersion: {versions[0]}\n",
        f"{dist_info}/WHEEL": "Wheel-Version: 1.0\nGenerator: gpu_pack\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n",
    }
    files = {f"{PREBUILT}/programs/{library.stem}/{library.name}": library for library in found}
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, library in files.items():
            archive.write(library, name)
        for name, text in texts.items():
            archive.writestr(name, text)
        archive.writestr(f"{dist_info}/RECORD", "".join(f"{name},,\n" for name in (*files, *texts, f"{dist_info}/RECORD")))
    return path


def make_bundle(
    bundle: Path,
    pins: Sequence[str],
    python: str,
    options: Sequence[str],
    model: Path | None,
    libraries: Path | None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Fill an empty folder; returns its manifest."""
    if bundle.exists() and any(bundle.iterdir()):
        raise ValueError(f"--out: got {bundle}, which is not empty, expected a new or empty folder")
    if libraries is not None:
        prebuilt_wheel(libraries, pins, bundle / "wheels")
    download(pins, bundle / "wheels", python, options)
    wheels = sorted((bundle / "wheels").iterdir())
    large = [wheel.name for wheel in wheels if wheel.stat().st_size > MAX_WHEEL_BYTES]
    if large:
        raise ValueError(f"wheels: got {', '.join(large)} of more than {MAX_WHEEL_BYTES} bytes, expected smaller wheels")
    made_by = None
    if cache is not None:
        made_by = triton_cache.pack(cache, bundle / unpack.CACHE_ARCHIVE)
        if made_by["python"] != python:
            raise ValueError(f"--triton-cache: got a cache of Python {made_by['python']}, expected {python}, as --python")
    joined = {} if model is None else {model.name: split_file(model, model.name, bundle)}
    shutil.copyfile(unpack.__file__, bundle / "install.py")
    files = {name: {"bytes": (bundle / name).stat().st_size, "sha256": unpack.digest(bundle / name)} for name in _names(bundle)}
    manifest = {"python": python, "pins": list(pins), "files": files, "joined": joined, "triton_cache": made_by}
    (bundle / unpack.MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def _names(bundle: Path) -> Iterator[str]:
    for path in sorted(bundle.rglob("*")):
        if path.is_file():
            yield path.relative_to(bundle).as_posix()
