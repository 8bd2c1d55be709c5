"""llguidance driven from C: the same masks and faults as the Python matcher, and no call into a library that differs."""

from __future__ import annotations

import ctypes
import re
from ctypes import c_int32, c_void_p
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, cast

import llguidance
import pytest
from torch import Tensor

from stepgraph import Constraint, Vocabulary
from stepgraph.sampling.c_declarations import constants, structs
from stepgraph.sampling.grammar import CompiledConstraint, GrammarCompiler, GrammarLimits, MaskStatus
from stepgraph.sampling.grammar.link import llguidance_binding, native
from stepgraph.sampling.grammar.link.llguidance_binding import MAX_LEXER_UPDATES, LLGuidanceApi
from stepgraph.sampling.grammar.link.native import NativeLibrary, NativeLink, NativeRow
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, advance
from stepgraph.sampling.grammar.llguidance_lib.grammar import LLGuidanceGrammar, LLGuidanceMatcher
from stepgraph.sampling.native import Unavailable, find_library
from tests.helpers.link_bench import LLGUIDANCE_COMPILER, A, LinkPair, Memory, resident_bytes, run_round
from tests.helpers.link_bench import native_link as open_link
from tests.helpers.planted import callbacks
from tests.helpers.toy_engines import VOCABULARY, Setup, finish, make_engine, needs_native, plain
from tests.sampling.grammar.llguidance_lib.test_llguidance import differences

pytestmark = needs_native

NESTED = Constraint.lark('start: x+\nx: "(" x ")" | /[a-z]+/ | "[" x "]"')
# After "cc" the grammar requires a byte that no token contains.
DEAD_END = Constraint.lark('start: (/[ab]/ | "cc\\x01")* "x"?')
GRAMMARS = [
    NESTED,
    DEAD_END,
    Constraint.json_object(backend="llguidance"),
    Constraint.regex("[a-z ]{0,30}", "llguidance"),
    Constraint.json_schema({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["b"]}]}),
]


class LLGuidancePair(LinkPair):
    """Both links over grammars of llguidance. `bug`: a replaced function of its C API in the native link."""

    def __init__(self, seed: int, bug: tuple[str, Any] | None = None) -> None:
        super().__init__(1 + seed % 5, seed % 6, Random(seed), threads=1 + seed % 3)
        self.bug = bug

    def admit_random(self, slot: int) -> None:
        grammar = LLGUIDANCE_COMPILER.compile(self.random.choice(GRAMMARS))
        self.admit(slot, grammar, [grammar.matcher(), grammar.matcher()])
        request = self.requests[slot]
        assert request is not None
        row = request.rows[1]
        assert isinstance(row, NativeRow)
        if self.bug:
            replace_function(row, *self.bug)


def replace_function(row: NativeRow, name: str, entry: Any) -> None:
    assert row._library.llguidance is not None
    library = structs.llguidance_library.from_buffer_copy(row._library.llguidance.struct)
    setattr(library, name, c_void_p.from_buffer(entry).value)
    row.struct.library, row.planted = ctypes.addressof(library), library  # type: ignore[attr-defined]


def run_pairs(seeds: range, rounds: int, bug: tuple[str, Any] | None = None) -> set[int]:
    """The mask statuses that occurred."""
    seen = set[int]()
    for seed in seeds:
        pair = LLGuidancePair(seed, bug)
        for _ in range(rounds):
            pair.round(masked=seed % 2 == 0)
            seen.update(pair.memories[1].tags[:, :, 3].flatten().tolist())
    return seen


def test_native_llguidance_rows_equal_the_python_matcher() -> None:
    seen = run_pairs(range(24), 20)
    assert seen >= {MaskStatus.OK, MaskStatus.COMPLETE, MaskStatus.TERMINATED, MaskStatus.DEAD_END, MaskStatus.ILLEGAL}


@pytest.mark.soak
def test_native_llguidance_rows_equal_the_python_matcher_in_long_runs() -> None:
    run_pairs(range(1000, 2000), 40)


ZERO = ctypes.CFUNCTYPE(c_int32, c_void_p, ctypes.c_size_t)(lambda *_: 0)
NO_ERROR = ctypes.CFUNCTYPE(c_void_p, c_void_p)(lambda *_: None)


@pytest.mark.parametrize("bug", [("rollback", ZERO), ("get_error", NO_ERROR), ("is_accepting", ZERO)], ids=lambda bug: bug[0])
def test_the_comparison_detects_a_bug_in_the_library(bug: tuple[str, Any]) -> None:
    """`get_error`: only its message distinguishes a dead end from a fault."""
    with pytest.raises(AssertionError):
        run_pairs(range(24), 20, bug)


class NativeMatcher:
    """The functions that a native row calls, with the interface of a Python matcher."""

    fault = ""

    def __init__(self, row: NativeRow, vocabulary: Vocabulary) -> None:
        self._row, self._vocabulary = row, vocabulary
        functions = structs.llguidance_library.from_address(row.struct.library).functions
        self._functions = {name: signature(at) for name, signature in callbacks.items() if (at := getattr(functions, name))}
        self._error = ctypes.create_string_buffer(constants.FAULT_BYTES)

    def _call(self, name: str, *values: int) -> int:
        answer: int = self._functions[name](self._row.struct.library, self._row.struct.matcher, *values, ctypes.addressof(self._error))
        assert answer >= 0, self._error.value
        return answer

    def accept_token(self, token_id: int) -> bool:
        return bool(self._call("accept", token_id))

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        status = self._call("fill", masks[index].data_ptr(), masks.shape[1], 0)
        return MaskStatus(status) if status else self._vocabulary.classify(masks[index].numpy())

    def rollback(self, num_tokens: int) -> None:
        self._call("rollback", num_tokens)


def test_a_mask_after_a_rollback_is_that_of_the_new_path() -> None:
    """The negative control: it differs if no mask is computed at the point where the paths diverge."""
    bug = False

    def native_matcher(compiled: CompiledConstraint) -> Any:
        row = open_link(Memory.make(1, 0, compiled.vocabulary.mask_words)).row(1, compiled.matcher())
        if bug:
            replace_function(row, "compute_mask", ZERO)
        return NativeMatcher(row, compiled.vocabulary)

    assert differences(Random(1), 300, native_matcher) == 0
    bug = True
    assert differences(Random(1), 300, native_matcher) > 0


def rows_of(memory: Memory, compiled: CompiledConstraint, count: int = 1) -> tuple[NativeLink, list[NativeRow]]:
    link = open_link(memory)
    return link, [link.row(1 + slot, compiled.matcher()) for slot in range(count)]


def test_a_step_that_exceeds_the_librarys_limits_is_the_rows_fault() -> None:
    branches = " | ".join(f'"a" /{"b" * (1 + index % 50)}c{{{1 + index}}}/' for index in range(2100))
    compiled = LLGUIDANCE_COMPILER.compile(Constraint.lark(f'start: "x" ({branches})'))
    matcher = cast(LLGuidanceMatcher, compiled.matcher())
    matcher.accept_token(VOCABULARY.tokens.index(b"x"))
    memory = Memory.make(1, 1)
    link, (row,) = rows_of(memory, compiled)
    run_round(memory, link, [row], [VOCABULARY.tokens.index(b"x")], steps=(BEGIN_ROUND, COMMIT, advance(1), END_ROUND))
    assert row.fault == matcher.fault and row.fault.startswith("accept_token: ") and "items; max is 2000" in row.fault
    assert memory.tags[:, 0, 3].tolist() == [MaskStatus.OK, MaskStatus.FAULT]


def test_hundreds_of_rows_leak_nothing() -> None:
    compiled = LLGUIDANCE_COMPILER.compile(NESTED)
    memory = Memory.make(4, 3)
    grown = []
    for number in range(200):
        link, rows = rows_of(memory, compiled, 4)
        run_round(memory, link, rows, [A] * 3)
        assert link.stats.fills == 4 * 4
        link.close()
        del link, rows
        if number % 50 == 49:
            grown.append(resident_bytes())
    assert grown[-1] - grown[0] < 4 << 20, "a matcher takes some hundred kilobytes"


def test_lexers_of_the_first_rows_are_kept_for_later_rows() -> None:
    compiled = GrammarCompiler(VOCABULARY, backend="llguidance").compile(NESTED)
    grammar = cast(LLGuidanceGrammar, compiled.grammar).native
    assert grammar is not None
    memory, starts = Memory.make(1, 3), []
    for _ in range(MAX_LEXER_UPDATES + 3):
        starts.append(grammar.start)
        link, rows = rows_of(memory, compiled)
        run_round(memory, link, rows, [A] * 3)
        assert rows[0].fault == "" and memory.tags[:, 0, 3].tolist() == [MaskStatus.OK] * 4
        link.close()
        del link, rows
    assert len(set(starts)) == MAX_LEXER_UPDATES + 1 and grammar.lexer_updates == MAX_LEXER_UPDATES


@pytest.mark.parametrize("link", ["native", "python"])
def test_a_lexer_filled_by_other_texts_ends_no_text(link: str) -> None:
    """Together the texts need far more lexer states than there is room for; each one alone needs fewer."""
    counted = Constraint.regex("[a-z]{0,300}x(ab|cd|[a-m]*q|[e-z]{3,40}b)*[0-9]", "llguidance")
    with make_engine(Setup(k=0, max_rows=2, host_link=link), grammar_limits=GrammarLimits(lexer_states=100)) as engine:
        jobs = [engine.submit([seed], constraint=counted, max_new_tokens=40) for seed in range(1, 7)]
        finish(engine)
    assert [(job.tokens, job.error) for job in jobs] == [(plain([seed], 40, counted).tokens, "") for seed in range(1, 7)]


# versions and layouts


DIFFERENCES: list[tuple[str, Any, str]] = [
    ("VERSION_PATTERN", re.compile(rb"llguidance@2"), r"C API: got llguidance@1\.9\.\d+ .*, expected llguidance@1.9.1 or a later 1.9"),
    ("SYMBOLS", {"free": "llg_drop_matcher"}, "does not export its C API: .*llg_drop_matcher"),
    ("DEFAULTS", {**llguidance_binding.DEFAULTS, "max_items_in_row": 1}, "LlgConstraintInit has another layout: got .*, expected .* 1,"),
]


@pytest.mark.parametrize(("name", "value", "message"), DIFFERENCES, ids=[name for name, _, _ in DIFFERENCES])
def test_a_library_that_differs_is_not_called(monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str) -> None:
    monkeypatch.setattr(llguidance_binding, name, value)
    with pytest.raises(Unavailable, match=message):
        LLGuidanceApi(llguidance._lib)


def test_an_unknown_llguidance_is_driven_from_python_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_binding, "VERSION_PATTERN", re.compile(b"llguidance@2"))
    monkeypatch.setattr(native, "load", lambda: NativeLibrary(find_library()))
    llguidance_binding.llguidance_api.cache_clear()
    constraint = Constraint.regex("[a-c]{3,6}x", backend="llguidance")
    why = r"llguidance's C API: got llguidance@1\.9\.\d+ .*, expected "
    with pytest.raises(RuntimeError, match=f"host_link 'native': {why}"):
        make_engine(Setup(k=2, host_link="native"))
    with pytest.warns(RuntimeWarning, match=f"driven from Python, under the GIL: no native link, {why}"):
        engine = make_engine(Setup(k=2))
    try:
        assert re.search(f"python, under the GIL: no native link, {why}", engine._parts.host_link.name)
        job = engine.submit([1], constraint=constraint, max_new_tokens=20)
        finish(engine)
    finally:
        engine.close()
        llguidance_binding.llguidance_api.cache_clear()
    assert job.tokens == plain([1], 20, constraint).tokens


def test_a_library_without_a_c_api_is_reported(tmp_path: Path) -> None:
    module = ModuleType("_lib")
    module.__file__ = str(tmp_path / "none.so")
    with pytest.raises(Unavailable, match=r"does not export its C API: .*none\.so"):
        LLGuidanceApi(module)


def test_c_and_python_use_the_same_vocabulary() -> None:
    """Several stop tokens, control tokens, padding, empty tokens, tokens of invalid UTF-8."""
    tokens = [b"a", b"</s>", b"", b"b", b"<|c|>", b"\xff", b"a", b"\xc3", b"\xa9", b"<e>"]
    vocabulary = Vocabulary(tokens, stop_token_ids=[9, 1], logits_width=70, control_token_ids=[4])
    compiler = GrammarCompiler(vocabulary, backend="llguidance")
    for constraint in (Constraint.regex("[ab\u00e9]*"), Constraint.lark("start: /(?s:.*)/"), replace(NESTED)):
        compiled = compiler.compile(constraint)
        memory = Memory.make(1, 0, vocabulary.mask_words)
        link, (row,) = rows_of(memory, compiled)
        run_round(memory, link, [row], steps=(BEGIN_ROUND, COMMIT, END_ROUND))
        found = memory.masks[0, 0].clone()
        compiled.matcher().fill_next_token_bitmask(memory.masks[0], 0)
        assert found.tolist() == memory.masks[0, 0].tolist() and found.any()


def test_a_grammar_with_a_nul_is_rejected() -> None:
    """A C string ends there."""
    with pytest.raises(ValueError, match="#: lark: contains a NUL character; write"):
        LLGUIDANCE_COMPILER.compile(replace(NESTED, payload='start: "a\0b"'))
    grammar = LLGUIDANCE_COMPILER.compile(Constraint.lark("start: /a\\x00b/ | /c/")).grammar
    assert cast(LLGuidanceGrammar, grammar).native is not None
