"""The choice of the grammar library, coverage reports, and constraints in the form of response formats and tags."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import threading
import unicodedata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, GrammarLimits, coverage
from stepgraph.sampling.grammar.automaton.grammar import AutomatonBuilder
from stepgraph.sampling.grammar.automaton.library import UnfitError
from stepgraph.sampling.grammar.compile import backends
from stepgraph.sampling.grammar.compile.compiler import Isolation
from stepgraph.sampling.grammar.compile.limits import MIB, CompileAbortedError
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.schema import patterns
from tests.helpers.c_library import AUTOMATON, EACH_BACKEND, needs_c
from tests.helpers.grammar_bombs import PATTERNS, SCHEMAS
from tests.helpers.grammar_texts import TAGS, accepts
from tests.helpers.growth import growth
from tests.helpers.kept_worker import keep_worker
from tests.helpers.schema_cases import BYTES, takes
from tests.sampling.grammar.compile.test_compiler import GREEDY, SLOW

AUTO = GrammarCompiler(BYTES, max_threads=1)
COMBINED: dict[str, Any] = {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}]}
NEITHER = {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}, "patternProperties": {"(?<=a)": {}}}
ONE_TAG = Constraint.ebnf('root ::= TagDispatch(("<", tag), loop_after_dispatch=false, excludes=())\ntag ::= "a"')


@pytest.fixture(autouse=True)
def _one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_worker(monkeypatch)


@needs_c
def test_auto_chooses_an_automaton_without_a_reason() -> None:
    compiled = AUTO.compile(Constraint.json_schema({"type": "integer"}))
    assert (compiled.backend, compiled.reason) == ("automaton", "")


@pytest.mark.parametrize(
    ("constraint", "limits", "reason", "isolation"),
    [
        (
            Constraint.regex("[ab]*a[ab]{40}"),
            {},
            "GrammarLimits.automaton_states: got a grammar that takes more, expected at most 2",
            "none",
        ),
        (Constraint.ebnf('root ::= root "+" root | "a"'), {}, "it has a recursion that is not enclosed in literal text", "process"),
        (ONE_TAG, {}, "its tags do not repeat or exclude texts", "none"),
        (Constraint.json_schema(COMBINED["allOf"][0]), {"automaton_bytes": 9}, "GrammarLimits.automaton_bytes: got a grammar", "process"),
    ],
)
@needs_c
def test_auto_falls_back_to_xgrammar_where_no_automaton_fits(
    constraint: Constraint, limits: dict[str, int], reason: str, isolation: Isolation
) -> None:
    bounds = GrammarLimits(**limits)
    compiler = GrammarCompiler(BYTES, max_threads=1, limits=bounds, isolation=isolation)
    compiled = compiler.compile(constraint)
    assert compiled.backend == "xgrammar" and compiled.reason.startswith(f"automaton: {reason}")
    compiler.close()
    found = coverage(constraint, bounds)
    assert found.backend == "xgrammar" and found.unsupported["xgrammar"] == ()
    assert [part.reason.startswith(reason) for part in found.unsupported["automaton"]] == [True]


MANY = {"properties": {f"field_{index}": {"type": "string"} for index in range(150)}}


@needs_c
@pytest.mark.parametrize(
    ("schema", "limits", "backend", "reason"),
    [
        (COMBINED, {"automaton_steps": 1}, "xgrammar", "automaton: GrammarLimits.automaton_steps: got a grammar"),
        pytest.param(MANY, {"automaton_steps": 1}, "llguidance", "xgrammar: compiling is expected to take ", marks=pytest.mark.slow),
    ],
)
def test_schema_without_an_automaton_goes_to_the_library_that_is_expected_to_be_fast(
    schema: Any, limits: dict[str, int], backend: str, reason: str
) -> None:
    constraint, bounds = Constraint.json_schema(schema, objects="standard"), GrammarLimits(**limits)
    compiled = GrammarCompiler(BYTES, max_threads=1, limits=bounds, isolation="none").compile(constraint)
    assert compiled.backend == backend and compiled.reason.startswith("automaton: ") and reason in compiled.reason
    found = coverage(constraint, bounds)
    assert found.backend == backend and (found.reason.startswith(reason) if backend == "llguidance" else found.reason == "")


def test_nested_parts_without_an_automaton_go_to_the_library_with_fast_masks() -> None:
    unfit = UnfitError("it may begin a nested part or continue, with the same text", 1000)
    reasons, order = backends.order_by_cost(("xgrammar", "llguidance"), "json_schema", unfit)
    assert order == ["llguidance", "xgrammar"] and reasons == {"xgrammar": "a mask is expected to take up to 55 ms"}
    assert backends.order_by_cost(("xgrammar", "llguidance"), "json_schema", UnfitError("another reason", 1000))[1][0] == "xgrammar"


@needs_c
def test_a_limit_that_only_the_automaton_reaches_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def aborted(*_: object) -> None:
        raise CompileAbortedError("GrammarLimits.compile_seconds: got no answer")

    monkeypatch.setattr(AutomatonBuilder, "build", aborted)
    compiled = GrammarCompiler(BYTES, max_threads=1).compile(Constraint.regex("a"))
    assert (compiled.backend, compiled.reason) == ("xgrammar", "automaton: GrammarLimits.compile_seconds: got no answer")


def test_errors_of_a_lark_grammar_are_those_of_llguidance() -> None:
    compiled = AUTO.compile(Constraint.lark('start: "a"'))
    assert (compiled.backend, compiled.reason) == ("llguidance", "")
    with pytest.raises(ValueError, match=r"^constraint lark: cannot be compiled: .*other") as caught:
        AUTO.compile(Constraint.lark('start: "a" other'))
    assert "xgrammar" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be compiled: #: lark: is a notation of llguidance; xgrammar expects ebnf"):
        GrammarCompiler(BYTES, backend="xgrammar", max_threads=1).compile(Constraint.lark('start: "a"'))


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_backends_accept_the_same_texts_of_a_schema(backend: BackendChoice) -> None:
    compiled = AUTO.compile(Constraint.json_schema(COMBINED, backend=backend))
    assert takes(compiled, '{"a": 1, "b": null}') and not takes(compiled, '{"a": 1}') and not takes(compiled, '{"a": "", "b": 1}')


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_explicit_backend_is_the_only_one_tried(backend: BackendChoice) -> None:
    constraint = Constraint.json_schema({"type": "integer"}, backend=backend)
    assert AUTO.compile(constraint).backend == backend
    assert GrammarCompiler(BYTES, max_threads=1, backend=backend).compile(Constraint.regex("a")).backend == backend
    other = Constraint.ebnf('root ::= "a"') if backend == "llguidance" else Constraint.lark('start: "a"')
    with pytest.raises(ValueError, match=f"constraint {other.kind}: cannot be compiled: #: {other.kind}: is a notation of"):
        GrammarCompiler(BYTES, max_threads=1, backend=backend).compile(other)


def test_error_lists_the_reasons_of_all_libraries() -> None:
    with pytest.raises(ValueError, match=r"cannot be compiled: #/not: not: got .* not enforced with uniqueItems"):
        AUTO.compile(Constraint.json_schema({"not": {"uniqueItems": True}}))


def test_errors_of_a_grammar_in_gbnf_are_those_of_its_libraries() -> None:
    with pytest.raises(ValueError, match=r"^constraint ebnf: cannot be compiled: got 'root ::= \"a' at") as caught:
        AUTO.compile(Constraint.ebnf('root ::= "a'))
    assert "llguidance" not in str(caught.value)


@pytest.mark.parametrize("backend", [AUTOMATON, "xgrammar"])
def test_a_dot_in_a_grammar_is_any_character(backend: BackendChoice) -> None:
    compiled = GrammarCompiler(BYTES, max_threads=1, backend=backend).compile(Constraint.ebnf('root ::= .{2} "." a.b # .\na.b ::= [.]'))
    assert takes(compiled, "\u00e9\n..") and takes(compiled, "\0...") and not takes(compiled, "\u00e9\n.x") and not takes(compiled, "a..")


@needs_c
def test_coverage_lists_every_keyword_with_its_pointer() -> None:
    found = coverage(Constraint.json_schema(NEITHER))
    assert not found.enforced and found.backend is None
    assert {(part.where, part.keyword) for part in found.unenforced} == {("#", "patternProperties"), ("#/properties/a~1b", "uniqueItems")}
    assert found.unsupported["automaton"] == found.unsupported["xgrammar"] == found.unsupported["llguidance"]
    found = coverage(Constraint.json_schema(COMBINED))
    assert found.backend == "automaton" and found.unsupported == dict.fromkeys(backends.BACKENDS, ()) and found.unenforced == ()
    assert coverage(Constraint.lark('start: "a"')).backend == "llguidance"
    assert coverage(Constraint.regex("a+")).unsupported == {"automaton": (), "xgrammar": (), "llguidance": ()}
    assert [part.where for part in coverage(Constraint.regex("(")).unenforced] == ["#", "#", "#"]


@pytest.mark.parametrize(
    "constraint",
    [
        lambda length: Constraint.regex("[" * length),
        lambda length: Constraint.ebnf("root ::= " + "[" * length),
        lambda length: Constraint.ebnf('root ::= "' + r"\"" * length),
        lambda length: Constraint.lark('start: "' + r"\"" * length),
        lambda length: Constraint.lark("start: /" + r"\/" * length),
        lambda length: Constraint.lark("start: %json {} # json_0_" + "_" * length * 5),
    ],
    ids=["regex", "ebnf classes", "ebnf texts", "lark texts", "lark patterns", "lark schemas"],
)
def test_checks_take_time_linear_in_the_text(constraint: Callable[[int], Constraint]) -> None:
    def check(length: int) -> None:
        with contextlib.suppress(ValueError):
            AUTO.check(constraint(length))

    check(10)
    assert growth(check, 500, 10_000) < 100, "20 if linear, 400 if quadratic"


def test_the_categories_of_unicode_are_read_once_for_all_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    def category(char: str) -> str:
        calls.append(char)
        return unicodedata.category(char)

    monkeypatch.setattr(patterns, "unicodedata", SimpleNamespace(category=category))
    patterns._chars_by_category.cache_clear()
    patterns._property.cache_clear()
    AUTO.check(Constraint.regex("".join(rf"\p{{{prefix}{name}}}" for prefix in ("", "gc=", "General_Category=") for name in "LMNPSZC")))
    assert len(calls) == sys.maxunicode + 1


def test_a_long_pattern_with_properties_is_read_by_the_compile() -> None:
    AUTO.check(Constraint.regex(r"\p{L}" + "a" * 100_000 + "("))


def test_brackets_of_comments_are_not_counted() -> None:
    AUTO.check(Constraint.ebnf("# " + "(" * 201 + '\nroot ::= "a"'))
    with pytest.raises(ValueError, match=r"GrammarLimits.max_nesting: got 201 brackets"):
        AUTO.check(Constraint.ebnf('# 6" wide\nroot ::= ' + "(" * 201 + '"a"' + ")" * 201))


BOMBS = {
    "compile_seconds": (SLOW, GrammarLimits(compile_seconds=0.3)),
    "compile_bytes": (GREEDY, GrammarLimits(compile_bytes=40 * MIB)),
    "least_bytes": (Constraint.json_schema(SCHEMAS["nested counts"]()), GrammarLimits(compile_seconds=20)),  # not the kept worker's limits
    "max_nesting": (Constraint.regex(PATTERNS["10,000 groups"]()), GrammarLimits()),
}


def live_workers() -> set[int | None]:
    return {each.pid for each in gc.get_objects() if type(each) is CompileWorker}


@pytest.mark.parametrize("field", BOMBS)
def test_coverage_reports_the_limit_that_a_compile_reaches(field: str) -> None:
    bomb, limits = BOMBS[field]
    workers = live_workers()
    found = coverage(bomb, limits)
    (reason,) = {part.reason for part in found.unenforced}
    assert found.backend is None and reason.startswith(f"GrammarLimits.{field}: got ")
    assert live_workers() <= workers, "the worker is still alive"
    compiler = GrammarCompiler(BYTES, max_threads=1, limits=limits, isolation="process")
    with pytest.raises(ValueError, match=re.escape(f"constraint {bomb.kind}: cannot be compiled: {reason}")):
        compiler.compile(bomb)
    compiler.close()


def test_a_submit_within_another_that_opens_a_library_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a signal handler."""
    compiler, opened, real = GrammarCompiler(BYTES, max_threads=1), list[str](), backends.make_builder

    def interrupted(name: str, *arguments: Any) -> Any:
        opened.append(name)
        if len(opened) == 1:
            compiler.check(Constraint.regex("b"))
        return real(name, *arguments)

    monkeypatch.setattr(backends, "make_builder", interrupted)
    thread = threading.Thread(target=compiler.check, args=(Constraint.regex("a"),), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and len(opened) == 2


def test_coverage_stops_after_the_time_of_one_compile() -> None:
    properties = {f"p{index}": {"uniqueItems": True} for index in range(300)}
    constraint = Constraint.json_schema({"type": "object", "properties": properties}, backend="xgrammar")
    found = coverage(constraint, GrammarLimits(compile_seconds=1e-6))
    assert len(found.unenforced) == 1 and found.backend is None


@needs_c
def test_missing_llguidance_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "is_installed", lambda name: False)
    alone = GrammarCompiler(BYTES, max_threads=1)
    assert alone.compile(Constraint.json_schema({"type": "integer"})).backend == "automaton"
    with pytest.raises(ValueError, match=r"compiled: llguidance is not installed; pip install 'stepgraph\[llguidance\]'"):
        alone.compile(Constraint.lark('start: "a"'))
    assert "not installed" in coverage(Constraint.lark('start: "a"')).unsupported["llguidance"][0].reason


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_structural_tags_in_free_text_enforce_their_schemas(backend: BackendChoice) -> None:
    constraint = Constraint.structural_tag(TAGS, backend=backend)
    for good in (b"", b"free text", b"a < b <f <f", b"<f=a>10</f>", b"x<f=a>1</f>y<f=b>[]</f><f=a>0</f>"):
        assert accepts(constraint, good), good
    for bad in (b"<f=", b"x <f=c", b"<f=a>", b"<f=a>1", b"<f=a>1</g>", b"<f=a>1</f", b"<f=b>1</f>", b'<f=a>"1"</f>', b"x<f=a>1</f>y<f=b>"):
        assert not accepts(constraint, bad), bad
    structures = [{"begin": f"<f={name}>", "schema": {"type": "array", "uniqueItems": name == "b"}, "end": ""} for name in "ab"]
    refused = Constraint.structural_tag({"triggers": ["<f="], "structures": structures}, backend=backend)
    with pytest.raises(ValueError, match="constraint structural_tag: cannot be compiled: '<f=b>': #: uniqueItems: got true, which is enf"):
        AUTO.compile(refused)


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_each_tag_of_a_list_without_an_opening_has_its_whole_begin(backend: BackendChoice) -> None:
    tag = {"triggers": ["<f="], "structures": [{"begin": "<f=a>", "schema": {"const": 1}, "end": "</f>"}], "separator": ",", "closing": "]"}
    compiled = AUTO.compile(Constraint.structural_tag(tag, backend=backend))
    assert takes(compiled, "x<f=a>1</f>]") and takes(compiled, "<f=a>1</f>,<f=a>1</f>,<f=a>1</f>]")
    assert not takes(compiled, "<f=a>1</f>,a>1</f>]")


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_corrections_of_json_grammars_apply_inside_tags(backend: BackendChoice) -> None:
    string = {"type": "string", "maxLength": 2}
    structures = [{"begin": f"<{name}>", "schema": string, "end": f"</{name}>"} for name in ("root", "basic_string", "a")]
    compiled = AUTO.compile(Constraint.structural_tag({"triggers": ["<root>", "<b", "<a>"], "structures": structures}, backend=backend))
    assert takes(compiled, 'say <root>"ab"</root> and <basic_string>"é"</basic_string>') and takes(compiled, '<a>""</a>')
    assert (
        not takes(compiled, '<root>"abc"</root>') and not takes(compiled, '<a>"\x01"</a>') and not takes(compiled, '<basic_string>"a"</a>')
    )


def test_response_formats_of_openai() -> None:
    inner = {"name": "answer", "description": "what it is", "strict": True, "schema": {"type": "integer"}}
    assert Constraint.response_format({"type": "text"}) is None
    assert Constraint.response_format({"type": "json_object"}) == Constraint.json_object()
    for each in (inner, inner | {"description": None, "strict": None, "unknown": None}):
        assert Constraint.response_format({"type": "json_schema", "json_schema": each}) == Constraint.json_schema({"type": "integer"})
    assert Constraint.response_format({"type": "structural_tag", **TAGS}) == Constraint.structural_tag(TAGS)
    assert Constraint.response_format({"type": "json_object"}, True, "llguidance") == Constraint.json_object(True, "llguidance")


INNER: dict[str, Any] = {"name": "a", "schema": {}}
NAMED = {"type": "json_schema", "json_schema": INNER}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("json_object", "response_format: got str"),
        ({}, "response_format.type: got None"),
        ({"type": ["text"]}, "response_format.type: got"),
        ({"type": "json"}, "response_format.type: got 'json', expected one of text, json_object, json_schema"),
        ({"type": "text", "json_schema": {}}, "response_format.json_schema: got an unknown field"),
        ({"type": "json_schema"}, "response_format.json_schema: got None"),
        ({"type": "json_schema", "schema": {}}, "response_format.schema: got an unknown field, expected json_schema, type; a schema is"),
        ({"type": "json_object", "schema": {}}, "response_format.schema: got an unknown field, expected type; a schema is json_schema"),
        ({**NAMED, "strict": True}, "response_format.strict: got an unknown field"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name: got None"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema: got None"),
        ({**NAMED, "json_schema": INNER | {"strict": "yes"}}, "response_format.json_schema.strict: got 'yes'"),
        ({**NAMED, "json_schema": INNER | {"x": 1}}, "json_schema.x: got an unknown field"),
        ({**NAMED, "json_schema": INNER | {"description": 1}}, "description: got 1"),
    ],
)
def test_response_format_with_ignored_fields_raises(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r": got .*, expected ") as caught:
        Constraint.response_format(value)
    assert message in str(caught.value)


TAG = {"begin": "<a>", "schema": {}, "end": ""}
TRIGGERS = [f"<{index:04}>" for index in range(1001)]


@pytest.mark.parametrize(
    ("tag", "field"),
    [
        ([], ""),
        ({"triggers": ["<"], "structures": [TAG], "at_least_one": True}, ".at_least_one"),
        ({"triggers": [], "structures": [TAG]}, ".triggers"),
        ({"triggers": [""], "structures": [TAG]}, ".triggers"),
        ({"triggers": TRIGGERS, "structures": [{**TAG, "begin": begin} for begin in TRIGGERS]}, ".triggers"),
        ({"triggers": ["<"], "structures": []}, ".structures"),
        ({"triggers": ["<"], "structures": ["<a>"]}, ".structures[0]"),
        ({"triggers": ["<"], "structures": [{**TAG, "grammar": ""}]}, ".structures[0]"),
        ({"triggers": ["<b"], "structures": [TAG]}, ".structures[0].begin"),
        ({"triggers": ["<", "["], "structures": [TAG]}, ".triggers"),
        ({"triggers": ["<", "<a"], "structures": [TAG]}, ".triggers"),
        ({"triggers": ["<", "["], "structures": [TAG], "opening": "<["}, ".triggers"),
        ({"triggers": ["<"], "structures": [{**TAG, "schema": True}]}, ".structures[0].schema"),
        ({"triggers": ["<"], "structures": [{**TAG, "end": None}]}, ".structures[0].end"),
        ({"triggers": ["<"], "structures": [TAG], "alternative": TAG}, ".alternative"),
        ({"structures": [TAG], "alternative": {**TAG, "end": None}}, ".alternative.end"),
    ],
)
def test_malformed_tags_raise_with_the_field(tag: Any, field: str) -> None:
    with pytest.raises(ValueError, match=r": got .*, expected ") as caught:
        Constraint.structural_tag(tag)
    assert str(caught.value).startswith(f"Constraint.structural_tag{field}: got")


def test_coverage_stops_at_a_part_that_cannot_be_removed() -> None:
    constraint = Constraint.json_schema({"anyOf": [5, {"type": "string", "pattern": 1}]})
    found = coverage(constraint)
    assert found.backend is None
    parts = {name: [part.where for part in parts] for name, parts in found.unsupported.items()}
    assert parts == {name: ["#/anyOf/0"] for name in backends.backends_for(constraint, "auto")}
