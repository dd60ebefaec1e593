"""Host memory for evicted prefixes: one arena of chunks, each of which holds either KV pages or states, so that no split is fixed.

    chunk: ceil(slot / page) pages, or one state      (a state is larger than a page: the usual case)
    chunk: one page, or several states                (short convolutions)

A chunk belongs to a kind from its first allocation until all of it is free again. Ids are small integers; 0 is never a slot.
"""

from __future__ import annotations

import numpy as np

from twinpool.request import Int32Array
from twinpool.units import ceil_div

_PAGES_OF_NO_BYTES = 1 << 14
NO_IDS: Int32Array = np.empty(0, np.int32)


class _Kind:
    """Units (pages or states) in chunks: which are free, chunk by chunk; chunks with room are used before fresh ones."""

    def __init__(self, per_chunk: int) -> None:
        self.per_chunk = per_chunk
        self.used = 0
        self._taken = bytearray()  # of the chunks so far: a plan's arena may be larger than any memory
        self.limit: int | None = None
        self._free: dict[int, list[int]] = {}  # chunk: free units of it; only chunks of this kind
        self._open: dict[int, None] = {}  # chunks of this kind with room

    @property
    def chunks(self) -> int:
        """Chunks that belong to this kind now."""
        return len(self._free)

    @property
    def spare(self) -> int:
        """Free units in chunks of this kind."""
        return self.chunks * self.per_chunk - self.used

    def take(self, n: int, fresh: list[int]) -> Int32Array:
        """n units, from chunks with room first, then from the `fresh` chunks given."""
        taken: list[int] = []
        for chunk in fresh:
            self._free[chunk] = list(range((chunk + 1) * self.per_chunk - 1, chunk * self.per_chunk - 1, -1))
            self._open[chunk] = None
            self._taken.extend(bytes(max(0, (chunk + 1) * self.per_chunk - len(self._taken))))
        while len(taken) < n:
            chunk = next(iter(self._open))
            units = self._free[chunk]
            k = min(n - len(taken), len(units))
            taken += reversed(units[len(units) - k :])
            del units[len(units) - k :]
            if not units:
                del self._open[chunk]
        self.used += n
        for unit in taken:
            self._taken[unit] = 1
        return np.array(taken, np.int32)

    def give_back(self, ids: Int32Array) -> list[int]:
        """Free units; returns the chunks that are wholly free now and belong to nobody."""
        empty: list[int] = []
        for unit in ids.tolist():
            chunk = unit // self.per_chunk
            units = self._free[chunk]
            assert self._taken[unit], f"host unit {unit} is freed and not in use"
            self._taken[unit] = 0
            units.append(unit)
            self._open[chunk] = None
            if len(units) == self.per_chunk:
                del self._free[chunk], self._open[chunk]
                empty.append(chunk)
        self.used -= len(ids)
        return empty


class HostArena:
    """Pages and states of so many bytes together. max_slots: a fixed quota for states, the rest being for pages; None: no quota.

    page_bytes 0: a model without KV, whose pages only count tokens: one chunk holds very many. total_bytes that hold not even one
    chunk make an arena that is always full.
    """

    def __init__(self, *, total_bytes: int, page_bytes: int, slot_bytes: int, max_slots: int | None = None) -> None:
        self.page_bytes, self.slot_bytes = page_bytes, slot_bytes
        if not page_bytes:
            pages_per_chunk, slots_per_chunk = _PAGES_OF_NO_BYTES, 1
        elif slot_bytes >= page_bytes:
            pages_per_chunk, slots_per_chunk = ceil_div(slot_bytes, page_bytes), 1
        else:
            pages_per_chunk, slots_per_chunk = 1, page_bytes // slot_bytes
        self.chunk_bytes = max(pages_per_chunk * page_bytes, slot_bytes)
        self.n_chunks = total_bytes // self.chunk_bytes
        self._pages, self._slots = _Kind(pages_per_chunk), _Kind(slots_per_chunk)
        # Chunks that are free again, used before those from _n_begun on, which never were anybody's.
        self._fresh: list[int] = []
        self._n_begun = 0
        if max_slots is not None:
            chunks = min(self.n_chunks, ceil_div(max_slots, slots_per_chunk))
            self._slots.limit, self._pages.limit = chunks, self.n_chunks - chunks

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks."""
        return self.n_chunks * self.chunk_bytes

    @property
    def used_pages(self) -> int:
        """Pages in use."""
        return self._pages.used

    @property
    def used_slots(self) -> int:
        """States in use."""
        return self._slots.used

    @property
    def page_capacity(self) -> int:
        """Pages that there are, or could be if every chunk that is not a state's became KV."""
        chunks = self.n_chunks - self._slots.chunks if self._pages.limit is None else self._pages.limit
        return chunks * self._pages.per_chunk

    @property
    def slot_capacity(self) -> int:
        """States that there are, or could be if every chunk that is not KV's became a state."""
        chunks = self.n_chunks - self._pages.chunks if self._slots.limit is None else self._slots.limit
        return chunks * self._slots.per_chunk

    @property
    def most_pages(self) -> int:
        """Pages of an empty arena."""
        return (self.n_chunks if self._pages.limit is None else self._pages.limit) * self._pages.per_chunk

    @property
    def most_slots(self) -> int:
        """States of an empty arena."""
        return (self.n_chunks if self._slots.limit is None else self._slots.limit) * self._slots.per_chunk

    @property
    def slots_per_chunk(self) -> int:
        """States in a chunk of states."""
        return self._slots.per_chunk

    @property
    def has_quota(self) -> bool:
        """Whether chunks of KV never become states' and the other way round."""
        return self._slots.limit is not None

    def bytes_of(self, *, pages: int, slots: int) -> int:
        """Of so many pages and states."""
        return pages * self.page_bytes + slots * self.slot_bytes

    def can_ever_hold(self, *, pages: int, slots: int) -> bool:
        """Whether an empty arena has room for so many pages and states together."""
        if pages > self.most_pages or slots > self.most_slots:
            return False
        chunks = ceil_div(pages, self._pages.per_chunk) + ceil_div(slots, self._slots.per_chunk)
        return chunks <= self.n_chunks

    def lacks(self, *, pages: int, slots: int) -> tuple[bool, bool]:
        """(whether so many pages do not fit now, whether so many states do not fit beside them)."""
        page_chunks = ceil_div(max(0, pages - self._pages.spare), self._pages.per_chunk)
        slot_chunks = ceil_div(max(0, slots - self._slots.spare), self._slots.per_chunk)
        fresh = len(self._fresh) + self.n_chunks - self._n_begun
        return (
            page_chunks > self._room(self._pages, fresh),
            slot_chunks > self._room(self._slots, fresh - min(page_chunks, fresh)),
        )

    def alloc(self, *, pages: int, slots: int = 0) -> tuple[Int32Array, Int32Array] | None:
        """(page ids int32 [pages], slot ids int32 [slots], from 1 on), or None with nothing taken if they do not fit."""
        if any(self.lacks(pages=pages, slots=slots)):
            return None
        return self._take(self._pages, pages), self._take(self._slots, slots) + 1

    def free(self, *, pages: Int32Array = NO_IDS, slot: int = 0) -> None:
        """Give pages and a slot (0: none) back."""
        if len(pages):
            self._fresh += self._pages.give_back(pages)
        if slot:
            self._fresh += self._slots.give_back(np.array([slot - 1], np.int32))

    def page_offset_bytes(self, page: int) -> int:
        """Where a page begins in the buffer."""
        chunk, place = divmod(page, self._pages.per_chunk)
        return chunk * self.chunk_bytes + place * self.page_bytes

    def slot_offset_bytes(self, slot: int) -> int:
        """Where a state begins in the buffer."""
        chunk, place = divmod(slot - 1, self._slots.per_chunk)
        return chunk * self.chunk_bytes + place * self.slot_bytes

    def check(self) -> None:
        """Assert that chunks are free, KV's or states', each once."""
        owned = [*self._fresh, *self._pages._free, *self._slots._free]
        assert self._n_begun <= self.n_chunks
        assert sorted(owned) == list(range(self._n_begun)), "a host chunk is lost or has two owners"

    def _take(self, kind: _Kind, n: int) -> Int32Array:
        needed = ceil_div(max(0, n - kind.spare), kind.per_chunk)
        return kind.take(n, [self._fresh.pop() if self._fresh else self._begin() for _ in range(needed)])

    def _begin(self) -> int:
        """The lowest chunk that was nobody's yet."""
        self._n_begun += 1
        return self._n_begun - 1

    def _room(self, kind: _Kind, fresh: int) -> int:
        return fresh if kind.limit is None else min(fresh, max(0, kind.limit - kind.chunks))
