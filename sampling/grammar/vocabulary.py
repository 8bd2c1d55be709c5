"""The token table that grammars are compiled against: which bytes an id stands for, and which ids can never be text.

Knows bytes and ids; does not know a tokenizer library, a constraint or a tensor of logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xgrammar

from stepgraph.sampling.fields import clip_repr, is_int

BITS_PER_WORD = 32

_DEMO_TOKENS = (b'{"', b'": ', b'": "', b'", "', b'"}', b"}]", b", ", b"[]", b"true", b"false", b"null", b"10", b"name", b"the ")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """`tokens[i]` are the bytes of id i; ids from `len(tokens)` to `logits_width` are padding of the logits and never legal.

    `control_token_ids` are the markers of chat templates and the like (`<|im_start|>`): they carry no text. Left out, they
    would count as plain text and be legal inside a JSON string. Stop tokens need not be listed among them.
    """

    tokens: tuple[bytes, ...]
    stop_token_ids: tuple[int, ...]
    logits_width: int
    control_token_ids: tuple[int, ...]

    def __init__(
        self,
        tokens: Sequence[bytes],
        stop_token_ids: Sequence[int],
        logits_width: int | None = None,
        control_token_ids: Sequence[int] = (),
    ) -> None:
        if isinstance(tokens, (str, bytes)) or not tokens:
            raise ValueError(
                f"Vocabulary.tokens: got {type(tokens).__name__} of length {len(tokens)}, want a sequence of at least one bytes"
            )
        for index, token in enumerate(tokens):
            if not isinstance(token, bytes):
                raise ValueError(f"Vocabulary.tokens[{index}]: got {type(token).__name__}, want bytes")
        width = len(tokens) if logits_width is None else logits_width
        if not is_int(width) or width < len(tokens):
            raise ValueError(f"Vocabulary.logits_width: got {clip_repr(width)}, want an int >= {len(tokens)}, the number of tokens")
        if not stop_token_ids:
            raise ValueError("Vocabulary.stop_token_ids: got none, want at least one: a constrained text ends with a stop token")
        for name, ids in (("stop_token_ids", stop_token_ids), ("control_token_ids", control_token_ids)):
            for token_id in ids:
                if not is_int(token_id) or not 0 <= token_id < len(tokens):
                    raise ValueError(f"Vocabulary.{name}: got {clip_repr(token_id)}, want ids in 0..{len(tokens) - 1}")
        object.__setattr__(self, "tokens", tuple(tokens))
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(stop_token_ids)))
        object.__setattr__(self, "logits_width", width)
        object.__setattr__(self, "control_token_ids", tuple(dict.fromkeys(control_token_ids)))

    @classmethod
    def printable(cls, extra_tokens: Iterable[bytes] = (), logits_width: int | None = None) -> Vocabulary:
        """A small vocabulary for tests and demonstrations: printable ASCII, newline, tab, a few longer tokens, one stop token."""
        singles = [bytes([code]) for code in (*range(0x20, 0x7F), 0x0A, 0x09)]
        tokens = [*singles, *_DEMO_TOKENS, *extra_tokens, b"<eos>"]
        return cls(tokens, stop_token_ids=[len(tokens) - 1], logits_width=logits_width)

    # Of the doors: `logits_width` is the model's own, where it is wider than the table; `stop_token_ids` take the place of those
    # that the tokenizer names.

    @classmethod
    def from_tokenizer_json(
        cls, path: str | Path, logits_width: int | None = None, stop_token_ids: Sequence[int] | None = None
    ) -> Vocabulary:
        """From a tokenizer.json, or from a model's folder: there config.json says how wide the logits are, generation_config.json
        which tokens end a text."""
        from stepgraph.sampling.grammar.tokenizers.tokenizer_json import from_path  # needs this module

        return from_path(Path(path), logits_width, stop_token_ids)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, logits_width: int | None = None, stop_token_ids: Sequence[int] | None = None) -> Vocabulary:
        """From a tokenizer of `transformers` (a fast one, or one on sentencepiece), of `tokenizers` or of `sentencepiece`."""
        from stepgraph.sampling.grammar.tokenizers.objects import from_object

        return from_object(tokenizer, logits_width, stop_token_ids)

    @classmethod
    def from_tiktoken(
        cls,
        ranks: Any,
        special_tokens: Mapping[str, int] | None = None,
        logits_width: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Vocabulary:
        """From the path of a .tiktoken file or a dict of tokens and ranks, with the special tokens by name; or from an Encoding."""
        from stepgraph.sampling.grammar.tokenizers.ranks import from_ranks

        return from_ranks(ranks, special_tokens, logits_width, stop_token_ids)

    @classmethod
    def from_gguf(cls, path: str | Path, logits_width: int | None = None, stop_token_ids: Sequence[int] | None = None) -> Vocabulary:
        """From the tokenizer inside a GGUF file."""
        from stepgraph.sampling.grammar.tokenizers.gguf import from_gguf

        return from_gguf(Path(path), logits_width, stop_token_ids)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self.tokens)} tokens, stop_token_ids={self.stop_token_ids}, logits_width={self.logits_width})"

    @property
    def mask_words(self) -> int:
        """Width of a packed mask row: one bit per logit, 32 to a word."""
        return -(-self.logits_width // BITS_PER_WORD)

    @cached_property
    def non_text_ids(self) -> frozenset[int]:
        """Ids that stand for no text: control and stop tokens, and tokens of no bytes."""
        empty = (token_id for token_id, token in enumerate(self.tokens) if not token)
        return frozenset((*self.control_token_ids, *self.stop_token_ids, *empty))

    @cached_property
    def text_words(self) -> npt.NDArray[np.int32]:
        """[mask_words] one bit per id that stands for text."""
        return self._pack(token_id for token_id in range(len(self.tokens)) if token_id not in self.non_text_ids)

    @cached_property
    def stop_words(self) -> npt.NDArray[np.int32]:
        """[mask_words] one bit per stop token."""
        return self._pack(self.stop_token_ids)

    @cached_property
    def xgrammar_unsafe_ids(self) -> frozenset[int]:
        """Ids that xgrammar's masks are wrong about; those that other tokens can stand for.

        It skips what is behind a rejected token in sorted order as long as that token is found in it, anywhere: `\\r\\r\\n` goes
        with `\\n\\r`. A handful of any real vocabulary. A grammar that could not be written without them keeps them.
        """
        singles = {token for token in self.tokens if len(token) == 1}
        ordered = sorted((token, token_id) for token_id, token in enumerate(self.tokens) if token_id not in self.non_text_ids)
        open_tokens, swallowed = list[bytes](), set[int]()
        for token, token_id in ordered:
            while open_tokens and open_tokens[-1] not in token:
                open_tokens.pop()
            if not all(map(token.startswith, open_tokens)) and all(bytes([byte]) in singles for byte in token):
                swallowed.add(token_id)
            open_tokens.append(token)
        return frozenset(swallowed)

    @property
    def for_xgrammar(self) -> list[bytes]:
        """The table as xgrammar wants it. It reads a token of no bytes as "never legal"; there is no other way to tell it of control
        tokens."""
        hidden = self.non_text_ids | self.xgrammar_unsafe_ids
        return [b"" if token_id in hidden else token for token_id, token in enumerate(self.tokens)]

    @property
    def for_llguidance(self) -> list[bytes]:
        """The table as llguidance wants it: as long as the logits are wide."""
        padding = self.logits_width - len(self.tokens)
        return [*(b"" if token_id in self.non_text_ids else token for token_id, token in enumerate(self.tokens)), *[b""] * padding]

    @cached_property
    def tokenizer_info(self) -> xgrammar.TokenizerInfo:
        return xgrammar.TokenizerInfo(
            self.for_xgrammar,
            xgrammar.VocabType.RAW,
            vocab_size=self.logits_width,
            stop_token_ids=list(self.stop_token_ids),
        )

    def decode(self, ids: Iterable[int]) -> bytes:
        """The text of a token sequence; control and stop tokens stand for none."""
        pieces = []
        for token_id in ids:
            if not 0 <= token_id < len(self.tokens):
                raise ValueError(f"Vocabulary.decode: got id {token_id}, want 0..{len(self.tokens) - 1}")
            if token_id not in self.non_text_ids:
                pieces.append(self.tokens[token_id])
        return b"".join(pieces)

    @cached_property
    def joined(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """The bytes of all tokens, one behind the other, and [len(tokens) + 1] where each begins."""
        starts = np.cumsum([0, *map(len, self.tokens)], dtype=np.int32)
        return np.frombuffer(b"".join(self.tokens), np.uint8), starts

    def _pack(self, ids: Iterable[int]) -> npt.NDArray[np.int32]:
        bits = np.zeros(self.mask_words * BITS_PER_WORD, dtype=np.uint8)
        bits[list(ids)] = 1
        packed = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        packed.setflags(write=False)
        return packed
