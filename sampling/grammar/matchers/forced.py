"""What a grammar forces, in tokens: where only one text can follow, the tokens that the tokenizer itself would write it in.

A place is forced where every legal token is a beginning of the bytes that must come next. Where one reaches beyond them, what
is written may depend on what follows, and nothing is proposed: the draft's own choice is as good there. Proposals are never
trusted: a wrong one is a draft that does not hold.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.vocabulary import BITS_PER_WORD, Vocabulary

FORCED_BYTES = 128  # of a forced text that are looked at together
TAIL_BYTES = 32  # at the end of a text that was cut there: what they are written in depends on the rest
SAMPLE = 1000  # of a vocabulary's texts
NEARLY_ALL = 0.9
MOST_LEGAL = 64  # a place with more legal tokens than this is not forced: they cannot all be beginnings of one text

Int32s = npt.NDArray[np.int32]
_tables: weakref.WeakKeyDictionary[Vocabulary, TokenTable] = weakref.WeakKeyDictionary()


@runtime_checkable
class ForcingMatcher(Protocol):
    """A matcher that can also tell what must come next."""

    def forced_bytes(self) -> bytes: ...


def forced_bytes(matcher: Matcher) -> bytes:
    """The bytes that must come next, as far as the matcher can tell. It stays as it is."""
    return matcher.forced_bytes() if isinstance(matcher, ForcingMatcher) else b""


class TokenTable:
    """The texts of a vocabulary in sorted order, to be looked up by their bytes. The native link reads the same arrays."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        token_of: dict[bytes, int] = {}
        for token_id, token in enumerate(vocabulary.tokens):
            # Of two tokens with one text the first is what merging gives; of a single byte the first may be a fallback, <0x41>.
            if token_id not in vocabulary.non_text_ids and (len(token) == 1 or token not in token_of):
                token_of[token] = token_id
        texts = sorted(token_of)
        places = {text: place for place, text in enumerate(texts)}
        silent = vocabulary.non_text_ids
        self.token_of = token_of
        self.texts: npt.NDArray[np.uint8] = np.frombuffer(b"".join(texts), np.uint8)
        self.starts = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        self.ids = np.array([token_of[text] for text in texts], np.int32)
        self.places = np.array([-1 if index in silent else places[token] for index, token in enumerate(vocabulary.tokens)], np.int32)
        self.buckets = _buckets(self.texts, self.starts)
        self.singles = np.array([token_of.get(bytes([byte]), -1) for byte in range(256)], np.int32)
        self.longest = max(map(len, texts), default=0)
        self.merges = self._made_by_merges(texts)

    def _made_by_merges(self, texts: Sequence[bytes]) -> bool:
        """Whether nearly all texts are two others, one behind the other. Else the longest token that fits is as good a guess."""
        longer = [text for text in texts if len(text) > 1]
        some = longer[:: len(longer) // SAMPLE + 1]
        joined = sum(any(text[:cut] in self.token_of and text[cut:] in self.token_of for cut in range(1, len(text))) for text in some)
        return joined >= NEARLY_ALL * len(some)

    @cached_property
    def num_tokens(self) -> int:
        return len(self.places)

    def text(self, token_id: int) -> bytes:
        place = int(self.places[token_id])
        return self.texts[self.starts[place] : self.starts[place + 1]].tobytes()

    def split(self, text: bytes) -> list[int]:
        """The tokens of a text; nothing where a byte has no token of its own."""
        if any(self.singles[byte] < 0 for byte in text):
            return []
        return self._merged(text) if self.merges else self._longest(text)

    def _longest(self, text: bytes) -> list[int]:
        tokens = []
        while text:
            size = next(size for size in range(min(len(text), self.longest), 0, -1) if text[:size] in self.token_of)
            tokens.append(self.token_of[text[:size]])
            text = text[size:]
        return tokens

    def _merged(self, text: bytes) -> list[int]:
        """Neighbours are merged, the pair whose token has the lowest id first, as long as there is one.

        In a vocabulary made by byte-pair encoding ids are in the order of the merges, so this is what the tokenizer does within
        one of its words.
        """
        parts = [bytes([byte]) for byte in text]
        pairs = [self.token_of.get(one + other) for one, other in itertools.pairwise(parts)]
        while any(pair is not None for pair in pairs):
            place = min((pair, place) for place, pair in enumerate(pairs) if pair is not None)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
            del pairs[place]
            for near in (place - 1, place):
                if 0 <= near < len(pairs):
                    pairs[near] = self.token_of.get(parts[near] + parts[near + 1])
        return [self.token_of[part] for part in parts]


def _buckets(texts: npt.NDArray[np.uint8], starts: Int32s) -> Int32s:
    """[65537] the first text that begins with two given bytes, or what comes behind where it would be."""
    firsts, single = texts[starts[:-1]].astype(np.int64) << 8, np.diff(starts) == 1
    seconds = texts[np.minimum(starts[:-1] + 1, len(texts) - 1)]
    counts = np.bincount((firsts | seconds)[~single], minlength=1 << 16)
    lone = np.bincount(firsts[single], minlength=1 << 16)  # sorted in front of all longer ones
    return np.concatenate([np.cumsum(counts + lone) - counts, [len(single)]]).astype(np.int32)


def token_table(vocabulary: Vocabulary) -> TokenTable:
    if vocabulary not in _tables:
        _tables[vocabulary] = TokenTable(vocabulary)
    return _tables[vocabulary]


class Forcing(NamedTuple):
    """What a host link needs in order to propose forced tokens."""

    table: TokenTable
    forced_host: Tensor  # [K, B] int64 pinned: the token that place i of slot b is forced to, -1 where none is


@dataclass
class ForcedText:
    """One row's forced text, in tokens from the place where it was looked for; it serves as long as the history follows it."""

    start: int = 0  # tokens in front of it
    text: bytes = b""
    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # where in the text each token ends
    looks: int = 0

    def accepted(self, place: int, token: int) -> None:
        """A token was accepted behind `place` others."""
        along = place - self.start
        if along < 0 or (along < len(self.tokens) and self.tokens[along] != token):
            del self.tokens[max(along, 0) :]

    def propose(self, place: int, mask: Int32s, table: TokenTable, matcher: Matcher) -> int:
        """The token that the place behind `place` tokens is forced to, under its mask; -1 where none is."""
        legal = _legal(mask)
        if not legal or len(legal) > MOST_LEGAL or max(legal) >= table.num_tokens:
            return -1
        if len(legal) == 1:
            return legal[0]
        if any(table.places[token] < 0 for token in legal):
            return -1
        texts = [table.text(token) for token in legal]
        if len({text[0] for text in texts}) > 1:
            return -1
        along = place - self.start
        if not 0 <= along < len(self.tokens):
            self._look(place, matcher)
            along = 0
        rest = self.text[self.ends[along - 1] if along else 0 :]
        if not all(rest.startswith(text) for text in texts):
            return -1
        if not self.tokens:
            self._split(table)
        token = self.tokens[along] if self.tokens else -1
        return token if token in legal else -1

    def _look(self, place: int, matcher: Matcher) -> None:
        self.looks += 1
        self.start, self.tokens, self.ends = place, [], []
        self.text = b""
        self.text = bytes(forced_bytes(matcher)[:FORCED_BYTES])

    def _split(self, table: TokenTable) -> None:
        most = len(self.text) if len(self.text) < FORCED_BYTES else FORCED_BYTES - TAIL_BYTES
        end = 0
        for token in table.split(self.text):
            end += len(table.text(token))
            if end > most:
                return
            self.tokens.append(token)
            self.ends.append(end)


def _legal(mask: Int32s) -> list[int]:
    """The legal tokens in order; a few more than MOST_LEGAL where there are many."""
    legal: list[int] = []
    for word in np.flatnonzero(mask).tolist():
        bits = int(mask[word])
        legal += [word * BITS_PER_WORD + bit for bit in range(BITS_PER_WORD) if bits >> bit & 1]
        if len(legal) > MOST_LEGAL:
            break
    return legal
