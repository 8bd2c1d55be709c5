"""Host to device copies between rounds: block tables and settings, prompt chunks, row state."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Event
from stepgraph.graphs.errors import step_errors
from stepgraph.graphs.graph_set import GraphSet
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.logits_processors import LogitsProcessor
from stepgraph.graphs.model import Models
from stepgraph.graphs.prefill import Chunk, Prompts
from stepgraph.graphs.proposing import ANCHOR_TOKENS, given_from
from stepgraph.graphs.row_layout import Column
from stepgraph.runtime.hidden_states import HiddenStates
from stepgraph.runtime.request import ActiveRequest, Job
from stepgraph.runtime.watchdog import Watchdog
from stepgraph.sampling import bitmask
from stepgraph.sampling.fields import error_summary
from stepgraph.sampling.grammar.automaton.arena import ArenaBlock
from stepgraph.sampling.grammar.status import FinishCode
from stepgraph.sampling.rng import draft_seed
from stepgraph.sampling.sampler import Param

CopyLaunch = Callable[[Callable[[], object]], Event]


class GrammarCopyError(RuntimeError):
    """A copy of a request's grammar could not be launched."""


class PinnedRing:
    """Slots of one pinned buffer. A slot is reused once the copy that read it has finished."""

    def __init__(self, backend: Backend, ring_host: Any) -> None:
        self._backend, self._ring = backend, ring_host
        self._events: list[Event | None] = [None] * len(ring_host)
        self._next = 0
        self.width = ring_host.shape[1]

    @property
    def ready(self) -> bool:
        """Whether `send` will not wait."""
        last_copy = self._events[self._next]
        return last_copy is None or last_copy.query()

    def send(self, values: Sequence[int] | npt.NDArray[Any], copy: Callable[[Any], object], launch: CopyLaunch | None = None) -> Event:
        """Write `values` to the start of the next slot, and launch `copy(slot)`. Waits while the slot is being copied.

        launch: replaces the launch between rounds. Returns an event after the copy.
        """
        last_copy = self._events[self._next]
        if last_copy is not None and not self.ready:
            last_copy.wait()
        slot = self._ring[self._next]
        slot.numpy()[: len(values)] = values
        self._events[self._next] = copied = (launch or self._run)(lambda: copy(slot))
        self._next = (self._next + 1) % len(self._events)
        return copied

    def _run(self, copy: Callable[[], object]) -> Event:
        self._backend.run(copy)
        return self._backend.event()


class Uploader:
    """Uploads requests: block table and settings first, then the prompt in chunks, then the row state."""

    def __init__(
        self,
        backend: Backend,
        buffers: StaticBuffers,
        models: Models,
        limits: Limits,
        prompts: Prompts,
        graphs: GraphSet,
        watchdog: Watchdog | None,  # if waits have a limit
        states: HiddenStates | None = None,
        processors: Sequence[LogitsProcessor] = (),
        waits_for_grammars: bool = False,  # else a request begins in a step that depends on the speed of copies, which no recording has
    ) -> None:
        self._backend, self._buffers, self._models, self._limits = backend, buffers, models, limits
        self._prompts, self._graphs, self._watchdog, self._states = prompts, graphs, watchdog, states
        self._admission_ring = PinnedRing(backend, buffers.admission_ring_host)
        self._prompt_ring = PinnedRing(backend, buffers.prompt_ring_host)
        self._text_ring = PinnedRing(backend, buffers.text_ring_host) if models.reads_text else None
        self._seen_ring = PinnedRing(backend, buffers.seen_ring_host)
        self._processors, self.waits_for_grammars = processors, waits_for_grammars
        self._grammar_ring = PinnedRing(backend, buffers.image_ring_host) if "image_ring_host" in buffers else None
        self._copy_events: weakref.WeakKeyDictionary[ArenaBlock, Event] = weakref.WeakKeyDictionary()  # the event of its last copy

    def send_grammar(self, request: ActiveRequest) -> bool:
        """Launch copies of the request's grammar to its block, until one would wait (see __init__). Returns whether all are launched.

        The copies run beside the rounds. Rounds in flight may still read the grammar that had this memory before. GrammarCopyError if one
        fails; the copies run in order, so that a later request may repeat it, or use the memory.
        """
        block, grammar_ring = request.arena_block, self._grammar_ring
        while block is not None and grammar_ring is not None and block.num_copied < len(block.image):
            if not (self.waits_for_grammars or grammar_ring.ready):
                if self._watchdog:
                    self._watchdog.check_copies()
                return False
            part = block.image[block.num_copied : block.num_copied + grammar_ring.width]
            start = block.offset + block.num_copied
            copy = functools.partial(_copy_image, self._buffers.grammar_arena[start : start + len(part)])
            launch = functools.partial(self._backend.copy_aside, after_launched=not block.num_copied)
            self._copy_events[block] = copied = grammar_ring.send(part, copy, launch)
            if self._watchdog:
                self._watchdog.note_copy("a grammar", copied)
            block.num_copied += len(part)
        return True

    def prefill(self, request: ActiveRequest, budget: int) -> int:
        """Launch the next chunk of the prompt, and after the last one the row's state. Returns the number of tokens."""
        start, reused = request.num_prefilled, request.num_reused
        count = min(request.num_to_prefill, max(budget, reused - start + 1))  # recompute at least one token past the shared prefix
        chunk, spans = Chunk(request.row, start, count, reused, request.job.lora.slot), tuple(_embeddings(request.job, start, count + 1))
        buffers, prompts, scores = self._buffers, self._prompts, request.job.prompt_scores if request.job.scores_prompt else None
        scores = None if scores is None else scores[start : start + count]
        graph = self._graphs.prompt_graph(count) if scores is None else None  # recorded chunks have no logits

        def send(slot: Tensor) -> None:
            buffers.prompt.copy_(slot, non_blocking=True)
            for offset, values in spans:
                buffers.prompt_embeddings[offset : offset + len(values)].copy_(values, non_blocking=True)
            if graph is None:
                with step_errors("a chunk of a prompt", buffers.device):
                    prompts.run(buffers, chunk, bool(spans), scores)

        embedded = [(offset, len(values)) for offset, values in spans]
        self._prompt_ring.send(chunk.line(request.job.context_ids[start : start + count + 1], self._limits, embedded), send)
        if graph is not None:
            graph.replay(is_round=False)
        if self._states:
            self._states.prompt_launched(request.job, count)
        if request.num_to_prefill == count:
            if request.arena_block is not None:
                self._backend.wait_for(self._copy_events[request.arena_block])
            self._upload_state(request)
        return count

    def retire(self, row: int) -> None:
        """Make a row inert from the next launch on."""
        state = self._buffers.row_state
        self._backend.run(lambda: state[row, Column.FINISH].fill_(int(FinishCode.RETIRED)))

    def add_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Upload entries (row, index, page) of block tables. No round in flight reads them."""
        tables, most = self._buffers.row_block_tables, self._admission_ring.width // 3
        for start in range(0, len(entries), most):
            count = len(part := entries[start : start + most])

            def copy(slot: Tensor, count: int = count) -> None:
                rows, indices, pages = slot[: 3 * count].to(tables.device, non_blocking=True).view(count, 3).unbind(1)
                tables.index_put_((rows, indices), pages)

            self._admission_ring.send([*itertools.chain.from_iterable(part)], copy)

    def begin(self, request: ActiveRequest) -> None:
        """Upload a request's block table and settings, before its first chunk."""
        buffers, limits, row, stop_ids = self._buffers, self._limits, request.row, request.job.stop_ids
        biases = request.job.sampling.biases
        prior = self._prior_output(request.job) if request.sampled and request.job.prior_output else None
        unused = limits.max_bias_ids - len(biases)
        parts: dict[str, list[Any]] = {
            "row_stop_ids": [*stop_ids, *[-1] * (limits.max_stop_ids - len(stop_ids))],
            "row_block_tables": [*request.pages, *[0] * (limits.pages_per_row - len(request.pages))],
            "row_bias_ids": [*biases, *[-1] * unused],
            "row_biases": [*biases.values(), *[0.0] * unused],
        }
        parts |= {name: part for name, part in _optional_settings(request.job, limits, self._processors).items() if name in buffers}

        def reset() -> None:
            buffers.row_prompt_seen[row].zero_()
            counts = buffers.row_output_counts[row].zero_()
            if prior is not None:  # for penalties
                tokens = prior.to(counts.device, non_blocking=True)
                counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))

        self._send_parts(row, parts, reset)
        if request.job.scores_prompt:
            shape = len(request.job.prompt_ids) - 1, 1 + 2 * (request.job.sampling.prompt_logprobs or 0)
            request.job.prompt_scores = BufferSpec("prompt_scores_host", shape, torch.float32, "pinned").allocate(buffers.device)
        if request.job.sampling.repetition_penalty != 1:  # otherwise the prompt's tokens have no effect
            self._upload_seen(request)
        if self._text_ring is not None:
            self._upload_text(request, self._text_ring)

    def _prior_output(self, job: Job) -> Tensor:
        """In pinned memory on a GPU: a copy from other memory would wait for the rounds in flight."""
        ids = torch.tensor(job.prior_output)
        return ids.pin_memory() if self._buffers.device.type == "cuda" else ids

    def _upload_seen(self, request: ActiveRequest) -> None:
        """Upload which tokens the prompt contains. All at once, since the part found in the cache is not prefilled."""
        row_seen, count = self._buffers.row_prompt_seen[request.row], self._limits.num_tokens
        seen = np.zeros(self._buffers.seen_ring_host.shape[1] * 32, dtype=np.bool_)
        seen[list(request.job.prompt_ids)] = True
        words = np.packbits(seen, bitorder="little").view(np.int32)
        self._seen_ring.send(words, lambda slot: row_seen.copy_(bitmask.unpack(slot.to(row_seen.device, non_blocking=True), count)))

    def _upload_text(self, request: ActiveRequest, texts: PinnedRing) -> None:
        """Upload what a proposer reads: the text and, from `given_from` on, the end of the prompt and draft_ids."""
        row_text, text, draft_ids = self._buffers.row_text[request.row], request.job.context_ids, request.job.draft_ids
        given = (*request.job.prompt_ids[-ANCHOR_TOKENS:], *draft_ids) if draft_ids else ()
        first = given_from(self._limits) + len(draft_ids) - len(given)
        split, end = len(text), len(text) + len(given)

        def copy(slot: Tensor) -> None:
            row_text.fill_(-1)
            row_text[:split].copy_(slot[:split], non_blocking=True)
            row_text[first : first + len(given)].copy_(slot[split:end], non_blocking=True)

        texts.send((*text, *given), copy)

    def _upload_state(self, request: ActiveRequest) -> None:
        buffers, job, row = self._buffers, request.job, request.row
        prompt, start = len(job.prompt_ids), given_from(self._limits)
        # With draft masks, a draft is verified with the mask it was chosen under; draft_ids have no such mask.
        usable = not job.prior_output and (not request.constrained or (self._models.draft is None and "batch_forced" not in buffers))
        offered = min(len(job.draft_ids), job.num_speculative_tokens) if usable else 0
        state = {
            Column.OWNER: job.id,
            Column.GENERATED: len(job.prior_output),
            Column.LAST_TOKEN: job.context_ids[-1],
            Column.FINISH: int(FinishCode.RUNNING),
            Column.DRAFT_COUNT: offered,
            Column.LENGTH: len(job.context_ids),
            Column.MAX_LENGTH: prompt + job.max_new_tokens,
            Column.CONSTRAINED: int(request.constrained),
            Column.DRAFT_LIMIT: job.num_speculative_tokens,
            Column.SEED: job.seed,
            Column.DRAFT_SEED: draft_seed(job.seed),
            Column.IMAGE: request.arena_block.offset if request.arena_block else 0,
            Column.LORA: job.lora.slot,
        }
        params = [getattr(job.sampling, column.name.lower()) for column in Param]
        parts: dict[str, list[Any]] = {"row_params": params, "row_state": [state.get(column, 0) for column in Column]}

        def reset() -> None:
            buffers.row_drafts[row].fill_(-1)
            if offered:
                buffers.row_drafts[row, :offered].copy_(buffers.row_text[row, start : start + offered])
                buffers.row_certain[row].fill_(True)
                if "row_looked_up" in buffers:
                    buffers.row_looked_up[row].fill_(True)
            buffers.row_tags[row].fill_(0)

        self._send_parts(row, parts, reset)

    def _send_parts(self, row: int, parts: Mapping[str, list[Any]], reset: Callable[[], None]) -> None:
        """Upload values to one row of each table, as one line of the ring, float32 as bits. reset: also launched, for other tables."""
        tables, sizes, line = [self._buffers[name][row] for name in parts], [len(part) for part in parts.values()], list[int]()
        for table, part in zip(tables, parts.values(), strict=True):
            line += np.array(part, np.float32).view(np.int32).tolist() if table.is_floating_point() else part

        def copy(slot: Tensor) -> None:
            reset()
            uploaded = slot[: len(line)].to(self._buffers.device, non_blocking=True).split(sizes)
            for table, part in zip(tables, uploaded, strict=True):
                table.copy_((part.to(torch.int32).view(torch.float32) if table.is_floating_point() else part).view_as(table))

        self._admission_ring.send(line, copy)


def _embeddings(job: Job, start: int, count: int) -> Iterator[tuple[int, Tensor]]:
    """The embeddings of `count` prompt tokens: (position from `start` on, tensor [n, width])."""
    for position, values in job.embeddings:
        first, end = max(position, start), min(position + len(values), start + count)
        if first < end:
            yield first - start, values[first - position : end - position]


def _copy_image(to: Tensor, slot: Tensor) -> None:
    try:
        to.copy_(slot[: len(to)], non_blocking=True)
    except Exception as error:
        raise GrammarCopyError(f"the grammar could not be copied to the device: {error_summary(error)}") from error


def _optional_settings(job: Job, limits: Limits, processors: Sequence[LogitsProcessor]) -> dict[str, list[Any]]:
    """Optional settings by table. A bad word fills the end of its line; recent tokens are the end of the output so far."""
    size, words = limits.max_bad_word_tokens, [[int(token) for token in word] for word in job.sampling.bad_words]
    words += [[]] * (limits.max_bad_words - len(words))
    settings = list[float]()
    for processor in processors:
        arguments = job.sampling.logits_processors.get(processor.name)
        settings += [float(arguments is not None), *(arguments or [0.0] * processor.num_arguments)]
    return {
        "row_bad_words": [token for word in words for token in (*[-1] * (size - len(word)), *word)],
        "row_recent": [*[-1] * (size - 1), *job.prior_output][1 - size :],
        "row_relaxed": [job.sampling.relaxed_top_n, job.sampling.relaxed_delta],
        "row_processors": settings,
    }
