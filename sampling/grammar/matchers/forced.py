"""Forced tokens: if a grammar allows only one text, the tokens in which the tokenizer itself would write it.

A position is forced if every legal token is a prefix of the bytes that must come next. If a legal token extends beyond these bytes,
the tokenization may depend on what follows, and nothing is proposed. Proposals are verified like any other draft.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.status import BITS_PER_WORD
from stepgraph.sampling.grammar.vocabulary import Vocabulary

FORCED_BYTES = 128  # bytes of a forced text that are tokenized together
TAIL_BYTES = 32  # not proposed at the end of a text of FORCED_BYTES: its tokenization depends on the rest
SAMPLE = 1000  # texts of a vocabulary that are examined for merges
MERGED_SHARE = 0.9
MAX_LEGAL = 64  # a position with more legal tokens is not forced: they cannot all be prefixes of one text

Int32s = npt.NDArray[np.int32]
_tables: weakref.WeakKeyDictionary[Vocabulary, TokenTable] = weakref.WeakKeyDictionary()


@runtime_checkable
class ForcingMatcher(Protocol):
    """A matcher that can report the bytes that must come next."""

    def forced_bytes(self) -> bytes: ...


def forced_bytes(matcher: Matcher) -> bytes:
    """The bytes that must come next, as far as the matcher can report them. Leaves the matcher unchanged."""
    return matcher.forced_bytes() if isinstance(matcher, ForcingMatcher) else b""


class TokenTable:
    """The texts of a vocabulary in sorted order, for look-up by bytes. The native link reads the same arrays."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        token_of: dict[bytes, int] = {}
        for token_id, token in enumerate(vocabulary.tokens):
            # Of two tokens with the same text the first one is the result of merging. Of a single byte it may be a fallback, <0x41>.
            if token_id not in vocabulary.non_text_ids and (len(token) == 1 or token not in token_of):
                token_of[token] = token_id
        texts = sorted(token_of)
        index_of = {text: index for index, text in enumerate(texts)}
        non_text = vocabulary.non_text_ids
        self.token_of = token_of
        self.texts: npt.NDArray[np.uint8] = np.frombuffer(b"".join(texts), np.uint8)
        self.starts = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        self.ids = np.array([token_of[text] for text in texts], np.int32)
        self.text_index = np.array([-1 if i in non_text else index_of[token] for i, token in enumerate(vocabulary.tokens)], np.int32)
        self.buckets = _buckets(self.texts, self.starts)
        self.singles = np.array([token_of.get(bytes([byte]), -1) for byte in range(256)], np.int32)
        self.num_tokens = len(vocabulary.tokens)
        self.longest = max(map(len, texts), default=0)
        self.merges = self._has_merges(texts)

    def _has_merges(self, texts: Sequence[bytes]) -> bool:
        """Whether nearly all longer texts are the concatenation of two others, as after byte-pair encoding."""
        longer = [text for text in texts if len(text) > 1]
        sample = longer[:: len(longer) // SAMPLE + 1]
        merged = sum(any(text[:cut] in self.token_of and text[cut:] in self.token_of for cut in range(1, len(text))) for text in sample)
        return merged >= MERGED_SHARE * len(sample)

    def text(self, token_id: int) -> bytes:
        index = int(self.text_index[token_id])
        return self.texts[self.starts[index] : self.starts[index + 1]].tobytes()

    def split(self, text: bytes) -> list[int]:
        """The tokens of a text; empty if one of its bytes has no token of its own."""
        if any(self.singles[byte] < 0 for byte in text):
            return []
        return self._split_merged(text) if self.merges else self.split_longest(text)

    def split_longest(self, text: bytes) -> list[int]:
        """The longest token at each position, up to the first byte that no token begins with."""
        tokens = []
        while size := next((size for size in range(min(len(text), self.longest), 0, -1) if text[:size] in self.token_of), 0):
            tokens.append(self.token_of[text[:size]])
            text = text[size:]
        return tokens

    def _split_merged(self, text: bytes) -> list[int]:
        """Byte-pair merging: merges the adjacent pair whose token has the lowest id until no pair is a token.

        After byte-pair encoding, token ids are in the order of the merges, so within a word this is the tokenizer's result.
        """
        parts = [bytes([byte]) for byte in text]
        pairs = [self.token_of.get(left + right) for left, right in itertools.pairwise(parts)]
        while any(pair is not None for pair in pairs):
            index = min((pair, index) for index, pair in enumerate(pairs) if pair is not None)[1]
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
            del pairs[index]
            for changed in (index - 1, index):
                if 0 <= changed < len(pairs):
                    pairs[changed] = self.token_of.get(parts[changed] + parts[changed + 1])
        return [self.token_of[part] for part in parts]


def _buckets(texts: npt.NDArray[np.uint8], starts: Int32s) -> Int32s:
    """[65537] index of the first text that starts with a given pair of bytes, or of the first text sorted after it."""
    firsts, single = texts[starts[:-1]].astype(np.int64) << 8, np.diff(starts) == 1
    seconds = texts[np.minimum(starts[:-1] + 1, len(texts) - 1)]
    counts = np.bincount((firsts | seconds)[~single], minlength=1 << 16)
    singles = np.bincount(firsts[single], minlength=1 << 16)  # sorted before all longer texts with the same first byte
    return np.concatenate([np.cumsum(counts + singles) - counts, [len(single)]]).astype(np.int32)


def token_table(vocabulary: Vocabulary) -> TokenTable:
    if vocabulary not in _tables:
        _tables[vocabulary] = TokenTable(vocabulary)
    return _tables[vocabulary]


class Forcing(NamedTuple):
    """Where a host link writes forced tokens, and the table that it needs for them."""

    table: TokenTable
    forced_host: Tensor  # [K, B] int64 pinned: the token forced after mask i of slot b, -1: none


@dataclass
class ForcedText:
    """A row's forced text, split into tokens. Valid for as long as the history follows it."""

    start: int = 0  # length of the history at which it begins
    text: bytes = b""
    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # end of each token in the text
    looks: int = 0  # searches

    def accepted(self, position: int, token: int) -> None:
        """Record that `token` was accepted at `position` of the history."""
        index = position - self.start
        if index < 0 or (index < len(self.tokens) and self.tokens[index] != token):
            del self.tokens[max(index, 0) :]

    def propose(self, position: int, mask: Int32s, table: TokenTable, matcher: Matcher) -> int:
        """The token that is forced at `position`, given its mask [words]; -1 if none is."""
        legal = _legal(mask)
        if not legal or len(legal) > MAX_LEGAL or max(legal) >= table.num_tokens:
            return -1
        if len(legal) == 1:
            return legal[0]
        if any(table.text_index[token] < 0 for token in legal):
            return -1
        texts = [table.text(token) for token in legal]
        if len({text[0] for text in texts}) > 1:
            return -1
        index = position - self.start
        if not 0 <= index < len(self.tokens):
            self._look(position, matcher)
            index = 0
        rest = self.text[self.ends[index - 1] if index else 0 :]
        if not all(rest.startswith(text) for text in texts):
            return -1
        if not self.tokens:
            self._split(table)
        token = self.tokens[index] if self.tokens else -1
        return token if token in legal else -1

    def _look(self, position: int, matcher: Matcher) -> None:
        self.looks += 1
        self.start, self.text, self.tokens, self.ends = position, b"", [], []
        self.text = bytes(forced_bytes(matcher)[:FORCED_BYTES])  # may raise: the state before it is consistent

    def _split(self, table: TokenTable) -> None:
        limit = len(self.text) if len(self.text) < FORCED_BYTES else FORCED_BYTES - TAIL_BYTES
        end = 0
        for token in table.split(self.text):
            end += len(table.text(token))
            if end > limit:
                return
            self.tokens.append(token)
            self.ends.append(end)


def _legal(mask: Int32s) -> list[int]:
    """The legal tokens in order; stops soon after MAX_LEGAL."""
    legal: list[int] = []
    for word in np.flatnonzero(mask).tolist():
        bits = int(mask[word])
        legal += [word * BITS_PER_WORD + bit for bit in range(BITS_PER_WORD) if bits >> bit & 1]
        if len(legal) > MAX_LEGAL:
            break
    return legal
