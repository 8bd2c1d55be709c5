"""Every Triton kernel once on small inputs against its reference; short enough for compute-sanitizer or Triton's interpreter.

TRITON_INTERPRET=1 selects interpretation for the whole process. Prints one JSON document last.

    TRITON_INTERPRET=1 python -m tools.gpu.checks.short_kernels
    compute-sanitizer python -m tools.gpu.checks.short_kernels
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent.parent.parent))

from tools.gpu_check import find_stepgraph

if __name__ == "__main__":
    find_stepgraph()

import torch
import triton
from torch import Tensor

from stepgraph.graphs.attention.paged import paged_attention
from stepgraph.graphs.attention.rope_kv import rope_and_write_kv
from stepgraph.graphs.attention.triton import paged as paged_programs
from stepgraph.graphs.attention.triton import rope_kv as rope_programs
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import chain as chains
from stepgraph.sampling.kernels import choice as choices
from stepgraph.sampling.kernels import filters as filtering
from stepgraph.sampling.kernels import processors as processing
from stepgraph.sampling.kernels import rejection as rejecting
from stepgraph.sampling.kernels.triton import chain, choice, filters, processors, rejection
from stepgraph.sampling.rng import Purpose
from tools.gpu.checks import spin
from tools.gpu.checks.kernels import SETTINGS, choice_inputs, filter_inputs, judgement
from tools.gpu.checks.llama import PAGE, attention_inputs
from tools.gpu.checks.masks import make_case, tag_inputs
from tools.gpu.checks.timing import answering

WIDTH = 1_003  # a prime
Call = Callable[[list[Tensor]], None]


def _numbers(device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, -9, device=device)


def cases(device: torch.device) -> Iterator[tuple[str, list[Tensor], Call, Call]]:
    """Name, output tensors, kernel, reference. Kernel and reference write to outputs that are passed in."""
    logits, words, rows, ruled = choice_inputs(device, 3, 2, WIDTH, torch.bfloat16)
    status = torch.full((3, 2), int(MaskStatus.OK), device=device)
    taken: Any = (logits, words, rows, ruled, None, status)
    outputs = [torch.full((3, 2), 7.5, device=device), _numbers(device, 3, 2)]
    yield _case("masked_argmax", outputs, choice.masked_argmax, choices.masked_argmax.run_reference, taken)

    weights, index = torch.rand(3, WIDTH, device=device), torch.arange(3, device=device)
    yield _case("race", [_numbers(device, 3)], filters.race, filtering.race.run_reference, (weights, index, index, Purpose.DRAFT))

    sampled = torch.tensor([[1, 2, 3], [4, 0, 2]], device=device)
    finite, stops = torch.ones_like(sampled, dtype=torch.bool), torch.tensor([[-1, 3], [0, -1]], device=device)
    two = torch.tensor([2, 2], device=device)
    taken = (sampled, finite, sampled[:, :2].contiguous(), two, torch.full_like(sampled, int(MaskStatus.OK)), stops, two + 7, None)
    yield _case("chain_accept", [_numbers(device, 2) for _ in range(3)], chain.chain_accept, chains.chain_accept.run_reference, taken)

    tags, owner, generated, under, home = tag_inputs(5, 3, device)
    taken = (tags, owner, generated, under, 2, home)
    yield _case("mask_status", [_numbers(device, 5, 3)], chain.mask_status, chains.mask_status.run_reference, taken)

    case = make_case(4, 2, WIDTH, torch.bfloat16).on(device)
    outputs = list(case.outputs())
    taken = case.arguments(())
    yield _case("process_logits", outputs, processors.process_logits, processing.process_logits.run_reference, taken)

    scores, params = filter_inputs(3, WIDTH)[0].to(device), torch.tensor(SETTINGS[:3], device=device)
    outputs = [torch.full((3, 1, WIDTH), 7.5, device=device)]
    yield _case("distribution", outputs, filters.distribution, filtering.distribution.run_reference, (scores[:, None], params))
    outputs = [torch.full((3, WIDTH), 7.5, device=device), _numbers(device, 3)]
    taken = (scores, params, index, index, int(Purpose.DRAFT), None, None)
    yield _case("draw", outputs, filters.draw, filtering.draw.run_reference, taken)

    inputs = judgement(device, 3, 2, WIDTH)
    yield _case(
        "reject_sample",
        [_numbers(device, 3, 3), _numbers(device, 3)],
        rejection.reject_sample,
        rejecting.reject_sample.run_reference,
        inputs,
    )


def _case(name: str, outputs: list[Tensor], program: Any, reference: Any, taken: Any) -> tuple[str, list[Tensor], Call, Call]:
    return name, outputs, lambda given: program(*taken, *given), lambda given: reference(*taken, *given)


def compare_all(device: torch.device) -> dict[str, str]:
    """Kernel name to `equal` or `differs`. RoPE runs in float32, since the interpreter truncates bfloat16."""
    found = {}
    for name, outputs, program, reference in cases(device):
        ours, theirs = ([output.clone() for output in outputs] for _ in range(2))
        program(ours)
        reference(theirs)
        same = all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(ours, theirs, strict=True))
        found[name] = "equal" if same else "differs"
    return {**found, "attention": _attention(device), "rope_and_write_kv": _rope(device), "signal_and_spin": _spin(device)}


def _spin(device: torch.device) -> str:
    """The reply is read once and cleared."""
    flags = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
    with answering(flags):
        for _ in range(3):
            spin.launch(flags)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return "equal" if flags.tolist() == [0, 0] else "differs"


def _attention(device: torch.device) -> str:
    query, keys, values, inputs = attention_inputs(device, 2, 5, 60, 64)
    arguments = (inputs.positions, inputs.slots, inputs.block_tables, PAGE, 0, 64**-0.5)
    ours, theirs = torch.empty_like(query), torch.empty_like(query)
    paged_programs.paged_attention(query, keys, values, *arguments, ours)
    paged_attention.run_reference(query, keys, values, *arguments, theirs)
    live = inputs.slots >= PAGE
    return "equal" if torch.allclose(ours[live].float(), theirs[live].float(), rtol=0.02, atol=0.02) else "differs"


def _rope(device: torch.device) -> str:
    made = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(6, 12, 64, generator=made).to(device).split([8, 2, 2], 1)
    cosines, sines = (torch.randn(6, 1, 64, generator=made).to(device) for _ in range(2))
    slots = torch.randperm(9, generator=made)[:6].to(device)
    cache = torch.zeros(4, 9, 2, 64, device=device)
    ours, theirs = (torch.empty(6, 8, 64, device=device) for _ in range(2))
    rope_programs.rope_and_write_kv(query, key, value, cosines, sines, slots, cache[0], cache[1], ours)
    rope_and_write_kv.run_reference(query, key, value, cosines, sines, slots, cache[2], cache[3], theirs)
    return "equal" if torch.equal(ours, theirs) and torch.equal(cache[:2], cache[2:]) else "differs"


def main() -> int:
    warnings.filterwarnings("ignore", message="overflow encountered", category=RuntimeWarning)  # from numpy, in the interpreter
    interpreted = bool(triton.knobs.runtime.interpret)
    found = compare_all(torch.device("cpu" if interpreted else "cuda"))
    print(json.dumps({"interpreted": interpreted, "programs": found}))
    return 0 if set(found.values()) == {"equal"} else 1


if __name__ == "__main__":
    sys.exit(main())
