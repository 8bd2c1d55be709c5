"""Sets of Unicode characters, and their character classes in grammars and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

CharSet = tuple[tuple[int, int], ...]  # first and last code points of ranges, ascending, not adjacent

LAST_CODE_POINT, LAST_ASCII = 0x10FFFF, 0x7F
_SURROGATES = (0xD800, 0xDFFF)
EBNF_CHAR = re.compile(r"\\U([0-9a-fA-F]{8})|\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{1,2})|\\(.)|(.)", re.DOTALL)
_RANGE = re.compile(rf"(?P<first>{EBNF_CHAR.pattern})(?:-(?P<last>{EBNF_CHAR.pattern}))?", re.DOTALL)
_ESCAPES = {"0": "\0", "n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}


def charset(*parts: str | tuple[int, int]) -> CharSet:
    """The characters of all strings and of all ranges of code points."""
    pairs = list[tuple[int, int]]()
    for part in parts:
        pairs += [(ord(char), ord(char)) for char in part] if isinstance(part, str) else [part]
    return union(pairs)


def union(pairs: Iterable[tuple[int, int]]) -> CharSet:
    merged = list[tuple[int, int]]()
    for first, last in sorted(pairs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(chars: CharSet) -> CharSet:
    """All other characters of Unicode, without surrogates, which UTF-8 cannot encode."""
    gaps, start = list[tuple[int, int]](), 0
    for first, last in (*union((*chars, _SURROGATES)), (LAST_CODE_POINT + 1, LAST_CODE_POINT + 1)):
        if start < first:
            gaps.append((start, first - 1))
        start = last + 1
    return tuple(gaps)


def intersection(left: CharSet, right: CharSet) -> CharSet:
    found, index, other = list[tuple[int, int]](), 0, 0
    while index < len(left) and other < len(right):
        first, last = max(left[index][0], right[other][0]), min(left[index][1], right[other][1])
        if first <= last:
            found.append((first, last))
        if left[index][1] <= right[other][1]:
            index += 1
        else:
            other += 1
    return tuple(found)


def ebnf_class(chars: CharSet) -> str:
    """The class of these characters in EBNF. Escapes have eight digits: the parser reads `\\x1fc` as one character."""
    return f"[{''.join(map(_code_range, chars))}]"


def xgrammar_safe_class(chars: CharSet) -> str:
    """As `ebnf_class`, for a class that may follow any element or be repeated, in a form that xgrammar reads correctly.

    xgrammar's look-ahead compares only the last bytes of both ends of a range: U+0430 to U+044F would include "0" to "O". So ranges are
    split until their last bytes contain no ASCII outside the class. If that is impossible, the remaining ranges become a second
    alternative, to which the look-ahead does not apply; this is slow in a repetition, so U+E000, the start of a range, is left out.
    """
    has_nul = bool(chars) and chars[0][0] == 0
    pieces = tuple(piece for first, last in chars for piece in _split_range(first, last, has_nul))
    ascii_chars = {code for first, last in pieces for code in range(first, min(last, LAST_ASCII) + 1)}
    ascii_last_bytes = {code for first, last in pieces for code in range(first & 0xFF, min(last & 0xFF, LAST_ASCII) + 1)}
    if ascii_last_bytes <= ascii_chars:
        return ebnf_class(pieces)
    if len(pieces) == 1:
        (first, last), *_ = pieces
        return f'"{_code_range(pieces[0])}"' if first == last else f"({ebnf_class(((first, first),))} | {ebnf_class(((first + 1, last),))})"
    return f"({ebnf_class(pieces[:1])} | {ebnf_class(pieces[1:])})"


def _split_range(first: int, last: int, has_nul: bool) -> Iterator[tuple[int, int]]:
    """Split a range into several, which may overlap: ASCII, and the rest with as little ASCII in its last bytes as possible."""
    if first <= LAST_ASCII:
        yield first, min(last, LAST_ASCII)
        first = LAST_ASCII + 1
    block = first | 0xFF
    if first == _SURROGATES[1] + 1 and last > block and not has_nul:
        first += 1
    if last > block and first & 0xFF <= min(last & 0xFF, LAST_ASCII):
        if not first & 0xFF:
            yield first, first
            first += 1
        yield first, block + 1
        first = block - LAST_ASCII
    if first <= last:
        yield first, last


def regex_class(chars: CharSet) -> str:
    """The class in the syntax of regular expressions."""
    return "[" + "".join(f"\\u{{{first:x}}}-\\u{{{last:x}}}" for first, last in chars) + "]"


def class_members(members: str) -> CharSet:
    """The characters of an EBNF class as xgrammar prints it: a literal hyphen has a backslash."""
    ranges = (found.group("first", "last") for found in _RANGE.finditer(members))
    return union((_code(first), _code(last or first)) for first, last in ranges)


def _code(text: str) -> int:
    """The code point of a character or an escape."""
    char = EBNF_CHAR.fullmatch(text)
    assert char is not None
    digits = char[1] or char[2] or char[3]
    return int(digits, 16) if digits else ord(_ESCAPES.get(char[4], char[4]) if char[4] else char[5])


def _code_range(piece: tuple[int, int]) -> str:
    first, last = piece
    return f"\\U{first:08x}-\\U{last:08x}" if last > first else f"\\U{first:08x}"


ALL_CHARS = complement(())
JSON_UNESCAPED = complement(charset((0, 0x1F), '"\\'))  # characters of a JSON string that need no escape
