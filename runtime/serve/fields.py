"""OpenAI's request bodies: supported fields are passed to the runtime, values without effect are accepted, the rest is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stepgraph.runtime.models.files.tokenizer import joined_parts
from stepgraph.runtime.serve.calls import ChosenFormat
from stepgraph.runtime.serve.http import HttpError, refuse
from stepgraph.runtime.serve.reasoning import Reasoning, reasoning_of
from stepgraph.runtime.serve.tools import ToolUse, tool_use
from stepgraph.runtime.text import TextCodec
from stepgraph.runtime.validate import checked_ids
from stepgraph.sampling.fields import BOOL, Check, instance_of, is_int, reject_constant, whole
from stepgraph.sampling.grammar.constraints.constraint import MAX_MARKER_LIMIT, Constraint
from stepgraph.sampling.grammar.constraints.structural_tag import ALTERNATIVE
from stepgraph.sampling.grammar.schema.reader import clip_json, parse_json
from stepgraph.sampling.params import STOP_TEXT, SamplingParams

_SAMPLING_FIELDS = {  # field of the request: field of SamplingParams
    **{name: name for name in ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")},
    **{name: name for name in ("top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids")},  # vLLM's extensions
    "min_tokens": "min_new_tokens",
}
_COMMON = {*_SAMPLING_FIELDS, "model", "n", "stream", "stream_options", "max_tokens", "stop", "logit_bias", "logprobs", "response_format"}
_COMMON |= {"priority", "structured_outputs"}
_STRUCTURED: dict[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json_schema,
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.ebnf,
    "json_object": lambda value: Constraint.json_object() if value is True else refuse("structured_outputs", value, "true for json_object"),
}
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf", "grammar")
_ELSEWHERE = {  # in vLLM, SGLang, llama.cpp's server and older APIs of OpenAI
    **dict.fromkeys(_GUIDED, "structured_outputs or response_format"),
    **dict.fromkeys(("n_predict", "max_new_tokens", "max_length"), "max_tokens"),
    **{"repeat_penalty": "repetition_penalty", "min_new_tokens": "min_tokens", "functions": "tools", "function_call": "tool_choice"},
}
_CHAT_FIELDS = {*_COMMON, "messages", "max_completion_tokens", "tools", "tool_choice"}
_COMPLETION_FIELDS = {*_COMMON, "prompt", "best_of", "echo", "prompt_logprobs"}
_CHAT_FIELDS |= {"top_logprobs", "parallel_tool_calls", "reasoning_effort", "thinking_token_budget", "chat_template_kwargs"}
_CHAT_FIELDS |= {"continue_final_message", "add_generation_prompt"}
_MESSAGE_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_EFFORT = Check(_EFFORTS.__contains__, f"one of {', '.join(_EFFORTS)}")
_BOOL, _OBJECT = BOOL._replace(expected="true or false"), instance_of(dict, "an object")
_OFF, _ON = Check(lambda value: value is False, "false"), Check(lambda value: value is True, "true")
_WITHOUT_EFFECT = {  # fields that are accepted with these values
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), instance_of(str, "a string")),
    "metadata": _OBJECT,
    **{"echo": _OFF, "store": _OFF, "include_stop_str_in_output": _OFF, "skip_special_tokens": _ON},
    "service_tier": Check(("auto", "default").__contains__, '"auto" or "default"'),
    "modalities": Check(lambda value: value == ["text"], '["text"]'),
    "suffix": Check(lambda value: value == "", '""'),
}
_STREAM_OPTIONS = {"include_usage": _BOOL, "include_obfuscation": _OFF, "continuous_usage_stats": _OFF}
_REQUEST_FIELDS = {runtime: field for field, runtime in _SAMPLING_FIELDS.items()} | {"variables": "chat_template_kwargs"}
_ANSWERS = ("json_schema", "json_object")  # kinds of constraints that may be beside tools
MAX_STOPS = 32  # OpenAI allows 4; clients of vLLM and llama.cpp send more
MAX_CHOICES = 16
MAX_IDS = 1024  # of logit_bias and stop_token_ids
MAX_CHAT_LOGPROBS, MAX_COMPLETION_LOGPROBS = 20, 5  # as OpenAI's endpoints
MAX_PRIORITY = 1000
_PRIORITY = whole(-MAX_PRIORITY, MAX_PRIORITY)._replace(
    expected=f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}; lower ones are answered first"
)
_BUDGET = whole(1, MAX_MARKER_LIMIT)._replace(
    expected=f"a whole number from 1 to {MAX_MARKER_LIMIT}; reasoning_effort 'none' switches reasoning off"
)


class Prompt(NamedTuple):
    ids: list[int]
    max_tokens: int  # of an answer
    echo: str = ""  # the text that precedes an answer


@dataclass(frozen=True)
class GenerationRequest:
    """A request body, checked as far as possible without the engine."""

    chat: bool
    model: str  # or the name of an adapter
    prompts: list[Prompt]
    options: dict[str, Any]  # arguments of Engine.submit, except max_new_tokens
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool  # as the last event of a stream
    tools: ToolUse | None
    n: int  # choices for each prompt
    echo: bool
    prompt_logprobs: int | None  # vLLM's field
    constraint_field: str  # the field that sets the constraint
    reasoning: Reasoning | None  # None: the answer has no reasoning

    @property
    def reasoning_limit(self) -> int | None:
        """Tokens after which the constraint closes the reasoning. None: there is no budget, or a second request follows the reasoning."""
        reasoning, constrained = self.reasoning, self.options["constraint"] is not None
        return reasoning.budget if reasoning is not None and constrained and reasoning.opened and not reasoning.in_channels else None

    @property
    def scored(self) -> bool:
        """Whether answers have log-probabilities of their prompts. Writing those of 4,000 tokens with 20 others each takes 0.3 s."""
        return self.options["sampling"].prompt_logprobs is not None

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    def options_of(self, index: int, written: int = 0) -> dict[str, Any]:
        """The options of one choice, or of its continuation after `written` tokens. With a seed, each choice of a prompt has its own."""
        options, constraint = dict(self.options), self.options["constraint"]
        sampling: SamplingParams = options["sampling"]
        if sampling.seed is not None:
            options["sampling"] = replace(sampling, seed=(sampling.seed + index % self.n) % 2**63)
        options["max_new_tokens"] = max(1, self.prompt_of(index).max_tokens - written)  # 0: the engine ends no job without a token
        options["sampling"] = replace(options["sampling"], min_new_tokens=max(0, sampling.min_new_tokens - written))
        if self.reasoning is not None and constraint is not None:
            marker = self.reasoning.marker(self.tools is not None, self.tools is not None and self.tools.in_text, written > 0)
            options["constraint"] = constraint if marker is None else constraint.after(marker, limit=self.reasoning_limit)
        return options


def parse_request(
    body: Mapping[str, Any],
    chat: bool,
    codec: TextCodec,
    models: Sequence[str],
    max_length: int,
    chosen_format: ChosenFormat,
    max_choices: int,
) -> GenerationRequest:
    """HttpError names the field that is wrong or not supported. models: the name of the model, and those of its adapters."""
    ints = {name: int(value) for name, value in body.items() if isinstance(value, float) and value.is_integer()}  # some clients write 5.0
    fields = {name: value for name, value in {**body, **ints}.items() if value is not None}
    _check_known(fields, _CHAT_FIELDS if chat else _COMPLETION_FIELDS)
    model = checked_model(fields.get("model", models[0]), models)
    parallel = _checked(fields, "parallel_tool_calls", _BOOL, True)
    tools = tool_use(fields.get("tools"), fields.get("tool_choice"), parallel, chosen_format) if chat else None
    n = _checked(fields, "n", whole(1, MAX_CHOICES), 1)
    given = {} if chat else _given_prompts(fields)
    if (choices := n * max(1, len(given))) > max_choices:  # before their prompts are encoded
        refuse("n" if chat else "prompt", choices, f"at most {max_choices} choices, the most that this server holds")
    echo, continues = _checked(fields, "echo", _BOOL, False), _continues(fields)
    prompts = [_chat_prompt(fields, tools, codec, max_length, continues)] if chat else _prompts(fields, given, codec, max_length, echo)
    budget = _checked(fields, "thinking_token_budget", _BUDGET)
    reasoning = reasoning_of(prompts[0].ids, codec, _template_variables(fields), budget) if chat and not continues else None
    if budget is not None and reasoning is None:
        refuse("thinking_token_budget", budget, "none: the answer has no reasoning between <think> and </think>")
    stops = _stops(fields)  # in a text with calls or reasoning, the runtime would find them there too
    logprobs, own = _logprobs(fields, chat), _checked(fields, "prompt_logprobs", whole(0, MAX_CHAT_LOGPROBS))
    of_prompt = max([count for count in (own, logprobs[1] if echo and logprobs[0] else None) if count is not None], default=None)
    sampling = _sampling(fields, logprobs, stops if tools is None and reasoning is None else (), of_prompt)
    constraint, constraint_field, tools = _constraint(fields, tools)
    options = {"sampling": sampling, "constraint": constraint, "lora_name": "" if model == models[0] else model}
    options["priority"] = _checked(fields, "priority", _PRIORITY, 0)
    stream, include_usage = _checked(fields, "stream", _BOOL, False), _include_usage(fields)
    if stream and own is not None:
        refuse("prompt_logprobs", own, "none with stream: true")
    _checked(fields, "best_of", whole(n, n)._replace(expected=f"n, which is {n}"))
    return GenerationRequest(chat, model, prompts, options, stops, stream, include_usage, tools, n, echo, own, constraint_field, reasoning)


def checked_model(name: Any, models: Sequence[str]) -> str:
    if name not in models:
        expected = " or ".join(map(repr, models))
        raise HttpError(404, f"model: got {clip_json(name)}, expected {expected}", "model", "model_not_found")
    return str(name)


def request_error(error: ValueError | str, prompt_field: str = "messages", constraint_field: str = "response_format") -> HttpError:
    """The response to an error of the runtime, with the field name of the request body instead of the runtime's."""
    message = re.sub(r"^constraint \w+:", "constraint:", str(error))  # kinds of constraints have no name in requests
    message = re.sub(r"EngineConfig\.\w+=", "", message.replace("max_new_tokens=", "max_tokens="))
    if constraint_field == "tools" and f" '{ALTERNATIVE}':" in message:  # of the answer without calls
        constraint_field, message = "response_format", message.replace(f" '{ALTERNATIVE}':", "", 1)
    subject, _, reason = message.partition(":")
    subject = subject.removeprefix("SamplingParams.").removeprefix("sampling.")
    name = re.match(r"\w*", subject)
    runtime_field = name[0] if name else ""
    if runtime_field in ("constraint", "Constraint", "schema"):
        path = subject.partition("Constraint.structural_tag")[2]
        return HttpError(400, f"{constraint_field}{path}:{reason}", constraint_field + path)
    if runtime_field == "prompt":
        return HttpError(400, f"{prompt_field}:{reason}", prompt_field)
    field = _REQUEST_FIELDS.get(runtime_field, runtime_field)
    return HttpError(400, f"{field}{subject.removeprefix(runtime_field)}:{reason}", field or None)


def _check_known(fields: dict[str, Any], known: set[str]) -> None:
    for full_name in [name for name in fields if name not in known]:
        if full_name in _WITHOUT_EFFECT:
            _checked(fields, full_name, _WITHOUT_EFFECT[full_name])
        else:
            value, name = fields[full_name], full_name[:100] or "''"
            hint = f", expected {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise HttpError(400, f"{name}: got {clip_json(value)}, but the field is not supported{hint}", name, "unsupported_parameter")


def _continues(fields: Mapping[str, Any]) -> bool:
    """Whether the answer continues the last message, as vLLM's clients ask for it."""
    continues: bool = _checked(fields, "continue_final_message", _BOOL, False)
    expected = f"{str(not continues).lower()} with continue_final_message: {str(continues).lower()}"
    _checked(fields, "add_generation_prompt", Check(lambda value: value is not continues and isinstance(value, bool), expected))
    return continues


def _chat_prompt(fields: Mapping[str, Any], tools: ToolUse | None, codec: TextCodec, max_length: int, continues: bool) -> Prompt:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        refuse("messages", messages, "a list of at least one message")
    plain = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not codec.template_mentions("developer"):
        plain = [message | {"role": "system"} if message["role"] == "developer" else message for message in plain]
    variables = _template_variables(fields)
    try:
        if tools is None:
            ids = codec.chat(plain, variables=variables, continues=continues)
        else:
            ids = tools.prompt_ids(codec, plain, variables, continues)
    except ValueError as error:
        raise request_error(error) from None
    return Prompt(ids, _max_tokens(fields, "messages", len(ids), max_length, max_length))


def _message(message: Any, name: str) -> dict[str, Any]:
    """The message with its content as one text."""
    if not isinstance(message, dict):
        refuse(name, message, "an object with a role and a content")
    if message.get("role") not in _ROLES:
        refuse(f"{name}.role", message.get("role"), f"one of {', '.join(_ROLES)}")
    # An answer of OpenAI's API has fields such as "annotations": [].
    message = {field: value for field, value in message.items() if value is not None and (value != [] or field in _MESSAGE_FIELDS)}
    for field in [field for field in message if field not in _MESSAGE_FIELDS]:
        raise HttpError(400, f"{name}.{field[:100]}: the field is not supported", f"{name}.{field[:100]}")
    for field in message.keys() & {"name", "tool_call_id", "reasoning_content"}:
        if not isinstance(message[field], str):
            refuse(f"{name}.{field}", message[field], "text")
    try:
        content = joined_parts(message.get("content"), f"{name}.content")
    except ValueError as error:
        raise HttpError(400, str(error), f"{name}.content") from None
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        refuse(f"{name}.content", content, "text")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        refuse(f"{name}.tool_calls", calls, "a list of calls")
    parsed = [_past_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return {**message, "content": content} | ({"tool_calls": parsed} if parsed else {})


def _past_call(call: Any, name: str) -> dict[str, Any]:
    """A call of an earlier answer. Templates write its arguments as JSON, so they get the object and not its text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        refuse(name, call, "an object of type function with a name and arguments")
    try:
        text = function.get("arguments")
        arguments = json.loads("{}" if text in (None, "") else text, parse_constant=reject_constant)
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        refuse(f"{name}.function.arguments", function.get("arguments"), "the text of a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _template_variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template that a request sets."""
    variables: dict[str, Any] = _checked(fields, "chat_template_kwargs", _OBJECT, {})
    if (effort := _checked(fields, "reasoning_effort", _EFFORT)) is None:
        return variables
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {}), **variables}


def _max_tokens(fields: Mapping[str, Any], field: str, prompt: int, max_length: int, default: int, least: int = 1) -> int:
    """Most tokens of the answer. HttpError if the prompt, or the prompt with the answer, is too long. field: of the prompt."""
    room, context = max_length - prompt, f". This model's maximum context length is {max_length} tokens."  # LiteLLM looks for this text
    if room < 1 or prompt < 1:
        message = f"{field}: got {prompt} tokens, expected 1 to {max_length - 1}"
        raise HttpError(400, message + context * (prompt > 0), field, "context_length_exceeded" if prompt else None)
    expected = f"a whole number from {least} to {room}: {max_length} tokens less {prompt} of {field}"
    value: int = min(default, room)
    for name in ("max_tokens", "max_completion_tokens"):  # the last one counts
        value = fields.get(name, value)
        if not whole(least, room).accepts(value):
            too_long = is_int(value) and value > room
            refuse(name, value, expected + context * too_long, "context_length_exceeded" if too_long else None)
    return value


def _given_prompts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """By the names of their fields: one text or list of token ids, or those of a list."""
    given: Any = fields.get("prompt")
    several = isinstance(given, list) and given and isinstance(given[0], (str, list))
    return {f"prompt[{index}]": prompt for index, prompt in enumerate(given)} if several else {"prompt": given}


def _prompts(fields: Mapping[str, Any], given: Mapping[str, Any], codec: TextCodec, max_length: int, echo: bool) -> list[Prompt]:
    prompts, least = [], int(not echo)  # 0 tokens: the answer is the prompt
    for field, prompt in given.items():
        ids = _prompt_ids(prompt, field, codec)
        text = (prompt if isinstance(prompt, str) else codec.decode(ids)) if echo else ""
        prompts.append(Prompt(ids, _max_tokens(fields, field, len(ids), max_length, 16, least), text))
    return prompts


def _prompt_ids(prompt: Any, field: str, codec: TextCodec) -> list[int]:
    if not isinstance(prompt, (str, list)):
        refuse(field, prompt, "a text or a list of token ids; prompt may also be a list of these")
    try:
        return codec.encode(prompt) if isinstance(prompt, str) else [*checked_ids(field, prompt, len(codec.vocabulary.tokens))]
    except ValueError as error:
        message = str(error).removeprefix("text: ")
        raise HttpError(400, message if message.startswith(field) else f"{field}: {message}", field) from None


def _sampling(fields: Mapping[str, Any], logprobs: tuple[bool, int], stop: Sequence[str], prompt_logprobs: int | None) -> SamplingParams:
    params = {runtime: fields[field] for field, runtime in _SAMPLING_FIELDS.items() if field in fields}
    biases = fields.get("logit_bias", {})
    if not isinstance(biases, dict) or not all(re.fullmatch("0|[1-9][0-9]{0,8}", token) for token in biases):
        refuse("logit_bias", biases, "an object from token ids to numbers")
    for name in ("logit_bias", "stop_token_ids"):  # before they are checked one by one, which happens several times
        if isinstance(fields.get(name), (dict, list)) and len(fields[name]) > MAX_IDS:
            refuse(name, fields[name], f"at most {MAX_IDS} token ids")
    try:
        params = {"temperature": 1.0, **params, "logit_bias": {int(token): bias for token, bias in biases.items()}}
        return SamplingParams(**params, logprobs=logprobs[0], top_logprobs=logprobs[1], stop=stop, prompt_logprobs=prompt_logprobs)
    except ValueError as error:
        raise request_error(error) from None


def _constraint(fields: Mapping[str, Any], tools: ToolUse | None) -> tuple[Constraint | None, str, ToolUse | None]:
    """The constraint, the field that sets it, and the tools with the schema of an answer without calls."""
    field, constraint = "structured_outputs" if "structured_outputs" in fields else "response_format", None
    if "structured_outputs" in fields and "response_format" in fields:
        refuse(field, fields[field], "none beside response_format")
    try:
        if field in fields:
            constraint = Constraint.response_format(fields[field]) if field == "response_format" else _structured_outputs(fields[field])
        if tools is None:
            return constraint, field, None
        if constraint is not None and constraint.kind not in _ANSWERS:
            refuse(field, fields[field], f"{' or '.join(_ANSWERS)} beside tools, or tool_choice 'none'")
        if constraint is not None and not tools.required:  # an answer is a call or calls, or a value of the schema
            if tools.call_format.trigger.startswith("{"):
                refuse(field, fields[field], "none beside tools whose calls are JSON as well, or tool_choice 'required' or 'none'")
            tools = replace(tools, answer=parse_json(constraint.payload) if constraint.payload else {"type": "object"})
        try:
            return tools.constraint(), "tools", tools
        except ValueError as error:
            raise HttpError(400, f"tools: {error}", "tools") from None
    except ValueError as error:
        raise request_error(error, constraint_field=field) from None


def _structured_outputs(value: Any) -> Constraint:
    """The constraint of vLLM's field."""
    fields = value if isinstance(value, dict) else {}
    without_effect = {name for name, argument in fields.items() if argument is None or (argument is False and name.startswith("disable_"))}
    stated = {kind: argument for kind, argument in fields.items() if kind not in without_effect}
    if len(stated) != 1 or not stated.keys() <= _STRUCTURED.keys():
        refuse("structured_outputs", value, f"an object with one of {', '.join(_STRUCTURED)}")
    ((kind, argument),) = stated.items()
    return _STRUCTURED[kind](argument)


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(map(STOP_TEXT.accepts, stops)):
        refuse("stop", stops, f"{STOP_TEXT.expected}, or a list of up to {MAX_STOPS} of them")
    return tuple(stops)


def _include_usage(fields: Mapping[str, Any]) -> bool:
    options = _checked(fields, "stream_options", _OBJECT, {})
    if not all(value is None or (name in _STREAM_OPTIONS and _STREAM_OPTIONS[name].accepts(value)) for name, value in options.items()):
        refuse("stream_options", options, "an object with include_usage; include_obfuscation and continuous_usage_stats may be false")
    if options and not fields.get("stream"):
        refuse("stream_options", options, "none without stream: true")
    return bool(options.get("include_usage"))


def _checked(fields: Mapping[str, Any], name: str, check: Check, default: Any = None) -> Any:
    """The value of a field, or the default where there is none."""
    if name in fields and not check.accepts(fields[name]):
        refuse(name, fields[name], check.expected)
    return fields.get(name, default)


def _logprobs(fields: Mapping[str, Any], chat: bool) -> tuple[bool, int]:
    """Whether log-probabilities are reported, and how many of the most probable tokens beside each one."""
    if not chat:
        top = _checked(fields, "logprobs", whole(0, MAX_COMPLETION_LOGPROBS))
        return top is not None, top or 0
    chosen, top = _checked(fields, "logprobs", _BOOL, False), _checked(fields, "top_logprobs", whole(0, MAX_CHAT_LOGPROBS), 0)
    if top and not chosen:
        refuse("top_logprobs", top, "none without logprobs: true")
    return chosen, top
