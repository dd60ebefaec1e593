"""Threads beside the engine: one that writes segments from a bounded queue, and a few that read chains ahead of their requests."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures

from twinpool.storage.backlog import Backlog
from twinpool.storage.format import Segment, check_segment, file_bytes, payload_bytes
from twinpool.storage.keys import SegmentInfo
from twinpool.storage.read_room import ReadRoom
from twinpool.storage.store import DiskStore

_REFRESH_SEGMENTS = 64  # a busy writer looks at the folder again after so many
READERS = 2  # threads
_PATIENCE_S = 5.0  # with a file that is being read when nobody wants it any more


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


class _Readers:
    """Runs calls in threads. Those of concurrent.futures would keep the process from ending while a disk does not answer."""

    def __init__(self, n_threads: int) -> None:
        self._calls: queue.SimpleQueue[tuple[futures.Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name="twinpool-disk-reader", daemon=True) for _ in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], None]) -> futures.Future[None]:
        """Queue a call; the future can be cancelled until it begins."""
        future: futures.Future[None] = futures.Future()
        self._calls.put((future, call))
        return future

    def close(self, timeout_s: float) -> None:
        """Drop what has not begun, and wait so long for what has."""
        with contextlib.suppress(queue.Empty):
            while (waiting := self._calls.get_nowait()) is not None:
                waiting[0].cancel()
        for _ in self._threads:
            self._calls.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while (one := self._calls.get()) is not None:
            future, call = one
            if not future.set_running_or_notify_cancel():
                continue
            try:
                call()
            except BaseException as error:  # whoever waits must hear of it
                future.set_exception(error)
            else:
                future.set_result(None)


class Fetch:
    """A chain being read. What was read is at every moment a prefix of the chain, and as such can be restored."""

    def __init__(
        self, store: DiskStore, infos: Sequence[SegmentInfo], *, readers: _Readers, room: ReadRoom,
        room_changed: threading.Condition,
    ) -> None:  # fmt: skip
        self._store, self._infos = store, tuple(infos)
        self._room, self._room_changed = room, room_changed
        self._segments: list[Segment] = []
        self._cancelled = threading.Event()
        with room_changed:
            room.queue(self, sum(file_bytes(info, store.fingerprint) for info in self._infos))
        self._future = readers.submit(self._run)

    def poll(self) -> tuple[Segment, ...] | None:
        """The segments that could be read, root first, up to the first miss; None while it is still reading."""
        if self._cancelled.is_set() or self._future.cancelled():
            return ()
        if not self._future.done():
            return None
        self._leave_room()
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
        self._leave_room()

    def _leave_room(self) -> None:
        with self._room_changed:
            self._room.leave(self)
            self._room_changed.notify_all()

    def _begin(self) -> bool:
        """Wait for room; False: nobody wants it any more."""
        with self._room_changed:
            self._room_changed.wait_for(lambda: not self._room.waits(self) or self._room.is_next(self))
            begins = self._room.waits(self)
            if begins:
                self._room.begin(self)
                self._room_changed.notify_all()
            return begins

    def _run(self) -> None:
        if not self._begin():
            return
        for info in self._infos:
            segment = None if self._cancelled.is_set() else self._store.read(info)
            if segment is None or self._cancelled.is_set():
                return
            self._segments.append(segment)


class Prefetcher:
    """Reads chains in threads. max_held_bytes: of what is read and not fetched yet (storage/read_room.py)."""

    def __init__(self, store: DiskStore, *, max_held_bytes: int, n_threads: int = READERS) -> None:
        self._store = store
        self._room, self._room_changed = ReadRoom(most_bytes=max_held_bytes), threading.Condition()
        self._readers = _Readers(n_threads)

    def start(self, infos: Sequence[SegmentInfo]) -> Fetch:
        """Begin to read a chain, or its end: what DiskStore.longest found, less what is in memory already. Order is kept."""
        return Fetch(self._store, infos, readers=self._readers, room=self._room, room_changed=self._room_changed)

    def close(self) -> None:
        """Stop: what has not begun is not read, what is being read ends first, if it does within some seconds."""
        with self._room_changed:
            self._room.close()
            self._room_changed.notify_all()
        self._readers.close(_PATIENCE_S)
