"""A user's grammar with its classes beyond ASCII spelled as the library reads them right: see `charset.spelled_open`."""

from __future__ import annotations

import re
from collections.abc import Callable

from stepgraph.sampling.grammar.constraints.charset import LAST_ASCII, CharSet, complement, spelled_open, union

Normal = Callable[[str, str], str]  # a grammar and the name of its root rule -> the grammar as the library writes it

_MAYBE_WIDE = re.compile(r"[^\x00-\x7f]|\\[uUx]")
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\[(\^?)((?:[^\]\\]|\\.)*)\]', re.DOTALL)
_CHAR = re.compile(r"\\U([0-9a-f]{8})|\\u([0-9a-f]{4})|\\x([0-9a-f]{2})|\\(.)|(.)", re.DOTALL)
_NAMED = {"0": 0, "n": 0x0A, "r": 0x0D, "t": 0x09, "a": 7, "b": 8, "e": 0x1B, "f": 0x0C, "v": 0x0B}


def with_wide_classes(text: str, root: str, normal: Normal) -> tuple[str, str]:
    """The same language and the name of its root rule; both as they are where there is no such class."""
    if "[" not in text or not _MAYBE_WIDE.search(text):
        return text, root
    written = normal(text, root)
    changed = _PIECE.sub(_opened, written)
    return (text, root) if changed == written else (changed, "root")  # so the library calls it, whatever it was


def _opened(piece: re.Match[str]) -> str:
    negated, members = piece.groups()
    pairs = _pairs(members or "")
    if max((last for _, last in pairs), default=0) <= LAST_ASCII:
        return _CHAR.sub(_unmistakable, piece.group())
    return spelled_open(complement(pairs) if negated else pairs)


def _pairs(members: str) -> CharSet:
    """What a class names. As the library writes it, a hyphen that is no range's stands behind a backslash."""
    found, pairs = list(_CHAR.finditer(members)), list[tuple[int, int]]()
    place = 0
    while place < len(found):
        first = last = _code(found[place])
        if place + 2 < len(found) and found[place + 1].group() == "-":
            last = _code(found[place + 2])
            place += 2
        pairs.append((first, last))
        place += 1
    return union(pairs)


def _code(char: re.Match[str]) -> int:
    *numbers, named, plain = char.groups()
    number = next(filter(None, numbers), None)
    if number is not None:
        return int(number, 16)
    return ord(plain) if plain is not None else _NAMED.get(named, ord(named))


def _unmistakable(char: re.Match[str]) -> str:
    """The library writes two digits behind `\\x`, and reads as many as there are."""
    return f"\\U{int(char.group(3), 16):08x}" if char.group(3) else char.group()
