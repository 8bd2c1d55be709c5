"""Prompts: one chunk of one row at a time, between rounds.

The host sends a line with the tokens of a chunk and where they belong; the rest happens on the device. A recorded chunk therefore
serves any part of any prompt with at most as many tokens: the positions after them are inert. Run eagerly, a chunk has exactly its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.graphs.attention.paged import DEFAULT_ATTENTION, AttentionChoice
from stepgraph.graphs.batch import model_logits
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Step
from stepgraph.graphs.layers.slot_mapping import place_tokens
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import Models, TargetModel
from stepgraph.graphs.model_call import Attend, Embeddings, ModelInput, check_shape, run_model
from stepgraph.sampling.sampler import ALL_COLUMNS

MAX_LOGITS = 1 << 23  # of a prompt at once, for its log-probabilities: 32 MiB in float32
MIN_CHUNK = 32  # tokens; a shorter chunk also reads all weights


class PromptField(IntEnum):
    """The first fields of a line; prompt_window tokens follow, then for each token whether an embedding replaces its own."""

    ROW = 0
    START = 1  # position of the first token
    END = 2  # after the last token that the target processes
    DRAFT_START = 3  # the draft takes the features of the position before: its chunk is one later, but for the first token of a prompt
    DRAFT_END = 4
    SHARED = 5  # cache entries below this position are shared with other rows: they are read, never written
    LORA = 6  # slot of the adapter


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt: the target processes `count` tokens from `start` on, the draft also the one after them."""

    row: int
    start: int
    count: int
    shared: int = 0
    lora_slot: int = 0

    @property
    def draft_start(self) -> int:
        return self.start + 1 if self.start else 0

    @property
    def draft_count(self) -> int:
        return self.start + self.count + 1 - self.draft_start

    def line(self, tokens: Sequence[int], limits: Limits, embedded: Sequence[tuple[int, int]] = ()) -> npt.NDArray[np.int64]:
        """The line of its count + 1 tokens. embedded: offset and length of each part with embeddings."""
        line, window = np.zeros(line_width(limits), np.int64), limits.prompt_window
        end = self.start + self.count
        line[: len(PromptField)] = self.row, self.start, end, self.draft_start, end + 1, self.shared, self.lora_slot
        line[len(PromptField) : len(PromptField) + len(tokens)] = tokens
        for offset, length in embedded:
            line[len(PromptField) + window + offset : len(PromptField) + window + offset + length] = 1
        return line


def line_width(limits: Limits) -> int:
    return len(PromptField) + 2 * limits.prompt_window


def prompt_specs(limits: Limits, target: TargetModel) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`, for `prefill`."""
    width, embedding_size = line_width(limits), getattr(target, "embedding_size", None)
    lines = (
        BufferSpec("prompt", (width,), torch.int64),
        BufferSpec("prompt_ring_host", (limits.admission_ring_depth, width), torch.int64, "pinned"),
    )
    if embedding_size is None:
        return lines
    return (*lines, BufferSpec("prompt_embeddings", (limits.prompt_window, embedding_size), target.feature_dtype))


@dataclass(frozen=True, order=True)
class PromptKey:
    tokens: int  # at most so many

    def __str__(self) -> str:
        return f"prompt tokens={self.tokens}"

    @property
    def rows(self) -> int:
        """Rows of its matrix products."""
        return self.tokens

    @property
    def kind(self) -> str:
        return "prompt"


def prompt_keys(limits: Limits) -> tuple[PromptKey, ...]:
    """Largest first: a whole chunk, and quarters of that for the ends of prompts. Below MIN_CHUNK a shorter one is no faster."""
    keys = [PromptKey(limits.prompt_window - 1)]
    while keys[-1].tokens // 4 >= MIN_CHUNK:
        keys.append(PromptKey(keys[-1].tokens // 4))
    return tuple(keys)


@dataclass(frozen=True)
class Prompts:
    """What the chunks of an engine share. `step(key)` is the function to record."""

    limits: Limits
    models: Models
    attention: AttentionChoice = DEFAULT_ATTENTION

    def step(self, key: PromptKey) -> Step:
        """A chunk of at most `key.tokens` tokens."""
        tokens, attend = key.tokens, self.attention.chunk_attend
        return lambda buffers: self._prefill(buffers, tokens, tokens + 1, "prompt_embeddings" in buffers, attend(), attend())

    def run(self, buffers: StaticBuffers, chunk: Chunk, embedded: bool, scores: Tensor | None = None) -> None:
        """The chunk that `buffers.prompt` holds. embedded: some of its tokens have embeddings. scores: see `_write_scores`."""
        parts = (chunk.start, chunk.count), (chunk.draft_start, chunk.draft_count)
        attend, draft_attend = (self.attention.prompt_attend(first, count) if count else None for first, count in parts)
        self._prefill(buffers, chunk.count, chunk.draft_count, embedded, attend, draft_attend, scores)

    def _prefill(
        self,
        buffers: StaticBuffers,
        count: int,
        draft_count: int,
        embedded: bool,
        attend: Attend | None,
        draft_attend: Attend | None,
        scores: Tensor | None = None,
    ) -> None:
        """Fill both caches from one line, with room for `count` tokens of the target and `draft_count` of the draft."""
        (target, draft), limits, window = self.models[:2], self.limits, self.limits.prompt_window
        tokens, is_embedded = buffers.prompt[len(PromptField) :].split(window)
        embeddings = Embeddings(buffers.prompt_embeddings[None], is_embedded[None] != 0) if embedded else None
        if count:
            chunk_embeddings = None if embeddings is None else Embeddings(embeddings.values[:, :count], embeddings.given[:, :count])
            inputs = self._inputs(buffers, tokens[None, :count], PromptField.START, attend)
            lora_slots = _field(buffers, PromptField.LORA) if limits.max_loras else None
            output = run_model("target", target.forward, inputs._replace(embeddings=chunk_embeddings, lora_slots=lora_slots), buffers)
            check_shape("target features", output.next_features, 1, count, limits.feature_size)
            if scores is not None:
                self._write_scores(output.hidden, tokens[1:], scores)
            if "prompt_states" in buffers:
                states = buffers.prompt_states
                states[:count].copy_(output.saved_states(states.shape[1])[0])
        if draft is None or not draft_count:
            return
        # No position comes before the first token.
        features = torch.zeros(1, 1, limits.feature_size, dtype=target.feature_dtype, device=tokens.device)
        features = torch.cat([features, output.next_features], 1) if count else features
        skipped = _field(buffers, PromptField.DRAFT_START) - _field(buffers, PromptField.START)
        index = (torch.arange(draft_count, device=tokens.device) + skipped).clamp(max=count)
        inputs = self._inputs(buffers, tokens.index_select(0, index)[None], PromptField.DRAFT_START, draft_attend)
        chunk_embeddings = None
        if embeddings is not None and getattr(draft, "shares_embeddings", False):
            chunk_embeddings = Embeddings(*(each.index_select(1, index) for each in embeddings))
        run_model("draft", draft.forward, inputs._replace(features=features.index_select(1, index), embeddings=chunk_embeddings), buffers)

    def _write_scores(self, hidden: Tensor, tokens: Tensor, scores: Tensor) -> None:
        """Write log-probabilities after the states hidden [1, >= n, H] to scores [n, 1 + 2 * N] in host memory: of tokens [>= n], of the N
        most probable tokens, and the ids of these."""
        target, count = self.models.target, scores.shape[1] // 2
        columns, size = getattr(target, "shard", None) or ALL_COLUMNS, max(1, MAX_LOGITS // self.limits.vocab_size)
        for start in range(0, len(scores), size):
            part = scores[start : start + size]
            end = start + len(part)
            logits = model_logits("target", target, hidden[:, start:end], self.limits)[0].to(torch.float32)
            best, ids = columns.ranked(logits, count) if count else (logits[:, :0],) * 2
            values = torch.cat([columns.pick(logits, tokens[start:end, None]), best], 1) - columns.logsumexp(logits)
            part.copy_(torch.cat([values, ids], 1), non_blocking=True)

    def _inputs(self, buffers: StaticBuffers, tokens: Tensor, start: PromptField, attend: Attend | None) -> ModelInput:
        """Consecutive positions from the line's `start` on. Those beyond its end, which is the next field, use the scratch page."""
        limits, shared, page_size = self.limits, _field(buffers, PromptField.SHARED), self.limits.page_size
        tables = buffers.row_block_tables[_field(buffers, PromptField.ROW)]
        first, end = _field(buffers, start), _field(buffers, PromptField(start + 1))
        tokens, positions, slots = place_tokens(tokens, first, end, tables, 0, page_size, limits.max_length)
        slots = torch.where(positions < shared, positions % page_size, slots)
        return ModelInput(tokens, positions, slots, tables, page_size, attend=attend, shared=shared)


def _field(buffers: StaticBuffers, field: PromptField) -> Tensor:
    """[1] int64."""
    return buffers.prompt[field : field + 1]
