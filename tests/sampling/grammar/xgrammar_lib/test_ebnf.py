"""Shortest texts of rules: endless and too long rules are rejected before the grammar is compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, GrammarLimits, Vocabulary
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from stepgraph.sampling.grammar.xgrammar_lib import ebnf

VOCABULARY = Vocabulary.printable()
ENDLESS = {
    "endless": Constraint.ebnf('root ::= "x" | "b" endless\nendless ::= "c" endless'),
    "z": Constraint.ebnf('root ::= "x" z{0,5}\nz ::= "a" z'),
    "tag": Constraint.ebnf('root ::= TagDispatch(("x", tag), loop_after_dispatch=true, excludes=())\ntag ::= "c" tag'),
    "marked": Constraint.ebnf('root ::= TokenTagDispatch((3, marked), loop_after_dispatch=true, excludes=())\nmarked ::= "c" marked'),
    "start": Constraint.ebnf('start ::= "a" start', root="start"),
}
ROWS = {"type": "array", "minItems": 1000}
DOUBLING = [f"r{index} ::= r{index + 1} r{index + 1}" for index in range(60)]
LONG = {
    "2^60 letters": Constraint.ebnf("\n".join(['root ::= "x" | "b" r0', *DOUBLING, 'r60 ::= "a"'])),
    "counts of counts": Constraint.ebnf('root ::= "x" | (("a"{1000}){1000}){1000}'),
    "a million items": Constraint.json_schema({**ROWS, "items": {**ROWS, "items": {"type": "integer"}}}),
}
SERVED = [
    (Constraint.ebnf('root ::= "(" root ")" | root "+" root | "a"'), "((a)+a)"),
    (Constraint.ebnf('root ::= "a" rest\nrest ::= "" | "," root\nunused ::= "u" unused'), "a,a"),
    (Constraint.ebnf('root ::= "ab" never{0}\nnever ::= "x" never'), "ab"),
    (
        Constraint.json_schema({"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}, "required": ["a"]}),
        '{"a": []}',
    ),
    (Constraint.json_schema({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}), "[[null]]"),
    (Constraint.json_object(), '{"a": {}}'),
    (Constraint.regex("(ab){1000}c?"), "ab" * 1000),
    (Constraint.regex("(" * 199 + "a" + ")*" * 199), "aa"),
]
LEAST = [
    ('root ::= "ab" x{3}\nx ::= "c" | "dd"', 5),
    ('root ::= [a-z] [\\u0416-\\u0420] "\\u6f22" [^a] [a-z]*', 7),
    ('root ::= x | y\nx ::= "a" x | "b"\ny ::= "cc"', 2),
    ('root ::= x y\nx ::= y | ""\ny ::= "a" | z\nz ::= y y "bbb"', 5),
    ('root ::= TagDispatch(("x", tag), loop_after_dispatch=true, excludes=())\ntag ::= "ccc"', 3),
]


def compiler(isolation: Literal["process", "none"] = "none", **limits: int) -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY, 1, "xgrammar", isolation=isolation, limits=GrammarLimits(**limits))


def after(compiler: GrammarCompiler, constraint: Constraint, text: str) -> Matcher:
    matcher = compiler.compile(constraint).matcher()
    assert all(matcher.accept_token(VOCABULARY.tokens.index(letter.encode())) for letter in text)
    return matcher


def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ebnf, "shortest_texts", lambda parts, least_bytes: {})


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_endless_rule_is_named_in_the_error(isolation: Literal["process", "none"]) -> None:
    with_worker = compiler(isolation)
    for rule, constraint in ENDLESS.items():
        with pytest.raises(ValueError, match=f"cannot be compiled: rule {rule}: no text of finite length satisfies it"):
            with_worker.compile(constraint)
    for constraint in LONG.values():
        with pytest.raises(
            ValueError, match=r"cannot be compiled: GrammarLimits.least_bytes: got [\d,]+ bytes that rule \w+ leads to, expected"
        ):
            with_worker.compile(constraint)
    with_worker.close()


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ("root ::= root{0}", "root"),
        ("root ::= (root{0,5})", "root"),
        ('root ::= "x" a\na ::= b\nb ::= a{0} ""', "b"),
        ('root ::= "x"\nunused ::= unused{0}', "unused"),
    ],
)
def test_a_rule_that_is_only_a_repetition_of_itself_is_refused(grammar: str, rule: str) -> None:
    """The library would end the worker process with SIGSEGV."""
    for with_worker in (compiler("process"), GrammarCompiler(VOCABULARY, isolation="process")):
        with pytest.raises(ValueError, match=f"cannot be compiled: rule {rule}: got only a repetition of itself, expected a text or"):
            with_worker.compile(Constraint.ebnf(grammar))
        assert with_worker.compile(Constraint.ebnf('root ::= "x" | root{0}')).backend == "xgrammar"
        assert with_worker.stats.workers_started == 1
        with_worker.close()


def test_a_syntax_error_quotes_the_line_of_the_grammar() -> None:
    cases = {
        'root ::= "x" a\na ::= [z-a] | ': "got 'a ::= [z-a] | ' at line 2, column 8: Invalid character class: lower bound",
        'root ::= a\na ::= "é" b': "got 'a ::= \"é\" b' at line 2, column 11: Rule",
        'root ::= "\\x41" | | . $': "got 'root ::= \"\\\\x41\" | | . $' at line 1, column 23: Unexpected character: $",
        'root ::= "é" “a”': "got 'root ::= \"é\" “a”' at line 1, column 14: Unexpected character: “",
        "\ufeffroot ::= [a]": "got '\\ufeffroot ::= [a]' at line 1, column 1: Unexpected character: \ufeff",
        "root ::= <[9]>": "got 'root ::= <[9]>' at line 1, column 10: Unexpected character: <; a grammar describes text, not tokens: write",
        "root : [a]": "got 'root : [a]' at line 1, column 6: Unexpected character: ':'; write a rule as NAME ::= BODY",
        "root ::= # no body": "got 'root ::= # no body' at the end of the last line: Expect element",
        'root ::= . "." .{2} [z-a] .': "got 'root ::= . \".\" .{2} [z-a] .' at line 1, column 22: Invalid character class: lower bound",
        'root ::= ("x"': "got 'root ::= (\"x\"' at the end of the last line: ",
        'a ::= "x"': "root: got 'root', expected the name of a rule of the grammar",
        'a ::= "é"': "root: got 'root', expected the name of a rule of the grammar",
    }
    for isolation in ("none", "process"):
        with_worker = GrammarCompiler(VOCABULARY, 1, isolation=isolation)
        for grammar, message in cases.items():
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared
                with_worker.compile(Constraint.ebnf(grammar))
            assert str(caught.value).startswith(f"constraint ebnf: cannot be compiled: {message}"), caught.value
        with_worker.close()


def test_a_fault_of_the_library_does_not_name_its_sources() -> None:
    matcher: Any = compiler().compile(Constraint.regex("a")).matcher()
    matcher.library_matcher = SimpleNamespace(is_terminated=lambda: False, accept_token=raised)
    assert not matcher.accept_token(VOCABULARY.tokens.index(b"a")) and matcher.fault == "accept_token: planted"


def raised(token_id: int) -> bool:
    raise RuntimeError("[16:57:45] /project/cpp/grammar_matcher.cc:820: Check failed: (id) is false: planted\n")


@pytest.mark.parametrize("rule", ["endless", "tag", "marked"])
def test_first_mask_does_not_reveal_an_endless_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unguarded(monkeypatch)
    assert compiler().compile(ENDLESS[rule]).matcher().forced_bytes() == b""


def test_forced_text_of_a_later_state_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = Constraint.ebnf("\n".join(['root ::= "x" | "b" r0', *DOUBLING[:12], 'r12 ::= "a"']))
    with pytest.raises(ValueError, match=r"GrammarLimits.least_bytes: got 1,024 bytes that rule r2 leads to, expected at most 1,000$"):
        compiler(least_bytes=1000).compile(shorter)
    unguarded(monkeypatch)
    assert after(compiler(least_bytes=1000), shorter, "b").forced_bytes() == b"a" * 4096


@pytest.mark.parametrize(("constraint", "text"), SERVED)
def test_finite_recursion_compiles(constraint: Constraint, text: str) -> None:
    assert after(compiler(), constraint, text).accept_token(VOCABULARY.stop_token_ids[0])


@pytest.mark.parametrize(("grammar", "size"), LEAST)
def test_shortest_text_is_exact(grammar: str, size: int) -> None:
    compiler(least_bytes=size).compile(Constraint.ebnf(grammar))
    with pytest.raises(ValueError, match=f"GrammarLimits.least_bytes: got {size} bytes"):
        compiler(least_bytes=size - 1).compile(Constraint.ebnf(grammar))
