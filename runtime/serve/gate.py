"""The order in which requests reach the engine: by priority, then in turns between tenants, then by arrival."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from stepgraph.runtime.request_queue import QueueFullError


@dataclass(order=True)
class Ticket:
    """A place in the order; `entered` is done once the request may be submitted."""

    order: tuple[int, int, int]  # priority, turn, arrival
    tenant: str
    entered: asyncio.Future[None] = field(compare=False)


class Gate:
    """Admits up to `capacity` requests to the engine, not counting those with larger priority numbers, which the engine queues or preempts.
    For one event loop."""

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self._capacity, self._max_waiting, self._arrivals = capacity, max_waiting, itertools.count()
        self._waiting, self._entered = list[Ticket](), list[Ticket]()  # without tickets that left
        self.size = capacity + max_waiting  # the most tickets at once

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def tickets(self, count: int, priority: int, tenant: str = "") -> list[Ticket]:
        """QueueFullError if fewer than `count` may still wait. Lower priorities enter first. At equal priority each tenant has one per
        turn, so that a long queue of one tenant does not delay others."""
        waiting = len(self._waiting) + len(self._entered) - self._capacity
        if waiting + count > self._max_waiting:
            raise QueueFullError(f"{max(waiting, 0)} requests are waiting already, of at most {self._max_waiting}")
        first = self._next_turn(priority, tenant)
        make_future = asyncio.get_running_loop().create_future
        tickets = [Ticket((priority, first + index, next(self._arrivals)), tenant, make_future()) for index in range(count)]
        self._waiting = sorted(self._waiting + tickets)
        self._admit()
        return tickets

    def _next_turn(self, priority: int, tenant: str) -> int:
        """The first turn, from the present one on, in which no earlier request of the tenant enters."""
        entered, waiting = ([each for each in them if each.order[0] == priority] for them in (self._entered, self._waiting))
        present = max((each.order[1] for each in entered), default=min((each.order[1] for each in waiting), default=0))
        return max([present, *(each.order[1] + 1 for each in entered + waiting if each.tenant == tenant)])

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket, entered or waiting. Idempotent."""
        for tickets in (self._entered, self._waiting):
            if ticket in tickets:
                tickets.remove(ticket)
                self._admit()

    def _admit(self) -> None:
        while self._waiting and sum(each.order[0] <= self._waiting[0].order[0] for each in self._entered) < self._capacity:
            ticket = self._waiting.pop(0)
            self._entered.append(ticket)
            ticket.entered.set_result(None)
