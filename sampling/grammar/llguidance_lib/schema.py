"""The grammar of a JSON schema in the Lark notation of llguidance, from the rules that `schema_grammar` writes.

The library splits a text into terminals, each as long as possible, and parses these. So each string and each number becomes one terminal.
Automata inside strings and numbers are rules that refer to each other. A terminal cannot be recursive, so these rules are solved as a
system of equations between regular expressions (Brzozowski and McCluskey 1963).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from stepgraph.sampling.grammar.constraints.charset import CharSet, charset, class_members, intersection, regex_class, unescaped
from stepgraph.sampling.grammar.constraints.unsupported import reject

MAX_STATES = 20_000  # states of all automata of a schema
MAX_AUTOMATON_STATES = 1_000  # states of one automaton: the library recurses into an expression, and a deep one overflows its stack
MAX_TERMINALS = 20_000
MAX_INLINE_CHARS = 30  # characters of an expression that is repeated instead of becoming a terminal

_EBNF_TOKEN = re.compile(
    r' *(?:"(?P<text>(?:[^"\\]|\\.)*)"|\[(?P<chars>(?:[^\]\\]|\\.)*)\]|(?P<name>\w+)|(?P<sign>[*+?]|\{\d+,?\d*\}|\(=|.))', re.S
)
_STATE = re.compile(r"(.*_)?s\d+_\d+")  # the name of a rule for a state of an automaton
_IN_NUMBERS = charset("+-.0123456789eE")
_STRING_END_RULE = "string_rest"  # the rule that ends a string of any characters


class _Element(NamedTuple):
    kind: str  # text, chars, name, all, any, repeat
    text: str = ""  # a text, a name, or the suffix of a repetition
    chars: CharSet = ()
    parts: tuple[_Element, ...] = ()


def lark_rules(ebnf: str) -> str:
    """The rules of an EBNF grammar in Lark notation, under the same names."""
    rules = dict(line.split(" ::= ", 1) for line in ebnf.splitlines())
    rules |= {name.removesuffix("_fewer"): rule for name, rule in rules.items() if name.endswith("_fewer")}  # terminals do not recurse
    return _Translation({name: _Parser(rule).part() for name, rule in rules.items()}).text(next(iter(rules)))


class _Parser:
    def __init__(self, rule: str) -> None:
        self._pieces = list(_EBNF_TOKEN.finditer(rule.rstrip()))
        self._index = 0

    def part(self) -> _Element:
        """The alternatives up to and including a closing parenthesis, or up to the end."""
        cases: list[list[_Element]] = [[]]
        while self._index < len(self._pieces):
            piece = self._pieces[self._index]
            self._index += 1
            match piece["sign"]:
                case None:
                    kind = piece.lastgroup or ""
                    chars = class_members(piece[kind]) if kind == "chars" else ()
                    if kind != "text" or piece[kind]:
                        cases[-1].append(_Element(kind, "" if chars else unescaped(piece[kind]), chars))
                case ")":
                    break
                case "(":
                    cases[-1].append(self.part())
                case "(=":  # drop the look-ahead: it always holds where the rule is used
                    self.part()
                case "|":
                    cases.append([])
                case sign:
                    cases[-1][-1] = _Element("repeat", sign, parts=(cases[-1][-1],))
        alternatives = [case[0] if len(case) == 1 else _Element("all", parts=tuple(case)) for case in cases]
        return alternatives[0] if len(alternatives) == 1 else _Element("any", parts=tuple(alternatives))


_Equation = dict[str, str]  # next rule -> expression before it; "": no rule follows


class _Translation:
    def __init__(self, rules: dict[str, _Element]) -> None:
        self._rules, self._prefix = rules, next(iter(rules)).removesuffix("root").upper()
        self._terminals = dict[str, str]()  # expression -> name
        self._expressions = dict[str, str]()  # name -> expression
        self._equations = dict[str, _Equation]()

    def text(self, root: str) -> str:
        rules, waiting = dict[str, str](), [root]
        while waiting:
            name = waiting.pop()
            if name not in rules:
                rules[name] = self._write_element(self._rules[name], waiting)
        self._solve()
        return "".join(f"{name}: {rule}\n" for name, rule in (rules | self._expressions).items())

    # Rules

    def _write_element(self, part: _Element, waiting: list[str]) -> str:
        """A rule's element; the names of other rules are added to `waiting`."""
        match part.kind:
            case "any":
                return f"({' | '.join(self._write_element(case, waiting) for case in part.parts)})"
            case "repeat" if not self._is_blank(part):
                return f"({self._write_element(part.parts[0], waiting)}){part.text}"
            case "name" if not self._is_number(part):
                waiting.append(part.text)
                return part.text
        return " ".join(self._sequence(part.parts if part.kind == "all" else (part,), waiting)) or '""'

    def _sequence(self, parts: tuple[_Element, ...], waiting: list[str]) -> Iterator[str]:
        index = 0
        while index < len(parts):
            first, end = parts[index], index + 1
            if first == _Element("text", '"'):
                while parts[end] != first and not parts[end].text.endswith(_STRING_END_RULE):
                    end += 1
                end += 1
            elif self._is_number(first):
                while end < len(parts) and self._is_number(parts[end]):
                    end += 1
            if self._is_blank(first):
                low, _, high = first.text[1:-1].partition(",")
                yield f"{self._terminal_name(f'{_class(first.parts[0].chars)}{{{max(1, int(low))},{high}}}')}{'' if int(low) else '?'}"
            elif first.kind == "text" and end == index + 1:
                yield _literal(first.text)
            elif end > index + 1 or self._is_number(first):
                yield self._terminal_name(self._expression(_Element("all", parts=parts[index:end])))
            else:
                yield self._write_element(first, waiting)
            index = end

    @staticmethod
    def _is_blank(part: _Element) -> bool:
        """White space between the tokens of JSON."""
        return part.kind == "repeat" and part.parts[0].kind == "chars" and part.parts[0].chars[0][0] == ord("\t")

    def _is_number(self, part: _Element) -> bool:
        """Whether all characters of the part occur in JSON numbers, so that it is a number or a part of one."""
        match part.kind:
            case "text":
                return not part.text.strip("+-.0123456789eE")
            case "chars":
                return intersection(part.chars, _IN_NUMBERS) == part.chars
            case "name":  # automata outside strings are numbers; any other rule that leads to itself contains a bracket or a comma
                return bool(_STATE.fullmatch(part.text)) or self._is_number(self._rules[part.text])
        return all(map(self._is_number, part.parts))

    # Terminals

    def _terminal_name(self, expression: str) -> str:
        if expression not in self._terminals:
            if len(self._terminals) >= MAX_TERMINALS:
                reject("#", "schema", f"takes more than {MAX_TERMINALS} terminals of llguidance; use another backend")
            self._terminals[expression] = name = f"{self._prefix}T{len(self._terminals)}"
            self._expressions[name] = expression
        return self._terminals[expression]

    def _expression(self, part: _Element) -> str:
        """The expression of a part inside a terminal; empty for the empty text."""
        match part.kind:
            case "text":
                return _literal(part.text)
            case "chars":
                return _class(part.chars)
            case "name":
                self._add_equations(part.text)
                return part.text.upper()
            case "repeat":
                return f"({self._expression(part.parts[0])}){part.text}"
            case "all":
                return " ".join(filter(None, map(self._expression, part.parts)))
        return _alternation(*map(self._expression, part.parts))

    def _add_equations(self, name: str) -> None:
        """Add the equations of a rule and of the rules that follow it."""
        waiting, before = [name], len(self._equations)
        while waiting:
            name = waiting.pop()
            if name in self._equations:
                continue
            limit = min(MAX_STATES, before + MAX_AUTOMATON_STATES)
            if len(self._equations) >= limit:
                reject("#", "schema", f"takes more than {limit - before} states of an automaton; use another backend than llguidance")
            cases, rule = defaultdict[str, list[str]](list), self._rules[name]
            for case in rule.parts if rule.kind == "any" else (rule,):
                parts = case.parts if case.kind == "all" else (case,)
                next_rule = parts[-1].text if parts and parts[-1].kind == "name" else ""
                cases[next_rule].append(self._expression(_Element("all", parts=parts[:-1] if next_rule else parts)))
            self._equations[name] = {next_rule: _alternation(*before) for next_rule, before in cases.items()}
            waiting += filter(None, cases)

    def _solve(self) -> None:
        """Eliminate the rules one by one, rules with few successors and few users first."""
        equations = self._equations
        users = defaultdict[str, set[str]](set)
        for name, equation in equations.items():
            for next_rule in equation:
                users[next_rule].add(name)
        numbers = {name: number for number, name in enumerate(equations)}
        costs = dict[str, int]()  # of the remaining rules
        queue = list[tuple[int, int, str]]()

        def enqueue(name: str) -> None:
            others, used_by = len(equations[name]) - ("" in equations[name]), len(users[name])
            costs[name] = (others - (name in equations[name])) * (used_by - (name in users[name]))
            heappush(queue, (costs[name], numbers[name], name))

        for name in equations:
            enqueue(name)
        while queue:
            cost, _, name = heappop(queue)
            if costs.get(name) != cost:  # an old entry: the rule was eliminated, or its cost has changed
                continue
            del costs[name]
            for other in self._eliminate(name, users) & costs.keys():
                enqueue(other)

    def _eliminate(self, name: str, users: dict[str, set[str]]) -> set[str]:
        """Substitute the equation of a rule for the rule. Returns the rules whose equations or users have changed."""
        equations = self._equations
        equation = equations[name]
        if (loop := equation.pop(name, None)) is not None:
            users[name].discard(name)
            for next_rule, text in equation.items():
                equation[next_rule] = f"({loop})* {text}".strip()
        if equation.keys() == {""}:
            self._expressions[name.upper()] = equation[""]
            equation = {"": name.upper()}
        else:
            self._expressions[name.upper()] = _alternation(*(f"{text} {next_rule.upper()}".strip() for next_rule, text in equation.items()))
        for user in sorted(users[name]):  # sorted: the order determines the names of shared expressions
            before = equations[user].pop(name)
            for next_rule, text in equation.items():
                text = f"{before} {text}".strip()
                other = equations[user].get(next_rule)
                text = text if other is None else _alternation(other, text)
                equations[user][next_rule] = text if len(text) <= MAX_INLINE_CHARS else self._terminal_name(text)
                users[next_rule].add(user)
        for next_rule in equation:
            users[next_rule].discard(name)
        return users[name] | equation.keys()


def _alternation(*texts: str) -> str:
    distinct = list(dict.fromkeys(filter(None, texts)))
    text = distinct[0] if len(distinct) == 1 else f"({' | '.join(distinct)})"
    return text if "" not in texts else f"({text})?" if distinct else ""


def _class(chars: CharSet) -> str:
    return f"/{regex_class(chars)}/"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
