"""Schedules determined by a seed (see tests/helpers/simulation.py): a few in `make test`, 10,000 in `make soak`, and negative controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from stepgraph import EngineConfig, FinishReason
from stepgraph.runtime.hidden_states import HiddenStates
from stepgraph.runtime.page_cache import PageCache
from stepgraph.runtime.request import ActiveRequest
from stepgraph.runtime.row_table import RowTable
from stepgraph.runtime.upload import Uploader
from stepgraph.sampling.native import why_not
from tests.helpers.planted import USUAL_MATCHER
from tests.helpers.simulated_worlds import CASES, MODELS, NUM_ASKS, OPTIONS, PLAIN, PROPOSERS, World, ask, draw_world
from tests.helpers.simulation import Failure, Simulation, make_schedule, run_many, run_seed
from tests.helpers.toy_engines import CONSTRAINTS

SAMPLE = (101, 131)  # of two worlds, because a capture takes longer than a schedule
SCHEDULES, PART = 10_000, 250
DRAFTING = replace(PLAIN, max_rows=3, num_speculative_tokens=3, draft_length=3, page_size=8, num_pages=11, rounds_in_flight=2, eager=True)
PREEMPTING = replace(DRAFTING, max_rows=2, preemption=True, prefix_reuse=True, page_size=4, num_pages=18)
GROWING = World("fair", replace(DRAFTING, page_allocation="grow", page_size=4, num_pages=18, **OPTIONS))
PLAIN_GROWING = World("none", replace(GROWING.config, num_speculative_tokens=0, draft_length=0))
ON_HOST = World("fair", replace(DRAFTING, host_link="python", **OPTIONS))
FIXED = {  # settings that no world changes
    *(
        "attention",
        "backend",
        "capture_bytes",
        "compile_isolation",
        "filters",
        "forced_acceptance",
        "grammar_backend",
        "grammar_cache_bytes",
    ),
    *("grammar_limits", "max_bias_ids", "max_compiles", "max_length", "max_lora_rank", "max_queued", "max_stop_ids", "nvtx"),
    *("on_capture_failure", "save_hidden_states", "states_shard_bytes"),
    *(("rounds_per_launch",) if why_not() else ()),  # loops need the C library
}
SEEDS_TO_FIND = 60  # limit for a planted bug; each is detected within the first few


def test_a_sample_of_schedules() -> None:
    counts = run_many(SAMPLE)
    assert counts["schedules"] == len(SAMPLE) and counts["tokens"] > 200 and counts["preempted"] and counts["continued"], counts
    reasons = {*FinishReason} - {FinishReason.DEAD_END, FinishReason.TIMEOUT}  # a schedule has no clock
    assert all(counts[str(reason)] for reason in reasons) and counts["faults"], counts


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, SCHEDULES, PART))
def test_ten_thousand_schedules(first: int) -> None:
    assert run_many(range(first, first + PART))["schedules"] == PART


def test_seed_determines_the_schedule() -> None:
    assert make_schedule(3) == make_schedule(3) != make_schedule(4)
    kinds = {action.kind for seed in range(50) for action in make_schedule(seed)}
    assert kinds == {"submit", "refused", "cancel", "continue", "adapter", "fault", "reset", "steps"}


def test_worlds_have_every_setting_and_requests_every_option() -> None:
    worlds, asks = [draw_world(number) for number in range(600)], [ask(number) for number in range(NUM_ASKS)]
    assert {world.drafter for world in worlds} == {*MODELS, *PROPOSERS, *CASES}
    values = {each.name: {str(getattr(world.config, each.name)) for world in worlds} for each in fields(EngineConfig)}
    assert {name for name, found in values.items() if len(found) == 1} == FIXED
    options = [vars(each) | vars(each.sampling) for each in asks]
    assert all(len({str(option[name]) for option in options}) > 1 for name in options[0])


def test_a_forced_draft_is_not_expected_to_be_the_targets_choice() -> None:
    """A text that the grammar forces may have other tokens than those that the target chooses."""
    simulation = Simulation(World("perfect", replace(DRAFTING, forced_drafts=True, greedy_only=True)))
    for first in range(12):
        simulation.engine.generate([first, 2], constraint=CONSTRAINTS[1], max_new_tokens=12)
    drafts = simulation.engine.stats().drafts
    assert drafts.forced > drafts.accepted_forced > 0
    simulation.check_released()


def test_seed_is_independent_of_previous_runs() -> None:
    def events_of(seed: int) -> list[list[tuple[tuple[int, ...], FinishReason | None]]]:
        return [[(event.tokens, event.finish_reason) for event in entry.events] for entry in run_seed(seed)]

    first, other = events_of(SAMPLE[0]), events_of(SAMPLE[-1])
    assert events_of(SAMPLE[0]) == first != other


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


def output_counts_lost(patch: pytest.MonkeyPatch) -> None:
    """A preempted request, or one that continues another, has no penalties for its earlier tokens."""
    patch.setattr(Uploader, "_prior_output", lambda uploader, job: torch.empty(0, dtype=torch.int64))


def pages_added_one_round_late(patch: pytest.MonkeyPatch) -> None:
    real = RowTable._set_most_tokens

    def set_most_tokens(rows: RowTable, request: ActiveRequest) -> None:
        real(rows, request)
        request.most_tokens += rows._limits.positions

    patch.setattr(RowTable, "_set_most_tokens", set_most_tokens)


def page_of_another_index(patch: pytest.MonkeyPatch) -> None:
    """A page that is added to a row replaces the one before it."""
    real = Uploader.add_pages
    patch.setattr(Uploader, "add_pages", lambda uploader, entries: real(uploader, [(row, index - 1, page) for row, index, page in entries]))


def draft_entry_not_computed(patch: pytest.MonkeyPatch) -> None:
    """The draft model does not compute the last position of a shared prefix again."""
    real = RowTable.start_prefill

    def start_prefill(rows: RowTable, request: ActiveRequest) -> None:
        real(rows, request)
        request.num_prefilled = request.num_reused

    patch.setattr(RowTable, "start_prefill", start_prefill)


def states_of_another_row(patch: pytest.MonkeyPatch) -> None:
    real = HiddenStates.tokens_emitted
    patch.setattr(
        HiddenStates, "tokens_emitted", lambda states, job, slot, index, count: real(states, job, slot, index and index - 1, count)
    )


@pytest.mark.parametrize(
    ("bug", "world", "first"),  # first: a seed just before one that detects it
    [
        (mask_one_row_off, ON_HOST, 0),
        (rollback_one_short, ON_HOST, 3),
        (page_freed_twice, ON_HOST, 0),
        (output_counts_lost, World("fair", replace(PREEMPTING, **OPTIONS)), 11),
        (draft_entry_not_computed, World("perfect", replace(PREEMPTING, greedy_only=True)), 0),
        (states_of_another_row, replace(ON_HOST, saves=True), 0),
        (pages_added_one_round_late, GROWING, 0),
        (pages_added_one_round_late, PLAIN_GROWING, 0),
        (page_of_another_index, GROWING, 0),
    ],
)
def test_planted_bugs_are_found(bug: Callable[[pytest.MonkeyPatch], None], world: World, first: int) -> None:
    """Negative controls. The reference answers are computed without the bug."""
    simulation = Simulation(world)
    for seed in range(first, first + SEEDS_TO_FIND):
        try:
            with pytest.MonkeyPatch.context() as patch:
                bug(patch)
                entries = simulation.run(seed)
            simulation.check(entries)
        except AssertionError:
            return
    raise AssertionError(f"{SEEDS_TO_FIND} schedules do not detect {bug.__name__}")


def test_failure_message_contains_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(ON_HOST)
    page_freed_twice(monkeypatch)
    with pytest.raises(Failure, match=r"AssertionError: .*\npython -m tests.helpers.simulation --seed 5$"):
        run_seed(5, simulation)
