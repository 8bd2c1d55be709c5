"""The interface of all matchers, and the two functions with which they access and classify a mask row."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary


class Matcher(Protocol):
    """The state of one constrained text: a round accepts tokens, rolls them back, and fills masks of the tokens that may follow.

    A matcher is used by one thread at a time, and the object that changes the token history also moves the matcher.
    """

    def accept_token(self, token_id: int) -> bool:
        """Append one token; False, and no change, where the grammar does not allow it. The caller must check the result."""

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        """Write row `index` of masks [rows, mask_words] int32: bit i is set where token i may come next."""

    def rollback(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` accepted tokens, a stop token included."""

    @property
    def fault(self) -> str:
        """Why the matcher can no longer be used; empty while it works."""


def checked_row(masks: Tensor, index: int, words: int) -> npt.NDArray[np.int32]:
    """Row `index` of masks [rows, words] as an array over the same memory."""
    if masks.dtype is not torch.int32 or masks.dim() != 2 or masks.shape[1] != words or masks.device.type != "cpu":
        raise ValueError(f"masks: got {masks.dtype} {tuple(masks.shape)} on {masks.device}, expected torch.int32 [rows, {words}] on cpu")
    if not masks.is_contiguous() or not 0 <= index < masks.shape[0]:
        raise ValueError(f"index: got {index} for {masks.shape[0]} rows of stride {masks.stride()}, expected a row of a contiguous tensor")
    row: npt.NDArray[np.int32] = masks[index].numpy()
    return row


def classify(row: npt.NDArray[np.int32], vocabulary: Vocabulary) -> MaskStatus:
    """Clear the bits of a filled row that are neither text nor a stop token, and return what remains."""
    stops = row & vocabulary.stop_words
    row &= vocabulary.text_words
    status = MaskStatus.OK if row.any() else MaskStatus.COMPLETE if stops.any() else MaskStatus.DEAD_END
    row |= stops
    return status
