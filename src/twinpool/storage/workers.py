"""Threads beside the engine: one that writes segments from a bounded queue, and a few that read chains ahead of their requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent import futures

from twinpool.storage.backlog import Backlog
from twinpool.storage.format import Segment, check_segment, file_bytes, payload_bytes
from twinpool.storage.keys import SegmentInfo
from twinpool.storage.store import DiskStore

_REFRESH_SEGMENTS = 64  # a busy writer looks at the folder again after so many
READERS = 2  # threads


class StoreWriter:
    """Writes offered segments in a thread, in order. Offers beyond max_pending_bytes are dropped, and counted.

    refresh_s: how often an idle writer looks at the folder again.
    """

    def __init__(self, store: DiskStore, *, max_pending_bytes: int, refresh_s: float = 30.0) -> None:
        self._store, self._refresh_s = store, refresh_s
        self._queue: Backlog[tuple[Segment, Callable[[], None]]] = Backlog(most_bytes=max_pending_bytes)
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="twinpool-disk-writer", daemon=True)
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        """Bytes of pages and states offered and not yet written."""
        return self._queue.pending_bytes

    @property
    def dropped(self) -> int:
        """Segments that were offered and not taken."""
        return self._queue.dropped

    def offer(self, segment: Segment, *, refused: Callable[[], None] = lambda: None) -> bool:
        """Take a segment for writing; False: the queue is full. Its bytes must not change any more. Parents go before children.

        A segment larger than the whole queue is taken when nothing else waits. refused: called in the writer's thread when the
        store did not write what was taken.
        """
        check_segment(segment, self._store.fingerprint)
        with self._changed:
            if self._closed:
                self._queue.dropped += 1
                return False
            size_bytes = payload_bytes(segment.info, self._store.fingerprint)
            taken = self._queue.take((segment, refused), size_bytes=size_bytes)
            self._changed.notify_all()
            return taken

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was offered is written or refused; False: not in this time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, write what waits for at most so long, and stop. What is not written is lost, nothing is half-written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.flush(timeout_s)
        with self._changed:
            self._queue.keep_first()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        n_written = 0
        while True:
            with self._changed:
                awake = self._changed.wait_for(lambda: self._queue or self._closed, self._refresh_s)
                if awake and not self._queue:
                    return
                first = self._queue.first if self._queue else None
            if first is not None:
                self._write(*first)
                n_written += 1
            if first is None or n_written % _REFRESH_SEGMENTS == 0:
                self._store.refresh()

    def _write(self, segment: Segment, refused: Callable[[], None]) -> None:
        if not self._store.put(segment):
            refused()
        with self._changed:
            self._queue.done()
            self._changed.notify_all()


class _Room:
    """Memory for chains that are read and not fetched yet. They begin in turn, each when all of it fits beside those, or there are none:
    no two wait for each other's rest.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: dict[Fetch, int] = {}  # bytes, first come first
        self._held: dict[Fetch, int] = {}
        self._closed = False
        self._changed = threading.Condition()

    def queue(self, fetch: Fetch, size_bytes: int) -> None:
        """So many bytes will be taken."""
        with self._changed:
            self._waiting[fetch] = size_bytes

    def take(self, fetch: Fetch) -> bool:
        """Wait for the bytes; False: it was given back, or all is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or fetch not in self._waiting or self._is_next(fetch))
            if self._closed or fetch not in self._waiting:
                return False
            self._held[fetch] = self._waiting.pop(fetch)
            self._changed.notify_all()
            return True

    def give_back(self, fetch: Fetch) -> None:
        """The chain has been fetched, or nobody wants it."""
        with self._changed:
            self._waiting.pop(fetch, None)
            self._held.pop(fetch, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_next(self, fetch: Fetch) -> bool:
        fits = not self._held or sum(self._held.values()) + self._waiting[fetch] <= self._limit_bytes
        return fits and next(iter(self._waiting)) is fetch


class Fetch:
    """A chain being read. What was read is at every moment a prefix of the chain, and as such can be restored."""

    def __init__(
        self, store: DiskStore, infos: Sequence[SegmentInfo], pool: futures.ThreadPoolExecutor, room: _Room
    ) -> None:
        self._store, self._infos, self._room = store, tuple(infos), room
        self._segments: list[Segment] = []
        self._cancelled = threading.Event()
        room.queue(self, sum(file_bytes(info, store.fingerprint) for info in self._infos))
        self._future: futures.Future[None] = pool.submit(self._run)

    def poll(self) -> tuple[Segment, ...] | None:
        """The segments that could be read, root first, up to the first miss; None while it is still reading."""
        if self._cancelled.is_set() or self._future.cancelled():
            return ()
        if not self._future.done():
            return None
        self._room.give_back(self)
        self._future.result()  # a bug in the thread is a bug here
        return tuple(self._segments)

    def wait(self, timeout_s: float) -> tuple[Segment, ...]:
        """Wait at most so long; returns what was read by then, and reads no more."""
        futures.wait([self._future], timeout_s)
        read = self.poll()
        if read is None:
            read = tuple(self._segments)
            self.cancel()
        return read

    def cancel(self) -> None:
        """Read no more and let go of what was read; a file being read is read to its end first."""
        self._cancelled.set()
        self._future.cancel()
        self._segments = []
        self._room.give_back(self)

    def _run(self) -> None:
        if not self._room.take(self):
            return
        for info in self._infos:
            segment = None if self._cancelled.is_set() else self._store.read(info)
            if segment is None or self._cancelled.is_set():
                return
            self._segments.append(segment)


class Prefetcher:
    """Reads chains in threads. max_held_bytes: of what is read and not fetched yet; a longer chain is read alone."""

    def __init__(self, store: DiskStore, *, max_held_bytes: int, n_threads: int = READERS) -> None:
        self._store, self._room = store, _Room(max_held_bytes)
        self._pool = futures.ThreadPoolExecutor(n_threads, thread_name_prefix="twinpool-disk-reader")

    def start(self, infos: Sequence[SegmentInfo]) -> Fetch:
        """Begin to read a chain, or its end: what DiskStore.longest found, less what is in memory already. Order is kept."""
        return Fetch(self._store, infos, self._pool, self._room)

    def close(self) -> None:
        """Stop: what has not begun is not read, what is being read ends first."""
        self._room.close()
        self._pool.shutdown(cancel_futures=True)
