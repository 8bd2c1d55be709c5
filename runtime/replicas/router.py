"""The order in which replicas are tried: one that holds a request's prefix first, unless it has too many requests.

Also the number of replicas that Ray Serve runs: by running and queued requests, and by free cache pages. Needs no Ray.
"""

from __future__ import annotations

import collections
import hashlib
import math
import random
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from stepgraph.sampling.fields import Check, check_value, is_number, whole

MAX_PAGES = 256  # of a prompt that are compared: 4,096 tokens at the default size
MAX_HOLDERS = 8  # replicas that are remembered for a page
FREE_PAGES = "free_pages"  # share of a replica's cache pages that a request can get
MIN_FREE_SHARE = 0.1  # if all replicas have less, another one is started


def scale(context: Any) -> tuple[int, dict[str, Any]]:
    """The policy of an AutoscalingConfig, in Ray's controller: the number of replicas, and no state. Ray applies the limits and delays."""
    free_pages, running = (context.aggregated_metrics or {}).get(FREE_PAGES, {}), context.current_num_replicas  # by replica
    wanted = math.ceil(context.total_num_requests / context.config.target_ongoing_requests)
    if free_pages and len(free_pages) >= running and max(free_pages.values()) < MIN_FREE_SHARE:
        wanted = max(wanted, running + 1)  # even few requests may wait for pages
    return max(wanted, 1), {}


def page_hashes(prompt_ids: Sequence[int], page_size: int, salt: Iterable[str]) -> tuple[bytes, ...]:
    """A hash of each full page with all pages before it. Requests with different salts have no hash in common."""
    state = hashlib.blake2b(repr((page_size, *salt)).encode(), digest_size=8)
    found = []
    for start in range(0, min(len(prompt_ids) // page_size, MAX_PAGES) * page_size, page_size):
        state.update(array("q", prompt_ids[start : start + page_size]).tobytes())
        found.append(state.digest())
    return tuple(found)


class PrefixRouter:
    """Records which replicas got which pages. A replica may have evicted a page since; then it computes the prefix again."""

    def __init__(self, load_factor: float = 1.25, max_pages: int = 1 << 17) -> None:
        """load_factor: a replica gets no request for its prefix while it has more than this times the mean number of requests."""
        check_value("PrefixRouter.load_factor", load_factor, Check(lambda factor: is_number(factor) and factor >= 1, "a number >= 1"))
        check_value("PrefixRouter.max_pages", max_pages, whole(1))
        self._factor, self._max_pages = load_factor, max_pages
        self._holders: collections.OrderedDict[bytes, list[str]] = collections.OrderedDict()  # least recently routed first

    def note(self, hashes: Sequence[bytes], replica: str) -> None:
        for page in reversed(hashes):  # the first page is used last, so that no page is forgotten before those that follow it
            holders = self._holders.pop(page, [])
            self._holders[page] = [replica, *(each for each in holders if each != replica)][:MAX_HOLDERS]
        while len(self._holders) > self._max_pages:
            self._holders.popitem(last=False)

    def rank(self, hashes: Sequence[bytes], loads: Mapping[str, int], avoid: Collection[str] = ()) -> list[str]:
        """The replicas of `loads` (requests by replica), the best one first; those to avoid only if there are no others, however full."""
        loads = {name: count for name, count in loads.items() if name not in avoid} or loads
        limit = self._factor * (sum(loads.values()) + 1) / len(loads) if loads else 0
        depths = self._depths(hashes, loads.keys())

        def order(replica: str) -> tuple[bool, int, int, bytes]:
            over = loads[replica] >= limit
            # Among equal replicas, routers in all processes choose the same one for a new prefix, and a random one without pages.
            tie = hashlib.blake2b(hashes[0] + replica.encode(), digest_size=8).digest() if hashes else random.randbytes(8)
            return over, 0 if over else -depths.get(replica, 0), loads[replica], tie

        return sorted(loads, key=order)

    def _depths(self, hashes: Sequence[bytes], replicas: Collection[str]) -> dict[str, int]:
        """Number of pages that each replica holds, from the first one on; only replicas with at least one."""
        depths: dict[str, int] = {}
        for depth, page in enumerate(hashes):
            holders = [each for each in self._holders.get(page, ()) if each in replicas and depths.get(each, 0) == depth]
            if not holders:
                break
            depths |= dict.fromkeys(holders, depth + 1)
        return depths
