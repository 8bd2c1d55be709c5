"""One torch.library.custom_op per kernel: plain torch on the CPU, Triton on a GPU, the same results.

The operations write tensors that the caller gives them, so that a tape repeats them in place. Where Triton is missing, a GPU
runs the plain torch version too: `implementation` says which.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from stepgraph.sampling import acceptance, bitmask, rng, sampler


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def implementation(device: torch.device | str) -> str:
    """What the kernels run as on `device`, for people to read."""
    if torch.device(device).type != "cuda":
        return "torch reference (kernels are for CUDA devices)"
    return "triton" if has_triton() else "torch reference (triton is not installed)"


def masked_argmax_reference(
    logits: Tensor, masks: Tensor, rows: Tensor | None, ruled: Tensor, ids: Tensor | None, best: Tensor, token: Tensor
) -> None:
    mine = masks if rows is None else masks[rows]
    values, tokens = bitmask.apply(logits, mine, ruled, ids).max(-1)
    best.copy_(values)
    token.copy_(tokens)


def race_reference(weights: Tensor, seed: Tensor, position: Tensor, purpose: int, token: Tensor) -> None:
    vocabulary = torch.arange(weights.shape[1], device=weights.device)
    noise = rng.exponential(seed[:, None], position[:, None], rng.Purpose(purpose), vocabulary)
    token.copy_(sampler.race(weights, noise))


def chain_accept_reference(
    sampled: Tensor,
    finite: Tensor,
    drafts: Tensor,
    draft_count: Tensor,
    status: Tensor,
    stop_ids: Tensor,
    room: Tensor,
    known: Tensor | None,
    emitted: Tensor,
    accepted: Tensor,
    finish: Tensor,
) -> None:
    held = acceptance.count_accepted(sampled, finite, drafts, draft_count, status) if known is None else known
    emission = acceptance.emit(sampled, finite, held, status, stop_ids, room)
    emitted.copy_(emission.emitted)
    accepted.copy_(emission.accepted)
    finish.copy_(emission.finish)


masked_argmax = torch.library.custom_op(
    "stepgraph::masked_argmax",
    masked_argmax_reference,
    mutates_args=("best", "token"),
    device_types="cpu",
    schema="(Tensor logits, Tensor masks, Tensor? rows, Tensor ruled, Tensor? ids, Tensor(a!) best, Tensor(b!) token) -> ()",
)
race = torch.library.custom_op(
    "stepgraph::race",
    race_reference,
    mutates_args=("token",),
    device_types="cpu",
    schema="(Tensor weights, Tensor seed, Tensor position, int purpose, Tensor(a!) token) -> ()",
)
chain_accept = torch.library.custom_op(
    "stepgraph::chain_accept",
    chain_accept_reference,
    mutates_args=("emitted", "accepted", "finish"),
    device_types="cpu",
    schema="(Tensor sampled, Tensor finite, Tensor drafts, Tensor draft_count, Tensor status, Tensor stop_ids, Tensor room, "
    "Tensor? known, Tensor(a!) emitted, Tensor(b!) accepted, Tensor(c!) finish) -> ()",
)


@masked_argmax.register_kernel("cuda")
def _(logits: Tensor, masks: Tensor, rows: Tensor | None, ruled: Tensor, ids: Tensor | None, best: Tensor, token: Tensor) -> None:
    if not has_triton():
        return masked_argmax_reference(logits, masks, rows, ruled, ids, best, token)
    from stepgraph.sampling.kernels import choice

    with torch.cuda.device(logits.device):
        choice.masked_argmax(logits, masks, rows, ruled, ids, best, token)


@race.register_kernel("cuda")
def _(weights: Tensor, seed: Tensor, position: Tensor, purpose: int, token: Tensor) -> None:
    if not has_triton():
        return race_reference(weights, seed, position, purpose, token)
    from stepgraph.sampling.kernels import choice

    with torch.cuda.device(weights.device):
        choice.race(weights, seed, position, purpose, token)


@chain_accept.register_kernel("cuda")
def _(sampled: Tensor, *arguments: Tensor) -> None:
    if not has_triton():
        return chain_accept_reference(sampled, *arguments)
    from stepgraph.sampling.kernels import chain

    with torch.cuda.device(sampled.device):
        chain.chain_accept(sampled, *arguments)


for _operation in (masked_argmax, race, chain_accept):
    _operation.register_fake(lambda *_: None)  # they return nothing, and shapes are the caller's
