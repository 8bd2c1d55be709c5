"""Rounds under a profiler. Which ones, the environment says, so that any script with an engine can be profiled as it is.

STEPGRAPH_PROFILE_ROUNDS=20-40   the rounds, counted from 0, both ends included; of the first engine that the process makes
STEPGRAPH_PROFILE_WITH=trace     the engine records its own timeline; nsys: it tells CUDA's profiler when to begin and to end
STEPGRAPH_PROFILE_FILE=PATH      what the rounds were, and that timeline, go here at the end of the range or of the engine

Without the first one an engine has none of this: it is settled when the engine is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

import torch

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.graph_set import GraphSet
from stepgraph.graphs.shapes import GraphKey, Limits
from stepgraph.runtime.extras.hidden_states import HiddenStates
from stepgraph.runtime.in_flight import InFlight, RowResult
from stepgraph.runtime.slots import ActiveRequest
from stepgraph.sampling.grammar.link.node_log import NodeLog
from stepgraph.sampling.grammar.link.protocol import HostLink

ROUNDS, FILE, TOOL = "STEPGRAPH_PROFILE_ROUNDS", "STEPGRAPH_PROFILE_FILE", "STEPGRAPH_PROFILE_WITH"
_first = threading.Lock()  # taken by the engine that is profiled


class ProfileRange(NamedTuple):
    """What the environment asks for."""

    first: int
    last: int
    tool: str
    path: Path


def asked_range(environment: Mapping[str, str]) -> ProfileRange | None:
    """ValueError names the variable."""
    rounds, tool = environment.get(ROUNDS, ""), environment.get(TOOL, "trace")
    if not rounds:
        return None
    match = re.fullmatch(r"(\d+)-(\d+)", rounds)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"{ROUNDS}: got {rounds!r}, want FIRST-LAST, two whole numbers, the second one greater, like 20-40")
    if tool not in ("trace", "nsys"):
        raise ValueError(f"{TOOL}: got {tool!r}, want 'trace' or 'nsys'")
    path = Path(environment.get(FILE) or "stepgraph.rounds.json")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{FILE}: got {str(path)!r}, want a file in a folder that is there")
    return ProfileRange(int(match[1]), int(match[2]), tool, path)


def make_in_flight(
    backend: Backend, buffers: StaticBuffers, graphs: GraphSet, host: HostLink, limits: Limits, states: HiddenStates | None = None
) -> InFlight:
    """Those of an engine: profiled where the environment asks for it and no engine was before."""
    asked = asked_range(os.environ)
    if asked is None or not _first.acquire(blocking=False):
        return InFlight(backend, buffers, graphs, host, limits, states)
    return ProfiledInFlight(asked, backend, buffers, graphs, host, limits, states)


class Launched(NamedTuple):
    """A round of the range."""

    round: int
    key: GraphKey
    launched_ns: int


class ProfiledInFlight(InFlight):
    """Waits for the device in front of the range and behind it, and nowhere between."""

    def __init__(
        self,
        asked: ProfileRange,
        backend: Backend,
        buffers: StaticBuffers,
        graphs: GraphSet,
        host: HostLink,
        limits: Limits,
        states: HiddenStates | None = None,
    ) -> None:
        super().__init__(backend, buffers, graphs, host, limits, states)
        self._asked, self._collected, self._open, self._written = asked, 0, False, False
        self._with_nsys = asked.tool == "nsys" and backend.name == "cuda"
        self._log = NodeLog((asked.last - asked.first + 1) * (limits.positions + 1))
        self._launched: list[Launched] = []
        self._spans: list[tuple[object, ...]] = []
        self._counters = {"row_rounds": 0, "tokens": 0, "accepted_drafts": 0, "offered_drafts": 0, "host_node_ns": 0, "mask_fills": 0}

    def capturing(self) -> AbstractContextManager[None]:
        return _cuda_profiler() if self._with_nsys else super().capturing()

    def launch(self, requests: tuple[ActiveRequest, ...]) -> None:
        number = self.rounds
        if number == self._asked.first:
            self._begin()
        super().launch(requests)
        if number == self._asked.last and self._open:
            self._end()

    def _replay(self, key: GraphKey) -> None:
        if self._open:
            self._launched.append(Launched(self.rounds - 1, key, time.perf_counter_ns()))
        super()._replay(key)

    def collect(self) -> Iterator[RowResult]:
        number, counters = self._collected, self._counters
        self._collected += 1
        for outcome in super().collect():
            if self._asked.first <= number <= self._asked.last:
                counters["row_rounds"] += 1
                counters["tokens"] += len(outcome.tokens)
                counters["accepted_drafts"] += outcome.accepted
                counters["offered_drafts"] += outcome.offered
            yield outcome
        if number == self._asked.last and self._launched:
            self._write()

    def clear(self) -> None:
        """The engine ends: the rounds that were profiled until now are better than none."""
        with contextlib.suppress(Exception):  # the device may have failed; the engine tells of that
            if self._open:
                self._end()
            if self._launched and not self._written:
                self._write()
        super().clear()

    def _begin(self) -> None:
        self._backend.synchronize()
        if self._with_nsys:
            torch.cuda.profiler.start()
        else:
            try:
                self._backend.start_trace(self._asked.first, self._asked.last - self._asked.first + 1)
            except RuntimeError as error:  # the script traces as well, and has to go on
                warnings.warn(f"{ROUNDS}: these rounds are not profiled: {error}", stacklevel=2)
                return
        self._open = True
        self._count_host(-1)
        self._host.note_nodes(self._log)

    def _end(self) -> None:
        self._backend.synchronize()
        self._open = False
        self._count_host(+1)
        self._host.note_nodes(None)
        if self._with_nsys:
            torch.cuda.profiler.stop()
        else:
            self._spans = [tuple(span) for span in self._backend.stop_trace()]

    def _count_host(self, sign: int) -> None:
        stats = self._host.stats
        self._counters["host_node_ns"] += sign * stats.node_ns
        self._counters["mask_fills"] += sign * stats.fills

    def _host_nodes(self) -> Iterator[tuple[str, int, int, int]]:
        """Name, round, begin and end. Only rounds with grammars have some, and each of these has all that its recording has."""
        constrained, names = iter([launched for launched in self._launched if launched.key.constrained]), iter([""])
        number = self._asked.first
        for node in self._log.times:
            if node.first:
                number, key, _ = next(constrained)
                names = iter([run.name for run in self._graphs[key].report.stages if run.kind == "host"])
            yield next(names, "host node"), number, node.start_ns, node.end_ns

    def _write(self) -> None:
        self._written = True
        document = {
            "document": "stepgraph rounds",
            "version": 1,
            "backend": self._backend.name,
            "rounds": [{**one._asdict(), "key": str(one.key)} for one in self._launched],
            "stages": {str(key): [astuple(run) for run in self._graphs[key].report.stages] for key in {one.key for one in self._launched}},
            "host_nodes": list(self._host_nodes()),
            "spans": self._spans,
            "counters": self._counters,
        }
        try:
            self._asked.path.write_text(json.dumps(document), encoding="utf-8")
        except OSError as error:  # requests are running
            warnings.warn(f"{FILE}: the profile of the rounds is lost: {error}", stacklevel=2)


@contextlib.contextmanager
def _cuda_profiler() -> Iterator[None]:
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.profiler.stop()
