"""Read-only counts of a pool by owner, for checks, metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.units import share


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """Pages (or slots) of one pool.

    free: in the ring; evictable: in the prefix tree, unlocked; protected: in the tree, locked by running requests; held: owned by
    running requests themselves.
    """

    total: int
    free: int
    evictable: int
    protected: int
    held: int

    @property
    def used(self) -> int:
        """What no eviction would give back: total - free - evictable (reference 2.2)."""
        return self.total - self.free - self.evictable

    @property
    def usage(self) -> float:
        """used / total, in [0, 1]."""
        return share(self.used, self.total)

    def check(self) -> None:
        """Assert conservation: the four parts are the whole."""
        parts = self.free + self.evictable + self.protected + self.held
        assert parts == self.total, f"{self} adds up to {parts}"
