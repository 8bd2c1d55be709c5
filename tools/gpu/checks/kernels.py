"""Checks of the sampling kernels: each equals its reference on this device, and the time of both in a graph of their own."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from stepgraph.sampling import kernels, rng
from stepgraph.sampling.kernels import filters
from stepgraph.sampling.rng import Purpose
from tools.gpu.checks import grammar_rows, operations
from tools.gpu.checks.context import Context, Figures
from tools.gpu.checks.llama import attention_call
from tools.gpu.checks.operations import Call
from tools.gpu.checks.stopwatch import device_us, times_of

WIDTHS = (1_000, 151_669, 262_144)


def kernels_equal_references(context: Context) -> Figures:
    """Every kernel against plain torch on the same inputs: masked choices, chains; time of both."""
    device = context.device
    found = _compared(context, (operations.chain_accept(device, batch, k) for batch, k in itertools.product((1, 64), (0, 4, 8))))
    for batch, width in itertools.product((1, 8, 64), WIDTHS):
        if (context.rehearsal and batch * width > context.most(2_000_000)) or not context.fits(f"B={batch} V={width}"):
            continue
        for call_of in (operations.masked_argmax, operations.free_argmax):
            found |= _compared(context, (call_of(device, batch, 2, width, dtype) for dtype in (torch.float32, torch.bfloat16)))
    return found


def masks_and_processors_equal_references(context: Context) -> Figures:
    """Tags, masks, penalties, biases and stop tokens at every position, with and without a draft vocabulary."""
    device = context.device
    found = _compared(context, (operations.mask_status(device, batch, count) for batch, count in itertools.product((1, 64), (1, 5, 9))))
    for batch, width in itertools.product((1, 8, 64), WIDTHS):
        if batch * width > (context.most(400_000) if context.rehearsal else 10_000_000) or not context.fits(f"process B={batch} V={width}"):
            continue
        kinds = itertools.product((torch.float32, torch.bfloat16), (False, True))
        found |= _compared(context, (operations.process_logits(device, batch, 4, width, dtype, masked=masked) for dtype, masked in kinds))
        found |= _compared(context, [operations.process_logits(device, batch, 1, width, draft_vocabulary=min(width, 32_000), first=2)])
    return found


def rejection_equals_reference(context: Context) -> Figures:
    """Exact rejection against plain torch on the same inputs, for several widths and chain lengths; time of both."""
    found: Figures = {}
    for batch, k, width in itertools.product((1, 8, 64), (0, 1, 4, 8), WIDTHS[:2]):
        small = batch * (k + 1) * width <= context.most(160_000)
        if small if context.rehearsal else context.fits(f"B={batch} K={k} V={width}"):
            found |= _drawn(context, operations.reject_sample(context.device, batch, k, width))
    return found


def grammar_rows_equal_reference(context: Context) -> Figures:
    """Rows that follow grammars in device memory: all outputs equal the reference; time of a token and its mask."""
    found: Figures = {"implementation": kernels.describe(context.device)}
    batches = (8, 1) if context.rehearsal else (8, 1, 64)  # the first decides a goal
    for batch, width, index, forces in itertools.product(batches, (131_072, 151_669), (1, 0), (False, True)):
        if (context.rehearsal and width > 131_072) or not context.fits(f"advance_fill B={batch} V={width}"):
            continue
        call = grammar_rows.call_of(context.device, batch, width, index, forces)
        assert not (difference := call.difference()), difference
        found[call.name] = {"kernel_us": device_us(context, call.kernel)["median"]}
    return found


def programs_repeat_bit_for_bit(context: Context) -> Figures:
    """Programs whose threads or blocks exchange data give the same bits in every run, also beside work on another stream."""
    device, runs, (width, keys) = context.device, context.count(200, 40), (1_003, 60) if context.rehearsal else (131_072, 4000)
    calls = [grammar_rows.call_of(device, 8, width, index) for index in (1, 0)]
    forced = [grammar_rows.call_of(device, 8, width, index, forces=True) for index in (1, 0)]
    calls += [replace(call, writes=(*call.writes, 18)) for call in forced]  # each run finds the forced texts again
    calls += [operations.masked_argmax(device, 8, 4, width, all_masked=True), operations.draw(device, 8, width)]
    calls += [operations.reject_sample(device, 8, 3, width), attention_call(device, 8, 4, keys, 64)[0]]
    other, numbers = None if context.on_tape else torch.cuda.Stream(device), torch.zeros(keys << 12, device=device)
    for call in calls:
        expected = call.results(call.operation.out)
        for run in range(2 if context.rehearsal else runs):
            with torch.cuda.stream(other) if run % 2 else contextlib.nullcontext():
                numbers.add_(1)
            assert not (difference := call.difference(expected)), f"run {run}: {difference}"
    return {"runs": runs, "calls": [call.name for call in calls]}


def _compared(context: Context, calls: Iterable[Call]) -> Figures:
    found: Figures = {"implementation": kernels.describe(context.device)}
    for call in calls:
        assert not (difference := call.difference()), difference
        found[call.name] = times_of(context, call.kernel, call.reference)
    return found


def _drawn(context: Context, call: Call) -> Figures:
    """Compare at several positions. The last bit of a logarithm may change a token: at most one in a thousand."""
    rows, different = len(call.outputs[0]) * (repeats := context.count(50, 3)), 0
    for step in range(repeats):
        tokens, *others = call.at_later_position(step).different_rows()
        assert not any(others), f"{call.name}: accepted counts of {others[0]} rows differ"
        different += tokens
    assert different <= rows // 1000, f"{call.name}: {different} of {rows} rows differ"
    return {call.name: {"rows": rows, "different": different, **times_of(context, call.kernel, call.reference)}}


def random_numbers_equal_the_cpu(context: Context) -> Figures:
    """Uniform numbers equal the CPU's bit for bit, also for extreme seeds; exponential ones up to the last bits of a logarithm."""
    generator = torch.Generator().manual_seed(3)
    seed = torch.cat([torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)]), torch.randint(-(2**62), 2**62, (11,), generator=generator)])[:, None]
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


def filters_equal_references(context: Context) -> Figures:
    """Filters in torch, triton and flashinfer: distributions equal the CPU's bit for bit, draws except near ties; time of each."""
    found = context.figures
    for name in ("triton", "torch", "flashinfer"):  # flashinfer may have to be compiled, which a rehearsal does not
        if context.on_gpu and name == "flashinfer":
            continue
        try:
            kernels.choose_filters(context.device, name)
        except ValueError as refusal:
            found[name] = str(refusal)
            continue
        for batch, width in itertools.product((1, 8, 64), WIDTHS):
            label = f"{name} N={batch} V={width}"
            if batch * width <= context.most(200_000) if context.rehearsal else name == "flashinfer" or context.fits(label):
                found[label] = _check_filters(context, name, batch, width)
    found["auto"] = str(kernels.choose_filters(context.device))
    return found


@functools.cache
def _expected_draw(batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Distribution and draw on the CPU. Cached, since the largest sizes take seconds."""
    call = operations.draw(torch.device("cpu"), batch, width)
    token, probs = call.results(call.operation.run_reference)
    return probs, token


def _check_filters(context: Context, name: str, batch: int, width: int) -> Figures:
    """flashinfer sums in float32: rows where this changes the kept set are counted; no other row may differ."""
    draw, alone = operations.draw(context.device, batch, width), operations.distribution(context.device, batch, width)
    (token, probs), (expected, expected_token) = draw.results(draw.operation.out), _expected_draw(batch, width)
    rows = (probs.cpu() != expected).any(-1) | (filters.distribution(*alone.inputs)[:, 0].cpu() != expected).any(-1)
    draws = (token.cpu() != expected_token) & ~rows
    assert name == "flashinfer" or not bool(rows.any()), f"V={width}: {int(rows.sum())} of {batch} rows differ from the CPU's"
    assert int(draws.sum()) <= batch // 50, f"V={width}: {int(draws.sum())} of {batch} draws differ"
    times = {f"{call.operation.name}_us": device_us(context, call.kernel)["median"] for call in (alone, draw)}
    return {"different_rows": int(rows.sum()), "different_draws": int(draws.sum()), **times}
