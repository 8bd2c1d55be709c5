"""A grammar in the Lark notation of llguidance: taken apart as the library does, and refused where it would not hold for text."""

from __future__ import annotations

import json
import re

from stepgraph.sampling.grammar.constraints.constraint import no_constants, unique_keys
from stepgraph.sampling.grammar.constraints.unsupported import refuse
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
# Where bytes are forced, the library would allow one tokenization of them only, by a tokenizer that it calls under the GIL.
OPTIONS = {"no_forcing": True}
_REFUSED = {
    "max_tokens": "does not hold when drafts are taken back",
    "stop": "does not hold when drafts are taken back; suffix= does",
    "temperature": "is none of a grammar's concern here; a request has one",
}


def head(options: dict[str, object]) -> str:
    """The line that a grammar begins with."""
    return f"%llguidance {json.dumps({**options, **OPTIONS})}\n"


def checked_lark(grammar: str) -> str:
    """The grammar under the options that are needed here, with its JSON schemas checked as all others are."""
    if "\0" in grammar:
        refuse("#", "lark", "holds a NUL character; write \\x00 in a regular expression")
    options: dict[str, object] | None = None
    written, before, place = list[str](), "", 0
    while found := PIECE.match(grammar, place):
        kind, piece, place = found.lastgroup, found.group(), found.end()
        if kind == "json":
            value, end = _value(grammar, place, piece)
            if piece == "%llguidance":
                options, piece = _checked_options(value, options), ""
            else:
                piece += llguidance_schema(value, any_whitespace=False) if piece == "%json" else grammar[place:end]
            place = end
        elif kind != "blank":
            _check(piece, before, bool(_REPEATS.match(grammar, found.start())))
            before = piece
        written.append(piece)
    return head(options or {}) + "".join(written)


def _check(piece: str, before: str, repeats: bool) -> None:
    """What a piece means, by the one in front of it."""
    if piece[0] == "<" and len(piece) > 1:
        refuse("#", piece[:40], "names tokens; a grammar here is one of text")
    if piece == "~" and not repeats and before != "&":
        refuse("#", "~", "allows what is no text, unless it stands behind what it is taken from: /(?s:.*)/ & ~NAME")
    if piece == "=" and before in _REFUSED:
        refuse("#", f"{before}=", _REFUSED[before])


def _value(grammar: str, place: int, keyword: str) -> tuple[object, int]:
    """The JSON value behind a keyword, and where it ends."""
    blanks = _BLANKS.match(grammar, place)
    try:
        return _DECODER.raw_decode(grammar, blanks.end() if blanks else place)
    except (ValueError, RecursionError) as error:
        refuse("#", "lark", f"what follows {keyword} is not JSON ({error})")


def _checked_options(told: object, before: object) -> dict[str, object]:
    if not isinstance(told, dict) or before is not None:
        refuse("#", "lark", "its %llguidance line is not one JSON object")
    if told.get("allow_invalid_utf8"):
        refuse("#", "allow_invalid_utf8", "allows what is no text")
    return told
