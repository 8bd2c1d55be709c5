"""Memory that a step frees while another stream uses it, and tensors that a step keeps from one run to the next."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stepgraph import Engine, EngineConfig
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.context import current_context
from stepgraph.graphs.errors import CaptureError
from stepgraph.graphs.tape.backend import TapeBackend
from stepgraph.runtime.models.toy import ToyTarget

Step = Callable[[StaticBuffers], None]
SPECS = [BufferSpec(name, (4,), torch.float32) for name in ("x", "y", "z")]


def forked(
    after: Callable[[list[Tensor]], None] = lambda made: made.clear(),
    side: Callable[[list[Tensor], StaticBuffers], object] = lambda made, b: b.y.copy_(made[0]),
    joined_first: bool = False,
    allocate: Callable[[StaticBuffers], Tensor] = lambda b: b.x + 1,
) -> Step:
    """A tensor made on main and used on another stream; then `after`, and another tensor made on main before or after the join."""

    def step(b: StaticBuffers) -> None:
        context = current_context()
        made = [b.x * 2]
        fork = context.record()
        with context.stream("side"):
            context.wait(fork)
            side(made, b)
            join = context.record()
        after(made)
        if joined_first:
            context.wait(join)
        other = allocate(b)  # reuse
        context.wait(join)
        b.z.copy_(other)

    return step


def made_on_the_side(b: StaticBuffers) -> None:
    context = current_context()
    fork = context.record()
    with context.stream("side"):
        context.wait(fork)
        made = b.x * 2
        done = context.record()
    context.wait(done)
    b.y.copy_(made)
    del made
    with context.stream("side"):
        b.z.copy_(b.x + 1)  # reuse
        done = context.record()
    context.wait(done)


def written_on_another_stream(b: StaticBuffers) -> None:
    context = current_context()
    made = b.x * 2
    fork = context.record()
    with context.stream("side"):
        context.wait(fork)
        b.y.copy_(made)
        join = context.record()
    del made
    empty = torch.empty_like(b.x)
    with context.stream("third"):
        context.wait(fork)
        empty.fill_(3)  # reuse
        third = context.record()
    context.wait(third)
    context.wait(join)
    b.z.copy_(empty)


REUSED: dict[str, Step] = {
    "dropped": forked(),
    "a view is dropped": forked(side=lambda made, b: b.y[:2].copy_(made[0].view(2, 2)[1])),
    "written on the side": forked(side=lambda made, b: made[0].add_(1)),
    "made on the side": made_on_the_side,
    "written on a third stream": written_on_another_stream,
}
ORDERED: dict[str, Step] = {
    "joined before": forked(joined_first=True),
    "kept": forked(after=lambda made: None),
    "a view is kept": forked(after=lambda made: made.append(made.pop()[1:])),
    "no other allocation": forked(allocate=lambda b: b.x.mul_(3)),
    "through a buffer": forked(side=lambda made, b: b.y.mul_(2)),
}


@pytest.mark.parametrize("step", REUSED.values(), ids=list(REUSED))
def test_memory_that_another_stream_still_uses_is_not_reused(step: Step) -> None:
    with pytest.raises(CaptureError, match=r"on stream '\w+' at .* may get the memory of a dropped tensor that") as caught:
        TapeBackend().capture(step, StaticBuffers(SPECS))
    assert caught.value.rule == "race" and caught.value.file == __file__
    lines = "# reuse" in caught.value.source or "lambda b: b.x + 1" in caught.value.source
    assert lines, caught.value.source


@pytest.mark.parametrize("step", ORDERED.values(), ids=list(ORDERED))
def test_ordered_reuse_is_accepted(step: Step) -> None:
    buffers = StaticBuffers(SPECS)
    recorded = TapeBackend().capture(step, buffers)
    buffers.x.fill_(1)
    recorded.replay()
    assert buffers.z[0] in (2, 3)


class Lazy:
    """A step with a table that its first run makes."""

    def __init__(self, make: Callable[[StaticBuffers], Tensor]) -> None:
        self.make, self.table, self.is_used = make, None, True  # type: tuple[Callable[[StaticBuffers], Tensor], Tensor | None, bool]

    def __call__(self, b: StaticBuffers) -> None:
        if self.table is None:
            self.table = self.make(b)
        b.y.copy_(self.table if self.is_used else b.x)  # kept


LAZY: dict[str, Callable[[StaticBuffers], Tensor]] = {
    "of a buffer": lambda b: b.x * 2,
    "of constants": lambda b: torch.arange(4, device=b.device).float().cos(),
    "a view": lambda b: torch.zeros(8, device=b.device)[4:],
}


@pytest.mark.parametrize("make", LAZY.values(), ids=list(LAZY))
def test_a_tensor_that_an_earlier_run_made_is_refused(make: Callable[[StaticBuffers], Tensor]) -> None:
    buffers, step = StaticBuffers(SPECS), Lazy(make)
    with pytest.raises(CaptureError, match="that the step kept from an earlier run") as caught:
        TapeBackend().capture(step, buffers)
    assert caught.value.rule == "kept-tensor" and "# kept" in caught.value.source
    step.table, step.is_used = None, False
    TapeBackend().capture(step, buffers)


def test_a_table_that_is_a_constant_is_accepted() -> None:
    step = Lazy(LAZY["of constants"])
    step.table = torch.arange(4).float().cos()
    buffers = StaticBuffers(SPECS, constants={"table": step.table})
    TapeBackend().capture(step, buffers).replay()
    assert torch.equal(buffers.y, step.table)


def test_a_function_runs_again_in_its_first_capture_only() -> None:
    """Unless two streams use a tensor that it makes."""
    runs = list[int]()

    def step(b: StaticBuffers) -> None:
        runs.append(1)
        b.y.copy_(b.x + 1)

    backend, buffers = TapeBackend(), StaticBuffers(SPECS)
    for expected in (2, 3, 4):
        backend.capture(step, buffers)
        assert len(runs) == expected


def test_an_engine_refuses_a_model_that_keeps_a_tensor_before_the_first_round() -> None:
    class Target(ToyTarget):
        table: Tensor | None = None

        def logits(self, hidden: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(1, device=hidden.device)
            return super().logits(hidden) + self.table  # kept

    with (
        Engine(Target(16), config=EngineConfig(max_rows=1, max_length=32, backend="tape")) as engine,
        pytest.raises(CaptureError, match="that the step kept from an earlier run") as caught,
    ):
        engine.generate([1, 2], max_new_tokens=4)
    assert caught.value.rule == "kept-tensor" and "# kept" in caught.value.source
