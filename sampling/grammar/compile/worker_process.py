"""The compile worker as its parent sees it: calls with limits, and an error that says what became of one that did not return.

One call at a time, by one thread; `kill` from any. A worker that was killed, crashed or ran into a limit is of no further use.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stepgraph.sampling.grammar.compile import worker as compile_worker
from stepgraph.sampling.grammar.compile.limits import MIB, GrammarLimits, over
from stepgraph.sampling.grammar.compile.worker import DONE, NO_MEMORY, TOO_LARGE, joined, packed, received
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.lifetimes import call_after_fork

SCRIPT = Path(compile_worker.__file__)
START_SECONDS = 60.0
GRACE_SECONDS = 1.0  # the worker's own timer comes first; this is for one that was stopped
STDERR_TAIL = 600
NO_MEMORY_SIGNS = ("bad_alloc", "memory allocation", "annot allocate memory")  # of C++, of Rust, of the system's loader


class WorkerError(ValueError):
    """What became of a call that did not return."""


@dataclass(frozen=True)
class _Process:
    popen: subprocess.Popen[bytes]
    connection: socket.socket
    stderr: IO[bytes]
    owner: int

    def end(self) -> None:
        if os.getpid() != self.owner:
            return  # a fork's copy
        self.popen.kill()
        self.popen.wait()
        self.connection.close()
        self.stderr.close()


class CompileWorker:
    """A worker process for one compile after another: started for the first call, and again where it was lost."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, max_threads: int) -> None:
        self._vocabulary, self._limits, self._max_threads = vocabulary, limits, max_threads
        self._process: _Process | None = None
        self._finalizer: weakref.finalize[..., CompileWorker] | None = None
        self._cancelled = self._doomed = False
        self.started = 0  # processes
        call_after_fork(self._detach)

    def _detach(self) -> None:
        """In a fork: close the copy of the socket, so that the worker still sees its parent end."""
        if self._process is not None:
            self._process.connection.close()

    @property
    def pid(self) -> int | None:
        return self._process.popen.pid if self._process else None

    def begin(self) -> None:
        """Another compile: what was cancelled was the one before, whose end may have come first. Then the process is still to die."""
        self._doomed |= self._cancelled
        self._cancelled = False

    def call(self, name: str, *arguments: str) -> str:
        """The result of one of `compile_worker.Libraries`' methods, ValueError in the library's words where it refuses, WorkerError
        where a limit was reached or the worker died."""
        process = self._process
        if process is None or self._doomed or process.owner != os.getpid() or process.popen.poll() is not None:
            self._start()
        limits, encoded = self._limits, [part.encode() for part in (name, *arguments)]
        try:
            status, result, tired = self._exchange(encoded, limits.compile_seconds + GRACE_SECONDS)
        except (OSError, EOFError) as error:  # a time-out is an OSError
            told = self._fate(error)
            self.close()
            raise WorkerError(told) from None
        if tired or status == NO_MEMORY:
            self.close()
        if status == NO_MEMORY:
            raise WorkerError(self._no_memory())
        if status == TOO_LARGE:
            raise WorkerError(over("result_bytes", f"{int(result):,} bytes of compiled grammar", limits.result_bytes))
        if status != DONE:
            raise ValueError(result.decode())
        return result.decode()

    def kill(self) -> None:
        """End the compile that it is busy with; from any thread."""
        self._cancelled = True
        process = self._process
        if process is not None and process.owner == os.getpid():
            process.popen.kill()

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _start(self) -> None:
        self.close()
        self._doomed = False
        vocabulary, limits = self._vocabulary, self._limits
        options = {
            "stop_token_ids": vocabulary.stop_token_ids,
            "non_text_ids": sorted(vocabulary.non_text_ids),
            "num_tokens": len(vocabulary.tokens),
            "width": vocabulary.logits_width,
            "max_threads": self._max_threads,
            "fuel": limits.fuel,
        }
        bounds = json.dumps([limits.compile_seconds, limits.compile_bytes, limits.result_bytes]).encode()
        tables = joined(vocabulary.for_xgrammar), joined(vocabulary.for_llguidance)
        self._process = process = _started()
        self._finalizer = weakref.finalize(self, process.end)
        self.started += 1
        try:
            if self._cancelled:
                raise EOFError  # `kill` found no process
            self._exchange([bounds, json.dumps(options).encode(), *tables], START_SECONDS)
        except (OSError, EOFError) as error:
            told, said = self._fate(error), self._epitaph()
            self.close()
            raise WorkerError(f"{told}, before it was ready{said and ': ' + said}") from None

    def _exchange(self, parts: list[bytes], seconds: float) -> list[bytes]:
        assert self._process is not None
        connection = self._process.connection
        connection.settimeout(seconds)
        connection.sendall(packed(parts))
        return received(connection)

    def _fate(self, error: BaseException) -> str:
        limits = self._limits
        if self._cancelled:
            return "the compile was cancelled"
        if isinstance(error, TimeoutError):
            return over("compile_seconds", "no answer from the compile worker", limits.compile_seconds, "s")
        code = self._code()
        if code == -signal.SIGALRM:
            return over("compile_seconds", "a compile that takes longer", limits.compile_seconds, "s")
        if any(sign in self._epitaph() for sign in NO_MEMORY_SIGNS):
            return self._no_memory()
        if code >= 0:
            return f"the compile worker ended with exit code {code}"
        memory = ", as where the system is out of memory" if code == -signal.SIGKILL else ""
        return f"the compile worker died of {signal.Signals(-code).name}{memory}"

    def _no_memory(self) -> str:
        return over("compile_bytes", "a compile that takes more", self._limits.compile_bytes // MIB, "MiB of memory")

    def _code(self) -> int:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.popen.wait(GRACE_SECONDS)
        return 0

    def _epitaph(self) -> str:
        """The end of what the worker said."""
        assert self._process is not None
        stderr = self._process.stderr
        size = stderr.seek(0, os.SEEK_END)
        stderr.seek(max(0, size - STDERR_TAIL))
        return stderr.read().decode(errors="replace").strip()


def _started() -> _Process:
    if os.name != "posix":
        raise WorkerError(f"there is no compile worker on {os.name}")
    # Apart from this interpreter's settings and signals: only the path is handed on.
    command = [sys.executable, "-I", "-S", str(SCRIPT), *filter(None, sys.path)]
    # Threads that a compile is not to answer for would take address space, and so would a heap for each of those that it uses.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    with contextlib.ExitStack() as undo:
        ours, theirs = map(undo.enter_context, socket.socketpair())
        stderr = undo.enter_context(tempfile.TemporaryFile())
        try:
            popen = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=stderr, env=environment, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise WorkerError(f"the compile worker did not start: {error}") from error
        undo.pop_all()
        theirs.close()
    return _Process(popen, ours, stderr, os.getpid())
