"""The native host link: a host node is one C function over a plain struct and does not take the GIL.

Rows are processed by a pool of threads that includes the calling one. C borrows rows and matchers; Python keeps them alive until
the rounds that they were pushed with have ended.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.sampling.grammar.link.layout import constants, structs
from stepgraph.sampling.grammar.link.library import NativeLibrary, available_processors
from stepgraph.sampling.grammar.link.native_row import NativeRow, token_struct
from stepgraph.sampling.grammar.link.protocol import NODE_BOUNDS_NS, HostAction, HostStats, HostStep, MatcherRow
from stepgraph.sampling.grammar.matchers.forced import Forcing
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import CONTENT_FIELDS, TAG_FIELDS, HostColumn


class NativeNode:
    """A host node: the addresses of a C function and its data, and everything that the data refers to."""

    def __init__(self, link: NativeLink, library: NativeLibrary, address: int, steps: Sequence[HostStep]) -> None:
        self._link, self._call = link, library.waiting.stepgraph_node
        self._steps = (structs.host_step * len(steps))(*steps)
        self._data = structs.host_node(address, addressof(self._steps), len(steps))
        self.native_address = library.node_address
        self.native_data = addressof(self._data)

    def __call__(self) -> None:
        self._call(self.native_data)


class NativeLink:
    """Drives the matchers of a batch in C. One thread pushes batches; any thread may call the nodes, one at a time.

    `threads`: maximum number of threads that process rows, including the calling one; None: the number of processors.
    `contents_host`: what the masks hold, from which a fill finds the words that it need not write; whatever restores masks_host restores
    it too. None: in own memory, and nothing else writes masks_host.
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
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
                got = f"{tensor.dtype} {tuple(tensor.shape)} of strides {tensor.stride()} on {tensor.device}"
                raise ValueError(f"NativeLink.{name}: got {got}, expected contiguous {dtype} {shape} on cpu")
        if not 1 <= slots <= constants.MAX_SLOTS or depth < 1:
            raise ValueError(
                f"NativeLink: got {slots} slots and depth {depth}, expected 1 to {constants.MAX_SLOTS} slots and a depth of at least 1"
            )
        threads = min(slots, threads or available_processors())
        self.name = f"native, {threads} thread{'s' if threads > 1 else ''}, no GIL"
        self._library, self._slots, self._stages = library, slots, stages
        self._tokens, self._forcing = token_struct(forcing.table) if forcing else None, forcing
        pointers = {name.removesuffix("_host"): tensor.data_ptr() for name, (tensor, _, _) in self._tensors.items()}
        sizes = {"slots": slots, "stages": stages, "words": words, "depth": depth, "helpers": threads - 1}
        shape_struct = structs.link_shape(**pointers, **sizes, node_bounds_ns=NODE_BOUNDS_NS)
        shape_struct.tokens = addressof(self._tokens) if self._tokens else None
        self._address = library.quick.stepgraph_open(byref(shape_struct))
        if not self._address:
            raise MemoryError("NativeLink: out of memory")
        self._finalizer = weakref.finalize(self, library.waiting.stepgraph_close, self._address)
        self._finalizer.atexit = False  # a node may still be running at exit
        self._pushed: collections.deque[tuple[NativeRow | None, ...]] = collections.deque()
        self._released = 0  # pushed rounds whose rows were released
        self._counts = _new_counts()  # used by the launching thread only
        self._last_stats = HostStats()
        self._log: npt.NDArray[np.int64] | None = None
        self._closing = threading.Lock()

    @property
    def stats(self) -> HostStats:
        with self._closing:  # any thread may read them, also while another one closes the link
            if self._finalizer.alive:
                counts = _new_counts()
                self._library.quick.stepgraph_counts(self._address, counts)
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
        rows = tuple(row for row in batch if row is None or isinstance(row, NativeRow))
        assert len(rows) == len(batch) <= self._slots, "rows of another link, or more rows than slots"
        addresses = (c_void_p * len(rows))(*(addressof(row.struct) if row else None for row in rows))
        if self._library.quick.stepgraph_push_batch(self._address, addresses, len(rows)):
            raise RuntimeError(f"NativeLink.push_batch: {len(self._pushed)} rounds are pushed and have not ended, which is the maximum")
        self._pushed.append(rows)

    def release_finished(self) -> None:
        self._require_open()
        counts = self._counts
        self._library.quick.stepgraph_counts(self._address, counts)
        if missed := counts[constants.MISSED]:
            raise RuntimeError(f"NativeLink: {missed} rounds began without a pushed batch")
        while self._released < counts[constants.ENDED]:
            self._pushed.popleft()
            self._released += 1

    def log_nodes(self, log: npt.NDArray[np.int64] | None) -> None:
        self._require_open()
        self._log = log  # C writes to its memory
        self._library.quick.stepgraph_log(self._address, *(None, 0) if log is None else (log.ctypes.data, len(log) - 1))

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
