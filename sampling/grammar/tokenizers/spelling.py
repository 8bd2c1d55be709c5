"""How tokenizers write bytes as text. Byte-level tables (GPT-2, Llama 3, Qwen) spell each byte as a letter; sentence pieces (Llama 2,
Mistral, Gemma) write a space as a low line, and bytes that are no character as <0x0A>.

What a token stands for is what the tokenizer's own decoder makes of it. A decoder that needs a token's neighbours is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Spelling = Callable[[str], bytes]

LOW_LINE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WANTED = "want ByteLevel, or a Sequence of Replace, ByteFallback, Fuse and Strip, or Metaspace"


def by_letters(text: str) -> bytes:
    """Byte-level: a byte for each letter. A text with other letters in it is no such spelling, and stands for itself."""
    try:
        return bytes(_LETTER_BYTES[letter] for letter in text)
    except KeyError:
        return text.encode()


def by_pieces(text: str) -> bytes:
    """Sentence pieces with byte fallback."""
    return one_byte(text) or text.replace(LOW_LINE, " ").encode()


def one_byte(text: str) -> bytes:
    """The byte that <0x0A> and its like stand for; empty for any other text."""
    found = _BYTE.fullmatch(text)
    return bytes([int(found[1], 16)]) if found else b""


def spelling_of(decoder: object, pre_tokenizer: object, where: str) -> Spelling:
    """What tokenizer.json's decoder makes of a single token; ValueError for one that cannot say."""
    steps = list(_steps(decoder))
    kinds = [step.get("type") for step in steps]
    if not steps and any(step.get("type") == "ByteLevel" for step in _steps(pre_tokenizer)):
        return by_letters
    if not steps:
        raise ValueError(f"{where}: decoder: got none, which joins tokens with spaces; {_WANTED}")
    if kinds.count("ByteLevel") and set(kinds) <= {"ByteLevel", "Fuse"}:
        return by_letters
    replaced, fallback, fused = list[tuple[str, str]](), False, False
    for step, kind in zip(steps, kinds, strict=True):
        if kind == "Replace" and not fused:
            replaced.append(_replacement(step, where))
        elif kind == "Metaspace" and not fused and isinstance(step.get("replacement", LOW_LINE), str):
            replaced.append((step.get("replacement", LOW_LINE), " "))
        elif kind == "ByteFallback" and not fused:
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind != "Strip" or not fused:  # behind Fuse it takes the space in front of the whole text
            raise ValueError(f"{where}: decoder: got {kind!r:.60} in {kinds!r:.200}; {_WANTED}: a token's text may not depend on others")

    def spell(text: str) -> bytes:
        for old, new in replaced:
            text = text.replace(old, new)
        return (one_byte(text) if fallback else b"") or text.encode()

    return spell


def _steps(part: object) -> Iterator[Mapping[str, Any]]:
    """The parts of a Sequence, or the one part that there is."""
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
        raise ValueError(f"{where}: decoder: Replace: got the pattern {pattern!r:.100}, want a String and its replacement")
    return old, content


def _letter_bytes() -> dict[str, int]:
    """A byte that prints in Latin-1 is its own letter, the others take letters from 256 on, in order."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_LETTER_BYTES = _letter_bytes()
