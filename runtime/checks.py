"""What a submit may ask for: values checked against an engine's sizes and modes, before anything changes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepgraph.graphs.shapes import Limits
from stepgraph.sampling.fields import clip_repr
from stepgraph.sampling.params import GREEDY, SamplingParams


def checked_ids(name: str, ids: Any, num_tokens: int) -> tuple[int, ...]:
    """Token ids from a list, a tuple, an array or a one-dimensional tensor; ValueError names the first bad one."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise ValueError(f"{name}: got {type(ids).__name__}, want a sequence of token ids")
    for place, token in enumerate(values):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < num_tokens:
            raise ValueError(f"{name}[{place}]: got {clip_repr(token)}, want a token id from 0 to {num_tokens - 1}")
    return tuple(int(token) for token in values)


def checked_prompt(prompt_ids: Any, limits: Limits) -> tuple[int, ...]:
    prompt = checked_ids("prompt_ids", prompt_ids, limits.num_tokens)
    if not prompt:
        raise ValueError("prompt_ids: got an empty prompt, want at least one token id")
    if len(prompt) >= limits.max_length:
        raise ValueError(f"prompt_ids: got {len(prompt)} tokens, want fewer than max_length={limits.max_length}")
    return prompt


def checked_embeddings(given: Any, prompt: int, size: int, dtype: torch.dtype) -> tuple[tuple[int, Tensor], ...]:
    """Spans of embeddings by the place in the prompt where each begins, in order, as host tensors of their own.

    size: how wide the target takes them, 0 where it takes none. Their ids are placeholders: a draft, a proposer and penalties
    go by them.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"prompt_embeddings: got {type(given).__name__}, want a mapping from places in prompt_ids to tensors [n, width]")
    if given and not size:
        raise ValueError(f"prompt_embeddings: got {len(given)} spans, want none: the target takes ids only, it has no embedding_size")
    for place, values in given.items():
        name = f"prompt_embeddings[{clip_repr(place)}]"
        if isinstance(place, bool) or not isinstance(place, int) or place < 0:
            raise ValueError(f"{name}: want a place in prompt_ids as the key, from 0 on")
        if not isinstance(values, Tensor) or values.dim() != 2 or values.shape[1] != size or not len(values):
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"{name}: got {got}, want a tensor [n, {size}]")
        if values.dtype != dtype:
            raise ValueError(f"{name}: got {values.dtype}, want {dtype}, as the target computes")
        if place + len(values) >= prompt:
            wanted = f"an end in front of the last of {prompt} prompt tokens, which the first round takes by its id"
            raise ValueError(f"{name}: got {len(values)} rows, want {wanted}")
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name}: holds NaN or infinity")
    spans = sorted(given.items(), key=lambda span: span[0])
    for (place, values), (following, _) in itertools.pairwise(spans):
        if place + len(values) > following:
            raise ValueError(f"prompt_embeddings[{place}]: got {len(values)} rows, want at most {following - place}, up to the next span")
    return tuple((place, values.detach().to("cpu", copy=True).contiguous()) for place, values in spans)


def checked_count(name: str, value: Any, least: int, most: int, why: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise ValueError(f"{name}: got {clip_repr(value)}, want a whole number from {least} to {most} ({why})")
    return int(value)


def checked_sampling(asked: Any, limits: Limits, *, greedy_only: bool, constrained: bool, max_new_tokens: int) -> SamplingParams:
    """The request's settings, GREEDY for None; ValueError names a field that the engine or the rest of the request rules out."""
    if asked is None:
        return GREEDY
    if not isinstance(asked, SamplingParams):
        raise ValueError(f"sampling: got {type(asked).__name__}, want SamplingParams")
    sampling = replace(asked)  # the request's own, checked once more: somebody may write to the dict of biases, now or later
    name = sampling.beyond_argmax
    if greedy_only and name:
        raise ValueError(
            f"sampling.{name}: got {clip_repr(getattr(sampling, name))}, want {clip_repr(getattr(GREEDY, name))}: the engine is greedy_only"
        )
    checked_ids("sampling.bad_token_ids", sampling.bad_token_ids, limits.num_tokens)
    for token in sampling.logit_bias:
        if token >= limits.num_tokens:
            raise ValueError(f"sampling.logit_bias: got the key {token}, want token ids from 0 to {limits.num_tokens - 1}")
    if len(sampling.biases) > limits.max_bias_ids:
        names = (
            "logit_bias" if not sampling.bad_token_ids else "bad_token_ids" if not sampling.logit_bias else "logit_bias and bad_token_ids"
        )
        raise ValueError(f"sampling.{names}: got {len(sampling.biases)} tokens, want at most max_bias_ids={limits.max_bias_ids}")
    if sampling.min_new_tokens > max_new_tokens:
        raise ValueError(f"sampling.min_new_tokens: got {sampling.min_new_tokens}, want at most max_new_tokens={max_new_tokens}")
    if sampling.ignore_eos and constrained:
        raise ValueError("sampling.ignore_eos: got True with a constraint, want False: a complete text ends")
    return sampling
