"""Translates regular expressions into grammar rules: the syntax of JavaScript without flags, anchored at both ends.

xgrammar's two own parsers are not used. One reads an escaped caret at the start of a class as a negation and `\\x61b` as one
character, drops an anchor in the middle of a pattern, and reads an unknown escape (`\\A`) as its letter. The other, for patterns
inside JSON strings, accepts "b" for `(ab+)?`, allows bytes that are not UTF-8, and ignores look-around.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from stepgraph.sampling.grammar.constraints.charset import (
    EVERY,
    CharSet,
    charset,
    complement,
    intersection,
    readable_ebnf_class,
    regex_class,
    union,
)

MAX_REPEAT = 100_000

_ESCAPE = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]+\}|\\c[a-zA-Z]|\\0\d|\\."
_ITEM = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_TOKEN = re.compile(
    rf"(?P<set>\[(?:{_ESCAPE}|[^\]\\])*\])|(?P<escape>{_ESCAPE})|(?P<group>\((?:\?:|\?<[a-zA-Z_]\w*>)?)"
    r"|(?P<repeat>(?:[*+?]|\{\d+(?:,\d*)?\})\??)|(?P<anchor>[$^])|(?P<other>.)",
    re.DOTALL,
)
_DIGITS, _WORD = charset((48, 57)), charset((48, 57), (65, 90), (97, 122), "_")
_SPACE = charset("\t\n\v\f\r \u00a0\u1680", (0x2000, 0x200A), "\u2028\u2029\u202f\u205f\u3000\ufeff")
_SETS = {"d": _DIGITS, "D": complement(_DIGITS), "w": _WORD, "W": complement(_WORD), "s": _SPACE, "S": complement(_SPACE)}
_DOT = complement(charset("\n\r\u2028\u2029"))
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


class _Context(NamedTuple):
    where: str
    spell: Callable[[CharSet], str]

    def reject(self, piece: str, position: int, expected: str) -> NoReturn:
        raise ValueError(f"{self.where}: got {piece} at position {position}, expected {expected}")


def pattern_to_ebnf(pattern: str, where: str) -> str:
    """The right-hand side of a rule for the texts that the pattern matches; ValueError for what cannot be enforced."""
    return " ".join(_translated(pattern, _Context(where, readable_ebnf_class), "(", '""'))


def pattern_to_regex(pattern: str, where: str) -> str:
    """The same as a regular expression: every class is written with numbers, so that all regex engines read it alike."""
    return "".join(_translated(pattern, _Context(where, regex_class), "(?:", ""))


def _translated(pattern: str, context: _Context, opening: str, empty: str) -> list[str]:
    pieces, depth, before = [empty], 0, "|"
    atoms = {")": ")"}  # cache: a long pattern repeats its letters
    for token in _TOKEN.finditer(pattern):
        text, start = token.group(), token.start()
        if token["anchor"]:
            after = pattern[token.end() : token.end() + 1] or "|"
            if depth or (before if text == "^" else after) != "|":
                context.reject(repr(text), start, "anchors at the ends of the whole pattern only")
        elif token["repeat"]:
            pieces[-1] += _repeat(text, start, before, context)
        elif token["group"] or text == "|":
            _check_group(token, context)
            pieces += [opening if text[0] == "(" else text, empty]  # an alternative may be empty
        else:
            if text not in atoms:
                atoms[text] = _atom(token, context)
            pieces.append(atoms[text])
        depth += {"(": 1, ")": -1}.get(text[0], 0)
        if depth < 0:
            context.reject(text, start, "a parenthesis that was opened")
        before = "{" if token["repeat"] else text
    if depth:
        raise ValueError(f"{context.where}: the parenthesis is not closed")
    return pieces


def _repeat(text: str, start: int, before: str, context: _Context) -> str:
    if before[0] in "|^({":
        context.reject(text, start, "an element before it, and one repetition only")
    bounds = re.findall(r"\d+", text)
    if any(len(bound) > 6 or int(bound) > MAX_REPEAT for bound in bounds):
        context.reject(text[:40], start, f"at most {MAX_REPEAT} repetitions")
    if [int(bound) for bound in bounds] != sorted(int(bound) for bound in bounds):
        context.reject(text, start, "bounds that ascend")
    return text[0] if text[0] in "*+?" else text.rstrip("?")  # a lazy repetition matches the same texts


def _check_group(token: re.Match[str], context: _Context) -> None:
    if token.group() == "(" and token.string[token.end() : token.end() + 1] == "?":
        context.reject(token.string[token.start() :][:3], token.start(), "no look-around and no flags")


def _atom(token: re.Match[str], context: _Context) -> str:
    text, start = token.group(), token.start()
    if token["other"] and text in "[{\\":
        context.reject(text, start, "its end, or a backslash before it")
    chars = _read_set(text, start, context) if token["set"] else _DOT if text == "." else _read_item(text, start, context)
    chars = intersection(chars, EVERY)
    if not chars:
        context.reject(text[:40], start, "a class of at least one character")
    return context.spell(chars)


def _read_set(text: str, start: int, context: _Context) -> CharSet:
    """The characters of `[...]`; a hyphen is a range between two characters and literal anywhere else."""
    negated = text.startswith("[^")
    chars = list[tuple[int, int]]()
    items = [(item.group(), start + 1 + negated + item.start()) for item in _ITEM.finditer(text[1 + negated : -1])]
    index = 0
    while index < len(items):
        item, at = items[index]
        first = _read_item("\\x08" if item == "\\b" else item, at, context)
        is_range = index + 2 < len(items) and items[index + 1][0] == "-" and not {item[1:], items[index + 2][0][1:]} & _SETS.keys()
        if is_range:
            end, at_end = items[index + 2]
            last = _read_item("\\x08" if end == "\\b" else end, at_end, context)
            if last < first:
                context.reject(f"{item}-{end}", at, "a range that ascends")
            chars.append((first[0][0], last[0][1]))
        else:
            chars += first
        index += 3 if is_range else 1
    return complement(union(chars)) if negated else union(chars)


def _read_item(item: str, start: int, context: _Context) -> CharSet:
    """The characters of one escape or one literal character."""
    if item[0] != "\\":
        return charset(item)
    name = item[1:2]
    if item[1:] in _SETS:
        return _SETS[name]
    if item[1:] in _CONTROLS:
        return charset(_CONTROLS[name])
    if name in ("x", "u") and len(item) > 2:
        code = int(item[2:].strip("{}"), 16)
    elif name == "c" and len(item) > 2:
        code = ord(item[2]) % 32
    elif len(item) == 2 and not name.isalnum():
        code = ord(name)
    else:
        context.reject(item, start, "an escape that has a meaning")
    if not intersection(((code, code),), EVERY):
        context.reject(item, start, "a Unicode character other than a surrogate; write \\u{...}")
    return ((code, code),)
