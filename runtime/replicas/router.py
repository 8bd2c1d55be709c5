"""The order in which replicas are tried: one that holds a request's prefix first, unless it has too many requests. Needs no Ray."""

from __future__ import annotations

import collections
import hashlib
import math
import random
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

MAX_PAGES = 256  # of a prompt that are compared: 4,096 tokens at the default size
MAX_HOLDERS = 8  # replicas that are remembered for a page


def page_hashes(prompt_ids: Sequence[int], page_size: int, salt: Iterable[str]) -> tuple[bytes, ...]:
    """Of each full page, with all pages before it. Requests with different salts have no hash in common."""
    state = hashlib.blake2b(repr((page_size, *salt)).encode(), digest_size=8)
    found = []
    for start in range(0, min(len(prompt_ids) // page_size, MAX_PAGES) * page_size, page_size):
        state.update(array("q", prompt_ids[start : start + page_size]).tobytes())
        found.append(state.digest())
    return tuple(found)


class PrefixRouter:
    """Which replicas got which pages. A replica may have evicted one since; then the prefix is computed again."""

    def __init__(self, load_factor: float = 1.25, max_pages: int = 1 << 17) -> None:
        """load_factor: a replica gets no request for its prefix while it has more than this times the mean number of requests."""
        if not load_factor >= 1:  # also refuses NaN
            raise ValueError(f"PrefixRouter.load_factor: got {load_factor!r}, expected a number >= 1")
        if max_pages < 1:
            raise ValueError(f"PrefixRouter.max_pages: got {max_pages!r}, expected a whole number >= 1")
        self._factor, self._max_pages = load_factor, max_pages
        self._holders: collections.OrderedDict[bytes, list[str]] = collections.OrderedDict()  # least recently routed first

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, hashes: Sequence[bytes], replica: str) -> None:
        """The replica got a request with these pages."""
        for page in reversed(hashes):  # the first page is used last, so that no page is forgotten before those that follow it
            holders = self._holders.pop(page, [])
            self._holders[page] = [replica, *(each for each in holders if each != replica)][:MAX_HOLDERS]
        while len(self._holders) > self._max_pages:
            self._holders.popitem(last=False)

    def rank(self, hashes: Sequence[bytes], loads: Mapping[str, int], avoid: Collection[str] = ()) -> list[str]:
        """The replicas of `loads` (requests by replica), the best one first; those to avoid only if there are no others, however full."""
        loads = {name: count for name, count in loads.items() if name not in avoid} or loads
        limit = math.ceil(self._factor * (sum(loads.values()) + 1) / len(loads)) if loads else 0
        depths = self._depths(hashes, loads.keys())

        def order(replica: str) -> tuple[bool, int, int, bytes]:
            over = loads[replica] >= limit
            return over, 0 if over else -depths.get(replica, 0), loads[replica], _tie(hashes, replica)

        return sorted(loads, key=order)

    def _depths(self, hashes: Sequence[bytes], replicas: Collection[str]) -> dict[str, int]:
        """By replica, the number of pages from the first one on that it holds; only replicas with some."""
        depths: dict[str, int] = {}
        for depth, page in enumerate(hashes):
            holders = [each for each in self._holders.get(page, ()) if each in replicas and depths.get(each, 0) == depth]
            if not holders:
                break
            depths |= dict.fromkeys(holders, depth + 1)
        return depths


def _tie(hashes: Sequence[bytes], replica: str) -> bytes:
    """Of equal replicas, processes with routers of their own choose the same one for a new prefix, and any for a prompt without pages."""
    return hashlib.blake2b(hashes[0] + replica.encode(), digest_size=8).digest() if hashes else random.randbytes(8)
