"""Constraints that begin after a marker: free text, a marker such as `</think>`, then the grammar.

The marker may be a text, in whatever tokens it comes, or a sequence of token ids, control tokens among them. Tokens that reach
beyond the end of a text marker are not legal there: what follows belongs to the grammar from its first byte.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.forced_tokens import forced_bytes
from stepgraph.sampling.grammar.mask_row import checked_row
from stepgraph.sampling.grammar.matcher import Matcher
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.grammar.vocabulary import BITS_PER_WORD, Vocabulary

Words = npt.NDArray[np.int32]


class Marker:
    """Finds the marker in a stream of tokens. A state is how much of it the text ends with; shared by any number of matchers."""

    def __init__(self, marker: str | tuple[int, ...], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._text = marker.encode() if isinstance(marker, str) else b""
        self._ids = () if isinstance(marker, str) else marker
        for token_id in self._ids:
            if token_id >= len(vocabulary.tokens) or token_id in vocabulary.stop_token_ids:
                raise ValueError(f"Constraint.marker: got id {token_id}, want ids below {len(vocabulary.tokens)} that are no stop tokens")
        self._allowed: dict[int, Words] = {}

    @property
    def complete(self) -> int:
        """The state in which the text ends with the whole marker."""
        return len(self._text) or len(self._ids)

    @property
    def nbytes(self) -> int:
        """Of the masks that it keeps, one per state."""
        return self.complete * self._vocabulary.mask_words * 4

    def after(self, state: int, token_id: int) -> int | None:
        """The state behind one more token; None where the token may not follow. A stop token may not: the marker is still to come."""
        if self._ids:
            seen = (*self._ids[:state], token_id)
            follows = token_id not in self._vocabulary.silent_ids or token_id == self._ids[state] or token_id == self._ids[0]
            return _overlap(seen, self._ids) if follows else None
        if token_id in self._vocabulary.silent_ids:
            return None
        text = self._text[:state] + self._vocabulary.tokens[token_id]
        found = text.find(self._text)
        if found < 0:
            return _overlap(text, self._text)
        return self.complete if found + len(self._text) == len(text) else None

    def allowed(self, state: int) -> Words:
        """[mask_words] the tokens that may follow in a state."""
        if state not in self._allowed:  # two threads may both work it out, to the same end
            words = self._vocabulary.text_words.copy()
            for token_id in (self._ids[0], self._ids[state]) if self._ids else ():
                words.view(np.uint32)[token_id // BITS_PER_WORD] |= np.uint32(1 << token_id % BITS_PER_WORD)
            for token_id in self._reaching:
                if self.after(state, token_id) is None:
                    words.view(np.uint32)[token_id // BITS_PER_WORD] &= ~np.uint32(1 << token_id % BITS_PER_WORD)
            self._allowed[state] = words
        return self._allowed[state]

    @cached_property
    def _reaching(self) -> list[int]:
        """Tokens that hold the marker's last byte in front of another one; only they can reach beyond its end."""
        last, silent = self._text[-1:], self._vocabulary.silent_ids
        return [index for index, token in enumerate(self._vocabulary.tokens) if last and last in token[:-1] and index not in silent]


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
    def begun(self) -> bool:
        """Whether the marker is complete."""
        return self._states[-1] == self._marker.complete

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


def _overlap(seen: bytes | tuple[int, ...], marker: bytes | tuple[int, ...]) -> int:
    """The length of the longest end of `seen` that the marker begins with."""
    return next(size for size in range(min(len(seen), len(marker)), -1, -1) if seen[len(seen) - size :] == marker[:size])
