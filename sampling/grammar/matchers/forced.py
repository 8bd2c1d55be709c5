"""Forced tokens: if a grammar allows only one text, the tokens in which the tokenizer itself would write it.

A position is forced if every legal token is a prefix of the bytes that must come next. If a legal token extends beyond these bytes,
the tokenization may depend on what follows, and nothing is proposed. Proposals are verified like any other draft.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.status import BITS_PER_WORD
from stepgraph.sampling.grammar.vocabulary import Vocabulary

FORCED_BYTES = 128  # bytes of a forced text that are tokenized together
TAIL_BYTES = 32  # at the end of a text of FORCED_BYTES, not proposed: its tokenization depends on the bytes that follow
MAX_SAMPLED_TEXTS = 1000  # texts of a vocabulary that are examined for merges
MIN_MERGED_SHARE = 0.9
MAX_LEGAL = 64  # a position with more legal tokens is not forced: they cannot all be prefixes of one text

KEY_FACTOR = 0x9E3779B97F4A7C15  # for the keys of texts; must be odd

Int32s = npt.NDArray[np.int32]
_tables: weakref.WeakKeyDictionary[Vocabulary, TokenLookup] = weakref.WeakKeyDictionary()


class TokenLookup:
    """The texts of a vocabulary, for look-up by id and by text. The native link and devices read the same arrays.

    bytes, starts: of all tokens; tokens that are not text have no bytes. slots [n, 2]: a hash table with open addressing, n a power of
    two: the key and the token of each text; -1 in a free slot. The upper bits of a key are its first slot.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.for_llguidance[: len(vocabulary.tokens)]
        self.token_of: dict[bytes, int] = {}
        for token_id, token in enumerate(tokens):
            # Of two tokens with the same text, the first is the result of merging. For a single byte the first may be a fallback, <0x41>.
            if token and (len(token) == 1 or token not in self.token_of):
                self.token_of[token] = token_id
        self.bytes, self.starts = vocabulary.texts
        self.slots = _hash_slots(self.token_of)
        self.num_tokens = len(tokens)
        self.max_token_bytes = max(map(len, tokens))
        self.merges = self._has_merges(sorted(self.token_of))

    def _has_merges(self, texts: Sequence[bytes]) -> bool:
        """Whether nearly all longer texts are the concatenation of two others, as after byte-pair encoding."""
        longer = [text for text in texts if len(text) > 1]
        sample = longer[:: len(longer) // MAX_SAMPLED_TEXTS + 1]
        merged = sum(any(text[:cut] in self.token_of and text[cut:] in self.token_of for cut in range(1, len(text))) for text in sample)
        return merged >= MIN_MERGED_SHARE * len(sample)

    def text(self, token_id: int) -> bytes:
        return self.bytes[self.starts[token_id] : self.starts[token_id + 1]].tobytes()

    def find(self, text: bytes) -> int:
        """The token with this text, -1 if there is none."""
        return self.token_of.get(text, -1)

    def split(self, text: bytes) -> list[int]:
        """The tokens of a text; empty if one of its bytes has no token of its own."""
        if any(self.find(bytes([byte])) < 0 for byte in text):
            return []
        return self._split_merged(text) if self.merges else self.split_longest(text)

    def split_longest(self, text: bytes) -> list[int]:
        """The longest token at each position, up to the first byte that no token begins with."""
        tokens, start, sizes = list[int](), 0, range(self.max_token_bytes, 0, -1)
        while part := next((part for size in sizes if self.find(part := text[start : start + size]) >= 0), b""):
            tokens.append(self.find(part))
            start += len(part)
        return tokens

    def _split_merged(self, text: bytes) -> list[int]:
        """Byte-pair merging: merges the adjacent pair whose token has the lowest id until no pair is a token.

        After byte-pair encoding, token ids are in the order of the merges, so within a word this is the tokenizer's result.
        """
        parts = [bytes([byte]) for byte in text]
        pairs = [self.find(left + right) for left, right in itertools.pairwise(parts)]
        while legal := [(pair, index) for index, pair in enumerate(pairs) if pair >= 0]:
            index = min(legal)[1]
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
            del pairs[index]
            for changed in (index - 1, index):
                if 0 <= changed < len(pairs):
                    pairs[changed] = self.find(parts[changed] + parts[changed + 1])
        return [self.find(part) for part in parts]


def first_slot(key: int, slots: int) -> int:
    return key % (1 << 64) >> 65 - slots.bit_length()


def _hash_slots(token_of: Mapping[bytes, int]) -> npt.NDArray[np.int64]:
    text, lengths = np.frombuffer(b"".join(token_of), np.uint8), np.array([*map(len, token_of)], np.int64)
    starts, powers = np.cumsum(lengths) - lengths, np.full(lengths.max(initial=1), KEY_FACTOR, np.uint64).cumprod(dtype=np.uint64)
    weighted = (text.astype(np.uint64) + np.uint64(1)) * powers[np.arange(len(text)) - np.repeat(starts, lengths)]
    keys = np.add.reduceat(weighted, starts).view(np.int64).tolist() if token_of else []
    slots = np.full((1 << (2 * len(token_of) + 1).bit_length(), 2), -1, np.int64)
    taken = set[int]()
    for key, token in zip(keys, token_of.values(), strict=True):
        slot = first_slot(key, len(slots))
        while slot in taken:
            slot = (slot + 1) % len(slots)
        taken.add(slot)
        slots[slot] = key, token
    return slots


def token_lookup(vocabulary: Vocabulary) -> TokenLookup:
    if vocabulary not in _tables:
        _tables[vocabulary] = TokenLookup(vocabulary)
    return _tables[vocabulary]


class Forcing(NamedTuple):
    """The buffer into which a host link writes forced tokens, and the table that it needs to find them."""

    table: TokenLookup
    forced_host: Tensor  # [K, B] int64 pinned: the token forced after mask i of slot b, -1: none


@dataclass
class ForcedText:
    """A row's forced text, split into tokens. Valid as long as the history agrees with it."""

    start: int = 0  # length of the history at which the text begins
    text: bytes = b""
    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # end of each token in the text

    def accepted(self, position: int, token: int) -> None:
        """Record that `token` was accepted at `position` of the history."""
        index = position - self.start
        if index < 0 or (index < len(self.tokens) and self.tokens[index] != token):
            del self.tokens[max(index, 0) :]

    def propose(self, position: int, mask: Int32s, table: TokenLookup, find: Callable[[], bytes]) -> int:
        """The token that is forced at `position`, given its mask [words]; -1 if none is. find: Matcher.forced_bytes, called if needed."""
        legal = _legal_tokens(mask)
        if not legal or len(legal) > MAX_LEGAL or max(legal) >= table.num_tokens:
            return -1
        if len(legal) == 1:
            return legal[0]
        texts = [table.text(token) for token in legal]
        if not all(texts) or len({text[0] for text in texts}) > 1:
            return -1
        index = position - self.start
        if not 0 <= index < len(self.tokens):
            self._search(position, find)
            index = 0
        rest = self.text[self.ends[index - 1] if index else 0 :]
        if not all(rest.startswith(text) for text in texts):
            return -1
        if not self.tokens:
            self._split(table)
        token = self.tokens[index] if self.tokens else -1
        return token if token in legal else -1

    def _search(self, position: int, find: Callable[[], bytes]) -> None:
        self.start, self.text, self.tokens, self.ends = position, b"", [], []
        self.text = find()[:FORCED_BYTES]  # may raise: the state is consistent until then

    def _split(self, table: TokenLookup) -> None:
        limit = len(self.text) if len(self.text) < FORCED_BYTES else FORCED_BYTES - TAIL_BYTES
        end = 0
        for token in table.split(self.text):
            end += len(table.text(token))
            if end > limit:
                return
            self.tokens.append(token)
            self.ends.append(end)


def _legal_tokens(mask: Int32s) -> list[int]:
    """The legal tokens in order; stops soon after MAX_LEGAL."""
    words = np.flatnonzero(mask)[: MAX_LEGAL + 1]
    place, bit = np.nonzero(np.unpackbits(mask[words, None].view(np.uint8), axis=1, bitorder="little"))
    legal: list[int] = (words[place] * BITS_PER_WORD + bit).tolist()
    return legal
