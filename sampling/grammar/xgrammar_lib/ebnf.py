"""The grammar of a constraint in xgrammar's EBNF notation, parsed and checked, ready to be compiled.

Also runs in the compile worker, so it imports neither torch nor the xgrammar package: `core` is the library's bindings. The library's own
conversion of JSON schemas is not used: see `schema_grammar`.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepgraph.sampling.fields import clip_repr
from stepgraph.sampling.grammar.compile.limits import CompileAbortedError, limit_exceeded
from stepgraph.sampling.grammar.constraints.charset import (
    EBNF_CHAR,
    LAST_ASCII,
    LAST_CODE_POINT,
    class_members,
    complement,
    xgrammar_safe_class,
)
from stepgraph.sampling.grammar.constraints.pattern import pattern_to_ebnf
from stepgraph.sampling.grammar.constraints.structural_tag import tag_groups
from stepgraph.sampling.grammar.constraints.unsupported import naming_schema, reject
from stepgraph.sampling.grammar.schema.grammar import schema_grammar
from stepgraph.sampling.grammar.schema.options import Options
from stepgraph.sampling.grammar.schema.parameters import parameters_grammar
from stepgraph.sampling.grammar.schema.reader import parse_json
from stepgraph.sampling.grammar.schema.spelling import literal

# A literal, a class or a comment; also without an end, which would be searched again and again.
LITERAL_OR_CLASS = re.compile(r'"(?:[^"\\]|\\.)*"?|\[(?:[^\]\\]|\\.)*\]?|#[^\n]*')
_BLANKS = r"(?:\s|#[^\n]*(?:\n|\Z))*"
# What precedes an empty alternative, which the library expects to be written as "".
_BEFORE_EMPTY = re.compile(rf"({LITERAL_OR_CLASS.pattern})|(?:::=|[|(])(?={_BLANKS}\|)|\|(?={_BLANKS}(?:\)|[\w.-]+\s*::=|\Z))")
# Any character, in the notation of llama.cpp. A dot beside a letter or digit is part of a name.
_ANY_CHAR = re.compile(rf"({LITERAL_OR_CLASS.pattern})|(?<![\w.-])\.(?![\w.-])")
_ANY_CLASS = r"[\U00000000-\U0010ffff]"
# The library reads numbers as 32 bits, and its parser of regular expressions is wrong: see `constraints.pattern`.
_MISREAD = re.compile(r"[{(][\s\d,]*\d{10}|(?<![\w.-])Regex\s*\(")
_SYNTAX_ERROR = re.compile(r"EBNF \w+ error at line (\d+), column (\d+): (.*)")
_TOKENS = "a grammar describes text, not tokens: write the text, or Constraint.after(marker)"
_HINTS = {  # by the beginning of the library's message
    "Unexpected character: <": _TOKENS,
    "Unexpected character: !": _TOKENS,
    "Unexpected character: ':'": "write a rule as NAME ::= BODY",
    "Unexpected character: '": "write literals in double quotes",
    "Unexpected character: /": "comments begin with #, and there are no regular expressions",
    "Expect rule name": "write a rule as NAME ::= BODY",
    "Character class escape": r"write the characters, such as [0-9] for \d",
}
_MAYBE_NON_ASCII = re.compile(r"[^\x00-\x7f]|\\[uUx]|\[\^")  # if found, a grammar may have a class beyond ASCII


class ParsedGrammar(NamedTuple):
    grammar: Any  # the library's object
    parts: dict[str, Any]  # as the library serialises it
    chars: int  # of that
    shortest: Mapping[int, int]  # bytes of the shortest text of each rule that has a finite text


def parsed_grammar(core: Any, kind: str, payload: str, options: Options, least_bytes: int) -> ParsedGrammar:
    """The grammar of a constraint that its builder has checked. UnsupportedError if a schema is not enforced.

    CompileAbortedError if the shortest text of a rule is longer than `least_bytes`; any other error is from the library.
    """
    with _quoted_lines(payload) if kind == "ebnf" else contextlib.nullcontext():
        text, root = ebnf_text(core, kind, payload, options)
        # If other rules use the first rule, the library forbids tokens that extend past its end. So the first rule is a new one.
        first = "first"
        while first in text:
            first += "_"
        grammar = core.Grammar.from_ebnf(f"{text}\n{first} ::= {root}\n", first)
    serialised = str(grammar.serialize_json())
    parts = json.loads(serialised)
    return ParsedGrammar(grammar, parts, len(serialised), shortest_texts(parts, least_bytes))


@contextlib.contextmanager
def _quoted_lines(payload: str) -> Iterator[None]:
    """Within the block, a syntax error of the library quotes the line of the user's grammar."""
    try:
        yield
    except (RuntimeError, UnicodeDecodeError) as error:  # the latter if the message ends with the first byte of a character
        text = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
        found, (root, grammar) = _SYNTAX_ERROR.search(text), json.loads(payload)
        if found is None:
            raise
        number, lines, reason = int(found[1]), grammar.split("\n"), found[3]
        if "root rule" in reason or (number > len(lines) and "is not defined" in reason):  # in the rule that is added
            raise ValueError(f"root: got {clip_repr(root)}, expected the name of a rule of the grammar") from None
        line, where = lines[min(number, len(lines)) - 1], "at the end of the last line"
        if number <= len(lines):
            column = _user_column(line, int(found[2]))
            where, reason = f"at line {number}, column {column}", reason.replace("\ufffd", line[column - 1 : column])
        hint = next((f"; {hint}" for start, hint in _HINTS.items() if reason.startswith(start)), "")
        raise ValueError(f"got {clip_repr(line)} {where}: {re.sub(', but got first_*$', '', reason)}{hint}") from None


def _user_column(line: str, column: int) -> int:
    """The character of a user's line at a column of the library, which counts the bytes of the text that it was given."""
    added = {found.end() - 1: len(_ANY_CLASS) - 1 for found in _ANY_CHAR.finditer(line) if not found[1]}
    added |= {found.end() - 1: len(' ""') for found in _BEFORE_EMPTY.finditer(line) if not found[1]}
    added |= {found.end() - 1: 10 - len(found.group()) for found in EBNF_CHAR.finditer(line) if found[3]}  # see _fixed_width
    ends = itertools.accumulate(len(char.encode()) + added.get(index, 0) for index, char in enumerate(line))
    return next((index for index, end in enumerate(ends, 1) if end >= column), len(line) + 1)


def ebnf_text(core: Any, kind: str, payload: str, options: Options) -> tuple[str, str]:
    """The constraint in the library's notation, and the name of its root rule."""
    if kind == "lark":
        reject("#", "lark", "is a notation of llguidance; xgrammar expects ebnf")
    if kind == "ebnf":
        root, grammar = json.loads(payload)
        if found := _MISREAD.search(LITERAL_OR_CLASS.sub("", grammar)):
            raise ValueError(f"got {clip_repr(found.group())}, expected numbers below 1,000,000,000, and rules instead of Regex(...)")
        grammar = _ANY_CHAR.sub(lambda found: found[1] or _ANY_CLASS, grammar)
        grammar = _BEFORE_EMPTY.sub(lambda found: found[1] or f'{found[0]} ""', grammar)
        return _with_safe_classes(core, grammar, root), root
    if kind == "regex":
        return f"root ::= {pattern_to_ebnf(payload)}", "root"
    if kind == "choice":
        return f"root ::= {' | '.join(map(literal, json.loads(payload)))}", "root"
    if kind == "structural_tag":
        return _tags_grammar(payload, options), "root"
    return json_grammar(kind, payload, options), "root"


@functools.lru_cache(maxsize=1)  # the libraries are tried one after another with the same constraint
def json_grammar(kind: str, payload: str, options: Options) -> str:
    """The rules of a constraint of kind json_schema or json_object; the first one is `root`."""
    return schema_grammar({"type": "object"} if kind == "json_object" else parse_json(payload), options)


def _tags_grammar(payload: str, options: Options) -> str:
    """Free text with tags after each trigger, or tags only."""
    rules, triggers, groups = list[str](), list[str](), tag_groups(payload)
    for number, group in enumerate(groups):
        names = list[str]()
        for index, tag in enumerate(group.tags):
            prefix = f"tag_{number}_{index}_"
            names.append(f"{prefix}tag")
            with naming_schema(group.name_of(tag)):
                inside = (parameters_grammar if tag.style == "qwen_xml" else schema_grammar)(tag.schema, options, prefix)
            rules.append(f"{inside}{names[-1]} ::= {literal(tag.begin)} {prefix}root {literal(tag.end)}")
        triggers.append(f"({literal(group.trigger)}, group_{number})")
        one = f"({' | '.join(names)})"
        more = "" if group.separator is None else f"({literal(group.separator)} {one})*"
        rules.append(f"group_{number} ::= {literal(group.opening)} {one} {more} {literal(group.closing)}")
    free = f"TagDispatch({', '.join(triggers)}, loop_after_dispatch=true, excludes=())"
    whole = " | ".join(f"group_{number}" for number in range(len(groups)))
    return "\n".join([*rules, f"root ::= {free if groups[0].trigger else whole}"])


def _with_safe_classes(core: Any, text: str, root: str) -> str:
    """A user's grammar with its classes beyond ASCII in the form that the library reads correctly, see `charset.xgrammar_safe_class`."""
    if not _MAYBE_NON_ASCII.search(text):
        return text
    text = EBNF_CHAR.sub(_fixed_width, text)
    core.Grammar.from_ebnf(text, root)  # raises the library's error for the user's own text
    return LITERAL_OR_CLASS.sub(_safe_token, text)


def _safe_token(token: re.Match[str]) -> str:
    text = token.group()
    negated = text.startswith("[^")
    chars = class_members(text[1 + negated : -1]) if text[0] == "[" else ()
    if not negated and (not chars or chars[-1][1] <= LAST_ASCII):
        return text
    return xgrammar_safe_class(complement(chars if negated else complement(chars)))  # without surrogates


def _fixed_width(char: re.Match[str]) -> str:
    """The notation has up to two digits after `\\x`; the library reads as many as follow."""
    code = int(char[1] or char[2] or char[3] or "0", 16)
    if 0xD800 <= code < 0xE000 or code > LAST_CODE_POINT:
        raise ValueError(f"got {char.group()}, expected Unicode characters other than surrogates")
    return f"\\U{code:08x}" if char[3] else char.group()


# The length of the shortest text of each rule of a grammar is computed before the grammar is compiled; some rules have no finite text.
#
# For forced drafts the library returns all bytes that must come next. Their number is at most the length of the shortest completion: for
# each open rule, the rest of one of its alternatives. So the shortest text of every alternative is limited, and with it the forced text
# per open rule. A matcher would detect an endless rule too late: it may be reached from any state.

# The library's kinds of expressions, by number. A token, a set of tokens and a part of a text have a bounded length.
_BYTES, _CLASS, _STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _TAGS, _REPEAT, _TOKEN, _OTHER_TOKENS, _TOKEN_TAGS, _REGEX, _PART = range(14)


@dataclass(slots=True)
class _Alternative:
    """One alternative of a rule: its own bytes, and the rules that it contains."""

    rule: int
    num_bytes: int  # with those of the parts whose shortest texts are known
    parts: dict[int, int]  # rule -> required number of occurrences
    optional: tuple[int, ...] = ()  # rules that may follow but need not


class _SerialisedGrammar:
    """A parsed grammar as the library serialises it."""

    def __init__(self, grammar: Mapping[str, Any]) -> None:
        self._data: list[int] = grammar["grammar_expr_data"]  # of each expression: kind, size of the content, content
        self._starts: list[int] = grammar["grammar_expr_indptr"]
        # The library renames the root rule to "root", and another rule of that name to "root_0".
        self.names = ["root" if rule[0] == "root_0" else str(rule[0]) for rule in grammar["rules"]]
        self._bodies = [int(rule[1]) for rule in grammar["rules"]]
        self.root = int(grammar["root_rule_id"])

    def alternatives(self) -> Iterator[_Alternative]:
        data, starts = self._data, self._starts
        for rule, body in enumerate(self._bodies):
            kind, content = self._expression(body)
            for expression in content if kind == _CHOICES else [body]:
                kind, content = self._expression(expression)
                found = _Alternative(rule, 0, {})
                for start in [starts[index] for index in content] if kind == _SEQUENCE else [starts[expression]]:
                    if data[start] == _BYTES:
                        found.num_bytes += data[start + 1]
                    elif data[start] == _RULE:
                        part = data[start + 2]
                        found.parts[part] = found.parts.get(part, 0) + 1
                    else:
                        self._add(data[start], data[start + 2 : start + 2 + data[start + 1]], found)
                yield found

    def _expression(self, index: int) -> tuple[int, list[int]]:
        start = self._starts[index]
        return self._data[start], self._data[start + 2 : start + 2 + self._data[start + 1]]

    def repetitions_of_themselves(self) -> Iterator[int]:
        """Rules that are only a repetition of a rule, which leads back to them in the same way. The library recurses into them for ever."""
        only = dict[int, tuple[int, bool]]()  # of rules that are one reference: the rule, and whether it is repeated
        for rule, body in enumerate(self._bodies):
            kind, content = self._expression(body)
            while kind in (_CHOICES, _SEQUENCE) and len(content) == 1:
                kind, content = self._expression(content[0])
            if kind in (_RULE, _REPEAT):
                only[rule] = content[0], kind == _REPEAT
        known = set[int]()
        for rule in only:
            path = list[int]()
            while rule in only and rule not in known:
                known.add(rule)
                path.append(rule)
                rule = only[rule][0]
            cycle = path[path.index(rule) :] if rule in path else []
            yield from [each for each in cycle if only[each][1]]

    def _add(self, kind: int, content: list[int], alternative: _Alternative) -> None:
        if kind == _CLASS:
            alternative.num_bytes += 1 if content[0] else len(chr(min(content[1:], default=0)).encode(errors="surrogatepass"))
        elif kind == _REPEAT and content[1]:
            alternative.parts[content[0]] = alternative.parts.get(content[0], 0) + content[1]
        elif kind == _REPEAT:
            alternative.optional += (content[0],) if content[2] else ()  # none of at most 0
        elif kind == _TAGS:
            alternative.optional += tuple(content[1:-2:2])
        elif kind == _TOKEN_TAGS:
            alternative.optional += tuple(content[2 : 1 + 2 * content[0] : 2])
        elif kind not in (_STAR, _EMPTY, _TOKEN, _OTHER_TOKENS, _PART):
            raise ValueError(f"the library's grammar has an expression of the unknown kind {kind}")


def shortest_texts(parts: Mapping[str, Any], least_bytes: int) -> dict[int, int]:
    """`ParsedGrammar.shortest`. CompileAbortedError that names a rule without a finite text, or with an alternative whose shortest text
    exceeds `least_bytes`, among those that the root rule reaches, or any rule that is only a repetition of itself.
    """
    grammar = _SerialisedGrammar(parts)
    for rule in grammar.repetitions_of_themselves():
        name = grammar.names[rule]
        raise CompileAbortedError(f'rule {name}: got only a repetition of itself, expected a text or another rule, such as {name} ::= ""')
    alternatives = list(grammar.alternatives())
    shortest, reached = _shortest(alternatives), _reached(grammar.root, alternatives)
    endless = reached - shortest.keys()
    if endless:
        named = min(endless - {grammar.root} or endless)  # the root rule is also endless if it leads to an endless rule
        raise CompileAbortedError(f"rule {grammar.names[named]}: no text of finite length satisfies it")
    too_long = [(found.num_bytes, found.rule) for found in alternatives if found.num_bytes > least_bytes and found.rule in reached]
    if too_long:
        size, rule = min(too_long)
        got = f"{size:,}" if size < 10**18 else "more than 10^18"
        raise CompileAbortedError(limit_exceeded("least_bytes", f"{got} bytes that rule {grammar.names[rule]} leads to", least_bytes))
    return shortest


def _shortest(alternatives: Sequence[_Alternative]) -> dict[int, int]:
    """The bytes of the shortest text of each rule that has a finite text, in ascending order as in Dijkstra's algorithm. They are added to
    those of the alternatives that contain it."""
    used_by, missing = defaultdict[int, list[int]](list), [len(alternative.parts) for alternative in alternatives]
    for index, alternative in enumerate(alternatives):
        for part in alternative.parts:
            used_by[part].append(index)
    heap = [(alternative.num_bytes, alternative.rule) for alternative in alternatives if not alternative.parts]
    heapq.heapify(heap)
    shortest = dict[int, int]()
    while heap:
        size, rule = heapq.heappop(heap)
        if rule in shortest:
            continue
        shortest[rule] = size
        for index in used_by.get(rule, ()):
            alternative = alternatives[index]
            alternative.num_bytes += alternative.parts[rule] * size
            missing[index] -= 1
            if not missing[index] and alternative.rule not in shortest:
                heapq.heappush(heap, (alternative.num_bytes, alternative.rule))
    return shortest


def _reached(root: int, alternatives: Sequence[_Alternative]) -> set[int]:
    leads_to = defaultdict[int, list[int]](list)
    for alternative in alternatives:
        leads_to[alternative.rule] += (*alternative.parts, *alternative.optional)
    reached, waiting = {root}, [root]
    while waiting:
        for rule in leads_to[waiting.pop()]:
            if rule not in reached:
                reached.add(rule)
                waiting.append(rule)
    return reached
