"""The host link in Python: the reference for the native link, and the fallback if that is not available.

Its nodes run in the order of the rounds. An exception in a row's matcher becomes the fault of that row; a node never raises it.
"""

from __future__ import annotations

import bisect
import collections
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.link.protocol import NODE_BOUNDS_NS, HostAction, HostStats, HostStep, MatcherRow
from stepgraph.sampling.grammar.matchers.forced import ForcedText, Forcing
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import FinishCode, HostColumn, MaskStatus


@dataclass
class PythonRow:
    owner: int
    matcher: Matcher
    committed: int = 0  # tokens of the history that the matcher has accepted permanently
    pending_drafts: int = 0  # drafts accepted after the committed tokens
    next_mask: int = 0  # index after the latest mask that was due
    last_mask_status: MaskStatus = MaskStatus.NONE  # drafts are accepted only after OK
    fault: str = ""
    forced: ForcedText = field(default_factory=ForcedText)


class PythonLink:
    """Processes all rows one after another, under the GIL. `reason`: why the native link is not used, for the capture report."""

    def __init__(
        self,
        state_host: Tensor,
        drafts_host: Tensor,
        masks_host: Tensor,
        tags_host: Tensor,
        reason: str = "",
        forcing: Forcing | None = None,
    ) -> None:
        self.name = f"python, under the GIL: {reason}" if reason else "python, under the GIL"
        self._masks = masks_host  # [stages, B, words] int32
        self._state_np: npt.NDArray[np.int64] = state_host.numpy()  # [B, HOST_COLUMNS]
        self._drafts_np: npt.NDArray[np.int64] = drafts_host.numpy()  # [K, B], -1: no draft
        self._tags_np: npt.NDArray[np.int64] = tags_host.numpy()  # [stages, B, TAG_FIELDS]
        self._pushed: collections.deque[tuple[PythonRow | None, ...]] = collections.deque()
        self._batch: tuple[PythonRow | None, ...] = ()
        self._forcing = forcing
        self._fills = self._accepts = self._rollbacks = self._looks = 0
        self._node_ns = self._longest_ns = 0
        self._nodes = [0] * (len(NODE_BOUNDS_NS) + 1)
        self._log: npt.NDArray[np.int64] | None = None

    @property
    def stats(self) -> HostStats:
        times = self._node_ns, self._longest_ns, tuple(self._nodes)
        return HostStats(self._fills, self._accepts, self._rollbacks, self._looks, *times)

    def row(self, owner: int, matcher: Matcher, committed: int = 0) -> PythonRow:
        return PythonRow(owner, matcher, committed)

    def node(self, steps: Sequence[HostStep]) -> Callable[[], object]:
        def run() -> None:
            begin = time.perf_counter_ns()
            for step in steps:
                self._run(step)
            end = time.perf_counter_ns()
            self._node_ns += end - begin
            self._longest_ns = max(self._longest_ns, end - begin)
            self._nodes[bisect.bisect_left(NODE_BOUNDS_NS, end - begin)] += 1
            if self._log is not None and self._log[0, 0] < len(self._log) - 1:
                self._log[0, 0] += 1
                self._log[self._log[0, 0]] = steps[0].action == HostAction.BEGIN_ROUND, begin, end

        return run

    def push_batch(self, batch: Sequence[MatcherRow | None]) -> None:
        rows = tuple(row for row in batch if row is None or isinstance(row, PythonRow))
        assert len(rows) == len(batch), "rows of another link"
        self._pushed.append(rows)

    def release_finished(self) -> None:
        """Does nothing: END_ROUND releases the rows."""

    def log_nodes(self, log: npt.NDArray[np.int64] | None) -> None:
        self._log = log

    def close(self) -> None:
        """Does nothing: the link has no threads and no memory of its own."""

    def _run(self, step: HostStep) -> None:
        if step.action == HostAction.BEGIN_ROUND:
            self._batch = self._pushed.popleft()
            self._tags_np[:] = 0
            self._tags_np[:, :, 2] = np.arange(len(self._tags_np))[:, None]
            if self._forcing:
                self._forcing.forced_host.fill_(-1)
        elif step.action == HostAction.END_ROUND:
            self._batch = ()
        else:
            for slot, row in enumerate(self._batch):
                state = self._state_np[slot]
                if row and not row.fault and state[HostColumn.OWNER] == row.owner and state[HostColumn.FINISH] == FinishCode.RUNNING:
                    _guarded(row, functools.partial(self._run_row, step, slot, row))

    def _run_row(self, step: HostStep, slot: int, row: PythonRow) -> None:
        action, stage = step
        is_behind = row.last_mask_status == MaskStatus.NONE or row.committed != self._state_np[slot, HostColumn.GENERATED]
        if action == HostAction.COMMIT or (action == HostAction.NEXT and is_behind):
            self._commit_row(slot, row, stage)
            return
        forced = int(self._forcing.forced_host[stage - 1, slot]) if action == HostAction.FOLLOW and self._forcing else -1
        token = int(self._drafts_np[stage - 1, slot]) if forced < 0 else forced
        self._advance_row(slot, row, token, row.next_mask if action == HostAction.NEXT else stage, stage)

    def _commit_row(self, slot: int, row: PythonRow, stage: int) -> None:
        state = self._state_np[slot]
        generated = int(state[HostColumn.GENERATED])
        fresh = generated == row.committed
        accepted = 0 if fresh else int(state[HostColumn.ACCEPTED])
        if not 0 <= accepted <= row.pending_drafts or not (fresh or generated == row.committed + accepted + 1):
            raise RuntimeError(
                f"the history has {generated} tokens, {accepted} from drafts; the matcher had {row.committed} + {row.pending_drafts}"
            )
        if row.pending_drafts > accepted:
            row.matcher.rollback(row.pending_drafts - accepted)
            if row.matcher.fault:
                return
            self._rollbacks += 1
        row.pending_drafts, row.next_mask = 0, 1
        if not fresh:
            token = int(state[HostColumn.LAST_TOKEN])
            self._accepts += 1
            if not row.matcher.accept_token(token):
                raise RuntimeError(f"token {token} was sampled under a mask of this grammar, and the matcher does not accept it")
            row.forced.accepted(generated - 1, token)
            row.committed = generated
        self._fill(slot, row, 0, stage)

    def _advance_row(self, slot: int, row: PythonRow, token: int, index: int, stage: int) -> None:
        row.next_mask = index + 1
        if token < 0 or row.pending_drafts != index - 1 or row.last_mask_status != MaskStatus.OK:
            return  # an earlier draft ended the walk
        self._accepts += 1
        _guarded(row, lambda: self._accept_draft(slot, row, token, index, stage))
        if row.fault or row.pending_drafts != index:  # the draft itself is still verified, by the mask before it
            row.last_mask_status = MaskStatus.FAULT if row.fault else MaskStatus.ILLEGAL
            self._tags_np[stage, slot] = (row.owner, row.committed, index, row.last_mask_status)

    def _accept_draft(self, slot: int, row: PythonRow, token: int, index: int, stage: int) -> None:
        if row.matcher.accept_token(token):
            row.forced.accepted(row.committed + index - 1, token)
            row.pending_drafts = index
            self._fill(slot, row, index, stage)

    def _fill(self, slot: int, row: PythonRow, index: int, stage: int) -> None:
        self._fills += 1
        row.last_mask_status = row.matcher.fill_next_token_bitmask(self._masks[stage], slot)
        self._tags_np[stage, slot] = (row.owner, row.committed, index, row.last_mask_status)
        if row.last_mask_status == MaskStatus.OK and stage == index:
            self._force(slot, row, index)

    def _force(self, slot: int, row: PythonRow, index: int) -> None:
        """Write the token that is forced after mask `index`."""
        if self._forcing is None or index == len(self._forcing.forced_host):
            return
        mask, find = self._masks[index, slot].numpy(), functools.partial(self._find_forced, row)
        self._forcing.forced_host[index, slot] = row.forced.propose(row.committed + index, mask, self._forcing.table, find)

    def _find_forced(self, row: PythonRow) -> bytes:
        self._looks += 1
        return row.matcher.forced_bytes()


def _guarded(row: PythonRow, work: Callable[[], None]) -> None:
    """An exception becomes the fault of the row: without a valid tag the device uses no mask of it, and other rows continue."""
    try:
        work()
    except Exception as error:
        row.fault = f"{type(error).__name__}: {error}"
    row.fault = row.matcher.fault or row.fault
