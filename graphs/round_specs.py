"""The spec table of a round: every static tensor besides those that models declare."""

from __future__ import annotations

import math
from enum import IntEnum

import torch

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.row_layout import Column, ResultLayout
from stepgraph.sampling.grammar.status import CONTENT_FIELDS, TAG_FIELDS, HostColumn
from stepgraph.sampling.kernels.advance import PLACE_INTS, TEXT_INTS
from stepgraph.sampling.sampler import Param

MAX_SKIPPED = 32  # tokens of rounds in which the draft model does not run, before it processes them
TOP_RINGS = {"ids": torch.int32, "logprobs": torch.float32}  # written by kernels.top_logprobs
IMAGE_CHUNKS, IMAGE_CHUNK_INTS = 8, 1 << 16  # chunks of one upload, int32 of a chunk: 2 MiB are copied beside a round


def forced_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`, for drafts that the grammar forces."""
    rows, batch, drafts = limits.rows, limits.max_rows, limits.num_speculative_tokens
    return (
        BufferSpec("row_forced", (rows, drafts), torch.bool),  # whether a grammar forced each draft
        BufferSpec("batch_forced", (drafts, batch), torch.int64, fill=-1),
        BufferSpec("forced_host", (drafts, batch), torch.int64, "pinned", fill=-1),
    )


def look_up_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs` and `text_specs`, for a look-up beside a draft model."""
    drafts = (limits.rows, limits.num_speculative_tokens)
    return (BufferSpec("row_looked_up", drafts, torch.bool),)  # found by the look-up and not forced


def skipped_specs(limits: Limits, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`, for a draft model that does not run in every round: what it has to process later."""
    return (
        BufferSpec("row_skipped_tokens", (limits.rows, MAX_SKIPPED), torch.int64),
        BufferSpec("row_skipped_features", (limits.rows, MAX_SKIPPED, limits.feature_size), dtype),
    )


def grammar_specs(limits: Limits, arena_ints: int, stack_depth: int, forced: bool = False) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`, for grammars on the device: `arena_ints` int32 of images, stacks of `stack_depth` symbols."""
    rows, places, int32 = limits.rows, limits.positions + 1, torch.int32
    texts = (BufferSpec("row_forced_text", (rows, TEXT_INTS), int32),) if forced else ()
    return (
        *texts,
        BufferSpec("grammar_arena", (arena_ints,), int32),
        BufferSpec("batch_host_rows", (limits.max_rows,), torch.int64, fill=limits.dummy_row),  # batch_rows without rows on the device
        BufferSpec("batch_status", (limits.positions, limits.max_rows), torch.int64),  # of the masks that the device filled in this round
        BufferSpec("row_places", (rows, places, PLACE_INTS), int32),  # the place after n tokens, drafts included, at n % places
        BufferSpec("row_stacks", (rows, places, stack_depth), int32),
        BufferSpec("image_ring_host", (IMAGE_CHUNKS, min(arena_ints, IMAGE_CHUNK_INTS)), int32, "pinned"),
    )


class Control(IntEnum):
    """`loop_control_host`: when a launch ends besides the end of all its rows."""

    STOP_BEFORE = 0  # launches with a smaller number end after one more round
    WAITING = 1  # 1: end when a row has finished, as a request waits for one
    READ = 2  # rounds that the host has read, or a smaller number: a launch ends while the ring of results after these is full


class Counter(IntEnum):
    """`round_counters`, and the header of each slot."""

    LAUNCH = 0  # with loops: number of the launch, from 1 on, which selects the batch
    PUBLISHED = 1  # rounds published so far; in a header, including the round in its slot


def ring_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`: rings in pinned memory that connect rounds with the host.

    Without them `batch_rows` is the batch, and `results` are for the caller to read. The host never writes a slot that the device still
    has to read, and never reads one that the device still writes.
    """
    batch, results = limits.max_rows, ResultLayout(limits.num_speculative_tokens).width
    rings: tuple[BufferSpec, ...] = (
        BufferSpec("round_counters", (len(Counter),), torch.int64),
        BufferSpec("batch_rows_ring_host", (limits.ring_depth, batch), torch.int64, "pinned", fill=limits.dummy_row),
        BufferSpec("results_ring_host", (limits.result_slots, batch, results), torch.int64, "pinned"),
        BufferSpec("logprobs_ring_host", (limits.result_slots, batch, limits.positions, 2), torch.float32, "pinned"),
    )
    if limits.max_top_logprobs:
        shape = (limits.result_slots, batch, limits.positions, 2 * limits.max_top_logprobs)
        rings += tuple(BufferSpec(f"top_{name}_ring_host", shape, dtype, "pinned") for name, dtype in TOP_RINGS.items())
    loops = (
        BufferSpec("loop_done", (1,), torch.int32),  # whether the launch ends after this round
        BufferSpec("loop_control_host", (len(Control),), torch.int64, "pinned"),
        BufferSpec("results_header_ring_host", (limits.result_slots, len(Counter)), torch.int64, "pinned"),
    )
    return (*rings, *loops) if limits.loops else rings


def admission_specs(limits: Limits, relaxed: bool, num_settings: int) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`: settings that few requests have, int64 or float32, and the ring for settings and state of a row.

    relaxed: drafts may be accepted that are not the target's choice. num_settings: how many numbers set the user's logits processors.
    """
    rows, words, size = limits.rows, limits.max_bad_words, limits.max_bad_word_tokens
    tables = (
        BufferSpec("row_bad_words", (rows, words, size), torch.int64, fill=-1),  # -1 before a shorter word
        BufferSpec("row_recent", (rows, size - 1 if words else 0), torch.int64, fill=-1),  # last tokens of the output, -1 before the first
        BufferSpec("row_relaxed", (rows, 2 * relaxed), torch.float32),
        BufferSpec("row_processors", (rows, num_settings), torch.float32),
    )
    settings = limits.max_stop_ids + limits.pages_per_row + 2 * limits.max_bias_ids + sum(math.prod(spec.shape[1:]) for spec in tables)
    line = 2 * limits.admission_ring_depth, max(settings, len(Column) + len(Param))
    return (*(spec for spec in tables if spec.nbytes), BufferSpec("admission_ring_host", line, torch.int64, "pinned"))


def round_specs(limits: Limits, samples_drafts: bool = True) -> tuple[BufferSpec, ...]:
    """The static tensors of a round: R rows of state, B rows of a batch, K drafts.

    samples_drafts: whether drafts may be drawn from a distribution, which is then stored for rejection sampling.
    """
    rows, batch, drafts, positions = limits.rows, limits.max_rows, limits.num_speculative_tokens, limits.positions
    words, columns, results = limits.mask_words, len(Column), ResultLayout(drafts).width
    int64, int32 = torch.int64, torch.int32
    return (
        # rows: state of a request from admission to finish
        BufferSpec("row_state", (rows, columns), int64),
        BufferSpec("row_params", (rows, len(Param)), torch.float32),
        BufferSpec("row_stop_ids", (rows, limits.max_stop_ids), int64, fill=-1),
        BufferSpec("row_bias_ids", (rows, limits.max_bias_ids), int64, fill=-1),
        BufferSpec("row_biases", (rows, limits.max_bias_ids), torch.float32),  # minus infinity for a bad token
        BufferSpec("row_prompt_seen", (rows, limits.num_tokens), torch.bool),
        BufferSpec("row_output_counts", (rows, limits.num_tokens), int32),  # updated by sampled rounds only
        BufferSpec("row_block_tables", (rows, limits.pages_per_row), int64),
        BufferSpec("row_drafts", (rows, drafts), int64, fill=-1),  # after a chain's last draft -1, or REFUSED and -1
        # whether a draft was chosen with probability 1; if not, the distribution that it was drawn from
        BufferSpec("row_certain", (rows, drafts), torch.bool, fill=1),
        BufferSpec("row_draft_probs", (rows, drafts if samples_drafts else 0, limits.num_tokens), torch.float32),
        BufferSpec("row_masks", (rows, positions, words), int32),
        BufferSpec("row_tags", (rows, positions, TAG_FIELDS), int64),
        BufferSpec("checked_status", (batch * positions,), int64),  # [B, N]: of the N masks of each batch row that were checked last
        BufferSpec("batch_constrained", (batch,), torch.bool),
        # the batch of one round: batch row -> row, and data that one stream writes and another reads
        BufferSpec("batch_rows", (batch,), int64, fill=limits.dummy_row),
        BufferSpec("batch_drafts", (drafts, batch), int64, fill=-1),
        BufferSpec("results", (batch, results), int64),
        BufferSpec("results_logprobs", (batch, positions, 2), torch.float32),
        # host link: written and read by host nodes within one replay
        BufferSpec("state_host", (batch, len(HostColumn)), int64, "pinned"),
        BufferSpec("drafts_host", (drafts, batch), int64, "pinned", fill=-1),
        BufferSpec("masks_host", (positions, batch, words), int32, "pinned"),
        BufferSpec("contents_host", (positions, batch, CONTENT_FIELDS), int64, "pinned"),  # contents of masks_host
        BufferSpec("tags_host", (positions, batch, TAG_FIELDS), int64, "pinned"),
        # a ring: the host never writes a slot that the device still has to copy
        BufferSpec("seen_ring_host", (limits.admission_ring_depth, -(-limits.num_tokens // 32)), int32, "pinned"),  # prompt token bits
    )


def state_specs(limits: Limits, width: int, dtype: torch.dtype) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`, for saving the target's states: `width` numbers per position."""
    depth, batch, positions = limits.ring_depth, limits.max_rows, limits.positions
    return (
        BufferSpec("results_states", (batch, positions, width), dtype),
        BufferSpec("prompt_states", (limits.prompt_window - 1, width), dtype),
        BufferSpec("states_ring_host", (depth, batch, positions, width), dtype, "pinned"),
        # one line per token; at most prefill_chunk tokens of prompts are processed between two rounds
        BufferSpec("prompt_states_ring_host", (depth * limits.prefill_chunk, width), dtype, "pinned"),
    )
