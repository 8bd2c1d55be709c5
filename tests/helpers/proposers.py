"""Proposers for tests: each computes its drafts from the history of a row by a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepgraph import Job
from stepgraph.graphs import BufferSpec, Limits, StaticBuffers
from stepgraph.graphs.model import History

Formula = Callable[[History, Tensor], Tensor]  # (history, draft indices [K]) -> drafts [B, K]


class FormulaProposer:
    def __init__(self, formula: Formula) -> None:
        self.formula = formula

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return ()

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        return self.formula(history, torch.arange(history.num_drafts, device=history.length.device))


def always(*tokens: int) -> FormulaProposer:
    """Always the same chain, repeated where it is too short."""

    def formula(history: History, index: Tensor) -> Tensor:
        chain = torch.zeros_like(index)
        for position, token in enumerate(tokens):
            chain = torch.where(index % len(tokens) == position, token, chain)
        return chain.expand(len(history.length), -1)

    return FormulaProposer(formula)


def noise(num_tokens: int) -> FormulaProposer:
    """Pseudo-random tokens, sometimes none or an id just outside the vocabulary."""

    def formula(history: History, index: Tensor) -> Tensor:
        last = history.tokens.gather(1, history.length[:, None] - 1).to(torch.int64)
        return (last * 31 + history.length[:, None] * 17 + index * 101) % (num_tokens + 6) - 3

    return FormulaProposer(formula)


def parrot() -> FormulaProposer:
    """The caller's draft ids in order, whatever was generated."""

    def formula(history: History, index: Tensor) -> Tensor:
        position = history.given_from + history.generated[:, None] + index
        return history.tokens.gather(1, position.clamp(max=history.tokens.shape[1] - 1)).to(torch.int64)

    return FormulaProposer(formula)


def draft_ids_then_noise(job: Job) -> list[int]:
    """A host drafter: the caller's draft ids, then pseudo-random ids, some of them invalid."""
    position = len(job.tokens)
    return [*job.draft_ids[position:], *[(position * 31 + index * 17 + job.prompt_ids[0]) % 120 - 3 for index in range(3)]]
