"""What one constraint may cost: size, time, memory, and the work of a mask."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields

from stepgraph.sampling.fields import clip_repr, is_int
from stepgraph.sampling.grammar.constraints.constraint import MAX_PAYLOAD_CHARS, Constraint
from stepgraph.sampling.grammar.llguidance_lib.lark import PIECE

MIB = 1 << 20

_STRING, _CLASS = r'"(?:[^"\\]|\\.)*"', r"\[(?:[^\]\\]|\\.)*\]"
# What brackets are told apart from, and the brackets. A regular expression inside a grammar has brackets of its own.
_PIECES = {
    "regex": re.compile(rf"\\.|{_CLASS}|[()]", re.DOTALL),
    "ebnf": re.compile(rf"{_STRING}|{_CLASS}|[()]", re.DOTALL),
    "lark": PIECE,
}

FUEL = {
    "initial_lexer_fuel": "compile_fuel",
    "max_grammar_size": "grammar_symbols",
    "max_lexer_states": "lexer_states",
    "step_lexer_fuel": "mask_fuel",
    "step_max_items": "mask_items",
    "max_items_in_row": "row_items",
}
_SIGNS = {  # what is said where a limit is reached: by llguidance, and by the matchers of both
    "one step of the grammar took": "step_seconds",
    "initial lexer configuration": "compile_fuel",
    "grammar size": "grammar_symbols",
    "too many states": "lexer_states",
    "too many expressions": "mask_fuel",
    "Too many items": "mask_items",
    "Current row has": "row_items",
}


@dataclass(frozen=True)
class GrammarLimits:
    """Every refusal for one of these names the field, what was got and the limit.

    The first two are checked at once. `compile_*` and `result_bytes` hold for xgrammar and for the trial of llguidance in the
    compile worker, a process of its own (`isolation` "process"); without it nothing bounds a compile but the libraries. `least_bytes`
    is computed of a grammar before it is compiled. The rest is fuel: counted work, of llguidance, so that the same text is refused on
    every machine; and `step_seconds`, of both.
    """

    max_chars: int = MAX_PAYLOAD_CHARS  # of a schema, pattern or grammar
    max_nesting: int = 200  # brackets open at once in a pattern or grammar; schemas: 64 levels
    compile_seconds: float = 30.0  # by the clock, of one compile in the worker
    compile_bytes: int = 1024 * MIB  # of address space that one compile may take on top of what the worker has when it is ready
    result_bytes: int = 64 * MIB  # of a compiled grammar on its way back
    least_bytes: int = 200_000  # xgrammar: of the shortest text of each alternative of a rule
    step_seconds: float = 0.5  # processor time of one mask or one token; the call that took longer is the request's last
    compile_fuel: int = 1_000_000  # llguidance: expressions built for a lexer
    grammar_symbols: int = 500_000  # llguidance: symbols of a grammar
    lexer_states: int = 250_000  # llguidance: states that a lexer may come to have, at 1 to 2 kB each
    mask_fuel: int = 200_000  # llguidance: expressions derived for one mask
    mask_items: int = 50_000  # llguidance: parser items made for one mask
    row_items: int = 2_000  # llguidance: parser items of one byte

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not is_int(value) or value < 1):
                raise ValueError(f"GrammarLimits.{field.name}: got {clip_repr(value)}, want an int >= 1")
            real = isinstance(value, (int, float)) and not isinstance(value, bool)
            if field.type == "float" and not (real and 0 < value < math.inf):
                raise ValueError(f"GrammarLimits.{field.name}: got {clip_repr(value)}, want a number > 0")
        if self.max_chars > MAX_PAYLOAD_CHARS:
            raise ValueError(f"GrammarLimits.max_chars: got {self.max_chars}, want at most {MAX_PAYLOAD_CHARS}")
        if self.compile_seconds > 3600:
            raise ValueError(f"GrammarLimits.compile_seconds: got {clip_repr(self.compile_seconds)}, want at most 3600")

    @property
    def fuel(self) -> dict[str, int]:
        """The counted work under llguidance's names."""
        return {name: int(getattr(self, field)) for name, field in FUEL.items()}


DEFAULTS = GrammarLimits()


def check_size(constraint: Constraint, limits: GrammarLimits) -> None:
    """ValueError where the text alone is beyond the limits."""
    kind, payload = constraint.kind, constraint.payload
    if len(payload) > limits.max_chars:
        raise ValueError(over("max_chars", f"{len(payload)} characters", limits.max_chars))
    text = _grammar_of(payload) if kind == "ebnf" else payload
    if kind in _PIECES and (deepest := _deepest(kind, text)) > limits.max_nesting:
        raise ValueError(over("max_nesting", f"{deepest} brackets open at once", limits.max_nesting))


def _grammar_of(payload: str) -> str:
    """Of a constraint of kind ebnf: the text behind the name of its first rule."""
    told = json.loads(payload)
    if not isinstance(told, list) or [type(part) for part in told] != [str, str]:
        raise ValueError(f"Constraint.payload of ebnf: got {clip_repr(payload)}, want what Constraint.ebnf writes")
    return str(told[1])


def over(field: str, got: str, limit: float, unit: str = "") -> str:
    """The words of a refusal for a limit."""
    return f"GrammarLimits.{field}: got {got}, want at most {limit:,}{unit and ' ' + unit}"


def named(told: str) -> str:
    """What a library or a matcher says, with the limit named where one was reached."""
    field = next((field for sign, field in _SIGNS.items() if sign in told), "")
    return f"{told} (GrammarLimits.{field})" if field and "GrammarLimits." not in told else told


def _deepest(kind: str, text: str) -> int:
    depth = deepest = 0
    for found in _PIECES[kind].finditer(text):
        piece = found.group()
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(piece, 0)
        deepest = max(deepest, depth + (_deepest("regex", piece[1:-1]) if found.lastgroup == "regex" else 0))
    return deepest
