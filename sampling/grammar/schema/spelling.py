"""Languages of texts as EBNF of JSON strings and numbers. Characters that JSON must escape are written with their shortest escape."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from stepgraph.sampling.grammar.constraints.charset import JSON_UNESCAPED, CharSet, charset, complement, intersection, xgrammar_safe_class
from stepgraph.sampling.grammar.schema.automata import Automaton, TooComplexError, automaton, is_empty, split_length
from stepgraph.sampling.grammar.schema.language import ANY_CHAR, Term, both, either, repeat, repeat_bounds, texts_of

MAX_LISTED_TEXTS = 200  # texts of a finite language that are listed; more become an automaton, which shares equal parts
_CHARS_TO_ESCAPE = complement(JSON_UNESCAPED)
_SHORT_ESCAPES = {code: char for code, char in ((8, "b"), (9, "t"), (10, "n"), (12, "f"), (13, "r"), (34, '"'), (92, "\\"))}


def literal(text: str) -> str:
    """A text as an EBNF literal."""
    return '"' + "".join(f"\\{char}" if char in '"\\' else char if " " <= char <= "~" else f"\\U{ord(char):08x}" for char in text) + '"'


def json_literal(text: str) -> str:
    """A text as a JSON string, as an EBNF literal."""
    return literal(json.dumps(text, ensure_ascii=False))


@functools.lru_cache(maxsize=1024)
def json_class(chars: CharSet, write_class: Callable[[CharSet], str] = xgrammar_safe_class) -> str:
    """One of these characters inside a JSON string."""
    alternatives = []
    if raw := intersection(chars, JSON_UNESCAPED):
        alternatives.append(write_class(raw))
    escaped = [code for first, last in intersection(chars, _CHARS_TO_ESCAPE) for code in range(first, last + 1)]
    if short := [_SHORT_ESCAPES[code] for code in escaped if code in _SHORT_ESCAPES]:
        alternatives.append(f'"\\\\" {write_class(charset("".join(short)))}')
    for high in (0, 1):
        digits = [f"{code % 16:x}" for code in escaped if code not in _SHORT_ESCAPES and code // 16 == high]
        if digits:
            alternatives.append(f'"\\\\u00{high}" {write_class(charset("".join(digits), "".join(digits).upper()))}')
    return alternatives[0] if len(alternatives) == 1 and " " not in alternatives[0] else f"({' | '.join(alternatives)})"


def with_few_states(term: Term) -> Term:
    """The language; if its automaton is too large, its texts up to a smaller length. TooComplexError if that is too large too."""
    while True:
        try:
            is_empty(term)
            return term
        except TooComplexError:
            limit, rest = split_length(term)
            if limit is None or not (high := repeat_bounds(limit)[1]) or high // 2 < max(repeat_bounds(limit)[0], 1):
                raise
            term = both(repeat(ANY_CHAR, repeat_bounds(limit)[0], high // 2), rest)


class LanguageWriter:
    """Writes languages; adds rules to `rules` for parts that are used more than once."""

    def __init__(self, rules: dict[str, str], prefix: str) -> None:
        self._rules, self._prefix = rules, prefix
        self._bodies = dict[tuple[Term, bool], str]()
        self._classes = dict[CharSet, str]()

    def body(self, term: Term, in_string: bool) -> str:
        """The texts of a language, escaped for a JSON string or unchanged."""
        key = term, in_string
        if key not in self._bodies and (named_parts := [part for part in _cases(term) if part.kind == "named"]):
            texts = [self._named(part, in_string) for part in named_parts]
            if rest := [part for part in _cases(term) if part not in named_parts]:
                texts.append(self.body(either(*rest), in_string))
            self._bodies[key] = _alternatives(texts)
        if key not in self._bodies:
            self._bodies[key] = self._plain(term, in_string) if self._is_plain(term) else self._automaton(term, in_string)
        return self._bodies[key]

    def _is_plain(self, term: Term) -> bool:
        """Whether a language is written by its parts, without an automaton."""
        if term.kind != "words" or len(term.values) <= MAX_LISTED_TEXTS:
            return term.is_regex
        try:
            return not automaton(term).edges
        except TooComplexError:  # texts with few equal parts
            return True

    def _named(self, term: Term, in_string: bool) -> str:
        end, rule, _ = map(str, term.values)
        name = f"{self._prefix}{'' if in_string else 'text_'}{end}"
        if "{0}" in rule:
            self._rules[f"{name}_fewer"] = self.body(term.parts[0], in_string)
        self._rules[name] = rule.format(name, *(self.body(part, in_string) for part in term.parts[1:]))
        return name

    def _class(self, chars: CharSet, in_string: bool) -> str:
        if not in_string:
            return xgrammar_safe_class(chars)
        if chars not in self._classes:
            text = json_class(chars)
            if len(text) > 60:
                name = f"{self._prefix}chars{len(self._classes)}"
                self._rules[name], text = text, name
            self._classes[chars] = text
        return self._classes[chars]

    def _plain(self, term: Term, in_string: bool) -> str:
        parts = term.parts
        match term.kind:
            case "chars":
                return self._class(term.values, in_string)  # type: ignore[arg-type]
            case "words":
                texts = [json.dumps(text, ensure_ascii=False)[1:-1] if in_string else text for text in texts_of(term)]
                return _alternatives([literal(text) for text in texts])
            case "cat":
                inside = list[Term]()
                while term.kind == "cat":  # the second part of a long pattern is another one, thousands of times
                    first, term = term.parts
                    inside.append(first)
                return " ".join(self._plain(part, in_string) for part in (*inside, term))
            case "alt":
                return _alternatives([self._plain(part, in_string) for part in parts])
        return f"{self._grouped(parts[0], in_string)}{repeat_suffix(*repeat_bounds(term))}"

    def _grouped(self, term: Term, in_string: bool) -> str:
        text = self._plain(term, in_string)
        return text if term.kind == "chars" or (text.startswith("(") and term.kind == "alt") else f"({text})"

    def _automaton(self, term: Term, in_string: bool) -> str:
        """One rule for each state."""
        found = automaton(term)
        name = f"{self._prefix}s{len(self._rules)}_"
        for state, edges in enumerate(found.edges):
            if edges or not state:
                cases = [self._edge(chars, target, found, name, in_string) for chars, target in edges]
                self._rules[f"{name}{state}"] = " | ".join([*cases, *['""'][: found.accepts[state]]])
        return f"{name}0"

    def _edge(self, chars: CharSet, target: int, found: Automaton, name: str, in_string: bool) -> str:
        text = self._class(chars, in_string)
        return f"{text} {name}{target}" if found.edges[target] else text


def _cases(term: Term) -> tuple[Term, ...]:
    return term.parts if term.kind == "alt" else (term,)


def _alternatives(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({' | '.join(texts)})"


def optional(text: str, is_optional: bool) -> str:
    return f"({text})?" if is_optional and text else text


def repeated(text: str, low: int, high: int | None) -> str:
    if high == 0:
        return ""
    if (low, high) == (1, 1):
        return text
    return f"({text}){repeat_suffix(low, high)}"


def repeat_suffix(low: int, high: int | None) -> str:
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high), f"{{{low},{'' if high is None else high}}}")
