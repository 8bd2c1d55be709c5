"""advance_fill in Triton's interpreter, against C and a host link. test_kernels.py runs this file in a process of its own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import triton

import tests.helpers.fast_interpreter  # noqa: F401
from stepgraph.sampling.kernels.advance import advance_fill
from stepgraph.sampling.kernels.triton import advance as advance_programs
from tests.helpers.grammar_rows import RowRounds
from tests.helpers.hazards import hazards
from tests.helpers.load_chains import load_chain
from tests.sampling.kernels.test_advance import forcing_grammars, grammars, inputs, without_a_valid_image
from tools.gpu.checks import grammar_rows

assert triton.knobs.runtime.interpret, "run by test_kernels.py, with TRITON_INTERPRET=1"


@pytest.mark.parametrize(("drafts", "rounds", "seed", "aligned"), [(0, 4, 1, False), (2, 3, 2, True)])
def test_program_equals_c(drafts: int, rounds: int, seed: int, aligned: bool) -> None:
    """Tiles and blocks of four, so that all loops run several times."""
    program = functools.partial(advance_programs.advance_fill, tile=4, lanes=4)
    RowRounds(grammars(aligned), 4, drafts, seed, [advance_fill.out, program]).run(rounds)


@pytest.mark.parametrize(("merges", "seed"), [(True, 2), (False, 4)])
def test_program_forces_the_tokens_of_the_host_link(merges: bool, seed: int) -> None:
    """Texts split by merging, and by longest match; drafts chosen one by one, and proposed chains."""
    program = functools.partial(advance_programs.advance_fill, tile=4, lanes=4)
    world = RowRounds(forcing_grammars(merges), 4, 3, seed, [advance_fill.out, program], forced=True)
    world.run(4)
    assert world.num_forced > 10, world.num_forced


@pytest.mark.parametrize(("drafts", "seed", "forced"), [(0, 1, False), (2, 2, False), (2, 4, True)])
def test_accesses_of_different_threads_are_separated_by_barriers(drafts: int, seed: int, forced: bool) -> None:
    program = functools.partial(advance_programs.advance_fill, tile=16, lanes=32)
    with hazards() as found:
        RowRounds(forcing_grammars(True) if forced else grammars(), 2, drafts, seed, [program], forced=forced).run(3)
    assert found <= {("load in text_at", "store in _find_text")}, found  # of a word, and of a byte in it that is not used


@pytest.mark.parametrize(("by_row", "expected"), [(True, [4, 5, 8, 9, 9, 10, 10, 11]), (False, [4, 4, 7, 8, 8, 9, 9, 10])])
def test_longest_chain_of_loads_of_each_row(by_row: bool, expected: list[int]) -> None:
    """Rows of eight in the middle of texts: the first has an illegal draft, the second is inert; rows are in another order. Drafts of the
    round before are by row: they are read after `rows`."""
    arguments = list(grammar_rows.call_of(torch.device("cpu"), 8, 1003).inputs)
    rows, drafts, found = arguments[2], arguments[3], list[int]()
    if by_row:
        arguments[3], arguments[17] = torch.empty_like(drafts).index_copy_(0, rows, drafts), 1
    for index in range(len(rows)):
        arguments[2] = rows[index : index + 1].clone()
        arguments[3] = arguments[3] if by_row else drafts[index : index + 1].clone()
        with load_chain() as chain:
            advance_programs.advance_fill(*(value.clone() if isinstance(value, torch.Tensor) else value for value in arguments))
        found.append(chain.longest)
    assert sorted(found) == expected, found


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_program_equals_c_in_long_runs(seed: int) -> None:
    RowRounds(grammars(seed % 3 == 0), 6, seed % 4, seed + 50, [advance_fill.out, advance_programs.advance_fill]).run(40)


def test_table_errors_are_detected_and_invalid_images_ignored() -> None:
    """An error in a table is found by the comparison; a row without a valid image is not touched."""

    def wrong(*arguments: Any) -> None:
        *before, arena = arguments[:5]
        advance_programs.advance_fill(*before, torch.where(arena == 1, 2, arena), *arguments[5:])

    with pytest.raises((AssertionError, IndexError)):
        RowRounds(grammars(), 4, 1, 1, [advance_fill.out, wrong]).run(20)
    without_a_valid_image(advance_programs.advance_fill, inputs())
