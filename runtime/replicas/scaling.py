"""How many replicas Ray Serve runs: by requests, running and queued, and by the cache pages that are free. Runs in Ray's controller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FREE_PAGES = "free_pages"  # share of a replica's cache pages that a request can get
LEAST_FREE = 0.1  # where all replicas have less, another one is started


def wanted_replicas(requests: float, target: float, running: int, free_pages: Mapping[Any, float]) -> int:
    """target: requests per replica. free_pages: by replica."""
    wanted = math.ceil(requests / target)
    if free_pages and len(free_pages) >= running and max(free_pages.values()) < LEAST_FREE:
        wanted = max(wanted, running + 1)  # requests wait for pages, however few they are
    return max(wanted, 1)


def scale(context: Any) -> tuple[int, dict[str, Any]]:
    """The policy of an AutoscalingConfig: the number of replicas, and no state. Ray applies the limits and delays."""
    found = (context.aggregated_metrics or {}).get(FREE_PAGES, {})
    return wanted_replicas(context.total_num_requests, context.config.target_ongoing_requests, context.current_num_replicas, found), {}
