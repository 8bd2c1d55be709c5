"""Checks of the sampling kernels: each equals its reference on this device, and the time of both in a graph of their own."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import bitmask, kernels, rng, sampler
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import chain, choice, filters, rejection
from stepgraph.sampling.kernels.filter_choice import FILTERS
from stepgraph.sampling.rng import Purpose
from tools.gpu.checks.context import Context, Figures, summary

Call = Callable[[], object]


def kernels_equal_references(context: Context) -> Figures:
    """Every kernel against plain torch on the same inputs: masked choices, races, chains; time of both."""
    found: Figures = {"implementation": kernels.describe(context.device)}
    for batch, k in itertools.product((1, 64), (0, 4, 8)):
        found[f"chain_accept B={batch} K={k}"] = _check_chain(context, batch, k)
    for batch, width in itertools.product((1, 8, 64), (1_000, 151_669, 262_144)):
        if context.rehearsal and batch * width > 2_000_000:
            continue
        if not context.fits(f"B={batch} V={width}"):
            continue
        for dtype in (torch.float32, torch.bfloat16):
            found[f"masked_argmax B={batch} V={width} {str(dtype)[6:]}"] = _check_choice(context, batch, width, dtype)
        found[f"race N={batch} V={width}"] = _check_race(context, batch, width)
    return found


def random_numbers_equal_the_cpus(context: Context) -> Figures:
    """Uniform numbers equal the CPU's bit for bit, also for extreme seeds; exponential ones up to the last bits of a logarithm."""
    made = torch.Generator().manual_seed(3)
    seed = torch.cat([torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)]), torch.randint(-(2**62), 2**62, (11,), generator=made)])[:, None]
    position, index = torch.arange(0, 16)[:, None], torch.arange(0, 262_144, 7)
    worst = 0.0
    for purpose in Purpose:
        names = [tensor.to(context.device) for tensor in (seed, position, index)]
        chance = rng.uniform(names[0], names[1], purpose, names[2])
        assert torch.equal(chance.cpu(), rng.uniform(seed, position, purpose, index)), f"{purpose.name}: the numbers differ"
        found, expected = rng.exponential(names[0], names[1], purpose, names[2]).cpu(), rng.exponential(seed, position, purpose, index)
        worst = max(worst, float(((found - expected).abs() / expected).max()))
    assert worst < 2**-21, f"exponential numbers differ by {worst:.2e} of their size"
    return {"exponential_relative_difference": worst}


def choice_inputs(device: torch.device, batch: int, positions: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits (padded, with ties and a NaN), masks of many densities, permuted rows, every second row without a grammar."""
    made = torch.Generator().manual_seed(width)
    logits = (torch.randn(batch, positions, width + 64, generator=made) * 4).round(decimals=1)
    logits[0, 0, width // 2] = float("nan")
    logits[..., width:] = float("inf")
    density = torch.logspace(-4, 0, batch)[torch.randperm(batch, generator=made)][:, None, None]
    masks = bitmask.pack(torch.rand(batch, positions, width, generator=made) < density)
    masks[batch // 2, -1] = 0
    rows = torch.randperm(batch, generator=made)
    ruled = torch.arange(batch) % 2 == 0
    padded = logits.to(device=device, dtype=dtype)
    return padded[..., :width], masks.to(device), rows.to(device), ruled.to(device)


def _check_choice(context: Context, batch: int, width: int, dtype: torch.dtype) -> Figures:
    logits, masks, rows, ruled = choice_inputs(context.device, batch, 2, width, dtype)
    status = torch.full((batch, 2), int(MaskStatus.OK), device=context.device)
    status[batch // 3] = int(MaskStatus.COMPLETE)
    best = torch.empty(batch, 2, device=context.device)
    token = torch.empty(batch, 2, dtype=torch.int64, device=context.device)
    reference: Call = partial(choice.masked_argmax.run_reference, logits, masks, rows, ruled, None, status, best, token)
    reference()
    found_best, found_token = kernels.masked_argmax(logits, masks, rows, ruled, status=status)
    torch.testing.assert_close(found_best, best, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found_token, token), f"V={width} {dtype}: {int((found_token != token).sum())} tokens differ"
    return times_of(context, partial(choice.masked_argmax.out, logits, masks, rows, ruled, None, status, best, token), reference)


def _check_race(context: Context, batch: int, width: int) -> Figures:
    """The last bit of a logarithm may differ, so a choice between two tokens that arrive together may: none in thousands did."""
    made = torch.Generator().manual_seed(batch)
    row = torch.tensor([[1.0, 0, 1, 0], [0.7, 50, 0.9, 0.01]]).repeat(-(-batch // 2), 1)[:batch]
    scores = torch.randn(batch, width, generator=made) * 3
    weights = sampler.distribution(scores.to(context.device), row.to(context.device))
    seed, position = (torch.randint(0, 2**62, (batch,), generator=made).to(context.device) for _ in range(2))
    token = torch.empty(batch, dtype=torch.int64, device=context.device)
    reference: Call = partial(filters.race.run_reference, weights, seed, position, Purpose.DRAFT, token)
    different, repeats = 0, context.count(50, 3)
    for step in range(repeats):
        filters.race.run_reference(weights, seed, position + step, Purpose.DRAFT, token)
        different += int((kernels.race(weights, seed, position + step, Purpose.DRAFT) != token).sum())
    assert different <= repeats * batch // 1000, f"{different} of {repeats * batch} draws differ"
    times = times_of(context, partial(filters.race.out, weights, seed, position, int(Purpose.DRAFT), token), reference)
    return {"draws": repeats * batch, "different": different, **times}


def _check_chain(context: Context, batch: int, k: int) -> Figures:
    made = torch.Generator().manual_seed(k)

    def draw(high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, (batch, *shape), generator=made)

    sampled = draw(5, k + 1)
    drafts = torch.where(draw(4, k) > 0, sampled[:, :k], draw(5, k, low=-1))
    status = torch.where(draw(4, k + 1) > 0, int(MaskStatus.OK), draw(len(MaskStatus), k + 1))
    on_cpu = (sampled, draw(10, k + 1) > 0, drafts, draw(k + 1), status, draw(7, 3, low=-1), draw(12, low=1))
    sampled, finite, drafts, count, status, stops, room = (tensor.to(context.device) for tensor in on_cpu)
    outputs = [torch.empty_like(room) for _ in range(3)]
    reference: Call = partial(chain.chain_accept.run_reference, sampled, finite, drafts, count, status, stops, room, None, *outputs)
    reference()
    found = kernels.chain_accept(sampled, finite, drafts, count, status, stops, room)
    for name, ours, expected in zip(("emitted", "accepted", "finish"), found, outputs, strict=True):
        assert torch.equal(ours, expected), f"K={k}: {name} differs"
    return times_of(
        context, partial(chain.chain_accept.out, sampled, finite, drafts, count, status, stops, room, None, *outputs), reference
    )


def times_of(context: Context, kernel: Call, reference: Call) -> Figures:
    return {"kernel_us": device_us(context, kernel)["median"], "reference_us": device_us(context, reference)["median"]}


def device_us(context: Context, call: Call) -> dict[str, float]:
    """Time of one call."""
    watch = stopwatch(context, call)
    return summary([watch() for _ in context.turns(2 if context.rehearsal else context.count(20, 3))])


def stopwatch(context: Context, call: Call) -> Callable[[], float]:
    """Times one call whenever it is asked to, in microseconds: on a GPU as one of ten in a CUDA graph, in rehearsal by the clock."""
    if context.rehearsal:
        return partial(_clock, call)
    inside = 10
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inside):
            call()

    def watch() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / inside

    return watch


def _clock(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


SETTINGS = [[0.7, 50, 0.9, 0.01], [1.0, 0, 1, 0], [0.0, 0, 1, 0], [1.3, 0, 0.95, 0], [1.0, 5, 1, 0], [2.0, 0, 0.5, 0.05], [1.0, 0, 1e-6, 0]]


def filters_equal_references(context: Context) -> Figures:
    """Filters in torch, triton and flashinfer: distributions equal the CPU's bit for bit, draws except near ties; time of each."""
    found = context.found
    for name in FILTERS[:0:-1]:  # flashinfer last: it may have to be compiled
        try:
            kernels.choose_filters(context.device, name)
        except ValueError as refusal:
            found[name] = str(refusal)
            continue
        for batch, width in itertools.product((1, 8, 64), (1_000, 151_669, 262_144)):
            label = f"{name} N={batch} V={width}"
            if batch * width <= 200_000 if context.rehearsal else name == "flashinfer" or context.fits(label):
                found[label] = _check_filters(context, name, batch, width)
    found["auto"] = str(kernels.choose_filters(context.device))
    return found


def filter_inputs(batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Logits [N, V] with ties in every second row and one row of -inf, and sampling settings of every kind, on the CPU."""
    logits = torch.randn(batch, width, generator=torch.Generator().manual_seed(batch + width)) * 3
    logits[::2].round_()
    if batch > 1:
        logits[batch // 2] = float("-inf")
    return logits, torch.tensor(SETTINGS).repeat(-(-batch // len(SETTINGS)), 1)[:batch]


@functools.cache
def _expected_draw(batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Distribution and draw on the CPU. Cached, since the largest sizes take seconds."""
    logits, params = filter_inputs(batch, width)
    seed, probs, token = torch.arange(batch), torch.empty_like(logits), torch.empty(batch, dtype=torch.int64)
    filters.draw.run_reference(logits, params, seed, seed, Purpose.DRAFT, None, None, probs, token)
    return probs, token


def _check_filters(context: Context, name: str, batch: int, width: int) -> Figures:
    """flashinfer sums in float32: rows where this changes the kept set are counted; no other row may differ."""
    expected, wanted = _expected_draw(batch, width)
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
    """Exact rejection against plain torch on the same inputs, for several widths and chain lengths; time of both."""
    found: Figures = {"implementation": kernels.describe(context.device)}
    for batch, k, width in itertools.product((1, 8, 64), (0, 1, 4, 8), (1_000, 151_669)):
        if not context.rehearsal or batch * (k + 1) * width <= 160_000:
            name = f"B={batch} K={k} V={width}"
            if context.fits(name):
                found[name] = _check_rejection(context, batch, k, width)
    return found


def judgement(device: torch.device, batch: int, k: int, width: int) -> Judgement:
    """Permuted rows, every fourth greedy, drafts from distributions near the target's; a few drafts are certain or end their chain."""
    here: Any = {"generator": torch.Generator(device).manual_seed(batch + k), "device": device}  # the largest takes a minute on a CPU
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


def _check_rejection(context: Context, batch: int, k: int, width: int) -> Figures:
    """Accepted counts must be equal. The last bit of a logarithm may change a race: at most one row in a thousand."""
    inputs = judgement(context.device, batch, k, width)
    tokens = torch.empty(batch, k + 1, dtype=torch.int64, device=context.device)
    accepted = torch.empty(batch, dtype=torch.int64, device=context.device)
    different, repeats = 0, context.count(50, 3)
    for step in range(repeats):
        moved = inputs._replace(length=inputs.length + 10 * step)
        rejection.reject_sample.run_reference(*moved, tokens, accepted)
        found, held = kernels.reject_sample(*moved)
        assert torch.equal(held, accepted), f"B={batch} K={k} V={width}: {held.tolist()} drafts accepted, expected {accepted.tolist()}"
        different += int((found != tokens).any(1).sum())
    assert different <= repeats * batch // 1000, f"B={batch} K={k} V={width}: {different} of {repeats * batch} rows differ"
    return {
        "rows": repeats * batch,
        "different": different,
        "kernel_us": device_us(context, partial(rejection.reject_sample.out, *inputs, tokens, accepted))["median"],
        "reference_us": device_us(context, partial(rejection.reject_sample.run_reference, *inputs, tokens, accepted))["median"],
    }
