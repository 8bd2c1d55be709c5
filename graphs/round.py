"""One decode round in reading order: stages on the main stream, grammars on the side stream.

    main                                      side: kernels or host nodes, while the models compute
    target_verify                             accept d_K, fill mask row K          (unmasked drafts, or none: commit, accept all)
      wait; mask, choose, accept
    draft_prefill                             commit the emitted tokens, fill row 0
      wait row 0; mask, choose d_1
    draft_decode                              accept d_1, fill row 1
      wait row 1; mask, choose d_2            ... and so on to d_K

A proposer drafts a whole chain in one stage instead of draft_prefill and draft_decode; if the grammar also forces tokens, one
kernel or host node on the main stream then commits, follows the chain and fills the masks of all its drafts. A look-up beside a draft
model runs before draft_prefill: a row drafts the tokens of its look-up chain as long as they are legal, and the draft model's from then
on. A key without the draft model has the look-up as its proposer. The mask that guides draft i + 1 also verifies it in the next round:
each of the K + 1 mask rows is filled once and used twice. `grammar_lane` has the side stream.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from stepgraph.graphs import drafting, proposing, stages
from stepgraph.graphs.attention.paged import DEFAULT_ATTENTION, AttentionChoice
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Step
from stepgraph.graphs.context import CaptureContext, current_context
from stepgraph.graphs.grammar_lane import DeviceTables, GrammarLane, MaskedRound, MaskSource
from stepgraph.graphs.graph_key import FULL_LENGTH, GraphKey
from stepgraph.graphs.host_nodes import HostNodes
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import Models
from stepgraph.graphs.proposing import ProposedRound
from stepgraph.graphs.publishing import publish
from stepgraph.graphs.sampled_stages import DEFAULT_ACCEPT, AcceptOptions
from stepgraph.sampling.grammar.automaton.grammar import SplitTensors, TokenTensors
from stepgraph.sampling.grammar.link.protocol import HostLink
from stepgraph.sampling.kernels import Emission


@dataclass(frozen=True)
class Round:
    """The part of a round that all keys of an engine share. `step(key)` is the function to record."""

    limits: Limits
    models: Models
    host: HostLink
    draft_masks: bool = True  # False: unmasked drafts; one host node accepts them all during the next target_verify
    options: AcceptOptions = DEFAULT_ACCEPT
    attention: AttentionChoice = DEFAULT_ATTENTION
    tables: TokenTensors | None = None  # None: no grammars on the device
    split: SplitTensors | None = None  # None: no forced tokens on the device

    def step(self, key: GraphKey) -> Step:
        return functools.partial(self.run, key=key)

    def run(self, buffers: StaticBuffers, key: GraphKey) -> None:
        context, num_drafts = current_context(), key.num_drafts(self.limits.num_speculative_tokens)
        target, draft = self.models.target, self.models.draft if key.draft_model else None
        grammar = self._grammar_lane(buffers, context, key) if key.constrained else None
        with context.stage("read_batch"):
            batch = read_batch(buffers, key.rows, self.attention, num_drafts)

        masks_ready = grammar.fill_verify_masks(batch) if grammar else None
        with context.stage("target_verify"):
            logits, features = stages.target_verify(buffers, batch, target, self.limits)
        if masks_ready:
            context.wait(masks_ready)
        with context.stage("accept"):
            emission, after = stages.accept(buffers, batch, logits, key.constrained, key.sampled, self.options)
            publish(buffers, batch.rows)
        draft_grammar = grammar if self.masks_drafts(buffers) else None
        if draft is None or not num_drafts:
            proposed = ProposedRound(buffers, context, self.limits, self.models, key, num_drafts, draft_grammar)
            return proposed.run(batch, emission, features, after)

        tokens, chain, shard = emission.tokens, None, getattr(draft, "shard", None)
        for step in range(1, num_drafts + 1):
            mask_ready = draft_grammar.fill_draft_masks(step - 1, step - 1) if draft_grammar else None
            if step == 1:
                chain = self._look_up(buffers, batch, after, emission, num_drafts)
                with context.stage("draft_prefill"):
                    logits, features = drafting.draft_prefill(buffers, batch, emission, features, draft, self.limits)
            else:
                with context.stage(f"draft_decode {step - 1}"):
                    logits, features = drafting.draft_decode(buffers, after, step - 1, tokens, features, draft, self.limits)
            if mask_ready:
                context.wait(mask_ready)
            with context.stage(f"choose_draft {step}"):
                alive, mask = after.live if step == 1 else tokens >= 0, draft_grammar.mask(after, step) if draft_grammar else None
                tokens = drafting.choose_draft(buffers, after, step, logits, alive, mask, key.sampled, draft.d2t, chain, shard)
        with context.stage("store_chain"):
            drafting.store_chain(buffers, after, buffers.batch_drafts[:num_drafts, : key.rows].T)

    def _grammar_lane(self, buffers: StaticBuffers, context: CaptureContext, key: GraphKey) -> GrammarLane:
        """Batches whose grammars are all on the device need no host node; others may have rows of both kinds.

        The device's forced tokens are written after the copy of the host's, which are -1 for its rows.
        """
        proposed = self.models.proposer is not None or not key.draft_model
        most, fixed = self.limits.num_speculative_tokens, key.draft_length == FULL_LENGTH
        masked = MaskedRound(buffers, context, key.rows, key.num_drafts(most), most, self.masks_drafts(buffers), fixed, proposed)
        sources: list[MaskSource] = [] if key.device else [HostNodes(masked, self.host)]
        if self.tables is not None:
            sources.append(DeviceTables(masked, self.tables, self.split))
        return GrammarLane(masked, sources, key.device)

    def masks_drafts(self, buffers: StaticBuffers) -> bool:
        """Whether each draft is chosen under its mask. If not, one host node accepts all drafts during the next target_verify."""
        if self.models.proposer is not None:
            return "batch_forced" in buffers
        return self.draft_masks and self.models.draft is not None and self.limits.num_speculative_tokens > 0

    def _look_up(self, buffers: StaticBuffers, batch: Batch, after: Batch, emission: Emission, num_drafts: int) -> Tensor | None:
        """[B, K] the look-up's chains; their tokens replace the draft model's. None without a look-up."""
        if self.models.look_up is None:
            return None
        with current_context().stage("look_up"):
            proposing.append_emission(buffers, batch, emission)
            return proposing.propose(buffers, after, self.models.look_up, self.limits, num_drafts)
