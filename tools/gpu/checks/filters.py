"""The check of the filters: whatever they can run as here gives what plain torch gives on the CPU, and what each costs."""

from __future__ import annotations

import functools
import itertools
from functools import partial

import torch
from torch import Tensor

from stepgraph.sampling import kernels
from stepgraph.sampling.kernels import filters
from stepgraph.sampling.kernels.filter_choice import FILTERS
from stepgraph.sampling.rng import Purpose
from tools.gpu.checks.context import Context, Figures
from tools.gpu.checks.kernels import device_us

SETTINGS = [[0.7, 50, 0.9, 0.01], [1.0, 0, 1, 0], [0.0, 0, 1, 0], [1.3, 0, 0.95, 0], [1.0, 5, 1, 0], [2.0, 0, 0.5, 0.05], [1.0, 0, 1e-6, 0]]


def filters_equal_references(context: Context) -> Figures:
    """Distributions bit for bit those of the CPU, draws but for near ties, for torch, triton and flashinfer; microseconds of each."""
    found = context.found
    for name in FILTERS[:0:-1]:  # flashinfer last: it may have to be built
        try:
            kernels.choose_filters(context.device, name)
        except ValueError as refusal:
            found[name] = str(refusal)
            continue
        for batch, width in itertools.product((1, 8, 64), (1_000, 151_669, 262_144)):
            label = f"{name} N={batch} V={width}"
            if batch * width <= 200_000 if context.rehearsal else name == "flashinfer" or context.fits(label):
                found[label] = _check(context, name, batch, width)
    found["auto"] = str(kernels.choose_filters(context.device))
    return found


def filter_inputs(batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Logits [N, V] with ties in every second row and a dead row, and settings of every kind, on the CPU."""
    logits = torch.randn(batch, width, generator=torch.Generator().manual_seed(batch + width)) * 3
    logits[::2].round_()
    if batch > 1:
        logits[batch // 2] = float("-inf")
    return logits, torch.tensor(SETTINGS).repeat(-(-batch // len(SETTINGS)), 1)[:batch]


@functools.cache
def _wanted(batch: int, width: int) -> tuple[Tensor, Tensor]:
    """The CPU's distribution and draw: seconds at the largest sizes, and the same for everything that is compared with them."""
    logits, params = filter_inputs(batch, width)
    seed, probs, token = torch.arange(batch), torch.empty_like(logits), torch.empty(batch, dtype=torch.int64)
    filters.draw.run_reference(logits, params, seed, seed, Purpose.DRAFT, None, None, probs, token)
    return probs, token


def _check(context: Context, name: str, batch: int, width: int) -> Figures:
    """flashinfer sums in float32: a row where that changes a set is counted, of the others none may differ."""
    expected, wanted = _wanted(batch, width)
    here, asked = (tensor.to(context.device) for tensor in filter_inputs(batch, width))
    seeds = torch.arange(batch, device=context.device)
    probs, token = kernels.draw(here, asked, seeds, seeds, Purpose.DRAFT)
    alone = kernels.distribution(here[:, None], asked)[:, 0]
    rows = (probs.cpu() != expected).any(-1) | (alone.cpu() != expected).any(-1)
    draws = (token.cpu() != wanted) & ~rows
    assert name == "flashinfer" or not bool(rows.any()), f"V={width}: {int(rows.sum())} of {batch} rows differ from the CPU's"
    assert int(draws.sum()) <= batch // 50, f"V={width}: {int(draws.sum())} of {batch} draws differ"
    distribution = partial(filters.distribution.out, here[:, None], asked, probs[:, None])
    draw = partial(filters.draw.out, here, asked, seeds, seeds, int(Purpose.DRAFT), None, None, probs, token)
    times = {"distribution_us": device_us(context, distribution)["median"], "draw_us": device_us(context, draw)["median"]}
    return {"different_rows": int(rows.sum()), "different_draws": int(draws.sum()), **times}
