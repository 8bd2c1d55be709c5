"""Limits on what one constraint may cost: size, time, memory, and the work of a mask."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from stepgraph.sampling.fields import Check, check_fields, is_number, number, shows_fields, whole
from stepgraph.sampling.grammar.constraints.constraint import MAX_PAYLOAD_CHARS

MIB = 1 << 20
MAX_DEPTH = 1 << 16
MAX_INT32 = 2**31 - 1

TOO_DEEP = "the text nests deeper than the stack of its automaton"
_MESSAGE_PARTS = {  # part of a message of llguidance, or of either matcher -> the limit that was reached
    "one step of the grammar took": "step_seconds",
    TOO_DEEP: "automaton_depth",
    "initial lexer configuration": "compile_fuel",
    "lexer precomputation failed": "compile_fuel",
    "grammar size": "grammar_symbols",
    "too many states": "lexer_states",
    "too many expressions": "mask_fuel",
    "Too many items": "mask_items",
    "Current row has": "row_items",
}


_COUNT = whole(1, 2**62)
_SPECIFIC_CHECKS = {
    **dict.fromkeys(("max_chars", "max_schema_chars"), whole(1, MAX_PAYLOAD_CHARS)),
    "compile_seconds": number(0, 3600, low_open=True),
    "automaton_states": whole(1, MAX_INT32),
    "automaton_bytes": whole(1, 4 * MAX_INT32),  # the offsets in an image are int32 and count int32
    "automaton_depth": whole(1, MAX_DEPTH),
}
_SECONDS = Check(lambda value: is_number(value) and 0 < value < math.inf, "a number > 0")


class CompileAbortedError(ValueError):
    """A compile that ended without a result: a limit was reached, it was cancelled, or the worker process died.

    No other library is tried then, except after a limit of the automaton.
    """


@shows_fields
@dataclass(frozen=True)
class GrammarLimits:
    """`max_*` are checked by `submit`. `compile_seconds`, `compile_bytes` and `result_bytes` bound calls to the compile worker.
    `step_seconds` holds for xgrammar and llguidance. The other limits count work, so that the same text is rejected on every machine."""

    max_chars: int = 120_000  # of a pattern, grammar or list of choices
    max_schema_chars: int = 600_000  # of a schema, or of all tags of a constraint
    max_nesting: int = 200  # brackets open at once in a pattern or grammar; schemas: 400 levels
    compile_seconds: float = 30.0  # wall-clock time of one compile in the worker
    compile_bytes: int = 1024 * MIB  # address space that one compile may add to that of the idle worker
    result_bytes: int = 64 * MIB  # of a compiled grammar that the worker returns
    least_bytes: int = 200_000  # xgrammar: shortest text of an alternative of a rule
    step_seconds: float = 0.5  # processor time of one mask or one token; a call that takes longer ends the request
    automaton_states: int = 200_000  # automaton: states before minimisation
    automaton_bytes: int = 32 * MIB  # automaton: size of its tables and mask rows
    automaton_steps: int = 1_000_000_000  # automaton: steps over bytes of tokens to compute its masks
    automaton_depth: int = 256  # automaton: open nested parts of a text; a deeper text ends its request
    compile_fuel: int = 1_000_000  # llguidance: expressions built for a lexer
    grammar_symbols: int = 500_000  # llguidance: symbols of a grammar
    lexer_states: int = 250_000  # llguidance: states of a lexer, 1 to 2 kB each
    mask_fuel: int = 200_000  # llguidance: expressions derived for one mask
    mask_items: int = 50_000  # llguidance: parser items created for one mask
    row_items: int = 2_000  # llguidance: parser items of one byte

    def __post_init__(self) -> None:
        check_fields(self, {field.name: _SECONDS if field.type == "float" else _COUNT for field in fields(self)} | _SPECIFIC_CHECKS)


DEFAULTS = GrammarLimits()


def limit_exceeded(field: str, got: str, limit: float, unit: str = "") -> str:
    return f"GrammarLimits.{field}: got {got}, expected at most {limit:,}{unit and ' ' + unit}"


def with_limit_name(message: str) -> str:
    """A message of a library or a matcher; if a limit was reached, with its name appended."""
    field = next((field for sign, field in _MESSAGE_PARTS.items() if sign in message), "")
    return f"{message} (GrammarLimits.{field})" if field and not names_limit(message) else message


def names_limit(error: str) -> bool:
    """Whether the error of a request is a limit that its grammar exceeded, at its compile or later: its own fault, and no failure."""
    return "GrammarLimits." in error
