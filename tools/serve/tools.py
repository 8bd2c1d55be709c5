"""`tools` and `tool_choice`: as a constraint on the answer, and out of the answer again.

A call in free text is written as many models learnt it: `<tool_call>`, a line of JSON with name and arguments, `</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph import Constraint
from tools.serve.http import HttpError

OPENING, CLOSING = "<tool_call>\n", "\n</tool_call>"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    told: tuple[dict[str, Any], ...]  # as they came, to those that may be called
    must: bool  # the answer is one call and nothing else

    @property
    def functions(self) -> dict[str, Any]:
        """Schemas of the arguments, by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or _NO_ARGUMENTS for tool in self.told}

    def constraint(self) -> Constraint:
        if self.must:
            return Constraint.json_schema({"anyOf": [_call_schema(*function) for function in self.functions.items()]})
        beginnings = {name: f'{OPENING}{{"name": {json.dumps(name)}, "arguments": ' for name in self.functions}
        structures = [{"begin": beginnings[name], "schema": schema, "end": "}" + CLOSING} for name, schema in self.functions.items()]
        return Constraint.structural_tag({"triggers": [OPENING], "structures": structures})

    def in_words(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """For a model whose template has no place for tools: they are told in a system message."""
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in self.told]
        form = '{"name": "...", "arguments": {...}}'
        how = f"Answer with one call: {form}" if self.must else f"To call one, write:\n{OPENING}{form}{CLOSING}"
        text = "\n".join(["These functions can be called:", *lines, how])
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": text}, *messages]
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]


def tool_use(tools: Any, choice: Any) -> ToolUse | None:
    """HttpError names what is wrong."""
    if tools is None:
        if choice not in (None, "none"):
            raise HttpError(400, f"tool_choice: got {json.dumps(choice)[:60]} without tools, want tools", "tool_choice")
        return None
    if not isinstance(tools, list) or not tools:
        raise HttpError(400, f"tools: got {json.dumps(tools)[:60]}, want a list of at least one function", "tools")
    for place, tool in enumerate(tools):
        _check_tool(tool, f"tools[{place}]")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise HttpError(400, f"tools: got the names {', '.join(names)}, want each once", "tools")
    if choice in (None, "auto", "required"):
        return ToolUse(tuple(tools), must=choice == "required")
    if choice == "none":
        return ToolUse((), must=False)
    chosen = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if (
        not isinstance(chosen, dict)
        or chosen.get("name") not in names
        or choice.keys() != {"type", "function"}
        or chosen.keys() != {"name"}
    ):
        raise HttpError(
            400, f"tool_choice: got {json.dumps(choice)[:60]}, want none, auto, required or one of the functions", "tool_choice"
        )
    return ToolUse(tuple(tool for tool in tools if tool["function"]["name"] == chosen["name"]), must=True)


def call_of(text: str, place: int, answer: str) -> dict[str, Any]:
    """One call, as an answer tells of it. ValueError where the text was cut short."""
    call = json.loads(text)
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return {"index": place, "id": f"call_{answer}_{place}", "type": "function", "function": function}


def _call_schema(name: str, arguments: Any) -> dict[str, Any]:
    properties = {"name": {"const": name}, "arguments": arguments}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _check_tool(tool: Any, name: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.keys() == {"type", "function"} else None
    if not isinstance(function, dict) or tool["type"] != "function":
        raise HttpError(400, f"{name}: got {json.dumps(tool)[:60]}, want an object of type function with a function", name)
    for field in function.keys() - {"name", "description", "parameters", "strict"}:
        raise HttpError(400, f"{name}.function.{field[:100]}: got a field that is not known", f"{name}.function.{field[:100]}")
    if not isinstance(function.get("name"), str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function["name"]):
        raise HttpError(
            400, f"{name}.function.name: got {json.dumps(function.get('name'))[:60]}, want letters, digits, _ or -", f"{name}.function"
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise HttpError(400, f"{name}.function.parameters: got no object, want a JSON schema", f"{name}.function.parameters")
