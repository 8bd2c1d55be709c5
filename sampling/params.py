"""Per-request sampling settings. A field that cannot be honoured is refused with an error that names it, never ignored."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepgraph.sampling.fields import (
    BOOL,
    Check,
    FrozenDict,
    check_fields,
    check_value,
    checked_fields,
    clip_repr,
    is_int,
    number,
    optional,
    whole,
)

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127  # a larger temperature would be infinite on the device
_TOKEN_ID = Check(lambda token: is_int(token) and token >= 0, "a token id >= 0")
_BIAS = number(-100, 100)
MAX_STOP_CHARS = 1000
MAX_TOP_LOGPROBS = 100
STOP_TEXT = Check(
    lambda text: isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS and not re.search("[\ud800-\udfff]", text),
    f"a text of 1 to {MAX_STOP_CHARS} characters",
)
_BAD_WORD = Check(
    lambda word: STOP_TEXT.accepts(word) or (isinstance(word, (tuple, list)) and bool(word)),
    f"{STOP_TEXT.expected}, or a sequence of at least one token id",
)
FIELDS_BEYOND_ARGMAX = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_token_ids", "bad_words", "min_new_tokens"),
    *("logits_processors", "relaxed_top_n", "logprobs"),
)
CHECKS = {
    "temperature": optional(number(0.0, FLOAT32_MAX)),
    "min_p": number(0.0, 1.0),
    "top_p": number(0.0, 1.0, low_open=True),
    "repetition_penalty": number(0.01, 100.0),
    "presence_penalty": number(-2.0, 2.0),
    "frequency_penalty": number(-2.0, 2.0),
    "top_k": whole(-1, 2**24),
    "seed": optional(whole(-(2**63), 2**63 - 1)),
    "min_new_tokens": whole(0, 2**24),
    "logprobs": BOOL._replace(expected="True or False; top_logprobs is the number of most probable tokens"),
    "top_logprobs": whole(0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": optional(whole(0, MAX_TOP_LOGPROBS)),
    "relaxed_top_n": whole(0, 2**24),
    "relaxed_delta": number(0.0, 1.0),
}
_USE_MAX_NEW_TOKENS = "Engine.submit(max_new_tokens=)"
_USE_CONSTRAINT = "Engine.submit(constraint=)"
NAMES_ELSEWHERE = {
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length", "n_predict"), _USE_MAX_NEW_TOKENS),
    **dict.fromkeys(("structured_outputs", "guided_decoding", "grammar", "response_format", "allowed_token_ids", "regex"), _USE_CONSTRAINT),
    **dict.fromkeys(("n", "best_of"), "as many equal prompts, and sampling=[SamplingParams(seed=), ...] in Engine.generate"),
    **dict.fromkeys(("min_tokens", "min_length"), "min_new_tokens"),
    **dict.fromkeys(("json_schema", "ebnf", "structural_tag"), _USE_CONSTRAINT),
    "repeat_penalty": "repetition_penalty",
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words"), "stop"),
    **dict.fromkeys(("bad", "bad_words_ids"), "bad_words"),
    **dict.fromkeys(("eos_token_id", "end_id"), "stop_token_ids"),
    **dict.fromkeys(("output_scores", "return_log_probs", "return_logprob"), "logprobs"),
    **dict.fromkeys(("use_beam_search", "beam_width", "num_beams"), "nothing: there is no beam search"),
    "logprob_start_len": "prompt_logprobs",
    "include_stop_str_in_output": "nothing: Job.text ends before a stop text, and Job.tokens after it",
    "skip_special_tokens": "nothing: control tokens have no text",
    "return_perf_metrics": "nothing: Job has queue_seconds, first_token_seconds and seconds",
    "random_seed": "seed",
    "embedding_bias": "logit_bias",
    "do_sample": "temperature: 0 is greedy",
    "logits_processor": "logits_processors, the names of EngineConfig.logits_processors",
}  # in vLLM, SGLang, TensorRT-LLM, llama-cpp-python and transformers


@checked_fields(NAMES_ELSEWHERE)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request chooses among the tokens that its grammar allows. Names, semantics and defaults are those of vLLM, except that
    the default is greedy unless a field requires sampling.

    Applied in vLLM's order: logit_bias, bad_token_ids, min_new_tokens, repetition, frequency and presence penalty, temperature, min_p,
    top_k, top_p; in the same way at every position of a round, so that drafts are verified against the same distribution.
    """

    # 0: greedy, the most probable token; by default 1 with min_p, top_k, top_p or seed, otherwise 0. Then dataclasses.replace keeps it.
    temperature: float | None = None
    min_p: float = 0.0  # drop tokens less likely than this fraction of the most probable
    top_k: int = 0  # keep the k most probable; 0: all; -1, vLLM's number for all, is stored as 0
    top_p: float = 1.0  # keep the most probable until their probabilities sum to this
    # The same seed gives the same tokens, with any drafts. None: a new, negative seed per request; -1, the number for that in vLLM and
    # llama.cpp, is stored as None. With a negative seed, more drafts of a draft model are accepted, and the tokens depend on them.
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()  # one or several texts that end the output and are not part of it
    repetition_penalty: float = 1.0  # for tokens in the prompt or the output: divides positive logits, multiplies others
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # subtracted once per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added to a token's logit
    bad_token_ids: Sequence[int] = ()  # never chosen
    # Sequences that never occur in the output: token ids, or texts, which are tokenized both alone and after a space. Requires
    # EngineConfig.max_bad_words
    bad_words: Sequence[str | Sequence[int]] = ()
    # No stop token before this many tokens, unless only stop tokens of the vocabulary are legal; texts in `stop` end the output earlier
    min_new_tokens: int = 0
    ignore_eos: bool = False  # the vocabulary's stop ids may be chosen and do not end the output; stop_token_ids still do
    logprobs: bool = False  # report the log-probabilities of every emitted token
    # The engine's logits processors that the request uses, and their arguments: {name: numbers}
    logits_processors: Mapping[str, Sequence[float]] = field(default_factory=dict, hash=False)
    # For a greedy request, with EngineConfig.relaxed_acceptance: also accept a draft that is among this many most probable legal tokens
    # and at most `relaxed_delta` less probable than the most probable one. The output then depends on the drafts. 0: exact
    relaxed_top_n: int = 0
    relaxed_delta: float = 0.0
    top_logprobs: int = 0  # with logprobs: also report this many most probable tokens per position, up to EngineConfig.max_top_logprobs
    # Report the log-probability of every prompt token after the first, and of this many most probable tokens at its position, up to the
    # same limit. The whole prompt is then computed: no cached prefix is reused. None: report none
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, CHECKS)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)
        if self.temperature is None:
            samples = (self.min_p, self.top_k, self.top_p, self.seed) != (0.0, 0, 1.0, None)
            object.__setattr__(self, "temperature", 1.0 if samples else 0.0)
        self._check_items("stop", (self.stop,) if isinstance(self.stop, str) else self.stop, "a text or a tuple of texts", STOP_TEXT)
        for name in ("stop_token_ids", "bad_token_ids"):
            self._check_items(name, getattr(self, name), "a tuple of token ids", _TOKEN_ID)
        self._check_bias()
        self._check_bad_words()
        self._check_processors()
        if self.relaxed_top_n and self.temperature:
            got = f"got {self.relaxed_top_n} with temperature={self.temperature:g}"
            raise ValueError(f"SamplingParams.relaxed_top_n: {got}, expected 0, or temperature=0")
        if self.relaxed_delta and not self.relaxed_top_n:
            raise ValueError(
                f"SamplingParams.relaxed_delta: got {self.relaxed_delta:g} with relaxed_top_n=0, expected 0, or relaxed_top_n >= 1"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"SamplingParams.top_logprobs: got {self.top_logprobs} with logprobs=False, expected logprobs=True, or 0")

    def _check_items(self, name: str, values: object, expected: str, check: Check) -> None:
        """Check each item, and store the field as a tuple."""
        if not isinstance(values, (tuple, list)):
            raise ValueError(f"SamplingParams.{name}: got {type(values).__name__}, expected {expected}")
        for index, value in enumerate(values):
            check_value(f"SamplingParams.{name}[{index}]", value, check)
        object.__setattr__(self, name, tuple(values))

    def _check_bad_words(self) -> None:
        self._check_items("bad_words", self.bad_words, "a tuple of texts or sequences of token ids", _BAD_WORD)
        for index, word in enumerate(self.bad_words):
            for position, token in enumerate(() if isinstance(word, str) else word):
                check_value(f"SamplingParams.bad_words[{index}][{position}]", token, _TOKEN_ID)
        words = tuple(word if isinstance(word, str) else tuple(word) for word in self.bad_words)
        object.__setattr__(self, "bad_words", words)

    def _check_processors(self) -> None:
        if not isinstance(self.logits_processors, Mapping):
            got = type(self.logits_processors).__name__
            raise ValueError(f"SamplingParams.logits_processors: got {got}, expected a dict of names to sequences of numbers")
        for name, arguments in self.logits_processors.items():
            field_name = f"SamplingParams.logits_processors[{clip_repr(name)}]"
            if not isinstance(name, str) or not isinstance(arguments, (tuple, list)):
                raise ValueError(f"{field_name}: got {clip_repr(arguments)}, expected a sequence of numbers, and the name of a processor")
            for index, argument in enumerate(arguments):
                check_value(f"{field_name}[{index}]", argument, number(-FLOAT32_MAX, FLOAT32_MAX))
        arguments_by_name = {name: tuple(arguments) for name, arguments in self.logits_processors.items()}
        object.__setattr__(self, "logits_processors", FrozenDict(arguments_by_name))

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"SamplingParams.logit_bias: got {type(self.logit_bias).__name__}, expected a dict of token id to number")
        for token, bias in self.logit_bias.items():
            if not _TOKEN_ID.accepts(token):
                raise ValueError(f"SamplingParams.logit_bias: got the key {clip_repr(token)}, expected token ids >= 0")
            check_value(f"SamplingParams.logit_bias[{clip_repr(token)}]", bias, _BIAS)
        object.__setattr__(self, "logit_bias", FrozenDict(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def beyond_argmax(self) -> str:
        """The first field that requires more than a masked argmax; empty if there is none."""
        if not self.greedy:
            return "temperature"
        return next((name for name in FIELDS_BEYOND_ARGMAX if getattr(self, name) != getattr(GREEDY, name)), "")

    @property
    def plain(self) -> bool:
        """Whether a masked argmax is enough: the greedy graphs serve the request."""
        return not self.beyond_argmax

    @property
    def biases(self) -> dict[int, float]:
        """The number added to each token's logit; minus infinity for a bad token, whatever its logit_bias."""
        return {**self.logit_bias, **dict.fromkeys(self.bad_token_ids, -math.inf)}


GREEDY = SamplingParams(temperature=0)
