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
        self.available = count
        self._on_free = on_free
        # Index-sized, so that a slice of the ring is used as an index without a conversion.
        self._ring = np.arange(first, first + count, dtype=np.intp)
        self._head = 0
        # By id: 0 for an allocated one, else a mark that is not 0; the ids before `first` are nobody's to free.
        self._mark = np.ones(first + count, np.int32)
        self._mark_of = self._mark.data  # one id at a time: several times faster than indexing the array

    def alloc(self, n: int) -> Int32Array | None:
        """The n ids that have been free longest (int32 [n]), or None if fewer are free."""
        if n > self.available:
            return None
        head, end = self._head, self._head + n
        if end <= self.count:
            ids = self._ring[head:end]
        else:
            ids = np.concatenate((self._ring[head:], self._ring[: end - self.count]))
        self._head = end % self.count if self.count else 0
        self.available -= n
        self._mark[ids] = 0
        return ids.astype(np.int32)

    def free(self, ids: Int32Array | Iterable[int]) -> None:
        """Give ids back: int32 [n], or a few Python ints (one by one, which is faster for them)."""
        if not isinstance(ids, np.ndarray):
            few = list(ids)
            for identity in few:
                self._free_one(identity)
            if self._on_free is not None and few:
                self._on_free(np.array(few, np.int32))
            return
        tail = self._tail
        before_wrap = self.count - tail
        self._free_run(ids[:before_wrap], tail)
        if len(ids) > before_wrap:
            self._free_run(ids[before_wrap:], 0)
        if self._on_free is not None and len(ids):
            self._on_free(ids)

    @property
    def _tail(self) -> int:
        tail = self._head + self.available
        return tail if tail < self.count else tail - self.count

    def _free_one(self, identity: int) -> None:
        assert self.first <= identity < self.first + self.count, f"{self.name}: id {identity} is outside the pool"
        assert not self._mark_of[identity], f"{self.name}: double free of {identity}"
        self._mark_of[identity] = 1
        self._ring[self._tail] = identity
        self.available += 1

    def _free_run(self, ids: Int32Array, tail: int) -> None:
        """Append ids to the ring at `tail`, where they fit without a wrap."""
        n = len(ids)
        assert n <= self.count - self.available, f"{self.name}: more ids come back than are out"
        spot = self._ring[tail : tail + n]
        # Nothing lives behind the tail, so ids may be written before they are checked. Unsigned: a negative id is no index.
        spot[:] = ids.view(np.uint32)
        try:
            found = self._mark.take(spot)
        except IndexError:
            raise AssertionError(f"{self.name}: an id is outside the pool") from None
        assert not np.count_nonzero(found), f"{self.name}: double free"
        # Each id gets a mark of its own: one that is named twice does not read back the first of its two.
        marks = np.arange(1, n + 1, dtype=np.int32)
        self._mark[spot] = marks
        assert self._mark.take(spot).tobytes() == marks.tobytes(), f"{self.name}: an id is freed twice in one call"
        self.available += n

    def n_free_among(self, ids: Int32Array) -> int:
        """How many of `ids` (int32 [n]) are in the free ring."""
        return int(np.count_nonzero(self._mark[ids]))

    def free_ids(self) -> Int32Array:
        """All free ids in the order they would be handed out (tests and leak reports)."""
        order = (self._head + np.arange(self.available)) % max(self.count, 1)
        return self._ring[order].astype(np.int32)

    def check(self) -> None:
        """Assert that ring and census agree. Cost grows with the pool: tests and idle checks only."""
        ids = self.free_ids()
        assert int(np.count_nonzero(self._mark[self.first :])) == self.available, f"{self.name}: census and ring differ"
        assert self.n_free_among(ids) == self.available, f"{self.name}: the ring names an allocated id"
        assert len(np.unique(ids)) == self.available, f"{self.name}: the ring names an id twice"
