"""Per-request sampling settings. What is not honoured is refused by name, never ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepgraph.sampling.fields import clip_repr

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127  # on the device a temperature beyond would be infinite


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_range(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


@dataclass(frozen=True)
class SamplingParams:
    """How a request chooses among the tokens that its grammar allows. Names, laws and defaults are the ecosystem's.

    Applied in vLLM's order: logit_bias, bad_token_ids, min_new_tokens, repetition, frequency and presence penalty,
    temperature, min_p, top_k, top_p; at every place of a round alike, so that drafts are judged by the same distribution.
    """

    temperature: float = 1.0  # 0: greedy, the likeliest token
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest
    top_k: int = 0  # keep the k likeliest; 0: all
    top_p: float = 1.0  # keep the likeliest until they sum to this share
    seed: int | None = None  # the same seed gives the same tokens; None: a fresh one
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0  # of tokens in the prompt or the output: positive logits are divided by it, others multiplied
    presence_penalty: float = 0.0  # taken from the logits of tokens in the output
    frequency_penalty: float = 0.0  # the same, once for every time
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added to a token's logit
    bad_token_ids: tuple[int, ...] = ()  # never chosen
    min_new_tokens: int = 0  # no stop token before; a grammar that allows nothing else still ends the text
    ignore_eos: bool = False  # the vocabulary's stop ids may be chosen and do not stop; those of stop_token_ids do
    logprobs: bool = False  # tell the log-probabilities of every emitted token

    def __post_init__(self) -> None:
        self._check_number("temperature", 0.0, FLOAT32_MAX)
        self._check_number("min_p", 0.0, 1.0)
        self._check_number("top_p", 0.0, 1.0, open_below=True)
        self._check_number("repetition_penalty", 0.01, 100.0)
        self._check_number("presence_penalty", -2.0, 2.0)
        self._check_number("frequency_penalty", -2.0, 2.0)
        for name, most in (("top_k", 2**24), ("seed", 2**63 - 1), ("min_new_tokens", 2**24)):
            value = getattr(self, name)
            if not (name == "seed" and value is None) and not (_is_int(value) and 0 <= value <= most):
                raise ValueError(f"SamplingParams.{name}: got {clip_repr(value)}, want a whole number from 0 to {most}")
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"SamplingParams.{name}: got {clip_repr(getattr(self, name))}, want True or False")
        self._check_ids("stop_token_ids")
        self._check_ids("bad_token_ids")
        self._check_bias()

    def _check_number(self, name: str, low: float, high: float, open_below: bool = False) -> None:
        value = getattr(self, name)
        if not _in_range(value, low, high) or (open_below and value == low):
            raise ValueError(
                f"SamplingParams.{name}: got {clip_repr(value)}, want a number {'above' if open_below else 'from'} {low:g} to {high:g}"
            )

    def _check_ids(self, name: str) -> None:
        ids = getattr(self, name)
        if not isinstance(ids, (tuple, list)):
            raise ValueError(f"SamplingParams.{name}: got {type(ids).__name__}, want a tuple of token ids")
        for place, token in enumerate(ids):
            if not _is_int(token) or token < 0:
                raise ValueError(f"SamplingParams.{name}[{place}]: got {clip_repr(token)}, want a token id >= 0")
        object.__setattr__(self, name, tuple(ids))

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"SamplingParams.logit_bias: got {type(self.logit_bias).__name__}, want a dict of token id to number")
        for token, bias in self.logit_bias.items():
            if not _is_int(token) or token < 0:
                raise ValueError(f"SamplingParams.logit_bias: got the key {clip_repr(token)}, want token ids >= 0")
            if not _in_range(bias, -100.0, 100.0):
                raise ValueError(f"SamplingParams.logit_bias[{clip_repr(token)}]: got {clip_repr(bias)}, want a number from -100 to 100")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def beyond_argmax(self) -> str:
        """The first field that asks for more than the likeliest legal token; empty where none does."""
        if not self.greedy:
            return "temperature"
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_token_ids", "min_new_tokens", "logprobs")
        return next((name for name in names if getattr(self, name) != getattr(GREEDY, name)), "")

    @property
    def plain(self) -> bool:
        """A masked argmax is all that it takes: the greedy graphs serve the request."""
        return not self.beyond_argmax

    @property
    def biases(self) -> dict[int, float]:
        """What is added to each token's logit; a bad token stays bad whatever its bias."""
        return {**self.logit_bias, **dict.fromkeys(self.bad_token_ids, -math.inf)}


GREEDY = SamplingParams(temperature=0)
