"""Time, injected. The only core file that reads the real clock; everything else is handed a Clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic time."""

    def now_s(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""
        ...


class WallClock:
    """Real monotonic time."""

    def now_s(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()


class VirtualClock:
    """Time that moves only when told to (replay and tests)."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def advance(self, duration_s: float) -> None:
        """Move forward by `duration_s` >= 0 seconds. Raises ValueError on a negative duration."""
        if duration_s < 0:
            raise ValueError(f"time cannot go back by {-duration_s} s")
        self._now_s += duration_s

    def advance_to(self, when_s: float) -> None:
        """Move forward to a moment, exactly (no sum of differences). Raises ValueError for one that is past."""
        if when_s < self._now_s:
            raise ValueError(f"time cannot go back from {self._now_s} s to {when_s} s")
        self._now_s = when_s
