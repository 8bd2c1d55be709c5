"""Accepting a chain of drafts, and what the round then says of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling import acceptance
from stepgraph.sampling.acceptance import Emission
from stepgraph.sampling.kernels import cpu as native
from stepgraph.sampling.kernels.cpu import calls
from stepgraph.sampling.kernels.operation import contiguous, operation


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
    chain_accept_operation(*inputs, contiguous(known), emitted, accepted, finish)
    return Emission(sampled, emitted, accepted, finish)


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


chain_accept_operation = operation(
    "chain",
    "chain_accept",
    "(Tensor sampled, Tensor finite, Tensor drafts, Tensor draft_count, Tensor status, Tensor stop_ids, Tensor room, "
    "Tensor? known, Tensor(a!) emitted, Tensor(b!) accepted, Tensor(c!) finish) -> ()",
    chain_accept_reference,
    native.prepared(calls.chain_accept),
)
