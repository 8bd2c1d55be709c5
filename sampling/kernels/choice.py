"""Choosing a token of each row: the likeliest legal one, or one drawn by exponential race."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling import bitmask, rng, sampler
from stepgraph.sampling.kernels import cpu as native
from stepgraph.sampling.kernels.cpu import calls
from stepgraph.sampling.kernels.operation import contiguous, dense, operation


def masked_argmax(
    logits: Tensor, masks: Tensor, rows: Tensor | None, ruled: Tensor, ids: Tensor | None = None, status: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best legal logit, float32, and its place, both [B, Q]: as bitmask.apply and max, without the masked logits.

    logits [B, Q, V] float32, bfloat16 or float16, of any strides; masks [R, Q, >= ceil(V / 32)] int32, of which row b of the
    logits reads row rows[b] ([B] int64; None: row b); ruled [B] bool: rows that have a mask at all; ids [V] int64: which bit
    each logit stands for, where that is not its own place; status [B, Q] int64 MaskStatus: where a ruled row's is not OK, no
    token is legal, whatever its mask says. The lowest place wins a tie, a NaN wins over everything; without a legal token the
    best is minus infinity and the place 0.
    """
    assert logits.dim() == masks.dim() == 3 and masks.shape[1] == logits.shape[1], f"logits {logits.shape}, masks {masks.shape}"
    assert masks.dtype is torch.int32, f"masks {masks.dtype}"
    assert ids is not None or masks.shape[2] * bitmask.WORD >= logits.shape[2], f"masks {masks.shape}, logits {logits.shape}"
    shape = logits.shape[:2]
    best = torch.empty(shape, dtype=torch.float32, device=logits.device)
    token = torch.empty(shape, dtype=torch.int64, device=logits.device)
    arguments = (dense(logits), dense(masks), contiguous(rows), ruled.contiguous(), contiguous(ids), contiguous(status))
    masked_argmax_operation(*arguments, best, token)
    return best, token


def race(weights: Tensor, seed: Tensor, position: Tensor, purpose: rng.Purpose) -> Tensor:
    """sampler.race with the noise rng.exponential(seed, position, purpose, token), which is never stored.

    weights [N, V] float32; seed, position [N] int64 -> [N] int64.
    """
    assert weights.dim() == 2 and weights.dtype is torch.float32, f"weights {weights.dtype} {weights.shape}"
    token = torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)
    race_operation(dense(weights), seed.contiguous(), position.contiguous(), int(purpose), token)
    return token


def masked_argmax_reference(
    logits: Tensor,
    masks: Tensor,
    rows: Tensor | None,
    ruled: Tensor,
    ids: Tensor | None,
    status: Tensor | None,
    best: Tensor,
    token: Tensor,
) -> None:
    mine = masks if rows is None else masks[rows]
    values, tokens = bitmask.apply(logits, mine, ruled, ids, status).max(-1)
    best.copy_(values)
    token.copy_(tokens)


def race_reference(weights: Tensor, seed: Tensor, position: Tensor, purpose: int, token: Tensor) -> None:
    vocabulary = torch.arange(weights.shape[1], device=weights.device)
    noise = rng.exponential(seed[:, None], position[:, None], rng.Purpose(purpose), vocabulary)
    token.copy_(sampler.race(weights, noise))


masked_argmax_operation = operation(
    "choice",
    "masked_argmax",
    "(Tensor logits, Tensor masks, Tensor? rows, Tensor ruled, Tensor? ids, Tensor? status, Tensor(a!) best, Tensor(b!) token) -> ()",
    masked_argmax_reference,
    native.prepared(calls.masked_argmax),
)
race_operation = operation(
    "choice", "race", "(Tensor weights, Tensor seed, Tensor position, int purpose, Tensor(a!) token) -> ()", race_reference
)
