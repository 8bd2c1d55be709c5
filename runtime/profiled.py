"""Profiles a range of rounds chosen by environment variables, so that a script with an engine needs no changes.

STEPGRAPH_PROFILE_ROUNDS=20-40   the rounds, counted from 0, both ends included, of the first engine in the process
STEPGRAPH_PROFILE_WITH=trace     records the engine's own timeline; nsys: starts and stops CUDA's profiler
STEPGRAPH_PROFILE_FILE=PATH      a JSON file of the rounds and the timeline, written at the end of the range or of the engine

The variables are read when an engine is made. Without STEPGRAPH_PROFILE_ROUNDS the engine has a plain InFlight.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stepgraph.graphs.graph_key import GraphKey
from stepgraph.runtime.draft_length import Results
from stepgraph.runtime.in_flight import InFlight
from stepgraph.runtime.printing import warn
from stepgraph.runtime.request import ActiveRequest

MAX_ROUNDS = 1_000_000  # of a range: the log of host nodes takes about 200 bytes per round

ROUNDS_VARIABLE, FILE_VARIABLE, TOOL_VARIABLE = "STEPGRAPH_PROFILE_ROUNDS", "STEPGRAPH_PROFILE_FILE", "STEPGRAPH_PROFILE_WITH"
_first_engine = threading.Lock()  # acquired by the engine that is profiled


class ProfileRange(NamedTuple):
    first: int
    last: int
    tool: str
    path: Path


def read_range(environment: Mapping[str, str]) -> ProfileRange | None:
    """The range; None if no rounds are to be profiled. ValueError names the variable."""
    rounds, tool = environment.get(ROUNDS_VARIABLE, ""), environment.get(TOOL_VARIABLE, "trace")
    if not rounds:
        return None
    match = re.fullmatch(r"(\d+)-(\d+)", rounds)
    if match is None or not int(match[1]) < int(match[2]) < int(match[1]) + MAX_ROUNDS:
        raise ValueError(
            f"{ROUNDS_VARIABLE}: got {rounds!r}, expected FIRST-LAST with LAST > FIRST, such as 20-40, of at most {MAX_ROUNDS} rounds"
        )
    if tool not in ("trace", "nsys"):
        raise ValueError(f"{TOOL_VARIABLE}: got {tool!r}, expected 'trace' or 'nsys'")
    path = Path(environment.get(FILE_VARIABLE) or "stepgraph.rounds.json")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{FILE_VARIABLE}: got {str(path)!r}, expected a file in an existing folder")
    return ProfileRange(int(match[1]), int(match[2]), tool, path)


def in_flight_type(profile_range: ProfileRange | None) -> Callable[..., InFlight]:
    """The constructor of InFlight, or of ProfiledInFlight if there is a range and this is the first engine."""
    return functools.partial(ProfiledInFlight, profile_range) if profile_range and _first_engine.acquire(blocking=False) else InFlight


class ProfiledInFlight(InFlight):
    """Waits for the device before and after the range, and not within it."""

    def __init__(self, profile_range: ProfileRange, *parts: Any) -> None:
        super().__init__(*parts)
        self._range, self._num_collected, self._active = profile_range, 0, False
        self._with_nsys = profile_range.tool == "nsys" and self._backend.name == "cuda"
        most_nodes = (profile_range.last - profile_range.first + 1) * (len(self._buffers.masks_host) + 1)
        self._log = np.zeros((1 + most_nodes, 3), np.int64)  # for HostLink.log_nodes
        self._launched_rounds: list[tuple[int, GraphKey, int]] = []  # rounds to write: round, key, time in nanoseconds
        self._spans: list[tuple[object, ...]] = []
        self._counters = {"row_rounds": 0, "tokens": 0, "accepted_drafts": 0}

    def capturing(self) -> AbstractContextManager[None]:
        return torch.cuda.profiler.profile() if self._with_nsys else super().capturing()

    def launch(self, requests: tuple[ActiveRequest, ...]) -> None:
        number = self.rounds
        if number == self._range.first:
            self._begin()
        super().launch(requests)
        if number == self._range.last and self._active:
            self._end()

    def _replay(self, key: GraphKey, **loop: Any) -> None:
        if self._active:
            self._launched_rounds.append((self.rounds - 1, key, time.perf_counter_ns()))
        super()._replay(key, **loop)

    def collect(self) -> Iterator[Results]:
        number, counters = self._num_collected, self._counters
        self._num_collected += 1
        for results in super().collect():
            if self._range.first <= number <= self._range.last:
                counters["row_rounds"] += len(results)
                counters["tokens"] += sum(result.emitted for _, result in results)
                counters["accepted_drafts"] += sum(result.accepted for _, result in results)
            yield results
        if number == self._range.last and self._launched_rounds:
            self._write()

    def clear(self) -> None:
        """Called at the end of the engine: writes the rounds profiled so far."""
        with contextlib.suppress(Exception):  # of a failed device, which the engine reports
            if self._active:
                self._end()
            if self._launched_rounds:
                self._write()
        super().clear()

    def _begin(self) -> None:
        self._backend.synchronize()
        if self._with_nsys:
            torch.cuda.profiler.start()
        else:
            try:
                self._backend.start_trace(self._range.first, self._range.last - self._range.first + 1)
            except RuntimeError as error:  # the script has a trace of its own, and must continue
                warn(f"{ROUNDS_VARIABLE}: these rounds are not profiled: {error}")
                return
        self._active = True
        self._host_link.log_nodes(self._log)

    def _end(self) -> None:
        self._backend.synchronize()
        self._active = False
        self._host_link.log_nodes(None)
        if self._with_nsys:
            torch.cuda.profiler.stop()
        else:
            self._spans = [tuple(span) for span in self._backend.stop_trace()]

    def _host_nodes(self) -> Iterator[tuple[str, int, int, int]]:
        """Name, round, start and end of each. A round with grammars on the host has all host nodes of its recording, others have none."""
        with_nodes = [one for one in self._launched_rounds if one[1].on_host]
        constrained, names = iter(with_nodes), iter([""])
        number = self._range.first
        for is_first, start_ns, end_ns in self._log[1 : 1 + self._log[0, 0]].tolist():
            if is_first:
                number, key, _ = next(constrained)
                names = iter([run.name for run in self._graphs[key].report.stages if run.kind == "host"])
            yield next(names, "host node"), number, start_ns, end_ns

    def _write(self) -> None:
        host_nodes = list(self._host_nodes())
        document = {
            "document": "stepgraph rounds",
            "version": 1,
            "backend": self._backend.name,
            "rounds": [{"round": number, "key": str(key), "launched_ns": launched} for number, key, launched in self._launched_rounds],
            "stages": {str(key): [astuple(run) for run in self._graphs[key].report.stages] for _, key, _ in self._launched_rounds},
            "graph_nodes": {str(key): self._graphs[key].report.graph_nodes for _, key, _ in self._launched_rounds},
            "host_nodes": host_nodes,
            "spans": self._spans,
            "counters": self._counters | {"host_node_ns": sum(end - start for _, _, start, end in host_nodes)},
        }
        try:
            self._range.path.write_text(json.dumps(document), encoding="utf-8")
        except OSError as error:
            warn(f"{FILE_VARIABLE}: the profile of the rounds is lost: {error}")
        self._launched_rounds.clear()
