"""The disk tier: segments of conversations in a folder, bounded in bytes, shared by servers, kept over restarts and kills.

A segment is what one checkpoint adds: the KV of tokens [start, end) and the state after `end`. It is of use only above a chain of
segments from token 0, so a segment is taken only when its parent is here, and evicted only after its children.

After the constructor nothing raises for trouble with the disk: it is counted, logged once a kind, and is a miss.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool.errors import ConfigError
from twinpool.request import Int32Array
from twinpool.storage import files
from twinpool.storage.backoff import Backoff
from twinpool.storage.format import (
    Segment,
    check_segment,
    decode,
    encode,
    file_bytes,
    file_name,
    parse_name,
    smallest_file_bytes,
)
from twinpool.storage.index import Entry, Index
from twinpool.storage.keys import ChainHash, Fingerprint, SegmentInfo
from twinpool.units import as_gb, format_bytes

log = logging.getLogger("twinpool.storage")


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


class DiskStore:
    """Segments of one model in a folder that other models and servers may use too. Every method may be called from any thread.

    limit_bytes holds for all segments in the folder, whoever wrote them; two servers may go over it for as long as they have not yet
    seen each other's files (`refresh`).
    """

    def __init__(self, path: Path, *, limit_bytes: int, fingerprint: Fingerprint) -> None:
        """Make the folder, read its listing. Raises ConfigError: no such folder can be made or written, or the limit is too small."""
        _check_limit(limit_bytes, fingerprint)
        self.path, self.limit_bytes, self.fingerprint = path, limit_bytes, fingerprint
        self._lock = (
            threading.Lock()
        )  # of the index and the counts; never held while a file is read, written or removed
        self._index = Index()
        self._counts: Counter[str] = Counter()
        self._backoff = Backoff()
        self._reserved_bytes = 0  # of files being written
        self._last_used_ns = 0
        self._said: set[int | None] = set()
        try:
            path.mkdir(parents=True, exist_ok=True)
            files.probe(path)
        except OSError as error:
            raise ConfigError(
                f"The disk tier needs a folder that can be made and written, and '{path}' is not one ({error.strerror}): "
                "give --hicache-storage-path another."
            ) from error
        self.refresh()

    def hashes(self, tokens: Sequence[int] | Int32Array = ()) -> ChainHash:
        """Hashes of a token sequence for this store; they may be extended and used again."""
        return ChainHash(self.fingerprint, tokens)

    def longest(self, hashes: ChainHash, *, at_most_tokens: int | None = None) -> tuple[SegmentInfo, ...]:
        """The segments, root first, of the longest prefix that can be restored; empty when there is none. Reads no file."""
        with self._lock:
            return self._index.longest(hashes, at_most_tokens=len(hashes) if at_most_tokens is None else at_most_tokens)

    def put(self, segment: Segment) -> bool:
        """Write a segment; False: it is here already, or its parent is not, or there is no room, or the disk is in trouble.

        After a write that failed others are not tried for a while (storage/backoff.py): nothing is evicted for what will not be written.
        """
        check_segment(segment, self.fingerprint)
        info = segment.info
        if self._is_here(info) or self._is_paused() or not self._reserve(info):
            return False
        try:
            written_ns = files.write_whole(self.path, file_name(info), encode(segment, self.fingerprint))
        except OSError as error:
            self._trouble(error)
            self._release(info, written_ns=None)
            return False
        self._release(info, written_ns=written_ns)
        return True

    def read(self, info: SegmentInfo) -> Segment | None:
        """Read and verify a segment, and mark it used; None when that is not possible.

        A damaged file is removed, and so are the segments that need it. The bytes are the caller's: nothing here changes them.
        """
        path = self.path / file_name(info)
        try:
            data = files.read_whole(path, file_bytes(info, self.fingerprint))
        except FileNotFoundError:
            self._vanished(info)
            return None
        except OSError as error:
            self._trouble(error)
            return None
        segment = decode(data, info, self.fingerprint) if data is not None else None
        if segment is None:
            self._damaged(info)
            return None
        self._count("read")
        self.touch([info])
        return segment

    def touch(self, infos: Iterable[SegmentInfo]) -> None:
        """Mark segments as used now, for all servers."""
        for info in infos:
            try:
                used_ns = files.touch(self.path / file_name(info))
            except FileNotFoundError:
                self._vanished(info)
            except OSError as error:
                self._trouble(error)
            else:
                with self._lock:
                    self._index.mark_used(info.key, self._stamp(used_ns))

    def refresh(self) -> None:
        """Look at the folder again: learn what other servers wrote and removed, clean up after dead ones, keep to the limit.

        Takes milliseconds for thousands of files; the writer's thread calls it at intervals.
        """
        with self._lock:
            known = {entry.info.key for entry in self._index}
        try:
            listed = files.list_folder(self.path)
            found, spare = _segments_of(listed)
            self._learn(found, known)
            leftovers = files.remove_leftovers(self.path, listed)
        except OSError as error:
            self._trouble(error)
            return
        self._count("leftovers", leftovers)
        with self._lock:
            victims = self._make_room(0, keep=()) or []
        self._remove([*spare, *(entry.info for entry in victims)])

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

    def _is_paused(self) -> bool:
        """Whether a write failed a short while ago; then this put is counted as not tried."""
        with self._lock:
            pauses = self._backoff.pauses
            self._counts["paused"] += pauses
        return pauses

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

    def _release(self, info: SegmentInfo, *, written_ns: int | None) -> None:
        """End a reservation; the segment is entered if it was written, and otherwise writing pauses."""
        size_bytes = file_bytes(info, self.fingerprint)
        replaced = None
        with self._lock:
            self._reserved_bytes -= size_bytes
            if written_ns is None:
                self._backoff.failed()
            else:
                self._backoff.worked()
                replaced = self._index.add(Entry(info, size_bytes, self._stamp(written_ns)))
                self._counts["written"] += 1
                self._counts["written_tokens"] += info.end - info.start
        if replaced is not None and replaced.info != info:
            self._remove([replaced.info])

    def _make_room(self, size_bytes: int, *, keep: Iterable[bytes]) -> list[Entry] | None:
        """Forget the victims of so many more bytes, whose files the caller removes; None: not enough may go. Lock held."""
        needed = self._index.size_bytes + self._reserved_bytes + size_bytes - self.limit_bytes
        victims = self._index.victims(needed, keep=frozenset(keep))
        for entry in victims or ():
            self._index.remove(entry.info.key)
        self._counts["evicted"] += len(victims or ())
        return victims

    def _learn(self, found: dict[bytes, Entry], known: set[bytes]) -> None:
        """Make the index what the folder was. known: keys before it was listed; what came or went since then is left alone."""
        with self._lock:
            for key in known - found.keys():
                self._counts["vanished"] += self._index.remove(key) is not None
            for key, entry in found.items():
                here = self._index.get(key)
                if here is None and key in known:
                    continue
                if here is None or (here.info, here.size_bytes) != (entry.info, entry.size_bytes):
                    self._index.add(entry)
                self._index.mark_used(key, entry.used_ns)
            self._last_used_ns = max([self._last_used_ns, *(entry.used_ns for entry in self._index)])

    def _vanished(self, info: SegmentInfo) -> None:
        """Forget a file that is gone; what needs it stays until it is needed again or evicted."""
        with self._lock:
            here = self._index.get(info.key)
            if here is not None and here.info == info:
                self._index.remove(info.key)
                self._counts["vanished"] += 1

    def _damaged(self, info: SegmentInfo) -> None:
        """Remove a file that is not what was written, and all that needs it."""
        with self._lock:
            doomed = [self._index.remove(key) for key in self._index.with_descendants(info.key)]
            self._counts["damaged"] += 1
        log.warning("The disk tier removed %s: its bytes are not those that were written.", file_name(info))
        self._remove([info, *(entry.info for entry in doomed if entry is not None)])

    def _remove(self, infos: Iterable[SegmentInfo]) -> None:
        for info in infos:
            files.remove(self.path / file_name(info))

    def _trouble(self, error: OSError) -> None:
        """Count a failure of the disk; say it the first time it is of this kind."""
        with self._lock:
            self._counts["failed"] += 1
            is_new = error.errno not in self._said
            self._said.add(error.errno)
        if is_new:
            name = errno.errorcode.get(error.errno or 0, "an error")
            log.warning("The disk tier goes on without %s: %s (%s; said once).", self.path, error.strerror, name)

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number

    def _stamp(self, used_ns: int) -> int:
        """A time of use later than all before it, as the disk's clock ticks in milliseconds. Lock held."""
        self._last_used_ns = max(used_ns, self._last_used_ns + 1)
        return self._last_used_ns


def _check_limit(limit_bytes: int, fingerprint: Fingerprint) -> None:
    smallest = smallest_file_bytes(fingerprint)
    if limit_bytes < smallest:
        raise ConfigError(
            f"The disk tier has {format_bytes(limit_bytes)} and needs room for a page and a state, {format_bytes(smallest)}: "
            f"raise --hicache-storage-size to at least {as_gb(smallest)}."
        )


def _segments_of(listed: Iterable[files.Listed]) -> tuple[dict[bytes, Entry], list[SegmentInfo]]:
    """(segments by key, files to spare: of two that end at one prefix, the one that needs more parents)."""
    found: dict[bytes, Entry] = {}
    spare: list[SegmentInfo] = []
    for file in listed:
        info = parse_name(file.name)
        if info is None:
            continue
        other = found.get(info.key)
        if other is not None and other.info.start <= info.start:
            spare.append(info)
            continue
        if other is not None:
            spare.append(other.info)
        found[info.key] = Entry(info, file.size_bytes, file.used_ns)
    return found, spare
