"""Constraints in the Lark notation of llguidance, which the compile worker writes too, so this imports neither torch nor the library."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal

from stepgraph.sampling.fields import reject_constant, reject_repeated_keys
from stepgraph.sampling.grammar.constraints.charset import charset, regex_class
from stepgraph.sampling.grammar.constraints.pattern import pattern_to_regex
from stepgraph.sampling.grammar.constraints.structural_tag import TagGroup, tag_groups
from stepgraph.sampling.grammar.constraints.unsupported import naming_schema, reject
from stepgraph.sampling.grammar.llguidance_lib.schema import lark_rules
from stepgraph.sampling.grammar.schema.options import Options
from stepgraph.sampling.grammar.schema.reader import parse_json

LARK_TOKEN = re.compile(
    r"""
    (?P<blank> [ \t]+ | (?:\#|//)[^\n]* )
    | (?P<text> "(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1f\x7f])*"? )
    | (?P<regex> /(?:\\.|[^/\\])+/? )
    | (?P<token> <[^<>\s]+> )
    | (?P<json> %(?:json|regex|llguidance) )
    | (?P<word> [A-Za-z_][\w-]* )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_BLANKS = re.compile(r"[ \t\r\n]*")
_REPEATS = re.compile(r"~[ \t]*[+-]?[0-9]")
_DECODER = json.JSONDecoder(object_pairs_hook=reject_repeated_keys, parse_constant=reject_constant, parse_float=Decimal)
# Without no_forcing the library allows only one tokenization of forced bytes, from a tokenizer that it calls under the GIL.
LLGUIDANCE_OPTIONS = {"no_forcing": True}
_OPTIONS = ("no_forcing", "allow_initial_skip", "allow_invalid_utf8")  # that the library reads
_UNSUPPORTED = {
    "max_tokens": "is not enforced when drafts are rolled back",
    "stop": "is not enforced when drafts are rolled back; suffix= is",
    "temperature": "is a sampling parameter of the request",
}


def _header(options: dict[str, object]) -> str:
    """The first line of a grammar."""
    return f"%llguidance {json.dumps({**options, **LLGUIDANCE_OPTIONS}, default=float)}\n"


def lark_text(kind: str, payload: str, options: Options) -> str:
    """The constraint in Lark notation; UnsupportedError if it would not be enforced."""
    if kind == "lark":
        checked, schemas = checked_lark(payload)
        return "\n".join([checked, *(lark_rules(schema, Options(), _prefix(payload, index)) for index, schema in enumerate(schemas))])
    if kind == "ebnf":
        reject("#", "ebnf", "is a notation of xgrammar; llguidance expects lark")
    if kind == "regex":
        text = f"start: TEXT\nTEXT: /(?:{pattern_to_regex(payload)})/\n"
    elif kind == "choice":
        text = f"start: {' | '.join(json.dumps(option) for option in json.loads(payload))}\n"
    elif kind == "structural_tag":
        text = _tags_grammar(tag_groups(payload), options)
    else:
        schema = {"type": "object"} if kind == "json_object" else parse_json(payload)
        text = f"start: root\n{lark_rules(schema, options)}"
    return _header({}) + text


def _tags_grammar(groups: Sequence[TagGroup], options: Options) -> str:
    """Free text with tags after each trigger, or tags only. The text after the last tag contains no trigger: it would begin another tag."""
    rules, triggers, whole = list[str](), list[str](), list[str]()
    for number, group in enumerate(groups):
        triggers.append("".join(regex_class(charset(char)) for char in group.trigger))
        tags = list[str]()
        for index, tag in enumerate(group.tags):
            if tag.style != "json":
                reject("#", tag.style, "is a style that only automata and xgrammar enforce")
            prefix = f"tag_{number}_{index}_"
            tags.append(f"{_literal(tag.begin)} {prefix}root {_literal(tag.end)}")
            with naming_schema(group.name_of(tag)):
                rules.append(lark_rules(tag.schema, options, prefix))
        one = f"({' | '.join(tags)})"
        more = "" if group.separator is None else f"({_literal(group.separator)} {one})*"
        listed = f"{_literal(group.opening)} {one} {more} {_literal(group.closing)}"
        if not group.trigger:
            whole.append(f"({listed})")
            continue
        rules.append(f"tag_{number}: trigger_{number} {listed}\ntrigger_{number}[lazy]: /(?s:.*){triggers[-1]}/\n")
    if whole:
        return f"start: {' | '.join(whole)}\n{''.join(rules)}"
    names = " | ".join(f"tag_{number}" for number in range(len(groups)))
    return f"start: ({names})* TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)(?:{'|'.join(triggers)})(?s:.*)/\n{''.join(rules)}"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _prefix(grammar: str, index: int) -> str:
    return f"json_{index}{'_' * (1 + max(map(len, re.findall('_+', grammar)), default=0))}"


def checked_lark(grammar: str) -> tuple[str, list[object]]:
    """The grammar with LLGUIDANCE_OPTIONS, and each JSON schema replaced by the name of its rule; the schemas. UnsupportedError for what
    cannot be enforced on text."""
    if "\0" in grammar:
        reject("#", "lark", "contains a NUL character; write \\x00 in a regular expression")
    options, output, schemas, previous, position = dict[str, object](), list[str](), list[object](), "", 0
    while found := LARK_TOKEN.match(grammar, position):
        kind, piece, position = found.lastgroup, found.group(), found.end()
        if kind == "json":
            value, end = _json_value(grammar, position, piece)
            if piece == "%llguidance":
                options, piece = options | _checked_options(value), ""
            elif piece == "%json":
                piece = f"{_prefix(grammar, len(schemas))}root"
                schemas.append(value)
            else:
                piece += grammar[position:end]
            position = end
        elif kind != "blank":
            _check_token(piece, previous, bool(_REPEATS.match(grammar, found.start())))
            previous = piece
        output.append(piece)
    return _header(options) + "".join(output), schemas


def _check_token(piece: str, previous: str, repeats: bool) -> None:
    if piece[0] == "<" and len(piece) > 1:
        reject("#", piece[:40], "names tokens; a grammar describes text")
    if piece == "~" and not repeats and previous != "&":
        reject("#", "~", "allows bytes that are not text, unless it follows &: /(?s:.*)/ & ~NAME")
    if piece == "=" and previous in _UNSUPPORTED:
        reject("#", f"{previous}=", _UNSUPPORTED[previous])


def _json_value(grammar: str, position: int, keyword: str) -> tuple[object, int]:
    """The JSON value after a keyword, and its end position."""
    blanks = _BLANKS.match(grammar, position)
    try:
        return _DECODER.raw_decode(grammar, blanks.end() if blanks else position)
    except (ValueError, RecursionError) as error:
        reject("#", "lark", f"the text after {keyword} is not JSON ({error})")


def _checked_options(options: object) -> dict[str, object]:
    if not isinstance(options, dict):
        reject("#", "lark", "its %llguidance line is not one JSON object")
    if unknown := [name for name in options if name not in _OPTIONS]:
        reject("#", unknown[0][:40], f"is an option that the library would ignore; expected one of {', '.join(_OPTIONS)}")
    if options.get("allow_invalid_utf8"):
        reject("#", "allow_invalid_utf8", "allows bytes that are not text")
    return options
