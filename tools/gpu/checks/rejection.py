"""The check of exact rejection: it equals its reference on this device, and what both cost in a graph of their own."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import kernels, sampler
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import rejection
from tools.gpu.checks.context import Context, Figures
from tools.gpu.checks.kernels import device_us


class Judgement(NamedTuple):
    """The arguments of reject_sample."""

    target_probs: Tensor
    draft_probs: Tensor
    rows: Tensor
    certain: Tensor
    finite: Tensor
    drafts: Tensor
    draft_count: Tensor
    status: Tensor
    seed: Tensor
    length: Tensor


def rejection_equals_reference(context: Context) -> Figures:
    """Exact rejection against plain torch on the same inputs, at odd widths and every length of chain; microseconds of both."""
    found: Figures = {"implementation": kernels.describe(context.device)}
    for batch, k, width in itertools.product((1, 8, 64), (0, 1, 4, 8), (1_000, 151_669)):
        if not context.rehearsal or batch * (k + 1) * width <= 160_000:
            name = f"B={batch} K={k} V={width}"
            if context.fits(name):
                found[name] = _check(context, batch, k, width)
    return found


def judgement(device: torch.device, batch: int, k: int, width: int) -> Judgement:
    """Rows in any order, each fourth greedy, drafts from distributions near the target's; a few are certain, or end their chain."""
    here: Any = {"generator": torch.Generator(device).manual_seed(batch + k), "device": device}  # a CPU takes a minute over the largest
    kinds = torch.tensor([[1.0, 0, 1, 0], [0.7, 50, 0.9, 0.01], [0.0, 0, 1, 0], [1.6, 0, 1, 0]], device=device)
    settings = kinds.repeat(-(-batch // 4), 1)[:batch]
    logits = torch.randn(batch, k + 1, width, **here) * 3
    target = sampler.distribution(logits, settings)
    offered = sampler.distribution(logits[:, :k] + torch.randn(batch, k, width, **here), settings)
    drafts = sampler.race(offered, torch.empty_like(offered).exponential_(generator=here["generator"]))
    rows = torch.randperm(batch, **here)
    chance = torch.rand(batch, k + 1, **here)
    status = torch.where(chance < 0.96, int(MaskStatus.OK), torch.where(chance < 0.98, int(MaskStatus.ILLEGAL), int(MaskStatus.FAULT)))
    return Judgement(
        target_probs=target,
        draft_probs=torch.zeros_like(offered).index_copy_(0, rows, offered),
        rows=rows,
        certain=(settings[:, :1] <= 0) | (torch.rand(batch, k, **here) < 0.1),
        finite=torch.ones(batch, k + 1, dtype=torch.bool, device=device),
        drafts=drafts,
        draft_count=torch.full((batch,), k, device=device),
        status=status,
        seed=torch.randint(0, 2**62, (batch,), **here),
        length=torch.randint(1, 9000, (batch,), **here),
    )


def _check(context: Context, batch: int, k: int, width: int) -> Figures:
    """How many drafts hold is the same to the last one. A logarithm's last bit may turn a race: at most once in a thousand."""
    inputs = judgement(context.device, batch, k, width)
    tokens = torch.empty(batch, k + 1, dtype=torch.int64, device=context.device)
    accepted = torch.empty(batch, dtype=torch.int64, device=context.device)
    different, repeats = 0, context.count(50, 3)
    for step in range(repeats):
        moved = inputs._replace(length=inputs.length + 10 * step)
        rejection.reject_sample.run_reference(*moved, tokens, accepted)
        found, held = kernels.reject_sample(*moved)
        assert torch.equal(held, accepted), f"B={batch} K={k} V={width}: {held.tolist()} drafts hold, want {accepted.tolist()}"
        different += int((found != tokens).any(1).sum())
    assert different <= repeats * batch // 1000, f"B={batch} K={k} V={width}: {different} of {repeats * batch} rows differ"
    return {
        "rows": repeats * batch,
        "different": different,
        "kernel_us": device_us(context, partial(rejection.reject_sample.out, *inputs, tokens, accepted))["median"],
        "reference_us": device_us(context, partial(rejection.reject_sample.run_reference, *inputs, tokens, accepted))["median"],
    }
