"""Which rounds a measurement counts, what it says about stages, and how a check reports a difference."""

from __future__ import annotations

import time

import pytest
import torch

from stepgraph.graphs.context import MAIN
from stepgraph.graphs.spans import Span
from stepgraph.runtime.trace import Timeline
from tools.gpu.checks import cases, operations
from tools.gpu.checks.context import Context
from tools.gpu.checks.numbers import FREE, stage_us
from tools.gpu.checks.shapes import TINY


def test_a_round_that_waits_for_a_prompt_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one round in flight, the step after a prompt waits for the round that follows the prompt."""
    case = cases.Case(Context(rehearsal=True, quick=True), TINY, 1, FREE)
    now, step, prompts = [0.0], case.engine.step, [0]
    prompt_steps = []

    def timed_step() -> object:
        events, before = step(), prompts[-1]
        now[0] += 100 if len(prompts) > 1 and before > prompts[-2] else 1
        prompts.append(case.engine.stats().prompt_tokens)
        prompt_steps.append(prompts[-1] > before)
        return events

    monkeypatch.setattr(case.engine, "step", timed_step)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert case.block(60) == 1e6
    assert set(case.seconds) == {1.0} and len(case.seconds) == 60
    assert sum(prompt_steps) > 1, "no request ended"
    case.engine.close()


def test_stages_of_a_round_and_the_time_between_them() -> None:
    spans = [
        Span(stream, name, "stage", number, 1000 * (start + 50 * number), 1000 * (end + 50 * number))
        for number in range(3)
        for stream, name, start, end in ((MAIN, "target_verify", 0, 20), ("side", "fill verify", 2, 8), (MAIN, "accept", 23, 40))
    ]
    expected = {f"{MAIN}: target_verify": 20.0, "side: fill verify": 6.0, f"{MAIN}: accept": 17.0}
    assert stage_us(Timeline(tuple(spans))) == {**expected, "between stages": 3.0, "between rounds": 10.0}


def test_difference_names_result_and_position() -> None:
    call = operations.mask_status(torch.device("cpu"), 5, 3)
    assert call.difference() == ""
    status, flags = call.results(call.operation.out)
    right = int(status[3, 1])
    status[3, 1] = 77
    assert call.difference([status, flags]) == f"mask_status B=5 N=3: result 0 at (3, 1) is {right}, expected 77; 1 of 15 numbers differ"
