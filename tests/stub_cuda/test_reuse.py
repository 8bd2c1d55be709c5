"""Steps that free memory while another stream uses it, and steps that keep tensors, in captures with the real allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.graphs.tape import test_reuse as reuse
from tests.stub_cuda.subject import Backend, CaptureError, StaticBuffers


def _addresses(step: Callable[[StaticBuffers], None], backend: Backend, buffers: StaticBuffers) -> list[int]:
    """The addresses of the results of a step's operations, as its capture saw them."""
    found = list[int]()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and buffers.owner_of(result) is None:
                found.append(result.untyped_storage().data_ptr())
            return result

    def noted(b: StaticBuffers) -> None:
        found.clear()
        with Noting():
            step(b)

    backend.capture(noted, buffers)
    return found


def test_the_allocator_reuses_what_a_checked_capture_refuses(backend: Backend) -> None:
    buffers = StaticBuffers(reuse.SPECS, backend.device)
    first, second = _addresses(reuse.REUSED["dropped"], backend, buffers)
    assert first == second, "the allocator gives freed memory to the next allocation on the same stream"
    assert len(set(_addresses(reuse.ORDERED["kept"], backend, buffers))) == 2
    for step in reuse.REUSED.values():
        with pytest.raises(CaptureError, match=r"race\] .* may get the memory of a dropped tensor"):
            backend.capture(step, buffers, check="twice")
    for step in reuse.ORDERED.values():
        backend.capture(step, buffers, check="twice")


def test_memory_is_not_reused_after_record_stream(backend: Backend) -> None:
    def use(made: list[torch.Tensor], b: StaticBuffers) -> None:
        b.y.copy_(made[0])
        made[0].record_stream(torch.cuda.current_stream())

    buffers, step = StaticBuffers(reuse.SPECS, backend.device), reuse.forked(side=use)
    assert len(set(_addresses(step, backend, buffers))) == 2
    backend.capture(step, buffers, check="twice")


@pytest.mark.parametrize("make", reuse.LAZY.values(), ids=list(reuse.LAZY))
def test_a_tensor_that_the_run_before_the_capture_made_is_refused(make: Callable[[StaticBuffers], torch.Tensor], backend: Backend) -> None:
    buffers, step = StaticBuffers(reuse.SPECS, backend.device), reuse.Lazy(make)
    with pytest.raises(CaptureError, match="that the step kept from an earlier run") as caught:
        backend.capture(step, buffers)
    assert caught.value.rule == "kept-tensor" and caught.value.file == reuse.__file__ and "# kept" in caught.value.source
    step.table, step.is_used = None, False
    backend.capture(step, buffers)


def test_a_kept_tensor_is_found_at_the_address_of_garbage(backend: Backend) -> None:
    """A collection while the step runs would free memory of a reference cycle, at whose address the kept tensor would not be new."""

    def make(b: StaticBuffers) -> torch.Tensor:
        gc.set_threshold(1, 1, 1)
        _ = [[] for _ in range(99)]  # each may start a collection
        gc.set_threshold(10**6)
        return torch.zeros(8, device=b.device)[4:]

    def leave_garbage() -> None:
        cycle: list[Any] = [torch.zeros(8, device=backend.device)]
        cycle.append(cycle)

    buffers, step, thresholds = StaticBuffers(reuse.SPECS, backend.device), reuse.Lazy(make), gc.get_threshold()
    gc.set_threshold(10**6)
    backend.run(leave_garbage)
    try:
        with pytest.raises(CaptureError, match="that the step kept from an earlier run"):
            backend.capture(step, buffers)
    finally:
        gc.set_threshold(*thresholds)
