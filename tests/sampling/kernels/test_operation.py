"""Every operation, on the calls that the GPU checks make too: its registration, its kernel in C, its replay; and a missing library."""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from stepgraph.graphs import BufferSpec, StaticBuffers, TapeBackend
from stepgraph.graphs.tape.replay_ops import same_bits
from stepgraph.sampling import native
from stepgraph.sampling.grammar.automaton import library as automaton_library
from stepgraph.sampling.kernels.operation import Operation
from stepgraph.sampling.native import Unavailable
from tools.gpu.checks import layers, llama, operations

CPU, NUMBERS = torch.device("cpu"), torch.float32
CALLS = {
    call.name: call
    for call in (
        operations.masked_argmax(CPU, 4, 2, 101, NUMBERS),
        operations.free_argmax(CPU, 4, 2, 101, NUMBERS),
        operations.chain_accept(CPU, 4, 3),
        operations.mask_status(CPU, 5, 3),
        operations.process_logits(CPU, 4, 2, 90, NUMBERS),
        operations.process_logits(CPU, 4, 1, 90, NUMBERS, draft_vocabulary=20, masked=False, first=2),
        operations.distribution(CPU, 8, 101),
        operations.draw(CPU, 8, 101),
        operations.log_probabilities(CPU, 3, 2, 101),
        operations.top_logprobs(CPU, 5, 2, 101),
        *(operations.reject_sample(CPU, 6, k, 50) for k in (0, 2)),
        replace(llama.attention_call(CPU, 2, 5, 60, 64)[0], tol=0.02),
        llama.rope_call(CPU, NUMBERS, 6, 64),
        *layers.calls(CPU, 4, 72, NUMBERS),
    )
}
IN_C = [name for name, call in CALLS.items() if call.operation.c and not native.why_not() and not name.endswith(("free", " float16"))]
# One call for each operation and each choice of optional arguments.
SIGNATURES = {(call.operation.name, *map(type, call.inputs)): name for name, call in CALLS.items()}
in_c = pytest.mark.parametrize("name", IN_C)


def spread(tensor: Tensor) -> Tensor:
    """The same values with gaps between them."""
    room = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    room[..., 0] = tensor
    return room[..., 0]


@pytest.mark.parametrize("name", SIGNATURES.values())
def test_registration(name: str) -> None:
    call = CALLS[name]
    opcheck(call.operation.out, (*call.inputs, *call.outputs))


@in_c
def test_c_equals_the_reference(name: str) -> None:
    call = CALLS[name]
    assert call.operation.prepare(*call.inputs, *call.outputs) is not None, "C supports these inputs"
    assert not any(call.different_rows())


@in_c
def test_outputs_with_gaps_run_as_the_reference(name: str) -> None:
    call = CALLS[name]
    gaps = replace(
        call,
        inputs=tuple(spread(value) if index in call.writes else value for index, value in enumerate(call.inputs)),
        outputs=tuple(map(spread, call.outputs)),
    )
    assert call.operation.prepare(*gaps.inputs, *gaps.outputs) is None, "C does not support outputs with gaps"
    call.operation.out(*gaps.inputs, *gaps.outputs)
    found = [*gaps.outputs, *(gaps.inputs[index] for index in call.writes)]
    assert all(map(same_bits, found, call.results(call.operation.run_reference)))


@pytest.mark.parametrize("name", CALLS)
def test_a_tape_replays_the_operation_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded with other inputs; a replay allocates nothing, and calls a kernel in C without torch."""
    call = CALLS[name]
    arguments = {f"argument_{index}": value for index, value in enumerate((*call.inputs, *call.outputs))}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    buffers = StaticBuffers([BufferSpec(name, tuple(value.shape), value.dtype) for name, value in tensors.items()])
    for name, value in tensors.items():
        buffers[name].copy_(value.flip(0))
    backend = TapeBackend(poison="every")
    recorded = backend.capture(lambda b: call.operation.out(*[b[each] if each in b else arguments[each] for each in arguments]), buffers)
    assert recorded.report.nodes == {"kernel": 1}
    for name, value in tensors.items():
        buffers[name].copy_(value)
    monkeypatch.setattr(Operation, "prepare", None if call.name in IN_C else Operation.prepare)
    recorded.replay()
    monkeypatch.undo()
    written = [f"argument_{index}" for index in (*range(len(call.inputs), len(arguments)), *call.writes)]
    assert all(map(same_bits, (buffers[name] for name in written), call.results(call.operation.out)))
    backend.close()


@in_c
def test_without_the_library_the_reference_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, reason = CALLS[name], Unavailable("they were not built")
    monkeypatch.setattr(native, "load", lambda: reason)
    assert call.operation.prepare(*call.inputs, *call.outputs) is None
    assert all(map(same_bits, call.results(call.operation.out), call.results(call.operation.run_reference)))


def test_missing_library_is_reported_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise Unavailable("they were not built")

    monkeypatch.setattr(native, "find_library", missing)
    native.load.cache_clear()

    def caller() -> weakref.ref[object]:
        held = threading.Event()
        assert native.why_not() == "they were not built"
        with contextlib.suppress(Unavailable):
            automaton_library.functions()
        return weakref.ref(held)

    try:
        assert caller()() is None, "the reason keeps the frames of its first callers"
    finally:
        monkeypatch.undo()
        native.load.cache_clear()
