"""Python types as constraints, and the value of a finished text: pydantic models, enums, Literal types, patterns, functions, ..."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from typing_extensions import NotRequired, Required, TypeAliasType, TypedDict

from stepgraph.sampling.fields import clip_repr
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.dialects import in_all_dialects
from stepgraph.sampling.grammar.schema.patterns import PatternError

ACCEPTED = (
    "a Constraint (Constraint.json_schema, .regex, .choice, ...), a compiled constraint, a type (pydantic model, dataclass, TypedDict, "
    "enum, Literal, ...), a pattern or a function"
)
_JSON_KINDS = ("json_schema", "json_object")
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class TypedConstraint(NamedTuple):
    """A constraint, and the function from its text, without the part up to its marker, to the value."""

    constraint: Constraint
    parse: Callable[[str], Any]

    def after(self, marker: str | Sequence[int], *, limit: int | None = None) -> TypedConstraint:
        """As Constraint.after: `typed_constraint(Answer).after("</think>")`, whose `Job.parsed` is an Answer."""
        return self._replace(constraint=self.constraint.after(marker, limit=limit))


def typed_constraint(value: object) -> TypedConstraint:
    """The constraint for a Constraint or a Python type, as in docs/json.md. ValueError if there is none."""
    if isinstance(value, TypedConstraint):
        return value
    if isinstance(value, Constraint):
        return TypedConstraint(value, functools.partial(_parse, value))
    if isinstance(value, re.Pattern):
        return _pattern(value)
    if isinstance(value, type) and issubclass(value, enum.Enum) and all(isinstance(member.value, str) for member in value):
        members = {member.value: member for member in value}
        return TypedConstraint(Constraint.choice(list(members)), lambda text: _required(members.get(text), text))
    if get_origin(value) is Literal and all(isinstance(text, str) for text in get_args(value)):
        texts = {str.__str__(text): text for text in get_args(value)}
        return TypedConstraint(Constraint.choice(get_args(value)), lambda text: _required(texts.get(text), text))
    if isinstance(value, (type, typing.NewType, TypeAliasType)) or get_origin(value) is not None:
        return _json_type(value)
    if callable(value):
        return _function(value)
    raise ValueError(f"constraint: got {clip_repr(value)}, expected {ACCEPTED}")


def has_no_longer_text(constraint: Constraint | None, text: str) -> bool:
    """Whether the constraint accepts this text, and no other one that begins with it: a JSON value that is no number, or an option with
    which no longer one begins. For patterns and grammars this is not decided."""
    if constraint is None:
        return False
    if constraint.kind == "choice":
        return [option for option in json.loads(constraint.payload) if option.startswith(text)] == [text]
    with contextlib.suppress(ValueError):
        return constraint.kind in _JSON_KINDS and type(json.loads(text)) not in (int, float)
    return False


def _parse(constraint: Constraint, text: str) -> Any:
    """The value of a text: parsed JSON for JSON kinds, otherwise the text itself."""
    if constraint.kind not in _JSON_KINDS:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return _required(None, text)


def _pattern(pattern: re.Pattern[Any]) -> TypedConstraint:
    if not isinstance(pattern.pattern, str) or pattern.flags != re.UNICODE:
        got = "a pattern of bytes" if isinstance(pattern.pattern, bytes) else f"a pattern with {re.RegexFlag(pattern.flags)!s}"
        raise ValueError(f"constraint: got {got}, expected a pattern of text without flags")
    try:
        constraint = Constraint.regex(in_all_dialects(pattern.pattern))
    except PatternError as error:
        raise ValueError(f"constraint: got {clip_repr(pattern.pattern)}, which {error}") from None
    return TypedConstraint(constraint, lambda text: _required(pattern.fullmatch(text), text))


def _required(value: Any, text: str) -> Any:
    """The value of a text; ValueError if there is none: a stop text or a stop token of the request ended the text early."""
    if value is None:
        raise ValueError(f"Job.parsed: the output is incomplete: {clip_repr(text)}")
    return value


def _json_type(value: Any) -> TypedConstraint:
    import pydantic  # imported here: takes as long to load as all of stepgraph without torch

    from stepgraph.sampling.grammar.constraints.pydantic_schema import schema_of

    with _type_errors(value):
        adapter = pydantic.TypeAdapter(_with_extension_typed_dicts(value))
        schema = schema_of(adapter)
    return TypedConstraint(Constraint.json_schema(schema), adapter.validate_json)


def _with_extension_typed_dicts(value: Any, outer: tuple[Any, ...] = ()) -> Any:
    """The type with TypedDicts of `typing` replaced by those of typing_extensions, which pydantic requires before Python 3.12."""
    if sys.version_info >= (3, 12) or value in outer:
        return value
    arguments = get_args(value)
    if typing.is_typeddict(value) and type(value).__module__ == "typing":
        fields = dict[str, Any]()
        mark: Any
        for name, hint in get_type_hints(value, include_extras=True).items():
            by_class = NotRequired if name in value.__optional_keys__ else Required  # __optional_keys__ ignores string annotations
            is_marked = get_origin(hint) in (Required, NotRequired)
            bare, mark = (get_args(hint)[0], get_origin(hint)) if is_marked else (hint, by_class)
            fields[name] = mark[_with_extension_typed_dicts(bare, (*outer, value))]
        return TypedDict(value.__name__, fields)  # type: ignore[operator]
    if not arguments or get_origin(value) is Literal:
        return value
    known = tuple(_with_extension_typed_dicts(argument, outer) for argument in arguments)
    if known == arguments:
        return value
    origin: Any = typing.Union if isinstance(value, types.UnionType) else get_origin(value)
    return origin[known]


def _function(function: Callable[..., Any]) -> TypedConstraint:
    """The text is {"name": ..., "arguments": {...}}, arguments by the annotations of the function."""
    import pydantic

    from stepgraph.sampling.grammar.constraints.pydantic_schema import schema_of

    name = getattr(function, "__name__", "")
    with _type_errors(function):
        parameters = inspect.signature(function).parameters.values()
        hints = get_type_hints(function, include_extras=True)
    reserved = {attribute for attribute in dir(pydantic.BaseModel) if attribute.startswith("model_")}
    for parameter in parameters:
        is_keyword = parameter.kind in _KEYWORD_KINDS
        is_reserved = parameter.name.startswith("_") or parameter.name in reserved
        if not is_keyword or parameter.name not in hints or is_reserved:
            why = "a reserved name" if is_reserved else "no type" if is_keyword else f"the kind {parameter.kind.description}"
            raise ValueError(f"constraint: the parameter {parameter.name} of {name} has {why}, expected an annotated keyword parameter")
    fields: dict[str, Any] = {
        parameter.name: (hints[parameter.name], ... if parameter.default is parameter.empty else parameter.default)
        for parameter in parameters
    }
    literal: Any = Literal
    with _type_errors(function):
        arguments = pydantic.create_model("Arguments", **fields)
        call: Any = pydantic.create_model("Call", name=(literal[name], ...), arguments=(arguments, ...))
        schema = schema_of(pydantic.TypeAdapter(call))

    def parse(text: str) -> functools.partial[Any]:
        parsed = call.model_validate_json(text).arguments
        return functools.partial(function, **{key: getattr(parsed, key) for key in parsed.model_fields_set})

    return TypedConstraint(Constraint.json_schema(schema), parse)


@contextlib.contextmanager
def _type_errors(value: object) -> Iterator[None]:
    """ValueError for a type or a function that pydantic or inspect cannot handle."""
    try:
        yield
    except Exception as error:  # annotations are expressions and can raise anything
        raise ValueError(f"constraint: {clip_repr(value)} has no JSON schema: {' '.join(str(error).split()):.300}") from None
