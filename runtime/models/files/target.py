"""Opens a target with the class that runs it: a native one, or that of `transformers`."""

from __future__ import annotations

from pathlib import Path

import torch

from stepgraph.runtime.models.files.checkpoint import DEQUANTISED, Checkpoint, open_checkpoint
from stepgraph.runtime.models.files.config_fields import UnsupportedConfigError
from stepgraph.runtime.models.files.transformers_folder import TransformersCheckpoint, open_transformers, why_no_transformers
from stepgraph.sampling.fields import check_value, checked_path, one_of

AUTO, NATIVE, TRANSFORMERS = "auto", "native", "transformers"
Target = Checkpoint | TransformersCheckpoint


def open_target(path: str | Path, dtype: torch.dtype | None = None, weights: str = DEQUANTISED, implementation: str = AUTO) -> Target:
    """Read and check everything except the weights. ValueError names the file and the field, tensor or layer.

    implementation: AUTO is NATIVE if the native class implements the config, else TRANSFORMERS.
    """
    check_value("implementation", implementation, one_of((AUTO, NATIVE, TRANSFORMERS)))
    if implementation == TRANSFORMERS:
        if weights != DEQUANTISED:
            raise ValueError(f"weights: got {weights!r} with implementation={TRANSFORMERS!r}, expected {DEQUANTISED!r}")
        return open_transformers(checked_path("path", path), dtype)
    try:
        return open_checkpoint(path, dtype, weights)
    except UnsupportedConfigError as error:
        if implementation == NATIVE or weights != DEQUANTISED or not checked_path("path", path).is_dir():
            raise
        if why := why_no_transformers():
            raise ValueError(f"{error}; other models need implementation={TRANSFORMERS!r}, and {why}") from None
        return open_transformers(Path(path), dtype)
