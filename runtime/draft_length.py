"""The choice of the draft length of a round: most expected tokens per second, with a bounded loss against plain decoding.

Acceptance is estimated per row and draft position, discounted over rounds; a new row starts from the estimates of all rows before
it. An account holds the time that plain decoding would have needed for the emitted tokens, less the time that the rounds took. A
round that could overdraw it is plain. So the total time is at most `1 + slack` times that of plain decoding, plus `credit` rounds.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stepgraph.graphs.round_specs import MAX_SKIPPED
from stepgraph.graphs.shapes import LONGEST, GraphKey
from stepgraph.runtime.request import ActiveRequest

AUTO = "auto"
DRAFTS_COST = 1.03  # a round with drafts takes at least this multiple of a plain one
Costs = Mapping[int, float]  # seconds of a round by draft length, for one kind of batch; 0 is plain decoding


@dataclass(frozen=True)
class DraftLengthRule:
    """Parameters of the choice. The same values for all models; tests/runtime/test_draft_length.py shows what they achieve."""

    discount: float = 0.97  # of older rounds, per round
    prior_acceptance: float = 0.55  # of each draft, before any result
    prior_rounds: float = 3.0  # how many rounds the prior counts as; it regains weight while nothing is drafted
    optimism: float = 0.5  # standard errors added to an estimate, so that a length with few results is tried
    hysteresis: float = 0.02  # another length must be better by this share
    spell: int = 3  # minimum rounds with drafts in succession: the first one verifies none, and results arrive rounds later
    slack: float = 0.01  # share of each plain round that is credited to the account
    credit: float = 3.0  # initial account, in plain rounds
    max_credit: float = 8.0  # maximum account, in plain rounds
    rest: int = 8  # rounds without drafts after a decision for them, unless the requests change


DEFAULT_RULE = DraftLengthRule()


class Acceptance:
    """Discounted acceptance of one row, or of all rows: by draft position, the share of the chains that reach it and are accepted there."""

    def __init__(self, longest: int, rule: DraftLengthRule, prior: Acceptance | None = None) -> None:
        self._rule = rule
        self._prior = [rule.prior_acceptance] * longest if prior is None else prior._rates()
        self._accepted, self._reached = [0.0] * longest, [0.0] * longest
        self._undrafted = 0  # rounds without drafts, by which they are not yet discounted
        self._expected: list[float] | None = None

    def add(self, offered: int, accepted: int) -> None:
        """A round that could have accepted `offered` drafts, and accepted so many."""
        self._expected = None
        if not offered:
            self._undrafted += 1
            return
        self._discount(1 + self._undrafted)
        for position in range(min(offered, accepted + 1)):
            self._accepted[position] += position < accepted
            self._reached[position] += 1

    def _discount(self, rounds: int) -> None:
        discount = self._rule.discount**rounds
        self._accepted = [each * discount for each in self._accepted]
        self._reached = [each * discount for each in self._reached]
        self._undrafted = 0

    def _rates(self) -> list[float]:
        """The prior of a position is the mean of its own and the rate before it, so that longer drafts are tried where all are accepted."""
        if self._undrafted:
            self._discount(self._undrafted)
        weight, rates = self._rule.prior_rounds, list[float]()
        for accepted, reached, prior in zip(self._accepted, self._reached, self._prior, strict=True):
            expected = (prior + rates[-1]) / 2 if rates else prior
            rates.append((accepted + weight * expected) / (reached + weight))
        return rates

    @property
    def expected(self) -> list[float]:
        """By draft length: expected tokens of a round, from above."""
        if self._expected is None:
            self._expected = list(itertools.accumulate(self._reach()))
        return self._expected

    def _reach(self) -> list[float]:
        """By draft position: the probability that all drafts up to it are accepted, from above. First 1, for the token of the target."""
        weight, chain, rates = self._rule.prior_rounds, [1.0], self._rates()
        for rate, reached in zip(rates, self._reached, strict=True):
            error = math.sqrt(max(0.0, rate * (1 - rate)) / (reached + weight))
            chain.append(chain[-1] * min(1.0, rate + self._rule.optimism * error))
        return chain


class DraftLengths:
    """Chooses the draft length of each round. `lengths`: the captured ones, 0 among them."""

    def __init__(self, lengths: Sequence[int], rule: DraftLengthRule = DEFAULT_RULE) -> None:
        assert 0 in lengths, "plain decoding bounds the loss"
        self._lengths, self._rule = sorted(lengths), rule
        self._all = Acceptance(self._lengths[-1], rule)
        self.account: float | None = None  # seconds; None before the first round
        self._at_risk = 0.0  # seconds beyond plain decoding of the rounds in flight, if they accept no draft
        self._last = 0  # length of the latest round
        self._spell = 0  # rounds with drafts in succession
        self._rest = 0  # rounds of `_rows` that are plain without another decision
        self._rows: Sequence[tuple[Acceptance, int]] = ()

    def row(self) -> Acceptance:
        """The acceptance of a new row."""
        return Acceptance(self._lengths[-1], self._rule, self._all)

    def choose(self, rows: Sequence[tuple[Acceptance, int]], costs: Costs) -> int:
        """The draft length of a round of rows, each with its maximum. Counts the round as in flight until `add`."""
        if self._rest and rows == self._rows:
            self._rest -= 1
            return 0
        if self.account is None:
            self.account = self._rule.credit * costs[0]
        rounds = 1 if self._last else self._rule.spell  # a spell is only started if it can be paid
        room = self.account - self._at_risk
        paid = {each: costs[each] for each in self._lengths if rounds * (costs[each] - costs[0]) <= max(0.0, room)}
        length = self._best(rows, paid) if len(paid) > 1 else 0
        self._last, self._spell = length, self._spell + 1 if length else 0
        self._rest, self._rows = 0 if length else self._rule.rest, rows
        self._at_risk += costs[length] - costs[0]
        return length

    def add(self, length: int, results: Sequence[tuple[Acceptance, int, int]], costs: Costs) -> None:
        """The oldest round in flight has ended. Per row: acceptance, drafts it could have accepted, and accepted ones."""
        assert self.account is not None, "chosen before"
        plain = costs[0]
        self._at_risk = max(0.0, self._at_risk - (costs[length] - plain))
        for row, offered, accepted in results:
            row.add(offered, accepted)
            self._all.add(offered, accepted)
        if length:
            earned = (1 + sum(accepted for _, _, accepted in results) / max(len(results), 1)) * plain - costs[length]
        else:
            earned = self._rule.slack * plain
        self.account = min(self._rule.max_credit * plain, self.account + earned)

    def _best(self, rows: Sequence[tuple[Acceptance, int]], costs: Costs) -> int:
        longest = max((most for _, most in rows), default=0)
        rates = {
            length: sum(row.expected[min(length, most)] for row, most in rows) / costs[length] for length in costs if length <= longest
        }
        if 0 < self._spell < self._rule.spell and self._last in rates:
            return self._last
        best = max(rates, key=rates.__getitem__, default=0)
        if self._last in rates and rates[best] < rates[self._last] * (1 + self._rule.hysteresis):
            return self._last
        return best


def lengths_up_to(longest: int) -> tuple[int, ...]:
    """The draft lengths of an engine that chooses among them. Each takes graphs, and these together about twice those of the longest."""
    return tuple(sorted({0, longest // 2 or longest, longest}))


class RoundCosts:
    """Seconds of a round by graph key: measured at capture for unconstrained greedy batches, then for the rounds of the engine."""

    def __init__(self, lengths: Sequence[int], weight: float = 0.05) -> None:
        self._lengths, self._weight = lengths, weight
        self._seconds: dict[GraphKey, dict[int, float]] = {}  # by key, with the longest drafts, and draft length
        self._guessed: dict[GraphKey, set[int]] = {}  # lengths whose cost is that of unconstrained greedy batches

    def of(self, key: GraphKey) -> Costs:
        """By draft length, for batches like that of `key`: current also after later calls of `add`."""
        if key not in self._seconds:
            self._seconds[key] = dict(self._seconds[_plain(key)])
            self._guessed[key] = set(self._lengths)
        return self._seconds[key]

    def keys(self, key: GraphKey) -> tuple[GraphKey, ...]:
        """`key` with every draft length."""
        return tuple(replace(key, draft_length=length) for length in self._lengths)

    def known(self, key: GraphKey) -> bool:
        """Whether `of` has an answer."""
        count = len(self._lengths)
        return len(self._seconds.get(key, ())) == count or len(self._seconds.get(_plain(key), ())) == count

    def calibrate(self, key: GraphKey, seconds: float) -> None:
        """`key` with its draft length."""
        costs = self._seconds.setdefault(replace(key, draft_length=LONGEST), {})
        costs[key.draft_length] = seconds
        self._bound_plain(costs, key.draft_length)

    def add(self, key: GraphKey, length: int, seconds: float) -> None:
        costs, guessed = self._seconds.setdefault(key, {}), self._guessed.get(key, ())
        before = costs.get(length)
        if before is None or length in guessed:
            costs[length] = seconds
            self._guessed.get(key, set()).discard(length)
        else:  # at most twice the time before: a round that the machine interrupted says nothing about its draft length
            costs[length] = before + self._weight * (min(seconds, 2 * before) - before)
        self._bound_plain(costs, length)

    @staticmethod
    def _bound_plain(costs: dict[int, float], length: int) -> None:
        """A plain round that was measured while the machine was busy would otherwise never be tried, and so never measured again."""
        if length:
            costs[0] = min(costs.get(0, math.inf), costs[length] / DRAFTS_COST)


def _plain(key: GraphKey) -> GraphKey:
    return replace(key, constrained=False, sampled=False, device=False)


class _Batch(NamedTuple):
    """What the choice needs of consecutive rounds with the same requests."""

    requests: tuple[ActiveRequest, ...]
    key: GraphKey
    costs: Costs
    required: int | None  # the length that all rounds must have; None if any will do
    rows: list[tuple[Acceptance, int]]  # and the maximum length


class DraftLengthChooser:
    """Chooses the draft length of an engine's rounds from the results of earlier ones. For the stepping thread.

    Sampled tokens depend on the number of drafts. A batch with a request that has a seed of its own therefore gets as many drafts as
    that request may have, in every round, and nothing is learned from it.
    """

    def __init__(self, longest: int, chosen: Callable[[int], object] | None = None) -> None:
        """chosen: called with the length of each round."""
        self._chosen = chosen
        self.lengths = lengths_up_to(longest)
        self.fixed: int | None = None  # the length of every round until it is None: for replays of recordings, and to compare lengths
        self.log: list[tuple[int, float]] | None = None  # length and account of each round, while it is a list
        self.costs, self._choice = RoundCosts(self.lengths), DraftLengths(self.lengths)
        self._batch: _Batch | None = None  # of the latest round
        self._in_flight: collections.deque[tuple[_Batch, bool]] = collections.deque()  # and whether the length was chosen by the rule
        self._rows: dict[ActiveRequest, tuple[Acceptance, int]] = {}  # of the latest batch; and pending drafts at most
        self._skipped = 0  # rounds since the draft model's last: no request has more tokens that it has not processed

    def choose(self, requests: tuple[ActiveRequest, ...], key: GraphKey) -> int:
        """For a round of these requests with the graph of `key`, whatever its draft length."""
        batch = self._batch
        if batch is None or batch.requests != requests:
            batch = self._batch = self._batch_of(requests, key)
        length = batch.required if self.fixed is None else self.fixed
        self._in_flight.append((batch, length is None))
        if length is None:
            length = self._choice.choose(batch.rows, batch.costs)
        if self._chosen is not None:
            self._chosen(length)
        if self.log is not None:
            self.log.append((length, self._choice.account or 0.0))
        return length

    def needs_catch_up(self, length: int) -> bool:
        """Whether the draft model must process skipped tokens before a round of this length. Counts the round."""
        needed = self._skipped >= (1 if length else MAX_SKIPPED)
        self._skipped = (0 if needed else self._skipped) + (length == 0)
        return needed

    def ended(self, length: int, results: Sequence[tuple[ActiveRequest, int]], seconds: float | None) -> None:
        """The oldest round has ended. Per request: accepted drafts. seconds: its duration, if known."""
        (batch, free), outcomes = self._in_flight.popleft(), []
        for request, accepted in results:
            if request in self._rows:
                acceptance, pending = self._rows[request]
                most = min(length, request.job.num_speculative_tokens)
                outcomes.append((acceptance, min(pending, most), accepted))
                if most != pending:
                    self._rows[request] = acceptance, most
        if free:
            if seconds is not None:
                self.costs.add(batch.key, length, seconds)
            self._choice.add(length, outcomes, batch.costs)

    def _batch_of(self, requests: tuple[ActiveRequest, ...], key: GraphKey) -> _Batch:
        """Called when the requests of the rounds change: a request that left does not come back."""
        self._rows = {request: self._rows.get(request) or (self._choice.row(), 0) for request in requests}
        seeded = [request.job for request in requests if request.job.sampling.seed is not None and not request.job.sampling.greedy]
        most = max((job.num_speculative_tokens for job in seeded), default=0)
        required = min(length for length in self.lengths if length >= most) if most else None
        rows = [(self._rows[request][0], request.job.num_speculative_tokens) for request in requests]
        return _Batch(requests, key, self.costs.of(key), required, rows)
