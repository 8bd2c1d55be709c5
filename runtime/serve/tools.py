"""`tools` and `tool_choice`: which functions an answer may call, as a constraint on it and in its prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any

from stepgraph.runtime.serve.calls import CallFormat, ChosenFormat, TextParameters
from stepgraph.runtime.serve.http import HttpError, refuse
from stepgraph.runtime.text import Message, TextCodec
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.structural_tag import ALTERNATIVE
from stepgraph.sampling.grammar.constraints.unsupported import naming_schema
from stepgraph.sampling.grammar.schema.parameters import text_parameters

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    allowed: tuple[dict[str, Any], ...]  # entries of `tools` that may be called
    call_format: CallFormat
    templated: bool  # the chat template describes this format
    required: bool = False  # the answer consists of calls
    parallel: bool = True  # an answer may have several calls
    answer: Any = None  # the schema of an answer without calls; None: any text, also beside calls

    @property
    def in_text(self) -> bool:
        """Whether an answer is free text with calls."""
        return not self.required and self.answer is None

    @cached_property
    def functions(self) -> dict[str, Any]:
        """Schemas of the arguments, by name."""
        functions = [tool["function"] for tool in self.allowed]
        return {each["name"]: {"type": "object", **(each.get("parameters") or _NO_ARGUMENTS)} for each in functions}

    @cached_property
    def texts(self) -> TextParameters:
        """Parameters whose values are plain text. UnsupportedError for a schema that the format cannot express."""
        found = dict[str, Any]()
        for name, schema in self.functions.items() if self.call_format.style == "qwen_xml" else ():
            with naming_schema(name):
                found[name] = text_parameters(schema)
        return found

    def constraint(self) -> Constraint:
        _ = self.texts  # an error is raised here, before the request has a place in the queue
        tag = self.call_format.structural_tag(self.functions, not self.in_text, self.parallel)
        if self.answer is not None:
            tag[ALTERNATIVE] = {"begin": self.call_format.answer_begin, "schema": self.answer, "end": ""}
        return Constraint.structural_tag(tag)

    def prompt_ids(self, codec: TextCodec, messages: Sequence[Message], variables: Mapping[str, Any], continues: bool) -> list[int]:
        """The conversation with the functions, described by the chat template if it has the format, else by a system message."""
        ids = codec.chat(messages, variables=variables, continues=continues)
        reads_tools = self.templated and codec.template_mentions("tools")
        tools = json.loads(json.dumps(self.allowed, default=float))  # templates cannot write the Decimals of exact schemas
        with_tools = codec.chat(messages, tools, variables=variables, continues=continues) if reads_tools else ids
        if with_tools != ids:
            return with_tools
        return codec.chat(self._as_system_message(messages, tools), variables=variables, continues=continues)

    def _as_system_message(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[Message]:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        only = "Answer with a call and nothing else" if self.required else "To call one"
        text = "\n".join(["These functions can be called:", *lines, f"{only}, write:\n{self.call_format.example}"])
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": text}, *messages]
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]


def tool_use(tools: Any, choice: Any, parallel: bool, chosen_format: ChosenFormat) -> ToolUse | None:
    """The functions that may be called; None if there are none. HttpError names the field that is wrong."""
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            refuse("tool_choice", choice, "none or auto without tools")
        return None
    if not isinstance(tools, list):
        refuse("tools", tools, "a list of functions")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    by_name = {tool["function"]["name"]: tool for tool in tools}
    if len(by_name) < len(tools):
        refuse("tools", [tool["function"]["name"] for tool in tools], "functions with different names")
    if choice == "none":
        return None
    forms: list[Any] = [{"type": "function", "function": {"name": name}} for name in by_name]
    if choice in forms:
        return ToolUse((tools[forms.index(choice)],), *chosen_format, required=True, parallel=False)
    match choice:
        case None | "auto" | "required":
            return ToolUse(tuple(tools), *chosen_format, choice == "required", parallel)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as chosen, **rest}, **more}:
            if all(each in forms for each in chosen) and not rest and not more:
                allowed = tuple(tool for tool, form in zip(tools, forms, strict=True) if form in chosen)
                return ToolUse(allowed, *chosen_format, mode == "required", parallel)
    refuse("tool_choice", choice, "none, auto, required, one of the functions, or allowed_tools with a mode and some of them")


def _check_tool(tool: Any, name: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.keys() == {"type", "function"} else None
    if not isinstance(function, dict) or tool["type"] != "function":
        refuse(name, tool, "an object of type function with a function")
    field = f"{name}.function"
    for unknown in [name for name in function if name not in ("name", "description", "parameters", "strict")]:
        raise HttpError(400, f"{field}.{unknown[:100]}: the field is not supported", f"{field}.{unknown[:100]}")
    if not isinstance(function.get("name"), str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function["name"]):
        refuse(field, function.get("name"), "a name of up to 64 letters, digits, _ or -")
    parts = ("description", str, "a text"), ("strict", bool, "true or false"), ("parameters", dict, "a JSON schema")
    for part, kind, expected in parts:  # `strict` has no effect: calls match their schemas in any case
        if not isinstance(function.get(part), (kind, NoneType)):
            refuse(f"{field}.{part}", function[part], expected)
    if (found := (function.get("parameters") or {}).get("type", "object")) != "object":
        refuse(f"{field}.parameters.type", found, "object")
