"""The books of rows and pages under every order of arrivals, chunks, rounds, ends and cancels, beside a model of what the device holds."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepgraph.graphs import Limits
from stepgraph.runtime.request import FinishReason, Job
from stepgraph.runtime.slots import ActiveRequest, RowTable, Sharing
from stepgraph.sampling.params import GREEDY

PAGE, PAGES, DRAFTS = 2, 14, 2
LIMITS = Limits(3, DRAFTS, 16, PAGE, PAGES, vocab_size=8, num_tokens=8, feature_size=0)
GARBAGE = ()
SALTS = ("", "", "", "other")
ENDS = (FinishReason.STOP, FinishReason.STOP, FinishReason.STOP, FinishReason.CANCELLED, FinishReason.CANCELLED, FinishReason.ERROR)
KINDS = {"no draft": (0, 0), "at its token": (1, 0), "one ahead": (0, 1), "two ahead": (0, 2)}  # Sharing.again, .lookahead


class Books(RuleBasedStateMachine):
    """What each cache entry was made of is kept as the text itself: a found page must hold the finder's own, and stay as it is."""

    @initialize(kind=st.sampled_from(sorted(KINDS)), most_idle=st.sampled_from([None, None, 0, 3]))
    def start(self, kind: str, most_idle: int | None) -> None:
        again, self.lookahead = KINDS[kind]
        # How many tokens in front of its own position each draft entry of a token lies; the target's entries are at -1.
        self.shifts = () if kind == "no draft" else tuple(range(1, self.lookahead + 1)) or (0,)
        self.rows = RowTable(LIMITS, Sharing("", most_idle, again, self.lookahead))
        self.waiting: collections.deque[Job] = collections.deque()
        self.emitted: dict[Job, list[int]] = {}  # by the device; the job's own tokens are what the host has read
        self.entries: dict[tuple[int, int], tuple[object, ...]] = {}  # (shift, slot)
        self.texts: list[tuple[int, ...]] = [(1, 2, 1, 2, 1, 2, 1, 2, 1, 2), (2, 1, 1, 2, 1, 2, 1, 2, 2, 2), (1, 2, 2, 2, 1, 2)]
        self.jobs = self.found = self.ended = 0

    @rule(drawn=st.randoms(use_true_random=True), count=st.integers(1, 4))
    def submit(self, drawn: random.Random, count: int) -> None:
        """Most texts go on from an earlier one, or begin as it did."""
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
        """What an engine's steps do, in any order that they may come in."""
        for _ in range(count):
            self.seat_waiting()
            seats = list(self.rows)
            if seats:
                seat = drawn.choice(seats)
                if not seat.joined:
                    self.chunk(seat, drawn.randint(1, 6))
                elif drawn.random() < 0.7:
                    self.launch(seat, drawn.choices((1, 2), k=drawn.randint(1, DRAFTS + 1)))
                else:
                    seat.job.tokens += self.emitted[seat.job][len(seat.job.tokens) :][: drawn.randint(1, 4)]
            self.check()

    @precondition(lambda self: hasattr(self, "rows") and len(self.rows) > 0)
    @rule(drawn=st.randoms(use_true_random=True), reason=st.sampled_from(ENDS))
    def end(self, drawn: random.Random, reason: FinishReason) -> None:
        """A cancel may come while rounds are on their way: less is known of the text than the device holds."""
        seat = drawn.choice(list(self.rows))
        job, cached = seat.job, list(seat.cached)
        if reason == FinishReason.STOP:
            while not seat.joined:
                self.chunk(seat, 6)
            job.tokens = self.emitted[job]
        job.finish_reason = reason
        self.rows.release(seat)
        self.texts = [*self.texts[-4:], (*job.prompt_ids, *job.tokens)[:13]]
        self.ended += 1
        if reason == FinishReason.ERROR:
            assert not set(cached) & set(self.known()), "nothing of what failed is found again"

    @precondition(lambda self: hasattr(self, "rows") and len(self.waiting) > 0)
    @rule(drawn=st.randoms(use_true_random=True))
    def cancel_waiting(self, drawn: random.Random) -> None:
        self.waiting.remove(drawn.choice(list(self.waiting)))

    def seat_waiting(self) -> None:
        """As the desk does: in order of arrival, and who finds no place keeps the others waiting."""
        while self.waiting:
            alone, seat = not len(self.rows), self.rows.take(self.waiting[0], None)
            if seat is None:
                assert not alone, "whoever is alone is seated"
                return
            assert len(seat.pages) == -(-(len(seat.job.prompt_ids) + seat.job.max_new_tokens) // PAGE)
            self.emitted[self.waiting.popleft()] = []

    def chunk(self, seat: ActiveRequest, budget: int) -> None:
        ids = seat.job.prompt_ids
        if not seat.begun:
            self.rows.begin(seat)
            assert seat.reused <= len(ids) - 1 and seat.reused % PAGE == 0, "the last prompt token is never found"
            for position in range(seat.reused):
                for shift in (-1, *self.shifts):
                    held = self.entries[shift, self.slot(seat, position)]
                    assert held == (seat.job.cache_salt, *ids[: position + 1 + max(shift, 0)]), f"position {position} of {ids}"
            self.found += seat.reused
        start = seat.prefilled
        seat.prefilled += min(seat.to_prefill, max(budget, seat.reused - start + 1))
        self.write(seat, ids, range(start, seat.prefilled), range(start + 1 if start else 0, seat.prefilled + 1))
        self.rows.share(seat)
        seat.joined = seat.to_prefill == 0

    def launch(self, seat: ActiveRequest, tokens: list[int]) -> None:
        """One round: some drafts hold; the entries of the others, and of the next ones, are garbage."""
        job = seat.job
        before = (*job.prompt_ids, *self.emitted[job])
        tokens = tokens[: len(job.prompt_ids) + job.max_new_tokens - len(before)]
        if not tokens:
            return  # at its longest: the device holds it inert
        after, length = (*before, *tokens), len(before)
        self.write(seat, after, range(length - 1, len(after) - 1), range(length, len(after)))
        self.write(seat, GARBAGE, range(len(after) - 1, length + DRAFTS), range(len(after), len(after) + DRAFTS))
        self.emitted[job] += tokens

    def known(self) -> Iterator[object]:
        return iter(self.rows._prefixes._known.values())

    def slot(self, seat: ActiveRequest, position: int) -> int:
        return seat.pages[position // PAGE] * PAGE + position % PAGE

    def write(self, seat: ActiveRequest, text: tuple[int, ...], targets: range, drafted: range) -> None:
        """The target's entries of some tokens and the draft's of others; `text` GARBAGE: of drafts that will not hold."""
        shared = {page.page for page in self.rows._prefixes._known.values()}
        most = min(len(seat.pages) * PAGE, len(seat.job.prompt_ids) + seat.job.max_new_tokens)
        places = [(position, -1) for position in targets] + [(token - shift, shift) for token in drafted for shift in self.shifts]
        for position, shift in places:
            if seat.reused <= position < most:
                slot = self.slot(seat, position)
                assert slot // PAGE not in shared, f"position {position} is written in a page that others may read"
                read = position + 1 + max(shift, 0)
                self.entries[shift, slot] = (seat.job.cache_salt, *text[:read]) if text else (GARBAGE,)

    @invariant()
    def check(self) -> None:
        """Every page is somewhere exactly once, and held by as many as say so."""
        if not hasattr(self, "rows"):
            return
        prefixes, seats = self.rows._prefixes, list(self.rows)
        known = list(prefixes._known.values())
        holders = collections.Counter(page for seat in seats for page in seat.cached)
        assert all(page.holders == count for page, count in holders.items())
        assert all(page.holders == holders[page] and (page in prefixes._idle) == (not holders[page]) for page in known)
        own = [page for seat in seats for page in set(seat.pages) - {page.page for page in seat.cached}]
        cached = {page.page for page in (*known, *holders)}
        everywhere = sorted([*prefixes._pool._free, *own, *cached])
        assert everywhere == list(range(1, PAGES + 1)), "each page is free, somebody's own, or known or held as a prefix"
        assert all(len(set(seat.pages)) == len(seat.pages) for seat in seats)
        assert self.rows.free_pages == len(prefixes._pool._free) + sum(not page.holders for page in known)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("most_idle", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_long_walks(kind: str, most_idle: int | None) -> None:
    """The same rules in a long row: what is rare in the short ones of the machine comes up here."""
    drawn, books = random.Random(7), Books()
    books.start(kind, most_idle)
    for _ in range(400):
        books.submit(drawn, 1)
        books.work(drawn, drawn.randint(1, 12))
        if drawn.random() < 0.8 and len(books.rows):
            books.end(drawn, drawn.choice(ENDS))
        if drawn.random() < 0.1 and books.waiting:
            books.cancel_waiting(drawn)
        while len(books.waiting) > 6 and len(books.rows):
            books.end(drawn, drawn.choice(ENDS))
            books.seat_waiting()
    assert books.found > 100 and books.rows.evicted_pages > 50
