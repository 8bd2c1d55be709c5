"""The grammar of a JSON schema in the Lark notation of llguidance.

The library splits a text into terminals, each as long as possible, and parses these. So each string and each number is one terminal.
A terminal cannot be recursive, so an automaton inside it is solved as a system of equations between regular expressions (Brzozowski and
McCluskey 1963).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from heapq import heappop, heappush
from typing import Any

from stepgraph.sampling.grammar.constraints.charset import CharSet, regex_class
from stepgraph.sampling.grammar.constraints.unsupported import reject
from stepgraph.sampling.grammar.schema.automata import automaton
from stepgraph.sampling.grammar.schema.grammar import MAX_WHITESPACE, GrammarWriter, write_enforced
from stepgraph.sampling.grammar.schema.language import ANY_TEXT, Term
from stepgraph.sampling.grammar.schema.normalise import Normaliser
from stepgraph.sampling.grammar.schema.options import Options
from stepgraph.sampling.grammar.schema.spelling import LanguageWriter, json_class

MAX_STATES = 20_000  # states of all automata of a schema
MAX_AUTOMATON_STATES = 1_000  # states of one automaton: the library recurses into an expression, and a deep one overflows its stack
MAX_TERMINALS = 20_000
MAX_INLINE_CHARS = 30  # characters of an expression that is repeated instead of becoming a terminal

_EBNF_ESCAPE = re.compile(r"\\(?:U([0-9a-f]{8})|.)")
_HEX = "[0-9A-Fa-f]"
_LETTER = r"[\u{20}-\u{21}\u{23}-\u{5b}\u{5d}-\u{d7ff}\u{e000}-\u{10ffff}]"
_ESCAPE = rf'["\\\/bfnrt]|u(?:[0-9A-CE-Fa-ce-f]{_HEX}{{3}}|[Dd][0-7]{_HEX}{{2}}|[Dd][89ABab]{_HEX}{{2}}\\u[Dd][C-Fc-f]{_HEX}{{2}})'
_BASE_TERMINALS = {
    "string": rf'/"(?:{_LETTER}|\\(?:{_ESCAPE}))*"/',
    "integer": "/0|-?[1-9][0-9]*/",
    "number": r"/-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?/",
}


def lark_rules(schema: Any, options: Options, prefix: str = "") -> str:
    """The rules of the grammar, as in `schema_grammar`, and its terminals."""
    writer = write_enforced(schema, options, prefix, _LarkWriter)[1]
    text = "".join(f"{name}: {rule}\n" for name, rule in (writer.rules | writer.terminals.expressions).items())
    return _EBNF_ESCAPE.sub(lambda found: _json_char(chr(int(found[1], 16))) if found[1] else found[0], text)


def _json_char(char: str) -> str:
    return json.dumps(char, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


class _LarkWriter(GrammarWriter):
    blank = f"(/[ \\n\\r\\t]{{1,{MAX_WHITESPACE}}}/)?"

    def __init__(self, normaliser: Normaliser, options: Options, prefix: str, implies_types: bool) -> None:
        super().__init__(normaliser, options, prefix, implies_types)
        self.terminals = _TerminalWriter(prefix.upper())

    def _base_rule(self, name: str) -> str:
        return self.terminals.name(_BASE_TERMINALS[name]) if name in _BASE_TERMINALS else super()._base_rule(name)

    def number(self, term: Term) -> str:
        return self.terminals.name(self.terminals.body(term, in_string=False))

    def string(self, term: Term) -> str:
        if term is ANY_TEXT:
            return self._base_rule("string")
        return self.terminals.name(f'"\\"" {self.terminals.body(term, in_string=True)} "\\""')


_Equation = dict[str, str]  # next state -> expression before it; "": the end


class _TerminalWriter(LanguageWriter):
    """Writes languages as expressions of terminals."""

    def __init__(self, prefix: str) -> None:
        super().__init__({}, prefix)
        self._names = dict[str, str]()  # expression -> name
        self.expressions = dict[str, str]()  # name -> expression
        self._texts = dict[tuple[CharSet, bool], str]()  # of classes
        self._num_states = 0

    def name(self, expression: str) -> str:
        if expression not in self._names:
            if len(self._names) >= MAX_TERMINALS:
                reject("#", "schema", f"takes more than {MAX_TERMINALS} terminals of llguidance; use another backend")
            self._names[expression] = name = f"{self._prefix}T{len(self._names)}"
            self.expressions[name] = expression
        return self._names[expression]

    def _short(self, expression: str) -> str:
        return expression if len(expression) <= MAX_INLINE_CHARS else self.name(expression)

    def _named(self, term: Term, in_string: bool) -> str:
        return self.body(term.parts[0], in_string)  # the rule is recursive

    def _class(self, chars: CharSet, in_string: bool) -> str:
        key = chars, in_string
        if key not in self._texts:
            self._texts[key] = self._short(json_class(chars, _class) if in_string else _class(chars))
        return self._texts[key]

    def _automaton(self, term: Term, in_string: bool) -> str:
        found, start, equations = automaton(term), f"{self._prefix}S{self._num_states}_", dict[str, _Equation]()
        for state, edges in enumerate(found.edges):
            if edges or not state:
                cases = defaultdict[str, list[str]](list)
                for chars, target in edges:
                    cases[f"{start}{target}" if found.edges[target] else ""].append(self._class(chars, in_string))
                if found.accepts[state]:
                    cases[""].append("")
                equations[f"{start}{state}"] = {following: _alternation(*before) for following, before in cases.items()}
        limit = min(MAX_STATES - self._num_states, MAX_AUTOMATON_STATES)
        if len(equations) > limit:
            reject("#", "schema", f"takes more than {limit} states of an automaton; use another backend than llguidance")
        self._num_states += len(equations)
        self._solve(equations)
        return f"{start}0"

    def _solve(self, equations: dict[str, _Equation]) -> None:
        """Eliminate the states one by one, states with few successors and few users first."""
        users = defaultdict[str, set[str]](set)
        for name, equation in equations.items():
            for following in equation:
                users[following].add(name)
        numbers = {name: number for number, name in enumerate(equations)}
        costs = dict[str, int]()  # of the remaining states
        queue = list[tuple[int, int, str]]()

        def enqueue(name: str) -> None:
            others, used_by = len(equations[name]) - ("" in equations[name]), len(users[name])
            costs[name] = (others - (name in equations[name])) * (used_by - (name in users[name]))
            heappush(queue, (costs[name], numbers[name], name))

        for name in equations:
            enqueue(name)
        while queue:
            cost, _, name = heappop(queue)
            if costs.get(name) != cost:  # an old entry: the state was eliminated, or its cost has changed
                continue
            del costs[name]
            for other in self._eliminate(name, equations, users) & costs.keys():
                enqueue(other)

    def _eliminate(self, name: str, equations: dict[str, _Equation], users: dict[str, set[str]]) -> set[str]:
        """Substitute the equation of a state for the state. Returns the states whose equations or users have changed."""
        equation = equations[name]
        if (loop := equation.pop(name, None)) is not None:
            users[name].discard(name)
            for following, text in equation.items():
                equation[following] = f"({loop})* {text}".strip()
        self.expressions[name] = _alternation(*(f"{text} {following}".strip() for following, text in equation.items()))
        if equation.keys() == {""}:
            equation = {"": name}
        for user in sorted(users[name]):  # sorted: the order determines the names of shared expressions
            before = equations[user].pop(name)
            for following, text in equation.items():
                text = f"{before} {text}".strip()
                other = equations[user].get(following)
                equations[user][following] = self._short(text if other is None else _alternation(other, text))
                users[following].add(user)
        for following in equation:
            users[following].discard(name)
        return users[name] | equation.keys()


def _alternation(*texts: str) -> str:
    distinct = list(dict.fromkeys(filter(None, texts)))
    text = distinct[0] if len(distinct) == 1 else f"({' | '.join(distinct)})"
    return text if "" not in texts else f"({text})?" if distinct else ""


def _class(chars: CharSet) -> str:
    return f"/{regex_class(chars)}/"
