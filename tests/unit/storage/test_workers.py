import threading
from pathlib import Path

import pytest

from tests.unit.storage.small import SMALL, chain_infos, longest_end, put_chain, same, segment, store_at
from twinpool.sched.disk import longest_wait_s
from twinpool.storage.format import Segment
from twinpool.storage.keys import SegmentInfo
from twinpool.storage.store import DiskStore
from twinpool.storage.workers import Prefetcher, StoreWriter

TOKENS = list(range(1000, 1400))
PAYLOAD_BYTES = SMALL.page_bytes + SMALL.slot_bytes  # of one page
LONG_S = 60.0


class Gate(DiskStore):
    """A store whose puts and reads wait until they are let through; `entered` says that one waits or has passed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, limit_bytes=1 << 30, fingerprint=SMALL)
        self.gate, self.entered = threading.Semaphore(0), threading.Semaphore(0)

    def put(self, segment: Segment) -> bool:
        self._pass()
        return super().put(segment)

    def read(self, info: SegmentInfo) -> Segment | None:
        self._pass()
        return super().read(info)

    def _pass(self) -> None:
        self.entered.release()
        assert self.gate.acquire(timeout=LONG_S)


def test_offers_are_written_in_order(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=1 << 20)
    assert all(writer.offer(segment(info)) for info in chain_infos(store, TOKENS, range(4, 400, 4)))
    assert writer.flush(LONG_S)
    assert longest_end(store, TOKENS) == 396
    assert (writer.pending_bytes, writer.dropped) == (0, 0)
    writer.close(LONG_S)
    assert not writer.offer(segment(chain_infos(store, TOKENS, [4])[0]))


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    store = Gate(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=2 * PAYLOAD_BYTES)
    infos = chain_infos(store, TOKENS, [4, 8, 12])
    assert [writer.offer(segment(info)) for info in infos] == [True, True, False]
    assert (writer.pending_bytes, writer.dropped) == (2 * PAYLOAD_BYTES, 1)
    assert not writer.flush(0.01)
    store.gate.release(2)
    writer.close(LONG_S)
    assert longest_end(store, TOKENS) == 8


def test_a_segment_larger_than_the_queue_is_taken_alone(tmp_path: Path) -> None:
    store = Gate(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=1)
    offers = [chain_infos(store, TOKENS, [end])[0] for end in (400, 4)]
    assert [writer.offer(segment(info)) for info in offers] == [True, False]
    store.gate.release()
    writer.close(LONG_S)
    assert longest_end(store, TOKENS) == 400


def test_closing_in_a_hurry_drops_what_waits(tmp_path: Path) -> None:
    store = Gate(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=1 << 20)
    for info in chain_infos(store, TOKENS, [4, 8, 12]):
        writer.offer(segment(info))
    assert store.entered.acquire(timeout=LONG_S)
    writer.close(0.01)
    store.gate.release(3)
    writer.close(LONG_S)
    assert longest_end(store, TOKENS) == 4
    assert writer.pending_bytes == 0


def test_an_idle_writer_learns_of_other_servers(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    seen = threading.Event()
    refresh = store.refresh
    store.refresh = lambda: (refresh(), seen.set())[0]  # type: ignore[method-assign]
    writer = StoreWriter(store, max_pending_bytes=1, refresh_s=0.01)
    put_chain(store_at(tmp_path), TOKENS, [64])
    seen.clear()
    assert seen.wait(LONG_S)
    seen.clear()
    assert seen.wait(LONG_S)
    assert longest_end(store, TOKENS) == 64
    writer.close(LONG_S)


def test_a_busy_writer_learns_of_other_servers(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    put_chain(store_at(tmp_path), [1, 2, 3, 4], [4])
    writer = StoreWriter(store, max_pending_bytes=1 << 20, refresh_s=LONG_S)
    for info in chain_infos(store, TOKENS, range(4, 260, 4)):
        writer.offer(segment(info))
    writer.close(LONG_S)
    assert longest_end(store, [1, 2, 3, 4]) == 4


def test_a_wrong_segment_is_refused_where_it_is_offered(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    writer = StoreWriter(store, max_pending_bytes=1)
    with pytest.raises(AssertionError, match="state of a segment"):
        writer.offer(Segment(store.hashes(TOKENS).info(0, 4), bytes(32), b""))
    writer.close(LONG_S)


def test_a_chain_is_fetched(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    infos = put_chain(store, TOKENS, [64, 100, 300])
    prefetcher = Prefetcher(store)
    fetch = prefetcher.start(infos[1:])
    read = fetch.wait(LONG_S)
    assert [same(segment, info) for segment, info in zip(read, infos[1:], strict=True)] == [True, True]
    assert fetch.poll() == read
    assert longest_wait_s(infos[1:]) == 1 + 0.25 * 236 / 1024
    assert prefetcher.start([]).wait(LONG_S) == ()
    prefetcher.close()


def test_a_fetch_ends_at_the_first_miss(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    infos = put_chain(store, TOKENS, [64, 100, 300])
    next(tmp_path.glob("*-64-100.safetensors")).write_bytes(b"")
    prefetcher = Prefetcher(store)
    assert [segment.info for segment in prefetcher.start(infos).wait(LONG_S)] == infos[:1]
    prefetcher.close()


def test_a_wait_that_ends_gives_what_was_read_and_reads_no_more(tmp_path: Path) -> None:
    store = Gate(tmp_path)
    store.gate.release(3)
    infos = put_chain(store, TOKENS, [64, 100, 300])
    prefetcher = Prefetcher(store, n_threads=1)
    store.gate.release()
    fetch = prefetcher.start(infos)
    for _ in range(5):  # three puts, one read, and a second read that waits
        assert store.entered.acquire(timeout=LONG_S)
    assert fetch.poll() is None
    assert [segment.info for segment in fetch.wait(0.0)] == infos[:1]
    store.gate.release(2)
    prefetcher.close()
    assert fetch.poll() == ()
    assert store.stats.read == 2


def test_cancelled_and_closed_fetches_read_nothing(tmp_path: Path) -> None:
    store = Gate(tmp_path)
    store.gate.release()
    infos = put_chain(store, TOKENS, [64])
    prefetcher = Prefetcher(store, n_threads=1)
    reading, waiting, left = (prefetcher.start(infos) for _ in range(3))
    assert store.entered.acquire(timeout=LONG_S)
    assert store.entered.acquire(timeout=LONG_S)
    reading.cancel()
    waiting.cancel()
    threading.Timer(0.05, store.gate.release).start()
    prefetcher.close()
    assert [fetch.poll() for fetch in (reading, waiting, left)] == [(), (), ()]
    assert store.stats.read == 1


def test_a_bug_in_the_thread_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(tmp_path)
    infos = put_chain(store, TOKENS, [64])
    monkeypatch.setattr(store, "read", lambda info: 1 // 0)
    prefetcher = Prefetcher(store)
    with pytest.raises(ZeroDivisionError):
        prefetcher.start(infos).wait(LONG_S)
    prefetcher.close()
