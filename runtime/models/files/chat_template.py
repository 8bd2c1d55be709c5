"""A model's chat template: a Jinja program that formats a conversation. It is untrusted and runs in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from stepgraph.sampling.fields import clip_repr


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the parts that the model is trained on; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - declared like this in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None, with_tools: str | None = None) -> None:
        """special_tokens: texts of bos_token and others, by name. with_tools: the template for conversations with tools.

        Raises ValueError if a source is not a Jinja template.
        """
        self._special_tokens, self._source = dict(special_tokens or {}), source + (with_tools or "")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _json
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            self._plain = environment.from_string(source)
            self._with_tools = environment.from_string(with_tools) if with_tools is not None else self._plain
        except Exception as error:  # deep nesting raises RecursionError or MemoryError
            raise ValueError(f"chat_template: not a Jinja template: {error}") from None

    def mentions(self, word: str) -> bool:
        return word in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        answer: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the conversation; with `answer`, up to where the model's answer starts. variables: further ones, by name."""
        nonempty = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages)
        if not nonempty or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages):
            raise ValueError(f"messages: got {clip_repr(messages)}, expected a list of objects with a role and a content")
        if tools is not None and not (isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)):
            raise ValueError(f"tools: got {clip_repr(tools)}, expected a list of objects in the format of OpenAI's API")
        if not isinstance(variables, (Mapping, type(None))) or not all(isinstance(name, str) for name in variables or ()):
            raise ValueError(f"variables: got {clip_repr(variables)}, expected a mapping of names to values, or None")
        own = {"messages": [dict(each) for each in messages], "tools": list(tools) if tools else None, "documents": None}
        names = {**self._special_tokens, **(variables or {}), **own, "add_generation_prompt": answer}
        try:
            return (self._with_tools if tools else self._plain).render(names)
        except Exception as error:  # a template can raise anything
            empty = [f"messages[{index}] has no content, " for index, each in enumerate(messages) if each.get("content") is None]
            raise ValueError(f"messages: {''.join(empty[:1])}the model's chat template fails: {error}") from None


def _json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes < as &lt;."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
