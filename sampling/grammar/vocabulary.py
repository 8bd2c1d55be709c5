"""The token table for which grammars are compiled: the bytes of each id, the stop tokens, and the ids that are never text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.sampling.fields import TOKEN_IDS, Check, check_value, checked_path, clip_repr, instance_of, is_int, is_list_like, optional
from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus
from stepgraph.sampling.grammar.tokenizers.gguf import read_gguf_header, table_of_gguf_metadata
from stepgraph.sampling.grammar.tokenizers.readers import read_tokenizer_json, read_tokenizer_object, table_of_ranks
from stepgraph.sampling.grammar.tokenizers.table import TokenTable

if TYPE_CHECKING:
    import xgrammar

MASK_DTYPE = torch.int32
_DEMO_TOKENS = (b'{"', b'": ', b'": "', b'", "', b'"}', b"}]", b", ", b"[]", b"true", b"false", b"null", b"10", b"name", b"the ")


def allows(mask: npt.NDArray[np.int32], token_id: int) -> bool:
    """Whether the bit of any id is set in a mask [words]."""
    return 0 <= token_id < len(mask) * BITS_PER_WORD and bool(int(mask[token_id // BITS_PER_WORD]) >> token_id % BITS_PER_WORD & 1)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """`tokens[i]` are the bytes of id i; ids from `len(tokens)` to `logits_width` are padding of the logits and never legal.

    `control_token_ids` carry no text: markers of chat templates such as `<|im_start|>`. An id missing from them counts as plain
    text and is legal inside a JSON string. Stop tokens need not be listed.
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
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Sequence) or not tokens:
            raise ValueError(f"Vocabulary.tokens: got {clip_repr(tokens)}, expected a sequence of at least one bytes object")
        for index, token in enumerate(tokens):
            if not isinstance(token, bytes):
                raise ValueError(f"Vocabulary.tokens[{index}]: got {type(token).__name__}, expected bytes")
        width = len(tokens) if logits_width is None else logits_width
        if not is_int(width) or width < len(tokens):
            raise ValueError(f"Vocabulary.logits_width: got {clip_repr(width)}, expected an int >= {len(tokens)}, the number of tokens")
        check_value("Vocabulary.stop_token_ids", stop_token_ids, TOKEN_IDS)
        check_value("Vocabulary.control_token_ids", control_token_ids, TOKEN_IDS)
        stop_token_ids, control_token_ids = tuple(stop_token_ids), tuple(control_token_ids)  # also of iterators
        for name, ids in (("stop_token_ids", stop_token_ids), ("control_token_ids", control_token_ids)):
            if name == "stop_token_ids" and not ids:
                raise ValueError("Vocabulary.stop_token_ids: got none, expected at least one: a constrained text ends with a stop token")
            for token_id in ids:
                if not is_int(token_id) or not 0 <= token_id < len(tokens):
                    raise ValueError(f"Vocabulary.{name}: got {clip_repr(token_id)}, expected ids in 0..{len(tokens) - 1}")
        object.__setattr__(self, "tokens", tuple(tokens))
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(stop_token_ids)))
        object.__setattr__(self, "logits_width", width)
        object.__setattr__(self, "control_token_ids", tuple(dict.fromkeys(control_token_ids)))

    @classmethod
    def printable(cls, extra_tokens: Iterable[bytes] = (), logits_width: int | None = None) -> Vocabulary:
        """A small vocabulary for tests and demonstrations: printable ASCII, newline, tab, a few longer tokens, one stop token."""
        singles = [bytes([code]) for code in (*range(0x20, 0x7F), 0x0A, 0x09)]
        check_value("Vocabulary.printable.extra_tokens", extra_tokens, Check(is_list_like, "bytes objects"))
        tokens = [*singles, *_DEMO_TOKENS, *extra_tokens, b"<eos>"]
        return cls(tokens, stop_token_ids=[len(tokens) - 1], logits_width=logits_width)

    # In the constructors below, `logits_width` is the width of the model's logits, if that exceeds the number of tokens;
    # `stop_token_ids` replace the stop tokens that the tokenizer names.

    @classmethod
    def from_tokenizer_json(
        cls, path: str | Path, logits_width: int | None = None, stop_token_ids: Sequence[int] | None = None
    ) -> Vocabulary:
        """From a tokenizer.json, or from a model folder: its config.json names the width of the logits, its
        generation_config.json the stop tokens."""
        return cls.from_table(read_tokenizer_json(checked_path("path", path), logits_width), stop_token_ids)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, logits_width: int | None = None, stop_token_ids: Sequence[int] | None = None) -> Vocabulary:
        """From a tokenizer object of `transformers` (fast, or based on sentencepiece), `tokenizers` or `sentencepiece`."""
        return cls.from_table(read_tokenizer_object(tokenizer, logits_width), stop_token_ids)

    @classmethod
    def from_tiktoken(
        cls,
        ranks: Any,
        special_tokens: Mapping[str, int] | None = None,
        logits_width: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Vocabulary:
        """From the path of a .tiktoken file or a dict of tokens and ranks, with the ids of the special tokens; or from an Encoding."""
        return cls.from_table(table_of_ranks(ranks, special_tokens, logits_width), stop_token_ids)

    @classmethod
    def from_gguf(cls, path: str | Path, logits_width: int | None = None, stop_token_ids: Sequence[int] | None = None) -> Vocabulary:
        """From the tokenizer inside a GGUF file."""
        path = checked_path("path", path)
        return cls.from_table(table_of_gguf_metadata(read_gguf_header(path).metadata, path, logits_width), stop_token_ids)

    @classmethod
    def from_table(cls, table: TokenTable, stop_token_ids: Sequence[int] | None = None) -> Vocabulary:
        """From the result of a reader of `tokenizers/`. A ValueError begins with the table's path or object name."""
        check_value("table", table, instance_of(TokenTable, "a TokenTable"))
        check_value("stop_token_ids", stop_token_ids, optional(TOKEN_IDS))
        try:
            return cls(*table.fields(stop_token_ids))
        except ValueError as error:
            raise ValueError(f"{table.where}: {error}") from None

    def __repr__(self) -> str:
        return f"Vocabulary({len(self.tokens)} tokens, stop_token_ids={self.stop_token_ids}, logits_width={self.logits_width})"

    @cached_property
    def mask_words(self) -> int:
        """Width of a packed mask row: one bit per logit, 32 to a word."""
        return -(-self.logits_width // BITS_PER_WORD)

    @cached_property
    def non_text_ids(self) -> frozenset[int]:
        """Ids that represent no text: control tokens, stop tokens, and tokens of zero bytes."""
        empty = (token_id for token_id, token in enumerate(self.tokens) if not token)
        return frozenset((*self.control_token_ids, *self.stop_token_ids, *empty))

    @cached_property
    def text_words(self) -> npt.NDArray[np.int32]:
        """[mask_words] one bit per id that represents text."""
        return self._pack(token_id for token_id in range(len(self.tokens)) if token_id not in self.non_text_ids)

    @cached_property
    def xgrammar_words(self) -> npt.NDArray[np.int32]:
        """As text_words, without the ids that are hidden from xgrammar."""
        return self.text_words & ~self._pack(self.xgrammar_unsafe_ids)

    @cached_property
    def stop_words(self) -> npt.NDArray[np.int32]:
        """[mask_words] one bit per stop token."""
        return self._pack(self.stop_token_ids)

    def mask_address(self, masks: Tensor, index: int) -> int:
        """The address of row `index` of masks [rows, mask_words]. Makes no view: the first view after other work takes 0.1 ms."""
        assert masks.dtype is MASK_DTYPE and masks.dim() == 2 and masks.size(1) == self.mask_words and masks.is_cpu
        assert masks.is_contiguous() and 0 <= index < masks.size(0)
        return masks.data_ptr() + index * self.mask_words * (BITS_PER_WORD // 8)

    def mask_row(self, masks: Tensor, index: int) -> npt.NDArray[np.int32]:
        """Row `index` of masks [rows, mask_words] as an array over the same memory."""
        self.mask_address(masks, index)
        row: npt.NDArray[np.int32] = masks[index].numpy()
        return row

    def classify(self, row: npt.NDArray[np.int32]) -> MaskStatus:
        """Clear the bits of a filled row that are neither text nor a stop token, and return the status of the row."""
        stops = row & self.stop_words
        row &= self.text_words
        status = MaskStatus.OK if row.any() else MaskStatus.COMPLETE if stops.any() else MaskStatus.DEAD_END
        row |= stops
        return status

    @cached_property
    def xgrammar_unsafe_ids(self) -> frozenset[int]:
        """Ids whose mask bits xgrammar may compute wrongly, and whose text other tokens can spell. They are hidden from xgrammar.

        After a rejected token, xgrammar skips all tokens in sorted order that contain it anywhere, not only as a prefix: `\\r\\r\\n` is
        skipped with `\\n\\r`. After the end of a rule, xgrammar treats a final byte C0, E0 or F0, which may begin a character of two to
        four bytes, as any character of up to that length: ` \\xf0` is legal in ` ?[0-9]`. A real vocabulary has a few such ids. Tokens
        whose text no other tokens can spell are kept.
        """
        singles = {token for token in self.tokens if len(token) == 1}
        ordered = sorted((token, token_id) for token_id, token in enumerate(self.tokens) if token_id not in self.non_text_ids)
        open_tokens, unsafe = list[bytes](), set[int]()
        for token, token_id in ordered:
            while open_tokens and open_tokens[-1] not in token:
                open_tokens.pop()
            wrong = not all(map(token.startswith, open_tokens)) or (len(token) > 1 and token[-1] in b"\xc0\xe0\xf0")
            if wrong and all(bytes([byte]) in singles for byte in token):
                unsafe.add(token_id)
            open_tokens.append(token)
        return frozenset(unsafe)

    @property
    def for_xgrammar(self) -> list[bytes]:
        """The table for xgrammar. A token of zero bytes is never legal; xgrammar has no other way to mark control tokens."""
        hidden = self.non_text_ids | self.xgrammar_unsafe_ids
        return [b"" if token_id in hidden else token for token_id, token in enumerate(self.tokens)]

    @property
    def for_llguidance(self) -> list[bytes]:
        """The table for llguidance: one entry per logit."""
        padding = self.logits_width - len(self.tokens)
        return [*(b"" if token_id in self.non_text_ids else token for token_id, token in enumerate(self.tokens)), *[b""] * padding]

    @cached_property
    def tokenizer_info(self) -> xgrammar.TokenizerInfo:
        import xgrammar  # imported here because it imports transformers

        return xgrammar.TokenizerInfo(
            self.for_xgrammar,
            xgrammar.VocabType.RAW,
            vocab_size=self.logits_width,
            stop_token_ids=list(self.stop_token_ids),
        )

    def decode(self, ids: Iterable[int]) -> bytes:
        """The text of a token sequence; control and stop tokens add nothing."""
        check_value("Vocabulary.decode", ids, TOKEN_IDS)
        pieces = []
        for token_id in ids:
            if not isinstance(token_id, (int, np.integer)) or not 0 <= token_id < len(self.tokens):
                raise ValueError(f"Vocabulary.decode: got id {clip_repr(token_id)}, expected 0..{len(self.tokens) - 1}")
            if token_id not in self.non_text_ids:
                pieces.append(self.tokens[token_id])
        return b"".join(pieces)

    @cached_property
    def texts(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """The bytes of all tokens, then a zero; and [len(tokens) + 1] int32 offsets of their starts. Tokens without text have no bytes."""
        tokens = self.for_llguidance[: len(self.tokens)]
        return np.frombuffer(b"".join(tokens) + b"\0", np.uint8), np.cumsum([0, *map(len, tokens)], dtype=np.int32)

    def _pack(self, ids: Iterable[int]) -> npt.NDArray[np.int32]:
        bits = np.zeros(self.mask_words * BITS_PER_WORD, dtype=np.uint8)
        bits[list(ids)] = 1
        packed = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        packed.setflags(write=False)
        return packed
