"""Importing this module makes Triton's interpreter several times as fast, with the same results.

A launch patches `triton.language` once, and not again for each device function that a program calls. Data types and shapes, which the
interpreter derives again for every operation, are kept. The check of integer overflows is off: without `debug` its result is discarded.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_patched: set[tuple[int, ...]] = set()  # the modules that device functions of the running launch use


class _Launch(interpreter._LangPatchScope):  # type: ignore[misc]
    """The changes of one launch."""

    def restore(self) -> None:
        _patched.clear()
        super().restore()


def _patch_once(function: FunctionType) -> Any:
    launch = _Launch()
    modules = tuple(id(value) for value in function.__globals__.values() if inspect.ismodule(value))
    if modules not in _patched:
        launch._changes = _patch(function)._changes
        _patched.add(modules)
    return launch


@functools.cache
def _block(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    return core.tuple(shape), core.validate_block_shape(shape), str(core.tuple(shape))


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """`tl.block_type.__init__`."""
    self.element_ty = element_ty
    self.shape, self.numel, text = _block(tuple(size.value if isinstance(size, core.constexpr) else size for size in shape))
    self.name = f"<{text}, {element_ty}>"


_equal = core.tuple.__eq__


def _is_equal(self: Any, other: Any) -> Any:
    """`tl.tuple.__eq__`, with short cuts for the same tuple and for a list of numbers."""
    if self is other:
        return core.constexpr(True)
    return core.constexpr(self.values == other) if type(other) is list else _equal(self, other)


@functools.cache
def _shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    """`tl.tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape(type.shape if type.is_block() else ())


_numpy_of_scalar = functools.cache(interpreter._get_np_dtype)


def _numpy_of(kind: Any) -> Any:
    """`interpreter._get_np_dtype`."""
    scalar = kind.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_of_scalar(scalar)


_reduce = interpreter.ReduceOps.apply_impl


def _reduce_xor(self: Any, inputs: Any) -> Any:
    """`ReduceOps.apply_impl`, which otherwise combines one element of a sort after the other."""
    if self.combine_fn is not tl.standard._xor_combine:
        return _reduce(self, inputs)
    (one,) = inputs
    return self.to_tensor(np.bitwise_xor.reduce(one.handle.data, axis=self.axis, keepdims=self.keep_dims), one.dtype)


_transform = interpreter.FunctionRewriter._transform_ast


def _transform_counted(self: Any, source: str) -> Any:
    """`FunctionRewriter._transform_ast`, with probes in programs of the core: the interpreter compiles them again, from their files."""
    tree, probes = _transform(self, source), sys.modules["sitecustomize"]
    if probes.in_core(self.filename):
        probes.add_probes(tree, self.filename)
    return tree


if hasattr(sys.modules.get("sitecustomize"), "add_probes"):  # make coverage
    interpreter.FunctionRewriter._transform_ast = _transform_counted
interpreter._patch_lang = _patch_once
interpreter.ReduceOps.apply_impl = _reduce_xor
interpreter._get_np_dtype = _numpy_of
interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
tl.block_type.__init__ = _make_block_type
core.tuple.__eq__ = _is_equal
tl.tensor.__init__ = _make_tensor
