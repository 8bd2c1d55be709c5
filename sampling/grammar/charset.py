"""Sets of characters, and their spelling as a class of a grammar."""

from __future__ import annotations

from collections.abc import Iterable

CharSet = tuple[tuple[int, int], ...]  # first and last code points, ascending, apart from each other

LAST = 0x10FFFF
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
    """The same where anything may stand around it; one that reaches to the end of Unicode lets surrogates through.

    The library's masks are wrong now and then where a long listed class follows a repetition ("a{1,2}[^b]*c"). They are right for
    a negated one, which it cannot keep from surrogates, and for two alternatives, of which a counted repetition is very slow.
    """
    if not chars or chars[-1][1] < LAST:
        return spelled(chars)
    others = complement(chars)
    return f"[^{''.join(map(_spelled, others))}]" if others else r"[\0-\U0010ffff]"


def spelled_in_regex(chars: CharSet) -> str:
    """The class as engines of regular expressions write it."""
    return "[" + "".join(f"\\u{{{first:x}}}-\\u{{{last:x}}}" for first, last in chars) + "]"


def _spelled(piece: tuple[int, int]) -> str:
    first, last = piece
    return f"\\U{first:08x}-\\U{last:08x}" if last > first else f"\\U{first:08x}"


EVERY = complement(())
IN_JSON = complement(charset((0, 0x1F), '"\\'))  # what a JSON string may hold as it is
SPELLABLE = complement(charset((0, 7), "\v", (0x0E, 0x1F), "\x7f"))  # what it may hold as it is or as a backslash and a letter
