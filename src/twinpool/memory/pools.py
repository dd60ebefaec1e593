"""Who owns a page or a slot: one FIFO ring of ids for each pool. Cost grows with the ids moved, never with the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from twinpool.request import Int32Array


class Pool:
    """Ids first .. first + count - 1, handed out in the order they came back (reference 1.6).

    A short pool answers None, never an exception; freeing what is not allocated is a bug and asserts.
    """

    def __init__(
        self, *, name: str, first: int, count: int, on_free: Callable[[Int32Array], None] | None = None
    ) -> None:
        self.name = name
        self.first = first
        self.count = count
        self._on_free = on_free
        self._reset_ring()

    def _reset_ring(self) -> None:
        self._ring = np.arange(self.first, self.first + self.count, dtype=np.int32)
        # 0 for an allocated id, a positive mark for a free one.
        self._free_mark = np.ones(self.count, np.int32)
        self._head = 0
        self.available = self.count

    def alloc(self, n: int) -> Int32Array | None:
        """The n ids that have been free longest (int32 [n]), or None if fewer are free."""
        if n > self.available:
            return None
        head, end = self._head, self._head + n
        if end <= self.count:
            ids = self._ring[head:end].copy()
        else:
            ids = np.concatenate((self._ring[head:], self._ring[: end - self.count]))
        self._head = end % self.count if self.count else 0
        self.available -= n
        self._free_mark[ids - self.first] = 0
        return ids

    def free(self, ids: Int32Array | Iterable[int]) -> None:
        """Give ids back (int32 [n] or any iterable of ints)."""
        array = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, np.int32)
        n = len(array)
        if n == 0:
            return
        index = array.astype(np.intp)
        index -= self.first
        assert int(index.view(np.uintp).max()) < self.count, f"{self.name}: id outside the pool"
        assert not self._free_mark[index].any(), f"{self.name}: double free"
        # Each id gets a mark of its own: one that is named twice does not read back the first of its two.
        marks = np.arange(1, n + 1, dtype=np.int32)
        self._free_mark[index] = marks
        assert np.array_equal(self._free_mark[index], marks), f"{self.name}: an id is freed twice in one call"
        tail = (self._head + self.available) % self.count
        first_part = min(n, self.count - tail)
        self._ring[tail : tail + first_part] = array[:first_part]
        self._ring[: n - first_part] = array[first_part:]
        self.available += n
        if self._on_free is not None:
            self._on_free(array)

    def is_free(self, identity: int) -> bool:
        """Whether an id is in the free ring."""
        return bool(self._free_mark[identity - self.first])

    def free_ids(self) -> Int32Array:
        """All free ids in the order they would be handed out (tests and leak reports)."""
        order = (self._head + np.arange(self.available)) % max(self.count, 1)
        return self._ring[order]

    def check(self) -> None:
        """Assert that ring and census agree. Cost grows with the pool: tests and idle checks only."""
        ids = self.free_ids()
        assert len(np.unique(ids)) == self.available, f"{self.name}: the ring names an id twice"
        assert int(np.count_nonzero(self._free_mark)) == self.available, f"{self.name}: census and ring differ"
        assert self._free_mark[ids - self.first].all(), f"{self.name}: the ring names an allocated id"
