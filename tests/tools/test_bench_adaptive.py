"""The benchmark of draft lengths: every variant decodes the same tokens, and the document has their counts."""

from __future__ import annotations

import json
import random
import statistics

import pytest

from stepgraph.graphs.graph_key import PLAIN, Drafting
from stepgraph.runtime.demo.variants import toy_pair
from tools.bench_adaptive import AUTO, Bench, Sample, contenders, figures, main, toy_workloads


def test_report_of_one_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-k", "2", "--turns", "3", "--seconds", "0", "--only", "json"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out[out.index("\n{") :])
    found = document["workloads"]["json"]
    assert document["turns"] == 2, "no time for a third one"
    assert [(each["workload"], each["goal"]) for each in document["goals"]] == [("json", 0.95)]
    assert list(found["variants"]) == ["0", "1", "2", "2 without model", "auto"] and found["variants"]["0"]["over_plain"] == 1
    for length in ("0", "1", "2", "2 without model"):
        assert list(found["variants"][length]["rounds_by_drafts"]) == [length]
    assert found["variants"]["2"]["tokens_per_round"] > found["variants"]["1"]["tokens_per_round"] > 1


def test_drafter_that_is_never_right_has_one_token_per_round() -> None:
    pair = toy_pair()
    workload = toy_workloads(pair)["never right"]
    bench = Bench(pair, 2, 1, 64, workload.wrong_drafts, 0)
    sample = bench.run(workload._replace(new_tokens=30), 0, Drafting(2))
    assert sample.tokens == sample.row_rounds == 29
    bench.engine.close()


def test_mixed_batch_has_all_its_rows_until_the_end() -> None:
    pair = toy_pair()
    workload = toy_workloads(pair)["mixed batch of 8"]._replace(new_tokens=20, refilled=300)
    bench = Bench(pair, 2, 8, 64, workload.wrong_drafts, 0)
    sample = bench.run(workload, 0, PLAIN)
    assert 300 <= sample.tokens < 320 and not bench.engine.has_work
    rounds = sample.rounds[str(PLAIN)]
    assert 300 / 8 <= rounds < 50  # less than a tenth of the places are empty, while prompts of requests that follow are read
    bench.engine.close()


def test_unknown_workload_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "nothing"]) == 2
    assert "--only: got 'nothing', expected some of 'never right', 'json'" in capsys.readouterr().err


def test_equal_choices_with_noise_have_a_ratio_of_one() -> None:
    """The best fixed choice of the measured turns would be 2% faster, by chance alone."""
    noise = random.Random(1)

    def turns() -> list[Sample]:
        return [Sample(100, 100, {}, noise.gauss(1, 0.03)) for _ in range(4)]

    found = [figures({drafting: turns() for drafting in (PLAIN, Drafting(1), Drafting(2), AUTO)}) for _ in range(500)]
    ratios = [each["auto_over_best_fixed"] for each in found]
    luckiest = [max(each["variants"][name]["over_plain"] for name in ("0", "1", "2")) for each in found]
    assert abs(statistics.mean(ratios) - 1) < 0.005 and statistics.mean(luckiest) > 1.015


def test_lengths_that_were_slow_are_not_compared_in_later_turns() -> None:
    measured = (1, 5), (0.5, 5), (0.54, 5), (0.6, 3)  # seconds and turns, by drafts

    def turns(seconds: float, count: int) -> list[Sample]:
        return [Sample(100, 100, {}, seconds)] * count

    samples: dict[Drafting | str, list[Sample]] = {Drafting(drafts): turns(*each) for drafts, each in enumerate(measured)}
    samples[AUTO] = turns(0.5, 5)
    assert contenders(samples) == [Drafting(1), Drafting(2)]
    found = figures(samples)
    assert found["auto_over_best_fixed"] == 1 and found["variants"]["3"]["over_plain"] == 1.667
    samples[Drafting(3)][2] = samples[AUTO][2]  # as fast as the best one in one turn
    assert Drafting(3) in contenders(samples)
