"""The native host link: a host node is one C function over a plain struct and does not take the GIL.

C does not own rows and matchers; Python keeps them alive until the rounds that they were pushed with have ended.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import math
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64, c_void_p
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.sampling.c_declarations import constants, declare, structs
from stepgraph.sampling.grammar.automaton.grammar import AutomatonMatcher
from stepgraph.sampling.grammar.compile.backends import is_installed
from stepgraph.sampling.grammar.link.llguidance_binding import LLGuidanceBinding, llguidance_api
from stepgraph.sampling.grammar.link.protocol import NODE_BOUNDS_NS, HostAction, HostLink, HostStats, HostStep, MatcherRow
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.link.xgrammar_binding import XGrammarBinding, check_versions, versions_are_tested
from stepgraph.sampling.grammar.matchers.forced import Forcing
from stepgraph.sampling.grammar.matchers.library import LibraryMatcher
from stepgraph.sampling.grammar.matchers.marker import MarkerMatcher
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import CONTENT_FIELDS, TAG_FIELDS, HostColumn
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarMatcher
from stepgraph.sampling.lifetimes import call_after_fork
from stepgraph.sampling.native import Unavailable, find_library, open_library

HostLinkName = Literal["auto", "native", "python"]
NO_LIMIT = (1 << 63) - 1


class NativeLibrary:
    """The loaded library, and the grammar libraries that it calls; Unavailable if it, or one of them that is installed, cannot be called.

    Functions called on `with_gil` keep the GIL because they only access a few words; `without_gil` releases it.
    """

    def __init__(self, path: Path) -> None:
        self.without_gil = open_library(path)
        self.with_gil = ctypes.PyDLL(str(path))
        declare(self.with_gil)
        check_versions()
        if not versions_are_tested():
            _ = self.xgrammar
        self.llguidance = LLGuidanceBinding(self.without_gil, llguidance_api()) if is_installed("llguidance") else None
        self.node_address = int(ctypes.cast(self.without_gil.stepgraph_node, c_void_p).value or 0)

    @functools.cached_property
    def xgrammar(self) -> XGrammarBinding:
        """Bound when a grammar first needs it, because xgrammar imports transformers; bound at once if its version is not a known one."""
        return XGrammarBinding(self.with_gil)


def available_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def load() -> NativeLibrary:
    """The library of this installation. Raises Unavailable with the reason if it cannot be used."""
    return NativeLibrary(find_library())


class NativeRow:
    """One constrained request: a struct that host nodes access, and everything that the struct points to."""

    def __init__(self, library: NativeLibrary, owner: int, matcher: Matcher, committed: int, masks_host: Tensor) -> None:
        self.owner, self.matcher = owner, matcher
        self._library = library
        self.struct = structs.matcher_row(owner=owner, committed=committed)
        if isinstance(matcher, MarkerMatcher):
            self._set_marker(matcher, room=len(masks_host))
            matcher = matcher.inner
        assert isinstance(matcher, (AutomatonMatcher, LibraryMatcher)) and matcher.vocabulary.mask_words == masks_host.shape[-1]
        if isinstance(matcher, LibraryMatcher):
            self._set_library(matcher)
        else:
            self.struct.library, self.struct.matcher = addressof(matcher.functions), matcher.handle
            self.struct.grammar = matcher.grammar.image_id
            self.struct.fuel_seconds = math.inf  # a step is a look-up, so no limit is needed

    def _set_marker(self, matcher: MarkerMatcher, room: int) -> None:
        """A rollback removes at most as many tokens as a round has drafts; the ring has one state more."""
        marker, vocabulary = matcher.marker, matcher.marker.vocabulary
        self._states = np.full(room, matcher.state, np.int32)
        arrays = {name: getattr(marker, name).ctypes.data for name in ("symbols", "fallback", "mask_index", "masks")}
        self._table = structs.marker_table(**arrays, num_tokens=len(vocabulary.tokens), complete=marker.complete)
        self._table.words, self._table.limit = vocabulary.mask_words, NO_LIMIT if marker.limit is None else marker.limit
        if marker.text:
            self._table.bytes, self._table.starts = (array.ctypes.data for array in vocabulary.texts)
        self.struct.marker = structs.marker_progress(table=addressof(self._table), states=self._states.ctypes.data, room=room)
        self.struct.marker.num_free = matcher.num_free

    def _set_library(self, matcher: LibraryMatcher) -> None:
        vocabulary, text_words, struct = matcher.vocabulary, matcher.text_words, self.struct
        self._words = text_words, vocabulary.stop_words, np.flatnonzero(text_words != -1).astype(np.int32)
        struct.text_words, struct.stop_words, struct.partial_words = (words.ctypes.data for words in self._words)
        struct.num_partial = len(self._words[2])
        struct.num_tokens, struct.fuel_seconds = len(vocabulary.tokens), matcher.fuel_seconds
        if isinstance(matcher, XGrammarMatcher):
            struct.library = addressof(self._library.xgrammar.struct)
            struct.matcher = int(matcher.library_matcher._handle.__chandle__())
        else:  # an LLGuidanceMatcher, which has no pointer to the library's matcher; its module may be missing
            llguidance, text = self._library.llguidance, matcher.library_matcher
            assert llguidance is not None
            struct.library = llguidance.address
            struct.matcher = llguidance.open_matcher(self, text.native_grammar, text.accepted_tokens, struct.stop_words)

    @property
    def fault(self) -> str:
        text: bytes = self._library.with_gil.stepgraph_fault(byref(self.struct))
        return text.decode(errors="replace")


class NativeNode:
    """A host node: the addresses of a C function and its data, and everything that the data refers to."""

    def __init__(self, link: NativeLink, library: NativeLibrary, address: int, steps: Sequence[HostStep]) -> None:
        self._link, self._call = link, library.without_gil.stepgraph_node
        self._steps = (structs.host_step * len(steps))(*steps)
        self._data = structs.host_node(address, addressof(self._steps), len(steps))
        self.native_address = library.node_address
        self.native_data = addressof(self._data)

    def __call__(self) -> None:
        self._call(self.native_data)


class NativeLink:
    """Drives the matchers of a batch in C. One thread pushes batches; any thread may call the nodes, one at a time.

    `threads`: maximum number of threads that process rows, including the calling one; None: the number of processors.
    `contents_host`: the content of each mask, with which a fill skips words that are already right; it must be restored together with
    masks_host. None: the link allocates it, and nothing else may write to masks_host.
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
        contents_host: Tensor | None = None,
    ) -> None:
        stages, slots, words = masks_host.shape
        self._tensors = {  # C holds their addresses
            "state_host": (state_host, torch.int64, (slots, len(HostColumn))),
            "drafts_host": (drafts_host, torch.int64, (stages - 1, slots)),
            "masks_host": (masks_host, torch.int32, (stages, slots, words)),
            "tags_host": (tags_host, torch.int64, (stages, slots, TAG_FIELDS)),
        }
        contents_host = torch.zeros(stages, slots, CONTENT_FIELDS, dtype=torch.int64) if contents_host is None else contents_host
        self._tensors["contents_host"] = contents_host, torch.int64, (stages, slots, CONTENT_FIELDS)
        if forcing:
            self._tensors["forced_host"] = forcing.forced_host, torch.int64, (stages - 1, slots)
        for name, (tensor, dtype, shape) in self._tensors.items():
            assert (tensor.dtype, tuple(tensor.shape), tensor.device.type) == (dtype, shape, "cpu") and tensor.is_contiguous(), name
        threads = min(slots, threads or available_processors())
        self.name = f"native, {threads} thread{'s' if threads > 1 else ''}, no GIL"
        self._library, self._slots, self._stages, self._forcing = library, slots, stages, forcing
        pointers = {name.removesuffix("_host"): tensor.data_ptr() for name, (tensor, _, _) in self._tensors.items()}
        sizes = {"slots": slots, "stages": stages, "words": words, "depth": depth, "helpers": threads - 1}
        shape_struct = structs.link_shape(**pointers, **sizes, node_bounds_ns=NODE_BOUNDS_NS)
        if forcing:
            table = forcing.table
            arrays = {"text": table.bytes.ctypes.data, "starts": table.starts.ctypes.data, "slots": table.slots.ctypes.data}
            self._tokens = structs.token_table(**arrays, num_tokens=table.num_tokens, num_slots=len(table.slots), merges=table.merges)
            shape_struct.tokens = addressof(self._tokens)
        self._address = library.with_gil.stepgraph_open(byref(shape_struct))
        if not self._address:
            raise MemoryError("NativeLink: out of memory")
        self._finalizer = weakref.finalize(self, library.without_gil.stepgraph_close, self._address)
        self._finalizer.atexit = False  # a node may still be running at exit
        self._pushed: collections.deque[tuple[MatcherRow | None, ...]] = collections.deque()
        self._released = 0  # pushed rounds whose rows were released
        self._counts = _new_counts()  # used by the launching thread only
        self._last_stats = HostStats()
        self._log: npt.NDArray[np.int64] | None = None
        self._closing = threading.RLock()  # reentrant: a signal handler may call Engine.stats()
        call_after_fork(self._detach)

    def _detach(self) -> None:
        self._closing = threading.RLock()  # for `stats` in a fork

    @property
    def stats(self) -> HostStats:
        with self._closing:  # any thread may read the counters, also while another thread closes the link
            if self._finalizer.alive:
                counts = _new_counts()
                self._library.with_gil.stepgraph_counts(self._address, counts)
                fills, accepts, rollbacks, looks, node_ns, longest_ns, *nodes = counts[constants.FILLS :]
                self._last_stats = HostStats(fills, accepts, rollbacks, looks, node_ns, longest_ns, tuple(nodes))
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
            fills = step.action in (HostAction.NEXT, HostAction.ADVANCE, HostAction.FOLLOW)
            low, high = (1, self._stages - 1) if fills else (0, 0)
            assert low <= step.stage <= high, steps
        assert steps
        return NativeNode(self, self._library, self._address, steps)

    def push_batch(self, batch: Sequence[MatcherRow | None]) -> None:
        self.release_finished()
        assert {*map(type, batch)} <= {NativeRow, type(None)} and len(batch) <= self._slots, "rows of another link, or more rows than slots"
        addresses = (c_void_p * len(batch))(*[addressof(row.struct) if isinstance(row, NativeRow) else None for row in batch])
        if self._library.with_gil.stepgraph_push_batch(self._address, addresses, len(batch)):
            raise RuntimeError(f"NativeLink.push_batch: {len(self._pushed)} rounds are pushed and have not ended, which is the maximum")
        self._pushed.append(tuple(batch))

    def release_finished(self) -> None:
        self._require_open()
        counts = self._counts
        self._library.with_gil.stepgraph_counts(self._address, counts)
        if missed := counts[constants.MISSED]:
            raise RuntimeError(f"NativeLink: {missed} rounds began without a pushed batch")
        while self._released < counts[constants.ENDED]:
            self._pushed.popleft()
            self._released += 1

    def log_nodes(self, log: npt.NDArray[np.int64] | None) -> None:
        self._require_open()
        self._log = log  # C writes to its memory
        self._library.with_gil.stepgraph_log(self._address, *(None, 0) if log is None else (log.ctypes.data, len(log) - 1))

    def close(self) -> None:
        self._last_stats = self.stats
        with self._closing:
            self._finalizer()
        self._pushed.clear()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("NativeLink: it is closed")


def _new_counts() -> Any:
    return (c_int64 * constants.COUNTS)()


def open_host_link(
    choice: str,
    state_host: Tensor,
    drafts_host: Tensor,
    masks_host: Tensor,
    tags_host: Tensor,
    depth: int,
    forcing: Forcing | None = None,
    check_masks: bool = False,
    contents_host: Tensor | None = None,
) -> HostLink:
    """The host link for `EngineConfig.host_link`. `auto` is the native link if it is available, else the Python link and a warning.

    `depth`: maximum number of rounds that are pushed and not ended. `forcing`: where forced tokens are written; None: they are not
    searched. `contents_host`: as for NativeLink. `check_masks`: masks are compared in Python, so the link is the Python one.
    RuntimeError if `native` is not available.
    """
    assert choice in get_args(HostLinkName)
    reason = "check_masks compares masks in Python" if check_masks else ""
    if choice != "python" and not check_masks:
        try:
            return NativeLink(load(), state_host, drafts_host, masks_host, tags_host, depth, forcing=forcing, contents_host=contents_host)
        except Unavailable as error:
            if choice == "native":
                raise RuntimeError(f"host_link 'native': {error}") from error
            reason = f"no native link, {error}"
            _warn_once(f"stepgraph: grammars are driven from Python, under the GIL: {reason}")
    return PythonLink(state_host, drafts_host, masks_host, tags_host, reason, forcing)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=6)  # the caller of Engine(...), which has one wrapper
