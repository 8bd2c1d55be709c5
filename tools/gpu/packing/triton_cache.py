"""Fills a Triton cache over stub CUDA libraries, for `gpu_pack.py --triton-cache`: a GPU host then compiles none of its programs.

    python -m tools.gpu.packing.triton_cache --out cache            in the environment of `make stub-cuda`; for compute capability 9.0

Contains the programs of default captures and of rounds of the checked 1B and 8B models with one row. A host compiles all others.
The key of an entry depends on the files of Triton (those of one version for one version of Python), the source and line of the program, the
types of its arguments, the options, ptxas and environment variables such as TRITON_DEBUG. The key of a launcher, which needs a C compiler,
depends on its source and the result of `platform.architecture()`, which depends on whether the tool `file` is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tools.gpu.packing import unpack

SIZES = ("toy", "1B", "8B")


def fill(sizes: Collection[str]) -> dict[str, int]:
    """Capture in this process, whose cache is TRITON_CACHE_DIR. Returns how many programs were compiled and how many were found."""
    from tests.stub_cuda.preload import preload

    preload()
    import triton

    found = {"compiled": 0, "found": 0}

    def count(*, cache_hit: bool, **_: Any) -> None:
        found["found" if cache_hit else "compiled"] += 1

    triton.knobs.compilation.listener = count
    for size in sizes:
        _capture(size)
    return found


def _capture(size: str) -> None:
    import torch

    from stepgraph import Engine, EngineConfig
    from stepgraph.graphs import make_backend
    from stepgraph.graphs.graph_key import GraphKey
    from stepgraph.sampling import kernels
    from tests.helpers.node_counts import make_round
    from tools.gpu.checks.context import VOCABULARY, toy_draft, toy_target
    from tools.gpu.checks.shapes import SHAPES

    device = torch.device("cuda", 0)
    if kernels.describe(device) != "triton":
        raise RuntimeError(f"kernels: got {kernels.describe(device)}, expected triton")
    if size == "toy":
        with Engine(toy_target(device), toy_draft(device, 0.7), vocabulary=VOCABULARY, config=EngineConfig()) as engine:
            engine.capture()
        return
    for constrained, sampled, on_device in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)):
        step, buffers = make_round(SHAPES[size], GraphKey(1, bool(constrained), bool(sampled), device=bool(on_device)), device)
        with contextlib.closing(make_backend("cuda")) as backend:
            backend.capture(step, buffers)


def pack(cache: Path, archive_path: Path) -> dict[str, str]:
    """Write a cache to one file; returns the versions that made it."""
    made_by: dict[str, str] = json.loads((cache / unpack.CACHE_KEYS).read_text(encoding="utf-8"))
    with zipfile.ZipFile(archive_path, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _files(cache):
            archive.write(path, path.relative_to(cache))
    return made_by


def _files(cache: Path) -> Iterator[Path]:
    for path in sorted(cache.rglob("*")):
        if path.is_file() and path.name not in (unpack.CACHE_KEYS, "lock"):
            yield path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the cache; existing entries are kept")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES, help="models (default: all)")
    options = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(options.out.resolve())
    found = fill(options.sizes)
    keys = subprocess.run([sys.executable, "-c", unpack.PRINT_CACHE_KEYS], capture_output=True, text=True, check=True).stdout
    (options.out / unpack.CACHE_KEYS).write_text(keys, encoding="utf-8")
    print(json.dumps(found | {"bytes": sum(path.stat().st_size for path in _files(options.out))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
