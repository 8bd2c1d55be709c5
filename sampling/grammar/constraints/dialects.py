"""Patterns that Python (`re`), Rust (in pydantic) and JavaScript read differently: refused, or rewritten for what all of them match."""

from __future__ import annotations

import re

from stepgraph.sampling.grammar.constraints.charset import CharSet, charset, complement, intersection, union
from stepgraph.sampling.grammar.schema.patterns import CLASS_ESCAPES, PatternError

_PIECE = re.compile(r"\[(?:\\.|[^\]\\])*\]?|\\.|\{[ 0-9]*(?:,[ 0-9]*)?\}|\]", re.DOTALL)
_COUNT = re.compile(
    r"\{(?:[0-9]+(?:,[0-9]*)?| *)\}"
)  # a count, or characters, in all dialects; other pieces with braces are counts in some
_POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_SURROGATE = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89a-fA-F]\w\w)")
_SETS_OF_RUST = re.compile(r"\[|&&|--|~~")  # classes inside others, intersections and differences
_DIGITS, _WORD, _SPACE = (CLASS_ESCAPES[name] for name in "dws")
# Beyond ASCII the languages disagree about these classes. `_LEAST`: what is in the class in all of them; of \D and \W, the largest blocks.
_OTHER_BLOCKS = charset((0x2010, 0x2027), (0x20A0, 0x20BF), (0x2190, 0x23FF), (0x2500, 0x2775), (0x1F300, 0x1F64F))
_NO_DIGITS = charset((0, 0x65F), (0x1C5A, 0xA61F), (0xABFA, 0xFF0F), (0x1F000, 0x1FBEF))
_MORE_SPACE = charset((0x1C, 0x1F), "\x85")
_LEAST = {
    "d": _DIGITS,
    "w": _WORD,
    "s": intersection(_SPACE, complement(charset("\ufeff"))),
    "D": intersection(complement(_DIGITS), _NO_DIGITS),
    "W": intersection(complement(_WORD), union((*charset((0, 0xA9)), *_OTHER_BLOCKS))),
    "S": complement(union((*_SPACE, *_MORE_SPACE))),
}
_MOST = {name.swapcase(): complement(chars) for name, chars in _LEAST.items()}


def refuse_ambiguous(pattern: str) -> None:
    """PatternError for what JavaScript reads as characters, and the writer probably meant as a count or a class of another dialect."""
    any_char = ""  # `[^]`, which begins a class in other dialects
    for piece in _PIECE.finditer(pattern):
        text, at = piece[0], piece.start()
        if text[0] == "{" and not _COUNT.fullmatch(text):
            raise PatternError(f"has {text!r} at position {at}, expected a count such as {{0,3}}, or \\{{ for the character")
        if text[0] == "[" and _POSIX_CLASS.search(text):
            raise PatternError(f"has {text!r} at position {at}, expected ranges such as A-Z, or \\[ for the character")
        any_char = any_char or (f"{text!r} at position {at}" if text == "[^]" else "")
        if text == "]" and any_char:
            raise PatternError(f"has {any_char} and ']' at position {at}, expected \\] inside a class, and after [^] for any character")


def in_all_dialects(pattern: str, is_rust: bool = False) -> str:
    """A pattern of JavaScript for texts that this pattern matches in Python and Rust too; PatternError where it means something else."""
    refuse_ambiguous(pattern)
    if found := _SURROGATE.search(pattern):
        raise PatternError(f"has {found[1]!r}, expected no surrogates")
    return _PIECE.sub(lambda piece: _rewritten(piece[0], is_rust), pattern)


def _rewritten(text: str, is_rust: bool) -> str:
    """A class or an escape, with the characters of \\d, \\D, \\w, \\W, \\s and \\S written out."""
    if text[0] == "\\":
        if is_rust and text[1] in "<>":
            raise PatternError(f"has {text!r}, a boundary of words, expected {text[1]!r}")
        return f"[{_ranges(_LEAST[text[1]])}]" if text[1] in _LEAST else text
    if text[0] in "{]":
        return text
    if text in ("[]", "[^]"):
        raise PatternError(f"has {text!r}, expected \\] at the start of a class")
    if is_rust and (found := _SETS_OF_RUST.search(_ESCAPE.sub("__", text[1:]))):
        raise PatternError(f"has {text!r}, expected \\{found[0][0]} in a class")
    by_name = _MOST if text[1] == "^" else _LEAST
    return _ESCAPE.sub(lambda escape: _ranges(by_name[escape[0][1]]) if escape[0][1] in by_name else escape[0], text)


def _ranges(chars: CharSet) -> str:
    return "".join(f"\\u{{{first:x}}}-\\u{{{last:x}}}" for first, last in chars)
