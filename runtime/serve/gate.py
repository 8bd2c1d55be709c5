"""The order in which requests reach the engine: by priority, then in turns between tenants, then by arrival."""

from __future__ import annotations

import asyncio
import heapq
import itertools

from stepgraph.runtime.request_queue import QueueFullError


class Ticket:
    """A place in the order; `entered` is done once the request may be submitted."""

    def __init__(self, priority: int, turn: int, arrival: int) -> None:
        self.key, self.left = (priority, turn, arrival), False
        self.entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: Ticket) -> bool:
        return self.key < other.key


class Gate:
    """Lets `capacity` requests into the engine. For one event loop."""

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self._free, self._max_waiting, self._arrivals = capacity, max_waiting, itertools.count()
        self._waiting: list[Ticket] = []
        self._turn, self._turns = 0, dict[str, int]()  # of the latest admission, and the last one given to each tenant

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def tickets(self, count: int, priority: int, tenant: str = "") -> list[Ticket]:
        """QueueFullError if fewer than `count` may still wait. Lower priorities enter first. Of equal ones each tenant has one per turn, so
        that a long queue of one delays no other."""
        if len(self._waiting) + count > self._max_waiting + self._free:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting already, of at most {self._max_waiting}")
        first = max(self._turn, self._turns.get(tenant, -1) + 1)
        self._turns[tenant] = first + count - 1
        tickets = [Ticket(priority, first + index, next(self._arrivals)) for index in range(count)]
        for ticket in tickets:
            heapq.heappush(self._waiting, ticket)
        self._admit()
        return tickets

    def leave(self, ticket: Ticket) -> None:
        """Give the place up, whether or not it was reached. Idempotent."""
        if ticket.left:
            return
        ticket.left = True
        if ticket.entered.done():
            self._free += 1
        else:
            self._waiting.remove(ticket)
            heapq.heapify(self._waiting)
        self._admit()

    def _admit(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            ticket = heapq.heappop(self._waiting)
            self._turn = max(self._turn, ticket.key[1])
            ticket.entered.set_result(None)
