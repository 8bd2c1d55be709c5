"""Errors for keyword arguments under the names of other libraries."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def checked_keywords(names: Mapping[str, str], accepted: Iterable[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: TypeError that names the right argument for an unknown keyword.

    names: what to write instead, by the name in another library. accepted: of a function with `**options`; else its parameters.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = tuple(accepted) or tuple(inspect.signature(function).parameters)[1:]
        title, known = function.__qualname__.removesuffix(".__init__"), frozenset((*inspect.signature(function).parameters, *own))

        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            if not options.keys() <= known:
                name = next(name for name in options if name not in known)
                close = difflib.get_close_matches(name, own, 1, 0.8) or [f"one of {', '.join(own)}"]
                raise TypeError(f"{title}(): got the keyword {name!r}, expected {names.get(name, close[0])}")
            return function(*arguments, **options)

        return call

    return decorate


def checked_fields(names: Mapping[str, str]) -> Callable[[C], C]:
    """The same for the constructor of a dataclass."""

    def decorate(kind: C) -> C:
        made: Any = kind
        made.__init__ = checked_keywords(names)(made.__init__)
        return kind

    return decorate
