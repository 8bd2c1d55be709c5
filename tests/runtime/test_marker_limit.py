"""A limit of the text before a marker, such as a reasoning budget, in an engine: equal tokens on every lane and for every draft length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepgraph import Constraint, SamplingParams
from tests.helpers.c_library import needs_c
from tests.helpers.oracles import accepts
from tests.helpers.toy_engines import CONTROL, VOCABULARY, Setup, compiled, finish, plain, shared_engine

pytestmark = needs_c

INNER = Constraint.json_schema({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
MARKERS: tuple[Any, ...] = ("</think>", "]]", [CONTROL])
LIMITS, PROMPTS, MOST = (1, 2, 7, 16), 2, 60
DEVICE = Setup(k=0, buckets=(4,), grammar_backend="automaton", grammar_lane="device")
SETUPS = {
    "device": DEVICE,
    "device, masks after the drafts": replace(DEVICE, draft_masks=False),
    "device, forced": replace(DEVICE, forced_drafts=True),
    "host": replace(DEVICE, grammar_backend="auto", grammar_lane="host"),
    "host, automaton": replace(DEVICE, grammar_lane="host"),
    "host, Python": replace(DEVICE, grammar_backend="auto", grammar_lane="host", host_link="python"),
    "host, masks after the drafts": replace(DEVICE, grammar_backend="auto", grammar_lane="host", draft_masks=False),
    "eager": replace(DEVICE, eager=True),
}


@pytest.mark.parametrize("length", [0, 1, 4, *(pytest.param(length, marks=pytest.mark.soak) for length in (2, 3))])
@pytest.mark.parametrize("name", SETUPS)
def test_tokens_are_those_of_a_plain_loop_and_the_marker_ends_the_text_at_its_limit(name: str, length: int) -> None:
    engine, grammar, limited = shared_engine(replace(SETUPS[name], k=length)), compiled(INNER), 0
    assert grammar is not None
    jobs = [
        (engine.submit([index, 3], constraint=INNER.after(marker, limit=limit), max_new_tokens=MOST), marker, limit)
        for index in range(PROMPTS)
        for marker in MARKERS
        for limit in LIMITS
    ]
    finish(engine)
    for job, marker, limit in jobs:
        answer = plain(job.prompt_ids, MOST, job.constraint)
        assert (job.tokens, job.finish_reason) == (answer.tokens, answer.reason), job.error
        ends = (end for end in range(len(job.tokens)) if _ends_with(job.tokens[:end], marker))
        end = next(ends)
        assert end <= limit + len(marker) and accepts(grammar, job.tokens[end:], finished=True)
        limited += end > limit
        if isinstance(marker, str):
            assert job.grammar_lane.startswith("device" if name.startswith(("device", "eager")) else "host")
    assert limited > len(jobs) // 2, "most texts reach their limit"


def _ends_with(tokens: list[int], marker: Any) -> bool:
    return VOCABULARY.decode(tokens).endswith(marker.encode()) if isinstance(marker, str) else tokens[-len(marker) :] == marker


def test_sampled_tokens_are_equal_on_both_lanes() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    texts = []
    for lane in ("device", "host"):
        engine = shared_engine(replace(DEVICE, grammar_lane=lane, greedy_only=False))
        job = engine.submit([1, 2], constraint=INNER.after("</think>", limit=6), sampling=sampling, max_new_tokens=MOST)
        finish(engine)
        texts.append(job.tokens)
    assert texts[0] == texts[1] and b"</think>{" in VOCABULARY.decode(texts[0])


def test_a_resumed_request_counts_its_earlier_tokens() -> None:
    engine, constraint = shared_engine(replace(DEVICE, k=2)), INNER.after("</think>", limit=7)
    whole = engine.submit([4, 3], constraint=constraint, max_new_tokens=MOST)
    finish(engine)
    for taken in (3, 7, 9, len(whole.tokens) - 2):
        rest = engine.submit([4, 3], constraint=constraint, max_new_tokens=MOST, resume_from=whole.tokens[:taken])
        finish(engine)
        assert whole.tokens[:taken] + rest.tokens == whole.tokens
