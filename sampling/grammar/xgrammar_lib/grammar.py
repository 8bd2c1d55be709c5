"""From a constraint to a grammar of xgrammar."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import xgrammar

from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker, WorkerError
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.constraints.pattern import ebnf_of
from stepgraph.sampling.grammar.constraints.structural_tag import Tag, TagGroup, tag_groups
from stepgraph.sampling.grammar.constraints.unsupported import refuse
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.grammar.xgrammar_lib.json_ebnf import TOKEN, Converter, json_grammar
from stepgraph.sampling.grammar.xgrammar_lib.matcher import XGrammarMatcher
from stepgraph.sampling.grammar.xgrammar_lib.schema import check_schema
from stepgraph.sampling.grammar.xgrammar_lib.shortest_text import check_least
from stepgraph.sampling.grammar.xgrammar_lib.wide_classes import with_wide_classes

_SOURCE_PREFIX = re.compile(r"^(\[[\d:]+\] )?\S*\.(cc|h|cpp):\d+: (Check failed: \(.*?\) is false: )?")
# What may follow a string where no blanks may, as the library looks ahead: it reckons with blanks all the same. Tokens that go on
# otherwise behind the quote are ruled out once, when a grammar is compiled; the others are tried again for every mask. Behind a tag's
# JSON follows what ends the tag, which may be a blank.
BEHIND_STRING, BEHIND_STRING_AT_ONCE = r"(=([ \n\r\t]* [,}\]:]))", r"(=([,}\]:]))"
_RULE = re.compile(r"^(\w+) ::= ", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class XGrammar:
    """Compiled once, shared by every matcher."""

    grammar: xgrammar.CompiledGrammar
    vocabulary: Vocabulary
    fuel_seconds: float

    @property
    def nbytes(self) -> int:
        return int(self.grammar.memory_size_bytes)

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self.grammar, self.vocabulary, self.fuel_seconds)


class XGrammarBuilder:
    """Builds grammars over one vocabulary; from any thread."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, max_threads: int) -> None:
        self._vocabulary, self._limits, self._max_threads = vocabulary, limits, max_threads

    def check(self, constraint: Constraint) -> None:
        """RefusedError where the constraint is seen not to be enforced, without the library."""
        kind, payload = constraint.kind, constraint.payload
        if kind == "lark":
            refuse("#", "lark", "is llguidance's notation; xgrammar wants ebnf")
        elif kind == "regex":
            ebnf_of(payload, "pattern")
        elif kind == "json_schema":
            check_schema(json.loads(payload))
        elif kind == "structural_tag":
            for group in tag_groups(payload):
                for tag in group.tags:
                    check_schema(tag.schema)

    def build(self, constraint: Constraint, worker: CompileWorker | None = None) -> XGrammar:
        """RefusedError, or ValueError in the library's words, where the constraint would not be enforced."""

        def convert(schema: str, longest_blank: int) -> str:
            with _in_its_words():
                return worker.call("schema", schema, str(longest_blank)) if worker else _converted(schema, longest_blank)

        def normal(text: str, root: str) -> str:
            with _in_its_words():
                return worker.call("written", text, root) if worker else str(xgrammar.Grammar.from_ebnf(text, root_rule_name=root))

        text, root = ebnf_text(constraint, convert)
        if constraint.kind == "ebnf":
            text, root = with_wide_classes(text, root, normal)
        # In a first rule that is used by others too, the library forbids tokens that reach beyond its end.
        first = "first"
        while first in text:
            first += "_"
        text = f"{text}\n{first} ::= {root}\n"
        with _in_its_words():
            parsed = worker.call("parsed", text, first) if worker else _parsed(text, first)
        check_least(parsed, self._limits)
        with _in_its_words():
            if worker is None:
                compiled = self._compiler.compile_grammar(text, root_rule_name=first)
            else:
                serialised = worker.call("grammar", text, first)
                compiled = xgrammar.CompiledGrammar.deserialize_json(serialised, self._vocabulary.tokenizer_info)
        return XGrammar(compiled, self._vocabulary, self._limits.step_seconds)

    @cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        return xgrammar.GrammarCompiler(self._vocabulary.tokenizer_info, max_threads=self._max_threads, cache_enabled=False)


@contextlib.contextmanager
def _in_its_words() -> Iterator[None]:
    """The library's errors as ValueError."""
    try:
        yield
    except (MemoryError, KeyboardInterrupt, WorkerError):
        raise
    except Exception as error:  # the C++ side raises RuntimeError and several types of its own
        raise ValueError(_SOURCE_PREFIX.sub("", str(error)).strip()) from error


def _converted(schema: str, longest_blank: int) -> str:
    return str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=longest_blank > 0, max_whitespace_cnt=longest_blank or None))


def _parsed(text: str, root: str) -> str:
    return str(xgrammar.Grammar.from_ebnf(text, root_rule_name=root).serialize_json())


def ebnf_text(constraint: Constraint, convert: Converter) -> tuple[str, str]:
    """The constraint in the library's notation, and the name of its first rule."""
    kind, payload = constraint.kind, constraint.payload
    if kind == "lark":
        refuse("#", "lark", "is llguidance's notation; xgrammar wants ebnf")
    if kind == "ebnf":
        root, grammar = json.loads(payload)
        return grammar, root
    if kind == "regex":
        return f"root ::= {ebnf_of(payload, 'pattern')}", "root"
    if kind == "choice":
        return f"root ::= {' | '.join(map(_literal, json.loads(payload)))}", "root"
    if kind == "structural_tag":
        return _tagged(tag_groups(payload), constraint.any_whitespace, convert), "root"
    # The library's built-in JSON grammar forbids some legal tokens (`}]` after a string); this schema does not.
    schema = {"type": "object"} if kind == "json_object" else json.loads(payload)
    return _json(schema, constraint.any_whitespace, convert).replace(BEHIND_STRING, BEHIND_STRING_AT_ONCE), "root"


def _json(schema: object, any_whitespace: bool, convert: Converter) -> str:
    check_schema(schema)
    return json_grammar(schema, any_whitespace, convert)


def _tagged(groups: list[TagGroup], any_whitespace: bool, convert: Converter) -> str:
    """Free text, and a tag behind each trigger."""
    rules, dispatched = list[str](), list[str]()
    for number, group in enumerate(groups):
        for index, tag in enumerate(group.tags):
            rules.append(_tag_rules(f"tag_{number}_{index}_", tag, any_whitespace, convert))
        dispatched.append(f"({_literal(group.trigger)}, group_{number})")
        rules.append(f"group_{number} ::= {' | '.join(f'tag_{number}_{index}_tag' for index in range(len(group.tags)))}")
    root = f"root ::= TagDispatch({', '.join(dispatched)}, loop_after_dispatch=true, excludes=())"
    return "\n".join([*rules, root])


def _tag_rules(prefix: str, tag: Tag, any_whitespace: bool, convert: Converter) -> str:
    """The rules of one tag's JSON under names of its own, and the rule of the tag."""
    grammar = _json(tag.schema, any_whitespace, convert)
    names = set(_RULE.findall(grammar))
    word = re.compile(rf"{TOKEN.pattern}|\w+")  # literals and classes are left as they are
    renamed = word.sub(lambda found: prefix + found.group() if found.group() in names else found.group(), grammar)
    return f"{renamed}\n{prefix}tag ::= {_literal(tag.begin)} {prefix}root {_literal(tag.end)}"


def _literal(text: str) -> str:
    return '"' + "".join(char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in text) + '"'
