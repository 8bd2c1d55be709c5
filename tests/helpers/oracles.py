"""Independent reference implementations to compare the runtime with. They use no rounds, rows or graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.sampling.grammar import CompiledConstraint, MaskStatus
from stepgraph.sampling.params import GREEDY, SamplingParams

Numbers = npt.NDArray[np.int64]


class Answer(NamedTuple):
    tokens: list[int]
    reason: str


def prefix_logits(target: ToyTarget, history: Sequence[int]) -> list[float]:
    """Logits after a history, in wrapping 64-bit integers, without a cache, pages or runtime tensors."""
    bits = (1 << 42) - 1

    def mix(value: Numbers, salt: Numbers) -> Numbers:
        mixed: Numbers = value * np.int64(0x2545F4914F6CDD1D) + salt * np.int64(0x1B873593CC9E2D51) + np.int64(0x165667B19E3779F9)
        mixed = (mixed ^ (mixed >> 29)) * np.int64(0x3F58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> 32)) & bits
        return mixed

    prefix = mix(np.array(history, np.int64), np.arange(len(history), dtype=np.int64)).sum(keepdims=True) & bits
    raw = (mix(prefix, np.arange(target.vocab_size, dtype=np.int64) + target.seed * 1_000_003) >> 18) & 0xFFFFFF
    return ((raw / (1 << 21)).astype(np.float32) + target.bias.numpy()).tolist()  # type: ignore[no-any-return]


def greedy(
    target: ToyTarget,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    compiled: CompiledConstraint | None = None,
    num_tokens: int | None = None,
    sampling: SamplingParams = GREEDY,
) -> Answer:
    """Plain constrained greedy decoding: one token at a time, the most likely one that the grammar and the request allow.

    `num_tokens` is the size of the vocabulary where the logits are padded: larger ids are padding.
    """
    ids = range(target.vocab_size if num_tokens is None else num_tokens)
    tokens: list[int] = []
    matcher = compiled.matcher() if compiled else None
    masks = torch.zeros(1, -(-target.vocab_size // 32), dtype=torch.int32)
    while len(tokens) < max_new_tokens:
        status = matcher.fill_next_token_bitmask(masks, 0) if matcher else MaskStatus.OK
        if status != MaskStatus.OK:
            return Answer(tokens, {MaskStatus.COMPLETE: "constraint_complete", MaskStatus.DEAD_END: "dead_end"}[status])
        words = masks[0].tolist()
        legal = [words[token // 32] >> (token % 32) & 1 or not matcher for token in ids]
        logits = processed(prefix_logits(target, [*prompt, *tokens])[: len(ids)], sampling, prompt, tokens, stop_ids)
        best = max((token for token in ids if legal[token]), key=lambda token: (logits[token], -token))
        if logits[best] == -math.inf:
            return Answer(tokens, "dead_end")
        tokens.append(best)
        if matcher:
            assert matcher.accept_token(tokens[-1])
        if tokens[-1] in stop_ids:
            return Answer(tokens, "stop")
    return Answer(tokens, "length")


def accepts(compiled: CompiledConstraint, tokens: Sequence[int], *, finished: bool) -> bool:
    """Whether a new matcher accepts every token and, for a finished text, is terminated or allows only stop tokens."""
    matcher = compiled.matcher()
    masks = torch.zeros(1, compiled.vocabulary.mask_words, dtype=torch.int32)
    if not all(matcher.accept_token(token) for token in tokens):
        return False
    return not finished or matcher.fill_next_token_bitmask(masks, 0) in (MaskStatus.TERMINATED, MaskStatus.COMPLETE)


def processed(
    logits: Sequence[float], sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int]
) -> list[float]:
    """Logits after penalties, biases and bans. Rounded to float32 at each step, so that near ties resolve as in the runtime."""
    f32 = np.float32
    result: list[float] = np.array(logits, f32).tolist()
    words = [word for word in sampling.bad_words if not isinstance(word, str)]
    completed = {word[-1] for word in words if [*output, word[-1]][-len(word) :] == [*word]}
    touched = {*completed, *prompt, *output, *sampling.bad_token_ids, *sampling.logit_bias, *stop_ids}
    for token in touched.intersection(range(len(logits))):
        logit = logits[token]
        if token in sampling.bad_token_ids or token in completed or (token in stop_ids and len(output) < sampling.min_new_tokens):
            result[token] = -math.inf
            continue
        value, count = f32(logit) + f32(sampling.logit_bias.get(token, 0.0)), output.count(token)
        if count or token in prompt:
            value = value / f32(sampling.repetition_penalty) if value > 0 else value * f32(sampling.repetition_penalty)
        value = value - f32(sampling.frequency_penalty) * f32(count)
        result[token] = float(value - f32(sampling.presence_penalty) if count else value)
    return result


def filtered(logits: Sequence[float], temperature: float | None, top_k: float, top_p: float, min_p: float) -> list[float]:
    """The distribution after temperature, min-p, top-k and top-p, in float64; equal weights are kept or removed together."""
    order = sorted((token for token in range(len(logits)) if logits[token] > -math.inf), key=lambda token: (-logits[token], token))
    result = [0.0] * len(logits)
    if not order:
        return result
    if not temperature:
        result[order[0]] = 1.0
        return result
    weight = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    kept = [token for token in order if weight[token] >= min_p]
    if 0 < top_k < len(order):
        kept = [token for token in kept if weight[token] >= weight[order[int(top_k) - 1]]]
    if top_p < 1:
        total, running, least = sum(weight[token] for token in kept), 0.0, math.inf
        for token in kept:
            if running >= top_p * total and weight[token] < least:
                break
            running, least = running + weight[token], weight[token]
        kept = [token for token in kept if weight[token] >= least]
    total = sum(weight[token] for token in kept)
    for token in kept:
        result[token] = weight[token] / total
    return result


def look_up_drafts(history: Sequence[int], prompt: int, draft_ids: Sequence[int], count: int, longest: int, shortest: int) -> list[int]:
    """The drafts of n-gram look-up: the continuation of an earlier match of the last tokens, in the draft ids first, then in the history.

    The first `prompt` tokens of the history are the prompt. Positions after the end of the draft ids, or without a match, are -1.
    """
    start = min(prompt, 8)
    text = [*history[prompt - start : prompt], *draft_ids]
    for size in range(longest, shortest - 1, -1):
        ending = list(history[-size:])
        if len(ending) < size:
            continue
        positions = [position for position in range(start, len(text)) if position >= size and text[position - size : position] == ending]
        if positions:
            expected = start + len(history) - prompt
            best = min(positions, key=lambda position: (abs(position - expected), -position))
            return [*text[best : best + count], *[-1] * count][:count]
        positions = [position for position in range(size, len(history)) if list(history[position - size : position]) == ending]
        if positions:
            copy = list(history)
            for _ in range(count):
                copy.append(copy[positions[-1] + len(copy) - len(history)])
            return copy[len(history) :]
    return [-1] * count
