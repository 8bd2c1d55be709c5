"""Baseline: a hand-written decoding loop with one graph for the target, two for the draft, and masks filled on the host between them.

One step: launch the target over every row's last token and drafts; meanwhile fill the masks row by row and position by position, accepting
drafts and rolling back; upload the masks, choose and accept; wait for the accepted tokens; advance the matchers; launch the draft over
them, then once per further draft; wait for the drafts. The host needs every length, so it waits twice per step. Drafts are not masked.

Models, kernels, matchers and recorded graphs are those of this project; only the synchronisation differs. Greedy decoding only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs import Backend, BufferSpec, Limits, StaticBuffers
from stepgraph.graphs.attention.paged import DEFAULT_ATTENTION, AttentionChoice
from stepgraph.graphs.model import DraftModel, TargetModel
from stepgraph.graphs.model_call import ModelInput
from stepgraph.sampling import kernels
from stepgraph.sampling.grammar import CompiledConstraint, MaskStatus, Matcher, Vocabulary
from stepgraph.sampling.grammar.status import FinishCode

REASONS = {
    FinishCode.STOP: "stop",
    FinishCode.LENGTH: "length",
    FinishCode.CONSTRAINT_COMPLETE: "constraint_complete",
    FinishCode.DEAD_END: "dead_end",
}
PAGE = 16


@dataclass
class Row:
    """Host state of one request."""

    length: int  # tokens so far
    length_limit: int  # length limit
    last: int
    matcher: Matcher | None
    drafts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reason: str = ""


class Sizes(NamedTuple):
    rows: int
    drafts: int
    max_length: int


class ThreeGraphs:
    """Rows that decode together. `admit` fills a free row, `step` advances all of them, `rows` has their state.

    `waits` counts waits of the host for the device, `accepted` counts accepted drafts.
    """

    def __init__(
        self,
        backend: Backend,
        target: TargetModel,
        draft: DraftModel | None,
        vocabulary: Vocabulary,
        sizes: Sizes,
        attention: AttentionChoice = DEFAULT_ATTENTION,
    ) -> None:
        assert (draft is not None) == (sizes.drafts > 0)
        self._backend, self._target, self._draft, self._vocabulary, self._attention = backend, target, draft, vocabulary, attention
        self.sizes, self.waits, self.accepted = sizes, 0, 0
        pages = -(-sizes.max_length // PAGE)
        self._limits = Limits(
            max_rows=sizes.rows,
            num_speculative_tokens=sizes.drafts,
            max_length=sizes.max_length,
            page_size=PAGE,
            num_pages=pages * sizes.rows,
            vocab_size=target.vocab_size,
            num_tokens=len(vocabulary.tokens),
            feature_size=target.feature_size,
        )
        self.rows: list[Row | None] = [None] * sizes.rows
        self._buffers = self._make_buffers(pages)
        graphs = {"target": self._verify, "draft": self._draft_first, "next": self._draft_next}
        expected = list(graphs)[: min(3, 1 + sizes.drafts)]
        self._graphs = {name: backend.capture(graphs[name], self._buffers) for name in expected}

    def _make_buffers(self, pages: int) -> StaticBuffers:
        rows, verified, target = self.sizes.rows, self.sizes.drafts + 1, self._target
        words, whole = self._vocabulary.mask_words, torch.int64
        features = (rows, verified, target.feature_size)
        specs = [
            BufferSpec("row_data", (rows, verified + 3), whole),  # last token, drafts; number of valid ones, length, end
            BufferSpec("row_data_host", (rows, verified + 3), whole, "pinned", fill=-1),
            BufferSpec("tables", (rows, pages), whole),
            BufferSpec("logits", (rows, verified, len(self._vocabulary.tokens)), self._logits_type()),
            BufferSpec("features", features, target.feature_dtype),
            BufferSpec("masks", (rows, verified, words), torch.int32),
            BufferSpec("masks_host", (rows, verified, words), torch.int32, "pinned"),
            BufferSpec("statuses", (rows, verified + 1), whole),  # mask status of every position; 1 if the row has a grammar
            BufferSpec("statuses_host", (rows, verified + 1), whole, "pinned"),
            BufferSpec("taken", (rows, verified + 1), whole),  # emitted tokens; number of valid ones
            BufferSpec("drafts", (rows, max(1, self.sizes.drafts)), whole),
            BufferSpec("stops", (rows, len(self._vocabulary.stop_token_ids)), whole),
            BufferSpec("draft_position", (rows,), whole),
            BufferSpec("draft_number", (1,), whole, fill=1),  # position of the next draft
            BufferSpec("draft_features", (rows, 1, target.feature_size), target.feature_dtype),
            *target.cache_specs(self._limits),
        ]
        constants = {"target": target}
        if self._draft is not None:
            # from the second draft on, a head reads its own states, which may be narrower
            specs += self._draft.cache_specs(self._limits)
            specs = [spec if spec.name != "draft_features" else self._draft_states(spec) for spec in specs]
            constants["draft"] = self._draft  # type: ignore[assignment]
        buffers = StaticBuffers(specs, self._backend.device, constants=constants)  # type: ignore[arg-type]
        order = torch.arange(1, 1 + rows * pages).view(rows, pages)
        buffers.tables.copy_(order)
        buffers.stops.copy_(torch.tensor(self._vocabulary.stop_token_ids).expand(rows, -1))
        return buffers

    def _logits_type(self) -> torch.dtype:
        weight = getattr(self._target, "unembedding", None)
        return torch.float32 if weight is None else weight.dtype

    def _draft_states(self, spec: BufferSpec) -> BufferSpec:
        config = getattr(self._draft, "config", None)
        width = spec.shape[2] if config is None else config.layer.hidden_size
        return BufferSpec(spec.name, (*spec.shape[:2], width), spec.dtype)

    # the three graphs

    def _inputs(self, b: StaticBuffers, tokens: Tensor, first: Tensor, expected: Tensor, features: Tensor | None = None) -> ModelInput:
        positions = first + torch.arange(tokens.shape[1], device=tokens.device)
        expected = expected & (positions < b.row_data[:, -1:])
        positions = positions.clamp(0, self.sizes.max_length - 1)
        slots = torch.where(expected, b.tables.gather(1, positions // PAGE) * PAGE + positions % PAGE, positions % PAGE)
        return ModelInput(tokens.clamp(min=0), positions, slots, b.tables, PAGE, features, attend=self._attention.round_attend())

    def _verify(self, b: StaticBuffers) -> None:
        verified = self.sizes.drafts + 1
        expected = torch.arange(verified, device=b.row_data.device) < b.row_data[:, verified : verified + 1]
        output = self._target.forward(self._inputs(b, b.row_data[:, :verified], b.row_data[:, -2:-1] - 1, expected), b)
        b.logits.copy_(self._target.logits(output.hidden)[..., : self._limits.num_tokens])
        b.features.copy_(output.next_features)

    def _draft_first(self, b: StaticBuffers) -> None:
        assert self._draft is not None
        count = b.taken[:, -1:]
        expected = torch.arange(b.taken.shape[1] - 1, device=count.device) < count
        output = self._draft.forward(self._inputs(b, b.taken[:, :-1], b.row_data[:, -2:-1], expected, b.features), b)
        last = (count - 1).clamp(min=0)[:, :, None]
        hidden = output.hidden.gather(1, last.expand(-1, 1, output.hidden.shape[2]))
        b.draft_features.copy_(output.next_features.gather(1, last.expand(-1, 1, output.next_features.shape[2])))
        b.drafts[:, 0].copy_(self._most_likely(hidden[:, 0]))
        b.draft_position.copy_(b.row_data[:, -2] + b.taken[:, -1])

    def _draft_next(self, b: StaticBuffers) -> None:
        assert self._draft is not None
        tokens = b.drafts.index_select(1, b.draft_number - 1)
        inputs = self._inputs(b, tokens, b.draft_position[:, None], b.taken[:, -1:] > 0, b.draft_features)._replace(step=2)
        output = self._draft.forward(inputs, b)
        b.draft_features.copy_(output.next_features)
        b.drafts.index_copy_(1, b.draft_number, self._most_likely(output.hidden[:, 0])[:, None])
        b.draft_position.add_(1)

    def _most_likely(self, hidden: Tensor) -> Tensor:
        assert self._draft is not None
        tokens = self._draft.logits(hidden)[..., : self._limits.num_tokens].argmax(-1)
        return tokens if self._draft.d2t is None else self._draft.d2t[tokens]

    # the host

    @torch.no_grad()
    def admit(self, prompt: Sequence[int], grammar: CompiledConstraint | None, max_new_tokens: int) -> Row:
        """Prefill all but the last token of the prompt in one call."""
        slot, b, count = self.rows.index(None), self._buffers, len(prompt) - 1
        device = self._backend.device
        row = Row(len(prompt), len(prompt) + max_new_tokens, prompt[-1], grammar.matcher() if grammar else None)
        assert row.length_limit <= self.sizes.max_length
        tokens, table = torch.tensor([list(prompt)], device=device), b.tables[slot : slot + 1]
        positions = torch.arange(count + 1, device=device)[None]
        slots = table.gather(1, positions // PAGE) * PAGE + positions % PAGE
        attend = self._attention.prompt_attend
        features = torch.zeros(1, 1, self._target.feature_size, dtype=self._target.feature_dtype, device=device)
        if count:
            part = slice(count)
            inputs = ModelInput(tokens[:, part], positions[:, part], slots[:, part], table, PAGE, attend=attend(0, count))
            features = torch.cat([features, self._target.forward(inputs, b).next_features], 1)
        if self._draft is not None:
            self._draft.forward(ModelInput(tokens, positions, slots, table, PAGE, features, attend=attend(0, count + 1)), b)
        self.rows[slot] = row
        return row

    @torch.no_grad()
    def step(self) -> None:
        b, verified = self._buffers, self.sizes.drafts + 1
        self._upload_rows()
        self._graphs["target"].replay()
        self._fill_masks()  # while the target runs
        b.masks.copy_(b.masks_host, non_blocking=True)
        b.statuses.copy_(b.statuses_host, non_blocking=True)
        status, constrained = b.statuses[:, :-1].contiguous(), b.statuses[:, -1] != 0
        finite, chosen = kernels.masked_argmax(b.logits, b.masks, None, constrained, status=status)
        room = b.row_data[:, -1] - b.row_data[:, -2]
        count = (b.row_data[:, verified] - 1).clamp(min=0)
        drafts = b.row_data[:, 1:verified].contiguous()
        emitted, accepted, finish = kernels.chain_accept(chosen, finite, drafts, count, status, b.stops, room)
        live = b.row_data[:, verified] > 0
        b.taken[:, :-1].copy_(chosen)
        b.taken[:, -1].copy_(torch.where(live, emitted, 0))
        self._read_results(torch.cat([b.taken, finish[:, None], accepted[:, None]], 1).tolist())
        if self._draft is None or not any(self.rows):
            return
        b.taken[:, -1].mul_(finish == FinishCode.RUNNING)  # finished rows draft no more
        self._graphs["draft"].replay()
        for number in range(1, self.sizes.drafts):
            b.draft_number.fill_(number)
            self._graphs["next"].replay()
        self.waits += 1
        for row, drafts in zip(self.rows, b.drafts.tolist(), strict=True):
            if row is not None:
                row.drafts = drafts

    def _upload_rows(self) -> None:
        b, verified = self._buffers, self.sizes.drafts + 1
        row_data = [
            [row.last, *row.drafts, *[-1] * (verified - 1 - len(row.drafts)), 1 + len(row.drafts), row.length, row.length_limit]
            if row
            else [*[-1] * verified, 0, 1, self.sizes.max_length]
            for row in self.rows
        ]
        b.row_data_host.copy_(torch.tensor(row_data))
        b.row_data.copy_(b.row_data_host, non_blocking=True)

    def _fill_masks(self) -> None:
        """Positions after an illegal draft keep a mask of ones: they are never reached."""
        b, verified = self._buffers, self.sizes.drafts + 1
        b.masks_host.fill_(-1)
        statuses = [[int(MaskStatus.OK)] * verified + [int(row is not None and row.matcher is not None)] for row in self.rows]
        flat = b.masks_host.view(-1, b.masks_host.shape[2])
        for slot, row in enumerate(self.rows):
            if row is None or row.matcher is None:
                continue
            advanced = 0
            for index, token in enumerate([*row.drafts, None]):
                status = row.matcher.fill_next_token_bitmask(flat, slot * verified + index)
                statuses[slot][index] = int(status)
                if token is None or status != MaskStatus.OK or not row.matcher.accept_token(token):
                    break
                advanced += 1
            row.matcher.rollback(advanced)
        b.statuses_host.copy_(torch.tensor(statuses))

    def _read_results(self, row_data: list[list[int]]) -> None:
        self.waits += 1
        for slot, (row, (*tokens, emitted, finish, accepted)) in enumerate(zip(self.rows, row_data, strict=True)):
            if row is None:
                continue
            for token in tokens[:emitted]:
                assert row.matcher is None or row.matcher.accept_token(token)
            row.tokens += tokens[:emitted]
            self.accepted += accepted
            row.length, row.last, row.drafts = row.length + emitted, row.tokens[-1] if row.tokens else row.last, []
            if finish != FinishCode.RUNNING:
                row.reason = REASONS[FinishCode(finish)]
                self.rows[slot] = None
