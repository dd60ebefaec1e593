"""What is on disk, held in memory: segments by key, their children, the longest chain of a prompt, and who is evicted next."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from twinpool.storage.keys import GRID_TOKENS, ChainHash, SegmentInfo


@dataclass(frozen=True, slots=True)
class Entry:
    """A segment's file: size_bytes, and used_ns, when it was last used (the folder's clock)."""

    info: SegmentInfo
    size_bytes: int
    used_ns: int


class Index:
    """One entry a key. A segment whose parent is missing is kept, found by nobody, and evicted in its turn."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._entries: dict[bytes, Entry] = {}
        self._children: dict[bytes, set[bytes]] = {}  # key: keys of present segments that begin where it ends
        self._ends: dict[bytes, Counter[int]] = {}  # grid key: ends of the segments that have it, and how many of each

    def __len__(self) -> int:
        """Segments."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """All entries, in no order."""
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        """The entry of a key."""
        return self._entries.get(key)

    def add(self, entry: Entry) -> Entry | None:
        """Enter a segment; returns the one that had its key."""
        info = entry.info
        before = self.remove(info.key)
        self._entries[info.key] = entry
        self._children.setdefault(info.parent_key, set()).add(info.key)
        self._ends.setdefault(info.grid_key, Counter())[info.end] += 1
        self.size_bytes += entry.size_bytes
        return before

    def remove(self, key: bytes) -> Entry | None:
        """Forget a segment; returns it, or None when it is not here."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        info = entry.info
        siblings, ends = self._children[info.parent_key], self._ends[info.grid_key]
        siblings.discard(key)
        ends[info.end] -= 1
        if not siblings:
            del self._children[info.parent_key]
        if not ends[info.end]:
            del ends[info.end]
        if not ends:
            del self._ends[info.grid_key]
        self.size_bytes -= entry.size_bytes
        return entry

    def mark_used(self, key: bytes, used_ns: int) -> None:
        """Note a use of a segment, unless a later one is known or it is not here."""
        entry = self._entries.get(key)
        if entry is not None and entry.used_ns < used_ns:
            self._entries[key] = replace(entry, used_ns=used_ns)

    def with_descendants(self, key: bytes) -> list[bytes]:
        """Keys of a segment and of all that needs it, if they are here."""
        found = [key]
        for parent in found:  # grows as it goes
            found += self._children.get(parent, ())
        return [key for key in found if key in self._entries]

    def chain(self, key: bytes, *, broken: set[bytes] | None = None) -> tuple[SegmentInfo, ...]:
        """The segments that rebuild a prefix, root first; empty when one is missing.

        broken: keys known to have no chain; those found out now are added.
        """
        infos: list[SegmentInfo] = []
        broken = set() if broken is None else broken
        start: int | None = None
        while key not in broken:
            entry = self._entries.get(key)
            if entry is None or (start is not None and entry.info.end != start):
                break
            infos.append(entry.info)
            key, start = entry.info.parent_key, entry.info.start
            if start == 0:
                return tuple(reversed(infos))
        broken |= {info.key for info in infos}
        return ()

    def longest(self, hashes: ChainHash, *, at_most_tokens: int) -> tuple[SegmentInfo, ...]:
        """The chain of the longest prefix of at most so many tokens that can be rebuilt; empty when there is none."""
        broken: set[bytes] = set()
        limit = min(at_most_tokens, len(hashes))
        for grid_end in range(limit // GRID_TOKENS * GRID_TOKENS, -1, -GRID_TOKENS):
            for end in sorted(self._ends.get(hashes.grid_key(grid_end), ()), reverse=True):
                chain = self.chain(hashes.key(end), broken=broken) if end <= limit else ()
                if chain:
                    return chain
        return ()

    def victims(self, needed_bytes: int, *, keep: Container[bytes] = ()) -> list[Entry] | None:
        """Least recently used entries of at least so many bytes, each after all that need it; None when there are not enough.

        keep: keys that are not touched.
        """
        if needed_bytes <= 0:
            return []
        victims: list[Entry] = []
        heap = [_order(entry) for key, entry in self._entries.items() if key not in self._children]
        heapq.heapify(heap)
        left = {key: len(children) for key, children in self._children.items()}
        while needed_bytes > 0 and heap:
            key = heapq.heappop(heap)[-1]
            if key in keep:
                continue
            entry = self._entries[key]
            victims.append(entry)
            needed_bytes -= entry.size_bytes
            parent_key = entry.info.parent_key
            left[parent_key] -= 1
            parent = self._entries.get(parent_key)
            if parent is not None and not left[parent_key]:
                heapq.heappush(heap, _order(parent))
        return victims if needed_bytes <= 0 else None


def _order(entry: Entry) -> tuple[int, int, bytes]:
    """Oldest first; of one age, the longest prefix first."""
    return entry.used_ns, -entry.info.end, entry.info.key
