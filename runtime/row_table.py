"""Rows and pages of active requests."""

from __future__ import annotations

import collections
import heapq
import itertools
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from stepgraph.graphs.limits import Limits
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.page_cache import CachedPage, PageCache
from stepgraph.runtime.request import ActiveRequest, Job
from stepgraph.sampling.grammar.link.protocol import MatcherRow


@dataclass(frozen=True)
class PrefixSharing:
    """How requests share the pages of equal prefixes."""

    why_off: str = ""  # why sharing is off; empty if it is on
    max_idle_pages: int | None = None  # published pages kept without a holder; None: all that are free
    # Draft entries of a position either depend on its token and the features of the position before, so that `recompute_tail` positions
    # of a found prefix are computed again; or they depend on `lookahead` following tokens.
    recompute_tail: int = 0
    lookahead: int = 0


LOOP_ROUNDS = 32  # for which a launch of many rounds has pages, where so many are free; it ends before its rows have too few


def continues_exactly(job: Job) -> bool:
    """Whether it can lose its row and continue with the tokens it would have had: with a negative seed, draws depend on the drafts."""
    return not (job.sampling.relaxed_top_n or (job.num_speculative_tokens and job.seed < 0))


class RowTable:
    """Free rows and pages. The lowest free row is allocated first.

    Pages may be shared or allocated again at once, because all device work is launched in one order:
    - a page is published after the launch that fills it, so a request that finds it reads it later than that;
    - if the first n tokens of a text are known here, later launches write entries from position n - 1 on (a draft with `lookahead`: from
      n - lookahead on), or find the row inert, which writes to the scratch page. Pages are published up to that position: those of a
      prompt during its prefill, those of an output when it ends. So no published page is ever written;
    - a page that was freed or evicted is written by launches after all those that still read or write it.

    With `Limits.grows` a request has pages for the rounds that are launched before its next result is read, and `grow` adds others.
    """

    def __init__(self, limits: Limits, sharing: PrefixSharing) -> None:
        self._limits, self._sharing = limits, sharing
        self.page_cache = PageCache(limits.num_pages, limits.page_size, sharing.lookahead, sharing.max_idle_pages)
        self._free_rows = list(range(limits.max_rows))
        # The last launch may loop, beside one before it that was interrupted.
        self._grows, rounds = limits.grows, (max(limits.rounds_in_flight, 1 + limits.loops), *[LOOP_ROUNDS] * limits.loops)
        # How many positions after the known tokens so many rounds may write. Each emits up to `positions` tokens, and then the draft model
        # writes entries for all drafts but the last. The last token has no entry of the target.
        self._written = [count * limits.positions + limits.num_speculative_tokens - 1 for count in rounds]
        self.reused_tokens = self.most_used_pages = self.added_pages = 0
        self._refused: Job | None = None  # its prompt is looked up again once pages are freed or published: each step asks

    def __len__(self) -> int:
        """The number of rows in use."""
        return self._limits.max_rows - len(self._free_rows)

    def allocate(self, job: Job, matcher: MatcherRow | None) -> ActiveRequest | None:
        """A row, and the pages of `_num_pages`; None if there are too few of either."""
        if not self.has_room(job):
            return None
        count = self._num_pages(job)
        cached = self._find(job)
        self.page_cache.acquire(cached)
        private = self.page_cache.allocate(count - len(cached))
        self._count_used()
        row, pages = heapq.heappop(self._free_rows), [*(page.page for page in cached), *private]
        stops = job.text_stream() if job.sampling.stop else None
        if stops:
            stops.push(job.tokens)
        request = ActiveRequest(job, row, pages, matcher, not job.sampling.plain, cached, stop_stream=stops)
        self._set_most_tokens(request)
        return request

    def has_room(self, job: Job, growing: Iterable[ActiveRequest] = (), without: Sequence[ActiveRequest] = ()) -> bool:
        """Whether a row and enough pages are free, or could be without some requests, once the others have grown. Cached pages without a
        holder are free. With `grows` one page more for each request with a row, or the next one to grow would suspend the new request
        at once."""
        if not (self._free_rows or without):
            return False
        held = collections.Counter(page for request in without for page in request.cached_pages)
        freed = sum(len(request.pages) - len(request.cached_pages) for request in without)
        freed += sum(page.ref_count == holders for page, holders in held.items())
        spare = len(self) - len(without) + self.num_missing(each for each in growing if each not in without) if self._grows else 0
        missing = self._num_pages(job) + spare - self.page_cache.num_free - freed
        if missing <= 0 or (job is self._refused and not without):
            return missing <= 0
        has_room = missing <= sum(page.ref_count > held[page] for page in self._find(job))
        self._refused = self._refused if has_room or without else job
        return has_room

    def _num_pages(self, job: Job, written: int | None = None) -> int:
        """The pages of a job up to its maximum length; with `grows`, up to so many positions after its known tokens, by default those that
        the rounds in flight and the next one may write. One that cannot be suspended has all its pages."""
        tokens = len(job.prompt_ids) + job.max_new_tokens
        if self._grows and continues_exactly(job):
            tokens = min(tokens, len(job.prompt_ids) + len(job.resume_from) + len(job.tokens) + (written or self._written[0]))
        return -(-tokens // self._limits.page_size)

    def _set_most_tokens(self, request: ActiveRequest) -> None:
        job, tokens = request.job, len(request.pages) * self._limits.page_size
        is_whole = tokens >= len(job.prompt_ids) + job.max_new_tokens
        request.most_tokens = sys.maxsize if is_whole else tokens - len(job.prompt_ids) - len(job.resume_from) - self._written[0]

    def num_missing(self, requests: Iterable[ActiveRequest]) -> int:
        """How many pages, of positions that the next round may write, the requests lack."""
        short = (request for request in requests if len(request.job.tokens) > request.most_tokens)
        return sum(self._num_pages(request.job) - len(request.pages) for request in short)

    def grow(self, requests: Collection[ActiveRequest], ahead: bool) -> list[tuple[int, int, int]]:
        """Allocate the missing pages of these requests, and, `ahead` and for loops, those of LOOP_ROUNDS as far as pages are free. Returns
        the row, the index in its block table and the number of each page."""
        entries: list[tuple[int, int, int]] = []
        for written, request in itertools.product(self._written if ahead else self._written[:1], requests):
            count = min(self._num_pages(request.job, written) - len(request.pages), self.page_cache.num_free)
            pages, first = self.page_cache.allocate(max(0, count)), len(request.pages)
            entries += [(request.row, index, page) for index, page in enumerate(pages, first)]
            request.pages += pages
            self._set_most_tokens(request)
        self.added_pages += len(entries)
        self._count_used()
        return entries

    def _count_used(self) -> None:
        self.most_used_pages = max(self.most_used_pages, self._limits.num_pages - self.page_cache.num_free)

    def start_prefill(self, request: ActiveRequest) -> None:
        """Look up the prefix again just before the first chunk: requests with the same prefix may have published pages since `allocate`."""
        found, held, self._refused = self._find(request.job), len(request.cached_pages), None
        if found[:held] == request.cached_pages:
            self.page_cache.acquire(found[held:])
            self.page_cache.free(request.pages[held : len(found)])
            request.cached_pages = found
            request.pages[: len(found)] = [page.page for page in found]
        reused = len(request.cached_pages) * self._limits.page_size
        request.prefill_started = True
        request.num_prefilled = max(0, reused - self._sharing.recompute_tail)
        request.num_reused = reused
        if not request.job.num_preemptions:
            request.job.num_cached_tokens = reused
        self.reused_tokens += reused

    def publish_prompt(self, request: ActiveRequest) -> None:
        """Publish the full pages of the prompt chunks launched so far."""
        self._publish(request, request.job.context_ids, request.num_prefilled)
        self._refused = None
        self._count_used()

    def release(self, request: ActiveRequest) -> None:
        """Free the row and the pages at once. The pages of the output are published; after an error, all pages are unpublished."""
        assert request.row not in self._free_rows
        self._refused = None
        heapq.heappush(self._free_rows, request.row)
        if request.job.finish_reason == FinishReason.ERROR:
            self.page_cache.unpublish(request.cached_pages)
        elif request.decoding:
            history = (*request.job.context_ids, *request.job.tokens[request.job.num_tokens_at_preemption :])
            self._publish(request, history, len(history) - 1 - request.num_skipped)
        cached = [page.page for page in request.cached_pages]
        self.page_cache.free([page for index, page in enumerate(request.pages) if cached[index : index + 1] != [page]])
        self.page_cache.release(request.cached_pages)

    def reset_prefix_cache(self, active: Iterable[ActiveRequest]) -> None:
        """Forget all published pages, and what these requests would publish."""
        self.page_cache.reset()
        self._refused = None
        for request in active:
            request.publishes = False

    def _find(self, job: Job) -> list[CachedPage]:
        """Full published pages before the last given token, which is an input of the first round."""
        sharing = self._sharing
        limit = min(len(job.context_ids) - max(1 + sharing.recompute_tail, sharing.lookahead), self._num_shareable(job))
        return [] if sharing.why_off or job.scores_prompt else self.page_cache.find(_cache_key(job), job.context_ids, limit)

    def _num_shareable(self, job: Job) -> int:
        """The length of the prefix whose cache entries depend on token ids only."""
        return (job.embeddings[0][0] if job.embeddings else len(job.prompt_ids) + job.max_new_tokens) - self._sharing.lookahead

    def _publish(self, request: ActiveRequest, ids: Sequence[int], written: int) -> None:
        """Publish the full pages of a text. The entries of its first `written` tokens are launched, and token `written` is known."""
        limit = min(written + 1 - max(1, self._sharing.lookahead), self._num_shareable(request.job))
        while not self._sharing.why_off and request.publishes and (len(request.cached_pages) + 1) * self._limits.page_size <= limit:
            self.page_cache.publish(_cache_key(request.job), request.cached_pages, ids, request.pages[len(request.cached_pages)])


def _cache_key(job: Job) -> tuple[str, int]:
    """Only requests with equal keys share prefixes."""
    return job.cache_salt, job.lora.serial
