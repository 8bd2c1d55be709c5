"""Selects the tokens that a head proposes: the frequent ones, and those that grammars need."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling.grammar.vocabulary import Vocabulary


def always_proposed(vocabulary: Vocabulary) -> list[int]:
    """Stop ids, and the lowest id of every printable ASCII character."""
    lowest_ids: dict[bytes, int] = {}
    for token_id, token_bytes in enumerate(vocabulary.tokens):
        if len(token_bytes) == 1 and (0x20 <= token_bytes[0] < 0x7F or token_bytes == b"\n") and token_id not in vocabulary.stop_token_ids:
            lowest_ids.setdefault(token_bytes, token_id)
    return [*vocabulary.stop_token_ids, *lowest_ids.values()]


def check_draft_vocab(vocabulary: Vocabulary, count: int) -> None:
    """ValueError if `count` is out of range."""
    least, num_tokens = len(always_proposed(vocabulary)), len(vocabulary.tokens)
    if not least <= count <= num_tokens:
        raise ValueError(
            f"--draft-vocab: got {count}, expected {least}, for stop ids and single characters, to {num_tokens}, the target's tokens"
        )


def choose_proposed(frequencies: Tensor, vocabulary: Vocabulary, count: int | None) -> Tensor:
    """[count] target ids in ascending order; None for all. Ties go to the lower id."""
    num_tokens = len(vocabulary.tokens)
    if count is None or count == num_tokens:
        return torch.arange(num_tokens)
    check_draft_vocab(vocabulary, count)
    ranked = torch.argsort(frequencies[:num_tokens], descending=True, stable=True).tolist()
    return torch.tensor(sorted(list(dict.fromkeys([*always_proposed(vocabulary), *ranked]))[:count]))
