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
CALLS = {"accept": "accept_token", "fill": "fill_next_token_bitmask", "rollback": "rollback"}  # by function of a native row


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

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Each call of the function is an operation of the point."""

        def call(*arguments: Any) -> Any:
            self.strike()
            return function(*arguments)

        return call


Context = contextlib.AbstractContextManager[None]
Point = Callable[[Engine, Fault], Context]


class Failing:
    """Wraps a library object; one call of one method fails."""

    def __init__(self, original: Any, name: str, fault: Fault) -> None:
        self._original, self._name, self._fault = original, name, fault

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._original, name)
        return found if name != self._name else self._fault.before(found)


@contextlib.contextmanager
def replaced(owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A method, until the context ends, is what `change` makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, change(getattr(owner, name)))
        yield


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
                    inner.library_matcher = Failing(inner.library_matcher, CALLS[operation], fault)  # type: ignore[attr-defined]
            return row_of_link

        with replaced(engine._parts.host_link, "row", lambda _: row):
            yield

    return point


def compile_fails(engine: Engine, fault: Fault) -> Context:
    compiler = engine._parts.compiler
    assert compiler is not None
    compiler._cache.clear()  # otherwise nothing is compiled
    return replaced(compiler._backends, "build", fault.before)


def ring_full(engine: Engine, fault: Fault) -> Context:
    """The copy out of a reused ring slot is reported as pending, so that the writer has to wait."""
    return replaced(TapeEvent, "query", lambda original: lambda event: not fault.due() and original(event))


def pages_empty(engine: Engine, fault: Fault) -> Context:
    return replaced(engine._scheduler.rows, "has_room", lambda original: lambda job: not fault.due() and original(job))


def target_not_finite(engine: Engine, fault: Fault) -> Context:
    return _countdown(engine, fault, "target_fault")


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


def host_node_raises(engine: Engine, fault: Fault) -> Context:
    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(node: HostCall, skip: bool) -> None:
            if not skip and fault.due():
                raise HostNodeError(node.name, RuntimeError(CAUSE))
            original(node, skip)

        return call

    return replaced(HostCall, "__call__", change)


def replay_raises(engine: Engine, fault: Fault) -> Context:
    """A device operation fails in the middle of a round."""
    return replaced(
        Segment, "__call__", lambda original: lambda segment, skip: (original if skip else fault.before(original))(segment, skip)
    )


def between_rounds_raises(engine: Engine, fault: Fault) -> Context:
    """Work between rounds fails: prompts through both models, tables, copies in and out."""
    return replaced(TapeBackend, "run", lambda original: lambda backend, function: original(backend, fault.before(function)))


def push_batch_raises(engine: Engine, fault: Fault) -> Context:
    return replaced(engine._parts.host_link, "push_batch", fault.before)
