"""Runs checks in a worker process, so that a crash or a hang affects one check only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.gpu.checks.catalogue import Entry

Row = dict[str, Any]
TIME_LIMIT_REACHED = "the time limit of the run was reached"
START_SECONDS = 180.0  # to import torch and create a device context


class WorkerLost(Exception):
    """The worker crashed, or was ended because it did not answer."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(why)
        self.verdict = verdict


class Worker:
    """A process that answers requests with one line of JSON each. Ended together with its children."""

    def __init__(self, command: Sequence[str]) -> None:
        self._answer_pipe, writing = os.pipe()
        # stdout has the table and the document only; output of checks goes to stderr
        self._process = subprocess.Popen(
            [*command, str(writing)], stdin=subprocess.PIPE, stdout=2, pass_fds=(writing,), start_new_session=True, text=True
        )
        os.close(writing)
        self._received = b""

    def exchange(self, request: Mapping[str, object], seconds: float) -> Row:
        """The answer. Raises WorkerLost if there is none in time."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reported below, as a missing answer
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not select.select([self._answer_pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise WorkerLost("timed out", f"no answer within {seconds:.0f} s")
            received = os.read(self._answer_pipe, 1 << 16)
            if not received:
                raise WorkerLost("crashed", _ending(self._process.wait()))
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        answer: Row = json.loads(line)
        return answer

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        os.close(self._answer_pipe)


def _ending(code: int) -> str:
    return f"the worker was ended by {signal.Signals(-code).name}" if code < 0 else f"the worker ended with exit code {code}"


@dataclass
class Supervisor:
    """One worker at a time. `restart` replaces a lost one."""

    command: Sequence[str]
    rehearsal: str  # tape, cuda or empty
    quick: bool
    folder: str = ""  # for pictures
    worker: Worker | None = None
    start_failure: WorkerLost | None = None  # why no worker could be started after a loss: it is not tried again

    def describe(self, modules: Sequence[str] = ()) -> Row:
        """Start the worker and load what all checks need, and these modules; facts about device and versions."""
        assert self.worker is None
        self.worker = Worker(self.command)
        return self.worker.exchange({"rehearsal": self.rehearsal, "modules": modules}, START_SECONDS)

    def restart(self, entries: Iterable[Entry]) -> float:
        """Start a worker where there is none, for these checks. Returns the seconds that this took, which are not charged to a check."""
        begin = time.monotonic()
        if self.worker is None and self.start_failure is None:
            try:
                self.describe(modules_of(entries))
            except WorkerLost as lost:
                self.start_failure = lost
                self.end()
        return time.monotonic() - begin

    def run(self, entry: Entry, deadline: float = math.inf, share: float = 1.0) -> Row:
        """The report row of one check, also if the worker is lost. `share`: of its budget. It is ended at `deadline` at the latest."""
        budget = entry.budget(self.quick) * share
        request = {"name": entry.name, "module": entry.module, "budget": budget, "folder": self.folder}
        begin = time.monotonic()
        try:
            if self.worker is None:
                raise self.start_failure or WorkerLost("crashed", "no worker was started")
            limit = min(entry.limit_seconds(self.quick, bool(self.rehearsal)), max(1.0, deadline - begin))
            row = self.worker.exchange({**request, "limit": limit, "rehearsal": self.rehearsal, "quick": self.quick}, limit)
        except WorkerLost as lost:
            self.end()
            return row_of(entry, lost.verdict, str(lost), time.monotonic() - begin, budget)
        if row.pop("device_lost"):
            self.end()  # a device context is unusable after a fault
        return row

    def end(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.end()


def modules_of(entries: Iterable[Entry]) -> list[str]:
    return sorted({entry.module for entry in entries})


def row_of(entry: Entry, verdict: str, error: str, seconds: float = 0.0, budget: float = 0.0) -> Row:
    return {
        "name": entry.name,
        "verdict": verdict,
        "seconds": round(seconds, 3),
        "budget": round(budget, 3),
        "figures": {},
        "error": error,
    }


def rows(supervisor: Supervisor, entries: Sequence[Entry], seconds: float) -> Iterator[Row]:
    """A row for every entry, including those that do not run. The time limit does not include the start of a worker after a loss."""
    deadline, interrupted = time.monotonic() + seconds, False
    for index, entry in enumerate(entries):
        begin = time.monotonic()
        if interrupted:
            yield row_of(entry, "not run", "the run was interrupted")
        elif begin >= deadline:
            yield row_of(entry, "not run", TIME_LIMIT_REACHED)
        else:
            try:  # a check that hangs or compiles for long is ended before it uses the budgets of later checks
                deadline += supervisor.restart(entries[index:])
                begin = time.monotonic()
                later = sum(each.budget(supervisor.quick) for each in entries[index + 1 :])
                share = min(1.0, (deadline - begin) / (later + entry.budget(supervisor.quick)))
                row = supervisor.run(entry, deadline - later * share, share)
            except KeyboardInterrupt:
                interrupted = True
                supervisor.end()
                row = row_of(entry, "interrupted", "the run was interrupted", time.monotonic() - begin, entry.budget(supervisor.quick))
            yield row
