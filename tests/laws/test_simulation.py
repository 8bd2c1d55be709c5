"""Schedules determined by a seed (see tests/helpers/simulation.py): a few in `make test`, 10,000 in `make soak`, and negative controls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepgraph import FinishReason
from stepgraph.runtime.page_cache import PageCache
from tests.helpers.planted import USUAL_MATCHER
from tests.helpers.simulated_worlds import World
from tests.helpers.simulation import Failure, Simulation, make_schedule, run_many, run_seed

SAMPLE = (38, 206, 434, 590, 904, 940, 1036, 1336)  # long schedules of two worlds only, because a capture takes longer than a schedule
FOUND = (2219, 3167, 3608)  # a matcher failed after a draft; rejecting the draft would change the distribution
SCHEDULES, PART = 10_000, 250
SEEDS_TO_FIND = 60  # limit for a planted bug; each is detected within the first few


def test_a_sample_of_schedules() -> None:
    counts = run_many(SAMPLE)
    assert counts["schedules"] == len(SAMPLE) and counts["tokens"] > 300, counts
    assert all(counts[str(reason)] for reason in FinishReason if reason != FinishReason.DEAD_END) and counts["faults"] > 5, counts


@pytest.mark.parametrize("seed", FOUND)
def test_schedules_that_once_failed(seed: int) -> None:
    run_seed(seed)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, SCHEDULES, PART))
def test_ten_thousand_schedules(first: int) -> None:
    assert run_many(range(first, first + PART))["schedules"] == PART


def test_seed_determines_the_schedule() -> None:
    assert make_schedule(3) == make_schedule(3) != make_schedule(4)
    kinds = {action.kind for seed in range(50) for action in make_schedule(seed)}
    assert kinds == {"submit", "refused", "cancel", "fault", "steps"}


def test_seed_is_independent_of_previous_runs() -> None:
    def events_of(seed: int) -> list[list[tuple[tuple[int, ...], FinishReason | None]]]:
        return [[(event.tokens, event.finish_reason) for event in entry.events] for entry in run_seed(seed)]

    seeds = SAMPLE[0], 50
    assert [events_of(seed) for seed in seeds] == [events_of(seed) for seed in seeds]


def mask_one_row_off(patch: pytest.MonkeyPatch) -> None:
    real = USUAL_MATCHER.fill_next_token_bitmask
    patch.setattr(USUAL_MATCHER, "fill_next_token_bitmask", lambda self, masks, index: real(self, masks, (index + 1) % len(masks)))


def rollback_one_short(patch: pytest.MonkeyPatch) -> None:
    real = USUAL_MATCHER.rollback
    patch.setattr(USUAL_MATCHER, "rollback", lambda self, count: real(self, count - 1))


def page_freed_twice(patch: pytest.MonkeyPatch) -> None:
    real = PageCache.free

    def free(pool: PageCache, pages: Any) -> None:
        real(pool, pages)
        pool._free.extend(pages[:1])

    patch.setattr(PageCache, "free", free)


@pytest.mark.parametrize("bug", [mask_one_row_off, rollback_one_short, page_freed_twice])
def test_planted_bugs_are_found(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Negative controls. The reference answers are computed without the bug."""
    simulation = Simulation(World(3, grammar_lane="host", host_link="python", eager=True))
    for seed in range(SEEDS_TO_FIND):
        try:
            with pytest.MonkeyPatch.context() as patch:
                bug(patch)
                entries = simulation.run(seed)
            simulation.check(entries)
        except AssertionError:
            return
    raise AssertionError(f"{SEEDS_TO_FIND} schedules do not detect {bug.__name__}")


def test_failure_message_contains_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(World(0, eager=True))
    page_freed_twice(monkeypatch)
    with pytest.raises(Failure, match=r"AssertionError: .*\npython -m tests.helpers.simulation --seed 5$"):
        run_seed(5, simulation)
