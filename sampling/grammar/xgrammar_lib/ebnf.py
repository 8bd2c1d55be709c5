"""The grammar of a constraint in xgrammar's EBNF notation, parsed and checked, ready to be compiled.

Runs in the compile worker and in the process of the engine alike, so it imports neither torch nor the xgrammar package: `core` is
the library's bindings. JSON schemas are converted by the library, and rules of its grammar that allow what is not JSON are replaced:
raw control characters in strings of bounded length, surrogates anywhere, halves of an escaped surrogate pair, any escape in the
quoted form of an email address, and as an additional property the name of a declared one written with escapes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from stepgraph.sampling.grammar.constraints.charset import (
    IN_JSON,
    LAST_ASCII,
    CharSet,
    complement,
    ebnf_class,
    intersection,
    readable_ebnf_class,
    union,
)
from stepgraph.sampling.grammar.constraints.pattern import pattern_to_ebnf
from stepgraph.sampling.grammar.constraints.schema import MAX_WHITESPACE, rewritten, types_of
from stepgraph.sampling.grammar.constraints.structural_tag import Tag, TagGroup, tag_groups
from stepgraph.sampling.grammar.xgrammar_lib.shortest_text import check_shortest_texts

MAX_UNROLLED = 100  # up to here an automaton is faster than a counter (130k tokens: a mask in 0.1 ms, not in 10), and has its masks cached

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')  # a literal or a class of the printed grammar
_CHAR = re.compile(r"\\U([0-9a-fA-F]{8})|\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|\\(.)|(.)", re.DOTALL)
_ESCAPES = {"0": "\0", "n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}
_RULE = re.compile(r"^(\w+) ::= ", re.MULTILINE)
_MAYBE_WIDE = re.compile(r"[^\x00-\x7f]|\\[uUx]")  # a grammar may have a class beyond ASCII
# The library's look-ahead after a string allows blanks even where none may follow. Tokens that continue otherwise after the quote are
# ruled out once, when a grammar is compiled, and not again for every mask. A structural tag keeps the library's form: the text that
# ends the tag follows its JSON, and may begin with a blank.
AFTER_STRING, AFTER_STRING_NO_BLANKS = r"(=([ \n\r\t]* [,}\]:]))", r"(=([,}\]:]))"

# A character inside a JSON string for the library's automata, which misread a range that spans several lengths of UTF-8.
_STRING_CHAR = r"(?:[ !#-\\[\\]-\\u007f]|[\\u0080-\\u07ff]|[\\u0800-\\ud7ff\\ue000-\\uffff]|[\\u{10000}-\\u{10ffff}])"
_COUNTED_CHAR = readable_ebnf_class(IN_JSON)  # the same for a counter
# Formats for which the library's own shape is wrong: it allows leading zeros.
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


def parsed_grammar(core: Any, kind: str, payload: str, any_whitespace: bool, least_bytes: int) -> Any:
    """The library's grammar object of a constraint that its builder has checked.

    CompileAbortedError where the shortest text of a rule is longer than `least_bytes`; any other error is the library's.
    """
    text, root = ebnf_text(core, kind, payload, any_whitespace)
    # In a first rule that other rules use too, the library forbids tokens that extend past its end.
    first = "first"
    while first in text:
        first += "_"
    grammar = core.Grammar.from_ebnf(f"{text}\n{first} ::= {root}\n", first)
    check_shortest_texts(str(grammar.serialize_json()), least_bytes)
    return grammar


def ebnf_text(core: Any, kind: str, payload: str, any_whitespace: bool) -> tuple[str, str]:
    """The constraint in the library's notation, and the name of its root rule."""
    if kind == "ebnf":
        root, grammar = json.loads(payload)
        return _with_readable_classes(core, grammar, root)
    if kind == "regex":
        return f"root ::= {pattern_to_ebnf(payload, 'pattern')}", "root"
    if kind == "choice":
        return f"root ::= {' | '.join(map(_literal, json.loads(payload)))}", "root"
    if kind == "structural_tag":
        return _tags_grammar(core, tag_groups(payload), any_whitespace), "root"
    # The library's built-in JSON grammar forbids some legal tokens (`}]` after a string); this schema does not.
    schema = {"type": "object"} if kind == "json_object" else json.loads(payload)
    return _json_grammar(core, schema, any_whitespace).replace(AFTER_STRING, AFTER_STRING_NO_BLANKS), "root"


def _tags_grammar(core: Any, groups: list[TagGroup], any_whitespace: bool) -> str:
    """Free text, and one of the tags after each trigger."""
    rules, triggers = list[str](), list[str]()
    for number, group in enumerate(groups):
        for index, tag in enumerate(group.tags):
            rules.append(_tag_rules(core, f"tag_{number}_{index}_", tag, any_whitespace))
        triggers.append(f"({_literal(group.trigger)}, group_{number})")
        rules.append(f"group_{number} ::= {' | '.join(f'tag_{number}_{index}_tag' for index in range(len(group.tags)))}")
    root = f"root ::= TagDispatch({', '.join(triggers)}, loop_after_dispatch=true, excludes=())"
    return "\n".join([*rules, root])


def _tag_rules(core: Any, prefix: str, tag: Tag, any_whitespace: bool) -> str:
    """The rules of a tag's JSON with prefixed names, and the rule of the tag."""
    grammar = _json_grammar(core, tag.schema, any_whitespace)
    names = set(_RULE.findall(grammar))
    word = re.compile(rf"{_TOKEN.pattern}|\w+")  # a literal or class is matched as a whole, so names inside it are not renamed
    renamed = word.sub(lambda found: prefix + found.group() if found.group() in names else found.group(), grammar)
    return f"{renamed}\n{prefix}tag ::= {_literal(tag.begin)} {prefix}root {_literal(tag.end)}"


def _literal(text: str) -> str:
    return '"' + "".join(char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in text) + '"'


def _json_grammar(core: Any, schema: Any, any_whitespace: bool) -> str:
    """EBNF of the JSON texts that a schema accepts; the schema has passed `check_schema`."""
    patterns = list[str]()
    text, longest_blank = json.dumps(_explicit(schema, patterns)), MAX_WHITESPACE if any_whitespace else None
    lines = str(core.Grammar.from_json_schema(text, any_whitespace, None, None, True, longest_blank, False, False).to_string()).split("\n")
    if _BASIC_ESCAPE not in lines:
        raise ValueError("the library's JSON grammar is not the one that is corrected here")
    return "\n".join(_corrected(line, patterns) for line in lines)


def _explicit(node: Any, patterns: list[str]) -> Any:
    """A copy of the schema with defaults written out and each pattern replaced by its number; `patterns` receives their rules.

    The library ignores some keywords without a type ("maxItems"), and reads bounds on the number of items or properties as a
    prohibition of undeclared ones.
    """
    if not isinstance(node, dict):
        return node
    changed = rewritten(node, "#", lambda _, child, at: _explicit(child, patterns))
    pattern = node.get("pattern", _SHAPES.get(node.get("format", "")))
    if pattern is not None:
        changed.pop("format", None)
        changed["pattern"] = f"pattern{len(patterns)}"
        patterns.append(pattern_to_ebnf(pattern, "pattern", in_json=True))
    types = types_of(node, "#")
    if types and "type" not in node:
        changed["type"] = types[0]
    if "array" in types and not {"items", "prefixItems"} & node.keys():
        changed["items"] = True
    if "object" in types and not {"properties", "additionalProperties"} & node.keys():
        changed["additionalProperties"] = True
    return changed


def _corrected(line: str, patterns: list[str]) -> str:
    """One rule of the library's JSON grammar, restricted to what is JSON."""
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
    rule = _TOKEN.sub(_corrected_token, _QUOTED_LOCAL_PART.sub("", rule))
    if "Regex(" in _TOKEN.sub("", rule):
        raise ValueError("the library's JSON grammar has an unexpected pattern")
    return f"{name} ::= {rule}" if name else ""


def _corrected_token(token: re.Match[str]) -> str:
    """A negated class, always inside a JSON string, as the list of its characters; any other token with unambiguous escapes."""
    text = token.group()
    return ebnf_class(intersection(complement(_members(text[2:-1])), IN_JSON)) if text.startswith("[^") else _CHAR.sub(_fixed_width, text)


def _with_readable_classes(core: Any, text: str, root: str) -> tuple[str, str]:
    """A user's grammar with its classes beyond ASCII in the form that the library reads correctly, see `charset.readable_ebnf_class`, and
    the name of its root rule; both unchanged where there is no such class."""
    if "[" not in text or not _MAYBE_WIDE.search(text):
        return text, root
    printed = str(core.Grammar.from_ebnf(text, root).to_string())
    changed = _TOKEN.sub(_readable_token, printed)
    return (text, root) if changed == printed else (changed, "root")  # the library prints the root rule under this name


def _readable_token(token: re.Match[str]) -> str:
    text = token.group()
    negated = text.startswith("[^")
    chars = _members(text[1 + negated : -1]) if text[0] == "[" else ()
    if not chars or chars[-1][1] <= LAST_ASCII:
        return _CHAR.sub(_fixed_width, text)
    return readable_ebnf_class(complement(chars) if negated else chars)


def _members(members: str) -> CharSet:
    """The characters that a printed class lists. The library prints a hyphen that is not a range's with a backslash."""
    found, pairs = list(_CHAR.finditer(members)), list[tuple[int, int]]()
    index = 0
    while index < len(found):
        first = last = _code(found[index])
        if index + 2 < len(found) and found[index + 1].group() == "-":
            last = _code(found[index + 2])
            index += 2
        pairs.append((first, last))
        index += 1
    return union(pairs)


def _code(char: re.Match[str]) -> int:
    digits = char[1] or char[2] or char[3]
    return int(digits, 16) if digits else ord(_ESCAPES.get(char[4], char[4]) if char[4] else char[5])


def _fixed_width(char: re.Match[str]) -> str:
    """The library prints two digits after `\\x` but reads as many as follow."""
    return f"\\U{int(char[3], 16):08x}" if char[3] else char.group()
