"""Fault injection points: context managers that make the n-th operation of a component fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph import Engine, Job
from stepgraph.graphs import BufferSpec, Limits, StaticBuffers
from stepgraph.graphs.errors import HostNodeError
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.graphs.tape.backend import TapeBackend, TapeEvent
from stepgraph.graphs.tape.player import HostCall, Segment
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.sampling.grammar.link.native import NativeRow
from stepgraph.sampling.grammar.link.protocol import MatcherRow
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarMatcher
from tests.helpers.planted import fail, innermost, plant

CAUSE = "planted fault"
DRAFT_NONSENSE = (float("nan"), float("inf"), float("-inf"))
CALLS = {  # the library methods that a Python matcher calls
    "xgrammar": {"accept": "accept_token", "fill": "fill_next_token_bitmask", "rollback": "rollback"},
    "llguidance": {"accept": "try_consume_tokens", "fill": "unsafe_compute_mask_ptr", "rollback": "rollback"},
}


class Fault:
    """Makes operation `number` of a point fail, counted from 1. `seen`: operations so far."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, 0

    def due(self) -> bool:
        self.seen += 1
        return self.seen == self.number

    @property
    def struck(self) -> bool:
        return 1 <= self.number <= self.seen

    def strike(self) -> None:
        if self.due():
            raise RuntimeError(f"{CAUSE} {self.number}")


Point = Callable[[Engine, Fault], contextlib.AbstractContextManager[None]]


class Failing:
    """Wraps a library object; one call of one method fails."""

    def __init__(self, original: Any, name: str, fault: Fault) -> None:
        self._original, self._name, self._fault = original, name, fault

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._original, name)
        if name != self._name:
            return found

        def call(*arguments: Any) -> Any:
            self._fault.strike()
            return found(*arguments)

        return call


def matcher_call(library: str, operation: str) -> Point:
    """Fail one matcher call by host nodes, for the first request served by `library`."""

    @contextlib.contextmanager
    def point(engine: Engine, fault: Fault) -> Iterator[None]:
        original, found = engine._parts.host_link.row, list[int]()

        def row(owner: int, matcher: Matcher, committed: int = 0) -> MatcherRow:
            row_of_link, inner = original(owner, matcher, committed), innermost(matcher)
            if not found and isinstance(inner, XGrammarMatcher) == (library == "xgrammar"):
                found.append(row_of_link.owner)
                if isinstance(row_of_link, NativeRow):
                    plant(row_of_link, operation, lambda entry, *rest: fail(rest[-1], CAUSE.encode()) if fault.due() else entry(*rest))
                else:
                    inner.library_matcher = Failing(inner.library_matcher, CALLS[library][operation], fault)  # type: ignore[attr-defined]
            return row_of_link

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._parts.host_link, "row", row)
            yield

    return point


@contextlib.contextmanager
def compile_fails(engine: Engine, fault: Fault) -> Iterator[None]:
    compiler = engine._parts.compiler
    assert compiler is not None
    compiler._cache.clear()  # otherwise nothing is compiled
    original = compiler._backends.build

    def build(*arguments: Any) -> Any:
        fault.strike()
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler._backends, "build", build)
        yield


@contextlib.contextmanager
def ring_full(engine: Engine, fault: Fault) -> Iterator[None]:
    """The copy out of a reused ring slot is reported as pending, so that the writer has to wait."""
    original = TapeEvent.query
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TapeEvent, "query", lambda event: not fault.due() and original(event))
        yield


@contextlib.contextmanager
def pages_empty(engine: Engine, fault: Fault) -> Iterator[None]:
    rows = engine._scheduler.rows
    original = rows.has_room
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "has_room", lambda job: not fault.due() and original(job))
        yield


@contextlib.contextmanager
def target_not_finite(engine: Engine, fault: Fault) -> Iterator[None]:
    with _countdown(engine, fault, "target_fault"):
        yield


def draft_not_finite(nonsense: float) -> Point:
    @contextlib.contextmanager
    def point(engine: Engine, fault: Fault) -> Iterator[None]:
        engine.backend.run(lambda: engine.buffers.draft_nonsense.fill_(nonsense))
        with _countdown(engine, fault, "draft_fault"):
            yield

    return point


@contextlib.contextmanager
def _countdown(engine: Engine, fault: Fault, name: str) -> Iterator[None]:
    """Count the passes of a model on the device, in the graph."""
    counter = engine.buffers[name]
    engine.backend.run(lambda: counter.fill_(fault.number))
    yield
    engine.backend.synchronize()
    fault.seen = fault.number - int(counter)


class FaultyTarget(ToyTarget):
    """The first row of a batch is NaN in the pass at which the countdown `target_fault` reaches zero."""

    def cache_specs(self, limits: Limits) -> tuple[BufferSpec, ...]:
        return (*super().cache_specs(limits), BufferSpec("target_fault", (1,), torch.int64))

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        output = super().forward(inputs, buffers)
        return output._replace(hidden=_corrupt(output.hidden, buffers.target_fault, float("nan")))

    def logits(self, hidden: Tensor) -> Tensor:
        return _propagate(hidden, super().logits(hidden.nan_to_num(0.0, 0.0, 0.0)))


class FaultyDraft(ToyDraft):
    """Like FaultyTarget, for a draft; `draft_nonsense` holds the replacement value."""

    def cache_specs(self, limits: Limits) -> tuple[BufferSpec, ...]:
        own = BufferSpec("draft_fault", (1,), torch.int64), BufferSpec("draft_nonsense", (1,), torch.float32)
        return (*super().cache_specs(limits), *own)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        output = super().forward(inputs, buffers)
        return output._replace(hidden=_corrupt(output.hidden, buffers.draft_fault, buffers.draft_nonsense))

    def logits(self, hidden: Tensor) -> Tensor:
        return _propagate(hidden, super().logits(hidden.nan_to_num(0.0, 0.0, 0.0)))


def _corrupt(hidden: Tensor, countdown: Tensor, value: Tensor | float) -> Tensor:
    countdown.sub_(1)
    first = torch.arange(len(hidden), device=hidden.device) == 0
    return torch.where(((countdown == 0) & first)[:, None, None], value, hidden)


def _propagate(hidden: Tensor, logits: Tensor) -> Tensor:
    return torch.where(hidden[..., :1].isfinite(), logits, hidden[..., :1])


def function_raises(fault: Fault) -> Callable[[Job], list[int]]:
    """A host drafter that raises once."""

    def draft(job: Job) -> list[int]:
        fault.strike()
        return [7, 8]

    return draft


@contextlib.contextmanager
def host_node_raises(engine: Engine, fault: Fault) -> Iterator[None]:
    original = HostCall.__call__

    def call(node: HostCall, skip: bool) -> None:
        if not skip and fault.due():
            raise HostNodeError(node.name, RuntimeError(CAUSE))
        original(node, skip)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCall, "__call__", call)
        yield


@contextlib.contextmanager
def replay_raises(engine: Engine, fault: Fault) -> Iterator[None]:
    """A device operation fails in the middle of a round."""
    original = Segment.__call__

    def call(segment: Segment, skip: bool) -> None:
        if not skip:
            fault.strike()
        original(segment, skip)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "__call__", call)
        yield


@contextlib.contextmanager
def between_rounds_raises(engine: Engine, fault: Fault) -> Iterator[None]:
    """Work between rounds fails: prompts through both models, tables, copies in and out."""
    original = TapeBackend.run

    def run(backend: TapeBackend, function: Callable[[], object]) -> None:
        def job() -> None:
            fault.strike()
            function()

        original(backend, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TapeBackend, "run", run)
        yield


@contextlib.contextmanager
def push_batch_raises(engine: Engine, fault: Fault) -> Iterator[None]:
    original = engine._parts.host_link.push_batch

    def push_batch(batch: Any) -> None:
        fault.strike()
        original(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._parts.host_link, "push_batch", push_batch)
        yield
