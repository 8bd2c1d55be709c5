"""Bytes that every Triton program loads and stores in a launch, counted in Triton's interpreter.

Launches of a round: two rows, three drafts; for a program with several launches, the one with most bytes. An address
counts once per instruction and program instance, since a warp reads it once; no caching between instructions is assumed, and atomic updates
are not counted. TRITON_INTERPRET=1 must be set.

    TRITON_INTERPRET=1 python -m tools.launch_bytes
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton

from stepgraph.graphs import publishing
from stepgraph.graphs.round_specs import Control, Counter
from stepgraph.graphs.row_layout import ResultLayout
from tools.gpu.checks import grammar_rows, layers, operations
from tools.gpu.checks.llama import attention_call, rope_call
from tools.gpu.checks.operations import Call, filler

WIDTH = 128_256  # tokens of Llama 3
ROWS, DRAFTS, SIZE, HEAD, KEYS = 2, 3, 2048, 64, 1000
CPU = torch.device("cpu")


class MovedBytes:
    """Bytes loaded and stored."""

    def __init__(self) -> None:
        self.loaded = self.stored = 0


@contextlib.contextmanager
def counting() -> Iterator[MovedBytes]:
    """Count accesses by wrapping the interpreter's loads and stores."""
    builder: Any = triton.runtime.interpreter.InterpreterBuilder
    load, store, moved = builder.create_masked_load, builder.create_masked_store, MovedBytes()

    def bytes_of(pointers: Any, mask: Any) -> int:
        width: int = pointers.get_element_ty().primitive_bitwidth
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))[mask.data.astype(bool)]
        return len(np.unique(addresses)) * width // 8

    def counted_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        moved.loaded += bytes_of(pointers, mask)
        return load(self, pointers, mask, *others)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        moved.stored += bytes_of(pointers, mask)
        return store(self, pointers, value, mask, *others)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        yield moved
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def calls(width: int, size: int) -> Iterator[Call]:
    positions, tokens = DRAFTS + 1, ROWS * (DRAFTS + 1)
    yield operations.masked_argmax(CPU, ROWS, positions, width)
    yield operations.chain_accept(CPU, ROWS, DRAFTS)
    yield operations.mask_status(CPU, ROWS, positions)
    yield operations.process_logits(CPU, ROWS, positions, width)
    yield operations.distribution(CPU, ROWS, width)
    yield operations.draw(CPU, ROWS, width)
    yield operations.log_probabilities(CPU, ROWS, positions, width)
    yield operations.top_logprobs(CPU, ROWS, positions, width)
    yield operations.reject_sample(CPU, ROWS, DRAFTS, width)
    yield grammar_rows.call_of(CPU, 8, width, forces=True)  # some rows have an illegal draft or are inert
    yield rope_call(CPU, torch.bfloat16, tokens, HEAD)
    yield attention_call(CPU, ROWS, positions, KEYS, HEAD)[0]
    yield from layers.calls(CPU, tokens, size)
    yield from _ring_calls()


def _ring_calls() -> Iterator[Call]:
    slots, shape, width = 4, f"B={ROWS} K={DRAFTS}", ResultLayout(DRAFTS).width
    counters, rows, results = filler(CPU, len(Counter)).fill_(1), torch.arange(ROWS), filler(CPU, ROWS, width)
    logprobs = torch.zeros(ROWS, DRAFTS + 1, 2)
    yield Call(publishing.take_batch, shape, (counters, filler(CPU, slots, ROWS)), (rows.clone(),))
    published = (results, logprobs, counters[Counter.PUBLISHED :], filler(CPU, slots, ROWS, width), torch.zeros(slots, *logprobs.shape))
    yield Call(publishing.publish_results, shape, published, ())
    done, headers = torch.zeros(1, dtype=torch.int32), filler(CPU, slots, len(Counter))
    ended = (results, rows, filler(CPU, len(Control)), counters, done, headers, ROWS, slots)
    yield Call(publishing.end_round, shape, ended, ())


def counted(width: int, size: int) -> dict[str, dict[str, Any]]:
    """Program name to its launch and the bytes of that launch."""
    executor: Any = triton.runtime.interpreter.GridExecutor
    launch, found, current = executor.__call__, dict[str, dict[str, Any]](), ""

    def counted_launch(self: Any, *arguments: Any, **constants: Any) -> None:
        with counting() as moved:
            launch(self, *arguments, **constants)
        name, total = self.fn.__name__, moved.loaded + moved.stored
        if total > found.get(name, {"bytes": -1})["bytes"]:
            found[name] = {"launch": current, "bytes": total}

    executor.__call__ = counted_launch
    try:
        for call in calls(width, size):
            current = call.name
            call.triton(*call.inputs, *call.outputs)
    finally:
        executor.__call__ = launch
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=WIDTH, metavar="TOKENS", help="width of logits (default: %(default)s)")
    parser.add_argument("--size", type=int, default=SIZE, metavar="ELEMENTS", help="of states (default: %(default)s)")
    options = parser.parse_args()
    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"
    import tests.helpers.fast_interpreter  # noqa: F401

    warnings.filterwarnings("ignore", category=RuntimeWarning)  # from numpy, in the interpreter
    print(json.dumps(counted(options.vocabulary, options.size)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
