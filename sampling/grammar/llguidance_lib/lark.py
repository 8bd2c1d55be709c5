"""Checks grammars in the Lark notation of llguidance, and adds the options that are needed here."""

from __future__ import annotations

import json
import re

from stepgraph.sampling.grammar.constraints.constraint import no_constants, unique_keys
from stepgraph.sampling.grammar.constraints.unsupported import reject
from stepgraph.sampling.grammar.llguidance_lib.schema import llguidance_schema

PIECE = re.compile(
    r"""
    (?P<blank> [ \t]+ | (?:\#|//)[^\n]* )
    | (?P<text> "(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1f\x7f])*" )
    | (?P<regex> /(?:\\.|[^/\\])+/ )
    | (?P<token> <[^<>\s]+> )
    | (?P<json> %(?:json|regex|llguidance) )
    | (?P<word> [A-Za-z_][\w-]* )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_BLANKS = re.compile(r"[ \t\r\n]*")
_REPEATS = re.compile(r"~[ \t]*[+-]?[0-9]")
_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=no_constants)
# Otherwise the library allows only one tokenization of forced bytes, by a tokenizer that it calls under the GIL.
OPTIONS = {"no_forcing": True}
_UNSUPPORTED = {
    "max_tokens": "is not enforced when drafts are rolled back",
    "stop": "is not enforced when drafts are rolled back; suffix= is",
    "temperature": "is a sampling parameter of the request",
}


def head(options: dict[str, object]) -> str:
    """The first line of a grammar."""
    return f"%llguidance {json.dumps({**options, **OPTIONS})}\n"


def checked_lark(grammar: str) -> str:
    """The grammar with the options needed here and its JSON schemas checked; UnsupportedError for what cannot be enforced on text."""
    if "\0" in grammar:
        reject("#", "lark", "contains a NUL character; write \\x00 in a regular expression")
    options: dict[str, object] | None = None
    written, before, position = list[str](), "", 0
    while found := PIECE.match(grammar, position):
        kind, piece, position = found.lastgroup, found.group(), found.end()
        if kind == "json":
            value, end = _value(grammar, position, piece)
            if piece == "%llguidance":
                options, piece = _checked_options(value, options), ""
            else:
                piece += llguidance_schema(value, any_whitespace=False) if piece == "%json" else grammar[position:end]
            position = end
        elif kind != "blank":
            _check(piece, before, bool(_REPEATS.match(grammar, found.start())))
            before = piece
        written.append(piece)
    return head(options or {}) + "".join(written)


def _check(piece: str, before: str, repeats: bool) -> None:
    """Check a token, given the previous one."""
    if piece[0] == "<" and len(piece) > 1:
        reject("#", piece[:40], "names tokens; a grammar describes text")
    if piece == "~" and not repeats and before != "&":
        reject("#", "~", "allows bytes that are not text, unless it follows &: /(?s:.*)/ & ~NAME")
    if piece == "=" and before in _UNSUPPORTED:
        reject("#", f"{before}=", _UNSUPPORTED[before])


def _value(grammar: str, position: int, keyword: str) -> tuple[object, int]:
    """The JSON value after a keyword, and its end."""
    blanks = _BLANKS.match(grammar, position)
    try:
        return _DECODER.raw_decode(grammar, blanks.end() if blanks else position)
    except (ValueError, RecursionError) as error:
        reject("#", "lark", f"the text after {keyword} is not JSON ({error})")


def _checked_options(options: object, before: object) -> dict[str, object]:
    if not isinstance(options, dict) or before is not None:
        reject("#", "lark", "its %llguidance line is not one JSON object")
    if options.get("allow_invalid_utf8"):
        reject("#", "allow_invalid_utf8", "allows bytes that are not text")
    return options
