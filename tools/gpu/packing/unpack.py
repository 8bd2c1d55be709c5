"""Installs a bundle of gpu_pack.py on a host without a package index: verifies checksums, joins parts, installs the wheels.

    python install.py                       beside the manifest
    python install.py --check               verify only
    python install.py --into FOLDER         folder for the model (default: beside the manifest)

Needs Python and pip only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
CHUNK = 1 << 20
CACHE_ARCHIVE = "triton_cache.zip"
CACHE_KEYS = "made_by.json"
# Values that must be equal for Triton to find its entries; `platform` matters for launchers only.
PRINT_CACHE_KEYS = """
import hashlib, json, platform, sys
from triton.runtime.build import platform_key
import triton
try:
    from triton.runtime.cache import triton_key
except ImportError:  # up to Triton 3.4
    from triton.compiler.compiler import triton_key
python = ".".join(map(str, sys.version_info[:2]))
key = hashlib.sha256(triton_key().encode()).hexdigest()
print(json.dumps({"python": python, "triton": triton.__version__, "key": key, "platform": platform_key()}))
"""


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            found.update(piece)
    return found.hexdigest()


def read_manifest(bundle: Path) -> dict[str, Any]:
    path = bundle / MANIFEST
    if not path.is_file():
        raise ValueError(f"{bundle}: got no {MANIFEST}, expected a folder written by gpu_pack.py")
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def problems(bundle: Path, manifest: dict[str, Any]) -> list[str]:
    """One line per file that is missing, truncated or changed."""
    found = []
    for name, entry in manifest["files"].items():
        path = bundle / name
        if not path.is_file():
            found.append(f"{name}: missing")
        elif path.stat().st_size != entry["bytes"]:
            found.append(f"{name}: got {path.stat().st_size} bytes, expected {entry['bytes']}")
        elif digest(path) != entry["sha256"]:
            found.append(f"{name}: checksum differs from the manifest")
    return found


def join(bundle: Path, name: str, entry: dict[str, Any], into: Path) -> Path:
    """Join the parts of a file; ValueError if the checksum differs."""
    path = into / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as whole:
        for part in entry["parts"]:
            with (bundle / part).open("rb") as file:
                shutil.copyfileobj(file, whole, CHUNK)
    if digest(path) != entry["sha256"]:
        raise ValueError(f"{path}: checksum differs from the manifest")
    return path


def install(bundle: Path, into: Path, python: str = sys.executable) -> list[str]:
    """Install; returns one line per action. Changes nothing unless every file is intact."""
    manifest = read_manifest(bundle)
    wrong = problems(bundle, manifest)
    if wrong:
        raise ValueError(f"{bundle}: {'; '.join(wrong)}")
    wheels = [str(bundle / name) for name in manifest["files"] if name.endswith(".whl")]
    done = []
    if wheels:
        subprocess.run([python, "-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check", *wheels], check=True)
        done.append(f"installed {len(wheels)} wheels")
    for name, entry in manifest["joined"].items():
        done.append(f"joined {join(bundle, name, entry, into)}")
    if manifest.get("triton_cache"):
        cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
        done.append(install_cache(bundle / CACHE_ARCHIVE, manifest["triton_cache"], cache, python))
    return done


def install_cache(archive: Path, made_by: dict[str, str], into: Path, python: str = sys.executable) -> str:
    """Add the entries to a Triton cache, if the Triton of `python` would find them; returns what was done."""
    result = subprocess.run([python, "-c", PRINT_CACHE_KEYS], capture_output=True, text=True, check=False)
    here = json.loads(result.stdout) if result.returncode == 0 else {}
    if here.get("key") != made_by["key"]:
        has = f"Triton {here['triton']} for Python {here['python']}" if here else "no Triton with such keys"
        return f"left out the Triton cache: it is of Triton {made_by['triton']} for Python {made_by['python']}, this host has {has}"
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(into)
        groups = [into / name for name in packed.namelist() if Path(name).name.startswith("__grp__")]
    for group in groups:  # each has the paths of its files
        paths = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
        moved = {name: str((group.parent / Path(path).name).resolve()) for name, path in paths.items()}
        group.write_text(json.dumps({"child_paths": moved}), encoding="utf-8")
    launchers = "" if here["platform"] == made_by["platform"] else "; launchers are compiled here: platform.architecture() differs"
    return f"added {len(groups)} programs to {into}{launchers}"


def main(arguments: list[str] | None = None, bundle: Path | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="verify every file, install nothing")
    parser.add_argument("--into", type=Path, help="folder for the model (default: the bundle)")
    options = parser.parse_args(arguments)
    bundle = bundle or Path(__file__).resolve().parent
    try:
        if options.check:
            wrong = problems(bundle, read_manifest(bundle))
            print("\n".join(wrong) or "every file is intact")
            return 1 if wrong else 0
        print("\n".join(install(bundle, options.into or bundle)))
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
