"""OpenAI's request bodies, field by field: what the runtime has is passed on, what asks for nothing is let through, the rest is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepgraph import Constraint, SamplingParams
from stepgraph.runtime.text import TextCodec
from tools.serve.http import HttpError
from tools.serve.tools import ToolUse, tool_use

_SAMPLING = {  # theirs, and ours; those in the second half are vLLM's
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
}
_BOTH = {*_SAMPLING, "model", "stream", "stream_options", "max_tokens", "stop", "logit_bias", "logprobs", "response_format"}
_CHAT = {*_BOTH, "messages", "max_completion_tokens", "tools", "tool_choice"}
_COMPLETION = {*_BOTH, "prompt"}
_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id"}
_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {  # values that change nothing here
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "store": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}
_OURS = {ours: theirs for theirs, ours in _SAMPLING.items()} | {"max_new_tokens": "max_tokens"}
MAX_STOPS = 4


@dataclass(frozen=True)
class Asked:
    """One request, checked as far as it can be without the engine."""

    chat: bool
    prompt_ids: list[int]
    options: dict[str, Any]  # of Engine.submit
    stops: tuple[str, ...]
    stream: bool
    usage_too: bool  # as the last event of a stream
    logprobs: bool
    tools: ToolUse | None


def asked(body: Mapping[str, Any], chat: bool, codec: TextCodec, model: str, max_length: int) -> Asked:
    """HttpError names the field that is wrong or not supported."""
    given = _known({name: value for name, value in body.items() if value is not None}, _CHAT if chat else _COMPLETION)
    if given.get("model", model) != model:
        raise HttpError(404, f"model: got {_shown(given['model'])}, want {model!r}, the one that is served", "model", "model_not_found")
    tools = tool_use(given.get("tools"), given.get("tool_choice")) if chat else None
    prompt_ids = _chat_ids(given, tools, codec) if chat else _prompt_ids(given, codec)
    logprobs = _flag(given, "logprobs") if chat else _no_others(given)
    default = max(1, max_length - len(prompt_ids)) if chat else min(16, max(1, max_length - len(prompt_ids)))
    most = given.get("max_completion_tokens", given.get("max_tokens", default))
    options = {"max_new_tokens": most, "sampling": _sampling(given, logprobs), "constraint": _constraint(given, tools)}
    stream, usage = _flag(given, "stream"), _usage(given)
    return Asked(chat, prompt_ids, options, _stops(given), stream, usage, logprobs, tools)


def refusal(error: ValueError, prompt: str = "messages") -> HttpError:
    """What the runtime refused, in the names of this protocol."""
    message = str(error)
    name = re.match(r"(?:SamplingParams\.|sampling\.)?(\w+)", message)
    ours = name[1] if name else ""
    theirs = prompt if ours == "prompt_ids" else _OURS.get(ours, ours)
    return HttpError(400, message if theirs == ours else f"{theirs}: {message}", theirs or None)


def _known(given: dict[str, Any], known: set[str]) -> dict[str, Any]:
    for given_name, value in given.items():
        name = given_name[:100] or "''"
        if given_name in known:
            continue
        if name not in _ASKS_NOTHING:
            raise HttpError(400, f"{name}: got {_shown(value)}, but it is not supported here", name, "unsupported_parameter")
        if not any(value == plain and type(value) is type(plain) for plain in _ASKS_NOTHING[name]):
            wanted = " or ".join(map(repr, _ASKS_NOTHING[name]))
            raise HttpError(400, f"{name}: got {_shown(value)}, want {wanted}: nothing else is supported here", name, "unsupported_value")
    return given


def _chat_ids(given: Mapping[str, Any], tools: ToolUse | None, codec: TextCodec) -> list[int]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HttpError(400, f"messages: got {_shown(messages)}, want a list of at least one message", "messages")
    plain = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    try:
        if tools is None or not tools.told:
            return codec.chat(plain)
        ids = codec.chat(plain, tools.told)
        return ids if ids != codec.chat(plain) else codec.chat(tools.in_words(plain))
    except ValueError as error:
        raise refusal(error) from None


def _message(message: Any, name: str) -> dict[str, Any]:
    """With its content as one text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise HttpError(400, f"{name}: got {_shown(message)}, want an object with a role and a content", name)
    message = {field: value for field, value in message.items() if value is not None}
    for field in message.keys() - _MESSAGE:
        raise HttpError(400, f"{name}.{field[:100]}: got a field that is not supported here", f"{name}.{field[:100]}")
    content = message.get("content")
    if isinstance(content, list):
        for place, part in enumerate(content):
            if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text" or not isinstance(part["text"], str):
                raise HttpError(400, f"{name}.content[{place}]: got {_shown(part)}, want a part of type text", f"{name}.content")
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise HttpError(400, f"{name}.content: got {_shown(content)}, want text", f"{name}.content")
    return {**message, "content": content}


def _prompt_ids(given: Mapping[str, Any], codec: TextCodec) -> list[int]:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise HttpError(400, f"prompt: got {_shown(prompt)}, want one text, or one list of token ids", "prompt")
    try:
        return codec.encode(prompt)
    except ValueError as error:
        raise HttpError(400, f"prompt: {error}", "prompt") from None


def _sampling(given: Mapping[str, Any], logprobs: bool) -> SamplingParams:
    wanted = {ours: given[theirs] for theirs, ours in _SAMPLING.items() if theirs in given}
    biases = given.get("logit_bias", {})
    if not isinstance(biases, dict) or not all(re.fullmatch(r"\d{1,9}", token) for token in biases):
        raise HttpError(400, f"logit_bias: got {_shown(biases)}, want an object from token ids to numbers", "logit_bias")
    try:
        return SamplingParams(**wanted, logprobs=logprobs, logit_bias={int(token): bias for token, bias in biases.items()})
    except ValueError as error:
        raise refusal(error) from None


def _constraint(given: Mapping[str, Any], tools: ToolUse | None) -> Constraint | None:
    try:
        constraint = Constraint.response_format(given["response_format"]) if "response_format" in given else None
        if tools is None or not tools.told:
            return constraint
        if constraint is not None:
            raise HttpError(
                400, "response_format: got one beside tools, want it with tool_choice 'none' or without tools", "response_format"
            )
        return tools.constraint()
    except ValueError as error:
        raise refusal(error) from None


def _stops(given: Mapping[str, Any]) -> tuple[str, ...]:
    stops = given.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise HttpError(400, f"stop: got {_shown(stops)}, want a text, or a list of up to {MAX_STOPS}, none of them empty", "stop")
    return tuple(stops)


def _usage(given: Mapping[str, Any]) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage"} or not isinstance(options.get("include_usage", False), bool):
        raise HttpError(400, f"stream_options: got {_shown(options)}, want an object with include_usage", "stream_options")
    if options and not given.get("stream"):
        raise HttpError(400, "stream_options: got them without stream, want stream: true", "stream_options")
    return bool(options.get("include_usage"))


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise HttpError(400, f"{name}: got {_shown(value)}, want true or false", name)
    return value


def _no_others(given: Mapping[str, Any]) -> bool:
    """Of a completion: how many others to tell of besides each token."""
    value = given.get("logprobs")
    if value is not None and (value != 0 or isinstance(value, bool)):
        raise HttpError(400, f"logprobs: got {_shown(value)}, want 0: of other tokens than the chosen ones nothing is told", "logprobs")
    return value is not None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."
