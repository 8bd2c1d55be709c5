"""The choice of the draft length of a round: most expected tokens per second, with a bounded loss against plain decoding.

Acceptance is estimated per row and draft position, discounted over rounds; a new row starts from the estimates of all rows before
it. An account holds the time that plain decoding would have needed for the emitted tokens, less the time that the rounds took. A
round that could overdraw it is plain. So the total time is at most `1 + slack` times that of plain decoding, plus `credit` rounds.
"""

from __future__ import annotations

import collections
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stepgraph.graphs.round_specs import MAX_SKIPPED
from stepgraph.graphs.shapes import GraphKey
from stepgraph.runtime.request import ActiveRequest

AUTO = "auto"
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


DEFAULT_RULE = DraftLengthRule()


class Acceptance:
    """Discounted acceptance of one row, or of all rows: by draft position, the share of the chains that reach it and are accepted there."""

    def __init__(self, longest: int, rule: DraftLengthRule, prior: Acceptance | None = None) -> None:
        self._rule = rule
        self._prior = [rule.prior_acceptance] * longest if prior is None else prior._rates()
        self._accepted, self._reached = [0.0] * longest, [0.0] * longest
        self._expected: list[float] | None = None

    def add(self, offered: int, accepted: int) -> None:
        """A round that could have accepted `offered` drafts, and accepted so many."""
        discount, reached = self._rule.discount, min(offered, accepted + 1)
        for position in range(len(self._prior)):
            self._accepted[position] = self._accepted[position] * discount + (position < accepted)
            self._reached[position] = self._reached[position] * discount + (position < reached)
        self._expected = None

    def _rates(self) -> list[float]:
        """The prior of a position is the mean of its own and the rate before it, so that longer drafts are tried where all are accepted."""
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
        weight, chain = self._rule.prior_rounds, [1.0]
        for rate, reached in zip(self._rates(), self._reached, strict=True):
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

    def row(self) -> Acceptance:
        """The acceptance of a new row."""
        return Acceptance(self._lengths[-1], self._rule, self._all)

    def choose(self, rows: Sequence[tuple[Acceptance, int]], costs: Costs) -> int:
        """The draft length of a round of rows, each with its maximum. Counts the round as in flight until `add`."""
        if self.account is None:
            self.account = self._rule.credit * costs[0]
        rounds = 1 if self._last else self._rule.spell  # a spell is only started if it can be paid
        room = self.account - self._at_risk
        length = self._best(rows, {each: costs[each] for each in self._lengths if rounds * (costs[each] - costs[0]) <= max(0.0, room)})
        self._last, self._spell = length, self._spell + 1 if length else 0
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
        tokens = 1 + sum(accepted for _, _, accepted in results) / max(len(results), 1)
        earned = tokens * plain - costs[length] + (0 if length else self._rule.slack * plain)
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
        self._seconds: dict[GraphKey, float] = {}
        self._keys: dict[GraphKey, tuple[GraphKey, ...]] = {}  # with every length

    def of(self, key: GraphKey) -> Costs:
        """By draft length, for batches like that of `key`."""
        return {each.draft_length: self._find(each) for each in self.keys(key)}

    def keys(self, key: GraphKey) -> tuple[GraphKey, ...]:
        """`key` with every draft length."""
        if key not in self._keys:
            self._keys[key] = tuple(replace(key, draft_length=length) for length in self._lengths)
        return self._keys[key]

    def known(self, key: GraphKey) -> bool:
        """Whether `of` has an answer."""
        return all(_plain(each) in self._seconds or each in self._seconds for each in self.keys(key))

    def calibrate(self, key: GraphKey, seconds: float) -> None:
        self._seconds[key] = seconds

    def add(self, key: GraphKey, seconds: float) -> None:
        before = self._seconds.get(key)
        # At most twice the time before: a round that the machine interrupted says nothing about its draft length.
        self._seconds[key] = seconds if before is None else before + self._weight * (min(seconds, 2 * before) - before)

    def _find(self, key: GraphKey) -> float:
        measured = self._seconds.get(key)
        return self._seconds[_plain(key)] if measured is None else measured


def _plain(key: GraphKey) -> GraphKey:
    return replace(key, constrained=False, sampled=False, device=False)


class DraftLengthChooser:
    """Chooses the draft length of an engine's rounds from the results of earlier ones. For the stepping thread.

    Sampled tokens depend on the number of drafts. A batch with a request that has a seed of its own therefore gets as many drafts as
    that request may have, in every round, and nothing is learned from it.
    """

    def __init__(self, longest: int, chosen: Callable[[int], object] = lambda length: None) -> None:
        """chosen: called with the length of each round."""
        self._chosen = chosen
        self.lengths = lengths_up_to(longest)
        self.fixed: int | None = None  # the length of every round until it is None: for replays of recordings, and to compare lengths
        self.log: list[tuple[int, float]] | None = None  # length and account of each round, while it is a list
        self._free: collections.deque[bool] = collections.deque()  # of the rounds in flight: whether the length was chosen by the rule
        self.costs, self._choice = RoundCosts(self.lengths), DraftLengths(self.lengths)
        self._rows: weakref.WeakKeyDictionary[ActiveRequest, tuple[Acceptance, int]] = (
            weakref.WeakKeyDictionary()
        )  # and pending drafts at most
        self._skipped: weakref.WeakKeyDictionary[ActiveRequest, int] = weakref.WeakKeyDictionary()  # rounds since the draft model's last

    def choose(self, requests: Sequence[ActiveRequest], key: GraphKey) -> int:
        """For a round of these requests with the graph of `key`, whatever its draft length."""
        length = self._required(requests)
        self._free.append(length is None)
        if length is None:
            rows = [(self._acceptance(request), request.job.num_speculative_tokens) for request in requests]
            length = self._choice.choose(rows, self.costs.of(key))
        self._chosen(length)
        if self.log is not None:
            self.log.append((length, self._choice.account or 0.0))
        return length

    def needs_catch_up(self, requests: Sequence[ActiveRequest], length: int) -> bool:
        """Whether the draft model must process skipped tokens before a round of this length. Counts the round."""
        skipped = [self._skipped.get(request, 0) for request in requests]
        needed = max(skipped) >= (1 if length else MAX_SKIPPED)
        for request, count in zip(requests, skipped, strict=True):
            self._skipped[request] = (0 if needed else count) + (length == 0)
        return needed

    def ended(self, key: GraphKey, results: Sequence[tuple[ActiveRequest, int]], seconds: float | None) -> None:
        """The oldest round has ended. Per request: accepted drafts. seconds: its duration, if known."""
        free, outcomes = self._free.popleft(), []
        for request, accepted in results:
            acceptance, pending = self._rows.get(request, (None, 0))
            most = min(key.draft_length, request.job.num_speculative_tokens)
            if acceptance is not None:
                outcomes.append((acceptance, min(pending, most), accepted))
                self._rows[request] = acceptance, most
        if free and seconds is not None:
            self.costs.add(key, seconds)
        if free:
            self._choice.add(key.draft_length, outcomes, self.costs.of(key))

    def _required(self, requests: Sequence[ActiveRequest]) -> int | None:
        """The length that a round of these requests must have; None if any will do."""
        if self.fixed is not None:
            return self.fixed
        seeded = [request.job for request in requests if request.job.sampling.seed is not None and not request.job.sampling.greedy]
        most = max((job.num_speculative_tokens for job in seeded), default=0)
        return min(length for length in self.lengths if length >= most) if most else None

    def _acceptance(self, request: ActiveRequest) -> Acceptance:
        if request not in self._rows:
            self._rows[request] = self._choice.row(), 0
        return self._rows[request][0]
