"""The token table itself; its readers are tested in tokenizers/."""

from __future__ import annotations

from random import Random

import pytest

from stepgraph.sampling.grammar import Constraint, Vocabulary
from tests.helpers.grammar_texts import fill_mask
from tests.helpers.toy_engines import COMPILER, CONTROL, STOP, VOCABULARY


def test_repr_shows_the_size_and_not_the_tokens() -> None:
    assert repr(Vocabulary([b"a", b""], stop_token_ids=[1])) == "Vocabulary(2 tokens, stop_token_ids=(1,), logits_width=2)"


def test_ids_of_an_iterator_are_kept() -> None:
    found = Vocabulary([b"a", b"<s>", b"</s>"], (i for i in [2]), control_token_ids=(i for i in [1]))  # type: ignore[arg-type]
    assert (found.stop_token_ids, found.control_token_ids) == ((2,), (1,))


@pytest.mark.parametrize(
    "constraint", [Constraint.json_object(), Constraint.regex("[^]*"), Constraint.json_schema({"type": "string"}, backend="llguidance")]
)
def test_no_control_token_is_legal_under_a_grammar(constraint: Constraint) -> None:
    random, matcher = Random(0), COMPILER.compile(constraint).matcher()
    for _ in range(20):
        legal = fill_mask(matcher, VOCABULARY.mask_words)[1]
        assert CONTROL not in legal and max(legal) <= CONTROL and not matcher.accept_token(CONTROL)
        if legal == [STOP]:
            break
        assert matcher.accept_token(random.choice([token for token in legal if token != STOP]))
