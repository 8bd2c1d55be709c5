"""What a regular expression may say: the parts of the notation that the grammar library would misread are refused.

Its own parser refuses look-around, back-references and flags. What it takes silently: an anchor in the middle of a pattern
is dropped, an escape without a meaning (`\\A`, `\\Z`) stands for its letter, a large repetition has no upper end, and inside
a JSON string a literal quote, backslash or control character is emitted raw.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_REPEAT = 100_000

_CONTROL_ESCAPES = frozenset("nrtfv0c")
_OTHER_ESCAPES = frozenset("dDwWsSxubBpPk")  # the last five are refused by the parser, in words of its own
_DIGITS = frozenset("123456789")  # back-references: likewise
_REPEAT = re.compile(r"\{(\d*),?(\d*)\}")
_PIECE = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]+\}|\\.|.", re.DOTALL)


class _Piece(NamedTuple):
    text: str
    start: int
    in_class: bool
    negated: bool


def check_pattern(pattern: str, where: str) -> None:
    """A pattern always matches from end to end; `^` and `$` are welcome at the ends of a top-level alternative, nowhere else."""
    for piece in _pieces(pattern):
        if len(piece.text) == 2 and piece.text[1].isalnum() and piece.text[1] not in _CONTROL_ESCAPES | _OTHER_ESCAPES | _DIGITS:
            raise ValueError(f"{where}: got {piece.text} at position {piece.start}, want an escape that has a meaning")
    for repeat in _REPEAT.finditer(pattern):
        if any(len(bound) > 6 or int(bound or 0) > MAX_REPEAT for bound in repeat.groups()):
            raise ValueError(f"{where}: got {repeat.group()[:40]} at position {repeat.start()}, want at most {MAX_REPEAT} repetitions")
    depth = 0
    pieces = [piece for piece in _pieces(pattern) if not piece.in_class]
    for index, piece in enumerate(pieces):
        before = pieces[index - 1].text if index else "|"
        after = pieces[index + 1].text if index + 1 < len(pieces) else "|"
        if (piece.text == "^" and (depth or before != "|")) or (piece.text == "$" and (depth or after != "|")):
            raise ValueError(f"{where}: got {piece.text!r} at position {piece.start}, want anchors at the ends of the whole pattern only")
        depth += {"(": 1, ")": -1}.get(piece.text, 0)


def check_json_pattern(pattern: str, where: str) -> None:
    """As `check_pattern`, and no literal character that a JSON string must escape; `.` and `[^...]` leave those out by themselves."""
    check_pattern(pattern, where)
    for piece in _pieces(pattern):
        if not piece.negated and _must_be_escaped(piece.text):
            raise ValueError(f"{where}: got {piece.text!r} at position {piece.start}, want no character that JSON strings escape")


def _pieces(pattern: str) -> Iterator[_Piece]:
    in_class = negated = False
    for match in _PIECE.finditer(pattern):
        text = match.group()
        if text == "[" and not in_class:
            in_class, negated = True, pattern.startswith("[^", match.start())
        yield _Piece(text, match.start(), in_class, negated)
        if text == "]" and in_class:
            in_class = negated = False


def _must_be_escaped(text: str) -> bool:
    if text.startswith("\\") and len(text) > 1:
        if text[1] in "xu" and len(text) > 2:
            text = chr(int(text[2:].strip("{}"), 16))
        else:
            return text[1] in _CONTROL_ESCAPES or text[1] in '"\\'
    return text in '"\\' or text < " "
