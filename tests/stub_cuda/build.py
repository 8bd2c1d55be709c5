"""Builds the stub libraries for the torch of this environment: `python -m tests.stub_cuda.build`.

What torch imports from CUDA libraries is read from its own files. The sources in native/ define the modelled part; the rest is
generated, one function each, which counts its call and returns 0. Needs g++ and readelf, no CUDA toolkit.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

DRIVER = "libcuda.so.1"
# Sources of each library besides generated functions, by its name without a version. Only the driver's library holds the model; the
# others call it.
SOURCES = {
    "libcuda": ("report", "memory", "work", "capture", "graph", "kernels", "driver_api", "query"),
    "libcudart": ("runtime_api",),
    "libcublas": ("cublas_api",),
    "libcublasLt": ("cublaslt_api",),
    "libcusolver": ("cusolver_api",),
    "libnccl": ("nccl_api",),
}
# Libraries whose symbols carry no version in torch's import table, by the prefix of the function names.
UNVERSIONED = {
    "nccl": "libnccl.so.2",
    "cusparseLt": "libcusparseLt.so.0",
    "cuFile": "libcufile.so.0",
    "curand": "libcurand.so.10",
    "nvshmem": "libnvshmem_host.so.3",
}
SYMBOL_VERSIONS = {"NVSHMEM": "libnvshmem_host.so.3"}  # other symbol versions have the name of their library
FOREIGN = re.compile(r"lib(cu|nv|nccl)[A-Za-z_]*\.so\.\d+$")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")


def torch_folder() -> Path:
    """The folder of the installed torch, found without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"stub CUDA: no torch in {sys.prefix}, expected the CUDA build of torch")
    return Path(spec.origin).parent


def folder_of_this_torch() -> Path:
    """The build folder for the installed version of torch, so that several environments can use one checkout."""
    (version,) = re.findall(r"^__version__ = '(.+)'", (torch_folder() / "version.py").read_text(), re.MULTILINE)
    return ROOT / "build" / f"stub_cuda-{version}"


def libraries() -> tuple[Path, ...]:
    return tuple(sorted((torch_folder() / "lib").glob("*.so")))


def _readelf(*arguments: str | Path) -> str:
    return subprocess.run(["readelf", "-W", *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def imported_symbols(files: Iterable[Path]) -> tuple[dict[str, set[str]], set[str]]:
    """Functions per library, and the libraries whose symbols have versions."""
    symbols: dict[str, set[str]] = defaultdict(set)
    versioned: set[str] = set()
    for file in files:
        for name in re.findall(r"NEEDED.*\[(.+)\]", _readelf("-d", file)):
            if FOREIGN.match(name):
                symbols[name]  # also a library that is linked and not called
        for line in _readelf("--dyn-syms", file).splitlines():
            fields = line.split()
            if len(fields) < 8 or fields[6] != "UND":
                continue
            name, _, version = fields[7].partition("@")
            version = version.lstrip("@")
            library = SYMBOL_VERSIONS.get(version, version)
            if FOREIGN.match(library):
                symbols[library].add(name)
                versioned.add(library)
            elif not version:
                library = next((library for prefix, library in UNVERSIONED.items() if name.startswith(prefix)), "")
                library = library or (DRIVER if re.match(r"cu[A-Z]", name) else "")
                if library:
                    symbols[library].add(name)
    symbols.setdefault(DRIVER, set())
    return symbols, versioned


def sources_of(library: str) -> list[Path]:
    return [HERE / "native" / f"{name}.cpp" for name in SOURCES.get(library.partition(".so")[0], ())]


def defined_functions(library: str) -> set[str]:
    """Functions that the sources of a library define, found by text search: each begins a line inside `extern "C"`."""
    text = "".join(path.read_text() for path in sources_of(library))
    return set(re.findall(r"^[A-Za-z].*?\b(_*(?:cu|nccl)[A-Za-z0-9_]+)\s*(?:, )?\(", text, re.MULTILINE))


def generated_source(library: str, names: Iterable[str]) -> str:
    """Functions that count their call and return 0, or a text where the name says so; one of cuBLAS issues a kernel."""
    lines = ['#include "api.h"', 'extern "C" {']
    if library.startswith("libcublas.so"):
        lines.append("int stub_library_kernel(void* handle, const char* name);")
    for name in sorted(names):
        count = f'static stub::Counter& calls = stub::counter("{name}"); calls.add();'
        if name.endswith(("ErrorString", "LastError")) and not name.startswith("cuda"):
            lines.append(f'const char* {name}() {{ {count} return "stub CUDA"; }}')
        elif re.match(r"cublas(?!Lt|Set|Get)", name):
            lines.append(f'int {name}(void* handle) {{ {count} return stub_library_kernel(handle, "{name}"); }}')
        else:
            lines.append(f"long {name}() {{ {count} return 0; }}")
    return "\n".join([*lines, "}", ""])


def _build_library(library: str, names: set[str], versioned: bool, folder: Path, cuda_major: str) -> None:
    generated = folder / f"{library}.cpp"
    generated.write_text(generated_source(library, names - defined_functions(library)))
    command = [
        "g++",
        *FLAGS,
        f"-DSTUB_CUDA_MAJOR={cuda_major}",
        f"-I{HERE / 'native'}",
        f"-Wl,-soname,{library}",
        "-o",
        folder / library,
        generated,
        *sources_of(library),
    ]
    if versioned:
        version = next((version for version, owner in SYMBOL_VERSIONS.items() if owner == library), library)
        script = folder / f"{library}.map"
        script.write_text(f"{version} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script={script}")
    if library != DRIVER:
        # Linked even if nothing is called: loading a library also loads the driver's library, which holds the counters.
        command += ["-Wl,--no-as-needed", folder / DRIVER, "-Wl,-rpath,$ORIGIN"]
    else:
        command.append("-ldl")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"stub CUDA: {library} was not built:\n{done.stderr[-4000:]}")


def fingerprint() -> str:
    """Hash of everything that the libraries depend on."""
    digest = hashlib.sha256()
    for path in [*sorted((HERE / "native").iterdir()), Path(__file__)]:
        digest.update(path.read_bytes())
    for path in libraries():
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()


def built(folder: Path) -> bool:
    stamp = folder / "fingerprint"
    return stamp.exists() and stamp.read_text() == fingerprint()


def build() -> Path:
    """The folder with the libraries; built in another one and renamed, since several processes may start at once."""
    folder = folder_of_this_torch()
    if built(folder):
        return folder
    symbols, versioned = imported_symbols(libraries())
    work = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (cuda_major,) = (name.rpartition(".")[2] for name in symbols if name.startswith("libcudart.so"))
    _build_library(DRIVER, symbols[DRIVER], DRIVER in versioned, work, cuda_major)  # the others are linked with it
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        others = [name for name in symbols if name != DRIVER]
        list(pool.map(lambda name: _build_library(name, symbols[name], name in versioned, work, cuda_major), others))
    (work / "libcuda.so").symlink_to(DRIVER)
    (work / "libraries").write_text("\n".join(sorted(symbols, key=lambda name: (name != DRIVER, name))) + "\n")
    (work / "fingerprint").write_text(fingerprint())
    shutil.rmtree(folder, ignore_errors=True)
    try:
        work.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(work)
    return folder


def library_names() -> list[str]:
    """The libraries, in the order in which they are loaded."""
    return (folder_of_this_torch() / "libraries").read_text().split()


if __name__ == "__main__":
    print(f"stub CUDA: {build()}")
