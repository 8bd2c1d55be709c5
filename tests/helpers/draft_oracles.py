"""Independent reference implementations of the drafters, after their papers and file formats: float64, dense, no cache, one sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgraph.graphs import Limits, StaticBuffers
from stepgraph.graphs.model import DraftModel
from stepgraph.graphs.model_call import ModelInput

Tensors = Mapping[str, Tensor]
PAGE, LENGTH = 8, 64


def normed(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return states / torch.sqrt((states * states).mean(-1, keepdim=True) + epsilon) * weight.double()


def rotated(heads: Tensor, theta: float) -> Tensor:
    """Rotary positions 0, 1, ... of [N, heads, size]: the pair (i, i + size / 2) as one complex number."""
    count, _, size = heads.shape
    speeds = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(count, dtype=torch.float64)[:, None, None] * speeds
    numbers = torch.complex(heads[..., : size // 2], heads[..., size // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag], -1)


def attended(states: Tensor, tensors: Tensors, prefix: str, fields: Mapping[str, Any]) -> Tensor:
    """Causal self-attention of [N, D], including the output projection."""
    size, theta = fields["head_dim"], fields["rope_theta"]
    query, key, value = (
        (states @ tensors[f"{prefix}.self_attn.{part}_proj.weight"].double().T).view(len(states), -1, size) for part in "qkv"
    )
    if f"{prefix}.self_attn.q_norm.weight" in tensors:
        query = normed(query, tensors[f"{prefix}.self_attn.q_norm.weight"], fields["rms_norm_eps"])
        key = normed(key, tensors[f"{prefix}.self_attn.k_norm.weight"], fields["rms_norm_eps"])
    query, key = rotated(query, theta), rotated(key, theta)
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
    back = torch.arange(len(states))[:, None] - torch.arange(len(states))
    hidden = (back < 0) | (back >= (fields.get("sliding_window") or len(states)))
    result = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)
    return result.flatten(1) @ tensors[f"{prefix}.self_attn.o_proj.weight"].double().T


def mlp(states: Tensor, tensors: Tensors, prefix: str) -> Tensor:
    gate, up, down = (tensors[f"{prefix}.mlp.{part}_proj.weight"].double() for part in ("gate", "up", "down"))
    gated = states @ gate.T
    return (gated * torch.sigmoid(gated) * (states @ up.T)) @ down.T


def eagle3_layer(tensors: Tensors, fields: Mapping[str, Any], states: Tensor, tokens: Sequence[int], embedding: Tensor) -> Tensor:
    """Output of the layer before the last norm. Pair i is state i and the next token."""
    epsilon = fields["rms_norm_eps"]
    smooth = normed(states, tensors["midlayer.hidden_norm.weight"], epsilon)
    words = normed(embedding[list(tokens)].double(), tensors["midlayer.input_layernorm.weight"], epsilon)
    shortcut = smooth if fields["norm_before_residual"] else states
    after = shortcut + attended(torch.cat([words, smooth], -1), tensors, "midlayer", fields)
    return after + mlp(normed(after, tensors["midlayer.post_attention_layernorm.weight"], epsilon), tensors, "midlayer")


def eagle3_logits(
    tensors: Tensors, fields: Mapping[str, Any], features: Tensor, tokens: Sequence[int], drafts: Sequence[int], embedding: Tensor
) -> list[Tensor]:
    """Logits over the head's own tokens at every position of a text, [N, D], then after each of `drafts`, [D].

    features [N, 3 H]: the target's, at the first N of N + 1 tokens. The logits at the last position give the first draft.
    """
    states = features.double() @ tensors["fc.weight"].double().T
    outputs = eagle3_layer(tensors, fields, states, tokens[1:], embedding)

    def logits_of(state: Tensor) -> Tensor:
        return normed(state, tensors["norm.weight"], fields["rms_norm_eps"]) @ tensors["lm_head.weight"].double().T

    result, words = [logits_of(outputs)], list(tokens[1:])
    for draft in drafts:
        states, words = torch.cat([states, outputs[-1:]]), [*words, draft]
        outputs = eagle3_layer(tensors, fields, states, words, embedding)
        result.append(logits_of(outputs[-1]))
    return result


def mtp_module(tensors: Tensors, fields: Mapping[str, Any], layer: int, states: Tensor, words: Tensor) -> Tensor:
    """Output of one module for pairs of a state and an embedded token, after its last norm."""
    prefix, epsilon = f"model.layers.{layer}", fields["rms_norm_eps"]

    def smooth(values: Tensor, name: str) -> Tensor:
        return normed(values, tensors[f"{prefix}.{name}.weight"], epsilon)

    pair = torch.cat([smooth(words, "enorm"), smooth(states, "hnorm")], -1)
    states = pair @ tensors[f"{prefix}.eh_proj.weight"].double().T
    states = states + attended(smooth(states, "input_layernorm"), tensors, prefix, fields)
    states = states + mlp(smooth(states, "post_attention_layernorm"), tensors, prefix)
    return smooth(states, "shared_head.norm")


def mtp_logits(
    tensors: Tensors,
    fields: Mapping[str, Any],
    layers: Sequence[int],
    features: Tensor,
    tokens: Sequence[int],
    drafts: Sequence[int],
    embedding: Tensor,
    head: Tensor,
) -> list[Tensor]:
    """Like `eagle3_logits`, for the modules in these layers of the file. features [N, H]: the target's last, normalised states."""
    states, words = features.double(), embedding.double()
    result = []
    if len(layers) == 1:
        ids = list(tokens[1:])
        for draft in [*drafts, None]:
            outputs = mtp_module(tensors, fields, layers[0], states, words[ids])
            result.append(outputs)
            states, ids = torch.cat([states, outputs[-1:]]), [*ids, draft or 0]
    else:
        ids = [*tokens, *drafts]
        for depth, layer in enumerate(layers[: len(drafts) + 1], 1):
            states = mtp_module(tensors, fields, layer, states, words[ids[depth : depth + len(states)]])
            result.append(states)
    logits = [outputs @ head.double().T for outputs in result]
    return [logits[0], *(each[-1] for each in logits[1:])]


class CachedDraft:
    """A draft model with its own cache for two rows with pages in arbitrary order."""

    def __init__(self, model: DraftModel, feature_size: int, k: int = 8) -> None:
        self.model = model
        pages = LENGTH // PAGE
        width = model.vocab_size if model.d2t is None else int(model.d2t.max()) + 1
        self.buffers = StaticBuffers(model.cache_specs(Limits(2, k, LENGTH, PAGE, 2 * pages, width, width, feature_size)))
        self.tables = 1 + torch.randperm(2 * pages, generator=torch.Generator().manual_seed(0)).view(2, pages)

    @torch.no_grad()
    def run(self, tokens: Tensor, features: Tensor, start: int, step: int = 1) -> tuple[Tensor, Tensor]:
        """Logits and features at positions start .. start + N - 1. tokens [B, N], features [B, N, F] of the positions before."""
        positions = torch.arange(start, start + tokens.shape[1]).expand(len(tokens), -1)
        tables = self.tables[: len(tokens)]
        slots = tables.gather(1, positions // PAGE) * PAGE + positions % PAGE
        output = self.model.forward(ModelInput(tokens, positions, slots, tables, PAGE, features, step), self.buffers)
        return self.model.logits(output.hidden), output.next_features

    def read(self, tokens: Tensor, features: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """A text in chunks of `size`: logits at every position and the features of the last. features [B, N - 1, F]."""
        shifted = torch.cat([torch.zeros_like(features[:, :1]), features], 1)
        outputs = [self.run(tokens[:, at : at + size], shifted[:, at : at + size], at) for at in range(0, tokens.shape[1], size)]
        return torch.cat([logits for logits, _ in outputs], 1), outputs[-1][1][:, -1:]

    def draft(self, start: int, drafts: Tensor, features: Tensor) -> list[Tensor]:
        """Logits [B, D] after each of `drafts` [B, K], the first of which is at position `start`."""
        found = []
        for index in range(drafts.shape[1]):
            logits, features = self.run(drafts[:, index : index + 1], features, start + index, step=index + 2)
            found.append(logits[:, 0])
        return found


def text(width: int) -> tuple[Tensor, Tensor]:
    """Two rows of 41 tokens, and the target's features of all but the last."""
    made = torch.Generator().manual_seed(7)
    return torch.randint(0, 60, (2, 41), generator=made), torch.randn(2, 40, width, generator=made)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours.double() - theirs).abs().max() < 1e-5 * theirs.abs().max())


def check_chunking(drafting: CachedDraft, width: int, drafts: Tensor) -> None:
    """The bits of `text` and of drafts after it do not depend on chunks and on the other row."""
    tokens, features = text(width)
    whole, last = drafting.read(tokens, features, 41)
    reference = drafting.draft(41, drafts, last)
    for size, rows in ((17, 2), (1, 2), (41, 1)):
        drafting.buffers.reset()
        logits, end = drafting.read(tokens[:rows], features[:rows], size)
        assert torch.equal(logits[:, 1:], whole[:rows, 1:])
        assert all(torch.equal(one, two[:rows]) for one, two in zip(drafting.draft(41, drafts[:rows], end), reference, strict=True))
