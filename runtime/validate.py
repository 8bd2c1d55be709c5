"""Checks the arguments of Engine.submit() and makes a Job. Every field is checked before anything is queued.

Also the names of arguments in other libraries, which errors map to those of this package.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import Models
from stepgraph.runtime.config import NAMES_ELSEWHERE as CONFIG_NAMES
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.job import Lora
from stepgraph.runtime.request import Job
from stepgraph.runtime.text import Message
from stepgraph.sampling.fields import Check, check_value, clip_repr, instance_of, is_int, number, optional
from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint
from stepgraph.sampling.grammar.constraints.python_types import typed_constraint
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.params import GREEDY, SamplingParams
from stepgraph.sampling.params import NAMES_ELSEWHERE as SAMPLING_NAMES

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor
Prompt: TypeAlias = str | Sequence[Message] | TokenIds
Prompts: TypeAlias = list[str] | Sequence[TokenIds] | Sequence[Sequence[Message]]


_STRING = instance_of(str, "a string")
_SECONDS = optional(number(0, threading.TIMEOUT_MAX, low_open=True))


class _Constraint(TypedDict, total=False):
    constraint: object


class _OwnOptions(TypedDict, total=False):
    sampling: SamplingParams | None
    max_new_tokens: int | None


class _OwnOrEqualOptions(TypedDict, total=False):
    sampling: SamplingParams | Sequence[SamplingParams | None] | None
    max_new_tokens: int | Sequence[int | None] | None


class _EqualOptions(TypedDict, total=False):
    num_speculative_tokens: int | None
    draft_ids: TokenIds | None
    cache_salt: str
    lora_name: str
    prompt_embeddings: Mapping[int, Tensor] | None
    resume_from: TokenIds | None
    priority: int
    tenant: str
    timeout_seconds: float | None


class UntypedOptions(_OwnOptions, _EqualOptions, total=False):
    """All but `constraint`, which is the type of Job.parsed if it is a class."""


class UntypedBatchOptions(_OwnOrEqualOptions, _EqualOptions, total=False):
    """The same for a list of prompts."""


class RequestOptions(_Constraint, UntypedOptions, total=False):
    """The options of Engine.submit(), where they are described."""


class BatchOptions(_Constraint, UntypedBatchOptions, total=False):
    """The options of Engine.generate() for a list of prompts."""


_CONFIG_ARGUMENTS = {field.name: f"config=EngineConfig({field.name}=)" for field in fields(EngineConfig)}
_CONFIG_ARGUMENTS |= {other: _CONFIG_ARGUMENTS[name] for other, name in CONFIG_NAMES.items() if name in _CONFIG_ARGUMENTS}
_SAMPLING_ARGUMENTS = {field.name: f"sampling=SamplingParams({field.name}=)" for field in fields(SamplingParams)}
_SAMPLING_ARGUMENTS |= {other: _SAMPLING_ARGUMENTS[name] for other, name in SAMPLING_NAMES.items() if name in _SAMPLING_ARGUMENTS}

ENGINE_NAMES = _CONFIG_ARGUMENTS | {
    **dict.fromkeys(("model", "model_path"), "the model as the first argument"),
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_config", "speculative_model", "speculative_draft_model_path"), "draft"),
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "tensor_parallel, of Engine.from_pretrained"),
    "torch_dtype": "dtype, of Engine.from_pretrained",
    **dict.fromkeys(("quantization", "quantization_config", "load_in_8bit", "load_in_4bit"), "weights='quantised', for a quantised model"),
    **dict.fromkeys(
        ("device", "device_map", "n_gpu_layers"), "config=EngineConfig(backend=), or torch.cuda.set_device for one of several GPUs"
    ),
    "lora_path": "Engine.add_lora, with EngineConfig(max_loras=)",
    "trust_remote_code": "nothing: no code of a model's folder is run",
}
REQUEST_NAMES = _SAMPLING_ARGUMENTS | {
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
    **dict.fromkeys(("timeout", "max_time", "deadline"), "timeout_seconds"),
    "do_sample": "sampling=SamplingParams(temperature=), where 0 is greedy",
    **{name: f"constraint=Constraint.{name}(...)" for name in ("response_format", "structural_tag", "ebnf")},
    **dict.fromkeys(("tools", "tool_choice"), "a function as the constraint, or the tools in Engine.tokenizer.chat(messages, tools)"),
    **dict.fromkeys(("stream", "streaming", "streamer"), "the method Engine.stream_text, or AsyncEngine"),
    **dict.fromkeys(("n", "best_of", "num_return_sequences"), SAMPLING_NAMES["n"]),
    **dict.fromkeys(("lora_request", "adapter_name"), "lora_name"),
    **dict.fromkeys(("num_assistant_tokens", "prompt_lookup_num_tokens", "num_draft_tokens"), "num_speculative_tokens"),
}


class RequestValidator:
    """Creates jobs. Any thread may call it: only the next id changes."""

    def __init__(self, config: EngineConfig, limits: Limits, vocabulary: Vocabulary | None, models: Models, pinned: bool) -> None:
        """pinned: copy embeddings to pinned memory, because a copy from pageable memory to the device would block."""
        stop_token_ids = vocabulary.stop_token_ids if vocabulary else ()
        if len(stop_token_ids) > limits.max_stop_ids:
            expected = f"at least {len(stop_token_ids)}, the number of the vocabulary's stop ids"
            raise ValueError(f"EngineConfig.max_stop_ids: got {limits.max_stop_ids}, expected {expected}")
        self._config, self._limits, self._vocabulary, self._stop_token_ids = config, limits, vocabulary, tuple(stop_token_ids)
        self._takes_draft_ids = models.reads_text and getattr(models.proposer, "takes_draft_ids", True)
        self._embedding_size, self._embedding_dtype = int(getattr(models.target, "embedding_size", 0)), models.target.feature_dtype
        self._pinned = pinned
        self._ids = itertools.count(1)  # never reused: an id also identifies the owner in mask tags

    def make_job(self, prompt_ids: Any, lora: Lora, options: RequestOptions) -> Job:
        """ValueError `field: got VALUE, expected ACCEPTED` for the first field that is wrong."""
        limits, prompt = self._limits, self._prompt(prompt_ids)
        room, new_tokens = limits.max_length - len(prompt), options.get("max_new_tokens")
        reason = f"EngineConfig.max_length={limits.max_length} minus {len(prompt)} prompt tokens"
        new_tokens = room if new_tokens is None else checked_count("max_new_tokens", new_tokens, 1, room, reason)
        max_drafts, drafts = limits.num_speculative_tokens, options.get("num_speculative_tokens")
        reason = "the engine's num_speculative_tokens or draft_length"
        drafts = max_drafts if drafts is None else checked_count("num_speculative_tokens", drafts, 0, max_drafts, reason)
        draft_ids = self._draft_ids(options.get("draft_ids"), drafts)
        constraint, typed = options.get("constraint"), None
        if constraint is not None:
            typed = typed_constraint(constraint.constraint if isinstance(constraint, CompiledConstraint) else constraint)
        sampling = self._sampling(options.get("sampling"), constraint is not None, new_tokens)
        stop_ids = self._stop_ids(sampling)
        seed = 0 if sampling.greedy else -2 - secrets.randbits(62) if sampling.seed is None else sampling.seed
        check_value("cache_salt", cache_salt := options.get("cache_salt", ""), _STRING)
        check_value("priority", priority := options.get("priority", 0), Check(is_int, "a whole number; lower numbers get rows first"))
        check_value("tenant", tenant := options.get("tenant", ""), _STRING)
        check_value("timeout_seconds", timeout := options.get("timeout_seconds"), _SECONDS)
        embeddings = self._embeddings(options.get("prompt_embeddings"), len(prompt))
        if embeddings and sampling.prompt_logprobs is not None:
            got = f"got {len(embeddings)} spans with sampling.prompt_logprobs={sampling.prompt_logprobs}"
            raise ValueError(f"prompt_embeddings: {got}, expected None: embeddings have no log-probabilities")
        resume_from = options.get("resume_from")
        job = Job(
            next(self._ids),
            prompt,
            typed.constraint if typed else None,
            sampling,
            new_tokens,
            drafts,
            stop_ids,
            seed,
            draft_ids,
            cache_salt,
            lora,
            embeddings,
            () if resume_from is None else checked_ids("resume_from", resume_from, limits.num_tokens),
            priority=priority,
            tenant=tenant,
            timeout_seconds=timeout,
            vocabulary=self._vocabulary,
            parse=typed.parse if typed else str,
        )
        if job.resume_from:
            self._check_resumed(job)
        return job

    def _check_resumed(self, job: Job) -> None:
        """ValueError if the output has ended, or if its next tokens depend on the drafts of the earlier request."""
        ids, sampling = job.resume_from, job.sampling
        if sampling.relaxed_top_n and job.num_speculative_tokens:
            got = f"{sampling.relaxed_top_n} with resume_from"
            raise ValueError(f"sampling.relaxed_top_n: got {got}, expected 0: tokens depend on the drafts")
        if len(ids) >= job.max_new_tokens:
            expected = f"expected fewer than max_new_tokens={job.max_new_tokens}, which counts them"
            raise ValueError(f"resume_from: got {len(ids)} tokens, {expected}")
        for index, token in enumerate(ids):
            if token in job.stop_ids:
                raise ValueError(f"resume_from[{index}]: got the stop token {token}, expected an output that has not ended")
        if sampling.stop and job.text_stream().found_stop:
            raise ValueError(f"resume_from: got a text with one of {clip_repr(sampling.stop)}, expected an output that has not ended")
        if not sampling.greedy and sampling.seed is None:
            got = f"got None with resume_from and sampling.temperature={sampling.temperature:g}"
            raise ValueError(f"sampling.seed: {got}, expected Job.seed of the request that is continued")
        if job.seed < 0 and job.num_speculative_tokens:
            got = f"got {job.num_speculative_tokens} with resume_from and sampling.seed={job.seed}"
            raise ValueError(f"num_speculative_tokens: {got}, expected 0 for both requests: draws of a negative seed depend on drafts")

    def _prompt(self, prompt_ids: Any) -> tuple[int, ...]:
        expected = "a text, a list of chat messages, or a sequence of token ids"
        if isinstance(prompt_ids, (list, tuple)) and isinstance(next(iter(prompt_ids), 0), (str, list, tuple)):
            raise ValueError(f"prompt: got a list of prompts, expected {expected}; Engine.generate takes a list of prompts")
        prompt, max_length = checked_ids("prompt", prompt_ids, self._limits.num_tokens, expected), self._limits.max_length
        if not prompt:
            raise ValueError("prompt: got an empty prompt, expected at least one token id")
        if len(prompt) >= max_length:
            raise ValueError(f"prompt: got {len(prompt)} tokens, expected fewer than EngineConfig.max_length={max_length}")
        return prompt

    def _draft_ids(self, draft_ids: Any, drafts: int) -> tuple[int, ...]:
        if draft_ids is None:
            return ()
        ids, max_length = checked_ids("draft_ids", draft_ids, self._limits.num_tokens), self._limits.max_length
        if not self._takes_draft_ids:
            expected = "None: the engine has no look-up drafter; use Engine(draft='ngram'), or EngineConfig(look_up=3) beside a draft model"
            raise ValueError(f"draft_ids: got {len(ids)} tokens, expected {expected}")
        if not drafts:
            raise ValueError(f"draft_ids: got {len(ids)} tokens with num_speculative_tokens=0, expected None")
        if len(ids) > max_length:
            raise ValueError(f"draft_ids: got {len(ids)} tokens, expected at most max_length={max_length}")
        return ids

    def _sampling(self, sampling: Any, constrained: bool, max_new_tokens: int) -> SamplingParams:
        """The checked parameters; GREEDY for None. ValueError for a field that does not fit the engine or the request."""
        if sampling is None:
            return GREEDY
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling: got {type(sampling).__name__}, expected SamplingParams")
        name, limits = sampling.beyond_argmax, self._limits
        if self._config.greedy_only and name:
            value, default = clip_repr(getattr(sampling, name)), clip_repr(getattr(GREEDY, name))
            raise ValueError(f"sampling.{name}: got {value}, expected {default}: the engine is greedy_only")
        checked_ids("sampling.bad_token_ids", sampling.bad_token_ids, limits.num_tokens)
        check_options(sampling, self._config, limits)
        for token in sampling.logit_bias:
            if token >= limits.num_tokens:
                raise ValueError(f"sampling.logit_bias: got the key {token}, expected token ids from 0 to {limits.num_tokens - 1}")
        if len(sampling.biases) > limits.max_bias_ids:
            names = " and ".join(name for name in ("logit_bias", "bad_token_ids") if getattr(sampling, name))
            expected = f"at most EngineConfig.max_bias_ids={limits.max_bias_ids}"
            raise ValueError(f"sampling.{names}: got {len(sampling.biases)} tokens, expected {expected}")
        for name in ("top_logprobs", "prompt_logprobs"):
            if (count := getattr(sampling, name) or 0) > limits.max_top_logprobs:
                raise ValueError(f"sampling.{name}: got {count}, expected at most EngineConfig.max_top_logprobs={limits.max_top_logprobs}")
        if sampling.min_new_tokens > max_new_tokens:
            raise ValueError(f"sampling.min_new_tokens: got {sampling.min_new_tokens}, expected at most max_new_tokens={max_new_tokens}")
        if sampling.stop and self._vocabulary is None:
            raise ValueError(f"sampling.stop: got {clip_repr(sampling.stop)}, expected none: the engine has no vocabulary")
        if sampling.ignore_eos and constrained:
            raise ValueError("sampling.ignore_eos: got True with a constraint, expected False: a complete constrained output ends")
        return sampling

    def _stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """The vocabulary's stop ids, unless `ignore_eos`, and the request's own."""
        own, limit = checked_ids("sampling.stop_token_ids", sampling.stop_token_ids, self._limits.num_tokens), self._limits.max_stop_ids
        stop_ids = tuple(dict.fromkeys([*(() if sampling.ignore_eos else self._stop_token_ids), *own]))
        if len(stop_ids) > limit:
            expected = f"expected at most EngineConfig.max_stop_ids={limit}"
            raise ValueError(f"sampling.stop_token_ids: got {len(stop_ids)} including the vocabulary's, {expected}")
        return stop_ids

    def _embeddings(self, embeddings: Any, prompt_tokens: int) -> tuple[tuple[int, Tensor], ...]:
        """Spans (first position, host tensor [n, width]) in order. Look-up and penalties use the ids at these positions as they are."""
        size, dtype = self._embedding_size, self._embedding_dtype
        if embeddings is None:
            return ()
        if not isinstance(embeddings, Mapping):
            expected = "a mapping from positions in the prompt to tensors [n, width]"
            raise ValueError(f"prompt_embeddings: got {type(embeddings).__name__}, expected {expected}")
        if embeddings and not size:
            raise ValueError(f"prompt_embeddings: got {len(embeddings)} spans, expected none: the target has no embedding_size")
        for position, values in embeddings.items():
            name = f"prompt_embeddings[{clip_repr(position)}]"
            if not is_int(position) or position < 0:
                raise ValueError(f"{name}: got this key, expected a position in the prompt >= 0")
            if not isinstance(values, Tensor) or values.dim() != 2 or values.shape[1] != size or not len(values):
                got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(f"{name}: got {got}, expected a tensor [n, {size}]")
            if values.dtype != dtype:
                raise ValueError(f"{name}: got {values.dtype}, expected {dtype}, the target's")
            if position + len(values) >= prompt_tokens:
                expected = f"an end before the last of {prompt_tokens} prompt tokens, which is an input of the first round"
                raise ValueError(f"{name}: got {len(values)} rows, expected {expected}")
            if not bool(torch.isfinite(values).all()):
                raise ValueError(f"{name}: got NaN or infinity, expected finite values")
        spans = sorted(embeddings.items(), key=lambda span: span[0])
        for (position, values), (following, _) in itertools.pairwise(spans):
            if position + len(values) > following:
                limit = following - position
                raise ValueError(f"prompt_embeddings[{position}]: got {len(values)} rows, expected at most {limit}, up to the next span")
        copies = ((position, values.detach().to("cpu", copy=True).contiguous()) for position, values in spans)
        return tuple((position, values.pin_memory() if self._pinned else values) for position, values in copies)


def split_batch(prompt: Any, options: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]] | None:
    """Each prompt of a list with its options; None for a single prompt. A list of prompts is empty, or begins with a text, a list or an
    array; a matrix is one too. ValueError if a list of options has another length."""
    if getattr(prompt, "ndim", 1) != 2:
        if not isinstance(prompt, (list, tuple)):
            return None
        if prompt and not isinstance(prompt[0], (str, list, tuple)) and not getattr(prompt[0], "ndim", 0):
            return None
    lists = {name: options[name] for name in ("constraint", *_OwnOptions.__annotations__) if isinstance(options.get(name), (list, tuple))}
    for name, values in lists.items():
        if len(values) != len(prompt):
            raise ValueError(f"{name}: got a list of {len(values)} for {len(prompt)} prompts, expected one value, or one for each prompt")
    return [(one, {**options, **{name: values[index] for name, values in lists.items()}}) for index, one in enumerate(prompt)]


def check_options(sampling: SamplingParams, config: EngineConfig, limits: Limits) -> None:
    """ValueError for bad words, logits processors and relaxed acceptance that the engine does not allow."""
    if len(sampling.bad_words) > limits.max_bad_words:
        expected = f"expected at most EngineConfig.max_bad_words={limits.max_bad_words}; a text is two, alone and after a blank"
        raise ValueError(f"sampling.bad_words: got {len(sampling.bad_words)} sequences of tokens, {expected}")
    for index, word in enumerate(sampling.bad_words):
        if isinstance(word, str):
            raise ValueError(f"sampling.bad_words[{index}]: got {clip_repr(word)}, expected token ids: the engine has no tokenizer")
        checked_ids(f"sampling.bad_words[{index}]", word, limits.num_tokens)
        if len(word) > limits.max_bad_word_tokens:
            expected = f"expected at most EngineConfig.max_bad_word_tokens={limits.max_bad_word_tokens}"
            raise ValueError(f"sampling.bad_words: got a word of {len(word)} tokens, {expected}")  # the index is not that of a text
    allowed = {processor.name: processor for processor in config.logits_processors}
    for name, arguments in sampling.logits_processors.items():
        if name not in allowed:
            names = ", ".join(map(repr, allowed)) or "none: EngineConfig.logits_processors is empty"
            raise ValueError(f"sampling.logits_processors: got the name {clip_repr(name)}, expected {names}")
        if len(arguments) != allowed[name].num_arguments:
            raise ValueError(f"sampling.logits_processors[{name!r}]: got {len(arguments)} numbers, expected {allowed[name].num_arguments}")
    if sampling.relaxed_top_n and not config.relaxed_acceptance:
        raise ValueError(f"sampling.relaxed_top_n: got {sampling.relaxed_top_n}, expected 0, or EngineConfig(relaxed_acceptance=True)")


def checked_ids(name: str, ids: Any, num_tokens: int, expected: str = "a sequence of token ids") -> tuple[int, ...]:
    """Token ids of a list, a tuple, an array or a one-dimensional tensor. ValueError for the first that is not in the vocabulary."""
    values = ids.tolist() if hasattr(ids, "tolist") and not getattr(ids, "is_meta", False) else ids
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Sequence):
        raise ValueError(f"{name}: got {type(ids).__name__}, expected {expected}")
    if {*map(type, values)} == {int} and 0 <= min(values) <= max(values) < num_tokens:
        return tuple(values)  # of a long prompt, the loop below would keep the GIL from the stepping thread for long
    for index, token in enumerate(values):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < num_tokens:
            raise ValueError(f"{name}[{index}]: got {clip_repr(token)}, expected a token id from 0 to {num_tokens - 1}")
    return tuple(int(token) for token in values)


def checked_count(name: str, value: Any, least: int, most: int, reason: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise ValueError(f"{name}: got {clip_repr(value)}, expected a whole number from {least} to {most} ({reason})")
    return int(value)
