"""The check of attention's choice: whatever it can run as here gives what the reference gives, in rounds and prompts; what each costs."""

from __future__ import annotations

import itertools
import time
from functools import partial

import torch

from stepgraph.graphs.attention import HEAD_SIZES, AttentionShape, attention
from stepgraph.graphs.attention_choice import WISHES, AttentionChoice, choose_attention
from stepgraph.graphs.attention_probe import differs
from tools.checks.context import Context, Figures, summary
from tools.checks.kernels import device_us
from tools.checks.llama import PAGE, attention_inputs


def attention_choices_equal_reference(context: Context) -> Figures:
    """Rounds recorded once and replayed with other lengths, prompts in chunks; FlashInfer, which is built first, at one size only."""
    found: Figures = {}
    sizes = HEAD_SIZES[:1] if context.rehearsal else HEAD_SIZES
    for name, dtype, size in itertools.product(WISHES[1:], (torch.bfloat16, torch.float16), sizes):
        windows = (None,) if name == "flashinfer" else (None, 70)
        if name == "flashinfer" and (dtype, size) != (torch.bfloat16, 64):
            continue
        shape, label = AttentionShape(dtype, 8, 2, size, windows), f"{name} {str(dtype)[6:]} size={size}"
        try:
            chosen = choose_attention(context.device, name, (shape,), PAGE)
        except ValueError as refusal:
            found[label] = str(refusal)
            continue
        why = differs(chosen.round_call, chosen.prompt_call, shape, PAGE, context.device)
        assert not why, f"{label}: {why}"
        found[label] = _times(context, chosen, size)
    shapes = (AttentionShape(torch.bfloat16, 8, 2, 64),)
    found["auto"] = str(choose_attention(context.device, "auto", shapes, PAGE))
    return found


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
