"""The compile worker: xgrammar and llguidance in a process of their own, which may be ended at any time.

Run as a script by `WorkerProcess`, with the parent's `sys.path` as its arguments and a socket as its standard input. It imports
nothing but the libraries' bindings: neither torch nor stepgraph, so that it starts in a tenth of a second and takes 50 MB.
A message is a list of byte strings. The first one sets it up; each later one is a call, answered by its status and a result.
"""

from __future__ import annotations

import array
import importlib
import importlib.util
import json
import resource
import signal
import socket
import struct
import sys
import types
from collections.abc import Sequence
from typing import Any

DONE, REFUSED, NO_MEMORY, TOO_LARGE = b"done", b"refused", b"no memory", b"too large"
HEAD = struct.Struct("<IQ")  # the number of parts, and the bytes of their lengths and texts


def packed(parts: Sequence[bytes]) -> bytes:
    lengths = array.array("Q", map(len, parts)).tobytes()
    return b"".join([HEAD.pack(len(parts), len(lengths) + sum(map(len, parts))), lengths, *parts])


def received(connection: socket.socket) -> list[bytes]:
    """The next message; EOFError where the other side is gone."""
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
    """A token table as one text."""
    return packed(tokens)[HEAD.size :]


def split(table: bytes, count: int) -> list[bytes]:
    lengths, start = array.array("Q", table[: 8 * count]), 8 * count
    parts = list[bytes]()
    for length in lengths:
        parts.append(table[start : start + length])
        start += length
    return parts


class Libraries:
    """The libraries over one vocabulary; each is loaded for its first call."""

    def __init__(self, setup: Sequence[bytes]) -> None:
        import numpy

        options, encoded, spoken = setup
        self._options: dict[str, Any] = json.loads(options)
        self._spoken = spoken
        self._core = _xgrammar_bindings()
        width, tokens = self._options["width"], split(encoded, self._options["num_tokens"])
        raw = 0  # the library's word for tokens that are bytes
        tokenizer = self._core.TokenizerInfo(tokens, raw, width, self._options["stop_token_ids"], False)
        self._compiler = self._core.GrammarCompiler(tokenizer, self._options["max_threads"], False, -1)
        self._mask = numpy.zeros((1, -(-width // 32)), dtype=numpy.int32)
        self._llguidance: Any = None
        self.grammar(b'root ::= "a"', b"root")  # what is loaded with a first compile is here before memory is limited

    def prepare(self, name: str) -> bool:
        """Load what a call needs; True where that took memory that the call is not to answer for."""
        if name != "lark" or self._llguidance is not None:
            return False
        self._llguidance = _LLGuidance(split(self._spoken, self._options["width"]), self._options)
        return True

    def schema(self, text: bytes, longest_blank: bytes) -> bytes:
        """The library's grammar of a JSON schema, as text."""
        blank = int(longest_blank)
        arguments = (text.decode(), blank > 0, None, None, True, blank or None, False, False)
        return str(self._core.Grammar.from_json_schema(*arguments).to_string()).encode()

    def written(self, text: bytes, root: bytes) -> bytes:
        """A grammar as the library writes it."""
        return str(self._core.Grammar.from_ebnf(text.decode(), root.decode()).to_string()).encode()

    def parsed(self, text: bytes, root: bytes) -> bytes:
        """A grammar as data, before it is compiled."""
        return str(self._core.Grammar.from_ebnf(text.decode(), root.decode()).serialize_json()).encode()

    def grammar(self, text: bytes, root: bytes) -> bytes:
        """A compiled grammar, serialised; its first mask is tried out."""
        compiled = self._compiler.compile_grammar_from_strings(text.decode(), root.decode())
        matcher = self._core.GrammarMatcher(compiled, None, False, -1, None)
        matcher.fill_next_token_bitmask(self._mask, 0, False)
        return str(compiled.serialize_json()).encode()

    def lark(self, text: bytes) -> bytes:
        """Nothing, where llguidance takes the grammar and fills its first mask; the parent will do the same again."""
        self._llguidance.try_out(text.decode(), self._mask)
        return b""


class _LLGuidance:
    """The token table as the library wants it, and a trial."""

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
        raise RuntimeError("no grammar here has tokens of its own")

    def try_out(self, grammar: str, mask: Any) -> None:
        matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():  # what is wrong with a grammar is told by the parent, which comes to the same end
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _xgrammar_bindings() -> Any:
    """The bindings alone: importing the package itself would load torch and transformers, 270 MB in seconds."""
    spec = importlib.util.find_spec("xgrammar")
    if spec is None:
        raise ImportError("xgrammar is not installed")
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations or [])
    sys.modules["xgrammar"] = package
    hidden: dict[str, Any] = {"torch": None}  # tvm-ffi takes it along where it is installed
    sys.modules.update(hidden)
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.base")._core


def _memory_bytes() -> int:
    """Address space of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_memory(most: int) -> None:
    if most:
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _answer(call: Any, arguments: Sequence[bytes], result_bytes: int) -> tuple[bytes, bytes]:
    try:
        result: bytes = call(*arguments)
    except MemoryError:
        return NO_MEMORY, b""
    except Exception as error:  # the C++ side raises RuntimeError and several types of its own
        told = str(error)
        return (NO_MEMORY, b"") if "bad_alloc" in told else (REFUSED, told.encode(errors="replace"))
    return (DONE, result) if len(result) <= result_bytes else (TOO_LARGE, str(len(result)).encode())


def main() -> None:
    sys.path[:] = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the parent ends this process
    connection = socket.socket(fileno=0)
    limits, *setup = received(connection)
    seconds, compile_bytes, result_bytes = json.loads(limits)
    libraries = Libraries(setup)
    at_rest = _memory_bytes()
    connection.sendall(packed([DONE, b"", b""]))
    while True:
        try:
            name, *arguments = received(connection)
        except EOFError:
            return
        if libraries.prepare(name.decode()):
            at_rest = _memory_bytes()
        _limit_memory(at_rest and at_rest + compile_bytes)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends this process, whatever it is doing, parent or no parent
        status, result = _answer(getattr(libraries, name.decode()), arguments, result_bytes)
        signal.setitimer(signal.ITIMER_REAL, 0)
        tired = _memory_bytes() > at_rest + compile_bytes // 2
        connection.sendall(packed([status, result, b"tired" if tired else b""]))


if __name__ == "__main__":
    main()
