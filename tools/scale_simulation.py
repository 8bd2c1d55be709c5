"""Predicts throughput and latency of 1 to 1,000 replicas from measured round times: queues, routing by prefixes, failures, prefix hits.

    python -m tools.scale_simulation --replicas 1 10 100 1000 --load 0.8 --round-ms 9.4 1.1 --prompt-ms 0.11

A replica runs rounds: one with b rows takes `first + b * row` seconds and gives each row `tokens_per_round` tokens. A prompt delays
the rounds of its replica by the time of its uncached tokens. Requests are routed as in the real pool. Between two events of a
replica its rows advance evenly. Arrivals are a Poisson process; prompts begin with one of `prefixes` texts, drawn by Zipf's law.
A replica that fails restarts after `restart_seconds` without its cache, and its requests continue on others, with their tokens as prompts.
"""

from __future__ import annotations

import argparse
import collections
import heapq
import itertools
import json
import math
import random
from dataclasses import asdict, dataclass, field

from stepgraph.runtime.replicas.router import PrefixRouter, page_hashes

PAGE = 16


@dataclass(frozen=True)
class Costs:
    """Measured costs of one engine."""

    first_seconds: float  # per round, without its rows
    row_seconds: float  # per row of a round
    prompt_seconds: float  # per uncached prompt token
    tokens_per_round: float = 1.0  # per row
    request_seconds: float = 0.0  # time in Ray and HTTP before the first token

    def round_seconds(self, rows: int) -> float:
        return self.first_seconds + rows * self.row_seconds


@dataclass(frozen=True)
class Load:
    """The requests of a simulation."""

    requests: int
    per_second: float  # arrivals; inf: all at once
    prompt_tokens: int = 256
    prefix_tokens: int = 192  # prompt tokens that are common to the requests with the same prefix
    prefixes: int = 64
    output_tokens: int = 200
    spread: float = 0.5  # numbers of output tokens are uniform between (1 - spread) and (1 + spread) times output_tokens


@dataclass(frozen=True)
class Pool:
    replicas: int
    rows: int = 8
    cached_pages: int = 4096  # per replica
    failures_per_hour: float = 0.0  # per replica
    restart_seconds: float = 30.0
    load_factor: float = 1.25


@dataclass
class Prediction:
    replicas: int
    tokens_per_second: float
    first_token_p50: float
    first_token_p99: float
    request_p50: float
    request_p99: float
    prefix_hits: float  # share of the prompt tokens that were cached
    busy: float  # share of the time that a replica has rows
    failures: int
    continued: int


@dataclass(eq=False)
class _Request:
    pages: tuple[bytes, ...]
    prompt: int
    left: float  # tokens
    arrival: float
    tokens_done: float = 0.0  # tokens
    first_token_at: float | None = None


@dataclass(eq=False)
class _Replica:
    """Running requests, waiting requests, and the pages in the prefix cache."""

    name: str
    rows: list[_Request] = field(default_factory=list)
    waiting: collections.deque[_Request] = field(default_factory=collections.deque)
    cache: collections.OrderedDict[bytes, None] = field(default_factory=collections.OrderedDict)
    clock: float = 0.0  # time up to which its rows have advanced
    version: int = 0  # of its next event; events of older ones are void
    busy_seconds: float = 0.0
    down: bool = False

    @property
    def load(self) -> int:
        return len(self.rows) + len(self.waiting)


class Simulation:
    def __init__(self, pool: Pool, load: Load, costs: Costs, seed: int = 0) -> None:
        for name, value in (("replicas", pool.replicas), ("rows", pool.rows), ("requests", load.requests)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected a whole number >= 1")
        self._pool, self._load, self._costs, self._rng = pool, load, costs, random.Random(seed)
        self._router = PrefixRouter(pool.load_factor)
        self._replicas = {str(index): _Replica(str(index)) for index in range(pool.replicas)}
        self._events: list[tuple[float, int, str, str, int]] = []  # time, order, kind, replica, version
        self._order, self._now, self._ended = itertools.count(), 0.0, list[_Request]()
        self._unrouted = list[_Request]()  # requests that wait because all replicas are down
        self._hit_tokens = self._prompt_tokens = self._failures = self._continued = 0

    def run(self) -> Prediction:
        at = 0.0
        weights = [1 / rank for rank in range(1, self._load.prefixes + 1)]
        texts = self._rng.choices(range(self._load.prefixes), weights, k=self._load.requests)
        for _ in range(self._load.requests):
            at += self._rng.expovariate(self._load.per_second) if math.isfinite(self._load.per_second) else 0.0
            self._push(at, "arrive")
        for name in self._replicas if self._pool.failures_per_hour else ():
            self._push(self._rng.expovariate(self._pool.failures_per_hour / 3600), "fail", name)
        while len(self._ended) < self._load.requests:
            self._now, _, kind, name, version = heapq.heappop(self._events)
            if kind == "arrive":
                self._route(self._request(texts.pop()))
            elif kind == "fail":
                self._fail(self._replicas[name])
            elif kind == "restart":
                self._replicas[name].down, self._replicas[name].clock = False, self._now
                unrouted, self._unrouted = self._unrouted, []
                for request in unrouted:
                    self._route(request)
            elif version == self._replicas[name].version:
                self._advance(self._replicas[name])
                self._plan(self._replicas[name])
        return self._prediction()

    def _push(self, at: float, kind: str, name: str = "", version: int = 0) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, name, version))

    def _request(self, text: int) -> _Request:
        load, request_number = self._load, len(self._ended) + next(self._order)
        ids = [text + 1] * load.prefix_tokens + [-request_number] * (load.prompt_tokens - load.prefix_tokens)
        tokens = load.output_tokens * self._rng.uniform(1 - load.spread, 1 + load.spread)
        return _Request(page_hashes(ids, PAGE, ()), load.prompt_tokens, max(1.0, round(tokens)), self._now)

    def _route(self, request: _Request) -> None:
        up = {name: replica.load for name, replica in self._replicas.items() if not replica.down}
        if not up:
            self._unrouted.append(request)
            return
        replica = self._replicas[self._router.rank(request.pages, up)[0]]
        self._router.note(request.pages, replica.name)
        self._advance(replica)
        replica.waiting.append(request)
        self._plan(replica)

    def _advance(self, replica: _Replica) -> None:
        """Advance the rows to the present time, and remove those that have ended."""
        elapsed = self._now - replica.clock
        if elapsed > 0 and replica.rows:
            tokens = elapsed / self._costs.round_seconds(len(replica.rows)) * self._costs.tokens_per_round
            replica.busy_seconds += elapsed
            for request in replica.rows:
                if request.first_token_at is None and tokens > 0:
                    request.first_token_at = replica.clock + self._costs.round_seconds(len(replica.rows)) + self._costs.request_seconds
                request.tokens_done += tokens
                request.left -= tokens
            for request in [each for each in replica.rows if each.left < 1e-6]:
                replica.rows.remove(request)
                request.left = self._now - request.arrival + self._costs.request_seconds  # `left` is its latency from here on
                self._ended.append(request)
        replica.clock = max(replica.clock, self._now)

    def _plan(self, replica: _Replica) -> None:
        """Fill free rows, and schedule the next end of a request."""
        while replica.waiting and len(replica.rows) < self._pool.rows:
            request = replica.waiting.popleft()
            hit = next((depth for depth, page in enumerate(request.pages) if page not in replica.cache), len(request.pages))
            for page in request.pages:
                replica.cache[page] = None
                replica.cache.move_to_end(page)
            while len(replica.cache) > self._pool.cached_pages:
                replica.cache.popitem(last=False)
            tokens = request.prompt + int(request.tokens_done)
            self._hit_tokens, self._prompt_tokens = self._hit_tokens + hit * PAGE, self._prompt_tokens + tokens
            stall = (tokens - hit * PAGE) * self._costs.prompt_seconds  # delays all rows
            replica.clock, replica.busy_seconds = replica.clock + stall, replica.busy_seconds + stall
            replica.rows.append(request)
        replica.version += 1
        if replica.rows:
            rounds = min(request.left for request in replica.rows) / self._costs.tokens_per_round
            self._push(replica.clock + rounds * self._costs.round_seconds(len(replica.rows)), "step", replica.name, replica.version)

    def _fail(self, replica: _Replica) -> None:
        self._push(self._now + self._rng.expovariate(self._pool.failures_per_hour / 3600), "fail", replica.name)
        if replica.down:
            return
        self._advance(replica)
        self._failures += 1
        broken = [*replica.rows, *replica.waiting]
        self._continued += len(replica.rows)
        replica.rows, replica.down, replica.version = [], True, replica.version + 1
        replica.waiting.clear()
        replica.cache.clear()
        self._push(self._now + self._pool.restart_seconds, "restart", replica.name)
        for request in broken:
            self._route(request)

    def _prediction(self) -> Prediction:
        firsts = sorted((request.first_token_at or 0.0) - request.arrival for request in self._ended)
        latencies, end = sorted(request.left for request in self._ended), max(self._now, 1e-9)
        tokens = sum(request.tokens_done for request in self._ended)
        busy = sum(replica.busy_seconds for replica in self._replicas.values()) / end / len(self._replicas)
        shares = (quantile(firsts, 0.5), quantile(firsts, 0.99), quantile(latencies, 0.5), quantile(latencies, 0.99))
        hits = self._hit_tokens / max(1, self._prompt_tokens)
        return Prediction(self._pool.replicas, tokens / end, *shares, hits, min(busy, 1.0), self._failures, self._continued)


def quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def capacity(pool: Pool, load: Load, costs: Costs) -> float:
    """Requests per second of a pool whose rows are all taken and whose prefixes are all cached."""
    tokens = pool.rows * costs.tokens_per_round / costs.round_seconds(pool.rows)
    uncached_tokens = load.prompt_tokens - load.prefix_tokens // PAGE * PAGE
    return pool.replicas / (load.output_tokens / tokens + uncached_tokens * costs.prompt_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=[1, 10, 100, 1000], metavar="N")
    add("--round-ms", type=float, nargs=2, required=True, metavar=("FIRST", "ROW"), help="time of a round without its rows, and per row")
    add("--prompt-ms", type=float, required=True, metavar="MS", help="time per uncached prompt token")
    add("--tokens-per-round", type=float, default=1.0, metavar="N", help="accepted length per row")
    add("--request-ms", type=float, default=0.0, metavar="MS", help="time of a request in Ray and HTTP")
    add("--load", type=float, default=0.8, metavar="SHARE", help="arrivals as a share of what all rows can decode")
    add("--rows", type=int, default=8, metavar="N")
    add("--requests", type=int, default=20, metavar="N", help="requests per replica")
    add("--failures-per-hour", type=float, default=0.0, metavar="N", help="failures of each replica")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    first, row = options.round_ms
    costs = Costs(first / 1e3, row / 1e3, options.prompt_ms / 1e3, options.tokens_per_round, options.request_ms / 1e3)
    predictions = []
    for count in options.replicas:
        pool = Pool(count, options.rows, failures_per_hour=options.failures_per_hour)
        load = Load(options.requests * count, 1.0, prefixes=max(8, 2 * count))
        load = Load(options.requests * count, options.load * capacity(pool, load, costs), prefixes=load.prefixes)
        predictions.append(asdict(Simulation(pool, load, costs, options.seed).run()))
        print(" ".join(f"{name}={value:.4g}" for name, value in predictions[-1].items()), flush=True)
    print(json.dumps({"costs": asdict(costs), "predictions": predictions}))


if __name__ == "__main__":
    main()
