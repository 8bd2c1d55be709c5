"""The interface of all matchers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from stepgraph.sampling.grammar.status import MaskStatus


class Matcher(Protocol):
    """The state of one constrained text: a round accepts tokens, rolls them back, and fills masks of the tokens that may follow.

    A matcher is used by one thread at a time, and whatever changes the token history must change the matcher in the same way.
    """

    def accept_token(self, token_id: int) -> bool:
        """Append one token; False, and no change, if the grammar does not allow it. The caller must check the result."""

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        """Write row `index` of masks [rows, mask_words] int32: bit i is set if token i may come next."""

    def rollback(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` accepted tokens, including a stop token."""

    def forced_bytes(self) -> bytes:
        """The bytes that must come next, as far as they are known; the last character may be incomplete. Leaves the matcher unchanged."""

    @property
    def fault(self) -> str:
        """Why the matcher can no longer be used; empty while it works."""
