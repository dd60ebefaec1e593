"""What a bounded store of segments takes, drops and finds, whoever keeps the bytes: files of a folder, or nobody (replay).

A segment is what one checkpoint adds: the KV of tokens [start, end) and the state after `end`. It is of use only above a chain of
segments from token 0, so a segment is taken only when its parent is here, and evicted only after its children.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinpool.errors import ConfigError
from twinpool.request import Int32Array
from twinpool.storage.format import file_bytes, smallest_file_bytes
from twinpool.storage.index import Entry, Index
from twinpool.storage.keys import ChainHash, Fingerprint, PrefixKeys, SegmentInfo
from twinpool.units import as_gb, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """What is there, and what happened since the start, in segments; written_tokens: KV tokens of those written.

    written, read: whole and verified; already_there: a put that was not needed; evicted: by this server; no_room, no_parent: puts
    refused; paused: puts not tried, shortly after a write that failed; damaged: files that failed their checksum; vanished: files that
    somebody else removed; failed: calls that met trouble with the disk; leftovers: half-written files of dead servers, removed.
    """

    segments: int
    used_bytes: int
    limit_bytes: int
    written: int = 0
    written_tokens: int = 0
    already_there: int = 0
    read: int = 0
    evicted: int = 0
    no_room: int = 0
    no_parent: int = 0
    paused: int = 0
    damaged: int = 0
    vanished: int = 0
    failed: int = 0
    leftovers: int = 0


class Shelf(ABC):
    """Segments of one model within limit_bytes. Every method may be called from any thread.

    A put has a beginning and an end, and what lies between takes time: begin_put makes room and keeps it, end_put enters the segment
    or gives the room back. Raises ConfigError for a limit below one page and one state.
    """

    def __init__(self, *, limit_bytes: int, fingerprint: Fingerprint) -> None:
        check_limit(limit_bytes, fingerprint)
        self.limit_bytes, self.fingerprint = limit_bytes, fingerprint
        # Of the index and the counts; never held while bytes are read, written or removed.
        self._lock = threading.Lock()
        self._index = Index()
        self._counts: Counter[str] = Counter()
        self._reserved_bytes = 0  # of what is being written
        self._last_used_ns = 0

    @abstractmethod
    def _touch(self, info: SegmentInfo) -> int | None:
        """Mark the bytes of a segment as used now; returns when that was, in ns, or None when they cannot be."""

    @abstractmethod
    def _remove(self, infos: Iterable[SegmentInfo]) -> None:
        """Remove the bytes of segments."""

    def _is_paused(self) -> bool:
        """Whether nothing is to be written now."""
        return False

    def hashes(self, tokens: Sequence[int] | Int32Array = ()) -> PrefixKeys:
        """Hashes of a token sequence for this store."""
        return ChainHash(self.fingerprint, tokens)

    def longest(self, hashes: PrefixKeys, *, at_most_tokens: int | None = None) -> tuple[SegmentInfo, ...]:
        """The segments, root first, of the longest prefix that can be restored; empty when there is none. Reads no bytes."""
        with self._lock:
            chain = self._index.longest(
                hashes, at_most_tokens=len(hashes) if at_most_tokens is None else at_most_tokens
            )
        # Names are whatever somebody wrote into the folder; below this, everything is whole pages.
        return () if any(info.end % self.fingerprint.page_size for info in chain) else chain

    def begin_put(self, info: SegmentInfo) -> bool:
        """Whether a segment is to be written: it is not here yet, its parent is, and there is room, which it now has."""
        return not self._is_here(info) and not self._is_paused() and self._reserve(info)

    def end_put(self, info: SegmentInfo, *, written_ns: int | None) -> None:
        """A segment is written, at that time; None: it could not be, and its room is free again."""
        size_bytes = file_bytes(info, self.fingerprint)
        replaced = None
        with self._lock:
            self._reserved_bytes -= size_bytes
            if written_ns is not None:
                replaced = self._index.add(Entry(info, size_bytes, self._stamp(written_ns)))
                self._counts["written"] += 1
                self._counts["written_tokens"] += info.end - info.start
        if replaced is not None and replaced.info != info:
            self._remove([replaced.info])

    def was_read(self, info: SegmentInfo) -> None:
        """A segment has been read: count it, and mark it used."""
        self._count("read")
        self.touch([info])

    def touch(self, infos: Iterable[SegmentInfo]) -> None:
        """Mark segments as used now, for all servers."""
        for info in infos:
            used_ns = self._touch(info)
            if used_ns is not None:
                with self._lock:
                    self._index.mark_used(info.key, self._stamp(used_ns))

    @property
    def stats(self) -> DiskStats:
        """Counts now."""
        with self._lock:
            return DiskStats(
                segments=len(self._index),
                used_bytes=self._index.size_bytes,
                limit_bytes=self.limit_bytes,
                **self._counts,
            )

    def _is_here(self, info: SegmentInfo) -> bool:
        """Whether a segment of this prefix can be restored already; if so, it is marked used."""
        with self._lock:
            chain = self._index.chain(info.key)
        if not chain:
            return False
        self.touch(chain[-1:])
        with self._lock:
            here = self._index.get(info.key) is not None
            self._counts["already_there"] += here
        return here

    def _reserve(self, info: SegmentInfo) -> bool:
        """Make room for a segment whose parent is here, without evicting what it stands on."""
        size_bytes = file_bytes(info, self.fingerprint)
        with self._lock:
            chain = self._index.chain(info.parent_key) if info.start else ()
            if info.start and not chain:
                self._counts["no_parent"] += 1
                return False
            victims = self._make_room(size_bytes, keep={info.key for info in chain})
            if victims is None:
                self._counts["no_room"] += 1
                return False
            self._reserved_bytes += size_bytes
        self._remove(entry.info for entry in victims)
        return True

    def _make_room(self, size_bytes: int, *, keep: Iterable[bytes]) -> list[Entry] | None:
        """Forget the victims of so many more bytes, which the caller removes; None: not enough may go. Lock held."""
        needed = self._index.size_bytes + self._reserved_bytes + size_bytes - self.limit_bytes
        victims = self._index.victims(needed, keep=frozenset(keep))
        for entry in victims or ():
            self._index.remove(entry.info.key)
        self._counts["evicted"] += len(victims or ())
        return victims

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number

    def _stamp(self, used_ns: int) -> int:
        """A time of use later than all before it, as the disk's clock ticks in milliseconds. Lock held."""
        self._last_used_ns = max(used_ns, self._last_used_ns + 1)
        return self._last_used_ns


def check_limit(limit_bytes: int, fingerprint: Fingerprint) -> None:
    """Raise ConfigError for a limit below one page and one state."""
    smallest = smallest_file_bytes(fingerprint)
    if limit_bytes < smallest:
        raise ConfigError(
            f"The disk tier has {format_bytes(limit_bytes)} and needs room for a page and a state, {format_bytes(smallest)}: "
            f"raise --hicache-storage-size to at least {as_gb(smallest)}."
        )
