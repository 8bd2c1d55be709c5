"""prompt_embeddings: output equals a plain computation over the same embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph import Engine, Job, SamplingParams
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from tests.helpers.families import folder_of, hf_model
from tests.helpers.toy_engines import Setup, finish, shared_engine
from tests.runtime.models.test_llama_engine import make_engine

FAMILY = "smollm2"
PROMPT = [(index * 7 + 11) % 90 + 4 for index in range(23)]
SPANS = ((0, 3), (6, 1), (9, 10))  # (position, length): at the start, within a page, over several pages and chunks


@pytest.fixture(scope="module", params=[0, 2], ids=["plain", "drafted"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make_engine(FAMILY, request.param, noise=0.02) as made:
        yield made


def table() -> Tensor:
    found: Tensor = hf_model(FAMILY).model.embed_tokens.weight.detach()
    return found


def decode(engine: Engine, prompt: list[int], spans: dict[int, Tensor] | None, count: int = 12) -> Job:
    sampling = SamplingParams(temperature=0, logprobs=True)
    job = engine.submit(prompt, prompt_embeddings=spans, sampling=sampling, max_new_tokens=count)
    finish(engine)
    return job


def plain(states: Tensor, count: int = 12) -> list[int]:
    """Greedy decoding after input embeddings [n, hidden], without a cache."""
    model, vocabulary = hf_model(FAMILY), open_checkpoint(folder_of(FAMILY)).vocabulary
    tokens: list[int] = []
    while len(tokens) < count and tokens[-1:] != list(vocabulary.stop_token_ids):
        with torch.no_grad():
            following = model(inputs_embeds=torch.cat([states, table()[tokens]])[None]).logits[0, -1]
        tokens.append(int(following[: len(vocabulary.tokens)].argmax()))
    return tokens


def test_embeddings_of_the_ids_give_the_same_logprobs(engine: Engine) -> None:
    """Bit-equal log-probabilities. The ids at these positions are placeholders."""
    held = decode(engine, PROMPT, None)
    spans = {index: table()[PROMPT[index : index + count]] for index, count in SPANS}
    blank = [0 if any(index <= here < index + count for index, count in SPANS) else token for here, token in enumerate(PROMPT)]
    job = decode(engine, blank, spans)
    assert (job.tokens, job.logprobs) == (held.tokens, held.logprobs) and job.num_cached_tokens == 0
    assert decode(engine, blank, None).logprobs != held.logprobs, "the placeholders alone give other log-probabilities"


def test_output_equals_plain_computation_and_spans_are_not_shared(engine: Engine) -> None:
    """Equal ids with different embeddings: only pages before the first span are shared."""
    made, cached = torch.Generator().manual_seed(3), []
    for _ in range(3):
        image = torch.randn(9, table().shape[1], generator=made) * table().std()
        states = torch.cat([table()[PROMPT[:10]], image, table()[PROMPT[19:]]])
        job = decode(engine, PROMPT, {10: image})
        assert job.tokens == plain(states)
        cached.append(job.num_cached_tokens)
    assert cached[1:] == [8, 8], "two pages of four, and not the one in which the span begins"


def test_embeddings_are_copied_at_submit(engine: Engine) -> None:
    held = decode(engine, PROMPT, None)
    mine = table()[PROMPT[4:12]].clone()
    job = engine.submit(PROMPT, prompt_embeddings={4: mine}, max_new_tokens=12)
    mine.fill_(torch.inf)
    finish(engine)
    assert job.tokens == held.tokens


WIDTH = 48
GOOD = torch.zeros(2, WIDTH)
BAD: list[tuple[Any, str]] = [
    (GOOD, r"prompt_embeddings: got Tensor, expected a mapping from positions in the prompt to tensors"),
    ({-1: GOOD}, r"prompt_embeddings\[-1\]: got this key, expected a position in the prompt"),
    ({"a": GOOD}, r"prompt_embeddings\['a'\]: got this key"),
    ({True: GOOD}, r"prompt_embeddings\[True\]: got this key"),
    ({0: GOOD[0]}, r"prompt_embeddings\[0\]: got \(48,\), expected a tensor \[n, 48\]"),
    ({0: GOOD[:, 1:]}, r"prompt_embeddings\[0\]: got \(2, 47\), expected a tensor \[n, 48\]"),
    ({0: GOOD[:0]}, r"prompt_embeddings\[0\]: got \(0, 48\)"),
    ({0: [[0.0] * WIDTH]}, r"prompt_embeddings\[0\]: got list"),
    ({0: GOOD.to(torch.bfloat16)}, r"prompt_embeddings\[0\]: got torch.bfloat16, expected torch.float32"),
    ({2: GOOD / 0}, r"prompt_embeddings\[2\]: got NaN or infinity"),
    ({21: GOOD}, r"prompt_embeddings\[21\]: got 2 rows, expected an end before the last of 23 prompt tokens"),
    ({4: GOOD, 3: GOOD}, r"prompt_embeddings\[3\]: got 2 rows, expected at most 1, up to the next span"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[message[18:45] for _, message in BAD])
def test_invalid_embeddings_raise(engine: Engine, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.submit(PROMPT, prompt_embeddings=given, max_new_tokens=1)
    assert not engine.has_work
    engine.submit(PROMPT, prompt_embeddings={20: GOOD}, max_new_tokens=1)
    finish(engine)


def test_target_without_embedding_size_raises() -> None:
    with pytest.raises(ValueError, match=r"prompt_embeddings: got 1 spans, expected none: the target has no embedding_size"):
        shared_engine(Setup(k=3)).submit(PROMPT, prompt_embeddings={0: GOOD}, max_new_tokens=1)
