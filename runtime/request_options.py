"""What Engine.submit() takes: prompts, and the options beside them. Names that other libraries have for them, for errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.runtime.config import OTHER_NAMES as CONFIG_NAMES
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.text import Message
from stepgraph.sampling.params import OTHER_NAMES as SAMPLING_NAMES
from stepgraph.sampling.params import SamplingParams

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor
Prompt: TypeAlias = str | Sequence[Message] | TokenIds
Prompts: TypeAlias = list[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]]


class RequestOptions(TypedDict, total=False):
    """The options of Engine.submit(), where they are described."""

    constraint: object
    sampling: SamplingParams | None
    max_new_tokens: int | None
    num_speculative_tokens: int | None
    draft_ids: TokenIds | None
    cache_salt: str
    lora_name: str
    prompt_embeddings: Mapping[int, Tensor] | None
    resume_from: TokenIds | None
    priority: int
    tenant: str


_SETTINGS = {field.name: f"config=EngineConfig({field.name}=)" for field in fields(EngineConfig)}
_SETTINGS |= {other: _SETTINGS[name] for other, name in CONFIG_NAMES.items() if name in _SETTINGS}
_SAMPLING = {field.name: f"sampling=SamplingParams({field.name}=)" for field in fields(SamplingParams)}
_SAMPLING |= {other: _SAMPLING[name] for other, name in SAMPLING_NAMES.items() if name in _SAMPLING}

ENGINE_NAMES = _SETTINGS | {
    **dict.fromkeys(("model", "model_path"), "the model as the first argument"),
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_config", "speculative_model"), "draft"),
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "tensor_parallel, of Engine.from_pretrained"),
    "torch_dtype": "dtype, of Engine.from_pretrained",
    **dict.fromkeys(("quantization", "quantization_config", "load_in_8bit", "load_in_4bit"), "weights='quantised', for a quantised model"),
    **dict.fromkeys(("device", "device_map", "n_gpu_layers"), "config=EngineConfig(backend=)"),
    "trust_remote_code": "nothing: no code of a model's folder is run",
}
REQUEST_NAMES = _SAMPLING | {
    **dict.fromkeys(("max_tokens", "max_length", "n_predict"), "max_new_tokens"),
    **dict.fromkeys(("sampling_params", "generation_config"), "sampling"),
    **dict.fromkeys(("prompts", "messages", "inputs", "input_ids", "prompt_token_ids"), "the prompt as the first argument"),
    **dict.fromkeys(("output_type", "structured_outputs"), "constraint"),
    **dict.fromkeys(
        ("json", "schema", "json_schema", "guided_json", "guided_decoding"), "constraint=Constraint.json_schema(...), or a Python type"
    ),
    **dict.fromkeys(("regex", "guided_regex"), "constraint=Constraint.regex(...)"),
    **dict.fromkeys(("choice", "choices", "guided_choice"), "constraint=Constraint.choice([...])"),
    **dict.fromkeys(("grammar", "guided_grammar"), "constraint=Constraint.ebnf(...) or Constraint.lark(...)"),
    "response_format": "constraint=Constraint.response_format(...)",
    **dict.fromkeys(("tools", "tool_choice"), "a function as the constraint, or the tools in Engine.tokenizer.chat(messages, tools)"),
    **dict.fromkeys(("stream", "streamer"), "the method Engine.stream_text, or AsyncEngine"),
    **dict.fromkeys(("n", "best_of", "num_return_sequences"), SAMPLING_NAMES["n"]),
    **dict.fromkeys(("lora_request", "adapter_name"), "lora_name"),
    **dict.fromkeys(("num_assistant_tokens", "prompt_lookup_num_tokens", "num_draft_tokens"), "num_speculative_tokens"),
}
