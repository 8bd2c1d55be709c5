"""The check of attention's choice: whatever it can run as here gives what the reference gives, in rounds and prompts; what each costs."""

from __future__ import annotations

import itertools
import time
from functools import partial

import torch

from stepgraph.graphs.attention.choose import ATTENTION, AttentionChoice, choose_attention
from stepgraph.graphs.attention.paged import HEAD_SIZES, AttentionShape, attention
from stepgraph.graphs.attention.probe import differs
from stepgraph.graphs.attention.rope_kv import rope_and_write_kv
from tools.gpu.checks.context import Context, Figures, summary
from tools.gpu.checks.kernels import device_us
from tools.gpu.checks.llama import PAGE, attention_inputs


def attention_choices_equal_reference(context: Context) -> Figures:
    """Rounds recorded once and replayed with other lengths, prompts in chunks; FlashInfer, which is built here, at one size only."""
    found = context.found
    sizes = HEAD_SIZES[:1] if context.rehearsal else HEAD_SIZES
    for name, dtype, size in itertools.product(ATTENTION[:0:-1], (torch.bfloat16, torch.float16), sizes):
        windows = (None,) if name == "flashinfer" else (None, 70)
        shape, label = AttentionShape(dtype, 8, 2, size, windows), f"{name} {str(dtype)[6:]} size={size}"
        if (dtype, size) != (torch.bfloat16, 64) and (name == "flashinfer" or not context.fits(label)):
            continue
        try:
            chosen = choose_attention(context.device, name, (shape,), PAGE)
        except ValueError as refusal:
            found[label] = str(refusal)
            continue
        why = differs(chosen.round_call, chosen.prompt_call, shape, PAGE, context.device)
        assert not why, f"{label}: {why}"
        found[label] = _times(context, chosen, size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _check_turning(context, dtype)
    shapes = (AttentionShape(torch.bfloat16, 8, 2, 64),)
    found["auto"] = str(choose_attention(context.device, "auto", shapes, PAGE))
    return found


def _check_turning(context: Context, dtype: torch.dtype) -> None:
    """Turned queries and keys, and what the cache holds, have the bits of plain torch on the same device."""
    made = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(40, 12, 128, generator=made).to(context.device, dtype).split([8, 2, 2], 1)
    cosines, sines = (torch.randn(40, 1, 128, generator=made).to(context.device, dtype) for _ in range(2))
    slots = torch.randperm(50, generator=made)[:40].to(context.device)
    cache = torch.zeros(4, 50, 2, 128, dtype=dtype, device=context.device)
    expected = torch.empty_like(query, memory_format=torch.contiguous_format)
    found = rope_and_write_kv(query, key, value, cosines, sines, slots, cache[0], cache[1])
    rope_and_write_kv.run_reference(query, key, value, cosines, sines, slots, cache[2], cache[3], expected)
    assert torch.equal(found, expected), f"{dtype}: {int((found != expected).sum())} turned numbers differ"
    assert torch.equal(cache[:2], cache[2:]), f"{dtype}: the caches differ"


def _times(context: Context, chosen: AttentionChoice, size: int) -> Figures:
    """Of a round of eight rows, in a graph, and of a chunk of a prompt with its plan; bfloat16."""
    length, chunk = (60, 20) if context.rehearsal else (4000, 512)
    query, keys, values, inputs = attention_inputs(context.device, 8, 5, length, size)
    round_us = device_us(context, partial(attention, query, keys, values, inputs._replace(attend=chosen.round_call())))["median"]
    query, keys, values, inputs = attention_inputs(context.device, 1, chunk, length, size)

    def prompt() -> float:
        start = time.perf_counter()
        attention(query, keys, values, inputs._replace(attend=chosen.prompt_call(length - chunk, chunk)))
        if not context.rehearsal:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6

    prompt()
    return {"round_us": round_us, "prompt_us": summary([prompt() for _ in range(context.count(20, 2))])["median"]}
