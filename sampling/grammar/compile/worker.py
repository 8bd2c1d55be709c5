"""The compile worker: xgrammar and llguidance in a separate process that may be killed at any time.

Run as a script by `CompileWorker`, with the parent's `sys.path` as arguments and a socket as standard input. It imports the libraries'
bindings and the few modules of stepgraph that write grammars, but not torch: it starts in 0.1 to 0.3 s and takes about 50 MB.
A message is a list of byte strings. The first one configures the worker; each later one is a call, answered by a status and a result.
"""

from __future__ import annotations

import array
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import struct
import sys
import types
from collections.abc import Sequence
from typing import Any

DONE, FAILED, ABORTED, NO_MEMORY, TOO_LARGE = b"done", b"failed", b"aborted", b"no memory", b"too large"
HEAD = struct.Struct("<IQ")  # number of parts, bytes of the body


def packed(parts: Sequence[bytes]) -> bytes:
    lengths = array.array("Q", map(len, parts)).tobytes()
    return b"".join([HEAD.pack(len(parts), len(lengths) + sum(map(len, parts))), lengths, *parts])


def received(connection: socket.socket) -> list[bytes]:
    """The next message; EOFError where the other side has closed the socket."""
    count, size = HEAD.unpack(_exactly(connection, HEAD.size))
    return split(_exactly(connection, size), count)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, start = memoryview(data), 0
    while start < size:
        count = connection.recv_into(view[start:])
        if not count:
            raise EOFError
        start += count
    return bytes(data)


def joined(tokens: Sequence[bytes]) -> bytes:
    """A token table as one byte string."""
    return packed(tokens)[HEAD.size :]


def split(table: bytes, count: int) -> list[bytes]:
    lengths, start = array.array("Q", table[: 8 * count]), 8 * count
    parts = list[bytes]()
    for length in lengths:
        parts.append(table[start : start + length])
        start += length
    return parts


class Libraries:
    """Both libraries over one vocabulary. The public methods are the calls that the parent may make."""

    def __init__(self, setup: Sequence[bytes]) -> None:
        import numpy

        # Here and not above: the script must first make the package importable, and the parent needs only the functions above.
        from stepgraph.sampling.grammar.xgrammar_lib.ebnf import parsed_grammar

        options, for_xgrammar, for_llguidance = setup
        self._options: dict[str, Any] = json.loads(options)
        self._for_llguidance = for_llguidance
        self._parsed_grammar = parsed_grammar
        self._core = _xgrammar_bindings()
        width, tokens = self._options["width"], split(for_xgrammar, self._options["num_tokens"])
        raw = 0  # the library's enum value for tokens that are bytes
        tokenizer = self._core.TokenizerInfo(tokens, raw, width, self._options["stop_token_ids"], False)
        self._compiler = self._core.GrammarCompiler(tokenizer, self._options["max_threads"], False, -1)
        self._mask = numpy.zeros((1, -(-width // 32)), dtype=numpy.int32)
        self._llguidance: Any = None
        self.xgrammar(b"regex", b"a", b"")  # load everything that a compile needs before memory is limited

    def prepare(self, name: str) -> bool:
        """Load the library of a call; True where that took memory that the call's limit should not include."""
        if name != "lark" or self._llguidance is not None:
            return False
        self._llguidance = _LLGuidance(split(self._for_llguidance, self._options["width"]), self._options)
        return True

    def xgrammar(self, kind: bytes, payload: bytes, any_whitespace: bytes) -> bytes:
        """The serialised compiled grammar of a constraint. Its first mask is filled here, as that may fail too."""
        parsed = self._parsed_grammar(self._core, kind.decode(), payload.decode(), bool(any_whitespace), self._options["least_bytes"])
        compiled = self._compiler.compile_grammar_ebnf(parsed)
        matcher = self._core.GrammarMatcher(compiled, None, False, -1, None)
        matcher.fill_next_token_bitmask(self._mask, 0, False)
        return str(compiled.serialize_json()).encode()

    def lark(self, text: bytes) -> bytes:
        """Compile with llguidance and fill the first mask. Its grammars cannot be sent, so the parent compiles again."""
        self._llguidance.try_grammar(text.decode(), self._mask)
        return b""


class _LLGuidance:
    """The token table in the form that the library expects, and a trial compile."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], options: dict[str, Any]) -> None:
        import llguidance

        self.tokens = tokens
        self.eos_token_id, self.special_token_ids = options["stop_token_ids"][0], options["non_text_ids"]
        self._tokenizer = llguidance.LLTokenizer(self, eos_token=options["stop_token_ids"])  # type: ignore[arg-type]
        self._limits = llguidance.LLParserLimits(verbose_errors=False, **options["fuel"])
        self._matcher = llguidance.LLMatcher

    def __call__(self, text: str) -> Sequence[int]:
        raise RuntimeError("no grammar names tokens, so no text is tokenized")

    def try_grammar(self, grammar: str, mask: Any) -> None:
        matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():  # the parent reports errors, which it finds in the same way
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _add_package(name: str, path: Sequence[str]) -> None:
    """A package whose modules can be imported, without running its __init__."""
    package = types.ModuleType(name)
    package.__path__ = list(path)
    sys.modules[name] = package


def _xgrammar_bindings() -> Any:
    """The bindings without the package, which would load torch and transformers: 270 MB, and seconds."""
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


def _limit_memory(num_bytes: int) -> None:
    if num_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _answer(call: Any, arguments: Sequence[bytes], result_bytes: int) -> tuple[bytes, bytes]:
    from stepgraph.sampling.grammar.compile.limits import CompileAbortedError

    try:
        result: bytes = call(*arguments)
    except MemoryError:
        return NO_MEMORY, b""
    except CompileAbortedError as error:
        return ABORTED, str(error).encode()
    except Exception as error:  # the libraries raise RuntimeError and several types of their own
        message = str(error)
        return (NO_MEMORY, b"") if "bad_alloc" in message else (FAILED, message.encode(errors="replace"))
    return (DONE, result) if len(result) <= result_bytes else (TOO_LARGE, str(len(result)).encode())


def main() -> None:
    sys.path[:] = sys.argv[1:]
    grammar = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sampling = os.path.dirname(grammar)
    # Their __init__ would import torch, and an editable installation is not found by sys.path alone.
    for package, path in (
        ("stepgraph", os.path.dirname(sampling)),
        ("stepgraph.sampling", sampling),
        ("stepgraph.sampling.grammar", grammar),
    ):
        _add_package(package, [path])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group; the parent ends this process
    connection = socket.socket(fileno=0)
    limits, *setup = received(connection)
    seconds, compile_bytes, result_bytes = json.loads(limits)
    libraries = Libraries(setup)
    idle_bytes = _memory_bytes()
    connection.sendall(packed([DONE, b"", b""]))
    while True:
        try:
            name, *arguments = received(connection)
        except EOFError:
            return
        if libraries.prepare(name.decode()):
            idle_bytes = _memory_bytes()
        _limit_memory(idle_bytes and idle_bytes + compile_bytes)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends this process even without the parent
        status, result = _answer(getattr(libraries, name.decode()), arguments, result_bytes)
        signal.setitimer(signal.ITIMER_REAL, 0)
        bloated = _memory_bytes() > idle_bytes + compile_bytes // 2
        connection.sendall(packed([status, result, b"bloated" if bloated else b""]))


if __name__ == "__main__":
    main()
