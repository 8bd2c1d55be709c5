"""The checks of the Llama family: attention equals its reference, and a random model decodes the same tokens in any company."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stepgraph import Engine, EngineConfig, SamplingParams
from stepgraph.graphs.attention.paged import HEAD_SIZES, attention, paged_attention
from stepgraph.graphs.model import ModelInput
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from tools.gpu.checks.context import Context, Figures
from tools.gpu.checks.kernels import times_of

PAGE = 16
PROMPTS = [[7, 30, 5], [9], [40 + place for place in range(17)], [12, 12, 3, 90, 33, 100], [60, 61, 62, 63, 64, 65, 66, 67]]


def attention_equals_reference(context: Context) -> Figures:
    """Rounds and prompts over heads of all sizes, with inert positions and windows; a row alone has the bits it has in company."""
    found: Figures = {}
    lengths, batches = ((60, 200), (2,)) if context.rehearsal else ((100, 1000, 8000), (1, 8, 64))
    for length, batch, size in itertools.product(lengths, batches, HEAD_SIZES):
        if batch * length * size > 100_000_000:
            continue
        for count, window in ((1, 0), (5, 0), (9, 70), (40, 0)):
            name = f"B={batch} Q={count} keys={length} size={size}{' window' if window else ''}"
            if context.fits(name):
                found[name] = _check_attention(context, batch, count, length, size, window)
    return found


def attention_inputs(device: torch.device, batch: int, count: int, length: int, size: int) -> tuple[Tensor, Tensor, Tensor, ModelInput]:
    """Rows of up to `length` entries whose last position is inert in every second row; NaN where no row has an entry."""
    here: Any = {"generator": torch.Generator(device).manual_seed(length + count), "device": device}  # a CPU takes seconds
    pages = -(-(length + 1) // PAGE)
    tables, rows = (torch.randperm(pages * batch, **here) + 1).view(batch, pages), torch.arange(batch, device=device)
    ends = length - rows * 13 % (length // 2)
    positions = (ends - count)[:, None] + torch.arange(count, device=device) + (rows % 2)[:, None]
    positions = positions.clamp(min=0)
    live = positions < ends[:, None]
    slots = torch.where(live, tables.gather(1, positions // PAGE) * PAGE + positions % PAGE, positions % PAGE)
    places = torch.arange(pages * PAGE, device=device)
    held = torch.zeros((pages * batch + 1) * PAGE, dtype=torch.bool, device=device)
    held[(tables.repeat_interleave(PAGE, 1) * PAGE + places % PAGE)[places < ends[:, None]]] = True
    keys, values = (torch.randn(len(held), 2, size, **here).masked_fill(~held[:, None, None], torch.nan) for _ in range(2))
    query = torch.randn(batch, count, 8, size, **here)
    inputs = ModelInput(positions, positions, slots, tables, PAGE)
    return query.bfloat16(), keys.bfloat16(), values.bfloat16(), inputs


def _check_attention(context: Context, batch: int, count: int, length: int, size: int, window: int) -> Figures:
    query, keys, values, inputs = attention_inputs(context.device, batch, count, length, size)
    found = attention(query, keys, values, inputs, window or None)
    arguments = (inputs.positions, inputs.slots, inputs.block_tables, PAGE, window, size**-0.5)
    expected, output = torch.empty_like(query), torch.empty_like(query)
    paged_attention.run_reference(query.float(), keys.float(), values.float(), *arguments, expected)
    live = inputs.slots >= PAGE
    torch.testing.assert_close(found[live].float(), expected[live].float(), rtol=0.02, atol=0.02)
    one = ModelInput(inputs.positions[-1:], inputs.positions[-1:], inputs.slots[-1:], inputs.block_tables[-1:], PAGE)
    alone = attention(query[-1:], keys, values, one, window or None)
    assert torch.equal(alone[0][live[-1]], found[-1][live[-1]]), "a row alone has other bits than in company"
    kernel = partial(paged_attention.out, query, keys, values, *arguments, output)
    reference = partial(paged_attention.run_reference, query, keys, values, *arguments, output)
    return times_of(context, kernel, reference)


def llama_decodes_alike(context: Context) -> Figures:
    """A random model: replays leave what eager rounds leave, float32 tokens are those of the CPU, company changes none."""
    found: Figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        config = LlamaConfig(160, 256, 384, 4, 2, 64, (None, 40, None), dtype=dtype)
        here = Llama(config, device=context.device).randomise()
        replayed, together = _decode(here, PROMPTS, eager=False)
        eager, again = _decode(here, PROMPTS, eager=True)
        assert together == again, f"{dtype}: replayed rounds emit other tokens than eager ones"
        assert torch.equal(replayed, eager), f"{dtype}: replayed rounds leave another cache than eager ones"
        few = PROMPTS[: 2 if context.rehearsal else None]
        alone = [_decode(here, [prompt], eager=False)[1][0] for prompt in few]
        if dtype is torch.float32:
            _, on_cpu = _decode(Llama(config).randomise(), PROMPTS, eager=False)
            assert together == on_cpu, "other tokens than on the CPU"
            assert alone == together[: len(few)], "other tokens alone than in company"
        found[f"{str(dtype)[6:]} texts that company changed"] = sum(a != b for a, b in zip(alone, together, strict=False))
    return found


def _decode(target: Llama, prompts: Sequence[list[int]], eager: bool) -> tuple[Tensor, list[list[int]]]:
    """The keys that are left, but for the scratch page, and the tokens."""
    config = EngineConfig(max_rows=4, num_speculative_tokens=0, max_length=64, prefill_chunk=5, greedy_only=True, eager=eager)
    with Engine(target, config=config) as engine:
        engine.capture()
        jobs = [engine.submit(prompt, sampling=SamplingParams(temperature=0), max_new_tokens=24) for prompt in prompts]
        for _ in engine.stream():
            pass
        engine.backend.synchronize()  # a round that was launched before the last end was known may still write
        return engine.buffers.target_keys[:, PAGE:].clone(), [job.tokens for job in jobs]
