"""One decode round, in reading order: the stages, the two streams and the host nodes.

    main                                      side: host nodes, native work under the models' compute
    target_verify                             accept d_K, fill mask row K          (drafts not masked, or none: commit, walk all)
      wait; mask, choose, accept
    draft_prefill                             commit the round's tokens, fill row 0
      wait row 0; mask, choose d_1
    draft_decode                              accept d_1, fill row 1
      wait row 1; mask, choose d_2            ... and so on to d_K

A proposer drafts whole chains in place of the draft's stages; with forced tokens it is guided too, place by place. Beside a
draft, a look-up's chain is there in front of draft_prefill: its tokens stand in place of the draft's until one of them does not.
The mask that guided draft i + 1 verifies it in the next round: each of the K + 1 mask rows is filled once, used twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepgraph.graphs import drafting, proposing, stages
from stepgraph.graphs.attention.choose import OPERATION, AttentionChoice
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import CaptureContext, Step, StreamEvent, current_context
from stepgraph.graphs.model import ModelPair, Proposer
from stepgraph.graphs.shapes import GraphKey, Limits
from stepgraph.sampling.acceptance import Emission
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, HostStep, advance, fill_new
from stepgraph.sampling.grammar.status import HostColumn

SIDE = "side"


@dataclass(frozen=True)
class Round:
    """What every key of an engine shares. `step(key)` is the function to record."""

    limits: Limits
    models: ModelPair
    host: HostLink
    draft_masks: bool = True  # False: drafts are chosen freely, and one host node walks them under the next target_verify
    forced_acceptance: tuple[float, ...] | None = None  # for benchmarks
    attention: AttentionChoice = OPERATION

    def step(self, key: GraphKey) -> Step:
        return lambda buffers: self.run(buffers, key)

    def run(self, buffers: StaticBuffers, key: GraphKey) -> None:
        context = current_context()
        target, draft, proposer, _ = self.models
        grammar = GrammarLane(self, buffers, context, key.rows) if key.constrained else None
        with context.stage("read_batch"):
            batch = read_batch(buffers, key.rows, self.attention)

        masks_ready = grammar.head() if grammar else None
        with context.stage("target_verify"):
            logits, features = stages.target_verify(buffers, batch, target, self.limits)
        if masks_ready:
            context.wait(masks_ready)
        with context.stage("accept"):
            emission, after = stages.accept(buffers, batch, logits, key.constrained, key.sampled, self.forced_acceptance)
        if proposer is not None:
            with context.stage("propose"):
                proposing.note_emission(buffers, batch, emission, self.limits)
                drafting.keep_chain(buffers, after, self._propose(buffers, after, proposer, grammar, context))
        if draft is None:
            return

        masked = grammar is not None and self.guided(buffers)
        tokens, drafts, chain = emission.tokens, [], None
        with context.stage("accept"):
            alive = drafting.going_on(after)
        for step in range(1, self.limits.positions):
            mask_ready = grammar.row(step - 1) if grammar and masked else None
            if step == 1:
                chain = self._look_up(buffers, batch, after, emission, context)
                with context.stage("draft_prefill"):
                    logits, features = drafting.draft_prefill(buffers, batch, emission, features, draft, self.limits)
            else:
                with context.stage(f"draft_decode {step - 1}"):
                    logits, features = drafting.draft_decode(buffers, after, step - 1, tokens, features, draft, self.limits)
            if mask_ready:
                context.wait(mask_ready)
            with context.stage(f"choose_draft {step}"):
                tokens = drafting.choose_draft(buffers, after, step, logits, alive, masked, key.sampled, draft.d2t, chain)
                buffers.batch_drafts[step - 1, : key.rows].copy_(tokens)
                chain = None if chain is None else drafting.agreeing(chain, step, tokens)
                alive = tokens >= 0
            drafts.append(tokens)
        with context.stage("keep_chain"):
            drafting.keep_chain(buffers, after, torch.stack(drafts, 1))

    def guided(self, buffers: StaticBuffers) -> bool:
        """Whether each draft is chosen under its mask; else one host node walks them all under the next target_verify."""
        if self.models.proposer is not None:
            return "batch_forced" in buffers
        return self.draft_masks and self.models.draft is not None

    def _look_up(self, buffers: StaticBuffers, batch: Batch, after: Batch, emission: Emission, context: CaptureContext) -> Tensor | None:
        """The chains that are found in the rows' texts, for drafts that stand in place of a draft model's."""
        if self.models.look_up is None:
            return None
        with context.stage("look_up"):
            proposing.note_emission(buffers, batch, emission, self.limits)
            return proposing.propose(buffers, after, self.models.look_up, self.limits)

    def _propose(
        self, buffers: StaticBuffers, after: Batch, proposer: Proposer, grammar: GrammarLane | None, context: CaptureContext
    ) -> Tensor:
        """The chain of a proposer. A token that a grammar forces stands in its place, and what is proposed goes on while it agrees."""
        if grammar is None or not self.guided(buffers):
            return proposing.propose(buffers, after, proposer, self.limits)
        mask_ready = grammar.row(0)
        proposed = proposing.propose(buffers, after, proposer, self.limits)
        alive, drafts = drafting.going_on(after), []
        for step in range(1, self.limits.positions):
            context.wait(mask_ready if step == 1 else grammar.row(step - 1))
            with context.stage(f"choose_draft {step}"):
                tokens = proposing.choose_proposed(buffers, after, step, proposed[:, step - 1], alive)
                buffers.batch_drafts[step - 1, : grammar.size].copy_(tokens)
                proposed = drafting.agreeing(proposed, step, tokens)
                alive = tokens >= 0
            drafts.append(tokens)
        return torch.stack(drafts, 1)


@dataclass(frozen=True)
class GrammarLane:
    """The side stream of one round: what it shows the host, the host nodes, and the masks it brings back."""

    round: Round
    buffers: StaticBuffers
    context: CaptureContext
    size: int

    def head(self) -> StreamEvent:
        """Under target_verify: the end of the chain that the round before began."""
        drafts = self.round.limits.num_speculative_tokens
        walk_all = drafts == 0 or not self.round.guided(self.buffers)
        steps = [BEGIN_ROUND, fill_new(stage=drafts), advance(drafts)]
        if walk_all:
            steps = [BEGIN_ROUND, COMMIT, *(advance(index) for index in range(1, drafts + 1)), END_ROUND]

        begun = self.context.record()
        with self.context.stream(SIDE):
            self.context.wait(begun)
            with self.context.stage("show head"):
                self._show_state()
                rows = self.buffers.batch_rows[: self.size]
                for index in range(0 if walk_all else drafts - 1, drafts):
                    self.buffers.drafts_host[index, : self.size].copy_(self.buffers.row_drafts[rows, index], non_blocking=True)
            return self._node("head", steps, range(drafts + 1) if walk_all else range(drafts, drafts + 1))

    def row(self, index: int) -> StreamEvent:
        """Under the draft's compute: mask row `index` of the chain that this round begins."""
        size = self.size
        steps = [COMMIT if index == 0 else advance(index)]
        if index == self.round.limits.num_speculative_tokens - 1:
            steps.append(END_ROUND)

        reached = self.context.record()
        with self.context.stream(SIDE):
            self.context.wait(reached)
            name = f"advance {index}" if index else "commit"
            with self.context.stage(f"show {name}"):
                if index == 0:
                    self._show_state()
                else:
                    self.buffers.drafts_host[index - 1, :size].copy_(self.buffers.batch_drafts[index - 1, :size], non_blocking=True)
            return self._node(name, steps, range(index, index + 1))

    def _show_state(self) -> None:
        state = self.buffers.row_state[self.buffers.batch_rows[: self.size], : len(HostColumn)]
        self.buffers.state_host[: self.size].copy_(state, non_blocking=True)

    def _node(self, name: str, steps: Sequence[HostStep], stages_filled: range) -> StreamEvent:
        """A host node over this round's pinned memory, then the way back of what it filled."""
        buffers, first, last, size = self.buffers, stages_filled.start, stages_filled.stop, self.size
        forced = [buffers.forced_host] if "forced_host" in buffers else []
        self.context.host_node(
            name,
            self.round.host.node(steps),
            reads=[buffers.state_host, buffers.drafts_host],
            writes=[buffers.masks_host[first:last], buffers.tags_host, *forced],
        )
        with self.context.stage(f"place {name}"):
            for stage in stages_filled:
                buffers.batch_masks[stage, :size].copy_(buffers.masks_host[stage, :size], non_blocking=True)
                buffers.batch_tags[stage, :size].copy_(buffers.tags_host[stage, :size], non_blocking=True)
                stages.place_masks(buffers, size, stage)
                if forced and stage < self.round.limits.num_speculative_tokens:
                    buffers.batch_forced[stage, :size].copy_(buffers.forced_host[stage, :size], non_blocking=True)
        return self.context.record()
