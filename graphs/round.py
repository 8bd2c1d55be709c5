"""One decode round in reading order: stages on the main stream, host nodes on the side stream.

    main                                      side: host nodes, while the models compute
    target_verify                             accept d_K, fill mask row K          (unmasked drafts, or none: commit, accept all)
      wait; mask, choose, accept
    draft_prefill                             commit the emitted tokens, fill row 0
      wait row 0; mask, choose d_1
    draft_decode                              accept d_1, fill row 1
      wait row 1; mask, choose d_2            ... and so on to d_K

A proposer drafts a whole chain in one stage instead of draft_prefill and draft_decode; if the grammar also forces tokens, its
chain is masked position by position. A look-up beside a draft model runs before draft_prefill: a row drafts the tokens of its
look-up chain as long as they are legal, and the draft model's from then on. The mask that guides draft i + 1 also verifies it in
the next round: each of the K + 1 mask rows is filled once and used twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepgraph.graphs import drafting, proposing, stages
from stepgraph.graphs.attention.paged import OPERATION, AttentionChoice
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import CaptureContext, Step, StreamEvent, current_context
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import ModelPair
from stepgraph.graphs.proposer import Proposer
from stepgraph.graphs.shapes import GraphKey
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, HostStep, advance, fill_new
from stepgraph.sampling.grammar.status import HostColumn
from stepgraph.sampling.kernels import Emission

SIDE = "side"


@dataclass(frozen=True)
class Round:
    """The part of a round that all keys of an engine share. `step(key)` is the function to record."""

    limits: Limits
    models: ModelPair
    host: HostLink
    draft_masks: bool = True  # False: unmasked drafts; one host node accepts them all during the next target_verify
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
                proposing.append_emission(buffers, batch, emission, self.limits)
                drafting.store_chain(buffers, after, self._propose(buffers, after, proposer, grammar, context))
        if draft is None:
            return

        masked = grammar is not None and self.masks_drafts(buffers)
        tokens, drafts, chain = emission.tokens, [], None
        with context.stage("accept"):
            alive = drafting.continuing(after)
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
                chain = None if chain is None else drafting.matching_chains(chain, step, tokens)
                alive = tokens >= 0
            drafts.append(tokens)
        with context.stage("keep_chain"):
            drafting.store_chain(buffers, after, torch.stack(drafts, 1))

    def masks_drafts(self, buffers: StaticBuffers) -> bool:
        """Whether each draft is chosen under its mask. If not, one host node accepts all drafts during the next target_verify."""
        if self.models.proposer is not None:
            return "batch_forced" in buffers
        return self.draft_masks and self.models.draft is not None

    def _look_up(self, buffers: StaticBuffers, batch: Batch, after: Batch, emission: Emission, context: CaptureContext) -> Tensor | None:
        """[B, K] the look-up's chains; their tokens replace the draft model's. None without a look-up."""
        if self.models.look_up is None:
            return None
        with context.stage("look_up"):
            proposing.append_emission(buffers, batch, emission, self.limits)
            return proposing.propose(buffers, after, self.models.look_up, self.limits)

    def _propose(
        self, buffers: StaticBuffers, after: Batch, proposer: Proposer, grammar: GrammarLane | None, context: CaptureContext
    ) -> Tensor:
        """[B, K] the proposer's chains. A token that the grammar forces replaces the proposed one; a chain is followed while it agrees."""
        if grammar is None or not self.masks_drafts(buffers):
            return proposing.propose(buffers, after, proposer, self.limits)
        mask_ready = grammar.row(0)
        proposed = proposing.propose(buffers, after, proposer, self.limits)
        alive, drafts = drafting.continuing(after), []
        for step in range(1, self.limits.positions):
            context.wait(mask_ready if step == 1 else grammar.row(step - 1))
            with context.stage(f"choose_draft {step}"):
                tokens = proposing.choose_proposed(buffers, after, step, proposed[:, step - 1], alive)
                buffers.batch_drafts[step - 1, : grammar.size].copy_(tokens)
                proposed = drafting.matching_chains(proposed, step, tokens)
                alive = tokens >= 0
            drafts.append(tokens)
        return torch.stack(drafts, 1)


@dataclass(frozen=True)
class GrammarLane:
    """The side stream of one round: state and drafts to the host, host nodes, masks back to the device."""

    round: Round
    buffers: StaticBuffers
    context: CaptureContext
    size: int

    def head(self) -> StreamEvent:
        """During target_verify: fill the last mask row of the previous round's drafts."""
        drafts = self.round.limits.num_speculative_tokens
        accept_all = drafts == 0 or not self.round.masks_drafts(self.buffers)
        steps = [BEGIN_ROUND, fill_new(stage=drafts), advance(drafts)]
        if accept_all:
            steps = [BEGIN_ROUND, COMMIT, *(advance(index) for index in range(1, drafts + 1)), END_ROUND]

        begun = self.context.record()
        with self.context.stream(SIDE):
            self.context.wait(begun)
            with self.context.stage("show head"):
                self._copy_state()
                rows = self.buffers.batch_rows[: self.size]
                for index in range(0 if accept_all else drafts - 1, drafts):
                    self.buffers.drafts_host[index, : self.size].copy_(self.buffers.row_drafts[rows, index], non_blocking=True)
            return self._node("head", steps, range(drafts + 1) if accept_all else range(drafts, drafts + 1))

    def row(self, index: int) -> StreamEvent:
        """While the draft model computes: fill mask row `index` of this round's drafts."""
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
                    self._copy_state()
                else:
                    self.buffers.drafts_host[index - 1, :size].copy_(self.buffers.batch_drafts[index - 1, :size], non_blocking=True)
            return self._node(name, steps, range(index, index + 1))

    def _copy_state(self) -> None:
        state = self.buffers.row_state[self.buffers.batch_rows[: self.size], : len(HostColumn)]
        self.buffers.state_host[: self.size].copy_(state, non_blocking=True)

    def _node(self, name: str, steps: Sequence[HostStep], filled: range) -> StreamEvent:
        """A host node, then the copies of the masks and tags that it filled."""
        buffers, first, last, size = self.buffers, filled.start, filled.stop, self.size
        forced = [buffers.forced_host] if "forced_host" in buffers else []
        self.context.host_node(
            name,
            self.round.host.node(steps),
            reads=[buffers.state_host, buffers.drafts_host],
            writes=[buffers.masks_host[first:last], buffers.tags_host, *forced],
        )
        with self.context.stage(f"place {name}"):
            for stage in filled:
                buffers.batch_masks[stage, :size].copy_(buffers.masks_host[stage, :size], non_blocking=True)
                buffers.batch_tags[stage, :size].copy_(buffers.tags_host[stage, :size], non_blocking=True)
                stages.place_masks(buffers, size, stage)
                if forced and stage < self.round.limits.num_speculative_tokens:
                    buffers.batch_forced[stage, :size].copy_(buffers.forced_host[stage, :size], non_blocking=True)
        return self.context.record()
