"""From a constraint to a grammar of xgrammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import xgrammar

from stepgraph.sampling.grammar.constraint import Constraint
from stepgraph.sampling.grammar.json_grammar import TOKEN, json_grammar
from stepgraph.sampling.grammar.matcher import XGrammarMatcher
from stepgraph.sampling.grammar.pattern import ebnf_of
from stepgraph.sampling.grammar.refusal import refuse
from stepgraph.sampling.grammar.schema import check_schema
from stepgraph.sampling.grammar.structural_tag import Tag, TagGroup, tag_groups
from stepgraph.sampling.grammar.vocabulary import Vocabulary

_SOURCE_PREFIX = re.compile(r"^(\[[\d:]+\] )?\S*\.(cc|h|cpp):\d+: (Check failed: \(.*?\) is false: )?")
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

    def __init__(self, vocabulary: Vocabulary, fuel_seconds: float, max_threads: int) -> None:
        self._vocabulary, self._fuel_seconds = vocabulary, fuel_seconds
        self._compiler = xgrammar.GrammarCompiler(vocabulary.tokenizer_info, max_threads=max_threads, cache_enabled=False)

    def build(self, constraint: Constraint) -> XGrammar:
        """RefusedError, or ValueError in the library's words, where the constraint would not be enforced."""
        text, root = ebnf_text(constraint)
        # In a first rule that is used by others too, the library forbids tokens that reach beyond its end.
        first = "first"
        while first in text:
            first += "_"
        try:
            compiled = self._compiler.compile_grammar(f"{text}\n{first} ::= {root}\n", root_rule_name=first)
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # the C++ side raises RuntimeError and several types of its own
            raise ValueError(_SOURCE_PREFIX.sub("", str(error)).strip()) from error
        return XGrammar(compiled, self._vocabulary, self._fuel_seconds)


def ebnf_text(constraint: Constraint) -> tuple[str, str]:
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
        return _tagged(tag_groups(payload), constraint.any_whitespace), "root"
    # The library's built-in JSON grammar forbids some legal tokens (`}]` after a string); this schema does not.
    schema = {"type": "object"} if kind == "json_object" else json.loads(payload)
    return _json(schema, constraint.any_whitespace), "root"


def _json(schema: object, any_whitespace: bool) -> str:
    check_schema(schema)
    try:
        return json_grammar(schema, any_whitespace)
    except RuntimeError as error:  # of the library's converter
        raise ValueError(_SOURCE_PREFIX.sub("", str(error)).strip()) from error


def _tagged(groups: list[TagGroup], any_whitespace: bool) -> str:
    """Free text, and a tag behind each trigger."""
    rules, dispatched = list[str](), list[str]()
    for number, group in enumerate(groups):
        for index, tag in enumerate(group.tags):
            rules.append(_tag_rules(f"tag_{number}_{index}_", tag, any_whitespace))
        dispatched.append(f"({_literal(group.trigger)}, group_{number})")
        rules.append(f"group_{number} ::= {' | '.join(f'tag_{number}_{index}_tag' for index in range(len(group.tags)))}")
    root = f"root ::= TagDispatch({', '.join(dispatched)}, loop_after_dispatch=true, excludes=())"
    return "\n".join([*rules, root])


def _tag_rules(prefix: str, tag: Tag, any_whitespace: bool) -> str:
    """The rules of one tag's JSON under names of its own, and the rule of the tag."""
    grammar = _json(tag.schema, any_whitespace)
    names = set(_RULE.findall(grammar))
    word = re.compile(rf"{TOKEN.pattern}|\w+")  # literals and classes are left as they are
    renamed = word.sub(lambda found: prefix + found.group() if found.group() in names else found.group(), grammar)
    return f"{renamed}\n{prefix}tag ::= {_literal(tag.begin)} {prefix}root {_literal(tag.end)}"


def _literal(text: str) -> str:
    return '"' + "".join(char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in text) + '"'
