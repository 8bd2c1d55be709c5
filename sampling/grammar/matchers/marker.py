"""Constraints that begin after a marker: free text, a marker such as `</think>`, then the grammar.

A marker is a text, in any tokenization, or a sequence of token ids, control tokens included. Tokens that extend beyond the end of a
text marker are not legal: the text after the marker belongs to the grammar from its first byte.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.fields import clip_repr
from stepgraph.sampling.grammar.matchers.forced import FORCED_BYTES
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus
from stepgraph.sampling.grammar.vocabulary import Vocabulary, allows

Int32s = npt.NDArray[np.int32]


class Marker:
    """Finds a marker in a sequence of tokens. Shared by any number of matchers.

    The state is the length of the longest marker prefix that the text ends with.
    """

    def __init__(self, marker: str | tuple[int, ...], vocabulary: Vocabulary, limit: int | None = None) -> None:
        """limit: number of tokens after which only the marker is legal. ValueError if the vocabulary cannot write the marker then."""
        check_marker(marker, vocabulary)
        self.limit = limit
        self.vocabulary = vocabulary
        self.text = marker.encode() if isinstance(marker, str) else b""  # empty if the marker consists of ids
        self._ids = () if isinstance(marker, str) else marker
        symbols = self.text or self._ids
        self.symbols = np.array(list(symbols), np.int32)  # bytes or ids
        # for each state, the length of the longest proper prefix that is also a suffix
        self.fallback = np.array([_prefix_length(symbols[1:state], symbols) for state in range(len(symbols))], np.int32)
        self._make_masks()

    @property
    def complete(self) -> int:
        """The state at the end of the marker."""
        return len(self.symbols)

    @property
    def nbytes(self) -> int:
        return self.masks.nbytes + self.mask_index.nbytes + self.fallback.nbytes + self.symbols.nbytes

    def next_state(self, state: int, token_id: int) -> int:
        """The state after one more token, which the mask of the state allows."""
        if self._ids:
            return _prefix_length((*self._ids[:state], token_id), self._ids)
        return _prefix_length(self.text[:state] + self.vocabulary.tokens[token_id], self.text)

    def mask(self, state: int, tokens: int) -> Int32s:
        """[mask_words] the legal tokens in a state after this number of tokens."""
        limited = self.limit is not None and tokens >= self.limit
        mask: Int32s = self.masks[self.mask_index[state + limited * self.complete]]
        return mask

    def _make_masks(self) -> None:
        """mask_index [complete, or 2 * complete with a limit]: the mask of each state, then of each state at the limit.
        masks [rows, mask_words]: the distinct masks, those of free text first; most states share a mask."""
        exceptions = [frozenset(tokens) for tokens in (self._legal_non_text_ids() if self._ids else self._tokens_beyond_end())]
        continued = [] if self.limit is None else [frozenset(tokens) for tokens in self._continuing_tokens()]
        free, limited = dict.fromkeys(exceptions), dict.fromkeys(continued)
        rows, self.free_masks = [*free, *limited], len(free)
        index = [[*free].index(tokens) for tokens in exceptions] + [len(free) + [*limited].index(tokens) for tokens in continued]
        masks = np.zeros((len(rows), self.vocabulary.mask_words), np.uint32)
        masks[: len(free)] = self.vocabulary.text_words.view(np.uint32)
        for mask, tokens in zip(masks, rows, strict=True):
            for token_id in tokens:
                mask[token_id // BITS_PER_WORD] ^= np.uint32(1 << token_id % BITS_PER_WORD)
        masks.setflags(write=False)
        self.mask_index, self.masks = np.array(index, np.int32), masks.view(np.int32)

    def _continuing_tokens(self) -> list[set[int]]:
        """For each state, the tokens that continue the marker and do not extend beyond its end."""
        if self._ids:
            return [{token_id} for token_id in self._ids]
        text, non_text = self.text, self.vocabulary.non_text_ids
        parts = [(token_id, token) for token_id, token in enumerate(self.vocabulary.tokens) if token in text and token_id not in non_text]
        continuing = [{token_id for token_id, token in parts if token and text.startswith(token, state)} for state in range(self.complete)]
        for state, tokens in enumerate(continuing):
            if not tokens:
                expected = f"a marker that tokens can write from each of its bytes on; none begins with byte {state}"
                raise ValueError(f"Constraint.marker: got {clip_repr(self.text)} with a limit, expected {expected}")
        return continuing

    def _legal_non_text_ids(self) -> list[set[int]]:
        """For each state, the non-text ids that are legal: the marker's next id and its first id."""
        return [{self._ids[0], token_id} & self.vocabulary.non_text_ids for token_id in self._ids]

    def _tokens_beyond_end(self) -> list[set[int]]:
        """For each state, the tokens that extend beyond the marker's end.

        A token is forbidden in the state from which its prefix completes the marker, and in every state that falls back to that one.
        """
        beyond: list[set[int]] = [set() for _ in range(self.complete)]
        last, text, non_text = self.text[-1], self.text, self.vocabulary.non_text_ids
        for token_id, token in enumerate(self.vocabulary.tokens):
            if last not in token[:-1] or token_id in non_text:
                continue
            for size in (index + 1 for index in range(len(token) - 1) if token[index] == last):
                if text.endswith(token[max(0, size - len(text)) : size]):
                    beyond[max(0, len(text) - size)].add(token_id)
        for state in range(1, self.complete):
            beyond[state] |= beyond[self.fallback[state]]
        return beyond


class MarkerMatcher:
    """Free text until the marker is complete, then the inner matcher."""

    def __init__(self, inner: Matcher, marker: Marker) -> None:
        self.inner, self.marker = inner, marker
        self._states = [0]  # before the first token, and after each one up to the marker's end
        self._num_inner = 0  # tokens after the marker

    @property
    def fault(self) -> str:
        return self.inner.fault

    @property
    def state(self) -> int:
        return self._states[-1]

    @property
    def num_free(self) -> int:
        """Tokens up to the end of the marker."""
        return len(self._states) - 1

    @property
    def past_marker(self) -> bool:
        """Whether the marker is complete and the grammar applies."""
        return self.state == self.marker.complete

    def accept_token(self, token_id: int) -> bool:
        if self.past_marker:
            accepted = self.inner.accept_token(token_id)
            self._num_inner += accepted
            return accepted
        legal = not self.fault and allows(self.marker.mask(self.state, self.num_free), token_id)
        if legal:
            self._states.append(self.marker.next_state(self.state, token_id))
        return legal

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        if self.past_marker:
            return self.inner.fill_next_token_bitmask(masks, index)
        row = self.marker.vocabulary.mask_row(masks, index)
        row[:] = self.marker.mask(self.state, self.num_free) if not self.fault else 0
        return MaskStatus.FAULT if self.fault else MaskStatus.OK if row.any() else MaskStatus.DEAD_END

    def forced_bytes(self) -> bytes:
        if self.past_marker:
            return self.inner.forced_bytes()
        at_limit = self.marker.limit is not None and self.num_free >= self.marker.limit
        rest = self.marker.text[self.state :] if at_limit else b""
        return (rest + self.inner.forced_bytes())[:FORCED_BYTES] if rest else b""

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= self._num_inner + self.num_free
        inner = min(num_tokens, self._num_inner)
        self.inner.rollback(inner)
        self._num_inner -= inner
        del self._states[len(self._states) - (num_tokens - inner) :]


def check_marker(marker: str | tuple[int, ...], vocabulary: Vocabulary) -> None:
    """ValueError for ids that cannot be part of a marker."""
    for token_id in () if isinstance(marker, str) else marker:
        if token_id >= len(vocabulary.tokens) or token_id in vocabulary.stop_token_ids:
            expected = f"an id below {len(vocabulary.tokens)} that is not a stop token"
            raise ValueError(f"Constraint.marker: got id {clip_repr(token_id)}, expected {expected}")


def _prefix_length(text: bytes | tuple[int, ...], marker: bytes | tuple[int, ...]) -> int:
    """The length of the longest suffix of `text` that is a prefix of the marker."""
    return next(size for size in range(min(len(text), len(marker)), -1, -1) if text[len(text) - size :] == marker[:size])
