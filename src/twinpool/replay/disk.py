"""The disk tier in virtual time: the server's own rules (sched/disk.py, storage/shelf.py), and files that are only counted.

One writer and as many readers as the server has threads. Each direction of the disk moves one file at a time at its full rate; what a
file costs before its first byte is waited for by its own thread only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from twinpool.clock import Clock
from twinpool.prefix.stored import StoredSegment
from twinpool.replay.agenda import Agenda
from twinpool.replay.disk_keys import TokenSums
from twinpool.replay.disk_link import DiskLink
from twinpool.request import Int32Array
from twinpool.sched.disk import MAX_FETCHED_BYTES, MAX_PENDING_BYTES, PREFETCH_THRESHOLD_TOKENS, StorageTier
from twinpool.sched.storage import Lost
from twinpool.step import StoreCopy
from twinpool.storage.backlog import Backlog
from twinpool.storage.format import Segment, file_bytes, payload_bytes
from twinpool.storage.keys import Fingerprint, SegmentInfo
from twinpool.storage.read_room import ReadRoom
from twinpool.storage.shelf import DiskStats, Shelf
from twinpool.storage.workers import READERS

_NOTHING = memoryview(b"")  # replay moves no bytes


class SimDisk(StorageTier):
    """A disk that is empty at the start. limit_bytes: of all its files; link: how fast it is; policy: how long requests wait."""

    def __init__(
        self, *, clock: Clock, limit_bytes: int, fingerprint: Fingerprint, link: DiskLink, policy: str,
        threshold_tokens: int = PREFETCH_THRESHOLD_TOKENS,
    ) -> None:  # fmt: skip
        """Raises ConfigError for a limit below one page and one state."""
        self.link = link
        self.agenda = Agenda(clock)
        self.shelf = _Shelf(limit_bytes=limit_bytes, fingerprint=fingerprint, agenda=self.agenda)
        self.writer = _Writer(self.shelf, self.agenda, link)
        self.readers = _Readers(self.shelf, self.agenda, link)
        super().__init__(
            store=self.shelf, writer=self.writer, prefetcher=self.readers, clock=clock, policy=policy,
            threshold_tokens=threshold_tokens,
        )  # fmt: skip

    @property
    def next_s(self) -> float:
        """When something may change for a request that waits, if nobody does anything; infinity when nothing will."""
        self.agenda.catch_up()
        known_s = [one.until_s for one in self._waiting.values()]
        return min([math.inf if self.agenda.next_s is None else self.agenda.next_s, *known_s])

    @property
    def stats(self) -> DiskStats:
        """Counts now."""
        self.agenda.catch_up()
        return self.shelf.stats

    @property
    def most_aside_bytes(self) -> int:
        """At most so many bytes of segments were neither in the tiers' memory nor on the disk, but on their way."""
        return self.writer.aside.most_bytes + self.readers.aside.most_bytes

    def give(self, order: StoreCopy, when_s: float) -> None:
        """Obey an order of a step that begins then."""
        fingerprint, aside = self.shelf.fingerprint, self.writer.aside
        size_bytes = len(order.pages) * fingerprint.page_bytes + fingerprint.slot_bytes
        aside.add(size_bytes)

        def put() -> None:
            aside.add(-size_bytes)
            self.put(order, _NOTHING, _NOTHING)

        self.agenda.at(when_s, put)

    def look(self, rid: int, tokens: Int32Array, *, in_memory_tokens: int, kv_tokens: int) -> None:
        """Begin to read what goes on where memory ends."""
        self.agenda.catch_up()
        super().look(rid, tokens, in_memory_tokens=in_memory_tokens, kv_tokens=kv_tokens)

    def poll(self, rid: int) -> Sequence[StoredSegment] | None:
        """What was read by now; None: still reading, and the policy says wait."""
        self.agenda.catch_up()
        return super().poll(rid)

    def lost(self) -> Sequence[Lost]:
        """What was dropped or refused since the last call."""
        self.agenda.catch_up()
        return super().lost()


class _Shelf(Shelf):
    """Without files: bytes are there when the index says so."""

    def __init__(self, *, limit_bytes: int, fingerprint: Fingerprint, agenda: Agenda) -> None:
        super().__init__(limit_bytes=limit_bytes, fingerprint=fingerprint)
        self._agenda = agenda

    @property
    def now_ns(self) -> int:
        """The disk's clock."""
        return int(self._agenda.now_s * 1e9)

    def hashes(self, tokens: Sequence[int] | Int32Array = ()) -> TokenSums:
        """Names of a token sequence's prefixes."""
        return TokenSums(tokens)

    def has(self, info: SegmentInfo) -> bool:
        """Whether this very segment could be read now."""
        entry = self._index.get(info.key)
        return entry is not None and entry.info == info

    def _touch(self, info: SegmentInfo) -> int | None:
        return self.now_ns

    def _remove(self, infos: Iterable[SegmentInfo]) -> None:
        for _ in infos:
            pass


@dataclass(slots=True)
class _Aside:
    """Bytes that somebody holds, now and at most."""

    now_bytes: int = 0
    most_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """So many more (or fewer)."""
        self.now_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.now_bytes)


class _Writer:
    """As storage.workers.StoreWriter: in order, one after another, at most MAX_PENDING_BYTES waiting."""

    def __init__(self, shelf: _Shelf, agenda: Agenda, link: DiskLink) -> None:
        self._shelf, self._agenda, self._link = shelf, agenda, link
        self.queue: Backlog[tuple[SegmentInfo, Callable[[], None]]] = Backlog(most_bytes=MAX_PENDING_BYTES)
        self.aside = _Aside()
        self.written_bytes = 0

    def offer(self, segment: Segment, *, refused: Callable[[], None]) -> bool:
        """Take a segment for writing; False: the queue is full."""
        size_bytes = payload_bytes(segment.info, self._shelf.fingerprint)
        if not self.queue.take((segment.info, refused), size_bytes=size_bytes):
            return False
        self.aside.add(size_bytes)
        if len(self.queue) == 1:
            self._begin()
        return True

    def _begin(self) -> None:
        """Begin to write the first that is to be written."""
        while self.queue:
            info, refused = self.queue.first
            if self._shelf.begin_put(info):
                size_bytes = file_bytes(info, self._shelf.fingerprint)
                took_s = self._link.latency_s + size_bytes / self._link.write_bytes_per_s
                self._agenda.at(self._agenda.now_s + took_s, self._end)
                return
            refused()
            self._done(info)

    def _end(self) -> None:
        info, _ = self.queue.first
        self._shelf.end_put(info, written_ns=self._shelf.now_ns)
        self.written_bytes += file_bytes(info, self._shelf.fingerprint)
        self._done(info)
        self._begin()

    def _done(self, info: SegmentInfo) -> None:
        self.queue.done()
        self.aside.add(-payload_bytes(info, self._shelf.fingerprint))


@dataclass(slots=True, eq=False)
class _Fetch:
    """A chain being read: as storage.workers.Fetch. held_bytes: of what was read, and of what is being read."""

    infos: tuple[SegmentInfo, ...]
    aside: _Aside
    left: Callable[[_Fetch], None]  # told when it is fetched or given up
    read: list[Segment] = field(default_factory=list)
    held_bytes: int = 0
    ended: bool = False
    cancelled: bool = False

    def poll(self) -> Sequence[Segment] | None:
        """The segments that could be read; None while it is still reading."""
        return self.wait(0.0) if self.ended else None

    def wait(self, timeout_s: float) -> Sequence[Segment]:
        """What was read by now; no more is read."""
        read = tuple(self.read)
        self.cancel()
        return read

    def cancel(self) -> None:
        """Read no more and let go of what was read."""
        self.cancelled = True
        self.read.clear()
        self.hold(-self.held_bytes)
        self.left(self)

    def hold(self, size_bytes: int) -> None:
        """So many bytes more are held."""
        self.held_bytes += size_bytes
        self.aside.add(size_bytes)


class _Readers:
    """As storage.workers.Prefetcher: READERS chains at once, the others wait in order, and for MAX_FETCHED_BYTES of room."""

    def __init__(self, shelf: _Shelf, agenda: Agenda, link: DiskLink) -> None:
        self._shelf, self._agenda, self._link = shelf, agenda, link
        self.aside = _Aside()
        self.read_bytes = 0
        self._idle = READERS
        self._queue: deque[_Fetch] = deque()
        self._room = ReadRoom(most_bytes=MAX_FETCHED_BYTES)
        self._free_s = 0.0  # until then the disk is busy reading

    def start(self, infos: Sequence[SegmentInfo]) -> _Fetch:
        """Begin to read a chain, or its end."""
        fetch = _Fetch(tuple(infos), self.aside, self._left)
        self._queue.append(fetch)
        self._room.queue(fetch, sum(file_bytes(info, self._shelf.fingerprint) for info in fetch.infos))
        self._serve()
        return fetch

    def _serve(self) -> None:
        while self._idle and self._queue:
            fetch = self._queue[0]
            if self._room.waits(fetch):
                if not self._room.is_next(fetch):
                    return
                self._room.begin(fetch)
            self._idle -= self._read(self._queue.popleft(), 0)

    def _left(self, fetch: _Fetch) -> None:
        self._room.leave(fetch)
        self._serve()

    def _read(self, fetch: _Fetch, place: int) -> bool:
        """Begin to read a chain's segment; False: the chain is at its end, given up, or its next segment has been evicted."""
        if fetch.cancelled or place == len(fetch.infos) or not self._shelf.has(fetch.infos[place]):
            fetch.ended = True
            return False
        info = fetch.infos[place]
        fetch.hold(payload_bytes(info, self._shelf.fingerprint))
        size_bytes = file_bytes(info, self._shelf.fingerprint)
        begins_s = max(self._agenda.now_s + self._link.latency_s, self._free_s)
        self._free_s = begins_s + size_bytes / self._link.read_bytes_per_s

        def has_read() -> None:
            self._shelf.was_read(info)
            self.read_bytes += size_bytes
            if not fetch.cancelled:
                fetch.read.append(Segment(info, b"", b""))
            if not self._read(fetch, place + 1):
                self._idle += 1
                self._serve()

        self._agenda.at(self._free_s, has_read)
        return True
