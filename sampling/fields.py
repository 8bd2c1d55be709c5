"""Checks of configuration fields, and the text of errors that repeat a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, TypeGuard

MAX_CHARS = 100  # of a value in an error message


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def clip_repr(value: object) -> str:
    """repr(value), cut after MAX_CHARS characters; the type's name where repr fails."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, or an object of the caller whose __repr__ raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."


def clip_error(error: BaseException) -> str:
    """str(error), cut after 5 * MAX_CHARS characters: a parser may repeat the whole file."""
    text = str(error)
    return text if len(text) <= 5 * MAX_CHARS else f"{text[: 5 * MAX_CHARS]}..."


def reason(error: Exception) -> str:
    """Type and first line of an error, for a report."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def clip_name(name: object) -> str:
    """A field name read from a file or a request, for use in the path of an error message."""
    return name[:MAX_CHARS] if isinstance(name, str) else clip_repr(name)


class Check(NamedTuple):
    """What one field accepts: a predicate, and the same in words for the error message."""

    accepts: Callable[[object], bool]
    expected: str


BOOL = Check(lambda value: isinstance(value, bool), "True or False")


def whole(least: int, most: int | None = None) -> Check:
    """An int (not a bool) of at least `least` and, unless None, at most `most`."""
    expected = f"a whole number >= {least}" if most is None else f"a whole number from {least} to {most}"
    return Check(lambda value: is_int(value) and value >= least and (most is None or value <= most), expected)


def number(low: float, high: float, *, above: bool = False) -> Check:
    """An int or float from `low` to `high`; with `above`, `low` itself is refused. NaN is always refused."""
    expected = f"a number {'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"
    return Check(lambda value: is_number(value) and low <= value <= high and not (above and value == low), expected)


def one_of(choices: Iterable[str]) -> Check:
    """One of these strings."""
    accepted = tuple(choices)
    return Check(lambda value: isinstance(value, str) and value in accepted, f"one of {', '.join(map(repr, accepted))}")


def optional(check: Check) -> Check:
    """`check`, or None."""
    return Check(lambda value: value is None or check.accepts(value), f"{check.expected}, or None")


def check_value(name: str, value: object, check: Check) -> None:
    """ValueError `NAME: got VALUE, expected ACCEPTED` unless `check` accepts the value."""
    if not check.accepts(value):
        raise ValueError(f"{name}: got {clip_repr(value)}, expected {check.expected}")


def check_fields(config: Any, table: Mapping[str, Check]) -> None:
    """check_value for every field in `table`, and for every field that is annotated with bool, as `Class.field`."""
    flags = {field.name: BOOL for field in fields(config) if field.type == "bool"}
    for name, check in (flags | dict(table)).items():
        check_value(f"{type(config).__name__}.{name}", getattr(config, name), check)
