"""Checks of attention and of the Llama family: attention equals its reference, and tokens do not depend on the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stepgraph import Engine, EngineConfig, Job, SamplingParams
from stepgraph.graphs.attention.choose import ATTENTION_CHOICES, choose_attention, find_difference
from stepgraph.graphs.attention.paged import HEAD_SIZES, AttentionChoice, attention, paged_attention
from stepgraph.graphs.layers.slot_mapping import rope_and_write_kv
from stepgraph.graphs.model import AttentionShape
from stepgraph.graphs.model_call import ModelInput
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from tools.gpu.checks import layers
from tools.gpu.checks.context import Context, Figures, summary
from tools.gpu.checks.operations import Call
from tools.gpu.checks.stopwatch import device_us, times_of, wait_us
from tools.random_weights import randomised

PAGE = 16
NEAR_TIE = 0.1  # of log-probabilities: a random model has logits of spread 1, with an error of 1 to 2% in bfloat16
PROMPTS = [[7, 30, 5], [9], [40 + index for index in range(17)], [12, 12, 3, 90, 33, 100], [60, 61, 62, 63, 64, 65, 66, 67]]


def attention_equals_reference(context: Context) -> Figures:
    """Rounds and prompts for all head sizes, with padding positions and windows; the output of a row is independent of the batch."""
    figures: Figures = {}
    lengths, batches = ((60, 200), (2,)) if context.rehearsal else ((100, 1000, 8000), (1, 8, 64))
    for length, batch, size in itertools.product(lengths, batches, HEAD_SIZES):
        if batch * length * size > 100_000_000:
            continue
        for count, window in ((1, 0), (5, 0), (9, 70), (40, 0)):
            name = f"B={batch} Q={count} keys={length} size={size}{' window' if window else ''}"
            if context.fits(name):
                figures[name] = _check_attention(context, batch, count, length, size, window)
    return figures


def attention_inputs(device: torch.device, batch: int, count: int, length: int, size: int) -> tuple[Tensor, Tensor, Tensor, ModelInput]:
    """Rows of up to `length` entries; the last position is padding in every second row; unused entries are NaN."""
    options: Any = {"generator": torch.Generator(device).manual_seed(length + count), "device": device}  # faster than on the CPU
    pages = -(-(length + 1) // PAGE)
    tables, rows = (torch.randperm(pages * batch, **options) + 1).view(batch, pages), torch.arange(batch, device=device)
    ends = length - rows * 13 % (length // 2)
    positions = (ends - count)[:, None] + torch.arange(count, device=device) + (rows % 2)[:, None]
    positions = positions.clamp(min=0)
    live = positions < ends[:, None]
    slots = torch.where(live, tables.gather(1, positions // PAGE) * PAGE + positions % PAGE, positions % PAGE)
    indices = torch.arange(pages * PAGE, device=device)
    written = torch.zeros((pages * batch + 1) * PAGE, dtype=torch.bool, device=device)
    written[(tables.repeat_interleave(PAGE, 1) * PAGE + indices % PAGE)[indices < ends[:, None]]] = True
    keys, values = (torch.randn(len(written), 2, size, **options).masked_fill(~written[:, None, None], torch.nan) for _ in range(2))
    query = torch.randn(batch, count, 8, size, **options)
    inputs = ModelInput(positions, positions, slots, tables, PAGE)
    return query.bfloat16(), keys.bfloat16(), values.bfloat16(), inputs


def _check_attention(context: Context, batch: int, count: int, length: int, size: int, window: int) -> Figures:
    call, inputs = attention_call(context.device, batch, count, length, size, window)
    query, keys, values, *others = call.inputs
    output = attention(query, keys, values, inputs, window or None)
    expected = paged_attention.reference(query.float(), keys.float(), values.float(), *others)
    live = inputs.slots >= PAGE
    torch.testing.assert_close(output[live].float(), expected[live].float(), rtol=0.02, atol=0.02)
    one = ModelInput(inputs.positions[-1:], inputs.positions[-1:], inputs.slots[-1:], inputs.block_tables[-1:], PAGE)
    alone = attention(query[-1:], keys, values, one, window or None)
    assert torch.equal(alone[0][live[-1]], output[-1][live[-1]]), "the output of a row depends on the batch"
    return times_of(context, call.kernel, call.reference)


def attention_call(device: torch.device, batch: int, count: int, length: int, size: int, window: int = 0) -> tuple[Call, ModelInput]:
    """Least bytes: every key and value of a row, queries and results, once each."""
    query, keys, values, inputs = attention_inputs(device, batch, count, length, size)
    num_entries = int((length - torch.arange(batch) * 13 % (length // 2)).sum())
    tensors = (query, keys, values, inputs.positions, inputs.slots, inputs.block_tables, PAGE, window, size**-0.5, 0.0, None)
    shape = f"B={batch} Q={count} keys={length} size={size}"
    return Call(paged_attention, shape, tensors, (torch.empty_like(query),), 2 * num_entries * keys[0].nbytes + 2 * query.nbytes), inputs


def llama_tokens_are_reproducible(context: Context) -> Figures:
    """A random model: replays equal eager rounds, float32 tokens equal the CPU's and do not depend on the batch.

    Caches are compared without graphs for prompts, whose padded chunks may round differently.
    """
    figures: Figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        config = LlamaConfig(160, 256, 384, 4, 2, 64, (None, 40, None), dtype=dtype)
        model = randomised(Llama(config, device=context.device))
        _, together = _decode(model, PROMPTS)
        replayed, tokens = _decode(model, PROMPTS, prompt_graphs=False)
        eager, again = _decode(model, PROMPTS, eager=True)
        assert tokens == again, f"{dtype}: the tokens of replayed and eager rounds differ"
        assert together == tokens or dtype is not torch.float32, "tokens depend on graphs for prompts"
        assert torch.equal(replayed, eager), f"{dtype}: the caches of replayed and eager rounds differ"
        some_prompts = PROMPTS[: 2 if context.rehearsal else None]
        alone = [_decode(model, [prompt])[1][0] for prompt in some_prompts]
        if dtype is torch.float32:
            _, on_cpu = _decode(randomised(Llama(config)), PROMPTS)
            assert together == on_cpu, "the tokens differ from those of the CPU"
            assert alone == together[: len(some_prompts)], "tokens depend on the batch"
        figures[f"{str(dtype)[6:]} texts changed by the batch"] = sum(a != b for a, b in zip(alone, together, strict=False))
    return figures


def _decode(target: Llama, prompts: Sequence[list[int]], **changes: Any) -> tuple[Tensor, list[list[int]]]:
    """The key cache without the scratch page, and the tokens."""
    config = EngineConfig(max_rows=4, num_speculative_tokens=0, max_length=64, prefill_chunk=5, greedy_only=True, **changes)
    with Engine(target, config=config) as engine:
        engine.capture()
        jobs = [engine.submit(prompt, sampling=SamplingParams(temperature=0), max_new_tokens=24) for prompt in prompts]
        for _ in engine.stream():
            pass
        engine.backend.synchronize()  # a round that is still in flight may write
        return engine.buffers.target_keys[:, PAGE:].clone(), [job.tokens for job in jobs]


def drafts_change_bfloat16_texts_at_near_ties(context: Context) -> Figures:
    """A random model: texts with and without drafts are equal up to a token where, in float32, both tokens are about equally likely."""
    config = LlamaConfig(160, 256, 384, 4, 2, 64, (None, 40, None), dtype=torch.bfloat16)
    half = randomised(Llama(config, device=context.device))
    exact = Llama(replace(config, dtype=torch.float32), device=context.device)
    with torch.no_grad():
        for wide, narrow in zip(exact.parameters(), half.parameters(), strict=True):
            wide.copy_(narrow)
    prompts = PROMPTS[: 2 if context.rehearsal else None]
    plain, drafted = (_jobs(half, prompts, drafts) for drafts in (0, 3))
    gaps = [_gap(exact, prompt, *pair) for prompt, *pair in zip(prompts, plain, drafted, strict=True) if pair[0].tokens != pair[1].tokens]
    assert max(gaps, default=0.0) < NEAR_TIE, f"no near tie: the tokens differ by {max(gaps):.3f} in float32"
    accepted = sum(job.num_accepted_drafts for job in drafted)
    assert accepted, "no draft was accepted"
    return {"texts": len(plain), "different": len(gaps), "largest gap": max(gaps, default=0.0), "accepted drafts": accepted}


def _jobs(target: Llama, prompts: Sequence[list[int]], drafts: int, tokens: int = 24, most_reported: int = 0) -> list[Job]:
    config = EngineConfig(
        max_rows=4, num_speculative_tokens=drafts, draft_length=drafts, max_length=64, prefill_chunk=5, max_top_logprobs=most_reported
    )
    with Engine(target, "ngram" if drafts else None, config=config) as engine:
        engine.capture()
        sampling = SamplingParams(temperature=0, logprobs=most_reported > 0, top_logprobs=most_reported)
        jobs = [engine.submit(prompt, sampling=sampling, max_new_tokens=tokens) for prompt in prompts]
        for _ in engine.stream():
            pass
        return jobs


def _gap(exact: Llama, prompt: list[int], one: Job, other: Job) -> float:
    """Difference of the log-probabilities of the first two different tokens; infinite if one is not among the most probable ones."""
    index = next(index for index, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1])
    (job,) = _jobs(exact, [[*prompt, *one.tokens[:index]]], 0, tokens=1, most_reported=20)
    likely = dict(job.logprobs[0].top_raw)
    logprobs = [likely.get(each.tokens[index], -math.inf) for each in (one, other)]
    return math.inf if -math.inf in logprobs else abs(logprobs[0] - logprobs[1])


def attention_choices_equal_reference(context: Context) -> Figures:
    """Every attention kernel equals the reference: captured rounds replayed at other lengths, prompts in chunks; FlashInfer at one size."""
    figures = context.figures
    sizes = HEAD_SIZES[:1] if context.rehearsal else HEAD_SIZES
    for name, dtype, size in itertools.product(ATTENTION_CHOICES[:0:-1], (torch.bfloat16, torch.float16), sizes):
        windows = (None,) if name == "flashinfer" else (None, 70)
        shape, label = AttentionShape(dtype, 8, 2, size, windows), f"{name} {str(dtype)[6:]} size={size}"
        if context.on_gpu and name == "flashinfer":
            continue  # a rehearsal compiles nothing
        if (dtype, size) != (torch.bfloat16, 64) and (name == "flashinfer" or not context.fits(label)):
            continue
        try:
            chosen = choose_attention(context.device, name, (shape,), PAGE)
        except ValueError as refusal:
            figures[label] = str(refusal)
            continue
        why = find_difference(chosen.round_attend, chosen.prompt_attend, shape, PAGE, context.device)
        assert not why, f"{label}: {why}"
        figures[label] = _times(context, chosen, size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        size = 512 if context.rehearsal else 4096
        for call in (rope_call(context.device, dtype, 40, 128), *layers.calls(context.device, 40, size, dtype)):
            if any(rows := call.different_rows()):
                context.failures.append(f"{call.name}: {rows} rows differ from the reference")
    shapes = (AttentionShape(torch.bfloat16, 8, 2, 64),)
    figures["auto"] = str(choose_attention(context.device, "auto", shapes, PAGE))
    return figures


def rope_call(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> Call:
    rng = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(rows, 12, size, generator=rng).to(device, dtype).split([8, 2, 2], 1)
    cosines, sines = (torch.randn(rows, 1, size, generator=rng).to(device, dtype) for _ in range(2))
    slots = torch.randperm(rows + 10, generator=rng)[:rows].to(device)
    keys, values = (torch.zeros(rows + 10, 2, size, dtype=dtype, device=device) for _ in range(2))
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    inputs = (query, key, value, cosines, sines, slots, keys, values)
    return Call(rope_and_write_kv, f"N={rows} size={size} {str(dtype)[6:]}", inputs, (output,), writes=(6, 7))


def _times(context: Context, chosen: AttentionChoice, size: int) -> Figures:
    """Time of a round of eight rows in a graph and of a prompt chunk with its plan; bfloat16."""
    length, chunk = (60, 20) if context.rehearsal else (4000, 512)
    query, keys, values, inputs = attention_inputs(context.device, 8, 5, length, size)
    round_us = device_us(context, partial(attention, query, keys, values, inputs._replace(attend=chosen.round_attend())))["median"]
    query, keys, values, inputs = attention_inputs(context.device, 1, chunk, length, size)

    def prompt() -> object:
        return attention(query, keys, values, inputs._replace(attend=chosen.prompt_attend(length - chunk, chunk)))

    times = [wait_us(context, prompt) for _ in range(1 + context.count(20, 2))]
    return {"round_us": round_us, "prompt_us": summary(times[1:])["median"]}
