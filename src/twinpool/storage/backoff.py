"""How long writing pauses after the disk has refused a write: a second, then twice as long each time, a minute at most."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Backoff:
    """A pause after each failure in a row; the first try after it decides how it goes on. The caller locks.

    clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = 0.0  # of the last failure, 0: the last try went well
        self._until_s = 0.0

    @property
    def pauses(self) -> bool:
        """Whether nothing should be tried now."""
        return self._pause_s > 0 and self._clock() < self._until_s

    def failed(self) -> None:
        """A try has failed."""
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._until_s = self._clock() + self._pause_s

    def worked(self) -> None:
        """A try went well."""
        self._pause_s = 0.0
