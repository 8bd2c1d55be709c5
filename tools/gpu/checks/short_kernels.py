"""Every Triton kernel once on small inputs against its reference; short enough for compute-sanitizer or Triton's interpreter.

TRITON_INTERPRET=1 selects interpretation for the whole process. Prints one JSON document last.

    TRITON_INTERPRET=1 python -m tools.gpu.checks.short_kernels
    compute-sanitizer python -m tools.gpu.checks.short_kernels
    python -m tools.gpu.checks.short_kernels masked_argmax draw
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent.parent))

from tools.gpu_check import find_stepgraph

if __name__ == "__main__":
    find_stepgraph()

import torch
import triton

from tools.gpu.checks import grammar_rows, layers, operations, rings
from tools.gpu.checks.llama import attention_call, rope_call
from tools.gpu.checks.operations import Call

WIDTH, ALIGNED_WIDTH = 1_003, 1_008  # a prime; a multiple of 16, but not of a tile


def calls(device: torch.device) -> tuple[Call, ...]:
    """Layers run in float32, since the interpreter truncates bfloat16."""
    return (
        operations.masked_argmax(device, 3, 2, WIDTH),
        operations.masked_argmax(device, 3, 2, ALIGNED_WIDTH, torch.bfloat16),
        operations.chain_accept(device, 2, 2),
        operations.mask_status(device, 5, 3),
        operations.process_logits(device, 4, 2, WIDTH),
        operations.distribution(device, 8, WIDTH),  # every kind of setting; the row without a finite logit has top-k
        operations.draw(device, 8, WIDTH),
        operations.log_probabilities(device, 3, 2, WIDTH),
        operations.top_logprobs(device, 5, 2, WIDTH),
        operations.reject_sample(device, 3, 2, WIDTH),
        grammar_rows.call_of(device, 8, WIDTH, forces=True),
        rope_call(device, torch.float32, 6, 64),
        *layers.calls(device, 3, 72, torch.float32),
    )


def programs(device: torch.device) -> dict[str, Callable[[], bool]]:
    """Kernel name to its comparison with the reference."""
    equal: dict[str, list[Call]] = {}
    for call in calls(device):
        equal.setdefault(call.operation.name, []).append(call)
    return {
        **{name: partial(_are_equal, found) for name, found in equal.items()},
        **rings.programs(device),
        "attention": partial(_attention_is_close, device),
    }


def compare(device: torch.device, names: Collection[str]) -> dict[str, str]:
    """Kernel name to `equal` or `differs`. names: of kernels; empty for all."""
    checks = programs(device)
    return {name: "equal" if checks[name]() else "differs" for name in names or checks}


def _are_equal(found: Sequence[Call]) -> bool:
    return not any(any(call.different_rows(call.triton)) for call in found)


def _attention_is_close(device: torch.device) -> bool:
    call, inputs = attention_call(device, 2, 5, 60, 64)
    (found,), (expected,) = call.results(call.triton), call.results(call.operation.run_reference)
    live = inputs.slots >= inputs.page_size
    return torch.allclose(found[live].float(), expected[live].float(), rtol=0.02, atol=0.02)


def main() -> int:
    warnings.filterwarnings("ignore", message="overflow encountered", category=RuntimeWarning)  # from numpy, in the interpreter
    interpreted = bool(triton.knobs.runtime.interpret)
    if interpreted:
        import tests.helpers.fast_interpreter  # noqa: F401
    found = compare(torch.device("cpu" if interpreted else "cuda"), sys.argv[1:])
    print(json.dumps({"interpreted": interpreted, "programs": found}))
    return 0 if set(found.values()) == {"equal"} else 1


if __name__ == "__main__":
    sys.exit(main())
