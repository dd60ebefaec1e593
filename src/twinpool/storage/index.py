"""What is on disk, held in memory: segments by key, their children, the longest chain of a prompt, and who is evicted next."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from twinpool.storage.keys import GRID_TOKENS, PrefixKeys, SegmentInfo

_Order = tuple[int, int, bytes]
_FEW = 64  # the order of eviction is not cleared of outdated entries before it has so many


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
        self._leaves: list[_Order] = []  # a heap of those that nobody needs, with outdated entries

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
        self._offer(entry)
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
        parent = self._entries.get(info.parent_key)
        if parent is not None:
            self._offer(parent)
        return entry

    def mark_used(self, key: bytes, used_ns: int) -> None:
        """Note a use of a segment, unless a later one is known or it is not here."""
        entry = self._entries.get(key)
        if entry is not None and entry.used_ns < used_ns:
            self._entries[key] = used = replace(entry, used_ns=used_ns)
            self._offer(used)

    def with_descendants(self, key: bytes) -> list[bytes]:
        """Keys of a segment and of all that needs it, if they are here."""
        found = [key]
        seen = {key}  # names that nobody of us gave may say that two need each other
        for parent in found:  # grows as it goes
            found += self._children.get(parent, set()) - seen
            seen.update(found)
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

    def longest(self, hashes: PrefixKeys, *, at_most_tokens: int) -> tuple[SegmentInfo, ...]:
        """The chain of the longest prefix of at most so many tokens that can be rebuilt; empty when there is none."""
        broken: set[bytes] = set()
        limit = min(at_most_tokens, len(hashes))
        for grid_end in range(limit // GRID_TOKENS * GRID_TOKENS, -1, -GRID_TOKENS):
            for end in sorted(self._ends.get(hashes.grid_key(grid_end), ()), reverse=True):
                chain = self.chain(hashes.key(end), broken=broken) if end <= limit else ()
                if chain and chain[-1].end == end:  # a name that nobody of us gave may have the key of another length
                    return chain
        return ()

    def victims(self, needed_bytes: int, *, keep: Container[bytes] = ()) -> list[Entry] | None:
        """Least recently used entries of at least so many bytes, each after all that need it; None when there are not enough.

        keep: keys that are not touched.
        """
        victims: list[Entry] = []
        seen: list[_Order] = []
        seen_keys: set[bytes] = set()
        left: dict[bytes, int] = {}  # of a parent of victims: its children that are none
        while needed_bytes > 0 and self._leaves:
            order = heapq.heappop(self._leaves)
            key = order[-1]
            entry = self._entries.get(key)
            is_needed = left[key] > 0 if key in left else key in self._children
            if entry is None or _order(entry) != order or is_needed or key in seen_keys:
                continue  # outdated
            seen.append(order)
            seen_keys.add(key)
            if key in keep:
                continue
            victims.append(entry)
            needed_bytes -= entry.size_bytes
            parent_key = entry.info.parent_key
            left[parent_key] = left.get(parent_key, len(self._children[parent_key])) - 1
            parent = self._entries.get(parent_key)
            if parent is not None and not left[parent_key]:
                heapq.heappush(self._leaves, _order(parent))
        for order in seen:  # nothing has been removed
            heapq.heappush(self._leaves, order)
        return victims if needed_bytes <= 0 else None

    def _offer(self, entry: Entry) -> None:
        """An entry may have become the next to go, or has another place in the order."""
        if entry.info.key in self._children:
            return
        heapq.heappush(self._leaves, _order(entry))
        if len(self._leaves) > 2 * len(self._entries) + _FEW:
            self._leaves = [_order(one) for key, one in self._entries.items() if key not in self._children]
            heapq.heapify(self._leaves)


def _order(entry: Entry) -> _Order:
    """Oldest first; of one age, the longest prefix first."""
    return entry.used_ns, -entry.info.end, entry.info.key
