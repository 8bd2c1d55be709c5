"""Many rounds at once through the stages of the runtime, and how likely what they emit is under the float64 oracle.

The rows of a batch are requests of many settings, mixed, that differ within a setting by their seeds alone. What admission
and the host nodes would leave for a round is written here; everything else is the round's own code. Knows nothing of engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs import Limits, StaticBuffers, drafting, stages
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffers import BufferSpec, Column, round_specs
from stepgraph.graphs.model import ModelInput, ModelOutput
from stepgraph.sampling import bitmask
from stepgraph.sampling.acceptance import FinishCode
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.params import SamplingParams
from stepgraph.sampling.sampler import Param
from tests.helpers.chi_square import likelihood_ratio, likelihood_ratio_bound
from tests.helpers.oracles import filtered, processed

TOKENS, WIDTH = 7, 9  # ids from TOKENS on are padding, with the highest logits of all
STOP, LEGAL = 5, 1  # LEGAL is allowed by every mask
PROMPT, SAID = (0, 2), (2, 6, 2)  # the history of every row
OWN_VOCABULARY = (6, 0, 3, 2, 5)  # d2t of a draft that knows some of the target's tokens, in an order of its own
BATCH = 10_240  # rows that go through a round together
EDGE = 1e-5  # float32 may put a filter's edge this share to either side
FEWEST = 25  # rounds that reach a place by one prefix; the law after rarer prefixes is left to other seeds


class Setting(NamedTuple):
    """What the rows of one kind ask for, and what stands before them."""

    sampling: SamplingParams
    masked: bool  # by a grammar that allows about half of the tokens; there are masks for the others too, which must not matter
    good: bool  # the drafter


PENALTIES = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.6,
    "logit_bias": {1: 0.8, 4: -0.5},
    "bad_token_ids": (3,),
    "min_new_tokens": len(SAID) + 2,
}


def setting(temperature: bool, top_k: bool, top_p: bool, min_p: bool, penalties: bool, masked: bool, good: bool) -> Setting:
    asked = SamplingParams(
        temperature=1.5 if temperature else 0.7,
        top_k=3 if top_k else 0,
        top_p=0.8 if top_p else 1.0,
        min_p=0.1 if min_p else 0.0,
        **(PENALTIES if penalties else {}),  # type: ignore[arg-type]
    )
    return Setting(asked, masked, good)


EVERY_SETTING = tuple(setting(*bits) for bits in itertools.product((False, True), repeat=7))


class Bigram:
    """A model whose logits follow from the position and the token there: `table` [positions, TOKENS, vocabulary]."""

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


class HistogramBuilder(NamedTuple):
    """What rounds emitted, of every setting S."""

    counts: list[Tensor]  # of place j: [S, TOKENS ** j, TOKENS], how often each token came after each prefix
    accepted: Tensor  # [S] drafts that held


class Law:
    """Rounds of `k` drafts for `settings`, each of which has rows, positions and logits of its own."""

    def __init__(self, k: int, d2t: bool, settings: Sequence[Setting], draft_masks: bool = True, seed: int = 0) -> None:
        self.k, self.settings, self.draft_masks = k, settings, draft_masks
        self.rows_each = BATCH // len(settings)
        size, length = len(settings) * self.rows_each, len(settings) * (k + 1) + 1
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
        made = torch.Generator().manual_seed(seed)
        self._make_tables(made, d2t)
        self._admit(torch.randperm(size, generator=made))

    def _specs(self) -> Iterable[BufferSpec]:
        return round_specs(self.limits)

    def _make_tables(self, made: torch.Generator, d2t: bool) -> None:
        length = self.limits.max_length
        target = torch.randn(length, TOKENS, WIDTH, generator=made) * 1.5
        target[..., TOKENS:] = 50.0
        noise = torch.randn(length, TOKENS, WIDTH, generator=made)
        masks = torch.rand(length, TOKENS, WIDTH, generator=made) < 0.5
        masks[..., TOKENS:] = False
        masks[..., LEGAL] = True
        good = torch.tensor([each.good for each in self.settings]).repeat_interleave(self.k + 1)
        good = torch.nn.functional.pad(good, (0, length - len(good)))[:, None, None]
        draft = torch.where(good, target + 0.3 * noise, 3.0 * noise)
        draft[..., TOKENS:] = 50.0
        ids = torch.tensor(OWN_VOCABULARY)
        self.target = Bigram(target)
        self.draft = Bigram(draft[..., ids], ids) if d2t else Bigram(draft)
        self.masks, self.packed = masks, bitmask.pack(masks)

    def _admit(self, order: Tensor) -> None:
        """As a round that found no drafts leaves the rows: slot b of the batch holds row order[b], of setting kind[b]."""
        b, rows = self.buffers, self.limits.max_rows
        b.batch_rows.copy_(order)
        self.kind = order % len(self.settings)
        b.row_stop_ids[:, 1] = STOP
        b.row_prompt_seen[:, list(PROMPT)] = True
        owners = torch.arange(rows)
        b.row_state[:rows, Column.OWNER] = owners + 1
        b.row_state[:rows, Column.GENERATED] = len(SAID)
        b.row_state[:rows, Column.LAST_TOKEN] = SAID[-1]
        b.row_state[:rows, Column.FINISH] = int(FinishCode.RUNNING)
        b.row_state[:rows, Column.MAX_LENGTH] = self.limits.max_length + self.k
        b.row_state[:rows, Column.DRAFT_LIMIT] = self.k
        b.row_state[:rows, Column.LENGTH] = owners % len(self.settings) * (self.k + 1) + 1
        for number, (asked, masked, _) in enumerate(self.settings):
            mine = slice(number, rows, len(self.settings))
            b.row_state[mine, Column.CONSTRAINED] = int(masked)
            b.row_params[mine] = torch.tensor([float(getattr(asked, column.name.lower())) for column in Param])
            if asked.biases:
                unused = self.limits.max_bias_ids - len(asked.biases)
                b.row_bias_ids[mine] = torch.tensor([*asked.biases, *[-1] * unused])
                b.row_biases[mine] = torch.tensor([*asked.biases.values(), *[0.0] * unused])
        self.start = b.row_state.clone()
        self.said = torch.bincount(torch.tensor(SAID), minlength=TOKENS).to(torch.int32)

    def round(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """One round of every row, of seeds that no other number has: tokens [B, K + 1], emitted [B], accepted [B]."""
        b, rows = self.buffers, self.limits.max_rows
        b.row_state.copy_(self.start)
        b.row_state[:rows, Column.SEED] = torch.arange(number * rows, (number + 1) * rows)
        b.row_output_counts.copy_(self.said.expand_as(b.row_output_counts))
        batch = read_batch(b, rows)
        drafts = self._drafts(batch)
        if drafts:
            drafting.store_chain(b, batch, torch.stack(drafts, 1))
            batch = read_batch(b, rows)
        logits, _ = stages.target_verify(b, batch, self.target, self.limits)
        emission, _ = stages.accept(b, batch, logits, constrained=True, sampled=True)
        return emission.tokens, emission.emitted, emission.accepted

    def _drafts(self, batch: Batch) -> list[Tensor]:
        b, drafts, position = self.buffers, [], batch.column(Column.LENGTH) - 1
        tokens, alive, features = batch.column(Column.LAST_TOKEN), drafting.continuing(batch), torch.empty(len(batch.rows), 1, 0)
        legal, chain = batch.live, self._chain(batch)
        self._fill_masks(batch, 0, tokens, legal)
        for step in range(1, self.k + 1):
            before = tokens
            logits, features = drafting.draft_decode(b, batch, step - 1, before, features, self.draft, self.limits)
            tokens = drafting.choose_draft(b, batch, step, logits, alive, self.draft_masks, True, self.draft.d2t, chain)
            chain = None if chain is None else drafting.matching_chains(chain, step, tokens)
            b.batch_drafts[step - 1].copy_(tokens)
            alive = tokens >= 0
            legal = legal & alive & self.masks[position + step - 1, before.clamp(min=0), tokens.clamp(min=0)]
            self._fill_masks(batch, step, tokens, legal)
            drafts.append(tokens)
        return drafts

    def _chain(self, batch: Batch) -> Tensor | None:
        """What is looked up, if anything is."""
        return None

    def _fill_masks(self, batch: Batch, index: int, previous: Tensor, legal: Tensor) -> None:
        """What a host node brings: the masks of one place, which follow from the token in front of it."""
        b, size = self.buffers, len(batch.rows)
        b.batch_masks[index].copy_(self.packed[batch.column(Column.LENGTH) - 1 + index, previous.clamp(min=0)])
        status = torch.where(legal, int(MaskStatus.OK), int(MaskStatus.ILLEGAL))
        tags = [batch.column(Column.OWNER), batch.column(Column.GENERATED), torch.full_like(status, index), status]
        b.batch_tags[index].copy_(torch.stack(tags, 1))
        stages.place_masks(b, size, index)

    def tally(self, rounds: int) -> HistogramBuilder:
        """At least `rounds` rounds of every setting."""
        kinds = len(self.settings)
        totals = [torch.zeros(kinds * TOKENS ** (place + 1), dtype=torch.int64) for place in range(self.k + 1)]
        held = torch.zeros(kinds, dtype=torch.int64)
        for number in range(-(-rounds // self.rows_each)):
            tokens, emitted, accepted = self.round(number)
            assert bool((emitted > 0).all())
            prefix = self.kind
            for place, counts in enumerate(totals):
                prefix = prefix * TOKENS + tokens[:, place]
                reached = (emitted > place).to(torch.int64)
                counts.scatter_add_(0, torch.where(emitted > place, prefix, 0), reached)
            held.scatter_add_(0, self.kind, accepted)
        return HistogramBuilder([counts.view(kinds, -1, TOKENS) for counts in totals], held)

    def chances(self, tally: HistogramBuilder) -> Tensor:
        """[K + 1, S]: at most how likely counts as odd as these are at each place of each setting, if rounds keep the law.

        A token is emitted at a place only after drafts that held; given those, it follows the law of its place alone.
        """
        kinds = range(len(self.settings))
        return torch.tensor([[self._chance(counts[kind], kind, place) for kind in kinds] for place, counts in enumerate(tally.counts)])

    def _chance(self, counts: Tensor, kind: int, place: int) -> float:
        found = (counts.sum(1) >= FEWEST).nonzero()[:, 0].tolist()
        laws = {prefix: self._law(kind, place, prefix) for prefix in found}
        sure = {prefix: law for prefix, law in laws.items() if law is not None}
        if not sure:
            return 1.0
        shares = torch.tensor(list(sure.values()), dtype=torch.float64)
        statistic = likelihood_ratio(counts[list(sure)], shares)
        return likelihood_ratio_bound(float(statistic.sum()), int(((shares > 0).sum(1) - 1).sum()))

    def _law(self, kind: int, place: int, code: int) -> list[float] | None:
        """Of the token at a place, after the prefix that `code` spells; None where float32 may put a filter's edge elsewhere."""
        prefix = [code // TOKENS**power % TOKENS for power in reversed(range(place))]
        asked, masked, _ = self.settings[kind]
        position, last = kind * (self.k + 1) + place, prefix[-1] if prefix else SAID[-1]
        logits = processed(self.target.table[position, last, :TOKENS].tolist(), asked, PROMPT, [*SAID, *prefix], [STOP])
        if masked:
            logits = [logit if legal else float("-inf") for logit, legal in zip(logits, self.masks[position, last].tolist(), strict=False)]
        law, *others = [self._filtered(logits, asked, near) for near in (1.0, 1 - EDGE, 1 + EDGE)]
        same = all([share > 0 for share in other] == [share > 0 for share in law] for other in others)
        return law if same else None

    @staticmethod
    def _filtered(logits: list[float], asked: SamplingParams, near: float) -> list[float]:
        top_p = asked.top_p * near if asked.top_p < 1 else 1.0
        return filtered(logits, asked.temperature, asked.top_k, top_p, asked.min_p * near)
