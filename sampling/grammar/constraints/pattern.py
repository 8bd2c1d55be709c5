"""Regular expressions in the notations of the libraries: the syntax of JavaScript without flags, anchored at both ends.

xgrammar's two own parsers are not used. One reads an escaped caret at the start of a class as a negation, drops an anchor in the middle
of a pattern, and reads an unknown escape (`\\A`) as its letter. The other accepts "b" for `(ab+)?`, and ignores look-around.
"""

from __future__ import annotations

from collections.abc import Callable

from stepgraph.sampling.grammar.constraints.charset import EVERY, CharSet, intersection, readable_ebnf_class, regex_class
from stepgraph.sampling.grammar.schema.language import END, START
from stepgraph.sampling.grammar.schema.patterns import Group, Item, Look, PatternError, Pieces, Repeat, read
from stepgraph.sampling.grammar.schema.spelling import bounds


def pattern_to_ebnf(pattern: str) -> str:
    """The right-hand side of a rule for the texts that the pattern matches; ValueError for what cannot be enforced."""
    return _rewritten(pattern, readable_ebnf_class, "(", '""', " ")


def pattern_to_regex(pattern: str) -> str:
    """As `pattern_to_ebnf`, as a regular expression. Classes are written as code points, so that all regex engines read them alike."""
    return _rewritten(pattern, regex_class, "(?:", "", "")


def _rewritten(pattern: str, spell: Callable[[CharSet], str], opening: str, empty: str, blank: str) -> str:
    known = dict[CharSet, str]()

    def alternatives(sequences: list[Pieces]) -> str:
        return f"{blank}|{blank}".join(blank.join([empty, *map(text, sequence)]) for sequence in sequences)

    def text(item: Item) -> str:
        if isinstance(item, Group):
            return f"{opening}{blank}{alternatives(item.alternatives)}{blank})"
        if isinstance(item, Repeat):
            return text(item.item) + bounds(item.low, item.high)
        if isinstance(item, (int, Look)):
            raise PatternError(f"has {pattern[:40]!r}, expected anchors at its ends only, and no look-around")
        if item not in known:
            if not intersection(item, EVERY):
                raise PatternError(f"has {pattern[:40]!r}, expected classes of at least one character")
            known[item] = spell(intersection(item, EVERY))
        return known[item]

    try:
        return alternatives([inner[inner[:1] == [START] : len(inner) - (inner[-1:] == [END])] for inner in read(pattern)])
    except PatternError as error:
        raise ValueError(f"pattern: got {str(error).removeprefix('has ')}") from None
