"""CUDA events for reuse."""

from __future__ import annotations

import contextlib

import torch

from stepgraph.graphs.cuda.driver import Driver


class EventPool:
    """CUDA events by their handles."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device, self._driver = device, driver
        self._spare: list[int] = []
        self._released = False

    def take(self) -> int:
        if self._spare:
            return self._spare.pop()
        with torch.cuda.device(self._device):
            return self._driver.event_create()

    def give(self, event: int) -> None:
        """Return an event for reuse. From any thread."""
        if self._released:
            with contextlib.suppress(RuntimeError):
                self._driver.cuEventDestroy_v2(event)
        else:
            self._spare.append(event)

    def release(self) -> None:
        """Destroy the spare events, and each event that is given back later."""
        self._released = True
        while self._spare:
            self.give(self._spare.pop())
