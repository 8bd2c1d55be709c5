"""The choice of the draft length of a round: most expected tokens per second, with a bounded loss against plain decoding.

With a look-up beside a draft model, the choice includes whether the model drafts. Acceptance is estimated per row, draft position and
source, discounted over rounds; the prior of a row is the estimate from all rows with grammars, or from all without. A round with the
model also shows what a round without the model would have accepted: the drafts before the first one of the model.

An account holds the time that plain decoding would have needed for the emitted tokens, less the time that the rounds took. A
round that could overdraw it is plain. So the total time is at most `1 + slack` times that of plain decoding, plus the first account.
Batches with grammars have a separate account, so that rejected drafts of other batches do not stop their drafts.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from stepgraph.graphs.graph_key import FULL, PLAIN, Drafting, GraphKey
from stepgraph.graphs.graph_set import host_drafting
from stepgraph.graphs.round_specs import MAX_SKIPPED
from stepgraph.graphs.row_layout import ResultRecord
from stepgraph.runtime import draft_tuning as tuned
from stepgraph.runtime.request import ActiveRequest

_MAX_WEIGHT = 1e100
Costs = Mapping[Drafting, float]  # seconds of a round, for one kind of batch; PLAIN is plain decoding


def initial_account(costs: Costs) -> float:
    """The initial account: seconds that rounds with drafts may lose before any of them saved time."""
    plain, shortest = costs[PLAIN], min((cost for each, cost in costs.items() if each.length), default=costs[PLAIN])
    return max(tuned.INITIAL_CREDIT * plain, tuned.TRIAL_ROUNDS * min(shortest - plain, plain))


class Acceptance:
    """Discounted acceptance of one row, or of all rows: by draft position, the share of the chains that reach it and are accepted there."""

    def __init__(self, longest: int, prior: Acceptance | float) -> None:
        self._prior = prior
        self._paused_discount = tuned.PAUSED_DISCOUNT if isinstance(prior, Acceptance) else tuned.PAUSED_DISCOUNT_OF_ALL
        self._accepted, self._reached = [0.0] * longest, [0.0] * longest
        self._weight = 1.0  # of the latest round: it grows, which discounts earlier rounds
        self._rates: list[float] | None = None
        self._expected: list[float] | None = None

    def add(self, offered: int, accepted: int, rows: int = 1) -> None:
        """Add a round of `rows` rows, in which this row was offered `offered` drafts and accepted `accepted`. Also added to the prior."""
        if isinstance(self._prior, Acceptance):
            self._prior._count(offered, accepted, 1 / rows)
        self._count(offered, accepted, 1)

    def _count(self, offered: int, accepted: int, rounds: float) -> None:
        self._rates = self._expected = None
        self._weight *= (tuned.DISCOUNT if offered else self._paused_discount) ** -rounds
        for position in range(min(offered, accepted + 1)):
            self._reached[position] += self._weight
            if position < accepted:
                self._accepted[position] += self._weight
        if self._weight > _MAX_WEIGHT:
            self._accepted, self._reached = ([each / self._weight for each in sums] for sums in (self._accepted, self._reached))
            self._weight = 1.0

    @property
    def rates(self) -> list[float]:
        """The prior of a position is averaged with the rate of the position before, so that longer drafts are tried if all are accepted."""
        if self._rates is None:
            priors = self._prior.rates if isinstance(self._prior, Acceptance) else itertools.repeat(self._prior)
            weight, self._rates = tuned.PRIOR_ROUNDS * self._weight, list[float]()
            for accepted, reached, prior in zip(self._accepted, self._reached, priors, strict=False):
                expected = (prior + self._rates[-1]) / 2 if self._rates else prior
                self._rates.append((accepted + weight * expected) / (reached + weight))
        return self._rates

    @property
    def expected(self) -> list[float]:
        """By draft length: expected tokens of a round, the target's own token included."""
        if self._expected is None:
            self._expected = list(itertools.accumulate(itertools.accumulate([1.0, *self.rates], operator.mul)))
        return self._expected


Acceptances = Mapping[bool, Acceptance]  # acceptance of chains with (True) and without drafts of the model
Rows = Sequence[tuple[Acceptances, int]]  # acceptance and most drafts of each
Counts = Mapping[bool, tuple[int, int]]  # with the same keys: arguments of Acceptance.add
Results = Sequence[tuple[ActiveRequest, ResultRecord]]
NO_COUNTS: Counts = {True: (0, 0), False: (0, 0)}


def counts_of(by_model: bool, offered: int, accepted: int, drafts: int, num_before_model: int) -> Counts:
    """The counts for both sources from the drafts of a row that a round verified. by_model: whether the model drafted. offered: drafts that
    the row could have had; drafts: those that it had, as a chain may end earlier; num_before_model: those before the model's first one."""
    if by_model:
        return {True: (offered, accepted), False: (offered, min(accepted, num_before_model))}
    return {True: (min(offered, drafts), accepted), False: (offered, accepted)}  # the model would have continued the chain


class DraftPolicy:
    """Chooses how each round drafts. `choices`: the captured draftings, PLAIN among them."""

    def __init__(self, choices: Sequence[Drafting]) -> None:
        assert PLAIN in choices, "plain decoding bounds the loss"
        self._choices = choices
        self._longest = max(each.length for each in choices)
        priors = {each.model: tuned.PRIOR_ACCEPTANCE if each.model else tuned.PRIOR_ACCEPTANCE_WITHOUT_MODEL for each in choices}
        self._acceptance_of_all: dict[bool, Acceptances] = {  # of rows with and without a grammar
            constrained: {model: Acceptance(self._longest, prior) for model, prior in sorted(priors.items())}
            for constrained in (False, True)
        }
        self._accounts: dict[bool, float] = {}  # seconds, of batches with and without grammars
        self._failed_tries = {False: 0, True: 0}  # runs of drafts after plain rounds since one was accepted, by account
        # By round in flight: its account, and the seconds that it loses if no draft is accepted
        self._at_risk: collections.deque[tuple[bool, float]] = collections.deque()
        self._last, self._risk_seconds = PLAIN, 0.0  # the latest choice, and its seconds beyond plain
        self._streak = self.repeats = 0  # rounds that had the latest choice with the same requests, and further ones, which need no results
        self._rounds, self._latest_round = 0, dict.fromkeys(choices, 0)  # rounds so far, and the latest round of each choice
        self._rows: Rows = ()

    def row(self, constrained: bool = False) -> Acceptances:
        """The acceptance of a new row, with or without a grammar."""
        return {model: Acceptance(self._longest, prior) for model, prior in self._acceptance_of_all[constrained].items()}

    def choose(
        self, rows: Rows, costs: Costs, choices: Sequence[Drafting] = (), constrained: bool = False, catch_up: float = 0
    ) -> Drafting:
        """The drafting of the next round, in flight until `add`. choices: empty for all. catch_up: seconds before drafts of the model."""
        self._rounds += 1
        if self.repeats and rows == self._rows and self._last in (choices or self._choices):
            self.repeats -= 1
        else:
            self._choose_next(rows, costs, choices or self._choices, constrained, catch_up)
        self._latest_round[self._last] = self._rounds
        self._at_risk.append((constrained, self._risk_seconds))
        return self._last

    def _choose_next(self, rows: Rows, costs: Costs, choices: Sequence[Drafting], constrained: bool, catch_up: float) -> None:
        """Choose the drafting of the next rounds, and how many they are."""
        min_rounds = 1 if self._last.length else tuned.DRAFT_RUN  # a run starts only if the account can pay it
        budget = self.account(constrained, costs) - sum(risk for kind, risk in self._at_risk if kind == constrained)
        first = {each: catch_up if each.length and each.model else 0.0 for each in choices}  # seconds before the first round
        losses = {each: costs[each] - costs[PLAIN] for each in choices}  # seconds of a round without an accepted draft
        affordable = {each: costs[each] for each in choices if min_rounds * losses[each] + first[each] <= max(0.0, budget)}
        chosen = self._best(rows, affordable) if len(affordable) > 1 else PLAIN
        self._accounts[constrained] -= first[chosen]
        if chosen.length and not self._last.length:
            self._failed_tries[constrained] += 1
        if chosen != self._last or rows != self._rows:
            self._streak = 0
        self._last, self._rows, self._risk_seconds = chosen, rows, losses[chosen]
        num_rounds = self._num_rounds(min_rounds, budget)
        self.repeats = num_rounds - 1
        self._streak += num_rounds

    def _num_rounds(self, min_rounds: int, budget: float) -> int:
        """Rounds of a new choice. Several save time: a quarter of those that had the same choice before."""
        if not self._last.length:
            return tuned.PLAIN_RUN
        max_rounds = budget / self._risk_seconds if self._risk_seconds > 0 else tuned.DRAFT_RUN
        return int(max(min_rounds, min(self._streak // 4, tuned.DRAFT_RUN, max_rounds)))

    def add(self, drafting: Drafting, results: Sequence[tuple[Acceptances, Counts]], costs: Costs) -> None:
        """The oldest round in flight has ended."""
        plain, (constrained, _) = costs[PLAIN], self._at_risk.popleft()
        for row, counts in results:
            for model, acceptance in row.items():
                acceptance.add(*counts[model], len(results))
        if drafting.length:
            accepted = sum(counts[True][1] for _, counts in results)
            earned = (1 + accepted / max(len(results), 1)) * plain - costs[drafting]
            if accepted:
                self._failed_tries[constrained] = 0
        else:
            earned = tuned.SLACK * plain / min(max(1.0, self._failed_tries[constrained] / tuned.FREE_TRIES), tuned.MAX_BACKOFF)
        self._accounts[constrained] = min(tuned.MAX_CREDIT * plain, self._accounts[constrained] + earned)

    def account(self, constrained: bool, costs: Costs) -> float:
        """Seconds that batches with or without grammars may lose."""
        return self._accounts.setdefault(constrained, initial_account(costs))

    def _best(self, rows: Rows, costs: Costs) -> Drafting:
        most = max((most for _, most in rows), default=0)
        longest = min((each.length for each in costs if each.length >= most), default=most)
        rates = {
            each: sum(row[each.model].expected[min(each.length, most)] for row, most in rows) / costs[each]
            for each in costs
            if each.length <= longest
        }
        best = max(rates, key=rates.__getitem__, default=PLAIN)
        for each, rate in rates.items():
            age = (self._rounds - self._latest_round[each]) / tuned.STALE_ROUNDS
            if each.length and age > 1 and rate >= tuned.RETRY_SHARE**age * rates[best]:
                return each
        hysteresis = tuned.HYSTERESIS if best.length or not self._last.length else tuned.PLAIN_HYSTERESIS
        keeps = self._last in rates and rates[best] < rates[self._last] * (1 + hysteresis)
        return self._last if keeps else best


class _Measured(NamedTuple):
    """Measurements of the rounds of one key, by drafting."""

    seconds: dict[Drafting, float]
    rounds: dict[Drafting, int]
    latest: dict[Drafting, int]  # the number of its last round, counted over all draftings


class RoundCosts:
    """Seconds of a round, with the later work of the draft model for its tokens, by graph key and context. Measured from the capture on."""

    def __init__(self, choices: Sequence[Drafting]) -> None:
        self._choices = choices
        self._measured: dict[tuple[GraphKey, int], _Measured] = {}  # by key with FULL drafting, and bit length of the context
        self.catch_up_seconds: dict[int, float] = {}  # seconds of the draft model for skipped tokens, by rows

    def of(self, key: GraphKey, context: int = 0) -> Costs:
        """Costs of batches like that of `key`; before any is measured, of the most similar batches. `add` updates the returned mapping."""
        return self._measured_for(key, context).seconds

    def _measured_for(self, key: GraphKey, context: int) -> _Measured:
        context_bits = context.bit_length()
        if (measured := self._measured.get((key, context_bits))) is None:
            nearest = min(self._measured, key=lambda each: (each[0] != key, each[0] != _greedy_key(key), abs(each[1] - context_bits)))
            counts = self._measured[nearest][1:] if nearest[0] == key else ({}, {})
            measured = self._measured[key, context_bits] = _Measured(dict(self._measured[nearest].seconds), *map(dict, counts))
        return measured

    def is_measured(self, key: GraphKey) -> bool:
        """Whether `of` has a cost for every choice."""
        return any(len(found.seconds) == len(self._choices) for each in (key, _greedy_key(key)) if (found := self._measured.get((each, 0))))

    def calibrate(self, key: GraphKey, seconds: float) -> None:
        """Set the cost of `key` with its drafting."""
        costs = self._measured.setdefault((key.with_drafting(FULL), 0), _Measured({}, {}, {})).seconds
        costs[key.drafting] = seconds + self._later_seconds(key.rows, key.drafting)
        self._bound_shorter(costs, key.drafting)

    def add(self, key: GraphKey, drafting: Drafting, seconds: float, context: int = 0) -> None:
        """Add a round of `key` with this drafting. A change, by a longer context or a busy machine, affects all choices: its square root is
        applied to the others. In the first SETTLED_ROUNDS rounds after other choices it is applied to this one and those that no round has
        measured, with more weight after many of the others."""
        costs, counts, latest = self._measured_for(key, context)
        before, rounds = sum(counts.values()), counts.get(drafting, 0) + 1
        others, counts[drafting], latest[drafting] = before - latest.get(drafting, 0), rounds, before + 1
        if rounds == 1:
            return  # the first replay of a graph takes longer
        seconds += self._later_seconds(key.rows, drafting)
        settled = before + 1 - max((each for choice, each in latest.items() if choice != drafting), default=0) > tuned.SETTLED_ROUNDS
        weight = max(tuned.COST_WEIGHT, 1 / rounds, min(others / (4 * tuned.STALE_ROUNDS), 0.25))
        change = 1 + weight * (min(seconds / costs[drafting], 2) - 1)  # at most doubled: a round may have been interrupted
        for each in costs:
            if each == drafting or settled or counts.get(each, 0) < 2:
                costs[each] *= change if each == drafting else math.sqrt(change)
        self._bound_shorter(costs, drafting)

    def add_catch_up(self, key: GraphKey, drafting: Drafting, seconds: float, context: int) -> None:
        """Add a round of `key` with this drafting, before which the draft model processed skipped tokens."""
        before, round_seconds = self.catch_up_seconds.get(key.rows, 0.0), self._measured_for(key, context).seconds[drafting]
        found = max(0.0, seconds - round_seconds + self._later_seconds(key.rows, drafting))
        self.catch_up_seconds[key.rows] = before + 2 * tuned.COST_WEIGHT * (min(found, 2 * before) - before)

    def _later_seconds(self, rows: int, drafting: Drafting) -> float:
        skipped = 0 if drafting.length and drafting.model else drafting.length + 1
        return skipped / MAX_SKIPPED * self.catch_up_seconds.get(rows, 0.0)

    @staticmethod
    def _bound_shorter(costs: dict[Drafting, float], drafting: Drafting) -> None:
        """Bound the cost of shorter rounds: if measured on a busy machine, they would otherwise never be tried and measured again."""
        for each in (PLAIN, *costs):
            if each.length < drafting.length and (drafting.model or not each.length):
                costs[each] = min(costs.get(each, math.inf), costs[drafting] / tuned.MIN_COST_RATIO)


def _greedy_key(key: GraphKey) -> GraphKey:
    return replace(key, constrained=False, sampled=False, device=False)


def _nearest(drafting: Drafting, choices: Sequence[Drafting]) -> Drafting:
    """`drafting` if it is a choice, otherwise the shortest choice with the model and at least as many drafts, or the longest."""
    longer = [each for each in choices if each.model and each.length >= drafting.length]
    return drafting if drafting in choices else min(longer, default=max(choices))


class _Batch(NamedTuple):
    """What the choice needs of consecutive rounds with the same requests."""

    requests: tuple[ActiveRequest, ...]
    key: GraphKey
    context: int  # tokens of all requests, when the first one had `first` tokens of output
    first: int
    costs: Costs
    choices: Sequence[Drafting]  # draftings with graphs for such batches
    rows: Rows


class DraftLengthChooser:
    """Chooses how an engine's rounds draft, from the results of earlier ones. For the stepping thread."""

    def __init__(
        self, choices: Sequence[Drafting], on_choice: Callable[[Drafting], object] | None = None, device_grammars: bool = False
    ) -> None:
        """on_choice: called with the choice for each round. device_grammars: see host_drafting."""
        self._on_choice, self.choices = on_choice, choices
        self.num_given_drafts: Callable[[ActiveRequest], int] | None = None  # drafts that a user function returned for the next round
        self.clock: Callable[[], float] = time.perf_counter  # measures costs; benchmarks on a shared machine use the processor's time
        self.fixed_drafting: Drafting | None = None  # of every round while not None: for replays of recordings, and to compare choices
        self.choice_log: list[tuple[Drafting, float]] | None = None  # choice and account of each round, while it is a list
        self.costs, self._policy = RoundCosts(choices), DraftPolicy(choices)
        self._host_choices = host_drafting(choices) if device_grammars else choices
        self._batch: _Batch | None = None  # of the latest round
        self._in_flight: collections.deque[tuple[_Batch, bool]] = collections.deque()  # each round's batch, and whether the policy chose
        self._rows: dict[ActiveRequest, tuple[Acceptances, Drafting]] = {}  # of the latest batch: with a limit of the pending drafts
        self._ended: list[tuple[Drafting, Results, float | None, bool]] = []  # arguments of round_ended
        self._skipped_tokens = 0  # most tokens of a request that the draft model has not processed

    def choose(self, requests: tuple[ActiveRequest, ...], key: GraphKey) -> Drafting:
        """The drafting of a round of these requests. key: that of the round, with any drafting."""
        batch = self._batch
        renews = batch is None or batch.requests != requests or len(requests[0].job.tokens) > batch.first + tuned.STALE_ROUNDS
        if renews or self.num_given_drafts or not self._policy.repeats or len(self._ended) > tuned.PLAIN_RUN:
            self._read_ended()
        if batch is None or renews or self.num_given_drafts:
            batch = self._batch = self._batch_of(requests, key)
        drafting = None if self.fixed_drafting is None else _nearest(self.fixed_drafting, batch.choices)
        self._in_flight.append((batch, drafting is None))
        if drafting is None:
            unpaid = 1 - self._skipped_tokens / MAX_SKIPPED if self._skipped_tokens else 0.0  # the costs of rounds include the rest
            catch_up = unpaid * self.costs.catch_up_seconds.get(key.rows, 0.0)
            drafting = self._policy.choose(batch.rows, batch.costs, batch.choices, key.constrained, catch_up)
        if self._on_choice is not None:
            self._on_choice(drafting)
        if self.choice_log is not None:
            self._read_ended()
            self.choice_log.append((drafting, self._policy.account(key.constrained, batch.costs)))
        return drafting

    def count_skipped(self, drafting: Drafting) -> bool:
        """Count the tokens that a round skips. Returns whether the draft model must process skipped tokens before it."""
        skips = drafting.length + 1 if not drafting.length or not drafting.model else 0
        needed = self._skipped_tokens + skips > MAX_SKIPPED if skips else self._skipped_tokens > 0
        self._skipped_tokens = (0 if needed else self._skipped_tokens) + skips
        return needed

    def round_ended(self, drafting: Drafting, results: Results, seconds: float | None, caught_up: bool) -> None:
        """The oldest round has ended. seconds: its duration; None if unknown or if it includes other work. caught_up: see LaunchedRound.
        A later choice reads it, together with others, since here code and data are not in the CPU cache."""
        self._ended.append((drafting, results, seconds, caught_up))

    def _read_ended(self) -> None:
        for drafting, results, seconds, caught_up in self._ended:
            (batch, policy_chose), outcomes = self._in_flight.popleft(), list[tuple[Acceptances, Counts]]()
            for request, result in results:
                if request in self._rows:
                    row, pending = self._rows[request]
                    most = min(drafting.length, request.job.num_speculative_tokens)
                    counts, offered = NO_COUNTS, min(pending.length, most)
                    if offered:
                        others = result.looked_up | result.forced * request.constrained  # rounds without grammars do not write `forced`
                        num_before_model = (~others & (others + 1)).bit_length() - 1  # the index of the lowest zero
                        counts = counts_of(pending.model, offered, result.accepted, result.draft_count, num_before_model)
                    outcomes.append((row, counts))
                    if pending != (most, drafting.model):
                        self._rows[request] = row, Drafting(most, drafting.model)
            if policy_chose:
                if seconds is not None:
                    (self.costs.add_catch_up if caught_up else self.costs.add)(batch.key, drafting, seconds, batch.context)
                self._policy.add(drafting, outcomes, batch.costs)
        self._ended.clear()

    def _batch_of(self, requests: tuple[ActiveRequest, ...], key: GraphKey) -> _Batch:
        """The batch of new requests or costs. Drops the acceptance of requests that left: they do not come back."""
        if self._rows.keys().isdisjoint(requests):
            self._skipped_tokens = 0  # those of requests that left
        self._rows = {request: self._rows.get(request) or (self._policy.row(request.constrained), PLAIN) for request in requests}
        if num_given := self.num_given_drafts:
            self._rows = {request: (row, Drafting(num_given(request))) for request, (row, _) in self._rows.items()}
        choices = self._host_choices if key.on_host else self.choices
        rows = [(self._rows[request][0], num_given(request) if num_given else request.job.num_speculative_tokens) for request in requests]
        context = sum(len(job.context_ids) + len(job.tokens) for job in (request.job for request in requests))
        return _Batch(requests, key, context, len(requests[0].job.tokens), self.costs.of(key, context), choices, rows)
