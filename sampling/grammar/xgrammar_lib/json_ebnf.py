"""The grammar of a JSON schema: the library's own, as text, with the rules mended that let through what is not JSON.

What it lets through: raw control characters in strings of bounded length, surrogates anywhere, halves of an escaped surrogate
pair, any escape in the quoted form of an email address, and as an additional property the name of a declared one in escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from stepgraph.sampling.grammar.constraints.charset import IN_JSON, complement, intersection, spelled, spelled_open, union
from stepgraph.sampling.grammar.constraints.pattern import ebnf_of
from stepgraph.sampling.grammar.xgrammar_lib.schema import types_of

Converter = Callable[[str, int], str]  # a JSON schema, and the longest run of blanks between JSON tokens, 0 for none

MAX_WHITESPACE = 32  # the longest run of blanks between JSON tokens under any_whitespace
MAX_UNROLLED = 100  # up to here an automaton is faster than a counter (130k tokens: a mask in 0.1 ms, not in 10), and has its masks cached

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')  # a literal or a class of the printed grammar
_CHAR = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL)
# A character inside a JSON string for the library's automata, which read a range across the lengths of UTF-8 wrongly.
_STRING_CHAR = r"(?:[ !#-\\[\\]-\\u007f]|[\\u0080-\\u07ff]|[\\u0800-\\ud7ff\\ue000-\\uffff]|[\\u{10000}-\\u{10ffff}])"
_COUNTED_CHAR = spelled_open(IN_JSON)  # the same for a counter
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}

# Formats for which the library's own shape takes what is none: numbers with zeros in front.
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_SHAPES = {"ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}"}

_BASIC_ESCAPE = r'basic_escape ::= (([\"\\/bfnrt]) | ("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]))'
_HEX = "[0-9A-Fa-f]"
_PAIRED_ESCAPE = (
    rf'basic_escape ::= ([\"\\/bfnrt]) | ("u" [0-9A-CE-Fa-ce-f] {_HEX} {_HEX} {_HEX}) | ("u" [Dd] [0-7] {_HEX} {_HEX})'
    rf' | ("u" [Dd] [89ABab] {_HEX} {_HEX} "\\u" [Dd] [C-Fc-f] {_HEX} {_HEX})'
)
_EXTRA_KEY = re.compile(r"_addl_key_\d+$")
_KEY_ESCAPE = r'("\\" basic_escape basic_string_sub)'
_QUOTED_LOCAL_PART = re.compile(r' \| \("\\\\" "\\"" \S+ "\\\\" "\\""\)')
_PATTERN = re.compile(r'Regex\("pattern(\d+)", json_string=true\)')
_COUNTED = r"(([^\"\\\r\n]))"
_BOUNDED = re.compile(r'\(\("\\"" \S+_characters\S*\{(\d+), (-1|\d+)\} "\\""\)\)')


def json_grammar(schema: Any, any_whitespace: bool, convert: Converter) -> str:
    """EBNF of the JSON texts that a schema accepts; the schema has passed `check_schema`. `convert` is the library's own."""
    patterns = list[str]()
    lines = convert(json.dumps(_spelled_out(schema, patterns)), MAX_WHITESPACE if any_whitespace else 0).split("\n")
    if _BASIC_ESCAPE not in lines:
        raise ValueError("the library's JSON grammar is not the one that is mended here")
    return "\n".join(_mended(line, patterns) for line in lines)


def _spelled_out(node: Any, patterns: list[str]) -> Any:
    """A copy of the schema that says what the library would otherwise read in its own way, and whose patterns are numbers; `patterns`
    gets the rules that they stand for.

    The library ignores some keywords where no type is named ("maxItems"), and takes bounds on the number of items or properties
    for a word that there are no others than those declared.
    """
    if not isinstance(node, dict):
        return node
    changed = dict(node)
    for table in ("properties", "$defs", "definitions"):
        if table in node:
            changed[table] = {name: _spelled_out(child, patterns) for name, child in node[table].items()}
    for branches in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if branches in node:
            changed[branches] = [_spelled_out(child, patterns) for child in node[branches]]
    for child in ("items", "additionalProperties"):
        if child in node:
            changed[child] = _spelled_out(node[child], patterns)
    pattern = node.get("pattern", _SHAPES.get(node.get("format", "")))
    if pattern is not None:
        changed.pop("format", None)
        changed["pattern"] = f"pattern{len(patterns)}"
        patterns.append(ebnf_of(pattern, "pattern", in_json=True))
    types = types_of(node, "#")
    if types and "type" not in node:
        changed["type"] = types[0]
    if "array" in types and not {"items", "prefixItems"} & node.keys():
        changed["items"] = True
    if "object" in types and not {"properties", "additionalProperties"} & node.keys():
        changed["additionalProperties"] = True
    return changed


def _mended(line: str, patterns: list[str]) -> str:
    name, _, rule = line.partition(" ::= ")
    if line == _BASIC_ESCAPE:
        return _PAIRED_ESCAPE
    if pattern := _PATTERN.fullmatch(rule):
        return f"{name} ::= {patterns[int(pattern[1])]}"
    if bounded := _BOUNDED.fullmatch(rule):
        low, high = int(bounded[1]), int(bounded[2])
        if max(low, high) <= MAX_UNROLLED:
            return f'{name} ::= "\\"" Regex("{_STRING_CHAR}{{{low},{high if high >= 0 else ""}}}", json_string=true) "\\""'
    if rule == _COUNTED:
        return f"{name} ::= {_COUNTED_CHAR}"
    if _EXTRA_KEY.search(name):
        rule = rule.replace(f" | {_KEY_ESCAPE}", "")
    rule = TOKEN.sub(_mended_token, _QUOTED_LOCAL_PART.sub("", rule))
    if "Regex(" in TOKEN.sub("", rule):
        raise ValueError("the library's JSON grammar has a pattern where none is expected")
    return f"{name} ::= {rule}" if name else ""


def _mended_token(token: re.Match[str]) -> str:
    """A class that leaves characters out, always inside a JSON string, as one that lists the others; no `\\x`, which the parser
    of grammars takes for more than two digits."""
    text = token.group()
    if not text.startswith("[^"):
        return _CHAR.sub(lambda char: f"\\U{_code(char):08x}" if char[1] else char.group(), text)
    codes, is_range = list[tuple[int, int]](), False
    for char in _CHAR.finditer(text, 2, len(text) - 1):
        if char.group() == "-":
            is_range = True
        elif is_range:
            codes[-1], is_range = (codes[-1][0], _code(char)), False
        else:
            codes.append((_code(char), _code(char)))
    return spelled(intersection(complement(union(codes)), IN_JSON))


def _code(char: re.Match[str]) -> int:
    digits = char[1] or char[2] or char[3]
    return int(digits, 16) if digits else ord(_ESCAPES.get(char[4], char[4]) if char[4] else char[5])
