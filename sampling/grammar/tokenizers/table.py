"""The token table that a tokenizer reader fills, and how tokenizers write bytes as text.

Byte-level tables (GPT-2, Llama 3, Qwen) write each byte as a letter; sentencepiece tables (Llama 2, Mistral, Gemma) write a space as
U+2581, and bytes that are not a character as <0x0A>. The bytes of a token are the output of the tokenizer's decoder. A decoder whose
output for a token depends on adjacent tokens is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stepgraph.sampling.fields import clip_repr, is_int

MAX_IDS = 1 << 21  # eight times the largest tokenizer; the table that a single wrong id creates takes half a second and 400 MB
# Control tokens that always end a turn, whether or not the file lists them as stop tokens.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")

TokenDecoder = Callable[[str], bytes]

SPACE_MARK = "\u2581"
_BYTE_ESCAPE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EXPECTED = "expected ByteLevel, or a Sequence of Replace, ByteFallback, Fuse and Strip, or Metaspace"


class TokenTable:
    """Token bytes by id, in any order and with gaps. Error messages begin with `where`, a path or the name of an object."""

    def __init__(self, where: str, logits_width: int | None) -> None:
        if logits_width is not None and not (is_int(logits_width) and 1 <= logits_width <= MAX_IDS):
            raise ValueError(f"{where}: logits_width: got {clip_repr(logits_width)}, expected a whole number from 1 to {MAX_IDS}, or None")
        self.where, self.logits_width = where, logits_width
        self.tokens = dict[int, bytes]()
        self.control_ids_by_name = dict[str, int]()  # ids without text, by name
        self.stop_ids = list[object]()  # as the tokenizer names them, unchecked
        self._control_ids = set[int]()

    def add(self, token_id: object, text: bytes | None, name: str | None = None) -> None:
        """Store the bytes of an id, or None for a control token; ValueError for an id that is not an int or out of range."""
        last = (MAX_IDS if self.logits_width is None else self.logits_width) - 1
        if not is_int(token_id) or not 0 <= token_id <= last:
            token = repr((text or b"").decode(errors="replace") if name is None else name)
            within = "" if self.logits_width is None else ", within the width of the logits"
            raise ValueError(f"{self.where}: token {token:.60} has the id {token_id!r:.40}, expected one from 0 to {last}{within}")
        if text is None:
            assert name is not None
            self.control_ids_by_name.setdefault(name, token_id)
            self._control_ids.add(token_id)
            text = name.encode()
        self.tokens[token_id] = text

    def fields(self, stop_token_ids: Sequence[Any] | None) -> tuple[list[bytes], list[Any], int | None, list[int]]:
        """The arguments of Vocabulary: tokens, b"" for a missing id; stop ids, by default those of the tokenizer and the control tokens
        that always end a turn; the width of the logits; and the control tokens that are not stop ids."""
        tokens = [self.tokens.get(token_id, b"") for token_id in range(max(self.tokens, default=-1) + 1)]
        ends = (self.control_ids_by_name[name] for name in END_OF_TURN if name in self.control_ids_by_name)
        stop_ids = [*self.stop_ids, *ends] if stop_token_ids is None else list(stop_token_ids)
        return tokens, stop_ids, self.logits_width, sorted(self._control_ids.difference(filter(is_int, stop_ids)))


def decode_byte_letters(text: str) -> bytes:
    """Byte-level: one byte per letter. A text with other letters is not byte-level and is encoded as UTF-8."""
    try:
        return text.translate(_LETTER_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def decode_byte_escape(text: str) -> bytes:
    """The byte that a text such as <0x0A> denotes; empty for any other text."""
    found = _BYTE_ESCAPE.fullmatch(text)
    return bytes([int(found[1], 16)]) if found else b""


def decode_piece(piece: str, is_byte: bool) -> bytes:
    return decode_byte_escape(piece) if is_byte else piece.replace(SPACE_MARK, " ").encode()


def token_decoder(decoder: object, pre_tokenizer: object, where: str) -> TokenDecoder:
    """The function that maps a token's text in tokenizer.json to bytes; ValueError if the decoder depends on adjacent tokens."""
    steps = list(_steps(decoder))
    kinds = [step.get("type") for step in steps]
    if not steps and any(step.get("type") == "ByteLevel" for step in _steps(pre_tokenizer)):
        return decode_byte_letters
    if not steps:
        raise ValueError(f"{where}: decoder: got none, which joins tokens with spaces, {_EXPECTED}")
    if kinds[:1] == ["ByteLevel"] and all(kind == "Fuse" for kind in kinds[1:]):
        return decode_byte_letters
    replacements, byte_fallback, fused = list[tuple[str, str]](), False, False
    for step, kind in zip(steps, kinds, strict=True):
        if kind == "Replace" and not fused and not byte_fallback:
            replacements.append(_replacement(step, where))
        elif kind == "Metaspace" and not fused and not byte_fallback and isinstance(step.get("replacement", SPACE_MARK), str):
            replacements.append((step.get("replacement", SPACE_MARK), " "))
        elif kind == "ByteFallback" and not fused:
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind != "Strip" or not fused:  # Strip after Fuse removes the space before the whole text
            raise ValueError(f"{where}: decoder: got {kind!r:.60} in {kinds!r:.200}, {_EXPECTED}: a token's text may not depend on others")

    def decode(text: str) -> bytes:
        for old, new in replacements:
            text = text.replace(old, new)
        return (decode_byte_escape(text) if byte_fallback else b"") or text.encode()

    return decode


def _steps(part: object) -> Iterator[Mapping[str, Any]]:
    """The parts of a Sequence, nested ones included, or the single part."""
    if not isinstance(part, Mapping):
        return
    inner = part.get("decoders", part.get("pretokenizers")) if part.get("type") == "Sequence" else None
    if not isinstance(inner, list):
        yield part
        return
    for one in inner:
        yield from _steps(one)


def _replacement(step: Mapping[str, Any], where: str) -> tuple[str, str]:
    pattern, content = step.get("pattern"), step.get("content")
    old = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not isinstance(old, str) or not old or not isinstance(content, str):
        raise ValueError(f"{where}: decoder: Replace: got the pattern {pattern!r:.100}, expected a String and its replacement")
    return old, content


def _letter_bytes() -> dict[int, int]:
    """A table for str.translate, from letters to the Latin-1 character of their byte. A printable Latin-1 character is the letter of its
    byte; the other bytes have the letters from 256 on, in order, and the characters with their codes are not letters."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printing]
    return dict.fromkeys(hidden, 0xFFFF) | {256 + index: byte for index, byte in enumerate(hidden)}


_LETTER_BYTES = _letter_bytes()
