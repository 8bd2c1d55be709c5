"""Constraints that begin after a marker: free text, a marker such as `</think>`, then the grammar.

The marker may be a text, in whatever tokens it comes, or a sequence of token ids, control tokens among them. Tokens that reach
beyond the end of a text marker are not legal there: what follows belongs to the grammar from its first byte.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.fields import clip_repr
from stepgraph.sampling.grammar.matchers.forced import forced_bytes
from stepgraph.sampling.grammar.matchers.protocol import Matcher, checked_row
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import BITS_PER_WORD, Vocabulary

Words = npt.NDArray[np.int32]


class Marker:
    """Finds the marker in a stream of tokens. A state is how much of it the text ends with; shared by any number of matchers."""

    def __init__(self, marker: str | tuple[int, ...], vocabulary: Vocabulary) -> None:
        check_marker(marker, vocabulary)
        self.vocabulary = vocabulary
        self._text = marker.encode() if isinstance(marker, str) else b""
        self._ids = () if isinstance(marker, str) else marker
        self.symbols = np.array(list(self._text or self._ids), np.int32)  # its bytes, or its ids
        self.shorter = _shorter(self.symbols.tolist())
        self.rows, self.masks = self._tables()

    @property
    def complete(self) -> int:
        """The state in which the text ends with the whole marker."""
        return len(self.symbols)

    @property
    def of_text(self) -> bool:
        return bool(self._text)

    @property
    def nbytes(self) -> int:
        return self.masks.nbytes + self.rows.nbytes + self.shorter.nbytes + self.symbols.nbytes

    def after(self, state: int, token_id: int) -> int | None:
        """The state behind one more token; None where the token may not follow. A stop token may not: the marker is still to come."""
        if self._ids:
            seen = (*self._ids[:state], token_id)
            follows = token_id not in self.vocabulary.non_text_ids or token_id == self._ids[state] or token_id == self._ids[0]
            return _overlap(seen, self._ids) if follows else None
        if token_id in self.vocabulary.non_text_ids:
            return None
        text = self._text[:state] + self.vocabulary.tokens[token_id]
        found = text.find(self._text)
        if found < 0:
            return _overlap(text, self._text)
        return self.complete if found + len(self._text) == len(text) else None

    def allowed(self, state: int) -> Words:
        """[mask_words] the tokens that may follow in a state."""
        row: Words = self.masks[self.rows[state]]
        return row

    def _tables(self) -> tuple[Words, Words]:
        """[complete] which mask is that of a state, and the masks [.., mask_words]: few, for most states allow the same."""
        exceptions = self._added() if self._ids else self._forbidden()
        found: dict[frozenset[int], int] = {}
        rows = np.array([found.setdefault(frozenset(tokens), len(found)) for tokens in exceptions], np.int32)
        masks = np.repeat(self.vocabulary.text_words[None], len(found), 0).view(np.uint32)
        for mask, tokens in zip(masks, found, strict=True):
            for token_id in tokens:
                mask[token_id // BITS_PER_WORD] ^= np.uint32(1 << token_id % BITS_PER_WORD)
        masks.setflags(write=False)
        return rows, masks.view(np.int32)

    def _added(self) -> list[set[int]]:
        """By state, the ids that may follow though they stand for no text: the next one, and the one that begins the marker again."""
        return [{self._ids[0], token_id} & self.vocabulary.non_text_ids for token_id in self._ids]

    def _forbidden(self) -> list[set[int]]:
        """By state, the tokens that reach beyond the marker's end: behind as much of it as they go on from, and in every state that
        ends with so much."""
        beyond: list[set[int]] = [set() for _ in range(self.complete)]
        last, text, silent = self._text[-1], self._text, self.vocabulary.non_text_ids
        for token_id, token in enumerate(self.vocabulary.tokens):
            if last not in token[:-1] or token_id in silent:
                continue
            for size in (place + 1 for place in range(len(token) - 1) if token[place] == last):
                if text.endswith(token[max(0, size - len(text)) : size]):
                    beyond[max(0, len(text) - size)].add(token_id)
        for state in range(1, self.complete):
            beyond[state] |= beyond[self.shorter[state]]
        return beyond


class MarkerMatcher:
    """Free text until the marker is complete, from there the matcher of a grammar."""

    def __init__(self, inner: Matcher, marker: Marker, vocabulary: Vocabulary) -> None:
        self._inner, self._marker, self._words = inner, marker, vocabulary.mask_words
        self._num_tokens = len(vocabulary.tokens)
        self._states = [0]  # in front of the first token, and behind each one up to the marker's end
        self._inner_tokens = 0

    @property
    def fault(self) -> str:
        """Why this matcher is of no further use; empty while it works."""
        return self._inner.fault

    @property
    def inner(self) -> Matcher:
        return self._inner

    @property
    def marker(self) -> Marker:
        return self._marker

    @property
    def state(self) -> int:
        """How much of the marker the text ends with, up to its end."""
        return self._states[-1]

    @property
    def begun(self) -> bool:
        """Whether the marker is complete."""
        return self.state == self._marker.complete

    def accept_token(self, token_id: int) -> bool:
        """Take one token; False, and no change, where it may not come here."""
        if self.begun:
            accepted = self._inner.accept_token(token_id)
            self._inner_tokens += accepted
            return accepted
        state = self._marker.after(self._states[-1], token_id) if 0 <= token_id < self._num_tokens and not self.fault else None
        if state is None:
            return False
        self._states.append(state)
        return True

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        """Write row `index` of masks [rows, mask_words]: bit i of the row is set where token i may come next."""
        if self.begun:
            return self._inner.fill_next_token_bitmask(masks, index)
        row = checked_row(masks, index, self._words)
        row[:] = self._marker.allowed(self._states[-1]) if not self.fault else 0
        return MaskStatus.FAULT if self.fault else MaskStatus.OK if row.any() else MaskStatus.DEAD_END

    def forced_bytes(self) -> bytes:
        return forced_bytes(self._inner) if self.begun else b""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted, those of the marker too."""
        most = self._inner_tokens + len(self._states) - 1
        if not 0 <= num_tokens <= most:
            raise ValueError(f"rollback.num_tokens: got {num_tokens}, want 0..{most}, the number of accepted tokens")
        inner = min(num_tokens, self._inner_tokens)
        self._inner.rollback(inner)
        self._inner_tokens -= inner
        del self._states[len(self._states) - (num_tokens - inner) :]


def check_marker(marker: str | tuple[int, ...], vocabulary: Vocabulary) -> None:
    """ValueError for ids that can be no part of one."""
    for token_id in () if isinstance(marker, str) else marker:
        if token_id >= len(vocabulary.tokens) or token_id in vocabulary.stop_token_ids:
            raise ValueError(f"Constraint.marker: got id {clip_repr(token_id)}, want one below {len(vocabulary.tokens)}, no stop token")


def _shorter(symbols: list[int]) -> Words:
    """Of every beginning of the marker: the length of the longest shorter one that it ends with."""
    shorter, size = [0] * len(symbols), 0
    for place in range(1, len(symbols) - 1):
        while size and symbols[size] != symbols[place]:
            size = shorter[size]
        size += symbols[size] == symbols[place]
        shorter[place + 1] = size
    return np.array(shorter, np.int32)


def _overlap(seen: bytes | tuple[int, ...], marker: bytes | tuple[int, ...]) -> int:
    """The length of the longest end of `seen` that the marker begins with."""
    return next(size for size in range(min(len(seen), len(marker)), -1, -1) if seen[len(seen) - size :] == marker[:size])
