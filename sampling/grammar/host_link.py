"""The host side of a round: matchers advance over pinned memory, one row at a time, and never raise for one row's fault.

Knows pinned arrays and matchers; knows nothing of graphs, streams or requests. A round calls `begin`, then for every
constrained row `commit` (the tokens that the target accepted), and `advance` (one draft each). Every mask row that is
filled carries a tag (owner, committed tokens, index, status): a mask of another row, round or place is never used. The
index says which of the row's K + 1 mask rows it is; the stage is the place in pinned memory through which it travels.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.matcher import Matcher
from stepgraph.sampling.grammar.status import ROW_RUNNING, HostColumn, MaskStatus


@dataclass
class MatcherRow:
    """One constrained request as the host nodes see it; touched by them alone from its first round to its last."""

    owner: int
    matcher: Matcher
    committed: int = 0  # tokens of the history that the matcher has accepted for good
    walked: int = 0  # drafts accepted on top of them
    chain: MaskStatus = MaskStatus.NONE  # status of the newest mask row; drafts go on only after OK
    fills: int = 0
    fault: str = ""


@dataclass
class HostStats:
    fills: int = 0
    accepts: int = 0
    rollbacks: int = 0


class HostLink:
    """Drives the matchers of a batch in Python. Called from host nodes of consecutive rounds, which never overlap."""

    name = "python, under the GIL"

    def __init__(self, state_host: Tensor, drafts_host: Tensor, masks_host: Tensor, tags_host: Tensor) -> None:
        self._masks = masks_host  # [stages, B, words] int32
        self._state_np: npt.NDArray[np.int64] = state_host.numpy()  # [B, HOST_COLUMNS]
        self._drafts_np: npt.NDArray[np.int64] = drafts_host.numpy()  # [K, B], -1 where there is none
        self._tags_np: npt.NDArray[np.int64] = tags_host.numpy()  # [stages, B, TAG_FIELDS]
        self._announced: collections.deque[tuple[MatcherRow | None, ...]] = collections.deque()
        self._batch: tuple[MatcherRow | None, ...] = ()
        self.stats = HostStats()

    def announce(self, batch: Sequence[MatcherRow | None]) -> None:
        """Say who sits in which slot of the next round; by the launching thread, before the launch."""
        self._announced.append(tuple(batch))

    def begin(self) -> None:
        """First of all host nodes of a round: take its batch, and withdraw every mask that an earlier round left."""
        self._batch = self._announced.popleft()
        self._tags_np[:] = 0
        self._tags_np[:, :, 2] = np.arange(len(self._tags_np))[:, None]

    def end(self) -> None:
        """Last of all host nodes of a round: let go of matchers whose requests have ended."""
        self._batch = ()

    def start(self, stage: int) -> None:
        """Fill row 0 of the requests that have not been in a round before, at a stage where they have no draft."""
        self._each_row(lambda slot, row: self._start_row(slot, row, stage))

    def commit(self) -> None:
        """Roll back the rejected drafts, accept what the target added, fill row 0."""
        self._each_row(self._commit_row)

    def advance(self, index: int) -> None:
        """Accept draft `index` (from 1), fill row `index`."""
        self._each_row(lambda slot, row: self._advance_row(slot, row, index))

    def _each_row(self, work: Callable[[int, MatcherRow], None]) -> None:
        for slot, row in enumerate(self._batch):
            state = self._state_np[slot]
            if row is None or row.fault or state[HostColumn.OWNER] != row.owner or state[HostColumn.FINISH] != ROW_RUNNING:
                continue
            try:
                work(slot, row)
            except Exception as error:  # one row's fault is that row's error: without a tag the device uses no mask of it
                row.fault = f"{type(error).__name__}: {error}"
            row.fault = row.matcher.fault or row.fault

    def _start_row(self, slot: int, row: MatcherRow, stage: int) -> None:
        if row.chain == MaskStatus.NONE:
            self._fill(slot, row, 0, stage)

    def _commit_row(self, slot: int, row: MatcherRow) -> None:
        state = self._state_np[slot]
        generated = int(state[HostColumn.GENERATED])
        fresh = generated == row.committed
        accepted = 0 if fresh else int(state[HostColumn.ACCEPTED])
        if accepted > row.walked or not (fresh or generated == row.committed + accepted + 1):
            raise RuntimeError(
                f"the history has {generated} tokens, {accepted} from drafts; the matcher had {row.committed} + {row.walked}"
            )
        if row.walked > accepted:
            row.matcher.rollback(row.walked - accepted)
            self.stats.rollbacks += 1
        row.walked = 0
        if not fresh:
            token = int(state[HostColumn.LAST_TOKEN])
            self.stats.accepts += 1
            if not row.matcher.accept_token(token):
                raise RuntimeError(f"token {token} was sampled under a mask of this grammar, and the matcher does not accept it")
            row.committed = generated
        self._fill(slot, row, 0, 0)

    def _advance_row(self, slot: int, row: MatcherRow, index: int) -> None:
        token = int(self._drafts_np[index - 1, slot])
        if token < 0 or row.walked != index - 1 or row.chain != MaskStatus.OK:
            return  # the walk ended at an earlier draft
        self.stats.accepts += 1
        if not row.matcher.accept_token(token):
            row.chain = MaskStatus.ILLEGAL
            self._tags_np[index, slot] = (row.owner, row.committed, index, row.chain)
            return
        row.walked = index
        self._fill(slot, row, index, index)

    def _fill(self, slot: int, row: MatcherRow, index: int, stage: int) -> None:
        self.stats.fills += 1
        row.fills += 1
        row.chain = row.matcher.fill_next_token_bitmask(self._masks[stage], slot)
        self._tags_np[stage, slot] = (row.owner, row.committed, index, row.chain)
