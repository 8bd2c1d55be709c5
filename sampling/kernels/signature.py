"""The signature of an operation, from the type hints of its reference: forms of arguments, and the schema for torch's dispatcher."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor


class ArgumentForm(NamedTuple):
    """The layout and the types that an annotation requires of an argument."""

    arrange: Callable[[Tensor], Tensor] | None = None
    types: tuple[torch.dtype, ...] = ()


def form_of(hint: Any) -> ArgumentForm:
    """The form in Annotated[Tensor, arrange, types], also in a union with None."""
    annotated = (part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is Annotated)
    return next((ArgumentForm(*typing.get_args(part)[1:]) for part in annotated), ArgumentForm())


def schema_of(name: str, hints: Mapping[str, Any], writes: Sequence[str]) -> str:
    """The schema of an operation with these type hints: its arguments, some of them written, then the outputs that the caller allocates."""
    inputs = [f"{_schema_type(hint, each if each in writes else '')} {each}" for each, hint in hints.items() if each != "return"]
    outputs = [f"Tensor(out{index}!) out{index}" for index in range(_count_tensors(hints["return"]))]
    return f"{name}({', '.join([*inputs, *outputs])}) -> ()"


def _schema_type(hint: Any, alias: str) -> str:
    """A type in a schema; `alias` names the memory of a tensor that is written."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    (plain,) = (part for part in parts if part is not type(None))
    base = typing.get_args(plain)[0] if typing.get_origin(plain) is Annotated else plain
    kind = {Tensor: "Tensor", float: "float", torch.dtype: "ScalarType"}.get(base, "int")
    return (f"{kind}({alias}!)" if alias else kind) + "?" * (type(None) in parts)


def _count_tensors(returned: Any) -> int:
    if returned is type(None):
        return 0
    return 1 if returned is Tensor else len(getattr(returned, "_fields", typing.get_args(returned)))
