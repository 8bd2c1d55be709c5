"""The program of a replay, one list of items per stream, the threads of the streams, and the times of traced replays.

Every item is called in every replay, after a failure with `skip=True`, so that no stream waits forever.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from stepgraph.graphs.buffers import storage_key
from stepgraph.graphs.capture import BackendStats, host_call
from stepgraph.graphs.context import MAIN
from stepgraph.graphs.errors import HostNodeError
from stepgraph.graphs.spans import BETWEEN_ROUNDS, DEFAULT_STAGE, LAUNCHING_THREAD, NO_ROUND, RecordedReport, Span, StageRun, stage_runs
from stepgraph.graphs.tape.races import Node
from stepgraph.graphs.tape.recorder import Recorder
from stepgraph.graphs.tape.replay_ops import same_bits
from stepgraph.sampling.kernels.c_kernel import PackedCall, join_calls
from stepgraph.sampling.lifetimes import ExitStage, close_at_exit
from stepgraph.sampling.native import CallError

_NODE_BYTES = 1200  # of the Python objects of a node or view: the resident memory of sixty graphs of SmolLM2-135M, divided by their number

Delay = Callable[[str], object]
_KIND_TEXT = {"stage": "stage", "host": "host node", "wait": "waits for", None: "signal"}


class Worker:
    """A daemon thread that runs jobs in order; a job must not raise."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=f"stepgraph-{name}", daemon=True)
        self._thread.start()
        close_at_exit(self, ExitStage.DEVICE)

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def close(self, seconds: float) -> None:
        self.stop()
        self.join(seconds)


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    with torch.no_grad():
        while True:
            job = jobs.get()
            if job is None:
                return
            job()
            del job  # an idle worker must not keep the last tape alive


def stop_workers(workers: Mapping[str, Worker]) -> None:
    for worker in workers.values():
        worker.stop()


class Item:
    """One entry of a program. `kind` and `name` as in Span; a signal takes no time and has no span."""

    kind: Literal["stage", "host", "wait"] | None = None
    name = ""

    def __call__(self, skip: bool) -> None:
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{_KIND_TEXT[self.kind]} {self.name}"

    @property
    def pieces(self) -> Sequence[Item]:
        """The same work with one item for each span."""
        return (self,)


class Segment(Item):
    """Consecutive operations of one stream."""

    kind = "stage"

    def __init__(self, stream: str, delay: Delay | None, nodes: Sequence[Node] = ()) -> None:
        self.nodes = list(nodes)
        self._stream, self._delay = stream, delay
        self._calls: list[tuple[Sequence[Node], Callable[[], object]]] = []

    @property
    def name(self) -> str:  # type: ignore[override]
        first, last = self.nodes[0].stage, self.nodes[-1].stage
        return first if first == last else f"{first} to {last}"

    @functools.cached_property
    def pieces(self) -> Sequence[Item]:
        stages = [list(nodes) for _, nodes in itertools.groupby(self.nodes, key=lambda node: node.stage)]
        return [Segment(self._stream, None if number else self._delay, nodes).finish() for number, nodes in enumerate(stages)]

    def finish(self) -> Segment:
        """Called after the last node. Consecutive kernels of the C library become one call: many take less time than a call from Python."""
        for in_c, group in itertools.groupby(self.nodes, key=lambda node: isinstance(node.call, PackedCall)):
            nodes = list(group)
            if in_c:
                self._calls.append((nodes, join_calls([node.call for node in nodes if isinstance(node.call, PackedCall)])))
            else:
                self._calls += [([node], node.call) for node in nodes if node.call is not None]
        return self

    def __call__(self, skip: bool) -> None:
        if skip:
            return
        if self._delay is not None:
            self._delay(self._stream)
        nodes: Sequence[Node] = self.nodes
        try:
            for nodes, call in self._calls:  # noqa: B007 - for the error
                call()
        except Exception as error:
            node = nodes[error.number if len(nodes) > 1 and isinstance(error, CallError) else 0]
            raise RuntimeError(f"{node.name}, recorded at {node.site}, failed in a replay: {error}") from error


class HostCall(Item):
    """One host node. `watched`: pinned buffers that it must not write."""

    kind = "host"

    def __init__(self, node: Node, delay: Delay | None, watched: Sequence[tuple[str, Tensor]]) -> None:
        assert node.call is not None
        self.name, self._owner, self._delay, self._watched = node.name, node.call, delay, watched
        self._function = host_call(node.name, node.call)

    def __call__(self, skip: bool) -> None:
        if skip:
            return
        if self._delay is not None:
            self._delay(self.name)
        before = [tensor.clone() for _, tensor in self._watched]
        try:
            self._function()
        except Exception as error:
            raise HostNodeError(self.name, error) from error
        for (name, tensor), old in zip(self._watched, before, strict=True):
            if not same_bits(tensor, old):
                raise HostNodeError(self.name, RuntimeError(f"undeclared write to {name!r}; name it in writes="))


class Signal(Item):
    """Signals an event to the streams that wait for it; `name`: the stage or host node before the event."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.locks: list[threading.Lock] = []

    def __call__(self, skip: bool) -> None:
        for lock in self.locks:
            lock.release()


class Await(Item):
    """Waits for an event of another stream, until which the replay holds `lock`; `name`: as in Signal. `stats`, if any, counts the time."""

    kind = "wait"

    def __init__(self, lock: threading.Lock, name: str, stats: BackendStats | None) -> None:
        self.lock, self.name, self._stats = lock, name, stats

    def __call__(self, skip: bool) -> None:
        if self.lock.acquire(blocking=False):
            return
        begin = time.perf_counter_ns()
        self.lock.acquire()
        if self._stats:
            self._stats.wait_ns = (self._stats.wait_ns or 0) + time.perf_counter_ns() - begin


def stream_programs(recorder: Recorder, delay: Delay | None, verify: bool, stats: BackendStats) -> dict[str, list[Item]]:
    """The recording as one list of items per stream. `stats` counts the time that the main stream waits for others."""
    result: dict[str, list[Item]] = {}
    signals: dict[int, Signal] = {}
    waited: set[tuple[int, str]] = set()
    for node in recorder.nodes:
        program, event = result.setdefault(node.stream, []), node.event
        if node.kind == "host":
            program.append(HostCall(node, delay, _undeclared_buffers(recorder, node) if verify else ()))
        elif event is not None and node.kind == "record":
            signals[event.number] = Signal(_latest_name(program))
            program.append(signals[event.number])
        elif event is not None and event.stream != node.stream and (event.number, node.stream) not in waited:
            waited.add((event.number, node.stream))
            signal, lock = signals[event.number], threading.Lock()
            signal.locks.append(lock)
            program.append(Await(lock, signal.name, stats if node.stream == MAIN else None))
        elif node.call is not None:
            if not program or not isinstance(program[-1], Segment):
                program.append(Segment(node.stream, delay))
            segment = program[-1]
            assert isinstance(segment, Segment)
            segment.nodes.append(node)
    for item in itertools.chain.from_iterable(result.values()):
        if isinstance(item, Segment):
            item.finish()
    return result


def _latest_name(program: Sequence[Item]) -> str:
    """The last host node since the last event, or else the last stage."""
    stage = None
    for item in reversed(program):
        if isinstance(item, (HostCall, Signal)):
            return item.name if stage is None or isinstance(item, HostCall) else stage
        if isinstance(item, Segment) and stage is None:
            stage = item.nodes[-1].stage
    return stage or DEFAULT_STAGE


def make_report(recorder: Recorder, nbytes: int, seconds: float) -> RecordedReport:
    in_graph = [node for node in recorder.nodes if node.kind not in ("view", "record", "wait")]  # nodes that a CUDA graph has as well
    return RecordedReport(
        nodes=dict(Counter(node.kind for node in recorder.nodes if node.kind not in ("view", "record"))),
        host_nodes=tuple(node.name for node in recorder.nodes if node.kind == "host"),
        nbytes=nbytes,
        host_bytes=_NODE_BYTES * len(recorder.nodes),
        seconds=seconds,
        stages=stage_runs(
            StageRun(node.stream, node.name, "host") if node.kind == "host" else StageRun(node.stream, node.stage) for node in in_graph
        ),
    )


def _undeclared_buffers(recorder: Recorder, node: Node) -> list[tuple[str, Tensor]]:
    declared = {storage_key(tensor) for tensor in node.writes}
    buffers, races = recorder.memory.buffers, recorder.races
    pinned = [(spec.name, buffers[spec.name]) for spec in buffers.specs if spec.memory == "pinned"]
    return [
        (name, tensor)
        for name, tensor in pinned
        if storage_key(tensor) not in declared and not races.concurrent_writes(storage_key(tensor), node)
    ]


ItemTimer = Callable[[str, Sequence[Item]], Iterator[Item]]  # stream and items -> pieces of the items


class Tracer:
    """Collects spans of `rounds` replays and of the work between them."""

    def __init__(self, first_round: int, rounds: int) -> None:
        self._next, self._end = first_round, first_round + rounds
        self.spans: list[Span] = []  # appended by the threads of the streams and the launching thread

    @property
    def full(self) -> bool:
        return self._next >= self._end

    @contextlib.contextmanager
    def launching(self) -> Iterator[ItemTimer]:
        """Times the launch of a round; yields what times its items."""
        number, start = self._next, time.perf_counter_ns()
        self._next += 1
        yield functools.partial(self._timed, number)
        self.spans.append(Span(LAUNCHING_THREAD, f"launch {number}", "launch", number, start, time.perf_counter_ns()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Times a wait of the launching thread for results."""
        start = time.perf_counter_ns()
        yield
        self.spans.append(Span(LAUNCHING_THREAD, "results", "wait", NO_ROUND, start, time.perf_counter_ns()))

    def between_rounds(self, function: Callable[[], object]) -> Callable[[], object]:
        """`function` with a span, for work on the main stream between rounds."""

        def run() -> None:
            start = time.perf_counter_ns()
            function()
            self.spans.append(Span(MAIN, BETWEEN_ROUNDS, "stage", NO_ROUND, start, time.perf_counter_ns()))

        return run

    def _timed(self, number: int, stream: str, items: Sequence[Item]) -> Iterator[Item]:
        """The pieces of `items`, each with a span until the caller takes the next one."""
        for item in items:
            for piece in item.pieces:
                start = time.perf_counter_ns()
                yield piece
                if piece.kind is not None:
                    self.spans.append(Span(stream, piece.name, piece.kind, number, start, time.perf_counter_ns()))
