"""N-gram look-up on the device, compared with the same rule in Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepgraph.graphs import Limits, StaticBuffers
from stepgraph.graphs.model import History
from stepgraph.graphs.proposing import ANCHOR_TOKENS, given_from, look_up, text_specs
from stepgraph.runtime.models.ngram import NgramLookup
from tests.helpers.c_library import needs_c
from tests.helpers.oracles import look_up_drafts

LIMITS = Limits(max_rows=3, num_speculative_tokens=4, max_length=40, page_size=8, num_pages=15, vocab_size=9, num_tokens=9, feature_size=0)
Row = tuple[Sequence[int], int, Sequence[int]]  # history, number of its prompt tokens, draft_ids


def propose(lookup: NgramLookup, rows: Sequence[Row], count: int) -> list[list[int]]:
    """Row texts in the layout of the engine, with old tokens after each history."""
    start, width = given_from(LIMITS), text_specs(LIMITS)[0].shape[1]
    text = torch.full((len(rows), width), -1, dtype=torch.int32)
    text[:, : LIMITS.max_length] = torch.arange(LIMITS.max_length) % 3
    for line, (history, prompt, draft_ids) in zip(text, rows, strict=True):
        line[: len(history)] = torch.tensor(history)
        if draft_ids:
            anchor = history[max(0, prompt - ANCHOR_TOKENS) : prompt]
            line[start - len(anchor) : start + len(draft_ids)] = torch.tensor([*anchor, *draft_ids])
    lengths, prompts = torch.tensor([len(row[0]) for row in rows]), torch.tensor([row[1] for row in rows])
    return lookup.propose(History(text, lengths, lengths - prompts, start, count), StaticBuffers([])).tolist()


@st.composite
def texts(draw: st.DrawFn) -> Row:
    """Few distinct tokens, so that matches are common; draft_ids are often the output, cut or changed."""
    token = st.integers(0, draw(st.sampled_from([1, 2, 3, 8])))
    history = draw(st.lists(token, min_size=1, max_size=LIMITS.max_length))
    prompt = draw(st.integers(1, len(history)))
    draft_ids = draw(st.one_of(st.just([]), st.lists(token, max_size=LIMITS.max_length), st.just(history[prompt:])))
    draft_ids = [*draft_ids[: draw(st.integers(0, 40))], *draw(st.lists(token, max_size=3)), *draft_ids[draw(st.integers(0, 40)) :]]
    return history, prompt, draft_ids[: LIMITS.max_length]


@settings(max_examples=150)
@given(rows=st.lists(texts(), min_size=1, max_size=3), count=st.integers(1, 8), data=st.data())
@example(rows=[([1, 2, 3, 1, 2], 2, [3, 1, 2, 4, 1, 2])], count=3, data=None)
def test_device_look_up_equals_the_rule_in_python(rows: list[Row], count: int, data: Any) -> None:
    """The reference in torch, and the program in C where there is a library."""
    longest = data.draw(st.integers(1, ANCHOR_TOKENS)) if data else ANCHOR_TOKENS
    shortest = data.draw(st.integers(1, longest)) if data else 1
    expected = [look_up_drafts(*row, count, longest, shortest) for row in rows]
    assert propose(NgramLookup(longest, shortest), rows, count) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look_up, "c", None)
        assert propose(NgramLookup(longest, shortest), rows, count) == expected


def inert_texts() -> Iterator[tuple[Any, ...]]:
    """Random tokens including -1, with lengths and generated counts that contradict each other; both are columns of one table."""
    random = torch.Generator().manual_seed(3)
    for (width, start), shortest in itertools.product(((12, 5), (40, 22), (90, 50)), (1, 3)):
        text = torch.randint(-1, 3, (6, width), generator=random, dtype=torch.int32)
        columns = torch.randint(1, start, (6, 2), generator=random)
        yield text, columns[:, 0], columns[:, 1], start, 7, 8, shortest


@needs_c
def test_texts_of_inert_rows_have_equal_chains_in_c() -> None:
    for case in inert_texts():
        assert torch.equal(look_up(*case), look_up.reference(*case))


@needs_c
@pytest.mark.parametrize("length", [0, 13])
def test_length_outside_of_the_text_is_refused_in_c(length: int) -> None:
    text, one = torch.zeros(1, 12, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    with pytest.raises(IndexError, match="look_up: an index lies outside of its table"):
        look_up(text, one * length, one, 5, 4, 8, 1)


@pytest.mark.parametrize(
    ("row", "drafts"),
    [
        (([1, 2, 3, 4, 1, 2], 6, []), [3, 4, 1, 2]),
        (([5, 1, 6, 1, 7, 1], 6, []), [7, 1, 7, 1]),  # the latest match; copied tokens are copied again
        (([5, 1, 6, 2, 1, 7, 5, 1], 8, []), [6, 2, 1, 7]),  # a longer match before a later one
        (([1, 2, 3], 3, []), [-1] * 4),
        (([4], 1, [5, 6, 7]), [5, 6, 7, -1]),  # at the start of the output
        (([4, 5, 6], 1, [5, 6, 7]), [7, -1, -1, -1]),
        (([4, 5, 6, 7], 1, [5, 6, 7]), [-1] * 4),  # all of it was generated
        (([4, 5, 2, 7], 1, [5, 6, 7, 8, 0]), [8, 0, -1, -1]),  # one token differs; after it the text is found again
        (([4, 1, 2, 1, 2], 1, [1, 2, 1, 2, 5, 1, 2, 6]), [5, 1, 2, 6]),  # the nearest of two
        (([1, 2, 3, 4, 1, 2, 3], 4, [7, 2, 3, 5]), [4, 1, 2, 3]),  # a longer match in the history
    ],
)
def test_rules_in_examples(row: Row, drafts: list[int]) -> None:
    assert look_up_drafts(*row, 4, ANCHOR_TOKENS, 1) == drafts
    assert propose(NgramLookup(), [row], 4) == [drafts]


def test_rows_are_independent() -> None:
    rows: list[Row] = [([1, 2, 1], 2, [7, 7]), ([1, 2, 2, 1], 1, []), ([3, 3], 1, [3, 3, 3])]
    assert propose(NgramLookup(), rows, 3) == [propose(NgramLookup(), [row], 3)[0] for row in rows]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_ngram": 9}, "NgramLookup.max_ngram: got 9, expected a whole number from 1 to 8"),
        ({"max_ngram": True}, "NgramLookup.max_ngram: got True"),
        ({"max_ngram": 2, "min_ngram": 3}, "NgramLookup.min_ngram: got 3, expected a whole number from 1 to 2"),
        ({"min_ngram": 0}, "NgramLookup.min_ngram: got 0, expected a whole number from 1 to 8"),
    ],
    ids=str,
)
def test_bad_ngram_sizes_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramLookup(**fields)  # type: ignore[arg-type]
