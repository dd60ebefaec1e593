"""Calls at moments of virtual time, beside what the loop does: each sees what those before it did."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from twinpool.clock import Clock


class Agenda:
    """Calls by time, of one time in the order in which they were entered. They are made when somebody looks (`catch_up`)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0
        self._calling_s: float | None = None

    @property
    def now_s(self) -> float:
        """When the call that is being made is due; else the clock's time."""
        return self._clock.now_s() if self._calling_s is None else self._calling_s

    @property
    def next_s(self) -> float | None:
        """When the next call is due; None without one."""
        return self._calls[0][0] if self._calls else None

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Make this call then."""
        heapq.heappush(self._calls, (when_s, self._entered, call))
        self._entered += 1

    def catch_up(self) -> None:
        """Make all calls that are due by now."""
        while self._calls and self._calls[0][0] <= self._clock.now_s():
            self._calling_s, _, call = heapq.heappop(self._calls)
            call()
        self._calling_s = None
