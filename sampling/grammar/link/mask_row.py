"""One row of a packed mask: its memory, and what it means once it is filled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary


def checked_row(masks: Tensor, index: int, words: int) -> npt.NDArray[np.int32]:
    """Row `index` of masks [rows, words], as the memory that it is."""
    if masks.dtype is not torch.int32 or masks.dim() != 2 or masks.shape[1] != words or masks.device.type != "cpu":
        raise ValueError(f"masks: got {masks.dtype} {tuple(masks.shape)} on {masks.device}, want torch.int32 [rows, {words}] on cpu")
    if not masks.is_contiguous() or not 0 <= index < masks.shape[0]:
        raise ValueError(f"index: got {index} for {masks.shape[0]} rows of stride {masks.stride()}, want a row of a contiguous tensor")
    row: npt.NDArray[np.int32] = masks[index].numpy()
    return row


def classify(row: npt.NDArray[np.int32], vocabulary: Vocabulary) -> MaskStatus:
    """Clear the bits that stand for no text and no end, and say what is left."""
    stops = row & vocabulary.stop_words
    row &= vocabulary.text_words
    status = MaskStatus.OK if row.any() else MaskStatus.COMPLETE if stops.any() else MaskStatus.DEAD_END
    row |= stops
    return status
