"""Kernels that a round calls on any device: one custom operation each, plain torch on the CPU, Triton on a GPU.

These functions make the outputs, bring the inputs into the layout that the programs read, and check shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling.acceptance import Emission
from stepgraph.sampling.bitmask import WORD
from stepgraph.sampling.kernels import ops
from stepgraph.sampling.kernels.ops import implementation
from stepgraph.sampling.rng import Purpose

__all__ = ["chain_accept", "implementation", "masked_argmax", "race"]


def masked_argmax(logits: Tensor, masks: Tensor, rows: Tensor | None, ruled: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best legal logit, float32, and its place, both [B, Q]: as bitmask.apply and max, without the masked logits.

    logits [B, Q, V] float32, bfloat16 or float16, of any strides; masks [R, Q, >= ceil(V / 32)] int32, of which row b of the
    logits reads row rows[b] ([B] int64; None: row b); ruled [B] bool: rows that have a mask at all; ids [V] int64: which bit
    each logit stands for, where that is not its own place. The lowest place wins a tie, a NaN wins over everything; without
    a legal token the best is minus infinity and the place 0.
    """
    assert logits.dim() == masks.dim() == 3 and masks.shape[1] == logits.shape[1], f"logits {logits.shape}, masks {masks.shape}"
    assert masks.dtype is torch.int32, f"masks {masks.dtype}"
    assert ids is not None or masks.shape[2] * WORD >= logits.shape[2], f"masks {masks.shape}, logits {logits.shape}"
    shape = logits.shape[:2]
    best = torch.empty(shape, dtype=torch.float32, device=logits.device)
    token = torch.empty(shape, dtype=torch.int64, device=logits.device)
    ops.masked_argmax(_dense(logits), _dense(masks), _contiguous(rows), ruled.contiguous(), _contiguous(ids), best, token)
    return best, token


def race(weights: Tensor, seed: Tensor, position: Tensor, purpose: Purpose) -> Tensor:
    """sampler.race with the noise rng.exponential(seed, position, purpose, token), which is never stored.

    weights [N, V] float32; seed, position [N] int64 -> [N] int64.
    """
    assert weights.dim() == 2 and weights.dtype is torch.float32, f"weights {weights.dtype} {weights.shape}"
    token = torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)
    ops.race(_dense(weights), seed.contiguous(), position.contiguous(), int(purpose), token)
    return token


def chain_accept(
    sampled: Tensor,
    finite: Tensor,
    drafts: Tensor,
    draft_count: Tensor,
    status: Tensor,
    stop_ids: Tensor,
    room: Tensor,
    known: Tensor | None = None,
) -> Emission:
    """acceptance.count_accepted and acceptance.emit in one. `known` [B]: how many drafts hold, where that is decided already."""
    inputs = [tensor.contiguous() for tensor in (sampled, finite, drafts, draft_count, status, stop_ids, room)]
    emitted, accepted, finish = (torch.empty_like(inputs[3]) for _ in range(3))
    ops.chain_accept(*inputs, _contiguous(known), emitted, accepted, finish)
    return Emission(sampled, emitted, accepted, finish)


def _dense(tensor: Tensor) -> Tensor:
    """Neighbours of the last dimension side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
