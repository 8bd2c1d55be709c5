"""Sets of characters, and their spelling as a class of a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

CharSet = tuple[tuple[int, int], ...]  # first and last code points, ascending, apart from each other

LAST, LAST_ASCII = 0x10FFFF, 0x7F
_SURROGATES = (0xD800, 0xDFFF)


def charset(*parts: str | tuple[int, int]) -> CharSet:
    """The characters of every string, and of every range of code points."""
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
    """All other characters of Unicode. Surrogates are none: no UTF-8 text holds one."""
    gaps, start = list[tuple[int, int]](), 0
    for first, last in (*union((*chars, _SURROGATES)), (LAST + 1, LAST + 1)):
        if start < first:
            gaps.append((start, first - 1))
        start = last + 1
    return tuple(gaps)


def intersection(left: CharSet, right: CharSet) -> CharSet:
    return complement(union((*complement(left), *complement(right))))


def spelled(chars: CharSet) -> str:
    """A class of these characters in EBNF. All by number: the parser takes `\\x1fc` for one character."""
    return f"[{''.join(map(_spelled, chars))}]"


def spelled_open(chars: CharSet) -> str:
    """The same where anything may stand in front of it, and where it may be counted.

    The library looks ahead in a class as it is written, and of each end of a range it compares the last byte of its number: U+0430 to
    U+044F would hold "0" to "O". Ranges that cannot be cut so that their last bytes hold no ASCII but the class's own make a second
    alternative, which is looked at in no such way; counted, that is slow, so U+E000, where a range must begin, is rather given up.
    """
    has_nul = bool(chars) and chars[0][0] == 0
    pieces = tuple(piece for first, last in chars for piece in _apart(first, last, has_nul))
    own = {code for first, last in pieces for code in range(first, min(last, LAST_ASCII) + 1)}
    taken = {code for first, last in pieces for code in range(first & 0xFF, min(last & 0xFF, LAST_ASCII) + 1)}
    if taken <= own:
        return spelled(pieces)
    if len(pieces) == 1:
        (first, last), *_ = pieces
        return f'"{_spelled(pieces[0])}"' if first == last else f"({spelled(((first, first),))} | {spelled(((first + 1, last),))})"
    return f"({spelled(pieces[:1])} | {spelled(pieces[1:])})"


def _apart(first: int, last: int, has_nul: bool) -> Iterator[tuple[int, int]]:
    """A range as ranges, which may overlap: ASCII, and what lies beyond with as little ASCII in its last bytes as can be."""
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


def spelled_in_regex(chars: CharSet) -> str:
    """The class as engines of regular expressions write it."""
    return "[" + "".join(f"\\u{{{first:x}}}-\\u{{{last:x}}}" for first, last in chars) + "]"


def _spelled(piece: tuple[int, int]) -> str:
    first, last = piece
    return f"\\U{first:08x}-\\U{last:08x}" if last > first else f"\\U{first:08x}"


EVERY = complement(())
IN_JSON = complement(charset((0, 0x1F), '"\\'))  # what a JSON string may hold as it is
SPELLABLE = complement(charset((0, 7), "\v", (0x0E, 0x1F), "\x7f"))  # what it may hold as it is or as a backslash and a letter
