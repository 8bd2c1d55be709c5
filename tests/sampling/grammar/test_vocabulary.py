"""The token table itself; its readers are tested in tokenizers/."""

from __future__ import annotations

from stepgraph.sampling.grammar import Vocabulary


def test_repr_shows_the_size_and_not_the_tokens() -> None:
    assert repr(Vocabulary([b"a", b""], stop_token_ids=[1])) == "Vocabulary(2 tokens, stop_token_ids=(1,), logits_width=2)"


def test_ids_of_an_iterator_are_kept() -> None:
    found = Vocabulary([b"a", b"<s>", b"</s>"], (i for i in [2]), control_token_ids=(i for i in [1]))  # type: ignore[arg-type]
    assert (found.stop_token_ids, found.control_token_ids) == ((2,), (1,))
