"""Sets of numbers as schemas describe them, and the languages of their decimal texts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from stepgraph.sampling.grammar.constraints.charset import charset
from stepgraph.sampling.grammar.schema import language
from stepgraph.sampling.grammar.schema.language import EPSILON, NOTHING, Term, both, cat, chars, complement, either, repeat, words

MAX_MULTIPLE = 4_000  # remainders, which are states of an automaton
MAX_LISTED = 1_000  # multiples that are listed instead of an automaton

_ZERO, _DIGIT, _NONZERO_DIGIT = words(["0"]), chars(charset((48, 57))), chars(charset((49, 57)))
_DIGITS = repeat(_DIGIT, 0, None)
_FRACTION = either(EPSILON, cat(words(["."]), repeat(_DIGIT, 1, None)))
_ZEROS = either(EPSILON, cat(words(["."]), repeat(_ZERO, 1, None)))  # with which a whole number may end
_WHOLE = either(_ZERO, cat(_NONZERO_DIGIT, _DIGITS))
_UNSIGNED = cat(_WHOLE, _FRACTION)
_EXPONENT = either(EPSILON, cat(words("eE"), either(EPSILON, words("+-")), repeat(_DIGIT, 1, None)))
_POSITIVE = either(
    cat(_NONZERO_DIGIT, _DIGITS, _FRACTION), cat(words(["0."]), repeat(_ZERO, 0, None), _NONZERO_DIGIT, _DIGITS)
)  # as _UNSIGNED, but not zero
_MINUS = words(["-"])


@dataclass(frozen=True)
class Numbers:
    """The numbers between two bounds that are multiples of one number and not of some others. Integers are the multiples of 1."""

    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False
    multiple: Fraction | None = None
    not_multiples: frozenset[Fraction] = frozenset()

    def __contains__(self, value: Fraction) -> bool:
        return (
            (self.low is None or value > self.low or (value == self.low and not self.low_open))
            and (self.high is None or value < self.high or (value == self.high and not self.high_open))
            and (self.multiple is None or (value / self.multiple).denominator == 1)
            and all((value / other).denominator > 1 for other in self.not_multiples)
        )

    def meet(self, other: Numbers) -> Numbers | None:
        """The numbers in both sets; None if there are none."""
        low, low_open = max(((item.low, item.low_open) for item in (self, other) if item.low is not None), default=(None, False))
        highs = [(item.high, not item.high_open) for item in (self, other) if item.high is not None]
        high, high_closed = min(highs, default=(None, True))
        multiples = [item.multiple for item in (self, other) if item.multiple is not None]
        multiple = _least_common(*multiples) if len(multiples) == 2 else multiples[0] if multiples else None
        found = Numbers(low, high, low_open, not high_closed, multiple, self.not_multiples | other.not_multiples)
        return None if found._is_empty() else found

    def _is_empty(self) -> bool:
        if self.multiple is not None and any((self.multiple / other).denominator == 1 for other in self.not_multiples):
            return True
        if self.low is None or self.high is None:
            return False
        if self.multiple is not None:  # few steps: most multiples are not among `not_multiples`
            return all(self.multiple * count not in self for count in self._factors(self.low, self.high, self.multiple))
        return self.low > self.high or (self.low == self.high and self.low not in self)

    def _factors(self, low: Fraction, high: Fraction, multiple: Fraction) -> range:
        """Of the multiples between the bounds."""
        first, last = low / multiple, high / multiple
        return range(
            math.floor(first) + 1 if self.low_open else math.ceil(first),
            math.ceil(last) if self.high_open else math.floor(last) + 1,
        )

    def values(self, limit: int) -> list[Fraction] | None:
        """The numbers, ascending; None if they are too many. `limit`: of the multiples between the bounds."""
        if self.low is None or self.high is None:
            return None
        if self.low == self.high:
            return [self.low] if self.low in self else []
        if self.multiple is None:
            return None
        factors = self._factors(self.low, self.high, self.multiple)
        return None if factors.stop - factors.start > limit else [self.multiple * one for one in factors if self.multiple * one in self]

    def complement(self) -> Iterator[Numbers]:
        """The numbers that are not in the set."""
        if self.low is not None:
            yield Numbers(high=self.low, high_open=not self.low_open)
        if self.high is not None:
            yield Numbers(low=self.high, low_open=not self.high_open)
        if self.multiple is not None:
            yield Numbers(not_multiples=frozenset([self.multiple]))
        for other in self.not_multiples:
            yield Numbers(multiple=other)

    def language(self) -> Term:
        """The texts of the numbers, with an exponent only if the bounds restrict only the sign. ValueError if the language is too large."""
        if (values := self.values(MAX_LISTED)) is not None:
            return words(map(decimal, values))
        if not self.multiple and not self.not_multiples and self.low in (None, 0) and self.high in (None, 0):
            return self._signed()
        mirrored = replace(
            self,
            low=None if self.high is None else -self.high,
            high=None if self.low is None else -self.low,
            low_open=self.high_open,
            high_open=self.low_open,
        ).meet(Numbers(low=Fraction(0), low_open=True))
        positive = self.meet(Numbers(low=Fraction(0)))
        return either(
            cat(_MINUS, mirrored._unsigned()) if mirrored else NOTHING,
            positive._unsigned() if positive else NOTHING,
        )

    def _signed(self) -> Term:
        """The texts if both bounds are zero or None: an exponent does not change whether a number is in them."""
        zero = not (self.low_open if self.low is not None else self.high_open)
        unsigned = cat(_UNSIGNED if zero else _POSITIVE, _EXPONENT)
        if self.low is not None:
            return unsigned
        if self.high is None:
            return cat(either(EPSILON, _MINUS), cat(_UNSIGNED, _EXPONENT))
        return either(cat(_MINUS, _POSITIVE, _EXPONENT), _ZERO if zero else NOTHING)

    def _unsigned(self) -> Term:
        """The texts of these numbers without an exponent. No number is negative."""
        assert self.low is not None and self.low >= 0
        found = _WHOLE if self.multiple is not None and self.multiple.denominator == 1 else _UNSIGNED
        if self.low > 0 or self.low_open:
            found = both(found, _at_least(self.low, self.low_open))
        if self.high is not None:
            found = both(found, complement(_at_least(self.high, not self.high_open)))
        if self.multiple is not None and self.multiple != 1:
            found = both(found, _multiples_of(self.multiple))
        return both(found, *(complement(cat(_multiples_of(other), _ZEROS)) for other in self.not_multiples))


def _least_common(first: Fraction, second: Fraction) -> Fraction:
    return Fraction(math.lcm(first.numerator, second.numerator), math.gcd(first.denominator, second.denominator))


def _multiples_of(value: Fraction) -> Term:
    """Texts of unsigned multiples. Final zeros of a whole number are those of its multiples and take no remainders."""
    scaled, decimals = _scaled(value)
    zeros = 0 if decimals else len(str(scaled)) - len(str(scaled).rstrip("0"))
    if (factor := scaled // 10**zeros) > MAX_MULTIPLE:
        expected = f"at most {MAX_MULTIPLE} without the point and final zeros, or bounds on both sides"
        raise ValueError(f"got {decimal(value)}, expected {expected}")
    found = language.multiple_of(factor, decimals)
    return either(_ZERO, cat(found, words(["0" * zeros]))) if zeros else found


def _scaled(value: Fraction) -> tuple[int, int]:
    """A decimal number as an integer and the number of its decimals."""
    decimals = 0
    while (value * 10**decimals).denominator > 1:
        decimals += 1
    return int(value * 10**decimals), decimals


def decimal(value: Fraction) -> str:
    """The text of a number that has finitely many decimals."""
    scaled, decimals = _scaled(abs(value))
    digits = str(scaled).rjust(decimals + 1, "0")
    text = f"{digits[: len(digits) - decimals]}.{digits[len(digits) - decimals :]}" if decimals else digits
    return f"-{text}" if value < 0 else text


@functools.lru_cache(maxsize=256)
def _at_least(bound: Fraction, is_open: bool) -> Term:
    """Texts of unsigned numbers that are greater than the bound, or equal to it unless it is open."""
    whole, _, fraction = decimal(bound).partition(".")
    found = [cat(_NONZERO_DIGIT, repeat(_DIGIT, len(whole), None), _FRACTION)]  # more digits
    for index, digit in enumerate(whole):
        found.append(cat(words([whole[:index]]), _above(digit), repeat(_DIGIT, len(whole) - index - 1, len(whole) - index - 1), _FRACTION))
    for index, digit in enumerate(fraction):
        found.append(cat(words([f"{whole}.{fraction[:index]}"]), _above(digit), _DIGITS))
    more = cat(_DIGITS, _NONZERO_DIGIT, _DIGITS) if is_open else _DIGITS
    if fraction:
        found.append(cat(words([f"{whole}.{fraction}"]), more))
    else:
        found.append(cat(words([whole]), cat(words(["."]), more) if is_open else _FRACTION))
    return either(*found)


def _above(digit: str) -> Term:
    return chars(charset((ord(digit) + 1, ord("9")))) if digit < "9" else NOTHING
