"""Rates and ratios of the benchmark of quantised weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import bench_quantised
from tools.bench_demo import NEW_TOKENS
from tools.bench_quantised import GOALS, LLAMA_CPP, PLAIN, Timed, figures, lines, ratios
from tools.train.demo.schemas import MEASURED

FAST, SLOW = [Timed(30, 1.0, 0.5), Timed(10, 1.0, 0.5), Timed(0, 0.0, 0.0)], [Timed(20, 4.0, 1.0), Timed(20, 4.0, 3.0)]


def test_rates_are_those_of_all_answers_together() -> None:
    assert figures(FAST, 1) == {"tokens": 40, "tokens_per_second": 20.0, "tokens_per_processor_second": 40.0, "quartiles": [10.0, 70.0]}
    assert figures(FAST, 2) == {"tokens": 40, "tokens_per_second": 20.0, "quartiles": [5.0, 35.0]}


def test_ratios_are_by_processor_time_with_one_thread_and_only_of_what_ran() -> None:
    times = {f"quantised {PLAIN}": FAST, f"dequantised {PLAIN}": SLOW}
    name = f"quantised {PLAIN} / dequantised {PLAIN}"
    assert ratios(times, 1) == {name: [4.0, GOALS[name]]} and ratios(times, 2) == {name: [4.0, GOALS[name]]}
    times[LLAMA_CPP] = [Timed(5, 0.5, 0.5), Timed(5, 0.5, 0.5)]
    assert ratios(times, 1)[f"quantised {PLAIN} / {LLAMA_CPP}"] == [4.0, 1.0]
    assert ratios(times, 2)[f"quantised {PLAIN} / {LLAMA_CPP}"] == [2.0, 1.0]
    variants = {each: figures(found, 1) for each, found in times.items()}
    printed = "\n".join(lines({"variants": variants, "ratios": ratios(times, 1)}))
    assert "40.0 by processor time" in printed and "goal 1.6" in printed


def test_llama_cpp_computes_no_token_that_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    generated = iter(range(1, 1000))
    model = SimpleNamespace(token_eos=lambda: 0, generate=lambda ids, **options: generated)
    grammar = SimpleNamespace(from_json_schema=lambda schema, **options: None)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=lambda path, **options: model, LlamaGrammar=grammar))
    monkeypatch.setattr(bench_quantised, "target_path", Path)
    timed = bench_quantised.llama_cpp(1)[LLAMA_CPP]([1], MEASURED[0])
    assert 1 + timed.tokens == next(generated) - 1 == NEW_TOKENS
