"""Python types as constraints, and the value of a finished text: pydantic models, enums, Literal types, patterns, functions, ..."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from stepgraph.sampling.fields import clip_repr
from stepgraph.sampling.grammar.constraints.constraint import Constraint

ACCEPTED = "a Constraint, a compiled constraint, a type (pydantic model, dataclass, TypedDict, enum, Literal, ...), a pattern or a function"
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class TypedConstraint(NamedTuple):
    """A constraint, and the value of a text that it allows."""

    constraint: Constraint
    parse: Callable[[str], Any]


def typed_constraint(value: object) -> TypedConstraint:
    """The constraint for a Constraint or a Python type. ValueError if there is none.

    Enums and Literal types of strings are their bare texts; every other type is its JSON. A pattern is a full match; its value is the
    match. A function is a JSON object with its name and arguments; its value is a functools.partial, which the caller may call.
    """
    if isinstance(value, Constraint):
        return TypedConstraint(value, functools.partial(_parse, value))
    if isinstance(value, re.Pattern):
        return _pattern(value)
    if isinstance(value, type) and issubclass(value, enum.Enum) and all(isinstance(member.value, str) for member in value):
        return TypedConstraint(Constraint.choice([member.value for member in value]), value)
    if get_origin(value) is Literal and all(isinstance(text, str) for text in get_args(value)):
        return TypedConstraint(Constraint.choice(get_args(value)), str)
    if isinstance(value, type) or get_origin(value) is not None:
        return _json_type(value)
    if callable(value):
        return _function(value)
    raise ValueError(f"constraint: got {clip_repr(value)}, expected {ACCEPTED}")


def _parse(constraint: Constraint, text: str) -> Any:
    """JSON for the kinds that are JSON, otherwise the text; what follows a marker that is text."""
    if isinstance(constraint.marker, str):
        text = text.partition(constraint.marker)[2]
    return json.loads(text) if constraint.kind in ("json_schema", "json_object") else text


def _pattern(pattern: re.Pattern[Any]) -> TypedConstraint:
    if not isinstance(pattern.pattern, str) or pattern.flags != re.UNICODE:
        got = "a pattern of bytes" if isinstance(pattern.pattern, bytes) else f"a pattern with {re.RegexFlag(pattern.flags)!s}"
        raise ValueError(f"constraint: got {got}, expected a pattern of text without flags")
    return TypedConstraint(Constraint.regex(pattern.pattern), pattern.fullmatch)


def _json_type(value: Any) -> TypedConstraint:
    import pydantic  # takes as long to load as all of stepgraph without torch

    with _type_errors(value):
        adapter = pydantic.TypeAdapter(value)
        schema = adapter.json_schema()
    return TypedConstraint(Constraint.json_schema(schema), adapter.validate_json)


def _function(function: Callable[..., Any]) -> TypedConstraint:
    """The text is {"name": ..., "arguments": {...}}, arguments by the annotations of the function."""
    import pydantic

    name = getattr(function, "__name__", "")
    with _type_errors(function):
        parameters = inspect.signature(function).parameters.values()
        hints = get_type_hints(function, include_extras=True)
    for parameter in parameters:
        if parameter.kind not in _KEYWORD_KINDS or parameter.name not in hints:
            why = "no type" if parameter.kind in _KEYWORD_KINDS else f"the kind {parameter.kind.description}"
            raise ValueError(f"constraint: the parameter {parameter.name} of {name} has {why}, expected an annotated keyword parameter")
    fields: dict[str, Any] = {
        parameter.name: (hints[parameter.name], ... if parameter.default is parameter.empty else parameter.default)
        for parameter in parameters
    }
    literal: Any = Literal
    with _type_errors(function):
        arguments = pydantic.create_model("Arguments", **fields)
        call: Any = pydantic.create_model("Call", name=(literal[name], ...), arguments=(arguments, ...))
        schema = call.model_json_schema()

    def parse(text: str) -> functools.partial[Any]:
        parsed = call.model_validate_json(text).arguments
        return functools.partial(function, **{key: getattr(parsed, key) for key in parsed.model_fields_set})

    return TypedConstraint(Constraint.json_schema(schema), parse)


@contextlib.contextmanager
def _type_errors(value: object) -> Iterator[None]:
    """ValueError for a type or a function of which pydantic or inspect makes nothing."""
    from pydantic.errors import PydanticUserError

    try:
        yield
    except (PydanticUserError, NameError, TypeError, ValueError) as error:
        raise ValueError(f"constraint: {clip_repr(value)} has no JSON schema: {str(error).splitlines()[0]}") from None
