"""`check_masks`: every token that is accepted is held against the mask that it was chosen under."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.matchers.forced import forced_bytes
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import BITS_PER_WORD

ROWS_KEPT = 16  # more than a round has drafts: a token may be accepted again after the drafts behind it were taken back


class CheckedMatcher:
    """Another matcher, and a fault where its mask and its `accept_token` are of two minds about a token."""

    def __init__(self, inner: Matcher, backend: str) -> None:
        self._inner, self._backend = inner, backend
        self._rows: dict[int, npt.NDArray[np.int32]] = {}  # by the number of tokens in front
        self._num_accepted = 0
        self._disagreement = ""

    @property
    def inner(self) -> Matcher:
        return self._inner

    @property
    def backend(self) -> str:
        return self._backend

    @property
    def num_accepted(self) -> int:
        return self._num_accepted

    @property
    def latest_row(self) -> npt.NDArray[np.int32] | None:
        """The mask that the next token will be held against."""
        return self._rows.get(self._num_accepted)

    @property
    def fault(self) -> str:
        """Why this matcher is of no further use; empty while it works."""
        return self._inner.fault or self._disagreement

    def accept_token(self, token_id: int) -> bool:
        if self._disagreement:
            return False
        accepted = self._inner.accept_token(token_id)
        row = self._rows.get(self._num_accepted)
        if row is not None and not self._inner.fault:
            self._compare(row, token_id, accepted)
        self._num_accepted += accepted
        return accepted

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        status = self._inner.fill_next_token_bitmask(masks, index)
        row: npt.NDArray[np.int32] = masks[index].numpy()
        if self._disagreement:
            row.fill(0)
            return MaskStatus.FAULT
        self._rows[self._num_accepted] = row.copy()
        self._rows.pop(self._num_accepted - ROWS_KEPT, None)
        return status

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        self._num_accepted -= num_tokens
        self._rows = {place: row for place, row in self._rows.items() if place <= self._num_accepted}

    def forced_bytes(self) -> bytes:
        return b"" if self._disagreement else forced_bytes(self._inner)

    def _compare(self, row: npt.NDArray[np.int32], token_id: int, accepted: bool) -> None:
        in_range = 0 <= token_id < len(row) * BITS_PER_WORD
        allowed = in_range and bool(int(row[token_id // BITS_PER_WORD]) >> token_id % BITS_PER_WORD & 1)
        if allowed != accepted:
            says, does = ("allows", "refuses") if allowed else ("forbids", "takes")
            where = f"token {token_id} behind {self._num_accepted} tokens"
            self._disagreement = f"check_masks: the mask of {self._backend} {says} {where}, accept_token {does} it"
