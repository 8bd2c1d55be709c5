"""Proposers for tests, each a formula over a row's history."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepgraph import Job
from stepgraph.graphs import BufferSpec, Limits, StaticBuffers
from stepgraph.graphs.model import History

Formula = Callable[[History, Tensor], Tensor]  # (history, draft index [K]) -> drafts [B, K]


class Proposes:
    def __init__(self, formula: Formula) -> None:
        self.formula = formula

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return ()

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        return self.formula(history, torch.arange(history.num_drafts, device=history.length.device))


def always(*tokens: int) -> Proposes:
    """Always the same chain, repeated if it is too short."""

    def formula(history: History, index: Tensor) -> Tensor:
        chain = torch.zeros_like(index)
        for place, token in enumerate(tokens):
            chain = torch.where(index % len(tokens) == place, token, chain)
        return chain.expand(len(history.length), -1)

    return Proposes(formula)


def noise(num_tokens: int) -> Proposes:
    """Pseudo-random tokens, sometimes -1 or an id just outside the vocabulary."""

    def formula(history: History, index: Tensor) -> Tensor:
        last = history.tokens.gather(1, history.length[:, None] - 1).to(torch.int64)
        return (last * 31 + history.length[:, None] * 17 + index * 101) % (num_tokens + 6) - 3

    return Proposes(formula)


def parrot() -> Proposes:
    """draft_ids, token for token, regardless of the output."""

    def formula(history: History, index: Tensor) -> Tensor:
        place = history.given_from + history.generated[:, None] + index
        return history.tokens.gather(1, place.clamp(max=history.tokens.shape[1] - 1)).to(torch.int64)

    return Proposes(formula)


def draft_ids_then_noise(job: Job) -> list[int]:
    """A host function: draft_ids, then pseudo-random tokens and invalid ids."""
    place = len(job.tokens)
    return [*job.draft_ids[place:], *[(place * 31 + index * 17 + job.prompt_ids[0]) % 120 - 3 for index in range(3)]]
