"""RowTable under random orders of arrivals, chunks, rounds, ends and cancels, compared with a model of the device's cache entries."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepgraph.graphs import Limits
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.request import ActiveRequest, Job
from stepgraph.runtime.row_table import PrefixSharing, RowTable
from stepgraph.sampling.params import GREEDY

PAGE, PAGES, DRAFTS = 2, 14, 2
LIMITS = Limits(3, DRAFTS, 16, PAGE, PAGES, vocab_size=8, num_tokens=8, feature_size=0)
GARBAGE = ()
SALTS = ("", "", "", "other")
ENDS = (FinishReason.STOP, FinishReason.STOP, FinishReason.STOP, FinishReason.CANCELLED, FinishReason.CANCELLED, FinishReason.ERROR)
KINDS = {"no draft": (0, 0), "at its token": (1, 0), "one ahead": (0, 1), "two ahead": (0, 2)}  # PrefixSharing.recompute_tail, .lookahead


class RowTableMachine(RuleBasedStateMachine):
    """Keeps for each cache entry the text it was computed from. A found page must hold its finder's text, and must not change."""

    @initialize(kind=st.sampled_from(sorted(KINDS)), max_idle=st.sampled_from([None, None, 0, 3]))
    def start(self, kind: str, max_idle: int | None) -> None:
        recompute_tail, self.lookahead = KINDS[kind]
        # How far before its position a token's draft entries are; -1 denotes the target's entries.
        self.shifts = () if kind == "no draft" else tuple(range(1, self.lookahead + 1)) or (0,)
        self.active: list[ActiveRequest] = []
        self.rows = RowTable(LIMITS, PrefixSharing("", max_idle, recompute_tail, self.lookahead))
        self.waiting: collections.deque[Job] = collections.deque()
        self.emitted: dict[Job, list[int]] = {}  # by the device; the job's own tokens are what the host has read
        self.entries: dict[tuple[int, int], tuple[object, ...]] = {}  # (shift, slot)
        self.texts: list[tuple[int, ...]] = [(1, 2, 1, 2, 1, 2, 1, 2, 1, 2), (2, 1, 1, 2, 1, 2, 1, 2, 2, 2), (1, 2, 2, 2, 1, 2)]
        self.jobs = self.found = self.ended = 0

    @rule(drawn=st.randoms(use_true_random=True), count=st.integers(1, 4))
    def submit(self, drawn: random.Random, count: int) -> None:
        """Most texts continue an earlier one, or share its prefix."""
        for _ in range(count):
            text = drawn.choice(self.texts)
            tail = drawn.choices((1, 2), k=drawn.choice((0, 1, 1, 2, 5)))
            prompt = (*text[: drawn.choice((0, 4, 6, 8, len(text)))], *tail)[:14] or (1,)
            self.jobs += 1
            job = Job(self.jobs, prompt, None, GREEDY, drawn.randint(1, 16 - len(prompt)), DRAFTS, (), 0, cache_salt=drawn.choice(SALTS))
            self.waiting.append(job)

    @precondition(lambda self: hasattr(self, "rows"))
    @rule(drawn=st.randoms(use_true_random=True), count=st.integers(1, 40))
    def work(self, drawn: random.Random, count: int) -> None:
        """The calls of an engine's steps, in random order."""
        for _ in range(count):
            self.admit()
            if self.active:
                request = drawn.choice(self.active)
                if not request.decoding:
                    self.chunk(request, drawn.randint(1, 6))
                elif drawn.random() < 0.7:
                    self.launch(request, drawn.choices((1, 2), k=drawn.randint(1, DRAFTS + 1)))
                else:
                    request.job.tokens += self.emitted[request.job][len(request.job.tokens) :][: drawn.randint(1, 4)]
            self.check()

    @precondition(lambda self: hasattr(self, "rows") and len(self.active) > 0)
    @rule(drawn=st.randoms(use_true_random=True), reason=st.sampled_from(ENDS))
    def end(self, drawn: random.Random, reason: FinishReason) -> None:
        """A cancel may come while rounds are in flight: the host then knows less of the text than the device."""
        request = drawn.choice(self.active)
        job, cached = request.job, list(request.cached_pages)
        if reason == FinishReason.STOP:
            while not request.decoding:
                self.chunk(request, 6)
            job.tokens = self.emitted[job]
        job.finish_reason = reason
        self.active.remove(request)
        self.rows.release(request)
        self.texts = [*self.texts[-4:], (*job.prompt_ids, *job.tokens)[:13]]
        self.ended += 1
        if reason == FinishReason.ERROR:
            assert not set(cached) & set(self.published()), "a failed request leaves no published page"

    @precondition(lambda self: hasattr(self, "rows") and len(self.waiting) > 0)
    @rule(drawn=st.randoms(use_true_random=True))
    def cancel_waiting(self, drawn: random.Random) -> None:
        self.waiting.remove(drawn.choice(list(self.waiting)))

    def admit(self) -> None:
        """As Scheduler.admit: in order of arrival, up to the first request without row or pages."""
        while self.waiting:
            request = self.rows.allocate(self.waiting[0], None)
            if request is None:
                assert self.active, "a request is always admitted to an empty table"
                return
            self.active.append(request)
            assert len(request.pages) == -(-(len(request.job.prompt_ids) + request.job.max_new_tokens) // PAGE)
            self.emitted[self.waiting.popleft()] = []

    def chunk(self, request: ActiveRequest, budget: int) -> None:
        ids = request.job.prompt_ids
        if not request.prefill_started:
            self.rows.start_prefill(request)
            reused = request.job.num_cached_tokens
            assert reused <= len(ids) - 1 and reused % PAGE == 0, "the last prompt token is never reused"
            for position in range(reused):
                for shift in (-1, *self.shifts):
                    held = self.entries[shift, self.slot(request, position)]
                    assert held == (request.job.cache_salt, *ids[: position + 1 + max(shift, 0)]), f"position {position} of {ids}"
            self.found += reused
        start = request.num_prefilled
        request.num_prefilled += min(request.num_to_prefill, max(budget, request.job.num_cached_tokens - start + 1))
        self.write(request, ids, range(start, request.num_prefilled), range(start + 1 if start else 0, request.num_prefilled + 1))
        self.rows.publish_prompt(request)
        request.decoding = request.num_to_prefill == 0

    def launch(self, request: ActiveRequest, tokens: list[int]) -> None:
        """One round: some drafts are accepted; the entries of the rejected and of the next drafts are garbage."""
        job = request.job
        before = (*job.prompt_ids, *self.emitted[job])
        tokens = tokens[: len(job.prompt_ids) + job.max_new_tokens - len(before)]
        if not tokens:
            return  # at its maximum length: inert on the device
        after, length = (*before, *tokens), len(before)
        self.write(request, after, range(length - 1, len(after) - 1), range(length, len(after)))
        self.write(request, GARBAGE, range(len(after) - 1, length + DRAFTS), range(len(after), len(after) + DRAFTS))
        self.emitted[job] += tokens

    def published(self) -> Iterator[object]:
        return iter(self.rows.page_cache._published.values())

    def slot(self, request: ActiveRequest, position: int) -> int:
        return request.pages[position // PAGE] * PAGE + position % PAGE

    def write(self, request: ActiveRequest, text: tuple[int, ...], targets: range, drafted: range) -> None:
        """Write the target's entries of `targets` and the draft's of `drafted`; `text` GARBAGE: of drafts that will be rejected."""
        shared = {page.page for page in self.rows.page_cache._published.values()}
        most = min(len(request.pages) * PAGE, len(request.job.prompt_ids) + request.job.max_new_tokens)
        entries = [(position, -1) for position in targets] + [(token - shift, shift) for token in drafted for shift in self.shifts]
        for position, shift in entries:
            if request.job.num_cached_tokens <= position < most:
                slot = self.slot(request, position)
                assert slot // PAGE not in shared, f"position {position} is written in a published page"
                read = position + 1 + max(shift, 0)
                self.entries[shift, slot] = (request.job.cache_salt, *text[:read]) if text else (GARBAGE,)

    @invariant()
    def check(self) -> None:
        """Every page is accounted for exactly once, and its holders are counted correctly."""
        if not hasattr(self, "rows"):
            return
        pages, requests = self.rows.page_cache, self.active
        published = list(pages._published.values())
        holders = collections.Counter(page for request in requests for page in request.cached_pages)
        assert all(page.ref_count == count for page, count in holders.items())
        assert all(page.ref_count == holders[page] and (page in pages._idle) == (not holders[page]) for page in published)
        private = [page for request in requests for page in set(request.pages) - {page.page for page in request.cached_pages}]
        cached = {page.page for page in (*published, *holders)}
        accounted = sorted([*pages._free, *private, *cached])
        assert accounted == list(range(1, PAGES + 1)), "each page is free, private, published or held"
        assert all(len(set(request.pages)) == len(request.pages) for request in requests)
        assert pages.num_free == len(pages._free) + sum(not page.ref_count for page in published)
        assert self.rows.most_used_pages >= PAGES - pages.num_free


TestRowTable = RowTableMachine.TestCase
TestRowTable.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("max_idle", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_long_random_schedules(kind: str, max_idle: int | None) -> None:
    """The rules of the machine in one long run, which reaches states that are rare in short ones."""
    drawn, machine = random.Random(7), RowTableMachine()
    machine.start(kind, max_idle)
    for _ in range(400):
        machine.submit(drawn, 1)
        machine.work(drawn, drawn.randint(1, 12))
        if drawn.random() < 0.8 and machine.active:
            machine.end(drawn, drawn.choice(ENDS))
        if drawn.random() < 0.1 and machine.waiting:
            machine.cancel_waiting(drawn)
        while len(machine.waiting) > 6 and machine.active:
            machine.end(drawn, drawn.choice(ENDS))
            machine.admit()
    assert machine.found > 100 and machine.rows.page_cache.evicted > 50
