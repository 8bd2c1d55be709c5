"""The compile worker: the grammar libraries in a separate process that may be killed at any time.

Run as a script by `CompileWorker`, with the parent's `sys.path` as arguments and a socket as standard input. It imports the libraries'
bindings and the few modules of stepgraph that write grammars, but not torch: it starts in 0.1 to 0.3 s and takes about 50 MB.
A message is a line with a JSON array, whose last item is the size of the body, and the body. The first message configures the worker and
contains the token tables; each later one is a call, answered by a status and a result.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import marshal
import os
import resource
import signal
import socket
import sys
import types
from collections.abc import Sequence
from typing import IO, Any

DONE, FAILED, NO_MEMORY, TOO_LARGE = "done", "ValueError", "no memory", "too large"  # statuses; also the names of errors


def send(connection: socket.socket, *parts: Any, body: bytes = b"") -> None:
    connection.sendall(json.dumps([*parts, len(body)]).encode() + b"\n" + body)


def receive(stream: IO[bytes]) -> tuple[list[Any], bytes]:
    """The parts and the body of the next message; EOFError if the other process has closed the socket."""
    line = stream.readline()
    *parts, size = json.loads(line) if line.endswith(b"\n") else [0]
    body = stream.read(size)
    if not parts or len(body) < size:
        raise EOFError
    return parts, body


class Libraries:
    """The grammar libraries over one vocabulary. The public methods, except `prepare`, are the calls of the parent."""

    def __init__(self, options: dict[str, Any], tables: bytes) -> None:
        import numpy

        self._options, width, raw = options, options["width"], 0  # the library's enum value for tokens that are bytes
        self._core = _xgrammar_bindings()
        self._for_xgrammar, self._for_llguidance = marshal.loads(tables)
        tokenizer = self._core.TokenizerInfo(self._for_xgrammar, raw, width, options["stop_token_ids"], False)
        try:  # the newest form first: a TypeError of the bindings takes a fifth of a second
            self._compiler = self._core.GrammarCompiler(tokenizer, options["max_threads"], False, -1, False)
        except TypeError:  # before 0.2.9, which decides whether mask rows are computed when they are first used
            self._compiler = self._core.GrammarCompiler(tokenizer, options["max_threads"], False, -1)
        self._mask = numpy.zeros((1, -(-width // 32)), dtype=numpy.int32)
        self._llguidance: Any = None
        self._table: Any = None
        self.xgrammar("json_schema", "{}", {})  # loads everything that a compile needs, before memory is limited

    def prepare(self, name: str) -> bool:
        """Load the library of a call; True if it was loaded now, as its memory should not count against the limit of the call."""
        if name == "automaton" and self._table is None:
            from stepgraph.sampling.grammar.automaton.library import AutomatonVocabulary

            self._table = AutomatonVocabulary(self._for_xgrammar, self._options["stop_token_ids"], self._mask.shape[1])
            return True
        if name != "lark" or self._llguidance is not None:
            return False
        from stepgraph.sampling.grammar.llguidance_lib.library import LLGuidance, library_limits

        options, fuel = self._options, library_limits(self._options["limits"])
        self._llguidance = LLGuidance(self._for_llguidance, options["stop_token_ids"], options["non_text_ids"], fuel)
        return True

    def _parse(self, kind: str, payload: str, options: dict[str, Any]) -> Any:
        # Imported here: the script must first make the package importable, and the parent needs only `send` and `receive`.
        from stepgraph.sampling.grammar.schema.options import Options
        from stepgraph.sampling.grammar.xgrammar_lib.ebnf import parsed_grammar

        return parsed_grammar(self._core, kind, payload, Options(**options), self._options["limits"]["least_bytes"])

    def automaton(self, kind: str, payload: str, options: dict[str, Any]) -> bytes:
        from stepgraph.sampling.grammar.automaton.library import limits_of

        _, *parsed = self._parse(kind, payload, options)
        image: bytes = self._table.compile(*parsed, limits_of(self._options["limits"]), kind != "ebnf").tobytes()
        return image

    def xgrammar(self, kind: str, payload: str, options: dict[str, Any]) -> bytes:
        """The serialised compiled grammar of a constraint. The first mask is filled too, because that may fail as well."""
        compiled = self._compiler.compile_grammar_ebnf(self._parse(kind, payload, options).grammar)
        matcher = self._core.GrammarMatcher(compiled, None, False, -1, None)
        matcher.fill_next_token_bitmask(self._mask, 0, False)
        return str(compiled.serialize_json()).encode()

    def lark(self, kind: str, payload: str, options: dict[str, Any]) -> bytes:
        """The constraint in Lark notation, after a trial compile with llguidance and its first mask. A compiled grammar of llguidance
        cannot be sent, so the parent compiles again."""
        from stepgraph.sampling.grammar.llguidance_lib.lark import lark_text
        from stepgraph.sampling.grammar.schema.options import Options

        grammar = lark_text(kind, payload, Options(**options))
        matcher = self._llguidance.matcher(grammar)
        if not matcher.is_error():  # the parent gets the same error and reports it
            matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return grammar.encode()


def _add_package(name: str, path: Sequence[str]) -> None:
    """Make the modules of a package importable without running its __init__."""
    package = types.ModuleType(name)
    package.__path__ = list(path)
    sys.modules[name] = package


def _xgrammar_bindings() -> Any:
    """The bindings without the package, which would load torch and transformers: 270 MB and several seconds."""
    spec = importlib.util.find_spec("xgrammar")
    if spec is None:
        raise ImportError("xgrammar is not installed")
    _add_package("xgrammar", spec.submodule_search_locations or [])
    hidden: dict[str, Any] = {"torch": None}  # tvm-ffi would import it
    sys.modules.update(hidden)
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.base")._core


def _memory_bytes() -> int:
    """Address space of this process; 0 without /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _run_call(call: Any, arguments: Sequence[Any], result_bytes: int) -> tuple[str, bytes]:
    from stepgraph.sampling.grammar.automaton.library import UnfitError
    from stepgraph.sampling.grammar.compile.limits import CompileAbortedError
    from stepgraph.sampling.grammar.constraints.unsupported import UnsupportedError

    try:
        result: bytes = call(*arguments)
    except (CompileAbortedError, UnfitError, UnsupportedError) as error:
        return type(error).__name__, json.dumps(error.args).encode()
    except Exception as error:  # the libraries raise RuntimeError and several types of their own
        no_memory = isinstance(error, MemoryError) or "bad_alloc" in str(error)
        return (NO_MEMORY, b"") if no_memory else (FAILED, json.dumps([str(error)]).encode())
    return (DONE, result) if len(result) <= result_bytes else (TOO_LARGE, str(len(result)).encode())


def main() -> None:
    sys.path[:] = sys.argv[1:]
    grammar = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sampling = os.path.dirname(grammar)
    # The __init__ of these packages would import torch, and sys.path alone does not find an editable installation.
    for package, path in (
        ("stepgraph", os.path.dirname(sampling)),
        ("stepgraph.sampling", sampling),
        ("stepgraph.sampling.grammar", grammar),
    ):
        _add_package(package, [path])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends SIGINT to the whole process group; the parent ends this process
    connection = socket.socket(fileno=0)
    stream = connection.makefile("rb")
    (options,), tables = receive(stream)
    limits, libraries = options["limits"], Libraries(options, tables)
    gc.freeze()
    gc.set_threshold(100_000)  # with the default threshold, collections take a third of the time to read a schema
    compile_bytes, idle_bytes, at_start = limits["compile_bytes"], _memory_bytes(), resource.getrlimit(resource.RLIMIT_AS)
    send(connection, DONE, False)
    while True:
        try:
            (name, *arguments), _ = receive(stream)
        except EOFError:
            return
        resource.setrlimit(resource.RLIMIT_AS, at_start)  # that of the last call may be too small to load a library
        if libraries.prepare(name):
            idle_bytes = _memory_bytes()
        if idle_bytes:
            most = idle_bytes + compile_bytes
            most = most if at_start[1] == resource.RLIM_INFINITY else min(most, at_start[1])
            resource.setrlimit(resource.RLIMIT_AS, (most, at_start[1]))
        signal.setitimer(signal.ITIMER_REAL, limits["compile_seconds"])  # SIGALRM ends this process even without the parent
        status, result = _run_call(getattr(libraries, name), arguments, limits["result_bytes"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(connection, status, _memory_bytes() > idle_bytes + compile_bytes // 2, body=result)


if __name__ == "__main__":
    main()
