"""The native host link: a host node is one C function over a plain struct and does not take the GIL.

Rows are processed by a pool of threads that includes the calling one. C borrows rows and matchers; Python keeps them alive until
the rounds that they were pushed with have ended. A row whose matcher is not from a known library calls back into Python and
takes the GIL for that.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_int, c_int64, c_uint32, c_void_p
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from stepgraph.sampling.grammar.automaton.grammar import AutomatonMatcher
from stepgraph.sampling.grammar.compile.backends import installed
from stepgraph.sampling.grammar.link.layout import (
    FAULT_BYTES,
    MAX_SLOTS,
    CountsStruct,
    LibraryStruct,
    MarkerProgressStruct,
    MarkerStruct,
    NodeStruct,
    RowStruct,
    ShapeStruct,
    StepStruct,
    tokens_struct,
)
from stepgraph.sampling.grammar.link.library import NativeLibrary, Unavailable, load
from stepgraph.sampling.grammar.link.llguidance_binding import LLGuidanceNativeGrammar, LLGuidanceStart
from stepgraph.sampling.grammar.link.node_log import NodeLog
from stepgraph.sampling.grammar.link.protocol import HostAction, HostLink, HostStats, HostStep, MatcherRow
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.matchers.forced import Forcing, forced_bytes
from stepgraph.sampling.grammar.matchers.marker import MarkerMatcher
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import TAG_FIELDS, HostColumn, MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarMatcher

HOST_LINKS = ("auto", "native", "python")
CALLBACK_TYPES = {  # of the functions in LibraryStruct
    "accept": ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_int64, c_void_p),
    "fill": ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p),
    "rollback": ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_int64, c_void_p),
    "is_terminated": ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p),
    "forced": ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p),
}

_warned: set[str] = set()


def open_host_link(
    choice: str,
    state_host: Tensor,
    drafts_host: Tensor,
    masks_host: Tensor,
    tags_host: Tensor,
    depth: int,
    forcing: Forcing | None = None,
    check_masks: bool = False,
) -> HostLink:
    """The host link for `EngineConfig.host_link`. With `auto` it is the native one if available, else the Python one and a warning.

    `depth`: maximum number of rounds that are pushed and not ended. `forcing`: where forced tokens are written; None: they are not
    searched. `check_masks`: masks are compared in Python, so the link is the Python one. ValueError for an unknown choice;
    RuntimeError if `native` is not available.
    """
    if choice not in HOST_LINKS:
        raise ValueError(f"host_link: got {choice!r}, expected one of {', '.join(HOST_LINKS)}")
    reason = "check_masks compares masks in Python" if check_masks else ""
    if choice != "python" and not check_masks:
        try:
            return NativeLink(load(), state_host, drafts_host, masks_host, tags_host, depth, forcing=forcing)
        except Unavailable as error:
            if choice == "native":
                raise RuntimeError(f"host_link 'native': {error}") from error
            reason = f"no native link, {error}"
            _warn_once(f"stepgraph: grammars are driven from Python, under the GIL: {reason}")
    return PythonLink(state_host, drafts_host, masks_host, tags_host, reason, forcing)


class NativeNode:
    """A host node: the addresses of a C function and its data, and everything that the data refers to."""

    def __init__(self, link: NativeLink, library: NativeLibrary, address: int, steps: Sequence[HostStep]) -> None:
        self._link, self._call = link, library.waiting.stepgraph_node
        self._steps = (StepStruct * len(steps))(*(StepStruct(step.action, step.stage) for step in steps))
        self._data = NodeStruct(address, self._steps, len(steps))
        self.native_address = library.node_address
        self.native_data = addressof(self._data)

    def __call__(self) -> None:
        self._call(self.native_data)


class NativeLink:
    """Drives the matchers of a batch in C. One thread pushes batches; any thread may call the nodes, one at a time.

    `threads`: maximum number of threads that process rows, including the calling one; None: the number of processors.
    """

    def __init__(
        self,
        library: NativeLibrary,
        state_host: Tensor,
        drafts_host: Tensor,
        masks_host: Tensor,
        tags_host: Tensor,
        depth: int,
        threads: int | None = None,
        forcing: Forcing | None = None,
    ) -> None:
        stages, slots, words = masks_host.shape
        self._tensors = {  # C holds their addresses
            "state_host": (state_host, torch.int64, (slots, len(HostColumn))),
            "drafts_host": (drafts_host, torch.int64, (stages - 1, slots)),
            "masks_host": (masks_host, torch.int32, (stages, slots, words)),
            "tags_host": (tags_host, torch.int64, (stages, slots, TAG_FIELDS)),
        }
        if forcing:
            self._tensors["forced_host"] = forcing.forced_host, torch.int64, (stages - 1, slots)
        for name, (tensor, dtype, shape) in self._tensors.items():
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
                got = f"{tensor.dtype} {tuple(tensor.shape)} of strides {tensor.stride()} on {tensor.device}"
                raise ValueError(f"NativeLink.{name}: got {got}, expected contiguous {dtype} {shape} on cpu")
        if not 1 <= slots <= MAX_SLOTS or depth < 1:
            raise ValueError(f"NativeLink: got {slots} slots and depth {depth}, expected 1 to {MAX_SLOTS} slots and a depth of at least 1")
        threads = min(slots, threads or available_processors())
        self.name = f"native, {threads} thread{'s' if threads > 1 else ''}, no GIL{_llguidance_note(library)}"
        self._library, self._slots, self._stages = library, slots, stages
        self._tokens = tokens_struct(forcing.table) if forcing else None
        sizes = {"slots": slots, "stages": stages, "words": words, "depth": depth, "helpers": threads - 1}
        pointers = {name.removesuffix("_host"): tensor.data_ptr() for name, (tensor, _, _) in self._tensors.items()}
        shape_struct = ShapeStruct(**pointers, **sizes, tokens=ctypes.pointer(self._tokens) if self._tokens else None)
        self._address = library.quick.stepgraph_open(byref(shape_struct))
        if not self._address:
            raise MemoryError("NativeLink: out of memory")
        self._finalizer = weakref.finalize(self, library.waiting.stepgraph_close, self._address)
        self._finalizer.atexit = False  # a node may still be running at exit
        self._pushed: collections.deque[tuple[NativeRow | None, ...]] = collections.deque()
        self._released = 0  # pushed rounds whose rows were released
        self._counts = CountsStruct()  # used by the launching thread only
        self._last_stats = HostStats()
        self._log: NodeLog | None = None
        self._closing = threading.Lock()

    @property
    def stats(self) -> HostStats:
        with self._closing:  # any thread may read them, also while another one closes the link
            if self._finalizer.alive:
                counts = CountsStruct()
                self._library.quick.stepgraph_counts(self._address, byref(counts))
                times = counts.node_ns, counts.longest_node_ns, tuple(counts.nodes)
                self._last_stats = HostStats(counts.fills, counts.accepts, counts.rollbacks, counts.looks, *times)
            return self._last_stats

    def row(self, owner: int, matcher: Matcher, committed: int = 0) -> NativeRow:
        if matcher.fault:
            raise ValueError(f"row.matcher: got a failed matcher ({matcher.fault}), expected one without a fault")
        return NativeRow(self._library, owner, matcher, committed, self._tensors["masks_host"][0])

    def node(self, steps: Sequence[HostStep]) -> NativeNode:
        self._require_open()
        for index, step in enumerate(steps):
            assert step.action != HostAction.BEGIN_ROUND or index == 0, steps
            assert step.action != HostAction.END_ROUND or index == len(steps) - 1, steps
            low, high = {HostAction.FILL_NEW: (0, self._stages - 1), HostAction.ADVANCE: (1, self._stages - 1)}.get(step.action, (0, 0))
            assert low <= step.stage <= high, steps
        assert steps
        return NativeNode(self, self._library, self._address, steps)

    def push_batch(self, batch: Sequence[MatcherRow | None]) -> None:
        self.release_finished()
        rows = tuple(row for row in batch if row is None or isinstance(row, NativeRow))
        assert len(rows) == len(batch) <= self._slots, "rows of another link, or more rows than slots"
        addresses = (c_void_p * len(rows))(*(addressof(row.struct) if row else None for row in rows))
        if self._library.quick.stepgraph_push_batch(self._address, addresses, len(rows)):
            raise RuntimeError(f"NativeLink.push_batch: {len(self._pushed)} rounds are pushed and have not ended, which is the maximum")
        self._pushed.append(rows)

    def release_finished(self) -> None:
        self._require_open()
        counts = self._counts
        self._library.quick.stepgraph_counts(self._address, byref(counts))
        if counts.missed:
            raise RuntimeError(f"NativeLink: {counts.missed} rounds began without a pushed batch")
        while self._released < counts.ended:
            self._pushed.popleft()
            self._released += 1

    def note_nodes(self, log: NodeLog | None) -> None:
        self._require_open()
        self._log = log  # C writes to its memory
        self._library.quick.stepgraph_log(self._address, log.address if log else None, log.room if log else 0)

    def close(self) -> None:
        self._last_stats = self.stats
        with self._closing:
            self._finalizer()
        self._pushed.clear()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("NativeLink: it is closed")


@runtime_checkable
class CopiedMatcher(Protocol):
    """LLGuidanceMatcher, whose module may not be installed. It exposes no pointer to the library's matcher: a row uses a copy."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def fuel_seconds(self) -> float: ...

    @property
    def native_grammar(self) -> LLGuidanceNativeGrammar | None: ...

    @property
    def accepted_tokens(self) -> tuple[int, ...]: ...


class NativeRow:
    """One constrained request: a struct that host nodes access, and everything that the struct points to.

    A marker is handled in C around the library's own matcher.
    """

    def __init__(self, library: NativeLibrary, owner: int, matcher: Matcher, committed: int, masks_host: Tensor) -> None:
        self.owner, self.matcher = owner, matcher
        self._library = library
        self.struct = RowStruct(owner=owner, committed=committed)
        if isinstance(matcher, MarkerMatcher):
            self._set_marker(matcher, masks_host)
            matcher = matcher.inner
        if isinstance(matcher, AutomatonMatcher):
            self._require_width(matcher.vocabulary, masks_host)
            self.struct.library, self.struct.matcher = addressof(matcher.functions), matcher.handle
            self.struct.fuel_seconds = math.inf  # a step is a look-up
        elif isinstance(matcher, XGrammarMatcher):
            self._set_vocabulary(matcher.vocabulary, matcher.fuel_seconds, masks_host)
            xgrammar = library.xgrammar
            self.struct.library, self.struct.matcher = xgrammar.address, xgrammar.handle_of(matcher.library_matcher)
        elif isinstance(matcher, CopiedMatcher) and matcher.native_grammar is not None:
            self._set_vocabulary(matcher.vocabulary, matcher.fuel_seconds, masks_host)
            self._open_llguidance(matcher.native_grammar, matcher.accepted_tokens)
        else:
            self._callbacks = PythonCallbacks(matcher, masks_host)
            self.struct.library, self.struct.fuel_seconds = self._callbacks.address, math.inf  # the matcher measures its own fuel

    def _set_marker(self, matcher: MarkerMatcher, masks_host: Tensor) -> None:
        """A rollback takes at most as many tokens as a round has drafts: the ring has one state more than that."""
        marker, vocabulary = matcher.marker, matcher.marker.vocabulary
        self._require_width(vocabulary, masks_host)
        self._states = np.full(len(masks_host), matcher.state, np.int32)
        arrays = {name: getattr(marker, name).ctypes.data for name in ("symbols", "fallback", "mask_index", "masks")}
        self._table = MarkerStruct(**arrays, num_tokens=len(vocabulary.tokens), complete=marker.complete)
        self._table.text_words = vocabulary.text_words.ctypes.data
        if marker.of_text:
            self._table.bytes, self._table.starts = (array.ctypes.data for array in vocabulary.joined)
        self.struct.marker = MarkerProgressStruct(table=addressof(self._table), states=self._states.ctypes.data, room=len(masks_host))

    def _set_vocabulary(self, vocabulary: Vocabulary, fuel_seconds: float, masks_host: Tensor) -> None:
        self._require_width(vocabulary, masks_host)
        struct = self.struct
        self._words = vocabulary.text_words, vocabulary.stop_words, vocabulary.partial_words
        struct.text_words, struct.stop_words, struct.partial_words = (words.ctypes.data for words in self._words)
        struct.num_partial = len(vocabulary.partial_words)
        struct.num_tokens, struct.fuel_seconds = len(vocabulary.tokens), fuel_seconds

    def _open_llguidance(self, grammar: LLGuidanceNativeGrammar, tokens: Sequence[int]) -> None:
        library, start, functions = self._library, grammar.start, self._library.llguidance.address
        accepted = (c_uint32 * len(tokens))(*tokens)
        starts, stop_words = (start.address, grammar.cold_start.address), self.struct.stop_words
        matcher = library.waiting.stepgraph_open_llguidance(functions, *starts, stop_words, accepted, len(tokens))
        if not matcher:
            raise MemoryError("NativeRow: out of memory")
        weakref.finalize(self, _close_llguidance, library, grammar, start, matcher).atexit = False
        self.struct.library, self.struct.matcher = functions, matcher

    def _require_width(self, vocabulary: Vocabulary, masks_host: Tensor) -> None:
        if vocabulary.mask_words != masks_host.shape[-1]:
            raise ValueError(f"row.matcher: got masks of {vocabulary.mask_words} words, expected {masks_host.shape[-1]}")

    @property
    def fault(self) -> str:
        text: bytes = self._library.quick.stepgraph_fault(byref(self.struct))
        return text.decode(errors="replace")


def _close_llguidance(library: NativeLibrary, grammar: LLGuidanceNativeGrammar, start: LLGuidanceStart, matcher: int) -> None:
    """The arguments keep `start` and the grammar's cold start alive until here: the matcher may be rebuilt from either."""
    kept = library.waiting.stepgraph_close_llguidance(library.llguidance.address, matcher, grammar.keeps_lexers)
    if kept:
        grammar.replace_start(kept)


class PythonCallbacks:
    """The functions of one Python matcher for a native row. Each call takes the GIL. The matcher checks ids and fuel itself."""

    def __init__(self, matcher: Matcher, masks_host: Tensor) -> None:
        rows = masks_host.view(-1, masks_host.shape[-1])
        start, stride = rows.data_ptr(), rows.shape[-1] * rows.element_size()

        def accept(_: int, __: int, token: int, error: int) -> int:
            return _guarded(lambda: matcher.accept_token(token), matcher, error)

        def fill(_: int, __: int, words: int, ___: int, error: int) -> int:
            return _guarded(lambda: matcher.fill_next_token_bitmask(rows, (words - start) // stride), matcher, error)

        def rollback(_: int, __: int, tokens: int, error: int) -> int:
            def call() -> int:
                matcher.rollback(tokens)
                return 0

            return _guarded(call, matcher, error)

        def is_terminated(_: int, __: int, ___: int) -> int:
            return 0  # the other functions check it

        def forced(_: int, __: int, text: int, room: int, error: int) -> int:
            def call() -> int:
                found = bytes(forced_bytes(matcher)[:room])
                ctypes.memmove(text, found, len(found))
                return len(found)

            return _guarded(call, matcher, error)

        functions: tuple[Callable[..., int], ...] = (accept, fill, rollback, is_terminated, forced)
        self._entries = {function.__name__: CALLBACK_TYPES[function.__name__](function) for function in functions}
        self._struct = LibraryStruct(**{name: c_void_p.from_buffer(entry).value for name, entry in self._entries.items()})

    @property
    def address(self) -> int:
        return addressof(self._struct)


def _guarded(call: Callable[[], int], matcher: Matcher, error: int) -> int:
    """The result of `call`; -1 and a message in `error` if it raises, or returns 0 or FAULT because the matcher has a fault."""
    collecting = gc.isenabled()
    gc.disable()  # no garbage collection on a thread of the CUDA driver
    try:
        result = int(call())
        message = matcher.fault if result in (0, MaskStatus.FAULT) else ""
    except Exception as raised:  # becomes the fault of this row
        result, message = -1, f"{type(raised).__name__}: {raised}"
    finally:
        if collecting:
            gc.enable()
    if not message:
        return result
    text = message.encode(errors="replace")[: FAULT_BYTES - 1] + b"\0"
    ctypes.memmove(error, text, len(text))
    return -1


def available_processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _llguidance_note(library: NativeLibrary) -> str:
    """For the capture report: why llguidance rows take the GIL; empty if they do not or llguidance is not installed."""
    if not installed("llguidance"):
        return ""
    try:
        assert library.llguidance
    except Unavailable as error:
        return f" (rows of llguidance take it: {error})"
    return ""


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=6)  # at the caller of Engine(...)
