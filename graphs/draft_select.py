"""Which token a row drafts: what a grammar forces, or what was looked up and is legal, or what the draft model chose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.layers import cpu as cpu_kernels
from stepgraph.graphs.layers.cpu import calls
from stepgraph.sampling.bitmask import WORD
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import GrammarMask, operation


class Settled(NamedTuple):
    tokens: Tensor  # [B] int64, -1 where a row drafts no more
    looked_up: Tensor | None  # [B] bool: whether it is what was looked up; None: nothing was
    forced: Tensor | None  # [B] bool: whether the grammar leaves no other; None: nobody asked


def settle_draft(
    tokens: Tensor,
    finite: Tensor,
    alive: Tensor,
    limit: Tensor,
    step: int,
    found: Tensor | None = None,
    wanted: Tensor | None = None,
    ruling: GrammarMask | None = None,
) -> Settled:
    """tokens [B] int64 and finite [B] bool: the model's choice, and whether it is one; alive [B] bool; limit [B]: drafts at most.

    found [B]: what was looked up, -1 where nothing was; wanted [B]: what a grammar forces, -1 where there is a choice. Under a
    ruling both hold only with a mask that is the row's own, and what was looked up only where it is legal; rows that are not ruled
    are forced to nothing.
    """
    if not cpu_kernels.on_cpu(tokens):
        return settled(tokens, finite, alive, limit, step, found, wanted, ruling)
    masks, ruled, status = (None, None, None) if ruling is None else (ruling.masks[:, 0], ruling.ruled, ruling.status[:, 0])
    output, looked_up, forced = torch.empty_like(tokens), torch.empty_like(alive), torch.empty_like(alive)
    dense = None if wanted is None else wanted.contiguous()
    settle_draft_operation(
        tokens.contiguous(), finite.contiguous(), alive, limit, step, found, dense, masks, ruled, status, output, looked_up, forced
    )
    return Settled(output, None if found is None else looked_up, None if wanted is None else forced)


def legal(tokens: Tensor, masks: Tensor, ruled: Tensor, status: Tensor) -> Tensor:
    """[B] bool: whether each row's token is allowed, under a mask [B, words] that is the row's own. Of -1 it says nothing."""
    known = tokens.clamp(min=0)
    words = masks.gather(1, known[:, None] // WORD).squeeze(1)
    return ((words >> (known % WORD)) & 1 != 0) & (status == MaskStatus.OK) | ~ruled


def settled(
    tokens: Tensor,
    finite: Tensor,
    alive: Tensor,
    limit: Tensor,
    step: int,
    found: Tensor | None,
    wanted: Tensor | None,
    ruling: GrammarMask | None,
) -> Settled:
    looked_up = forced = None
    rule = None if ruling is None else (ruling.masks[:, 0], ruling.ruled, ruling.status[:, 0])
    if found is not None:
        looked_up = found >= 0 if rule is None else (found >= 0) & legal(found, *rule)
        tokens, finite = torch.where(looked_up, found, tokens), finite | looked_up
    if wanted is not None:
        assert rule is not None, "nothing is forced without a grammar"
        forced = (wanted >= 0) & rule[1] & (rule[2] == MaskStatus.OK)
        tokens, finite = torch.where(forced, wanted, tokens), finite | forced
    return Settled(torch.where(alive & finite & (limit >= step), tokens, -1), looked_up, forced)


def settle_draft_reference(
    tokens: Tensor,
    finite: Tensor,
    alive: Tensor,
    limit: Tensor,
    step: int,
    found: Tensor | None,
    wanted: Tensor | None,
    masks: Tensor | None,
    ruled: Tensor | None,
    status: Tensor | None,
    output: Tensor,
    looked_up: Tensor,
    forced: Tensor,
) -> None:
    ruling = None if masks is None or ruled is None or status is None else GrammarMask(masks[:, None], None, ruled, status[:, None])
    choice = settled(tokens, finite, alive, limit, step, found, wanted, ruling)
    for to, each in zip((output, looked_up, forced), choice, strict=True):
        if each is not None:
            to.copy_(each)


settle_draft_operation = operation.operation(
    "",
    "settle_draft",
    "(Tensor tokens, Tensor finite, Tensor alive, Tensor limit, int step, Tensor? found, Tensor? wanted, Tensor? masks, Tensor? ruled,"
    " Tensor? status, Tensor(a!) output, Tensor(b!) looked_up, Tensor(c!) forced) -> ()",
    settle_draft_reference,
    cpu_kernels.prepared(calls.settle_draft),
)
