"""The tables of a vocabulary on the device, beside the images of its grammars."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepgraph.sampling.grammar.automaton.grammar import token_table
from stepgraph.sampling.grammar.matchers import forced
from stepgraph.sampling.grammar.vocabulary import Vocabulary


class TokenTensors(NamedTuple):
    """The tables of a vocabulary on a device, as `image_vocabulary` of image.h."""

    token_text: Tensor  # [bytes] uint8, of all tokens
    token_starts: Tensor  # [tokens + 1] int32
    plain_rows: Tensor  # [n, words] int32
    stop_words: Tensor  # [words] int32


class SplitTensors(NamedTuple):
    """With what a device splits text into tokens: of the vocabulary's `forced.TokenTable`."""

    token_slots: Tensor  # [n, 2] int64
    merges: bool


def split_tensors(vocabulary: Vocabulary, device: torch.device) -> SplitTensors:
    table = forced.token_table(vocabulary)
    return SplitTensors(torch.from_numpy(table.slots).to(device), table.merges)


def token_tensors(vocabulary: Vocabulary, device: torch.device) -> TokenTensors:
    """Copies of the tables with which the grammars of this vocabulary are compiled."""
    view = token_table(vocabulary).view
    starts = _copied(view.starts, (view.num_tokens + 1,), ctypes.c_int32)
    return TokenTensors(
        _copied(view.text, (max(int(starts[-1]), 1),), ctypes.c_uint8).to(device),
        starts.to(device),
        _copied(view.plain, (view.plain_rows, view.words), ctypes.c_int32).to(device),
        _copied(view.stop_words, (view.words,), ctypes.c_int32).to(device),
    )


def _copied(address: int, shape: tuple[int, ...], kind: type[ctypes.c_int32] | type[ctypes.c_uint8]) -> Tensor:
    size = int(np.prod(shape))
    return torch.from_numpy(np.ctypeslib.as_array((kind * size).from_address(address)).reshape(shape).copy())
