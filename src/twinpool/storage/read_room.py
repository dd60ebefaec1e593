"""Memory for what is read ahead of its requests: chains begin in turn, each when all of it fits beside those that wait to be fetched."""

from __future__ import annotations

from collections.abc import Hashable


class ReadRoom:
    """Belongs to one thread, or to whoever holds a lock. A chain larger than all of it begins when there are no others.

    A chain gets its room as a whole, so that no two wait for each other's rest.
    """

    def __init__(self, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._waiting: dict[Hashable, int] = {}  # bytes, first come first
        self._held: dict[Hashable, int] = {}

    def queue(self, chain: Hashable, size_bytes: int) -> None:
        """A chain wants to begin."""
        self._waiting[chain] = size_bytes

    def waits(self, chain: Hashable) -> bool:
        """Whether it has not begun and still wants to."""
        return chain in self._waiting

    def is_next(self, chain: Hashable) -> bool:
        """Whether a chain that waits may begin now."""
        fits = not self._held or sum(self._held.values()) + self._waiting[chain] <= self._most_bytes
        return fits and next(iter(self._waiting)) is chain

    def begin(self, chain: Hashable) -> None:
        """The chain that is next takes its room."""
        self._held[chain] = self._waiting.pop(chain)

    def leave(self, chain: Hashable) -> None:
        """It has been fetched, or nobody wants it."""
        self._waiting.pop(chain, None)
        self._held.pop(chain, None)

    def close(self) -> None:
        """None begins any more."""
        self._waiting.clear()
