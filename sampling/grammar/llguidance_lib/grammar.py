"""Compiles constraints with llguidance. Imported only where that library is installed, see backends.py."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance

from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.pattern import pattern_to_regex
from stepgraph.sampling.grammar.constraints.structural_tag import TagGroup, tag_groups
from stepgraph.sampling.grammar.constraints.unsupported import reject
from stepgraph.sampling.grammar.link.llguidance_binding import LLGuidanceNativeGrammar, LLGuidanceTokenizer, llguidance_api
from stepgraph.sampling.grammar.llguidance_lib.lark import checked_lark, head
from stepgraph.sampling.grammar.llguidance_lib.matcher import LLGuidanceMatcher, SharedStart
from stepgraph.sampling.grammar.llguidance_lib.schema import llguidance_schema
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.native import Unavailable

# The library does not report the memory of a grammar. Measured, with the copy for host nodes: 60 kB to 0.7 MB, within a factor of two
# of this. The states that a lexer adds while masks are computed are not included; `GrammarLimits.lexer_states` bounds them.
BYTES_PER_GRAMMAR, BYTES_PER_CHAR = 60_000, 120

_NOISE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\n *1 \| .*|<(non-verbose|state).*", re.DOTALL)
_HEAD = head({})


@dataclass(frozen=True, eq=False)
class LLGuidanceGrammar:
    """A compiled grammar, copied by each matcher."""

    start: SharedStart
    vocabulary: Vocabulary
    fuel_seconds: float
    nbytes: int
    native: LLGuidanceNativeGrammar | None  # None where the library cannot be called from C

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self.start, self.vocabulary, self.fuel_seconds, self.native)


class _Tokens:
    """The token table in the form that the library expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.for_llguidance
        self.eos_token_id = vocabulary.stop_token_ids[0]
        self.special_token_ids = sorted(vocabulary.non_text_ids)

    def __call__(self, text: str) -> Sequence[int]:
        raise RuntimeError("no grammar names tokens, so no text is tokenized")


class LLGuidanceBuilder:
    """Builds grammars over one vocabulary; safe to call from any thread."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self._vocabulary, self._limits = vocabulary, limits
        self._tokenizer = llguidance.LLTokenizer(_Tokens(vocabulary), eos_token=list(vocabulary.stop_token_ids))  # type: ignore[arg-type]
        # Counted work limits a step before time does, so that the same text is rejected on every machine.
        self._fuel = llguidance.LLParserLimits(verbose_errors=False, **limits.fuel)  # type: ignore[arg-type]
        try:
            self._native: LLGuidanceTokenizer | None = llguidance_api().tokenizer(vocabulary)
        except Unavailable:  # the native link reports why
            self._native = None

    def check(self, constraint: Constraint) -> None:
        """ValueError, an UnsupportedError where the part is known, for what would not be enforced; without calling the library."""
        lark_of(constraint)

    def build(self, constraint: Constraint, worker: CompileWorker | None = None) -> LLGuidanceGrammar:
        """Compile in the worker as a trial, then here: the library's grammars cannot be sent between processes."""
        grammar = lark_of(constraint)
        if worker:
            worker.call("lark", grammar)
        start = SharedStart(lambda: llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._fuel))
        if start.matcher.is_error():
            reject("#", constraint.kind, _NOISE.sub("", start.matcher.get_error()).strip())
        native = self._native.grammar(grammar, self._limits.fuel) if self._native else None
        nbytes = BYTES_PER_GRAMMAR + BYTES_PER_CHAR * len(grammar)
        return LLGuidanceGrammar(start, self._vocabulary, self._limits.step_seconds, nbytes, native)


def lark_of(constraint: Constraint) -> str:
    """The constraint in the library's Lark notation; UnsupportedError where it would not be enforced."""
    kind, payload = constraint.kind, constraint.payload
    if kind == "lark":
        return checked_lark(payload)
    if kind == "ebnf":
        reject("#", "ebnf", "is a notation of xgrammar; llguidance expects lark")
    if kind == "regex":
        return f"{_HEAD}start: TEXT\nTEXT: /(?:{pattern_to_regex(payload, 'pattern')})/\n"
    if kind == "choice":
        return f"{_HEAD}start: {' | '.join(json.dumps(option) for option in json.loads(payload))}\n"
    if kind == "structural_tag":
        return _tagged(tag_groups(payload), constraint.any_whitespace)
    schema = {"type": "object"} if kind == "json_object" else json.loads(payload)
    return f"{_HEAD}start: %json {llguidance_schema(schema, constraint.any_whitespace)}\n"


def _tagged(groups: Sequence[TagGroup], any_whitespace: bool) -> str:
    """Free text, and one of the tags after each trigger. The text after the last tag contains no trigger, which would lack its tag."""
    rules, triggers = list[str](), list[str]()
    for index, group in enumerate(groups):
        trigger = pattern_to_regex(_quoted(group.trigger), "trigger")
        triggers.append(trigger)
        tags = [f"{_literal(tag.begin)} %json {llguidance_schema(tag.schema, any_whitespace)} {_literal(tag.end)}" for tag in group.tags]
        rules.append(f"tag_{index}: trigger_{index} ({' | '.join(tags)})\ntrigger_{index}[lazy]: /(?s:.*){trigger}/\n")
    names = " | ".join(f"tag_{index}" for index in range(len(rules)))
    return f"{_HEAD}start: ({names})* TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)(?:{'|'.join(triggers)})(?s:.*)/\n{''.join(rules)}"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _quoted(text: str) -> str:
    return "".join(f"\\u{{{ord(char):x}}}" for char in text)
