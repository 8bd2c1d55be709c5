"""The native host link: a host node is one C function over a plain struct, and takes no GIL.

Rows are worked on by a pool of threads, sized from the machine, that the calling thread belongs to. The C side borrows
rows and matchers; Python keeps them alive until the rounds that were announced with them have ended. A row whose matcher
is neither library's own (see native_row.py) takes part too, and takes the GIL for its own calls.
"""

from __future__ import annotations

import collections
import ctypes
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from ctypes import addressof, byref, c_void_p

import torch
from torch import Tensor

from stepgraph.sampling.grammar.compile.backends import installed
from stepgraph.sampling.grammar.link.layout import MAX_SLOTS, NodeStruct, ShapeStruct, StepStruct, tokens_struct
from stepgraph.sampling.grammar.link.library import NativeLibrary, Unavailable, load
from stepgraph.sampling.grammar.link.native_row import NativeRow
from stepgraph.sampling.grammar.link.node_log import NodeLog
from stepgraph.sampling.grammar.link.protocol import HostAction, HostLink, HostStats, HostStep, MatcherRow
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.matchers.forced import Forcing
from stepgraph.sampling.grammar.status import TAG_FIELDS, HostColumn
from stepgraph.sampling.grammar.xgrammar_lib.matcher import Matcher

HOST_LINKS = ("auto", "native", "python")

_warned: set[str] = set()


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


class NativeNode:
    """A host node: the address of a C function and of its data, and all that the data points to."""

    def __init__(self, link: NativeLink, library: NativeLibrary, address: int, steps: Sequence[HostStep]) -> None:
        self._link, self._call = link, library.waiting.stepgraph_node
        self._steps = (StepStruct * len(steps))(*(StepStruct(step.action, step.stage) for step in steps))
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
        self.name = f"native, {threads} thread{'s' if threads > 1 else ''}, no GIL{_llguidance_rows(library)}"
        self._library, self._slots, self._stages = library, slots, stages
        self._tokens = tokens_struct(forcing.table) if forcing else None
        sizes = {"slots": slots, "stages": stages, "words": words, "depth": depth, "helpers": threads - 1}
        pointers = {name.removesuffix("_host"): tensor.data_ptr() for name, (tensor, _, _) in self._tensors.items()}
        shape_struct = ShapeStruct(**pointers, **sizes, tokens=ctypes.pointer(self._tokens) if self._tokens else None)
        self._address = library.quick.stepgraph_open(byref(shape_struct))
        if not self._address:
            raise MemoryError("NativeLink: no memory for its rounds")
        self._finalizer = weakref.finalize(self, library.waiting.stepgraph_close, self._address)
        self._finalizer.atexit = False  # a node may still be running then
        self._pushed: collections.deque[tuple[NativeRow | None, ...]] = collections.deque()
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
        if matcher.fault:
            raise ValueError(f"row.matcher: got one that has failed ({matcher.fault}), want one that works")
        return NativeRow(self._library, owner, matcher, committed, self._tensors["masks_host"][0])

    def node(self, steps: Sequence[HostStep]) -> NativeNode:
        self._require_open()
        for place, step in enumerate(steps):
            first, last = place == 0, place == len(steps) - 1
            assert (step.action != HostAction.BEGIN_ROUND or first) and (step.action != HostAction.END_ROUND or last), steps
            least, most = {HostAction.FILL_NEW: (0, self._stages - 1), HostAction.ADVANCE: (1, self._stages - 1)}.get(step.action, (0, 0))
            assert least <= step.stage <= most, steps
        assert steps
        return NativeNode(self, self._library, self._address, steps)

    def push_batch(self, batch: Sequence[MatcherRow | None]) -> None:
        self._require_open()
        rows = tuple(row for row in batch if row is None or isinstance(row, NativeRow))
        assert len(rows) == len(batch) <= self._slots, "rows of another link, or more than there are slots"
        self.release_finished()
        addresses = (c_void_p * len(rows))(*(addressof(row.struct) if row else None for row in rows))
        if self._library.quick.stepgraph_push_batch(self._address, addresses, len(rows)):
            raise RuntimeError(f"NativeLink.push_batch: {len(self._pushed)} rounds are announced and have not ended, want no more")
        self._pushed.append(rows)

    def release_finished(self) -> None:
        self._require_open()
        counts = self._library.counts(self._address)
        if counts.missed:
            raise RuntimeError(f"NativeLink: {counts.missed} rounds began that were not announced")
        while self._gone < counts.ended:
            self._pushed.popleft()
            self._gone += 1

    def note_nodes(self, log: NodeLog | None) -> None:
        self._require_open()
        self._log = log  # as long as the C side may write it
        self._library.quick.stepgraph_log(self._address, log.address if log else None, log.room if log else 0)

    def close(self) -> None:
        self._last_stats = self.stats
        with self._closing:
            self._finalizer()
        self._pushed.clear()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("NativeLink: it is closed")


def _llguidance_rows(library: NativeLibrary) -> str:
    """For the capture report: that they take the GIL, and why; empty where they do not, or cannot be."""
    if not installed("llguidance"):
        return ""
    try:
        assert library.llguidance
    except Unavailable as error:
        return f" (rows of llguidance take it: {error})"
    return ""


def available_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=5)  # who made the engine
