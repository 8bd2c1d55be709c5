"""Masks without matchers: C and a reference in Python are bit-equal, and equal to a host link with the matchers of the same images."""

from __future__ import annotations

import functools
from collections import Counter
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.library import opcheck

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, Vocabulary
from stepgraph.sampling.grammar.automaton.arena import ALIGNMENT
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar
from stepgraph.sampling.grammar.automaton.library import Field
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import advance_fill
from tests.helpers import automaton_cases
from tests.helpers.advance_reference import DeviceTokenTable, ForcedRow, Place, PlaceMatcher, Row, advance_reference
from tests.helpers.c_library import needs_c
from tests.helpers.grammar_rows import RowRounds

pytestmark = needs_c

NO_TOKEN = b"%"  # a byte that no token has, so a text that needs it next is at a dead end
TOKENS = [*(b"" if token == NO_TOKEN else token for token in automaton_cases.VOCABULARY.tokens), b"\n\r", b"\r\r\n"]
MARKED = [
    automaton_cases.CONSTRAINTS["brackets"].after("a"),
    Constraint.regex("[ab]{0,3}").after("]]"),
    Constraint.json_object().after('",'),
    Constraint.regex("[ab]{0,3}").after("]]", limit=3),
    Constraint.json_object().after('",', limit=5),
]
WIDE = Constraint.choice(["".join(Random(0).choices("ab[]", k=1 << 15)), "b"])  # more states than 16 bits can number
CONSTRAINTS = [*automaton_cases.CONSTRAINTS.values(), Constraint.regex("[ab]{1,3}%"), WIDE, WIDE.after("b]"), *MARKED]


@functools.cache
def grammars(aligned: bool = False) -> list[AutomatonGrammar]:
    """Over a vocabulary whose masks have nine words; or twelve, so that rows are aligned."""
    stops, control = automaton_cases.VOCABULARY.stop_token_ids, [NO_TOKEN[0], 285]
    vocabulary = Vocabulary(TOKENS, stops, logits_width=384 if aligned else None, control_token_ids=control)
    compiler = GrammarCompiler(vocabulary, backend="automaton", limits=GrammarLimits(automaton_depth=5))
    found = [compiler.compile(constraint).grammar for constraint in CONSTRAINTS]
    assert all(isinstance(grammar, AutomatonGrammar) for grammar in found)
    return found  # type: ignore[return-value]


@functools.cache
def forcing_grammars(merges: bool = False) -> list[AutomatonGrammar]:
    """Texts without alternatives: nested, counted, long, and beside others; over a vocabulary of merged tokens or one of any tokens."""
    nested = 'root ::= "[{" root "}]" | "[name: <" [0-9] ">"'
    schema = {"type": "object", "properties": {"name": {"type": "boolean"}, "quantity": {"enum": ["alpha", "alphabet"]}}}
    constraints = [
        Constraint.json_schema({**schema, "required": ["name", "quantity"], "additionalProperties": False}),
        Constraint.ebnf(nested),
        Constraint.regex("(total: [0-9]{2}, ){3}"),
        Constraint.choice(["the name of " * 20 + "alpha", "the total"]),
        Constraint.choice(["alpha", "alphabet", "alpha_bet"]),
    ]
    words = [*'al ph alph alpha be alphabet na me name to ta tota l: total: ": }] }]}] th'.split(), " <", "e "]
    words += [] if merges else ["quantity", "the ", " of", "unit_price"]
    base = [bytes([code]) for code in range(0x20, 0x7F)]
    tokens = [*base, *(word.encode() for word in words), b"", b"a", b"<stop>"]
    compiler = GrammarCompiler(Vocabulary(tokens, [len(tokens) - 1]), backend="automaton", limits=GrammarLimits(automaton_depth=5))
    return [compiler.compile(constraint).grammar for constraint in constraints]  # type: ignore[misc]


@pytest.mark.parametrize(("drafts", "rounds"), [(0, 80), (1, 50), pytest.param(4, 50, marks=pytest.mark.slow)])
def test_reference_and_c_equal_the_host_link(drafts: int, rounds: int) -> None:
    counts = Counter[MaskStatus]()
    for seed in range(8):
        world = RowRounds(grammars(), 7, drafts, seed, [advance_reference, advance_fill.out])
        world.run(rounds)
        counts += world.counts
    assert set(counts) == set(MaskStatus) - ({MaskStatus.ILLEGAL} if drafts == 0 else set())


@pytest.mark.parametrize("seed", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.soak)])
def test_forced_tokens_equal_those_of_the_host_link(seed: int) -> None:
    """Drafts chosen one by one, and proposed chains."""
    world = RowRounds(forcing_grammars(), 7, 4, seed, [advance_reference, advance_fill.out], forced=True)
    world.run(30)
    assert world.num_forced > 100, world.num_forced


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_reference_and_c_equal_the_host_link_in_long_runs(seed: int) -> None:
    RowRounds(grammars(), 9, seed % 6, seed + 100, [advance_reference, advance_fill.out]).run(300)


# planted errors


def run_until_found(program: Any, drafts: int = 3, forced: bool = False) -> None:
    def run() -> None:
        for seed in range(12, 32):  # the first one finds every error that is planted here
            RowRounds(forcing_grammars() if forced else grammars(), 7, drafts, seed, [program], forced).run(100)

    with pytest.raises((AssertionError, IndexError)):
        run()


@pytest.mark.parametrize("table", ["NEXT", "LEAVE", "RETURN", "MOVES", "ROW_OF", "status", "CHANGE_VALUE", "CROSS", "START"])
def test_an_error_in_a_table_is_found(table: str) -> None:
    """In every image, one in sixteen entries is replaced by another entry of the same table."""

    def program(*arguments: Any) -> None:
        *before, arena = arguments[:5]
        advance_fill.out(*before, arena if world_arena is None else world_arena(arena), *arguments[5:])

    @functools.cache
    def changed(key: int) -> torch.Tensor:
        arena, offset = held[key].clone(), ALIGNMENT
        for grammar in grammars():
            image = arena[offset : offset + len(grammar.image)].numpy()
            begin = {"START": int(Field.START), "status": int(image[Field.ROW_OF]) + 1}.get(table) or int(image[Field[table]])
            ends = [int(image[other]) for other in Field if other >= Field.ROW_OF and image[other] > begin]
            end = min([len(image), *ends]) if table != "START" else begin + 1
            some = image[begin:end:16]
            if table == "LEAVE":  # only swaps -1 and -2, which say whether a text may end: leaving a state pops a symbol
                some[some < 0] = -3 - some[some < 0]
            else:
                columns = 4 if table in ("ROW_OF", "status") else 1
                some[:] = np.roll(image[begin:end], columns)[::16] if end - begin > 1 else (image[begin] + 1) % image[Field.STATES]
            offset += -(-len(image) // ALIGNMENT) * ALIGNMENT
        return arena

    held = dict[int, torch.Tensor]()

    def world_arena(arena: torch.Tensor) -> torch.Tensor:
        held[arena.data_ptr()] = arena
        return changed(arena.data_ptr())

    run_until_found(program)


@pytest.mark.parametrize(
    ("method", "bug"),
    [
        ("_is_open", lambda real, row, generated, index: row._is_filled(generated, index)),
        ("_is_filled", lambda real, row, generated, index: True),
        ("_load", lambda real, row, tokens: real(row, max(0, tokens - 1))),
        ("_store", lambda real, row, tokens, place: real(row, tokens, Place(place.state, place.counters, place.stack[:1]))),
        ("_crossing", lambda real, row, state: real(row, state)[1:]),
        ("_follow", lambda real, row, place, token: real(row, place, token) or place.state == 0),
        ("_commit", lambda real, row: row._fill(0) if row._generated else real(row)),
    ],
)
def test_an_error_in_the_rules_is_found(method: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(Row, method)
    monkeypatch.setattr(Row, method, lambda row, *arguments: bug(real, row, *arguments))
    run_until_found(advance_reference)


@pytest.mark.parametrize(
    ("cls", "method", "bug"),
    [
        (PlaceMatcher, "forced_bytes", lambda real, at: real(at)[:-1]),
        (PlaceMatcher, "forced_bytes", lambda real, at: real(at).replace(b"a", b"b", 1)),
        (ForcedRow, "accepted", lambda real, forced, position, token: None),
        (ForcedRow, "draft", lambda real, forced, index: -1),
        (DeviceTokenTable, "find", lambda real, table, text: max(real(table, text) - (len(text) > 1), -1)),
    ],
    ids=["short", "changed", "accepted", "draft", "find"],
)
def test_an_error_in_a_forced_text_is_found(cls: type, method: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(cls, method)
    monkeypatch.setattr(cls, method, lambda *given: bug(real, *given))
    run_until_found(advance_reference, forced=True)


# arguments


def inputs(drafts: int = 2) -> list[Any]:
    """Arguments of a round that is not the first."""
    kept = list[Any]()

    def keep(*arguments: Any) -> None:
        advance_fill.out(*arguments)
        kept[:] = arguments

    RowRounds(grammars(), 4, drafts, 1, [keep]).run(3)
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in kept]


def test_arguments_may_have_any_strides() -> None:
    expected = inputs()
    strided = [value.mT.contiguous().mT if isinstance(value, torch.Tensor) and value.dim() > 1 else value for value in inputs()]
    advance_fill.out(*expected)
    assert not strided[11].is_contiguous()
    advance_fill.out(*strided)
    assert all(map(torch.equal, strided[9:14], expected[9:14]))


def test_operation_passes_opcheck() -> None:
    opcheck(advance_fill.out, tuple(inputs()))


def without_a_valid_image(call: Any, given: list[Any]) -> None:
    """No image, outside of the arena, or of another format: nothing is written."""
    offset = int(given[1].max())
    for place, arena in ((0, None), (-5, None), (len(given[4]), None), (len(given[4]) - 3, None), (offset, given[4].clone())):
        given[1] = torch.full_like(given[1], place)
        if arena is not None:
            arena[offset] += 1
            given[4] = arena
        before = [tensor.clone() for tensor in given[9:13]]
        call(*given)
        assert all(map(torch.equal, given[9:13], before))
        assert (given[13][given[14] : given[15] + 1, : len(given[2])] == MaskStatus.NONE).all()


@pytest.mark.parametrize("call", [advance_reference, advance_fill.out])
def test_a_row_without_a_valid_image_is_not_touched(call: Any) -> None:
    without_a_valid_image(call, inputs())


@pytest.mark.parametrize("call", [advance_reference, advance_fill.out])
def test_an_image_with_a_deeper_stack_gets_no_mask(call: Any) -> None:
    given = inputs()
    given[10] = given[10][..., :4].contiguous()
    call(*given)
    touched = given[2][(given[1][given[2]] > 0) & (given[4][given[1][given[2]] + Field.DEPTH] == 5)]
    assert len(touched) and (given[12][touched, given[14], 3] == MaskStatus.NONE).all()


def test_arguments_of_wrong_shapes_are_refused() -> None:
    good, call = inputs(), cast(Any, advance_fill)
    for index, wrong in (
        (9, good[9][:, 1:]),
        (10, good[10][:, 1:]),
        (12, good[12][..., 1:]),
        (3, good[3][:, 1:]),
        (13, good[13][1:]),
        (15, 3),
    ):
        with pytest.raises(AssertionError):
            call(*good[:index], wrong, *good[index + 1 :])
