"""Regular expressions in the notations of the libraries: the syntax of JavaScript without flags, anchored at both ends.

xgrammar's two own parsers are not used. One reads an escaped caret at the start of a class as a negation, drops an anchor in the middle
of a pattern, and reads an unknown escape (`\\A`) as its letter. The other accepts "b" for `(ab+)?`, and ignores look-around.
"""

from __future__ import annotations

from collections.abc import Callable

from stepgraph.sampling.grammar.constraints.charset import ALL_CHARS, CharSet, intersection, regex_class, xgrammar_safe_class
from stepgraph.sampling.grammar.constraints.dialects import refuse_ambiguous
from stepgraph.sampling.grammar.schema.language import END, START
from stepgraph.sampling.grammar.schema.patterns import Group, Item, LookAhead, PatternError, Pieces, Repeat, parse_pattern
from stepgraph.sampling.grammar.schema.spelling import repeat_suffix


def pattern_to_ebnf(pattern: str) -> str:
    """The right-hand side of a rule for the texts that the pattern matches; ValueError for what cannot be enforced."""
    return _translate(pattern, xgrammar_safe_class, "(", '""', " ")


def pattern_to_regex(pattern: str) -> str:
    """As `pattern_to_ebnf`, as a regular expression. Classes are written as code points, so that all regex engines read them alike."""
    return _translate(pattern, regex_class, "(?:", "", "")


def _translate(pattern: str, write_class: Callable[[CharSet], str], opening: str, empty: str, separator: str) -> str:
    classes = dict[CharSet, str]()

    def alternatives(sequences: list[Pieces]) -> str:
        return f"{separator}|{separator}".join(separator.join([empty, *map(text, sequence)]) for sequence in sequences)

    def text(item: Item) -> str:
        suffix = ""
        if isinstance(item, Repeat):  # not a call of its own: groups may be inside each other up to the limit of recursion
            suffix, item = repeat_suffix(item.low, item.high), item.item
        if isinstance(item, Group):
            return f"{opening}{separator}{alternatives(item.alternatives)}{separator}){suffix}"
        if isinstance(item, (int, LookAhead, Repeat)):
            raise PatternError(f"has {pattern[:40]!r}, expected anchors at its ends only, and no look-around")
        if item not in classes:
            if not intersection(item, ALL_CHARS):
                raise PatternError(f"has {pattern[:40]!r}, expected classes of at least one character")
            classes[item] = write_class(intersection(item, ALL_CHARS))
        return classes[item] + suffix

    try:
        refuse_ambiguous(pattern)
        return alternatives([inner[inner[:1] == [START] : len(inner) - (inner[-1:] == [END])] for inner in parse_pattern(pattern)])
    except PatternError as error:
        raise ValueError(f"pattern: got {str(error).removeprefix('has ')}") from None
