"""Checks of configuration fields and keyword arguments, and the text of errors that repeat a value."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeGuard, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

MAX_REPR_CHARS = 100  # of a value in an error message


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def clip_repr(value: object) -> str:
    """repr(value), cut after MAX_REPR_CHARS characters; the type's name if repr fails."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, or an object of the caller whose __repr__ raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= MAX_REPR_CHARS else f"{text[:MAX_REPR_CHARS]}..."


def clip_error(error: BaseException) -> str:
    """str(error), cut after 5 * MAX_REPR_CHARS characters: a parser may repeat the whole file."""
    text = message_of(error)
    return text if len(text) <= 5 * MAX_REPR_CHARS else f"{text[: 5 * MAX_REPR_CHARS]}..."


def message_of(error: BaseException) -> str:
    """str(error), also for a class whose `__str__` raises."""
    try:
        return str(error)
    except Exception as raised:
        return f"str() of it raised {type(raised).__name__}"


def error_summary(error: Exception) -> str:
    """Type and first line of an error, for a report."""
    lines = message_of(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def clip_name(name: object) -> str:
    """A field name read from a file or a request, for use in the path of an error message."""
    return name[:MAX_REPR_CHARS] if isinstance(name, str) else clip_repr(name)


class Check(NamedTuple):
    """The values that one field accepts: a predicate, and its description for the error message."""

    accepts: Callable[[object], bool]
    expected: str


BOOL = Check(lambda value: isinstance(value, bool), "True or False")


def whole(low: int, high: int | None = None) -> Check:
    """An int (not a bool) of at least `low` and, unless None, at most `high`."""
    expected = f"a whole number >= {low}" if high is None else f"a whole number from {low} to {high}"
    return Check(lambda value: is_int(value) and value >= low and (high is None or value <= high), expected)


def number(low: float, high: float, *, low_open: bool = False) -> Check:
    """An int or float from `low` to `high`; with `low_open`, `low` itself is refused. NaN is always refused."""
    expected = f"a number {'above' if low_open else 'from'} {low:g} {'and at most' if low_open else 'to'} {high:g}"
    return Check(lambda value: is_number(value) and low <= value <= high and not (low_open and value == low), expected)


def one_of(choices: Iterable[str]) -> Check:
    accepted = tuple(choices)
    return Check(lambda value: isinstance(value, str) and value in accepted, f"one of {', '.join(map(repr, accepted))}")


def optional(check: Check) -> Check:
    return Check(lambda value: value is None or check.accepts(value), f"{check.expected}, or None")


def instance_of(kind: type, expected: str) -> Check:
    return Check(lambda value: isinstance(value, kind), expected)


FUNCTION = Check(callable, "a function")


def callable_with(*arguments: object) -> Callable[[object], bool]:
    """A check whether a value can be called with this number of arguments."""

    def check(value: object) -> bool:
        if not callable(value):
            return False
        try:
            inspect.signature(value).bind(*arguments)
        except TypeError:
            return False
        except ValueError:  # a C function without a signature
            pass
        return True

    return check


def is_list_like(value: object) -> bool:
    """Whether `value` is iterable and not a str, bytes or bytearray. Arrays and tensors without dimensions are not iterable."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray)) and getattr(value, "ndim", 1) != 0


TOKEN_IDS = Check(is_list_like, "a sequence of token ids")


def checked_path(name: str, path: object) -> Path:
    """`path` as a Path. ValueError if it is not a path, or if the system rejects it, for example because it is too long."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"{name}: got {clip_repr(path)}, expected a path")
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):  # the caller knows what it expected there
        pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{name}: got {clip_repr(path)}, expected a path that can be read: {why}") from None
    return Path(path)


def check_members(name: str, value: object, protocol: type) -> None:
    """ValueError unless `value` is an instance, not a class, and has every public member of the Protocol."""
    members = [member for member in vars(protocol) if not member.startswith("_")]
    missing = members if isinstance(value, type) else [member for member in members if not hasattr(value, member)]
    if missing:
        got = f"the class {value.__name__}" if isinstance(value, type) else f"{clip_repr(value)} without {', '.join(missing)}"
        raise ValueError(f"{name}: got {got}, expected an object with {', '.join(members)}")


def check_value(name: str, value: object, check: Check) -> None:
    """ValueError `NAME: got VALUE, expected ACCEPTED` unless `check` accepts the value."""
    if not check.accepts(value):
        raise ValueError(f"{name}: got {clip_repr(value)}, expected {check.expected}")


def check_fields(config: Any, table: Mapping[str, Check]) -> None:
    """Call check_value for every field in `table` and every field annotated with bool; errors name it as `Class.field`."""
    flags = {field.name: BOOL for field in fields(config) if field.type == "bool"}
    for name, check in (flags | dict(table)).items():
        check_value(f"{type(config).__name__}.{name}", getattr(config, name), check)


def checked_keywords(names: Mapping[str, str], accepted: Iterable[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: an unknown keyword raises a TypeError that names the right one; so do too many arguments without a name.

    names: the names of other libraries and the names to use here. accepted: the keywords, for a function with `**options`; by default
    the parameters of the function."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        keywords = tuple(accepted) or tuple(parameters)[1:]
        title, known = function.__qualname__.removesuffix(".__init__"), frozenset((*parameters, *keywords))
        most = sum(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())

        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            if not options.keys() <= known:
                name = next(name for name in options if name not in known)
                close = difflib.get_close_matches(name, keywords, 1, 0.8) or [f"one of {', '.join(keywords)}"]
                raise TypeError(f"{title}(): got the keyword {name!r}, expected {names.get(name, close[0])}")
            if len(arguments) > most:
                got = f"got {clip_repr(arguments[most])} as argument {most}"
                raise TypeError(f"{title}(): {got}, expected a keyword: one of {', '.join(keywords)}")
            return function(*arguments, **options)

        return call

    return decorate


def checked_fields(names: Mapping[str, str]) -> Callable[[C], C]:
    """As checked_keywords, for the constructor of a dataclass; and shows_fields."""

    def decorate(decorated: C) -> C:
        cls: Any = decorated
        cls.__init__ = checked_keywords(names)(cls.__init__)
        return shows_fields(decorated)

    return decorate


class _FieldDoc:
    """A docstring with the fields of its class, or of the base that has them, as they are written with their comments. Made when it is
    read."""

    def __init__(self, text: str | None) -> None:
        self._text = text or ""  # None with python -OO

    def __get__(self, instance: object, owner: type) -> str:
        try:
            body = inspect.getsource(next(base for base in owner.__mro__ if inspect.get_annotations(base))).split('"""', 2)[2]
        except OSError:  # installed without sources
            return self._text
        return f"{inspect.cleandoc(self._text)}\n\n{inspect.cleandoc(re.split(r'^    (?:def |@)', body, maxsplit=1, flags=re.M)[0])}"


def shows_fields(decorated: C) -> C:
    """A decorator for a dataclass or NamedTuple with a docstring: help() shows the comments of the fields, too."""
    cls: Any = decorated
    cls.__doc__ = _FieldDoc(cls.__doc__)
    return decorated


class FrozenDict(dict[Any, Any]):
    """A dict that cannot be changed, for fields of frozen dataclasses."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a field of a frozen object cannot be changed; dataclasses.replace() makes a copy with another value")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return FrozenDict, (dict(self),)


def reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """object_pairs_hook of json: ValueError for a repeated key."""
    if len(dict(pairs)) < len(pairs):
        repeated = min(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {clip_repr(repeated)} appears twice")
    return dict(pairs)


def reject_constant(name: str) -> None:
    """parse_constant of json: ValueError for NaN and Infinity."""
    raise ValueError(f"{name} is not a JSON value")


def parse_exact_json(text: str | bytes) -> Any:
    """The value of a JSON text; numbers that a float would round are Decimals. ValueError for repeated keys, NaN and Infinity."""
    return json.loads(text, object_pairs_hook=reject_repeated_keys, parse_constant=reject_constant, parse_float=_exact_number)


def _exact_number(text: str) -> float | Decimal:
    number = float(text)
    try:
        exact = Decimal(text if math.isfinite(number) else 0)
    except InvalidOperation:
        raise ValueError(f"the exponent of {clip_repr(text)} is too small") from None
    return exact if math.isfinite(number) and Decimal(repr(number)) != exact else number
