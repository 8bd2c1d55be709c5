"""Runs many rounds at once through the stages of the runtime, and tests their tokens against the distribution of the float64 oracle.

The rows of a batch are requests of many settings in random order; rows of one setting differ only in their seeds. The buffers that
admission and the host nodes fill are filled here; all other work is the code of the round. No engine is involved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stepgraph.graphs import Limits, StaticBuffers, drafting, host_nodes, stages
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.graphs.round_specs import round_specs
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling import bitmask
from stepgraph.sampling.grammar.status import FinishCode, MaskStatus
from stepgraph.sampling.params import SamplingParams
from stepgraph.sampling.rng import draft_seed
from stepgraph.sampling.sampler import Param
from tests.helpers.chi_square import likelihood_ratio, likelihood_ratio_bound
from tests.helpers.oracles import filtered, processed

TOKENS, WIDTH = 7, 9  # ids from TOKENS on are padding, with the highest logits of all
STOP, LEGAL = 5, 1  # LEGAL is allowed by every mask
PROMPT, GENERATED = (0, 2), (2, 6, 2)  # the history of every row
OWN_VOCABULARY = (6, 0, 3, 2, 5)  # d2t of a draft with some of the target's tokens, in another order
BATCH = 10_240  # rows per round
THRESHOLD_ERROR = 1e-5  # relative error of a filter threshold in float32
MIN_COUNT = 25  # minimum rounds that reach a position by one prefix; rarer prefixes are not tested


class Setting(NamedTuple):
    """Sampling parameters, mask and drafter of the rows of one kind."""

    sampling: SamplingParams
    masked: bool  # whether a grammar allows about half of the tokens; masks of unmasked rows are filled too and must have no effect
    close_drafter: bool  # whether the drafter is close to the target


PENALTIES = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.6,
    "logit_bias": {1: 0.8, 4: -0.5},
    "bad_token_ids": (3,),
    "min_new_tokens": len(GENERATED) + 2,
}


def setting(temperature: bool, top_k: bool, top_p: bool, min_p: bool, penalties: bool, masked: bool, close_drafter: bool) -> Setting:
    sampling = SamplingParams(
        temperature=1.5 if temperature else 0.7,
        top_k=3 if top_k else 0,
        top_p=0.8 if top_p else 1.0,
        min_p=0.1 if min_p else 0.0,
        **(PENALTIES if penalties else {}),  # type: ignore[arg-type]
    )
    return Setting(sampling, masked, close_drafter)


EVERY_SETTING = tuple(setting(*bits) for bits in itertools.product((False, True), repeat=7))


class Bigram:
    """A model with logits by position and token: `table` [positions, TOKENS, vocabulary]."""

    feature_size = 0
    feature_dtype = torch.float32

    def __init__(self, table: Tensor, d2t: Tensor | None = None) -> None:
        self.table, self.d2t, self.vocab_size = table, d2t, table.shape[2]

    def cache_specs(self, limits: Limits) -> list[BufferSpec]:
        return []

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        known = inputs.positions * TOKENS + inputs.tokens
        return ModelOutput(known[..., None], torch.empty(*known.shape, 0))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table.flatten(0, 1)[hidden[..., 0]]


class TokenCounts(NamedTuple):
    """Counts of emitted tokens and accepted drafts, for S settings."""

    counts: list[Tensor]  # at position j: [S, TOKENS ** j, TOKENS], how often each token followed each prefix
    accepted: Tensor  # [S] accepted drafts


class RoundSampler:
    """Rounds with `k` drafts for `settings`; each setting has its own rows, positions and logits."""

    def __init__(
        self,
        k: int,
        d2t: bool,
        settings: Sequence[Setting],
        draft_masks: bool = True,
        seed: int = 0,
        verified: int | None = None,  # drafts that the round keeps, if fewer than k
        linked: bool = False,  # seeds that are not negative: drafts are drawn by the target's numbers
    ) -> None:
        self.k, self.settings, self.draft_masks, self.linked = k, settings, draft_masks, linked
        self.verified = k if verified is None else verified
        self.rows_per_setting = BATCH // len(settings)
        size, length = len(settings) * self.rows_per_setting, len(settings) * (k + 1) + 1
        self.limits = Limits(
            max_rows=size,
            num_speculative_tokens=k,
            max_length=length + k + 1,
            page_size=length + k + 1,
            num_pages=1,
            vocab_size=WIDTH,
            num_tokens=TOKENS,
            feature_size=0,
            max_stop_ids=2,
            max_bias_ids=4,
            prefill_chunk=1,
        )
        self.buffers = StaticBuffers(spec for spec in self._specs() if not spec.name.endswith("_host"))
        rng = torch.Generator().manual_seed(seed)
        self._make_tables(rng, d2t)
        self._admit(torch.randperm(size, generator=rng))

    def _specs(self) -> Iterable[BufferSpec]:
        return round_specs(self.limits)

    def _make_tables(self, rng: torch.Generator, d2t: bool) -> None:
        length = self.limits.max_length
        target = torch.randn(length, TOKENS, WIDTH, generator=rng) * 1.5
        target[..., TOKENS:] = 50.0
        noise = torch.randn(length, TOKENS, WIDTH, generator=rng)
        masks = torch.rand(length, TOKENS, WIDTH, generator=rng) < 0.5
        masks[..., TOKENS:] = False
        masks[..., LEGAL] = True
        close_drafter = torch.tensor([each.close_drafter for each in self.settings]).repeat_interleave(self.k + 1)
        close_drafter = torch.nn.functional.pad(close_drafter, (0, length - len(close_drafter)))[:, None, None]
        draft = torch.where(close_drafter, target + 0.3 * noise, 3.0 * noise)
        draft[..., TOKENS:] = 50.0
        ids = torch.tensor(OWN_VOCABULARY)
        self.target = Bigram(target)
        self.draft = Bigram(draft[..., ids], ids) if d2t else Bigram(draft)
        self.masks, self.packed = masks, bitmask.pack(masks)

    def _admit(self, order: Tensor) -> None:
        """Set the rows to the state after a round without drafts. Slot b of the batch holds row order[b], of setting kind[b]."""
        b, rows = self.buffers, self.limits.max_rows
        b.batch_rows.copy_(order)
        self.kind = order % len(self.settings)
        b.row_stop_ids[:, 1] = STOP
        b.row_prompt_seen[:, list(PROMPT)] = True
        owners = torch.arange(rows)
        b.row_state[:rows, Column.OWNER] = owners + 1
        b.row_state[:rows, Column.GENERATED] = len(GENERATED)
        b.row_state[:rows, Column.LAST_TOKEN] = GENERATED[-1]
        b.row_state[:rows, Column.FINISH] = int(FinishCode.RUNNING)
        b.row_state[:rows, Column.MAX_LENGTH] = self.limits.max_length + self.k
        b.row_state[:rows, Column.DRAFT_LIMIT] = self.k
        b.row_state[:rows, Column.LENGTH] = owners % len(self.settings) * (self.k + 1) + 1
        for number, (sampling, masked, _) in enumerate(self.settings):
            setting_rows = slice(number, rows, len(self.settings))
            b.row_state[setting_rows, Column.CONSTRAINED] = int(masked)
            b.row_params[setting_rows] = torch.tensor([float(getattr(sampling, column.name.lower())) for column in Param])
            if sampling.biases:
                unused = self.limits.max_bias_ids - len(sampling.biases)
                b.row_bias_ids[setting_rows] = torch.tensor([*sampling.biases, *[-1] * unused])
                b.row_biases[setting_rows] = torch.tensor([*sampling.biases.values(), *[0.0] * unused])
        self.start_state = b.row_state.clone()
        self.output_counts = torch.bincount(torch.tensor(GENERATED), minlength=TOKENS).to(torch.int32)

    def round(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """One round of every row with seeds unique to `number`: tokens [B, K + 1], emitted [B], accepted [B]."""
        b, rows = self.buffers, self.limits.max_rows
        b.row_state.copy_(self.start_state)
        seeds = [seed if self.linked else -1 - seed for seed in range(number * rows, (number + 1) * rows)]
        b.row_state[:rows, Column.SEED] = torch.tensor(seeds)
        b.row_state[:rows, Column.DRAFT_SEED] = torch.tensor([draft_seed(seed) for seed in seeds])
        b.row_output_counts.copy_(self.output_counts.expand_as(b.row_output_counts))
        batch = read_batch(b, rows)
        drafts = self._drafts(batch)
        if drafts:
            drafting.store_chain(b, batch, torch.stack(drafts, 1))
            batch = read_batch(b, rows, max_drafts=self.verified)
        logits, _ = stages.target_verify(b, batch, self.target, replace(self.limits, num_speculative_tokens=self.verified))
        drafting.check_masks(b, batch.rows, 0, logits.shape[1])
        emission, _ = stages.accept(b, batch, logits, constrained=True, sampled=True)
        return torch.nn.functional.pad(emission.tokens, (0, self.k - self.verified)), emission.emitted, emission.accepted

    def _drafts(self, batch: Batch) -> list[Tensor]:
        b, drafts, position = self.buffers, [], batch.column(Column.LENGTH) - 1
        tokens, alive, features = batch.column(Column.LAST_TOKEN), batch.live, torch.empty(len(batch.rows), 1, 0)
        legal, chain = batch.live, self._chain(batch)
        self._fill_masks(batch, 0, tokens, legal)
        for step in range(1, self.k + 1):
            before = tokens
            logits, features = drafting.draft_decode(b, batch, step - 1, before, features, self.draft, self.limits)
            mask = drafting.grammar_mask_of(b, batch, step) if self.draft_masks else None
            tokens = drafting.choose_draft(b, batch, step, logits, alive, mask, True, self.draft.d2t, chain)
            alive = tokens >= 0
            legal = legal & alive & self.masks[position + step - 1, before.clamp(min=0), tokens.clamp(min=0)]
            self._fill_masks(batch, step, tokens, legal)
            drafts.append(tokens)
        return drafts

    def _chain(self, batch: Batch) -> Tensor | None:
        """The looked-up draft chain, or None without look-up."""
        return None

    def _fill_masks(self, batch: Batch, index: int, previous: Tensor, legal: Tensor) -> None:
        """Act as a host node: write the masks of one position, which depend on the previous token."""
        b, size = self.buffers, len(batch.rows)
        masks = self.packed[batch.column(Column.LENGTH) - 1 + index, previous.clamp(min=0)]
        status = torch.where(legal, int(MaskStatus.OK), int(MaskStatus.ILLEGAL))
        tags = torch.stack([batch.column(Column.OWNER), batch.column(Column.GENERATED), torch.full_like(status, index), status], 1)
        host_nodes.scatter_masks(b.batch_rows[:size], tags, masks, b.row_tags, b.row_masks)

    def count_tokens(self, rounds: int) -> TokenCounts:
        """Count the results of at least `rounds` rounds of every setting."""
        kinds = len(self.settings)
        totals = [torch.zeros(kinds * TOKENS ** (position_index + 1), dtype=torch.int64) for position_index in range(self.k + 1)]
        accepted_drafts = torch.zeros(kinds, dtype=torch.int64)
        for number in range(-(-rounds // self.rows_per_setting)):
            tokens, emitted, accepted = self.round(number)
            assert bool((emitted > 0).all())
            prefix = self.kind
            for position_index, counts in enumerate(totals):
                prefix = prefix * TOKENS + tokens[:, position_index]
                reached = (emitted > position_index).to(torch.int64)
                counts.scatter_add_(0, torch.where(emitted > position_index, prefix, 0), reached)
            accepted_drafts.scatter_add_(0, self.kind, accepted)
        return TokenCounts([counts.view(kinds, -1, TOKENS) for counts in totals], accepted_drafts)

    def p_value_bounds(self, tally: TokenCounts) -> Tensor:
        """[K + 1, S]: upper bounds on the probability of counts this unlikely, by position and setting, under the expected law.

        A token is emitted at a position only after accepted drafts; given those, it follows the law of that position.
        """
        kinds = range(len(self.settings))
        return torch.tensor(
            [[self._p_value(counts[kind], kind, position_index) for kind in kinds] for position_index, counts in enumerate(tally.counts)]
        )

    def _p_value(self, counts: Tensor, kind: int, position_index: int) -> float:
        found = (counts.sum(1) >= MIN_COUNT).nonzero()[:, 0].tolist()
        laws = {prefix: self._distribution(kind, position_index, prefix) for prefix in found}
        sure = {prefix: law for prefix, law in laws.items() if law is not None}
        if not sure:
            return 1.0
        shares = torch.tensor(list(sure.values()), dtype=torch.float64)
        statistic = likelihood_ratio(counts[list(sure)], shares)
        return likelihood_ratio_bound(float(statistic.sum()), int(((shares > 0).sum(1) - 1).sum()))

    def _distribution(self, kind: int, position_index: int, code: int) -> list[float] | None:
        """The distribution at a position after the prefix encoded by `code`; None where float32 may shift a filter threshold."""
        prefix = [code // TOKENS**power % TOKENS for power in reversed(range(position_index))]
        sampling, masked, _ = self.settings[kind]
        position, last = kind * (self.k + 1) + position_index, prefix[-1] if prefix else GENERATED[-1]
        logits = processed(self.target.table[position, last, :TOKENS].tolist(), sampling, PROMPT, [*GENERATED, *prefix], [STOP])
        if masked:
            logits = [logit if legal else float("-inf") for logit, legal in zip(logits, self.masks[position, last].tolist(), strict=False)]
        law, *others = [self._filtered(logits, sampling, near) for near in (1.0, 1 - THRESHOLD_ERROR, 1 + THRESHOLD_ERROR)]
        same = all([share > 0 for share in other] == [share > 0 for share in law] for other in others)
        return law if same else None

    @staticmethod
    def _filtered(logits: list[float], sampling: SamplingParams, near: float) -> list[float]:
        top_p = sampling.top_p * near if sampling.top_p < 1 else 1.0
        return filtered(logits, sampling.temperature, sampling.top_k, top_p, sampling.min_p * near)


def forget_certain_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug: drafts that were not drawn are verified with the draft model's probabilities."""
    original = drafting.choose_draft

    def choose_draft(buffers: StaticBuffers, after: Batch, step: int, *arguments: Any, **named: Any) -> Tensor:
        tokens = original(buffers, after, step, *arguments, **named)
        buffers.row_certain[:, step - 1] = False
        return tokens

    monkeypatch.setattr(drafting, "choose_draft", choose_draft)
