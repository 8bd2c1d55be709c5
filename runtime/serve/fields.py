"""OpenAI's request bodies: supported fields are passed to the runtime, values without effect are accepted, the rest is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from stepgraph import Constraint, SamplingParams
from stepgraph.runtime.serve.http import HttpError
from stepgraph.runtime.serve.tools import ToolUse, tool_use
from stepgraph.runtime.text import TextCodec

_SAMPLING = {  # field of the request: field of SamplingParams; from top_k on they are vLLM's extensions
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
_NO_EFFECT: dict[str, tuple[Any, ...]] = {  # fields that are accepted with these values only
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "store": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}
_REQUEST_FIELDS = {runtime: field for field, runtime in _SAMPLING.items()} | {"max_new_tokens": "max_tokens"}
MAX_STOPS = 4


@dataclass(frozen=True)
class GenerationRequest:
    """A request body, checked as far as possible without the engine."""

    chat: bool
    prompt_ids: list[int]
    options: dict[str, Any]  # arguments of Engine.submit
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool  # as the last event of a stream
    logprobs: bool
    tools: ToolUse | None


def parse_request(body: Mapping[str, Any], chat: bool, codec: TextCodec, model: str, max_length: int) -> GenerationRequest:
    """HttpError names the field that is wrong or not supported."""
    fields = {name: value for name, value in body.items() if value is not None}
    _check_known(fields, _CHAT if chat else _COMPLETION)
    if fields.get("model", model) != model:
        raise HttpError(404, f"model: got {_clipped(fields['model'])}, expected {model!r}", "model", "model_not_found")
    tools = tool_use(fields.get("tools"), fields.get("tool_choice")) if chat else None
    prompt_ids = _chat_ids(fields, tools, codec) if chat else _prompt_ids(fields, codec)
    logprobs = _flag(fields, "logprobs") if chat else _completion_logprobs(fields)
    room = max(1, max_length - len(prompt_ids))
    max_tokens = fields.get("max_completion_tokens", fields.get("max_tokens", room if chat else min(16, room)))
    options = {"max_new_tokens": max_tokens, "sampling": _sampling(fields, logprobs), "constraint": _constraint(fields, tools)}
    stream, include_usage = _flag(fields, "stream"), _include_usage(fields)
    return GenerationRequest(chat, prompt_ids, options, _stops(fields), stream, include_usage, logprobs, tools)


def runtime_refusal(error: ValueError, prompt_field: str = "messages") -> HttpError:
    """An error of the runtime, with the field's name in OpenAI's request body."""
    message = str(error)
    name = re.match(r"(?:SamplingParams\.|sampling\.)?(\w+)", message)
    runtime_field = name[1] if name else ""
    field = prompt_field if runtime_field == "prompt" else _REQUEST_FIELDS.get(runtime_field, runtime_field)
    return HttpError(400, message if field == runtime_field else f"{field}: {message}", field or None)


def _refuse(field: str, value: Any, expected: str) -> NoReturn:
    raise HttpError(400, f"{field}: got {_clipped(value)}, expected {expected}", field)


def _check_known(fields: dict[str, Any], known: set[str]) -> None:
    for full_name in fields.keys() - known:
        value, name = fields[full_name], full_name[:100] or "''"
        if name not in _NO_EFFECT:
            raise HttpError(400, f"{name}: got {_clipped(value)}, but the field is not supported", name, "unsupported_parameter")
        if not any(value == accepted and type(value) is type(accepted) for accepted in _NO_EFFECT[name]):
            expected = " or ".join(map(repr, _NO_EFFECT[name]))
            raise HttpError(400, f"{name}: got {_clipped(value)}, expected {expected}", name, "unsupported_value")


def _chat_ids(fields: Mapping[str, Any], tools: ToolUse | None, codec: TextCodec) -> list[int]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        _refuse("messages", messages, "a list of at least one message")
    plain = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    try:
        if tools is None or not tools.callable:
            return codec.chat(plain)
        ids = codec.chat(plain, tools.callable)
        return ids if ids != codec.chat(plain) else codec.chat(tools.as_system_message(plain))
    except ValueError as error:
        raise runtime_refusal(error) from None


def _message(message: Any, name: str) -> dict[str, Any]:
    """The message with its content as one text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        _refuse(name, message, "an object with a role and a content")
    message = {field: value for field, value in message.items() if value is not None}
    for field in message.keys() - _MESSAGE:
        raise HttpError(400, f"{name}.{field[:100]}: the field is not supported", f"{name}.{field[:100]}")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text" or not isinstance(part["text"], str):
                _refuse(f"{name}.content", part, "parts of type text")
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        _refuse(f"{name}.content", content, "text")
    return {**message, "content": content}


def _prompt_ids(fields: Mapping[str, Any], codec: TextCodec) -> list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        _refuse("prompt", prompt, "one text or one list of token ids")
    try:
        return codec.encode(prompt)
    except ValueError as error:
        raise HttpError(400, f"prompt: {error}", "prompt") from None


def _sampling(fields: Mapping[str, Any], logprobs: bool) -> SamplingParams:
    params = {runtime: fields[field] for field, runtime in _SAMPLING.items() if field in fields}
    biases = fields.get("logit_bias", {})
    if not isinstance(biases, dict) or not all(re.fullmatch(r"\d{1,9}", token) for token in biases):
        _refuse("logit_bias", biases, "an object from token ids to numbers")
    try:
        params = {"temperature": 1.0, **params, "logit_bias": {int(token): bias for token, bias in biases.items()}}
        return SamplingParams(**params, logprobs=logprobs)
    except ValueError as error:
        raise runtime_refusal(error) from None


def _constraint(fields: Mapping[str, Any], tools: ToolUse | None) -> Constraint | None:
    try:
        constraint = Constraint.response_format(fields["response_format"]) if "response_format" in fields else None
        if tools is None or not tools.callable:
            return constraint
        if constraint is not None:
            _refuse("response_format", fields["response_format"], "none beside tools, or tool_choice 'none'")
        return tools.constraint()
    except ValueError as error:
        raise runtime_refusal(error) from None


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        _refuse("stop", stops, f"a non-empty text, or a list of up to {MAX_STOPS} of them")
    return tuple(stops)


def _include_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage"} or not isinstance(options.get("include_usage", False), bool):
        _refuse("stream_options", options, "an object with include_usage")
    if options and not fields.get("stream"):
        _refuse("stream_options", options, "none without stream: true")
    return bool(options.get("include_usage"))


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        _refuse(name, value, "true or false")
    return value


def _completion_logprobs(fields: Mapping[str, Any]) -> bool:
    """In a completion request, the number of alternatives to report for each token."""
    value = fields.get("logprobs")
    if value is not None and (value != 0 or isinstance(value, bool)):
        _refuse("logprobs", value, "0: only chosen tokens have log-probabilities here")
    return value is not None


def _clipped(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."
