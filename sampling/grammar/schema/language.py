"""Regular languages of texts, closed under intersection and complement: terms with derivatives (Brzozowski 1964), and automata of terms.

Equal terms are the same object. The order of the parts of a union or an intersection depends on these parts only, so that the grammar of a
schema does not depend on what the process read before. A text is a sequence of Unicode characters without surrogates, before JSON escapes
are written.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from stepgraph.sampling.grammar.constraints.charset import ALL_CHARS, CharSet, union

SURROGATES = 0xD800, 0xDFFF
MAX_LENGTH_CASES = 8  # alternatives, one for each length, into which `of_length` may split a term
START, END = 0x110000, 0x110001  # marks before the first and after the last character, matched by `^` and `$` of a pattern
Kind = Literal["chars", "words", "cat", "alt", "and", "not", "repeat", "end", "multiple", "named"]
Label = tuple[object, ...]


class Term:
    """A regular language; created by the functions below. `values` by kind:

    named: name and rule of a grammar, and the length of the longest text. The first part has some texts of the rule, and replaces it inside
    other terms. chars: a CharSet. words: sorted texts. repeat: the smallest and the largest count. multiple: see `multiple_of`.
    end: a number; the texts that are in the part if END is appended that often.
    """

    __slots__ = ("__weakref__", "_order", "_transitions", "is_regex", "kind", "nullable", "parts", "values")

    def __init__(self, kind: Kind, parts: tuple[Term, ...], values: Label) -> None:
        self.kind, self.parts, self.values = kind, parts, values
        self.nullable = self._is_nullable()
        # Whether it is a regular expression.
        self.is_regex: bool = kind not in ("and", "not", "end", "multiple", "named") and all(part.is_regex for part in parts)
        self._transitions: tuple[Sequence[int], Sequence[Term]] | None = None
        self._order: int | None = None
        if kind == "cat":
            self.order()  # now: later, the second parts of a long pattern would take too deep a recursion

    def _is_nullable(self) -> bool:
        nullable = [part.nullable for part in self.parts]
        match self.kind:
            case "words":
                return self.values[:1] == ("",)
            case "cat" | "and":
                return all(nullable)
            case "alt":
                return any(nullable)
            case "named":
                return nullable[0]
            case "not":
                return not nullable[0]
            case "repeat":
                return not self.values[0] or nullable[0]
            case "end":
                (count,) = self.values
                assert isinstance(count, int)
                return _after_marks(self.parts[0], END, count).nullable
            case "multiple":
                multiple, decimals, rest, seen = self.values
                assert isinstance(multiple, int) and isinstance(decimals, int) and isinstance(rest, int) and isinstance(seen, int)
                return seen not in (-2, 0) and rest * 10 ** (decimals - max(seen, 0)) % multiple == 0
        return False

    def order(self) -> int:
        """The rank of the term in unions and intersections: a hash of integers, which is equal in all processes."""
        if self._order is None:
            self._order = hash((_KINDS[self.kind], *[part.order() for part in self.parts], *map(_number, self.values)))
        return self._order

    def after(self, char: int) -> Term:
        """The remainders of the texts that start with this character."""
        starts, terms = self.transitions()
        return terms[bisect_right(starts, char) - 1]

    def transitions(self) -> tuple[Sequence[int], Sequence[Term]]:
        """The first characters of ranges that cover all characters, START and END; and for each range, what follows its characters."""
        if self._transitions is None and self.kind == "words":
            self._transitions = _word_transitions(texts_of(self))
        elif self._transitions is None:
            starts = sorted({0, END + 1, *self._bounds()})
            self._transitions = starts, [self._derivative(start) for start in starts[:-1]]
        return self._transitions

    def _bounds(self) -> Iterable[int]:
        match self.kind:
            case "chars":
                return (bound for first, last in _ranges(self) for bound in (first, last + 1))
            case "multiple":
                return (*range(ord("0"), ord("9") + 2), ord("."), ord(".") + 1)
            case "cat" if not self.parts[0].nullable:
                return self.parts[0].transitions()[0]
        return (bound for part in self.parts for bound in part.transitions()[0])

    def _derivative(self, char: int) -> Term:
        match self.kind:
            case "chars":
                return EPSILON if any(first <= char <= last for first, last in _ranges(self)) else NOTHING
            case "cat":
                head, tail = self.parts
                derived = cat(head.after(char), tail)
                return either(derived, tail.after(char)) if head.nullable else derived
            case "alt":
                return either(*(part.after(char) for part in self.parts))
            case "and":
                return both(*(part.after(char) for part in self.parts))
            case "named":
                return self.parts[0].after(char)
            case "not":
                return complement(self.parts[0].after(char))
            case "repeat":
                low, high = repeat_bounds(self)
                rest = repeat(self.parts[0], max(low - 1, 0), None if high is None else high - 1)
                return cat(self.parts[0].after(char), rest)
            case "end":
                return _term("end", (self.parts[0].after(char),), self.values) if char < START else NOTHING
        return _multiple_after(self, char)


_KINDS = {kind: number for number, kind in enumerate(get_args(Kind))}


def _number(value: object) -> object:
    """A value of a term as integers, none of them -1, whose hash is that of -2. Hashes of texts differ between processes."""
    if isinstance(value, str):
        return int.from_bytes(value.encode("utf-8", "surrogatepass"), "little")
    return 0 if value is None else value + 3 if isinstance(value, int) else value


_TERMS: weakref.WeakValueDictionary[Label, Term] = weakref.WeakValueDictionary()


def _term(kind: Kind, parts: tuple[Term, ...], values: Label) -> Term:
    key = (kind, *map(id, parts), *values) if kind != "alt" and kind != "and" else (kind, frozenset(map(id, parts)))
    found = _TERMS.get(key)
    if found is None:
        if kind == "alt" or kind == "and":
            parts = tuple(sorted(parts, key=Term.order))
        found = _TERMS[key] = Term(kind, parts, values)
    return found


def _ranges(term: Term) -> CharSet:
    return term.values  # type: ignore[return-value]


def repeat_bounds(term: Term) -> tuple[int, int | None]:
    return term.values  # type: ignore[return-value]


def texts_of(term: Term) -> tuple[str, ...]:
    return term.values  # type: ignore[return-value]


def _word_transitions(texts: Sequence[str]) -> tuple[list[int], list[Term]]:
    tails = defaultdict[int, list[str]](list)  # in order, like the texts
    for text in texts:
        if text:
            tails[ord(text[0])].append(text[1:])
    starts, terms = [0], [NOTHING]
    for char, rest in tails.items():
        if starts[-1] == char:  # no gap after the last one
            del starts[-1], terms[-1]
        starts += char, char + 1
        terms += _term("words", (), tuple(rest)), NOTHING
    return [*starts, END + 1], terms


def chars(members: CharSet) -> Term:
    """Texts of a single character, one of these."""
    return _term("chars", (), members) if members else NOTHING


def words(texts: Iterable[str]) -> Term:
    """A finite set of texts."""
    return _term("words", (), tuple(sorted(set(texts))))


NOTHING, EPSILON = words(()), words(("",))
ANY_CHAR = chars(ALL_CHARS)
MARKED_CHARS = union((*ALL_CHARS, (START, END)))


def cat(first: Term, *rest: Term) -> Term:
    """Texts of the first language followed by texts of the others."""
    if not rest:
        return first
    tail = cat(*rest)
    if first is NOTHING or tail is NOTHING:
        return NOTHING
    if first is EPSILON or tail is EPSILON:
        return tail if first is EPSILON else first
    if first.kind == "cat":
        return cat(first.parts[0], cat(first.parts[1], tail))
    if first.kind == "repeat" and first is tail and first.values == (0, None):
        return first
    return _term("cat", (first, tail), ())


def either(*terms: Term) -> Term:
    """The union of the languages."""
    found, finite = dict[Term, None](), set[str]()
    for term in terms:
        for part in term.parts if term.kind == "alt" else (term,):
            if part.kind == "words":
                finite.update(texts_of(part))
            else:
                found[part] = None
    if ANY_TEXT in found:
        return ANY_TEXT
    parts = tuple(found)
    if finite:
        parts = (*parts, words(finite))
    return parts[0] if len(parts) == 1 else _term("alt", parts, ()) if parts else NOTHING


def both(*terms: Term) -> Term:
    """The intersection of the languages."""
    found = dict.fromkeys(part for term in terms for part in (term.parts if term.kind == "and" else (term,)))
    found.pop(ANY_TEXT, None)
    if NOTHING in found or any(term.kind == "not" and term.parts[0] in found for term in found):
        return NOTHING
    finite = next((term for term in found if term.kind == "words"), None)
    if finite is not None:
        return words(text for text in texts_of(finite) if all(matches(term, text) for term in found if term is not finite))
    parts = list[Term]()
    for term in found:
        parts = _narrowed(parts, term)
        if NOTHING in parts:
            return NOTHING
    return parts[0] if len(parts) == 1 else _term("and", tuple(parts), ()) if parts else ANY_TEXT


def _narrowed(parts: list[Term], term: Term) -> list[Term]:
    """Add a term to the parts of an intersection. Bounds on the length are merged into other parts, and left out if another part implies
    them."""
    for index, part in enumerate(parts):
        for bound, other in ((part, term), (term, part)):
            if not (bound.kind == "repeat" and bound.parts[0] is ANY_CHAR):
                continue
            merged = of_length(other, *repeat_bounds(bound))
            if merged is not None:
                return _narrowed([*parts[:index], *parts[index + 1 :]], merged)
    return [*parts, term]


def of_length(term: Term, low: int, high: int | None, cases: int = MAX_LENGTH_CASES) -> Term | None:
    """The texts whose length is in these bounds; None if that takes more than changed counts and up to `cases` alternatives."""
    least, most = length_range(term)
    if least >= low and (high is None or (most is not None and most <= high)):
        return term
    if (most is not None and most < low) or (high is not None and least > high):
        return NOTHING
    match term.kind:
        case "words":
            return words(text for text in texts_of(term) if low <= len(text) and (high is None or len(text) <= high))
        case "alt":
            found = [of_length(part, low, high, cases) for part in term.parts]
            return None if None in found else either(*(part for part in found if part is not None))
        case "repeat" if (size := length_range(term.parts[0])[0]) and size == length_range(term.parts[0])[1]:
            ends = [end for end in (None if high is None else high // size, repeat_bounds(term)[1]) if end is not None]
            return repeat(term.parts[0], max(-(-low // size), repeat_bounds(term)[0]), min(ends, default=None))
        case "cat":
            for part, rest in (term.parts, term.parts[::-1]):
                bounded, sized = list[Term](), _by_length(part, cases)
                for size, texts in sized.items():
                    after = of_length(rest, max(low - size, 0), None if high is None else high - size, cases // len(sized))
                    if after is None:
                        break
                    bounded.append(cat(texts, after) if part is term.parts[0] else cat(after, texts))
                if sized and len(bounded) == len(sized):
                    return either(*bounded)
    return None


def _by_length(term: Term, cases: int) -> dict[int, Term]:
    """The texts of each length; empty if there may be more than `cases` lengths."""
    least, most = length_range(term)
    if most is None or most - least >= cases:
        return {}
    found = {size: of_length(term, size, size, cases) for size in range(least, most + 1)}
    return {} if None in found.values() else {size: part for size, part in found.items() if part not in (None, NOTHING)}


def complement(term: Term) -> Term:
    """All texts that are not in the language."""
    if term.kind == "not":
        return term.parts[0]
    return ANY_TEXT if term is NOTHING else NOTHING if term is ANY_TEXT else _term("not", (term,), ())


def repeat(term: Term, low: int, high: int | None) -> Term:
    """Texts that consist of `low` to `high` texts of the language; `high` None: no limit."""
    if high is not None and high < low:
        return NOTHING
    if high == 0 or term is EPSILON:
        return EPSILON
    if term is NOTHING:
        return NOTHING if low else EPSILON
    if (low, high) == (1, 1):
        return term
    if term.kind == "repeat" and term.values == (0, None):
        return term
    return _term("repeat", (term,), (low, high))


def named_rule(name: str, rule: str, parts: Sequence[Term], longest: int | None) -> Term:
    """The texts of a rule, see `Term`. With `longest`, no text is empty."""
    return _term("named", tuple(parts), (name, rule, longest))


ANY_TEXT = _term("repeat", (ANY_CHAR,), (0, None))
MARKED_TEXT = _term("repeat", (chars(MARKED_CHARS),), (0, None))


def unmarked(term: Term, count: int) -> Term:
    """The texts that are in the language if START is prepended and END is appended `count` times."""
    return _term("end", (_after_marks(term, START, count),), (count,))


def _after_marks(term: Term, mark: int, count: int) -> Term:
    before: Term | None = None
    while count and term is not before:
        before, term, count = term, term.after(mark), count - 1
    return term


def multiple_of(numerator: int, decimals: int) -> Term:
    """Unsigned decimal numbers that are multiples of numerator / 10**decimals."""
    return _term("multiple", (), (numerator, decimals, 0, -2))  # -2: no digit yet, -1: no point yet, else: digits after the point


def _multiple_after(term: Term, char: int) -> Term:
    multiple, decimals, rest, seen = term.values
    assert isinstance(multiple, int) and isinstance(decimals, int) and isinstance(rest, int) and isinstance(seen, int)
    if char == ord(".") and seen == -1:
        return _term("multiple", (), (multiple, decimals, rest, 0)) if decimals else NOTHING
    if not ord("0") <= char <= ord("9"):
        return NOTHING
    if seen == decimals:  # more digits: zeros only
        return term if char == ord("0") else NOTHING
    return _term("multiple", (), (multiple, decimals, (rest * 10 + char - ord("0")) % multiple, -1 if seen < 0 else seen + 1))


@functools.lru_cache(maxsize=4096)
def length_range(term: Term) -> tuple[int, int | None]:
    """Bounds of the length of a text. They are correct, but not always the tightest."""
    ranges = [length_range(part) for part in term.parts]
    match term.kind:
        case "chars":
            return 1, 1
        case "words":
            lengths = [len(text) for text in texts_of(term)]
            return min(lengths, default=0), max(lengths, default=0)
        case "cat":
            return ranges[0][0] + ranges[1][0], None if ranges[0][1] is None or ranges[1][1] is None else ranges[0][1] + ranges[1][1]
        case "alt":
            ends = [most for _, most in ranges if most is not None]
            return min(least for least, _ in ranges), max(ends) if len(ends) == len(ranges) else None
        case "and":
            return max(least for least, _ in ranges), min((most for _, most in ranges if most is not None), default=None)
        case "named":
            return ranges[0][0], term.values[2]  # type: ignore[return-value]
        case "repeat":
            low, high = repeat_bounds(term)
            (least, most) = ranges[0]
            return low * least, None if high is None or most is None else high * most
    return 0, None


def matches(term: Term, text: str) -> bool:
    for char in text:
        term = term.after(ord(char))
    return term.nullable
