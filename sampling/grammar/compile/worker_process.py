"""The parent's side of the compile worker: starts the process, calls it under limits, and reports why a call did not return."""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepgraph.sampling.grammar.automaton.library import UnfitError
from stepgraph.sampling.grammar.compile import worker as compile_worker
from stepgraph.sampling.grammar.compile.limits import MIB, CompileAbortedError, GrammarLimits, limit_exceeded
from stepgraph.sampling.grammar.compile.worker import DONE, NO_MEMORY, TOO_LARGE, receive, send
from stepgraph.sampling.grammar.constraints.unsupported import UnsupportedError
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.lifetimes import call_after_fork

SCRIPT = Path(compile_worker.__file__)
START_SECONDS = 60.0
GRACE_SECONDS = 1.0  # beyond the worker's own timer, for a process that is stopped (SIGSTOP)
STDERR_TAIL = 600
_SOURCE_PREFIX = re.compile(r"^(\[[\d:]+\] )?\S*\.(cc|h|cpp):\d+: (Check failed: \(.*?\) is false: )?")
_ERRORS: dict[str, type[ValueError]] = {error.__name__: error for error in (ValueError, CompileAbortedError, UnfitError, UnsupportedError)}
NO_MEMORY_MESSAGES = ("bad_alloc", "memory allocation", "annot allocate memory")  # messages of C++, Rust, and the dynamic loader


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """Raise errors of a library, in the worker or here, as ValueError with its message."""
    try:
        yield
    except (MemoryError, CompileAbortedError, UnfitError, UnsupportedError):
        raise
    except Exception as error:  # the library raises RuntimeError and several types of its own
        raise ValueError(without_source(str(error))) from error


def without_source(message: str) -> str:
    """A message of a library without the line of its sources."""
    return _SOURCE_PREFIX.sub("", message).strip()


class _Process:
    def __init__(self) -> None:
        # Isolated from this interpreter's settings and signals; only sys.path is passed on.
        command = [sys.executable, "-I", "-S", str(SCRIPT), *filter(None, sys.path)]
        # Idle threads, and a heap per thread, would take address space that counts against a compile's limit.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        self.owner = os.getpid()
        with contextlib.ExitStack() as undo:
            self.connection, worker_socket = map(undo.enter_context, socket.socketpair())
            self.stderr = undo.enter_context(tempfile.TemporaryFile())
            streams: dict[str, Any] = {"stdin": worker_socket.fileno(), "stdout": subprocess.DEVNULL, "stderr": self.stderr}
            try:
                self.popen = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
            except (OSError, ValueError) as error:
                raise CompileAbortedError(f"the compile worker did not start: {error}") from error
            undo.pop_all()
            worker_socket.close()
        self.answers = self.connection.makefile("rb")

    def end(self) -> None:
        if os.getpid() != self.owner:
            return  # a fork's copy
        self.popen.kill()
        self.popen.wait()
        self.answers.close()
        self.connection.close()
        self.stderr.close()

    def exit_code(self) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(GRACE_SECONDS)
        return 0

    def stderr_tail(self) -> str:
        size = self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(0, size - STDERR_TAIL))
        return self.stderr.read().decode(errors="replace").strip()


class CompileWorker:
    """A worker process for one compile at a time: started by the first call, and again after it was lost. Any thread may call `kill`."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, max_threads: int) -> None:
        self._vocabulary, self._limits, self._max_threads = vocabulary, limits, max_threads
        self._process: _Process | None = None
        self._finalizer: weakref.finalize[..., CompileWorker] | None = None
        self._cancelled = self._kill_pending = False
        self.processes_started = 0
        call_after_fork(self._detach)

    def _detach(self) -> None:
        """In a fork: close the copy of the socket, so that the worker still notices the end of its parent."""
        if self._process is not None and (copy := self._process.connection.detach()) >= 0:
            os.close(copy)  # close() would wait until `answers` is closed, which takes a lock

    @property
    def pid(self) -> int | None:
        return self._process.popen.pid if self._process else None

    def begin_compile(self) -> None:
        """Start another compile. An earlier `kill` was for the previous compile; if it came too late, `call` replaces the process."""
        self._kill_pending |= self._cancelled
        self._cancelled = False

    def call(self, name: str, *arguments: Any) -> bytes:
        """The result of a method of `worker.Libraries`; ValueError with the library's message, or UnsupportedError if the part is known;
        CompileAbortedError if a limit was reached or the process died."""
        process = self._process
        if process is None or self._kill_pending or process.owner != os.getpid() or process.popen.poll() is not None:
            self._start()
        limits = self._limits
        status, needs_restart, result = self._exchange([name, *arguments], limits.compile_seconds + GRACE_SECONDS)
        if needs_restart or status == NO_MEMORY:
            self.close()
        if status == NO_MEMORY:
            raise CompileAbortedError(self._no_memory_message())
        if status == TOO_LARGE:
            raise CompileAbortedError(limit_exceeded("result_bytes", f"{int(result):,} bytes of compiled grammar", limits.result_bytes))
        if status != DONE:
            raise _ERRORS[status](*json.loads(result))
        return result

    def kill(self) -> None:
        """End the running compile; from any thread."""
        self._cancelled = True
        process = self._process
        if process is not None and process.owner == os.getpid():
            process.popen.kill()

    def close(self) -> None:
        """End the process; the next call starts a new one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _start(self) -> None:
        self.close()
        self._kill_pending = False
        vocabulary = self._vocabulary
        options = {
            "stop_token_ids": vocabulary.stop_token_ids,
            "non_text_ids": sorted(vocabulary.non_text_ids),
            "width": vocabulary.logits_width,
            "max_threads": self._max_threads,
            "limits": asdict(self._limits),
        }
        self._process = process = _Process()
        self._finalizer = weakref.finalize(self, process.end)
        self.processes_started += 1
        self._exchange([options], START_SECONDS, marshal.dumps([vocabulary.for_xgrammar, vocabulary.for_llguidance]))

    def _exchange(self, parts: list[Any], seconds: float, tables: bytes = b"") -> tuple[str, bool, bytes]:
        """The worker's answer: status, whether it should be restarted to free memory, result. `tables`: of the first message only."""
        process = self._process
        assert process is not None
        try:
            if self._cancelled:
                raise EOFError  # `kill` may have come before the process existed
            process.connection.settimeout(seconds)
            send(process.connection, *parts, body=tables)
            (status, needs_restart), result = receive(process.answers)
        except (OSError, EOFError) as error:  # a time-out is an OSError
            message = self._failure_message(process, error)
            if tables:
                message += f", before it was ready: {process.stderr_tail()}".removesuffix(": ")
            self.close()
            raise CompileAbortedError(message) from None
        except BaseException:  # e.g. MemoryError: the rest of the answer must not become that of the next call
            self.close()
            raise
        return status, needs_restart, result

    def _failure_message(self, process: _Process, error: BaseException) -> str:
        """Why a call did not return."""
        limits = self._limits
        if self._cancelled:
            return "the compile was cancelled"
        if isinstance(error, TimeoutError):
            return limit_exceeded("compile_seconds", "no answer from the compile worker", limits.compile_seconds, "s")
        code = process.exit_code()
        if code == -signal.SIGALRM:
            return limit_exceeded("compile_seconds", "a compile that takes longer", limits.compile_seconds, "s")
        if any(sign in process.stderr_tail() for sign in NO_MEMORY_MESSAGES):
            return self._no_memory_message()
        if code >= 0:
            return f"the compile worker ended with exit code {code}"
        memory = ", which may mean that the system is out of memory" if code == -signal.SIGKILL else ""
        return f"the compile worker died of {signal.Signals(-code).name}{memory}"

    def _no_memory_message(self) -> str:
        return limit_exceeded("compile_bytes", "a compile that takes more", self._limits.compile_bytes // MIB, "MiB of memory")
