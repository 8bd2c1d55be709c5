"""Regular expressions of schemas as languages: the syntax of JavaScript with look-ahead, searched anywhere in a text unless anchored."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from stepgraph.sampling.grammar.constraints.charset import ALL_CHARS, CharSet, charset, complement, intersection, union
from stepgraph.sampling.grammar.schema import language
from stepgraph.sampling.grammar.schema.language import ANY_TEXT, END, EPSILON, MARKED_TEXT, START, Term, both, cat, chars, either

MAX_COUNT = 100_000
MAX_ANCHORS = 100  # counted with repetitions, where they are inside groups
MAX_CHECKED_CHARS = 2_000  # characters of a pattern that `check_pattern` reads
_DIGITS, _WORD = charset((48, 57)), charset((48, 57), (65, 90), (97, 122), "_")
_SPACE = charset("\t\n\v\f\r \u00a0\u1680", (0x2000, 0x200A), "\u2028\u2029\u202f\u205f\u3000\ufeff")
CLASS_ESCAPES = {"d": _DIGITS, "D": complement(_DIGITS), "w": _WORD, "W": complement(_WORD), "s": _SPACE, "S": complement(_SPACE)}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_DOT = complement(charset("\n\r\u2028\u2029"))
_COUNT = re.compile(r"\{([0-9]+)(,?)([0-9]*)\}")
_ESCAPE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}|c([a-zA-Z])|([pP])\{((?:\w+=)?\w+)\}", re.DOTALL)
_PROPERTY = re.compile(r"\\[pP]\{")
_ANCHORS = re.compile(r"[\^$]{2,}(?![*+?])")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")


class PatternError(ValueError):
    """A pattern that is malformed, or whose language is not regular."""


@dataclass(frozen=True)
class LookAhead:
    alternatives: list[Pieces]
    negative: bool


class Group(NamedTuple):
    alternatives: list[Pieces]


class Repeat(NamedTuple):
    item: Item
    low: int
    high: int | None


Item = CharSet | int | LookAhead | Group | Repeat  # an int is START or END
Pieces = list[Item]


def check_pattern(pattern: str) -> None:
    """PatternError for a malformed pattern. Long patterns are not checked, nor those with Unicode properties, whose characters take a
    second to find."""
    if len(pattern) <= MAX_CHECKED_CHARS and not _PROPERTY.search(pattern):
        parse_pattern(pattern)


def takes_seconds(pattern: str) -> bool:
    """Whether a pattern is so long that its Unicode properties may take seconds."""
    return len(pattern) > MAX_CHECKED_CHARS and bool(_PROPERTY.search(pattern))


def parse_pattern(pattern: str) -> list[Pieces]:
    """The alternatives of a pattern; PatternError."""
    try:
        return _Parser(pattern).parsed()
    except RecursionError:
        raise PatternError("has too many groups inside each other, expected fewer") from None


@functools.lru_cache(maxsize=256)
def search(pattern: str) -> Term:
    """The texts in which the pattern is found; PatternError."""
    found = dict[tuple[bool, bool, int], list[Pieces]]()
    for index, sequence in enumerate(parse_pattern(pattern)):
        starts, ends = sequence[:1] == [START], sequence[-1:] == [END]
        inner = sequence[starts : len(sequence) - ends]
        alone = index if any(_has_mark(item) or _has_look(item) for item in inner) else -1
        found.setdefault((starts, ends, alone), []).append(sequence)
    return either(*map(_searched, found.values()))


@functools.lru_cache(maxsize=256)
def full(pattern: str) -> Term:
    """The texts that the pattern matches from their start to their end."""
    return either(*(_anchored([*sequence, _STARTS, _ENDS]) for sequence in parse_pattern(pattern)))


def _searched(sequences: list[Pieces]) -> Term:
    """The texts in which one of the sequences is found. All sequences have the same anchors. The text before and after is added once for
    all of them; otherwise an automaton would have a state for each set of sequences found so far."""
    starts, ends = sequences[0][:1] == [START], sequences[0][-1:] == [END]
    sequence = sequences[0] if len(sequences) == 1 else [Group([inner[starts : len(inner) - ends] for inner in sequences])]
    return _anchored([*([] if starts else [_ANYTHING]), *sequence, *([] if ends else [_ANYTHING])])


def _anchored(sequence: Pieces) -> Term:
    """The texts of a sequence in which START and END are the ends of the text. START and END inside the sequence need terms with marks."""
    inner = list(sequence)
    while inner[:1] == [START]:
        del inner[0]
    while inner[-1:] in ([END], [_STARTS], [_ENDS]):
        del inner[-1]
    if not any(map(_has_mark, inner)):
        return _term(inner, EPSILON, ANY_TEXT)
    if (count := sum(map(_count_marks, sequence))) > MAX_ANCHORS:
        raise PatternError(f"has {count} anchors, expected at most {MAX_ANCHORS}")
    marked = [each for each in _walk(sequence) if isinstance(each, (LookAhead, Repeat)) and _has_mark(each)]
    if any(isinstance(each, LookAhead) for each in marked) and any(
        isinstance(each, Repeat) and each.high not in (1, each.low) for each in marked
    ):
        raise PatternError("repeats an anchor and has one in a look-ahead; write one of them in another way")
    last = [_ANYTHING_MARKED if item is _ANYTHING else item for item in sequence[-1:]]
    found = language.unmarked(_term([*sequence[:-1], *last, _ENDS], EPSILON, MARKED_TEXT), max(count, 1))
    if found.nullable == all(map(_matches_empty, sequence)):
        return found
    return either(found, EPSILON) if not found.nullable else both(found, language.complement(EPSILON))


def _count_marks(item: Item) -> int:
    """The largest number of anchors that a match needs at one place, or more."""
    if isinstance(item, (LookAhead, Group)):
        return max((sum(map(_count_marks, sequence)) for sequence in item.alternatives), default=0)
    return max(item.low, 1) * _count_marks(item.item) if isinstance(item, Repeat) else int(isinstance(item, int))


def _matches_empty(item: Item) -> bool:
    """Whether an item matches in the empty text. `$` and then `^` match there, and in no order of marks."""
    if isinstance(item, (LookAhead, Group)):
        found = any(all(map(_matches_empty, sequence)) for sequence in item.alternatives)
        return found != (isinstance(item, LookAhead) and item.negative)
    return item.low == 0 or _matches_empty(item.item) if isinstance(item, Repeat) else isinstance(item, int)


def _walk(items: Pieces) -> Iterator[Item]:
    """The items and those inside them, in no order. A generator for each level would take time by the square of the depth."""
    waiting = list(items)
    while waiting:
        yield (item := waiting.pop())
        if isinstance(item, Repeat):
            waiting.append(item.item)
        elif isinstance(item, (LookAhead, Group)):
            waiting += itertools.chain(*item.alternatives)


def _has_mark(item: Item) -> bool:
    return any(isinstance(each, int) for each in _walk([item]))


def _has_look(item: Item) -> bool:
    return any(isinstance(each, LookAhead) for each in _walk([item]))


def _term(sequence: Pieces, following: Term, anything: Term) -> Term:
    """The texts of a sequence, followed by those of `following`: a look-ahead restricts all that follows it. `^` takes one START, any
    other item skips those before it."""
    skipped = EPSILON if anything is ANY_TEXT else language.repeat(chars(((START, START),)), 0, None)
    for item in reversed(sequence):
        if isinstance(item, int):
            following = cat(EPSILON if item == START else skipped, chars(((item, item),)), following)
        elif isinstance(item, LookAhead):
            ahead = either(*(_term(inner, anything, anything) for inner in item.alternatives))
            following = both(language.complement(ahead) if item.negative else ahead, following)
        elif isinstance(item, Group):
            has_look = _has_look(item)
            inner_following = following if has_look else EPSILON
            group = either(*(_term(inner, inner_following, anything) for inner in item.alternatives))
            following = group if has_look else cat(group, following)
        elif isinstance(item, Repeat):
            if _has_look(item.item):
                if item.low > 1 or item.high != 1:
                    raise PatternError("repeats a look-ahead; write it once, before or after what is repeated")
                following = either(*([] if item.low else [following]), _term([item.item], following, anything))
            else:
                following = cat(language.repeat(_term([item.item], EPSILON, anything), item.low, item.high), following)
        else:
            following = cat(skipped, chars(item), following)
    return following


_ANYTHING = Repeat(ALL_CHARS, 0, None)
_STARTS, _ENDS = Repeat(((START, START),), 0, None), Repeat(((END, END),), 0, None)
_ANYTHING_MARKED = Repeat(language.MARKED_CHARS, 0, None)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._position = pattern, 0

    def parsed(self) -> list[Pieces]:
        found = self._alternatives()
        if self._position < len(self._pattern):
            self._fail("a parenthesis that was opened")
        return found

    def _fail(self, expected: str) -> NoReturn:
        found = repr(self._pattern[self._position : self._position + 10]) if self._position < len(self._pattern) else "the end"
        raise PatternError(f"has {found} at position {self._position}, expected {expected}")

    def _accept(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._position)
        self._position += len(text) if found else 0
        return found

    def _alternatives(self) -> list[Pieces]:
        found: list[Pieces] = [[]]
        while self._position < len(self._pattern) and self._pattern[self._position] != ")":
            if self._accept("|"):
                found.append([])
            elif anchors := _ANCHORS.match(self._pattern, self._position):  # `$^` is `^$`, and `$$` is `$`
                found[-1] += [START] * ("^" in anchors[0]) + [END] * ("$" in anchors[0])
                self._position = anchors.end()
            else:
                found[-1].append(self._repeated(self._item()))
        return found

    def _item(self) -> Item:
        start, char = self._position, self._pattern[self._position]
        if char in "*+?" or _COUNT.match(self._pattern, start):
            self._fail("an element before it")
        self._position += 1
        match char:
            case "^":
                return START
            case "$":
                return END
            case ".":
                return _DOT
            case "[":
                return self._set()
            case "\\":
                return self._escape(in_set=False)
            case "(":
                return self._group()
        return charset(char)

    def _group(self) -> Item:
        look = next((mark for mark in ("?=", "?!") if self._accept(mark)), "")
        if not look and not self._accept("?:"):
            if named := re.compile(r"\?P?<[A-Za-z_]\w*>").match(self._pattern, self._position):
                self._position = named.end()
            elif self._pattern.startswith("?", self._position):
                self._fail("no look-behind and no flags")
        alternatives = self._alternatives()
        if not self._accept(")"):
            self._fail("a closing parenthesis")
        return LookAhead(alternatives, look == "?!") if look else Group(alternatives)

    def _repeated(self, item: Item) -> Item:
        found = _COUNT.match(self._pattern, self._position)
        char = self._pattern[self._position : self._position + 1]
        if found:
            low = int(found[1].lstrip("0")[:9] or 0)
            high = None if found[2] and not found[3] else int(found[3].lstrip("0")[:9] or 0) if found[2] else low
            if max(low, high or 0) > MAX_COUNT:
                self._fail(f"at most {MAX_COUNT} repetitions")
            if high is not None and high < low:
                self._fail("bounds that ascend")
            self._position = found.end()
        elif char and char in "*+?":
            low, high = int(char == "+"), 1 if char == "?" else None
            self._position += 1
        else:
            return item
        if isinstance(item, int):
            self._fail("no repetition of an anchor")
        self._accept("?")  # `?`: a lazy repetition matches the same texts
        if self._pattern[self._position : self._position + 1] in ("*", "+", "?") or _COUNT.match(self._pattern, self._position):
            self._fail("one repetition only")
        return Repeat(item, low, high)

    def _set(self) -> CharSet:
        negated, found = self._accept("^"), list[tuple[int, int]]()
        while not self._accept("]"):
            start, first = self._position, self._member()
            dash = self._position
            if self._accept("-") and self._pattern[self._position : self._position + 1] != "]":
                last = self._member()
                if _size(first) == _size(last) == 1 and not _PROPERTY.search(self._pattern, start, self._position):
                    if last[0][0] < first[0][0]:
                        self._position = dash
                        self._fail("a range that ascends")
                    found.append((first[0][0], last[0][0]))
                else:
                    found += [*first, (ord("-"), ord("-")), *last]
            else:
                self._position = dash
                found += first
        return complement(union(found)) if negated else intersection(union(found), ALL_CHARS)

    def _member(self) -> CharSet:
        if self._position >= len(self._pattern):
            self._fail("the end of a class")
        self._position += 1
        char = self._pattern[self._position - 1]
        return self._escape(in_set=True) if char == "\\" else charset(char)

    def _escape(self, in_set: bool) -> CharSet:
        self._position += 1
        name = self._pattern[self._position - 1 : self._position]
        if in_set and name == "b":
            return charset("\b")
        if name in CLASS_ESCAPES:
            return CLASS_ESCAPES[name]
        if found := _ESCAPE.match(self._pattern, self._position - 1):
            self._position = found.end()
            if found[5]:
                members = _property(found[6])
                if not members:
                    self._fail(f"a Unicode property other than {found[6]!r}")
                return complement(members) if found[5] == "P" else members
            code = ord(found[4]) % 32 if found[4] else int(found[1] or found[2] or found[3], 16)
            return self._character(code)
        if name in _CONTROLS and not (name == "0" and self._pattern[self._position : self._position + 1].isdigit()):
            return charset(_CONTROLS[name])
        if not name or name.isalnum():
            self._position -= 2 if name else 1
            self._fail("an escape that is supported")
        return charset(name)

    def _character(self, code: int) -> CharSet:
        if 0xD800 <= code < 0xDC00 and (low := _LOW_HALF.match(self._pattern, self._position)):  # a surrogate pair
            self._position = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if not intersection(((code, code),), ALL_CHARS):
            self._fail("a Unicode character other than a surrogate")
        return ((code, code),)


def _size(members: CharSet) -> int:
    return sum(last - first + 1 for first, last in members)


@functools.cache
def _chars_by_category() -> dict[str, CharSet]:
    found, first = defaultdict[str, list[tuple[int, int]]](list), 0
    for category, same in itertools.groupby(map(unicodedata.category, map(chr, range(sys.maxunicode + 1)))):
        end = first + len(list(same))
        found[category].append((first, end - 1))
        first = end
    return {name: intersection(union(pairs), ALL_CHARS) for name, pairs in found.items()}


@functools.lru_cache(maxsize=64)
def _property(name: str) -> CharSet:
    """The characters of a general category of Unicode."""
    name = re.sub("^(gc|General_Category)=", "", name)
    name = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S", "Mark": "M", "Separator": "Z"}.get(name, name)
    if not re.fullmatch("[LMNPSZC][a-z]?", name):
        return ()
    return union(pair for category, chars in _chars_by_category().items() if category.startswith(name) for pair in chars)
