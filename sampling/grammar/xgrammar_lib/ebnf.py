"""The grammar of a constraint in xgrammar's EBNF notation, parsed and checked, ready to be compiled.

Runs in the compile worker and in the process of the engine alike, so it imports neither torch nor the xgrammar package: `core` is
the library's bindings. The library's own conversion of JSON schemas is not used: see `schema_grammar`.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from stepgraph.sampling.grammar.constraints.charset import EBNF_CHAR, LAST_ASCII, class_members, complement, readable_ebnf_class
from stepgraph.sampling.grammar.constraints.pattern import pattern_to_ebnf
from stepgraph.sampling.grammar.constraints.structural_tag import tag_groups
from stepgraph.sampling.grammar.schema.grammar import schema_grammar
from stepgraph.sampling.grammar.schema.options import Options
from stepgraph.sampling.grammar.schema.parameters import parameters_grammar
from stepgraph.sampling.grammar.schema.reader import parsed
from stepgraph.sampling.grammar.schema.spelling import literal
from stepgraph.sampling.grammar.xgrammar_lib.shortest_text import check_shortest_texts

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')  # a literal or a class of the printed grammar
_MAYBE_WIDE = re.compile(r"[^\x00-\x7f]|\\[uUx]")  # a grammar may have a class beyond ASCII


def parsed_grammar(core: Any, kind: str, payload: str, options: Options, least_bytes: int) -> Any:
    """The library's grammar object of a constraint that its builder has checked. UnsupportedError where a schema is not enforced.

    CompileAbortedError where the shortest text of a rule is longer than `least_bytes`; any other error is the library's.
    """
    text, root = ebnf_text(core, kind, payload, options)
    # In a first rule that other rules use too, the library forbids tokens that extend past its end.
    first = "first"
    while first in text:
        first += "_"
    grammar = core.Grammar.from_ebnf(f"{text}\n{first} ::= {root}\n", first)
    check_shortest_texts(str(grammar.serialize_json()), least_bytes)
    return grammar


def ebnf_text(core: Any, kind: str, payload: str, options: Options) -> tuple[str, str]:
    """The constraint in the library's notation, and the name of its root rule."""
    if kind == "ebnf":
        root, grammar = json.loads(payload)
        return _with_readable_classes(core, grammar, root)
    if kind == "regex":
        return f"root ::= {pattern_to_ebnf(payload, 'pattern')}", "root"
    if kind == "choice":
        return f"root ::= {' | '.join(map(literal, json.loads(payload)))}", "root"
    if kind == "structural_tag":
        return _tags_grammar(payload, options), "root"
    return json_grammar(kind, payload, options), "root"


@functools.lru_cache(maxsize=1)  # the libraries are tried one after another
def json_grammar(kind: str, payload: str, options: Options) -> str:
    """The rules of a constraint of kind json_schema or json_object; the first one is `root`."""
    return schema_grammar({"type": "object"} if kind == "json_object" else parsed(payload), options)


def _tags_grammar(payload: str, options: Options) -> str:
    """Free text with tags after each trigger, or tags only."""
    rules, triggers, groups = list[str](), list[str](), tag_groups(payload)
    for number, group in enumerate(groups):
        names = list[str]()
        for index, tag in enumerate(group.tags):
            prefix = f"tag_{number}_{index}_"
            names.append(f"{prefix}tag")
            inside = (parameters_grammar if tag.style == "qwen_xml" else schema_grammar)(tag.schema, options, prefix)
            rules.append(f"{inside}{names[-1]} ::= {literal(tag.begin)} {prefix}root {literal(tag.end)}")
        triggers.append(f"({literal(group.trigger)}, group_{number})")
        one = f"({' | '.join(names)})"
        more = "" if group.separator is None else f"({literal(group.separator)} {one})*"
        rules.append(f"group_{number} ::= {literal(group.opening)} {one} {more} {literal(group.closing)}")
    free = f"TagDispatch({', '.join(triggers)}, loop_after_dispatch=true, excludes=())"
    return "\n".join([*rules, f"root ::= {free if groups[0].trigger else 'group_0'}"])


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
    chars = class_members(text[1 + negated : -1]) if text[0] == "[" else ()
    if not chars or chars[-1][1] <= LAST_ASCII:
        return EBNF_CHAR.sub(_fixed_width, text)
    return readable_ebnf_class(complement(chars) if negated else chars)


def _fixed_width(char: re.Match[str]) -> str:
    """The library prints two digits after `\\x` but reads as many as follow."""
    return f"\\U{int(char[3], 16):08x}" if char[3] else char.group()
