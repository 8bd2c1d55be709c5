"""Selects the tokens that a head proposes: the frequent ones, and those that grammars need."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling.grammar.vocabulary import Vocabulary


def always_proposed(vocabulary: Vocabulary) -> list[int]:
    """Stop ids, and the lowest id of every printable ASCII character."""
    found: dict[bytes, int] = {}
    for token_id, spelled in enumerate(vocabulary.tokens):
        if len(spelled) == 1 and (0x20 <= spelled[0] < 0x7F or spelled == b"\n") and token_id not in vocabulary.stop_token_ids:
            found.setdefault(spelled, token_id)
    return [*vocabulary.stop_token_ids, *found.values()]


def check_count(vocabulary: Vocabulary, count: int) -> None:
    """ValueError if `count` is out of range."""
    least, known = len(always_proposed(vocabulary)), len(vocabulary.tokens)
    if not least <= count <= known:
        raise ValueError(
            f"--draft-vocab: got {count}, expected {least}, for stop ids and single characters, to {known}, the target's tokens"
        )


def choose_proposed(frequencies: Tensor, vocabulary: Vocabulary, count: int | None) -> Tensor:
    """[count] target ids in ascending order; None for all. Ties go to the lower id."""
    known = len(vocabulary.tokens)
    if count is None or count == known:
        return torch.arange(known)
    check_count(vocabulary, count)
    ranked = torch.argsort(frequencies[:known], descending=True, stable=True).tolist()
    return torch.tensor(sorted(list(dict.fromkeys([*always_proposed(vocabulary), *ranked]))[:count]))
