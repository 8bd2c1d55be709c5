"""Fields of a `config.json`, checked one by one. An error names the field, its value and what is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stepgraph.sampling.fields import is_int

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MTP_COUNT = "num_nextn_predict_layers"


class UnsupportedConfigError(ValueError):
    """A config that is well-formed, and needs something that the class does not implement."""


def require_off(config: Mapping[str, Any], options: Mapping[str, object]) -> None:
    """Raises UnsupportedConfigError for an option that is neither missing nor has its value in `options`, which turns it off."""
    for name, off in options.items():
        if config.get(name, off) not in (off, None):
            raise UnsupportedConfigError(f"config.{name}: got {config[name]!r:.100}, expected {off!r}")


def dtype_field(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"config.dtype: got {name!r:.100}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def count_field(config: Mapping[str, Any], name: str, most: int, *, least: int = 1, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not is_int(value) or not least <= value <= most:
        raise ValueError(f"config.{name}: got {value!r:.100}, expected a whole number from {least} to {most}")
    return value


def number_field(config: Mapping[str, Any], name: str, above: float, below: float, *, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below:
        raise ValueError(f"config.{name}: got {value!r:.100}, expected a number between {above} and {below}")
    return float(value)


def flag_field(config: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = config.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.{name}: got {value!r:.100}, expected true or false")
    return bool(value)
