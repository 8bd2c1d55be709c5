"""Unrolls a head over its own states for several steps, for whole texts at once, with autograd.

Computes drafting at every position of a text at once. Pair i of a text is the target's state at position i and the token after it.
At step 1 a pair attends to the pairs up to its own. At step s the chain of pair i reads the token at i + s and its own last state,
has position i + s - 1, and attends to the pairs up to i and then to its own steps. It does not see entries of other chains or true
states after pair i, as in drafting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stepgraph.graphs.layers.dense import product, rms_norm
from stepgraph.graphs.layers.slot_mapping import rope_angles, rotate
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.llama import LlamaLayer
from stepgraph.runtime.models.mtp import Mtp, MtpModule


class AttentionInput(NamedTuple):
    layer_input: Tensor  # [P, in], input of attention
    residual: Tensor  # [P, H], residual


class TrainableHead(Protocol):
    """Differences between the kinds of heads: the input of the layer and the use of its output."""

    layer: LlamaLayer
    frequencies: Tensor

    def initial_states(self, features: Tensor) -> Tensor:
        """[P, F] target features -> [P, H] states of the head."""

    def attention_input(self, states: Tensor, embedded: Tensor) -> AttentionInput: ...

    def finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The state for the next step, and the input of the output head. attended [P, H]: the output of attention."""


class TrainableEagle3:
    def __init__(self, head: Eagle3) -> None:
        self.head, self.layer = head, head.layer
        self.frequencies = head.frequency_bits.view(torch.float32)

    def initial_states(self, features: Tensor) -> Tensor:
        return product(features, self.head.fuse)

    def attention_input(self, states: Tensor, embedded: Tensor) -> AttentionInput:
        epsilon = self.layer.config.norm_epsilon
        normed = rms_norm(states, self.head.state_norm, epsilon)
        layer_input = torch.cat([rms_norm(embedded, self.layer.attention_norm, epsilon), normed], -1)
        return AttentionInput(layer_input, normed if self.head.config.norm_before_residual else states)

    def finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.finish(residual, attended, self.head.norm)


class TrainableMtp:
    """One module, applied repeatedly."""

    def __init__(self, head: Mtp) -> None:
        (module,) = head.depths
        assert isinstance(module, MtpModule)
        self.module, self.layer = module, module.layer
        self.frequencies = head.frequency_bits.view(torch.float32)

    def initial_states(self, features: Tensor) -> Tensor:
        return features

    def attention_input(self, states: Tensor, embedded: Tensor) -> AttentionInput:
        module, epsilon = self.module, self.module.epsilon
        pair = [rms_norm(embedded, module.token_norm, epsilon), rms_norm(states, module.state_norm, epsilon)]
        joined = product(torch.cat(pair, -1), module.join)
        return AttentionInput(rms_norm(joined, self.layer.attention_norm, epsilon), joined)

    def finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer.finish(residual, attended, self.module.norm).normed
        return hidden, hidden


def unroll(
    head: TrainableHead, features: Tensor, embedded: Sequence[Tensor], lengths: Sequence[int], chain_starts: Sequence[int] | None = None
) -> Iterator[Tensor]:
    """Inputs of the output head per step, [C, H] each, for the C chains that start at pair `chain_starts` of a text or later.

    features [P, F]: the pairs of all texts, concatenated, `lengths` pairs each; pairs without a chain are only attended to.
    embedded: input tokens of each step, [P, H] at step 1, [C, H] later; arbitrary after the end of a text, where only that chain
    sees it. begins: None is the first pair of every text.
    """
    layer, config = head.layer, head.layer.config
    sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    starts = [0] * len(lengths) if chain_starts is None else list(chain_starts)
    counts = [length - first for length, first in zip(lengths, starts, strict=True)]
    positions = torch.cat([torch.arange(length, device=features.device) for length in lengths])
    has_chain = torch.cat([torch.arange(length, device=features.device) >= first for length, first in zip(lengths, starts, strict=True)])
    chain: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []  # per step, the cache entries of each text
    states = head.initial_states(features)
    for step, tokens in enumerate(embedded):
        layer_input, residual = head.attention_input(states, tokens)
        qkv = product(layer_input, layer.qkv, layer.qkv_bias).view(len(layer_input), -1, config.head_size)
        query, key, value = qkv.split(sizes, 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rms_norm(query, layer.query_norm, config.norm_epsilon), rms_norm(key, layer.key_norm, config.norm_epsilon)
        angles = rope_angles(positions + step, head.frequencies, qkv.dtype)
        entries = list(lengths) if step == 0 else counts
        chain.append((rotate(key, *angles).split(entries), value.split(entries)))
        query = rotate(query, *angles)
        if step == 0:
            query, residual, positions = query[has_chain], residual[has_chain], positions[has_chain]
        queries = query.split(counts)
        attended = [
            attend(queries[text], [keys[text] for keys, _ in chain], [values[text] for _, values in chain], layer.window)
            for text in range(len(lengths))
        ]
        joined = torch.cat(attended).flatten(1)
        states, hidden = head.finish(residual, product(joined, layer.output, layer.output_bias))
        yield hidden


def attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], window: int | None) -> Tensor:
    """Attention of one text at its last step, C pairs. query [C, heads, size]; keys, values: [P, kv_heads, size], [C, ...] per step."""
    count, heads, size = query.shape
    pairs, kv_heads = keys[0].shape[:2]
    grouped = query.view(count, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3) * size**-0.5
    seen = torch.arange(pairs, device=query.device)
    last_pair = seen[pairs - count :, None]
    visible = last_pair >= seen
    if window:
        visible = visible & (last_pair + len(keys) - 1 - seen < window)
    shared_scores = (grouped.flatten(1, 2) @ keys[0].permute(1, 2, 0)).unflatten(1, (heads // kv_heads, count))
    chain_scores = [(grouped * key.transpose(0, 1)[:, None]).sum(-1, keepdim=True) for key in keys[1:]]
    if window:  # a chain longer than the window does not see its own start
        chain_scores = [each if len(chain_scores) - index < window else each - torch.inf for index, each in enumerate(chain_scores, 1)]
    scores = torch.cat([shared_scores.float().masked_fill(~visible, -torch.inf), *(each.float() for each in chain_scores)], -1)
    weights: Tensor = scores.softmax(-1).to(values[0].dtype)
    output: Tensor = (weights[..., :pairs].flatten(1, 2) @ values[0].transpose(0, 1)).unflatten(1, (heads // kv_heads, count))
    for index, value in enumerate(values[1:]):
        output = output + weights[..., pairs + index, None] * value.transpose(0, 1)[:, None]
    result: Tensor = output.permute(2, 0, 1, 3).reshape(count, heads, size)
    return result
