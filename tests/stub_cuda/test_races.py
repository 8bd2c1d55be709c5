"""Races in captured graphs: what each node reads and writes, under the edges of the graph, on the cases of the tape's race checker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph import Engine
from stepgraph.graphs.buffers import storage_key
from stepgraph.graphs.cuda.context import CudaCaptureContext
from stepgraph.graphs.graph_key import FULL
from stepgraph.graphs.graph_set import graph_keys
from stepgraph.graphs.tape.races import Region, region_of
from stepgraph.graphs.tape.replay_ops import OpCall, tensors_in
from tests.graphs.tape.test_races import DISJOINT, PAIRS, SPECS, forked
from tests.stub_cuda import counters
from tests.stub_cuda.subject import Backend, CaptureError, StaticBuffers
from tests.stub_cuda.test_rounds import make

Step = Callable[[StaticBuffers], object]


class Access(NamedTuple):
    name: str
    region: Region  # of the address space
    write: bool


class Accesses(TorchDispatchMode):
    """What the nodes of a capture access, by their index in the graph."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._driver, self._main = backend.driver, torch.cuda.current_stream().cuda_stream
        self.of_node: dict[int, list[Access]] = {}

    def count(self) -> int:
        return int(self._driver.captured_nodes(self._main))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        call, first = OpCall(func, args, kwargs or {}), self.count()
        result = func(*args, **call.kwargs)
        known = {storage_key(tensor) for tensor in call.inputs}
        made = [tensor for tensor in tensors_in(result) if storage_key(tensor) not in known]
        reads = [tensor for tensor in call.inputs if not any(tensor is target for target in call.targets)]
        self.add(call.schema.name, range(first, self.count()), reads, [*call.targets, *made])
        return result

    def add(self, name: str, nodes: range, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        accesses = [*((tensor, False) for tensor in reads), *((tensor, True) for tensor in writes)]
        found = [Access(name, region_of(tensor), write) for tensor, write in accesses]
        self.of_node.update(dict.fromkeys(nodes, found))


def races(backend: Backend, step: Step, buffers: StaticBuffers) -> list[str]:
    """Pairs of accesses to one byte, one of them a write, by nodes that no path connects."""
    taken: list[Accesses] = []

    def watched(b: StaticBuffers) -> None:
        if not torch.cuda.is_current_stream_capturing():
            step(b)
            return
        taken.append(Accesses(backend))
        with pytest.MonkeyPatch.context() as patch, taken[0]:
            host_node = CudaCaptureContext.host_node

            def declared(self: CudaCaptureContext, name: str, function: Callable[[], object], **access: Sequence[Tensor]) -> None:
                first = taken[0].count()
                host_node(self, name, function, **access)
                taken[0].add(name, range(first, first + 1), access.get("reads", ()), access.get("writes", ()))

            patch.setattr(CudaCaptureContext, "host_node", declared)
            step(b)

    recorded: Any = backend.capture(watched, buffers)
    nodes, accesses = counters.graph_nodes(recorded._recording.graph.raw_cuda_graph()), taken[0].of_node
    assert all(index in accesses for index, node in enumerate(nodes) if node.type in ("kernel", "copy", "fill", "host"))
    before = list[int]()  # for each node, the nodes with a path to it, as a bit set
    found = []
    for index, node in enumerate(nodes):
        before.append(0)
        for earlier in node.dependencies:
            before[index] |= before[earlier] | 1 << earlier
        for other in (other for other in range(index) if not before[index] >> other & 1):
            pairs = ((a, b) for a in accesses.get(other, ()) for b in accesses.get(index, ()) if a.write or b.write)
            found += [f"{a.name} and {b.name}" for a, b in pairs if np.shares_memory(a.region, b.region)]
    return found


def on(backend: Backend) -> StaticBuffers:
    return StaticBuffers(SPECS, backend.device)


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "one generator"])
def test_planted_race_is_found_in_the_graph(name: str, backend: Backend) -> None:
    _, main, side = PAIRS[name]
    assert races(backend, forked(main, side), on(backend))
    assert not races(backend, forked(main, side, joined_first=True), on(backend))


@pytest.mark.parametrize("name", DISJOINT)
def test_disjoint_accesses_are_no_race(name: str, backend: Backend) -> None:
    assert not races(backend, forked(*DISJOINT[name]), on(backend))


LANES = {"host": {}, "device": {"grammar_lane": "device", "grammar_backend": "automaton", "grammar_arena_bytes": 1 << 20}}


def rounds(engine: Engine, lane: str) -> list[Step]:
    keys = [key for key in graph_keys(engine._graphs.buckets, False, lane == "device", (FULL,)) if key.constrained]
    return [engine._graphs.step(key) for key in keys if key.device == (lane == "device")]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("name", ["EAGLE-3", "own vocabulary"])
def test_constrained_rounds_have_no_race(name: str, lane: str, backend: Backend) -> None:
    engine = make(name, backend, **LANES[lane])
    assert [races(backend, step, engine.buffers) for step in rounds(engine, lane)] == [[], []]
    engine.close()


@pytest.mark.parametrize("lane", LANES)
def test_every_wait_of_a_round_is_needed(lane: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of its waits, a round has a race or its capture is illegal."""
    engine, wait = make("own vocabulary", backend, **LANES[lane]), CudaCaptureContext.wait
    step, waits, without = rounds(engine, lane)[0], 0, -1

    def all_but_one(self: CudaCaptureContext, event: Any) -> None:
        nonlocal waits
        if waits != without:
            wait(self, event)
        waits += 1

    def captured(b: StaticBuffers) -> None:
        nonlocal waits
        waits = 0
        step(b)

    monkeypatch.setattr(CudaCaptureContext, "wait", all_but_one)
    assert not races(backend, captured, engine.buffers)
    total = waits
    assert total >= 4
    for without in range(total):
        try:
            found = races(backend, captured, engine.buffers)
        except CaptureError as error:
            found = [error.rule] if error.rule in ("unjoined-fork", "stream-outside-capture", "race") else []
        assert found, f"without wait {without} of {total}"
    counters.take_messages()  # discards those of the illegal captures
    engine.close()
