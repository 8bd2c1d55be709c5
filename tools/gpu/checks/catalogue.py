"""All checks in order, with module and time budget. Does not import torch: the supervising process reads it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
FULL_SECONDS, QUICK_SECONDS = 480.0, 120.0  # of a whole run on a GPU
BUILD_SECONDS = 150.0  # for checks that compile kernels
QUICK_SHARE = 0.25  # share of a check's budget in a quick run


@dataclass(frozen=True)
class Entry:
    """One check. `seconds` is its budget in a full run on an H200; repeated measurements repeat less often to stay within it."""

    name: str
    module: str
    seconds: float
    load_seconds: float = 45.0  # seconds for one-time loading and compilation

    def budget(self, quick: bool) -> float:
        return self.seconds * QUICK_SHARE if quick else self.seconds

    def limit_seconds(self, quick: bool, rehearsal: bool) -> float:
        """Seconds after which the check is ended. Above the budget, which does not cover one-time work such as loading kernels."""
        return 600.0 if rehearsal else self.load_seconds + 2 * self.budget(quick)

    @property
    def description(self) -> str:
        """First line of its docstring; parsed, since importing the module would import torch."""
        tree = ast.parse((ROOT / Path(*self.module.split("."))).with_suffix(".py").read_text(encoding="utf-8"))
        (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == self.name)
        return (ast.get_docstring(found) or "").splitlines()[0]


def _entries(module: str, load_seconds: float = 45.0, **seconds: float) -> tuple[Entry, ...]:
    return tuple(Entry(name, f"tools.gpu.checks.{module}", each, load_seconds) for name, each in seconds.items())


SMOKE = (  # the first minute: what fails here explains most of what fails later
    *_entries("smoke", tools_of_this_host=1),
    *_entries("smoke", load_seconds=BUILD_SECONDS, every_program_equals_its_reference=20),
    *_entries("smoke", capture_drop_capture=2),
    *_entries("smoke", load_seconds=BUILD_SECONDS, default_capture=12),
    *_entries("smoke", constrained_rounds_match_oracle=6),
)
CATALOGUE = (
    *SMOKE,
    *_entries("steps", capture_user_step=2),
    *_entries("rounds", replay_equals_eager=14, no_sync_no_allocation=5, one_replay_per_round=4, profiler_counts_one_launch_per_round=5),
    *_entries("rounds", one_launch_per_answer=3),
    *_entries("steps", host_nodes=2, streams_overlap_correct=2),
    *_entries("rounds", engine_matches_oracle=12, unconstrained_graph_has_no_host_nodes=3),
    *_entries("steps", capture_leaves_buffers_untouched=1, illegal_step_raises=2),
    *_entries("rounds", several_engines=3),
    *_entries("kernels", random_numbers_equal_the_cpu=2, kernels_equal_references=7),
    *_entries("kernels", masks_and_processors_equal_references=7, grammar_rows_equal_reference=2, programs_repeat_bit_for_bit=4),
    *_entries("kernels", load_seconds=BUILD_SECONDS, filters_equal_references=8),
    *_entries("kernels", rejection_equals_reference=5),
    *_entries("llama", attention_equals_reference=8),
    *_entries("llama", load_seconds=BUILD_SECONDS, attention_choices_equal_reference=10),
    *_entries("llama", llama_tokens_are_reproducible=4, drafts_change_bfloat16_texts_at_near_ties=2),
    *_entries("profile", stages_have_names=3, timeline_has_every_round=5),
    *_entries("profile", profile_of_the_bench=10),
    *_entries("engines", every_drafter_replays_as_eager=14, hundreds_of_rounds_replay_as_eager=10, both_libraries_match_oracle=6),
    *_entries("engines", adapters_and_small_caches_replay_as_eager=3),
    *_entries("engines", steps_never_wait=4, closing_frees_everything=6),
    *_entries("timing", native_nodes_need_no_gil=3),
    *_entries("law", sampled_texts_follow_the_target=8),
    *_entries("sanitizer", load_seconds=BUILD_SECONDS, programs_stay_in_bounds=12),
    *_entries("timing", gil_hold=3),
    *_entries("numbers", kernels_against_floor=7, packed_products=4),
    # checks that decide a goal come first; the last one waits for a compiler
    *_entries("numbers", idle_between_rounds=12, weights_per_second=15, captured_against_eager=16, mask_time_is_hidden=16),
    *_entries("numbers", constrained_rounds=38, sampled_rounds=6),
    *_entries("others", against_hand_written_loop=16),
    *_entries("others", load_seconds=BUILD_SECONDS, against_transformers=40),
)
