"""How torch's dispatcher declares the signature of a Python function."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any

import torch
from torch import Tensor


def arrangement(hint: Any) -> Callable[[Tensor], Tensor] | None:
    """The function in Annotated[Tensor, function], also in a union with None."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is Annotated:
            arrange: Callable[[Tensor], Tensor] = typing.get_args(part)[1]
            return arrange
    return None


def schema(name: str, hints: Mapping[str, Any], writes: Sequence[str]) -> str:
    """Of an operation with these type hints: its arguments, of which it writes some, then the outputs that the caller allocates."""
    inputs = [f"{_schema_type(hint, each if each in writes else '')} {each}" for each, hint in hints.items() if each != "return"]
    outputs = [f"Tensor(out{index}!) out{index}" for index in range(_count_tensors(hints["return"]))]
    return f"{name}({', '.join([*inputs, *outputs])}) -> ()"


def _schema_type(hint: Any, alias: str) -> str:
    """As a schema writes it; `alias` names the memory of a tensor that is written."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    (plain,) = (part for part in parts if part is not type(None))
    base = typing.get_args(plain)[0] if typing.get_origin(plain) is Annotated else plain
    kind = {Tensor: "Tensor", float: "float", torch.dtype: "ScalarType"}.get(base, "int")
    return (f"{kind}({alias}!)" if alias else kind) + "?" * (type(None) in parts)


def _count_tensors(returned: Any) -> int:
    if returned is type(None):
        return 0
    return 1 if returned is Tensor else len(getattr(returned, "_fields", typing.get_args(returned)))
