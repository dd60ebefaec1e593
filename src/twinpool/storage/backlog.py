"""What waits to be written: in order, and at most so many bytes of it."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Backlog(Generic[_T]):
    """Belongs to one thread, or to whoever holds a lock. dropped: items that were not taken; most_bytes: of all that waits."""

    def __init__(self, *, most_bytes: int) -> None:
        self.pending_bytes = self.dropped = 0
        self._most_bytes = most_bytes
        self._items: deque[tuple[_T, int]] = deque()

    def __len__(self) -> int:
        """Items, the first of which may be being written."""
        return len(self._items)

    @property
    def first(self) -> _T:
        """The item that is written next. Raises IndexError when there is none."""
        return self._items[0][0]

    def take(self, item: _T, *, size_bytes: int) -> bool:
        """Put an item at the end; False: there is no room. One that is larger than all the room is taken when nothing else waits."""
        if self._items and self.pending_bytes + size_bytes > self._most_bytes:
            self.dropped += 1
            return False
        self._items.append((item, size_bytes))
        self.pending_bytes += size_bytes
        return True

    def done(self) -> None:
        """The first item need not wait any more."""
        self.pending_bytes -= self._items.popleft()[1]

    def keep_first(self) -> None:
        """Forget all but the first item."""
        while len(self._items) > 1:
            self.pending_bytes -= self._items.pop()[1]
