"""`tools` and `tool_choice`: as a constraint on the answer, and parsed out of the answer.

A call in free text has the form that many models were trained on: `<tool_call>`, a line of JSON with name and arguments, `</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.runtime.serve.http import HttpError
from stepgraph.sampling.grammar.constraints.constraint import Constraint

OPENING, CLOSING = "<tool_call>\n", "\n</tool_call>"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    callable: tuple[dict[str, Any], ...]  # entries of `tools` that may be called
    required: bool  # the answer is one call and nothing else
    parallel: bool = True  # an answer may have several calls

    @property
    def functions(self) -> dict[str, Any]:
        """Schemas of the arguments, by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or _NO_ARGUMENTS for tool in self.callable}

    def constraint(self) -> Constraint:
        if self.required:
            return Constraint.json_schema({"anyOf": [_call_schema(*function) for function in self.functions.items()]})
        structures = [
            {"begin": f'{OPENING}{{"name": {json.dumps(name)}, "arguments": ', "schema": schema, "end": "}" + CLOSING}
            for name, schema in self.functions.items()
        ]
        return Constraint.structural_tag({"triggers": [OPENING], "structures": structures})

    def as_system_message(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages with the functions described in a system message, for chat templates that ignore tools."""
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in self.callable]
        form = '{"name": "...", "arguments": {...}}'
        instruction = f"Answer with one call: {form}" if self.required else f"To call one, write:\n{OPENING}{form}{CLOSING}"
        text = "\n".join(["These functions can be called:", *lines, instruction])
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": text}, *messages]
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]


def tool_use(tools: Any, choice: Any, parallel: bool) -> ToolUse | None:
    """HttpError names the field that is wrong."""
    if tools is None:
        if choice not in (None, "none"):
            raise HttpError(400, f"tool_choice: got {json.dumps(choice)[:60]} without tools, expected tools", "tool_choice")
        return None
    if not isinstance(tools, list) or not tools:
        raise HttpError(400, f"tools: got {json.dumps(tools)[:60]}, expected a list of at least one function", "tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    by_name = {tool["function"]["name"]: tool for tool in tools}
    if len(by_name) < len(tools):
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise HttpError(400, f"tools: got the names {names}, expected different names", "tools")
    if choice in (None, "auto", "required"):
        return ToolUse(tuple(tools), required=choice == "required", parallel=parallel)
    if choice == "none":
        return ToolUse((), required=False)
    for name, tool in by_name.items():
        if choice == {"type": "function", "function": {"name": name}}:
            return ToolUse((tool,), required=True)
    expected = "none, auto, required or one of the functions"
    raise HttpError(400, f"tool_choice: got {json.dumps(choice)[:60]}, expected {expected}", "tool_choice")


def parse_call(text: str, index: int, answer_id: str) -> dict[str, Any]:
    """One entry of `tool_calls`. ValueError where the text was cut short."""
    call = json.loads(text)
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return {"index": index, "id": f"call_{answer_id}_{index}", "type": "function", "function": function}


def _call_schema(name: str, arguments: Any) -> dict[str, Any]:
    properties = {"name": {"const": name}, "arguments": arguments}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _check_tool(tool: Any, name: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.keys() == {"type", "function"} else None
    if not isinstance(function, dict) or tool["type"] != "function":
        raise HttpError(400, f"{name}: got {json.dumps(tool)[:60]}, expected an object of type function with a function", name)
    field = f"{name}.function"
    for unknown in function.keys() - {"name", "description", "parameters", "strict"}:
        raise HttpError(400, f"{field}.{unknown[:100]}: the field is not supported", f"{field}.{unknown[:100]}")
    if not isinstance(function.get("name"), str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function["name"]):
        raise HttpError(400, f"{field}.name: got {json.dumps(function.get('name'))[:60]}, expected up to 64 letters, digits, _ or -", field)
    if not isinstance(function.get("parameters") or {}, dict):
        got = type(function["parameters"]).__name__
        raise HttpError(400, f"{field}.parameters: got {got}, expected a JSON schema", f"{field}.parameters")
