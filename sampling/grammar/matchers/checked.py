"""`check_masks`: compares every accepted token with the mask under which it was chosen."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import allows

MAX_KEPT_MASKS = 16  # more than the drafts of a round: after a rollback a token is compared with the mask of an earlier position


class CheckedMatcher:
    """A matcher that gets a fault if the mask and `accept_token` of the inner matcher disagree about a token."""

    def __init__(self, inner: Matcher, backend: str) -> None:
        self._inner, self._backend = inner, backend
        self._masks: dict[int, npt.NDArray[np.int32]] = {}  # number of tokens before the mask -> mask
        self._num_accepted = 0
        self._disagreement = ""

    @property
    def fault(self) -> str:
        return self._inner.fault or self._disagreement

    def accept_token(self, token_id: int) -> bool:
        if self._disagreement:
            return False
        accepted = self._inner.accept_token(token_id)
        mask = self._masks.get(self._num_accepted)
        if mask is not None and not self._inner.fault:
            self._compare(mask, token_id, accepted)
        self._num_accepted += accepted
        return accepted

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        status = self._inner.fill_next_token_bitmask(masks, index)
        mask: npt.NDArray[np.int32] = masks[index].numpy()
        if self._disagreement:
            mask.fill(0)
            return MaskStatus.FAULT
        self._masks[self._num_accepted] = mask.copy()
        self._masks.pop(self._num_accepted - MAX_KEPT_MASKS, None)
        return status

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        self._num_accepted -= num_tokens
        self._masks = {position: mask for position, mask in self._masks.items() if position <= self._num_accepted}

    def forced_bytes(self) -> bytes:
        return b"" if self._disagreement else self._inner.forced_bytes()

    def _compare(self, mask: npt.NDArray[np.int32], token_id: int, accepted: bool) -> None:
        if accepted != allows(mask, token_id):
            verdicts = ("forbids", "accepts") if accepted else ("allows", "rejects")
            where = f"token {token_id} after {self._num_accepted} tokens"
            self._disagreement = f"check_masks: the mask of {self._backend} {verdicts[0]} {where}, accept_token {verdicts[1]} it"
