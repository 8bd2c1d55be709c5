"""The native host link: a host node is one C function over a plain struct, and takes no GIL.

Rows are worked on by a pool of threads, sized from the machine, that the calling thread belongs to. The C side borrows
rows and matchers; Python keeps them alive until the rounds that were announced with them have ended. A row whose matcher
is neither library's own takes part too, and takes the GIL for its own calls.
"""

from __future__ import annotations

import collections
import ctypes
import math
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from ctypes import addressof, byref, c_uint32, c_void_p
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.sampling.grammar.backends import installed
from stepgraph.sampling.grammar.forced_tokens import Forcing
from stepgraph.sampling.grammar.host_link import HostAction, HostLink, HostStats, HostStep, MatcherRow
from stepgraph.sampling.grammar.matcher import Matcher, XGrammarMatcher
from stepgraph.sampling.grammar.native import NativeLibrary, Unavailable, load
from stepgraph.sampling.grammar.native.callbacks import PythonLibrary
from stepgraph.sampling.grammar.native.layout import MAX_SLOTS, NodeStruct, RowStruct, ShapeStruct, StepStruct, tokens_struct
from stepgraph.sampling.grammar.native.llguidance_binding import LLGuidanceNativeGrammar, LLGuidanceStart
from stepgraph.sampling.grammar.node_log import NodeLog
from stepgraph.sampling.grammar.python_link import PythonLink
from stepgraph.sampling.grammar.status import TAG_FIELDS, HostColumn, MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary

HOST_LINKS = ("auto", "native", "python")

_warned: set[str] = set()
_mixed: weakref.WeakKeyDictionary[Vocabulary, npt.NDArray[np.int32]] = weakref.WeakKeyDictionary()  # words with ids that are no text


def open_host_link(
    choice: str,
    state_host: Tensor,
    drafts_host: Tensor,
    masks_host: Tensor,
    tags_host: Tensor,
    depth: int,
    forcing: Forcing | None = None,
) -> HostLink:
    """`native` or `python` is what was asked for, or a RuntimeError; `auto` is native where it can be, and a warning where not.

    `depth` is how many rounds may be announced and not yet ended. `forcing`: where forced tokens go; None: none are looked for.
    """
    why = ""
    if choice not in HOST_LINKS:
        raise ValueError(f"host_link: got {choice!r}, want one of {', '.join(HOST_LINKS)}")
    if choice != "python":
        try:
            return NativeLink(load(), state_host, drafts_host, masks_host, tags_host, depth, forcing=forcing)
        except Unavailable as error:
            if choice == "native":
                raise RuntimeError(f"host_link 'native': {error}") from error
            why = f"no native link, {error}"
            _warn_once(f"stepgraph: grammars are driven from Python, under the GIL: {why}")
    return PythonLink(state_host, drafts_host, masks_host, tags_host, why, forcing)


@runtime_checkable
class Copied(Protocol):
    """llguidance's matcher, which shows no pointer to its inside: a row goes on with a copy. Its module may not be installed."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def fuel_seconds(self) -> float: ...

    @property
    def native_grammar(self) -> LLGuidanceNativeGrammar | None: ...

    @property
    def accepted_tokens(self) -> tuple[int, ...]: ...


class NativeRow:
    """One constrained request. The struct belongs to the host nodes; what is read of it here is for tests and messages."""

    def __init__(self, library: NativeLibrary, owner: int, matcher: Matcher, committed: int, masks_host: Tensor) -> None:
        self.owner, self.matcher = owner, matcher
        self._library = library
        self.struct = RowStruct(owner=owner, committed=committed)
        if isinstance(matcher, XGrammarMatcher):
            self._know(matcher.vocabulary, matcher.fuel_seconds)
            xgrammar = library.xgrammar
            self.struct.library, self.struct.matcher = xgrammar.address, xgrammar.handle_of(matcher.library_matcher)
        elif isinstance(matcher, Copied) and matcher.native_grammar is not None:
            self._know(matcher.vocabulary, matcher.fuel_seconds)
            self._open_llguidance(matcher.native_grammar, matcher.accepted_tokens)
        else:
            self._callbacks = PythonLibrary(matcher, masks_host)
            self.struct.library, self.struct.fuel_seconds = self._callbacks.address, math.inf  # it keeps account of its fuel

    def _know(self, vocabulary: Vocabulary, fuel_seconds: float) -> None:
        """What the row itself sees to, whatever the library."""
        struct = self.struct
        if vocabulary not in _mixed:
            _mixed[vocabulary] = np.flatnonzero(vocabulary.text_words != -1).astype(np.int32)
        self._words = vocabulary.text_words, vocabulary.stop_words, _mixed[vocabulary]
        struct.text_words, struct.stop_words, struct.mixed = (words.ctypes.data for words in self._words)
        struct.num_mixed = len(_mixed[vocabulary])
        struct.num_tokens, struct.fuel_seconds = len(vocabulary.tokens), fuel_seconds

    def _open_llguidance(self, grammar: LLGuidanceNativeGrammar, tokens: Sequence[int]) -> None:
        library, start, functions = self._library, grammar.start, self._library.llguidance.address
        taken = (c_uint32 * len(tokens))(*tokens)
        starts, stop_words = (start.address, grammar.cold.address), self.struct.stop_words
        text = library.waiting.stepgraph_open_llguidance(functions, *starts, stop_words, taken, len(tokens))
        if not text:
            raise MemoryError("NativeRow: no memory for its text")
        weakref.finalize(self, _close_llguidance, library, grammar, start, text).atexit = False
        self.struct.library, self.struct.matcher = functions, text

    @property
    def fault(self) -> str:
        return self._library.fault(self.struct)

    @property
    def committed(self) -> int:
        return int(self.struct.committed)

    @property
    def walked(self) -> int:
        return int(self.struct.walked)

    @property
    def chain(self) -> MaskStatus:
        return MaskStatus(self.struct.chain)

    @property
    def fills(self) -> int:
        return int(self.struct.fills)


class NativeNode:
    """A host node: the address of a C function and of its data, and all that the data points to."""

    def __init__(self, link: NativeLink, library: NativeLibrary, address: int, steps: Sequence[HostStep]) -> None:
        self._link, self._call = link, library.waiting.stepgraph_node
        self._steps = (StepStruct * len(steps))(*(StepStruct(step.action, step.place) for step in steps))
        self._data = NodeStruct(address, self._steps, len(steps))
        self.native_address = library.node_address
        self.native_data = addressof(self._data)

    def __call__(self) -> None:
        self._call(self.native_data)


class NativeLink:
    """Drives the matchers of a batch in C. Announced by one thread; its nodes may be called by any, one at a time.

    `threads` is how many work on the rows at most, the calling one among them; None: as many as there are processors.
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
        self._tensors = {  # the C side holds their addresses
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
                raise ValueError(f"NativeLink.{name}: got {got}, want contiguous {dtype} {shape} on cpu")
        if not 1 <= slots <= MAX_SLOTS or depth < 1:
            raise ValueError(f"NativeLink: got {slots} slots and depth {depth}, want 1 to {MAX_SLOTS} slots and a depth of at least 1")
        threads = min(slots, threads or available_processors())
        taken = f"rows with a marker or under check_masks{_llguidance_rows(library)} take it"
        self.name = f"native, {threads} thread{'s' if threads > 1 else ''}, no GIL ({taken})"
        self._library, self._slots, self._stages, self._words = library, slots, stages, words
        self._tokens = tokens_struct(forcing.table) if forcing else None
        sizes = {"slots": slots, "stages": stages, "words": words, "depth": depth, "helpers": threads - 1}
        pointers = {name.removesuffix("_host"): tensor.data_ptr() for name, (tensor, _, _) in self._tensors.items()}
        shape_struct = ShapeStruct(**pointers, **sizes, tokens=ctypes.pointer(self._tokens) if self._tokens else None)
        self._address = library.quick.stepgraph_open(byref(shape_struct))
        if not self._address:
            raise MemoryError("NativeLink: no memory for its rounds")
        self._finalizer = weakref.finalize(self, library.waiting.stepgraph_close, self._address)
        self._finalizer.atexit = False  # a node may still be running then
        self._announced: collections.deque[tuple[NativeRow | None, ...]] = collections.deque()
        self._gone = 0  # announced rounds whose rows were dropped
        self._last_stats = HostStats()
        self._log: NodeLog | None = None
        self._closing = threading.Lock()

    @property
    def stats(self) -> HostStats:
        with self._closing:  # any thread may ask, also while another one closes
            if self._finalizer.alive:
                counts = self._library.counts(self._address)
                times = counts.node_ns, counts.longest_node_ns, tuple(counts.nodes)
                self._last_stats = HostStats(counts.fills, counts.accepts, counts.rollbacks, counts.looks, *times)
            return self._last_stats

    def row(self, owner: int, matcher: Matcher, committed: int = 0) -> NativeRow:
        if isinstance(matcher, (XGrammarMatcher, Copied)) and matcher.vocabulary.mask_words != self._words:
            raise ValueError(f"row.matcher: got masks of {matcher.vocabulary.mask_words} words, want {self._words}")
        if matcher.fault:
            raise ValueError(f"row.matcher: got one that has failed ({matcher.fault}), want one that works")
        return NativeRow(self._library, owner, matcher, committed, self._tensors["masks_host"][0])

    def node(self, steps: Sequence[HostStep]) -> NativeNode:
        self._require_open()
        for place, step in enumerate(steps):
            first, last = place == 0, place == len(steps) - 1
            assert (step.action != HostAction.BEGIN or first) and (step.action != HostAction.END or last), steps
            least, most = {HostAction.START: (0, self._stages - 1), HostAction.ADVANCE: (1, self._stages - 1)}.get(step.action, (0, 0))
            assert least <= step.place <= most, steps
        assert steps
        return NativeNode(self, self._library, self._address, steps)

    def announce(self, batch: Sequence[MatcherRow | None]) -> None:
        self._require_open()
        rows = tuple(row for row in batch if row is None or isinstance(row, NativeRow))
        assert len(rows) == len(batch) <= self._slots, "rows of another link, or more than there are slots"
        self.let_go()
        addresses = (c_void_p * len(rows))(*(addressof(row.struct) if row else None for row in rows))
        if self._library.quick.stepgraph_announce(self._address, addresses, len(rows)):
            raise RuntimeError(f"NativeLink.announce: {len(self._announced)} rounds are announced and have not ended, want no more")
        self._announced.append(rows)

    def let_go(self) -> None:
        self._require_open()
        counts = self._library.counts(self._address)
        if counts.missed:
            raise RuntimeError(f"NativeLink: {counts.missed} rounds began that were not announced")
        while self._gone < counts.ended:
            self._announced.popleft()
            self._gone += 1

    def note_nodes(self, log: NodeLog | None) -> None:
        self._require_open()
        self._log = log  # as long as the C side may write it
        self._library.quick.stepgraph_log(self._address, log.address if log else None, log.room if log else 0)

    def close(self) -> None:
        self._last_stats = self.stats
        with self._closing:
            self._finalizer()
        self._announced.clear()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("NativeLink: it is closed")


def _close_llguidance(library: NativeLibrary, grammar: LLGuidanceNativeGrammar, start: LLGuidanceStart, text: int) -> None:
    """`start`, and the grammar's cold one, are what the text would begin again with: there until now."""
    kept = library.waiting.stepgraph_close_llguidance(library.llguidance.address, text, grammar.learns)
    if kept:
        grammar.learn(kept)


def _llguidance_rows(library: NativeLibrary) -> str:
    """For the capture report: that they take the GIL as well, and why; empty where they do not, or cannot be."""
    if not installed("llguidance"):
        return ""
    try:
        assert library.llguidance
    except Unavailable as error:
        return f" or of llguidance ({error})"
    return ""


def available_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=5)  # who made the engine
