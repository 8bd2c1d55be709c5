"""Fuzz inputs: JSON values, so that every input can be saved as text, with tagged forms for values that JSON cannot express.

`{"$": "tuple", "of": [1, 2]}` is a tuple. Other forms are bytes, tensors, arrays, pairs (a dict with any keys), `same` (one value
repeated in a list), `text` (a repeated text) and `power` (of ten).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Value = Any  # JSON, including NaN, infinities and lone surrogates
MOST_REPEATS = 20_000
_TENSOR_TYPES = {name: getattr(torch, name) for name in ("float32", "float16", "int64", "int32", "bool")}


def form(kind: str, of: Value, **others: Value) -> Value:
    return {"$": kind, "of": of, **others}


def written(value: Value) -> str:
    return json.dumps(value)


def blob(data: bytes) -> Value:
    return form("bytes", base64.b64encode(data).decode())


def bytes_of(value: Value) -> bytes | None:
    """The bytes of a `blob`; None for any other value."""
    try:
        return base64.b64decode(value["of"]) if isinstance(value, dict) and value.get("$") == "bytes" else None
    except (KeyError, TypeError, ValueError, binascii.Error):
        return None


def built(value: Value) -> Any:
    """The Python value of an input. An invalid form is kept as a plain dict."""
    if isinstance(value, list):
        return [built(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if isinstance(kind, str) and kind in _FORMS and "of" in value:
        try:
            return _FORMS[kind](value)
        except (TypeError, ValueError, OverflowError, RuntimeError, KeyError):
            return value
    return {name: built(each) for name, each in value.items()}


def _pairs(value: Value) -> dict[Any, Any]:
    return {built(key): built(each) for key, each in value["of"]}


def _same(value: Value) -> list[Any]:
    return [built(value["of"])] * max(0, min(MOST_REPEATS, int(value["times"])))


_FORMS: dict[str, Callable[[Value], Any]] = {
    "tuple": lambda value: tuple(map(built, value["of"])),
    "bytes": lambda value: base64.b64decode(value["of"]),
    "pairs": _pairs,
    "same": _same,
    "text": lambda value: str(value["of"]) * max(0, min(MOST_REPEATS, int(value["times"]))),
    "tensor": lambda value: torch.tensor(value["of"], dtype=_TENSOR_TYPES[value.get("type", "float32")]),
    "array": lambda value: np.array(value["of"]),
    "number": lambda value: np.int64(value["of"]),
    "power": lambda value: 10 ** max(0, min(MOST_REPEATS, int(value["of"]))),
    "object": lambda value: object(),
}
